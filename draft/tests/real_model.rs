//! Drafting with real models: SmolLM2-135M and the draft model of the repository, paged engine.
//!
//! Needs what `cargo xtask setup` puts into `.runtime`; without it the tests fail and say so.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![expect(clippy::cast_possible_truncation, reason = "texts of a test are short")]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use stagebus_draft::drafter::{DraftLoadError, DraftRequest, Drafter, ModelDrafter};
use stagebus_draft::sampling::{History, Sampler, SamplingParams};
use stagebus_engine::{
    Backend, EngineKind, EngineOptions, RowPath, SessionKey, StageOutput, StageRequest, StepRows,
    open_backend,
};
use stagebus_shards::text::TextModel;
use stagebus_shards::{DraftSearch, ShardRequest, ShardSet, known_draft, shard};

const PROMPTS: [&str; 4] = [
    "What is the capital of Australia?",
    "Write a Python function that returns the number of uppercase letters in a sentence.",
    "List six fruits that grow in tropical climates.",
    "Translate to French: Where is the nearest train station?",
];

fn workplace() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn repository_models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join("models")
}

fn library() -> PathBuf {
    stagebus_settings::find_openvino().unwrap().path().to_owned()
}

fn options() -> EngineOptions {
    EngineOptions { threads: Some(1), kv_bytes: Some(64 << 20), ..EngineOptions::default() }
}

fn shard_request(source: PathBuf, name: &str) -> ShardRequest {
    ShardRequest { force: true, ..ShardRequest::new(source, workplace().join(name), 1) }
}

/// SmolLM2 as one stage.
fn target() -> &'static ShardSet {
    static TARGET: OnceLock<ShardSet> = OnceLock::new();
    TARGET.get_or_init(|| {
        let model = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
        let runtime = stagebus_settings::runtime_dir();
        let source = runtime.map(|dir| dir.join(model)).filter(|path| path.is_file());
        let source = source.unwrap_or_else(|| panic!("no {model}: run `cargo xtask setup`"));
        let request = shard_request(source, "draft-target");
        shard(&request, &mut |_| {}).unwrap();
        ShardSet::open(&request.out_dir).unwrap()
    })
}

/// The repository's draft model for SmolLM2.
fn draft(head_tokens: Option<usize>) -> ShardSet {
    let cache_dir = workplace().join("draft-cache");
    let folders = [repository_models()];
    let search = DraftSearch { folders: &folders, cache_dir: &cache_dir, head_tokens };
    known_draft(&search, target()).unwrap().expect("the repository has a draft for SmolLM2")
}

fn load(shards: &ShardSet) -> ModelDrafter {
    let library = library();
    ModelDrafter::load(EngineKind::Paged, &shards.dir, target(), Some(&library), &options())
        .unwrap()
}

fn prompts() -> Vec<Vec<u32>> {
    let text = TextModel::load(&target().dir).unwrap();
    let chat = |prompt: &&str| {
        let message = serde_json::json!({"role": "user", "content": prompt});
        text.encode_chat(&[message]).unwrap()
    };
    PROMPTS.iter().map(chat).collect()
}

/// Parameters of four kinds.
fn params(kind: usize) -> SamplingParams {
    let greedy = SamplingParams { seed: kind as u64, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.8, ..greedy.clone() };
    match kind {
        0 => greedy,
        1 => SamplingParams { top_p: 0.9, ..sampled },
        2 => SamplingParams {
            repetition_penalty: 1.2,
            presence_penalty: 0.4,
            frequency_penalty: 0.2,
            ..sampled
        },
        _ => SamplingParams { repetition_penalty: 1.3, ..greedy },
    }
}

/// What the target's head chooses, one token a step.
fn answer(
    backend: &mut dyn Backend,
    prompt: &[u32],
    n: usize,
    params: &SamplingParams,
) -> Vec<u32> {
    let session = SessionKey(77);
    let mut history = History::new(prompt.len());
    prompt.iter().for_each(|token| history.push(*token));
    let mut sampler = Sampler::default();
    let mut start_pos = backend.open(session, &prompt[..1], prompt.len() + n).unwrap();
    assert_eq!(start_pos, 0);
    let (mut rows, mut path) = (prompt.to_vec(), RowPath::Prefill);
    let mut tokens = Vec::new();
    while tokens.len() < n {
        let wanted = [rows.len() as u32 - 1];
        let step =
            StepRows { session, start_pos, path, tokens: &rows, hidden: None, wanted: &wanted };
        let position = (start_pos + rows.len()) as u32;
        let mut token = None;
        backend.run(&[step], &mut |done| match done.output {
            Ok(StageOutput::Logits(row)) => {
                token = Some(sampler.choose(row, position, params, &mut history).unwrap().token);
            }
            other => panic!("{other:?}"),
        });
        let token = token.unwrap();
        history.push(token);
        tokens.push(token);
        start_pos += rows.len();
        (rows, path) = (vec![token], RowPath::Decode);
    }
    backend.close(session);
    tokens
}

fn target_backend() -> Box<dyn Backend> {
    let library = library();
    let request = StageRequest { shards: target(), stage: 0, library: Some(&library) };
    open_backend(EngineKind::Paged, &request, &options()).unwrap()
}

