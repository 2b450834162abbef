//! The paged backend on SmolLM2: every way to the same row gives the same numbers.
#![allow(
    clippy::cast_possible_truncation,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test data is small and a failure names its place"
)]

mod support;

use stagebus_engine::{EngineKind, Profile, RowPath, SessionKey, StepError};
use support::{Chain, Model, prompt};

const FAST: Profile = Profile::Fast;

fn paged(model: &Model, profile: Profile) -> Chain {
    Chain::open(model, EngineKind::Paged, profile, |_options| {})
}

#[test]
fn references_are_equal_in_the_exact_profile() {
    for n_stages in [1, 2] {
        let mut chain = paged(&Model::exact(n_stages), Profile::Exact);
        for (idx, case) in support::references().iter().enumerate() {
            let key = SessionKey(idx as u64);
            let tokens = chain.generate(key, &case.input_ids, 64, &case.eos());
            assert_eq!(tokens, case.output_ids, "case {idx} with {n_stages} stages");
            chain.close(key);
        }
    }
}

#[test]
fn tokens_do_not_depend_on_neighbours_chunks_or_drafts() {
    let mut chain = paged(&Model::exact(2), FAST);
    let text = prompt(150);
    let alone = chain.generate(SessionKey(1), &text, 40, &[]);
    chain.close(SessionKey(1));

    let neighbours: Vec<SessionKey> = (10..25).map(SessionKey).collect();
    for (idx, key) in neighbours.iter().enumerate() {
        chain.prefill(*key, &text[idx..idx + 40 + idx], 64);
    }
    let together = chain.generate_among(SessionKey(2), &text, 40, &neighbours);
    assert_eq!(together, alone, "with 15 neighbours in every micro-batch");

    for chunk in [2, 33, 64, 149] {
        let key = SessionKey(100 + chunk as u64);
        let last = chain.prefill(key, &text, chunk);
        let tokens = chain.decode(key, text.len(), last, 40);
        assert_eq!(tokens, alone, "prompt in chunks of {chunk}");
        chain.close(key);
    }

    for n_draft in [1, 4, 10] {
        let key = SessionKey(200 + n_draft as u64);
        let last = chain.prefill(key, &text, 128);
        let tokens = chain.decode_with_wrong_drafts(key, text.len(), last, 40, n_draft);
        assert_eq!(tokens, alone, "verified in windows of {n_draft} drafted tokens");
        chain.close(key);
    }
}

#[test]
fn a_row_alone_has_the_bits_of_a_row_among_others() {
    // Many lengths of the context: with several threads the runtime may share out a long one.
    let mut chain = paged(&Model::exact(2), FAST);
    let backend = chain.backend(0);
    let text = prompt(240);
    let sessions = [1, 2, 3].map(SessionKey);
    for session in sessions {
        backend.open(session, &[], 0).unwrap();
        support::hidden(backend, &[support::row(session, 0, RowPath::Prefill, &text)]);
    }
    let mut different = Vec::new();
    for pos in (20..text.len()).rev() {
        let row = |session| support::row(session, pos, RowPath::Decode, &[777]);
        let alone = support::hidden(backend, &[row(sessions[0])]);
        let together = support::hidden(backend, &[row(sessions[1]), row(sessions[2])]);
        if together != [alone[0].clone(), alone[0].clone()] {
            different.push(pos);
        }
    }
    assert_eq!(different, Vec::<usize>::new());
}

#[test]
fn a_row_has_the_same_bits_in_runs_of_any_size() {
    // The kernels of a processor may sum differently for few and for many rows, and the head has
    // a number of rows of its own.
    let (text, key) = (prompt(240), SessionKey(1));
    for threads in [1, 2] {
        let mut chain = Chain::open(&Model::exact(2), EngineKind::Paged, FAST, |options| {
            options.threads = Some(threads);
        });
        chain.prefill(key, &text[..100], 64);
        let rows = |chain: &mut Chain, n: usize, n_wanted: usize| {
            let wanted: Vec<u32> = (0..n_wanted as u32).collect();
            chain.bits(key, 100, &text[100..100 + n], &wanted)
        };
        let (hidden, logits) = rows(&mut chain, 120, 120);
        let (hidden_width, logits_width) = (hidden.len() / 120, logits.len() / 120);
        for (n, n_wanted) in [
            (1, 1),
            (2, 1),
            (3, 3),
            (6, 5),
            (7, 7),
            (8, 1),
            (9, 8),
            (33, 16),
            (64, 64),
            (65, 2),
            (110, 100),
        ] {
            let found = rows(&mut chain, n, n_wanted);
            assert!(
                found.0[..] == hidden[..n * hidden_width]
                    && found.1[..] == logits[..n_wanted * logits_width],
                "{n} rows, {n_wanted} of them wanted, {threads} threads"
            );
        }
    }
}

