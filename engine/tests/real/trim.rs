//! Rewinding by cutting the state.

use stagebus_engine::argmax::greedy;
use stagebus_engine::{TrimError, TrimmedModel};

use crate::chain::{ANSWER, ONE, PROMPT, exact, runtime};

#[test]
fn a_cut_cache_continues_as_if_the_rest_had_never_been() {
    let files = ONE.stage_files(0).unwrap();
    let mut model = TrimmedModel::load(&runtime(), &files, &exact()).unwrap();
    let mut next = greedy(model.append(&PROMPT).unwrap()).unwrap();
    let mut answer = vec![next];
    let mut len = PROMPT.len();
    while answer.len() < ANSWER.len() {
        // Three wrong guesses behind the right token, as a draft would leave them.
        model.append(&[next, 17, 4_000, 23_000]).unwrap();
        model.trim(len).unwrap();
        next = greedy(model.append(&[next]).unwrap()).unwrap();
        len += 1;
        answer.push(next);
    }
    assert_eq!(answer, ANSWER);
    assert!(matches!(model.trim(len + 1), Err(TrimError::Native(_))), "there is no such token");
    assert!(matches!(model.trim(0), Err(TrimError::Native(_))));
}
