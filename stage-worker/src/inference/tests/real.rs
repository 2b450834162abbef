//! The paged engine on SmolLM2 behind the real schedule: whatever happens around a session, its
//! logits stay the same bit for bit.

use std::collections::{BTreeMap, VecDeque};

use sha2::{Digest, Sha256};
use stagebus_engine::{EngineKind, EngineOptions, Profile, StageRequest, open_backend};
use stagebus_shards::{ShardRequest, ShardSet, shard};

use super::*;

/// Tokens that each session generates.
const N_TOKENS: usize = 20;

/// Bytes of a block: 32 tokens of 12,960 bytes.
const BLOCK_BYTES: u64 = 32 * 12_960;

/// What a session gave: each token with a digest of the logits that chose it.
type Output = Vec<(u32, [u8; 32])>;

struct Talk {
    prompt: Vec<u32>,
    output: Output,
    epoch: u32,
    number: u32,
}

/// A coordinator that drives sessions and replays what was preempted.
struct Driver {
    bench: Bench,
    talks: BTreeMap<u64, Talk>,
    /// Sessions that wait for room.
    outside: VecDeque<u64>,
    done: BTreeMap<u64, Output>,
    n_preempted: usize,
}

impl Driver {
    fn new(shards: &ShardSet, n_blocks: u64) -> Self {
        let options = EngineOptions {
            profile: Profile::Fast,
            threads: Some(1),
            kv_bytes: Some(n_blocks * BLOCK_BYTES),
            ..EngineOptions::default()
        };
        let library = stagebus_settings::find_openvino().expect("run cargo xtask setup");
        let request = StageRequest { shards, stage: 0, library: Some(library.path()) };
        let backend = open_backend(EngineKind::Paged, &request, &options).expect("a stage");
        let dims = &shards.manifest.dims;
        let stage = Stage {
            vocab_size: dims.vocab_size,
            hidden_dim: dims.hidden_dim,
            eos_ids: vec![],
            context_length: dims.context_length,
            ..Stage::clone(&stage(0, 1))
        };
        let policy = Policy {
            n_stages: 1,
            max_sessions: 32,
            batch_rows: 64,
            mixes: true,
            prefill_percent: 500,
            decodes_per_prefill: 8,
        };
        let bench = Bench::over(backend, Arc::new(stage), policy, usize::MAX);
        Self {
            bench,
            talks: BTreeMap::new(),
            outside: VecDeque::new(),
            done: BTreeMap::new(),
            n_preempted: 0,
        }
    }

    fn start(&mut self, session: u64, prompt: Vec<u32>) {
        let talk = Talk { prompt, output: Vec::new(), epoch: 0, number: 0 };
        self.talks.insert(session, talk);
        self.outside.push_back(session);
        self.let_in();
    }

    /// Opens the sessions outside, as far as there is room, and sends all that they have.
    fn let_in(&mut self) {
        while let Some(session) = self.outside.pop_front() {
            let talk = &self.talks[&session];
            let mut prompt = talk.prompt.clone();
            prompt.extend(talk.output.iter().map(|(token, _)| *token));
            let request = Open {
                prompt_len: u32_of(talk.prompt.len()),
                max_len: 2048,
                head: HeadMode::Full,
                prompt,
                ..open(session, talk.epoch)
            };
            match self.bench.open_with(request) {
                Ok(cached_len) => self.replay(session, cached_len as usize),
                Err(error) => {
                    assert_eq!(error.class, ErrorClass::Overloaded, "{error}");
                    self.outside.push_front(session);
                    return;
                }
            }
        }
    }

    fn replay(&mut self, session: u64, cached_len: usize) {
        let talk = &self.talks[&session];
        let (prompt, n_output) = (talk.prompt.clone(), talk.output.len());
        let output: Vec<u32> = talk.output.iter().map(|(token, _)| *token).collect();
        for (idx, chunk) in prompt[cached_len..].chunks(100).enumerate() {
            let start = cached_len + idx * 100;
            let is_last = start + chunk.len() == prompt.len();
            self.send(session, start, Phase::Prefill, chunk, is_last && n_output == 0);
        }
        if n_output > 0 {
            self.send(session, prompt.len(), Phase::Decode, &output, true);
        }
    }

