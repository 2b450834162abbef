//! The static backend with a real model: SmolLM2-135M in graphs of fixed shapes, on the CPU.
//!
//! Needs what `cargo xtask setup` puts into `.runtime`; without it the tests fail and say so.

#![allow(
    clippy::cast_possible_truncation,
    clippy::panic,
    clippy::unwrap_used,
    reason = "test data is small and a failure names its place"
)]

#[expect(dead_code, reason = "the tests of the paged backend use the rest")]
#[path = "../paged/support.rs"]
mod support;

use stagebus_engine::{EngineKind, Profile, RowPath, SessionKey, StepError};
use stagebus_shards::{Form, StaticForm};

use support::{Chain, Model, prompt, references};

/// Prompts take several calls, and three sessions two banks.
const SHAPES: StaticForm = StaticForm { window: 128, rows: 8, slots: 2 };

/// The caches of a bank over all 30 layers: keys and values of 3 heads of 64 numbers.
const BANK_BYTES: u64 = 30 * 2 * 3 * 64 * 4 * (2 * 128);

fn open(n_stages: usize) -> Chain {
    let model = Model::of_form(n_stages, Form::Static(SHAPES));
    Chain::open(&model, EngineKind::Auto, Profile::Exact, |_options| {})
}

/// Memory of the caches of both stages of a model of two.
fn kv_bytes(chain: &mut Chain) -> u64 {
    [0, 1].map(|stage| chain.backend(stage).kv_use().bytes).iter().sum()
}

#[test]
fn the_reference_answers_come_from_any_split() {
    let case = &references()[0];
    for n_stages in [1, 3] {
        let tokens = open(n_stages).generate(
            SessionKey(1),
            &case.input_ids,
            case.output_ids.len(),
            &case.eos(),
        );
        assert_eq!(tokens, case.output_ids, "{n_stages} stages");
    }
}

#[test]
fn neighbours_rewinds_and_shared_prefixes_change_no_token() {
    let mut chain = open(2);
    let case = &references()[0];
    let (text, answer) = (&case.input_ids, &case.output_ids);
    let n = answer.len();
    // One neighbour in the same calls, one in a bank of its own.
    let neighbours = [SessionKey(1), SessionKey(2)];
    for (idx, neighbour) in neighbours.into_iter().enumerate() {
        chain.prefill(neighbour, &prompt(40 + 7 * idx), 128);
    }
    chain.close(neighbours[0]);
    let among = chain.generate_among(SessionKey(3), text, n, &neighbours[1..]);
    assert_eq!(&among, answer, "beside a neighbour");
    chain.prefill(neighbours[0], &prompt(40), 128);
    assert_eq!(chain.generate_among(SessionKey(4), text, n, &neighbours), *answer, "in two banks");
    assert_eq!(kv_bytes(&mut chain), 2 * BANK_BYTES);

    let drafted = chain.decode_with_wrong_drafts(SessionKey(4), text.len(), answer[0], n, 4);
    assert_eq!(&drafted, answer, "with rows taken back");

    // All rows but the last are there: copied from another slot, then in the slot itself.
    neighbours.into_iter().chain([SessionKey(3)]).for_each(|key| chain.close(key));
    for key in [SessionKey(5), SessionKey(6)] {
        let cached = chain.cached(key, text);
        assert_eq!(cached, text.len() - 1);
        let first = chain.prefill_from(key, text, cached, 128);
        assert_eq!(&chain.decode(key, text.len(), first, n), answer, "behind a cached prefix");
        chain.close(SessionKey(4));
        chain.close(key);
        assert_eq!(kv_bytes(&mut chain), 0, "no session has a bank");
    }
}

#[test]
fn a_session_is_no_longer_than_the_window() {
    let mut chain = open(1);
    let (key, text) = (SessionKey(1), prompt(128));
    chain.cached(key, &[]);
    let error = chain.step(key, 0, RowPath::Prefill, &prompt(129), &[]).unwrap_err();
    assert!(matches!(error, StepError::ContextFull { len: 129, limit: 128, .. }), "{error:?}");
    let wanted: Vec<u32> = (0..128).collect();
    let all = chain.step(key, 0, RowPath::Prefill, &text, &wanted).unwrap();
    let error = chain.step(key, 128, RowPath::Decode, &[1], &[0]).unwrap_err();
    assert!(matches!(error, StepError::ContextFull { len: 129, limit: 128, .. }), "{error:?}");
    // Rows of several calls come in their order, and so do some of them.
    let some = chain.step(key, 0, RowPath::Prefill, &text, &[3, 6, 7, 8, 127]).unwrap();
    assert_eq!(some, [3, 6, 7, 8, 127].map(|row| all[row]));
}