#[test]
fn a_target_that_drafts_for_itself_is_never_rejected() {
    const N_TOKENS: usize = 20;
    let mut backend = target_backend();
    let mut drafter = load(target());
    for (kind, prompt) in prompts().iter().enumerate() {
        let params = params(kind);
        let answer = answer(backend.as_mut(), prompt, N_TOKENS, &params);
        let session = SessionKey(kind as u64);
        drafter.open(session, prompt);
        let mut at = 0;
        // Windows of several lengths; of every second one only a part is let stand.
        for (turn, n) in [4, 1, 5, 3, 6, 2].into_iter().cycle().enumerate() {
            let n = n.min(N_TOKENS - at);
            if n == 0 {
                break;
            }
            let request = DraftRequest { session, assumed: &[], n, params: &params };
            let drafted = drafter.draft(&[request]).unwrap().remove(0);
            assert_eq!(drafted, answer[at..at + n], "parameters {kind}, token {at}");
            let stand = if turn % 2 == 0 { n } else { n.div_ceil(2) };
            drafter.accept(session, &answer[at..at + stand]);
            at += stand;
        }
    }
}

#[test]
fn sessions_are_drafted_the_same_alone_and_together() {
    const N_DRAFT: usize = 5;
    for head_tokens in [None, Some(16_384)] {
        let shards = draft(head_tokens);
        let (mut together, mut alone) = (load(&shards), load(&shards));
        let prompts = prompts();
        let params: Vec<_> = (0..prompts.len()).map(params).collect();
        for (key, prompt) in prompts.iter().enumerate() {
            together.open(SessionKey(key as u64), prompt);
        }
        for turn in 0..4 {
            let requests: Vec<_> = params
                .iter()
                .enumerate()
                .map(|(key, params)| DraftRequest {
                    session: SessionKey(key as u64),
                    assumed: &[],
                    n: N_DRAFT,
                    params,
                })
                .collect();
            let drafts = together.draft(&requests).unwrap();
            for (key, draft) in drafts.iter().enumerate() {
                if turn == 0 {
                    alone.open(SessionKey(key as u64), &prompts[key]);
                }
                let expected = alone.draft(&requests[key..=key]).unwrap().remove(0);
                assert_eq!(*draft, expected, "session {key}, turn {turn}, head {head_tokens:?}");
                assert_eq!(draft.len(), N_DRAFT);
                // Another part stands each time, and a token that was not drafted.
                let tokens = [&draft[..(turn + key) % N_DRAFT], &[100 + turn as u32]].concat();
                together.accept(SessionKey(key as u64), &tokens);
                alone.accept(SessionKey(key as u64), &tokens);
            }
        }
    }
}

#[test]
fn the_repositorys_draft_model_is_worth_its_rows() {
    const N_TOKENS: usize = 48;
    const K: usize = 5;
    let mut backend = target_backend();
    let params = params(0);
    let mut drafter = load(&draft(Some(16_384)));
    let (mut n_verifies, mut n_tokens) = (0, 0);
    for (key, prompt) in prompts().iter().enumerate() {
        let answer = answer(backend.as_mut(), prompt, N_TOKENS, &params);
        let session = SessionKey(key as u64);
        drafter.open(session, prompt);
        let mut at = 0;
        while at < answer.len() {
            let drafted = drafter
                .draft(&[DraftRequest { session, assumed: &[], n: K, params: &params }])
                .unwrap()
                .remove(0);
            let rest = &answer[at..];
            let n_accepted = drafted.iter().zip(rest).take_while(|(a, b)| a == b).count();
            let stand = (n_accepted + 1).min(rest.len());
            drafter.accept(session, &rest[..stand]);
            at += stand;
            n_verifies += 1;
        }
        n_tokens += answer.len();
    }
    // 2.7 on average over 40 prompts; a damaged model gives little more than 1.
    let per_verify = n_tokens as f64 / f64::from(n_verifies);
    assert!(per_verify > 1.8, "{per_verify} tokens per verify");
}

#[test]
fn a_draft_of_another_tokenizer_is_refused() {
    let folder = workplace().join("draft-other-tokenizer");
    fs::create_dir_all(&folder).unwrap();
    let source = repository_models().join("smollm2-135m-draft");
    for name in ["config.json", "model.safetensors"] {
        fs::copy(source.join(name), folder.join(name)).unwrap();
    }
    let json = fs::read_to_string(target().dir.join("tokenizer.json")).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&json).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let last = vocab.remove("\u{120}the").unwrap();
    vocab.insert("a token of another model".to_owned(), last);
    let merges = tokenizer["model"]["merges"].as_array_mut().unwrap();
    let makes = |merge: &serde_json::Value, text: &str| {
        let parts: Vec<_> = merge.as_array().unwrap().iter().map(|p| p.as_str().unwrap()).collect();
        parts.concat() == text || parts.contains(&text)
    };
    merges.retain(|merge| !makes(merge, "\u{120}the"));
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let request = shard_request(folder, "draft-other");
    shard(&request, &mut |_| {}).unwrap();
    let (library, options) = (library(), options());
    let error =
        ModelDrafter::load(EngineKind::Paged, &request.out_dir, target(), Some(&library), &options)
            .unwrap_err();
    assert!(matches!(error, DraftLoadError::OtherTokenizer { .. }), "{error:?}");
}

#[test]
fn a_draft_of_several_stages_is_refused() {
    let source = repository_models().join("smollm2-135m-draft");
    let request = ShardRequest {
        n_stages: 2,
        tokenizer_from: Some(target().dir.clone()),
        ..shard_request(source, "draft-two-stages")
    };
    shard(&request, &mut |_| {}).unwrap();
    let (library, options) = (library(), options());
    let error =
        ModelDrafter::load(EngineKind::Paged, &request.out_dir, target(), Some(&library), &options)
            .unwrap_err();
    assert!(matches!(error, DraftLoadError::Stages { n_stages: 2, .. }), "{error:?}");
}
