//! Large results between real workers.

use std::collections::HashSet;

use stagebus_schemas::messages::bulk::Part;

use super::*;

/// Rows of a chunk whose hidden states are large.
const MANY: u32 = 300;

fn setup() -> Setup {
    Setup { model: TestModel { hidden_dim: 64, ..TestModel::default() }, ..Setup::default() }
}

fn prompt(n_rows: u32) -> Vec<u32> {
    (0..n_rows).map(|row| row * 7 % 250).collect()
}

/// Rows that fill caches.
fn filling(session: SessionId, number: u32, start_pos: u32, tokens: &[u32]) -> Step {
    Step { wanted: vec![], ..step(session, 0, number, start_pos, tokens) }
}

#[tokio::test]
async fn a_long_prompt_goes_as_bulk_and_the_answer_is_that_of_the_unsplit_model() {
    let mut chain = Chain::start(3, setup()).await;
    let mut bulk = chain.bus.subscribe(&chain.subjects.bulk_all()).await.expect("subscribed");
    let session = SessionId::random();
    chain.open(session, 0).await;
    let prompt = prompt(2 * MANY + 4);
    let [first, second, end] = [0, MANY, 2 * MANY].map(|row| row as usize);
    // All at once: what is small comes behind what is large on the same way.
    chain.send(filling(session, 0, 0, &prompt[first..second])).await;
    chain.send(filling(session, 1, MANY, &prompt[second..end])).await;
    chain.send(step(session, 0, 2, 2 * MANY, &prompt[end..])).await;
    for number in 0..2 {
        assert_eq!(chain.step_done().await.step.number(), number);
    }
    let mut tokens = Vec::new();
    for number in 3..9 {
        let done = chain.step_done().await;
        tokens.push(done.rows[0].token);
        chain
            .send(step(session, 0, number, done.rows[0].pos + 1, &tokens[tokens.len() - 1..]))
            .await;
    }
    assert_eq!(tokens, chain.model.expected(&prompt, tokens.len()));
    // Each of the two large chunks went from the first stage and from the second.
    let (mut begun, mut n_bytes) = (HashSet::new(), 0);
    while n_bytes < 4 * MANY as usize * 64 * 4 {
        let part: Part = next(&mut bulk).await.decode().expect("a part");
        n_bytes += part.data.len();
        begun.insert(part.transfer);
    }
    assert!((4..=6).contains(&begun.len()), "{} messages", begun.len());
}

#[tokio::test]
async fn a_large_result_that_nobody_hears_is_told() {
    let mut chain = Chain::start(2, setup()).await;
    let session = SessionId::random();
    chain.open(session, 0).await;
    let last = chain.workers.pop().expect("two workers");
    last.shutdown.stop.cancel();
    let subject = chain.subjects.control(StageIndex::new(1), &last.id);
    last.ended().await.expect("an orderly end");
    gone(&chain.bus, &subject).await;
    chain.send(filling(session, 0, 0, &prompt(MANY))).await;
    let answer = next(&mut chain.lost).await;
    let Ok(Subject::Lost(_, lost)) = chain.subjects.parse(answer.subject()) else {
        panic!("expected a lost step, got {}", answer.subject());
    };
    assert_eq!((lost.session, lost.step.number(), lost.stage.index()), (session, 0, 1));
}