#[test]
fn a_cached_prefix_changes_no_token() {
    let mut chain = paged(&Model::exact(2), FAST);
    let text = prompt(200);
    let cold = chain.generate(SessionKey(1), &text, 30, &[]);
    assert_eq!(chain.cached(SessionKey(2), &text), 192, "six blocks of 32 tokens");
    let last = chain.prefill_from(SessionKey(2), &text, 192, 128);
    assert_eq!(chain.decode(SessionKey(2), text.len(), last, 30), cold, "beside its original");
    chain.close(SessionKey(1));
    chain.close(SessionKey(2));
    assert_eq!(chain.cached(SessionKey(3), &text), 192, "kept after its sessions ended");
    let mut other = text.clone();
    other[40] += 1;
    assert_eq!(chain.cached(SessionKey(4), &other), 32, "up to the first different block");
    let last = chain.prefill_from(SessionKey(4), &other, 32, 128);
    let warm = chain.decode(SessionKey(4), other.len(), last, 30);
    let mut fresh = paged(&Model::exact(2), FAST);
    assert_eq!(fresh.generate(SessionKey(1), &other, 30, &[]), warm);
}

#[test]
fn what_decoding_wrote_is_shared_where_prompts_run_row_by_row() {
    let model = Model::exact(2);
    let open = |invariant_prefill| {
        let kind = EngineKind::Paged;
        Chain::open(&model, kind, FAST, |options| options.invariant_prefill = invariant_prefill)
    };
    let text = prompt(70);
    let turn = |chain: &mut Chain| {
        let answer = chain.generate(SessionKey(1), &text, 60, &[]);
        chain.close(SessionKey(1));
        [&text[..], &answer, &prompt(20)].concat()
    };
    let mut chain = open(true);
    let next = turn(&mut chain);
    assert_eq!(chain.cached(SessionKey(2), &next), 128, "prompt and answer");
    let last = chain.prefill_from(SessionKey(2), &next, 128, 128);
    let warm = chain.decode(SessionKey(2), next.len(), last, 30);
    assert_eq!(open(true).generate(SessionKey(1), &next, 30, &[]), warm);

    let mut chain = open(false);
    let next = turn(&mut chain);
    assert_eq!(chain.cached(SessionKey(2), &next), 64, "the prompt alone");
}

#[test]
fn rewinding_into_a_shared_block_leaves_the_other_session_alone() {
    let mut chain = paged(&Model::exact(1), FAST);
    let text = prompt(100);
    let expected = chain.generate(SessionKey(1), &text, 20, &[]);
    let len = text.len();
    let last = chain.prefill(SessionKey(2), &text, 128);
    assert_eq!(chain.cached(SessionKey(3), &text), 96);
    chain.step(SessionKey(3), 70, RowPath::Prefill, &[5, 6, 7, 8], &[]).unwrap();
    assert_eq!(chain.decode(SessionKey(2), len, last, 20), expected);
}

#[test]
fn a_full_pool_refuses_and_serves_again_after_a_close() {
    let mut chain = Chain::open(&Model::exact(1), EngineKind::Paged, FAST, |options| {
        options.context_limit = Some(512);
        options.max_sessions = 8;
        options.kv_bytes = Some(16 * 32 * 12_960);
    });
    let text = prompt(300);
    chain.prefill(SessionKey(1), &text, 128);
    chain.backend(0).open(SessionKey(2), &[], 0).unwrap();
    let error = chain.step(SessionKey(2), 0, RowPath::Prefill, &prompt(290)[1..], &[]).unwrap_err();
    assert!(matches!(error, StepError::OutOfBlocks { needed: 10, available: 6, .. }), "{error:?}");
    chain.close(SessionKey(1));
    chain.step(SessionKey(2), 0, RowPath::Prefill, &prompt(290)[1..], &[]).unwrap();
    chain.close(SessionKey(2));
    assert_eq!(chain.backend(0).kv_use().bytes, 0);
}

#[test]
fn many_short_sessions_leave_nothing_behind() {
    let mut chain = paged(&Model::exact(1), FAST);
    for idx in 0..120 {
        let key = SessionKey(idx);
        let len = 3 + (idx as usize * 7) % 60;
        chain.generate(key, &prompt(len), 2, &[]);
        chain.close(key);
    }
    let kv_use = chain.backend(0).kv_use();
    assert_eq!((kv_use.n_sessions, kv_use.tokens, kv_use.bytes), (0, 0, 0));
}
