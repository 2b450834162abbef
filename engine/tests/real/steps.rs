//! What a step means, on the real model.

use stagebus_engine::argmax::greedy;
use stagebus_engine::{Backend, EngineOptions, Profile, SessionKey};

use crate::chain::{ANSWER, ANSWER_2, Chain, ONE, PROMPT, PROMPT_2, exact, halves, whole};

/// Largest difference of two logits rows of the exact profile that computed the same thing in
/// another order.
const TOLERANCE: f32 = 1e-2;

#[track_caller]
fn assert_close(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len());
    let far = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(far <= TOLERANCE, "logits differ by {far}");
}

#[test]
fn the_reference_answers_come_from_any_split() {
    assert_eq!(whole().generate(1, &PROMPT, 64, 8), ANSWER);
    assert_eq!(halves().generate(1, &PROMPT, 64, 8), ANSWER);
    assert_eq!(halves().generate(1, &PROMPT_2, 64, 15), ANSWER_2);
}

#[test]
fn chunks_of_the_prompt_do_not_matter() {
    for chunk in [1, 7, 36] {
        assert_eq!(whole().generate(2, &PROMPT, chunk, 8), ANSWER, "chunks of {chunk}");
        assert_eq!(halves().generate(2, &PROMPT, chunk, 8), ANSWER, "chunks of {chunk}");
    }
}

#[test]
fn interleaved_sessions_equal_their_solo_runs() {
    let mut chain = halves();
    chain.open(3);
    chain.open(4);
    let mut first = vec![chain.token(3, 0, &PROMPT)];
    let mut second = vec![chain.token(4, 0, &PROMPT_2)];
    for i in 0..14 {
        if i < 7 {
            let next = chain.token(3, PROMPT.len() + i, &first[i..=i]);
            first.push(next);
        }
        let next = chain.token(4, PROMPT_2.len() + i, &second[i..=i]);
        second.push(next);
    }
    chain.close(3);
    chain.close(4);
    assert_eq!(first, ANSWER);
    assert_eq!(second, ANSWER_2);
}

#[test]
fn wanted_rows_are_rows_of_all_logits() {
    let mut chain = whole();
    chain.open(5);
    let prompt = &PROMPT[..12];
    let all = chain.step(5, 0, prompt, &(0..12).collect::<Vec<_>>()).unwrap();
    let vocab_size = all.len() / prompt.len();
    let some = chain.step(5, 0, prompt, &[2, 3, 11]).unwrap();
    for (row, logits) in [2, 3, 11].into_iter().zip(some.chunks(vocab_size)) {
        assert_close(logits, &all[row * vocab_size..][..vocab_size]);
    }
    assert!(chain.step(5, 0, prompt, &[]).unwrap().is_empty(), "a chunk without wanted rows");
    let after = chain.step(5, 11, &prompt[11..], &[0]).unwrap();
    assert_close(&after, &all[11 * vocab_size..]);
    chain.close(5);
}

#[test]
fn a_rewound_session_equals_a_fresh_one() {
    let mut chain = whole();
    chain.open(6);
    let mut tokens = Vec::new();
    let mut seed = 1_u64;
    let mut random = move |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    };
    for round in 0..100 {
        // Never to 0, which starts afresh; seldom far back.
        let back = if round % 10 == 0 { 20 } else { 4 };
        let keep = tokens.len().saturating_sub(random(back)).clamp(tokens.len().min(1), 28);
        tokens.truncate(keep);
        let rows: Vec<u32> =
            (0..=random(5)).map(|_| u32::try_from(random(40_000)).unwrap()).collect();
        tokens.extend(&rows);
        let last = [u32::try_from(rows.len()).unwrap() - 1];
        let rewound = chain.step(6, keep, &rows, &last).unwrap();
        chain.open(7);
        let last = [u32::try_from(tokens.len()).unwrap() - 1];
        let fresh = chain.step(7, 0, &tokens, &last).unwrap();
        chain.close(7);
        assert_close(&rewound, &fresh);
        assert_eq!(greedy(&rewound), greedy(&fresh), "round {round}");
    }
    let used = chain.stages[0].kv_use();
    let physical = usize::try_from(used.tokens - used.masked_tokens).unwrap();
    assert_eq!(physical, tokens.len());
    assert!(used.masked_tokens > 50, "{used:?}");
    assert_eq!(used.n_to_compact, 1);
    let cached = chain.stages[0].open(SessionKey(6), &tokens, 100).unwrap();
    assert_eq!(cached, 0, "who opens it again is to fill it from the start");
    chain.step(6, 0, &tokens, &[]).unwrap();
    assert_eq!(chain.stages[0].kv_use().masked_tokens, 0, "a replay from 0 sheds masked slots");
    let cached = chain.stages[0].open(SessionKey(6), &tokens, 100).unwrap();
    assert_eq!(cached, tokens.len(), "a session without masked slots keeps its cache");
    chain.close(6);
}

#[test]
fn a_repeated_step_changes_nothing() {
    let mut chain = whole();
    chain.open(8);
    let once = chain.token(8, 0, &PROMPT);
    assert_eq!(chain.token(8, 0, &PROMPT), once);
    let next = chain.token(8, PROMPT.len(), &[once]);
    assert_eq!(chain.token(8, PROMPT.len(), &[once]), next);
    assert_eq!([once, next], ANSWER[..2]);
    chain.close(8);
}

#[test]
fn a_compiled_stage_is_kept_in_the_cache_folder() {
    let folder = tempfile::tempdir().unwrap();
    let options = EngineOptions { cache_dir: Some(folder.path().join("compiled")), ..exact() };
    for _ in 0..2 {
        let mut chain = Chain::load(&ONE, &options);
        assert_eq!(chain.generate(1, &PROMPT, 64, 8), ANSWER);
        let n_files = std::fs::read_dir(folder.path().join("compiled")).unwrap().count();
        assert_eq!(n_files, 1, "the second start finds the file of the first");
    }
}

#[test]
fn the_fast_profile_has_short_kv_caches() {
    let options = EngineOptions { profile: Profile::Fast, ..exact() };
    let mut chain = Chain::load(&ONE, &options);
    assert_eq!(chain.generate(1, &PROMPT, 64, 8), ANSWER);
    let info = chain.stages[0].info();
    assert_eq!(info.kv_precision, "u8");
    assert_eq!(info.kv_bytes_per_token, 30 * 2 * 3 * (64 + 8));
    assert_eq!(whole().stages[0].info().kv_bytes_per_token, 30 * 2 * 3 * 64 * 4);
}