    fn send(&mut self, session: u64, start: usize, phase: Phase, tokens: &[u32], wants: bool) {
        let talk = self.talks.get_mut(&session).expect("a session");
        let mut step = step(session, talk.epoch, talk.number, u32_of(start), tokens);
        talk.number += 1;
        step.phase = phase;
        if !wants {
            step.wanted.clear();
        }
        let job = Job::new(step, None, Arc::clone(&self.bench.route), Instant::now());
        self.bench.inference.send(Command::Run(vec![job])).expect("room");
    }

    /// Handles one message and returns the sessions that came to their end.
    fn handle(&mut self) -> Vec<u64> {
        let head = self.bench.head();
        let mut ended = Vec::new();
        for fault in head.faults {
            assert_eq!(fault.error.class, ErrorClass::Preempted, "{}", fault.error);
            let session = fault.session.as_u64();
            let talk = self.talks.get_mut(&session).expect("a session");
            (talk.epoch, talk.number) = (talk.epoch + 1, 0);
            self.n_preempted += 1;
            self.outside.push_back(session);
        }
        for step in head.steps {
            let session = step.session.as_u64();
            let Some(talk) = self.talks.get_mut(&session) else { continue };
            let Some(logits) = step.logits.filter(|_| step.epoch.number() == talk.epoch) else {
                continue;
            };
            let numbers = logits.rows(0, 1);
            let token = stagebus_engine::argmax::greedy(&numbers).expect("a token");
            talk.output.push((token, Sha256::digest(&logits.data).into()));
            if talk.output.len() == N_TOKENS {
                let talk = self.talks.remove(&session).expect("a session");
                self.done.insert(session, talk.output);
                let session_id = SessionId::from_u64(session);
                self.bench.inference.send(Command::Close { session: session_id }).expect("room");
                ended.push(session);
            } else {
                let start = talk.prompt.len() + talk.output.len() - 1;
                self.send(session, start, Phase::Decode, &[token], true);
            }
        }
        if !ended.is_empty() || self.talks.len() == self.outside.len() {
            self.let_in();
        }
        ended
    }

    fn finish(&mut self) {
        while !self.talks.is_empty() {
            self.handle();
        }
    }
}

fn shards(folder: &std::path::Path) -> ShardSet {
    let runtime_dir = stagebus_settings::runtime_dir().expect("run cargo xtask setup");
    let source = runtime_dir.join("models").join("SmolLM2-135M-Instruct.Q4_1.gguf");
    let request = ShardRequest::new(source, folder.join("shards"), 1);
    shard(&request, &mut |_progress| {}).expect("a shard set");
    ShardSet::open(&request.out_dir).expect("a shard set")
}

/// A prompt of its own for each session, some with a common beginning. Its last block is nearly
/// full: every session soon needs another one.
fn prompt(session: u64) -> Vec<u32> {
    let session = u32::try_from(session).expect("small");
    let n_tokens = (session % 4) * 32 + 28;
    let begin = if session.is_multiple_of(3) { 0 } else { session * 1000 };
    (begin..begin + n_tokens).map(|i| 100 + i.wrapping_mul(2_654_435_761) % 40_000).collect()
}

#[test]
fn neighbours_and_preemption_change_no_bit_of_a_session() {
    const N_SESSIONS: u64 = 12;
    let folder = tempfile::tempdir().expect("a folder");
    let shards = shards(folder.path());

    let mut alone = Driver::new(&shards, 2000);
    for session in 0..N_SESSIONS {
        alone.start(session, prompt(session));
        alone.finish();
    }
    assert_eq!(alone.n_preempted, 0);

    // Sessions join and leave all the time: whenever one ends, the next one starts.
    let mut among = Driver::new(&shards, 2000);
    (0..6).for_each(|session| among.start(session, prompt(session)));
    let mut next = 6;
    while next < N_SESSIONS {
        for _ in among.handle() {
            among.start(next, prompt(next));
            next += 1;
        }
    }
    among.finish();
    assert_eq!(among.n_preempted, 0);
    assert_eq!(among.done, alone.done);

    // All at once into a pool that holds less than half of them.
    let mut cramped = Driver::new(&shards, 16);
    (0..N_SESSIONS).for_each(|session| cramped.start(session, prompt(session)));
    cramped.finish();
    assert!(cramped.n_preempted > 0);
    assert_eq!(cramped.done, alone.done);
}
