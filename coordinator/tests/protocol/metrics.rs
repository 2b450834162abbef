//! What a coordinator counts is what its clients are told.

use stagebus_schemas::messages::public::PromptRequest;
use stagebus_telemetry::CoordinatorTelemetry;

use crate::defaults;
use crate::harness::{Bed, tokens};
use crate::workers::workers;

#[tokio::test]
async fn counts_are_those_of_the_answers() {
    let bed = Bed::new(2).await;
    let _workers = workers(&bed, 1).await;
    let telemetry = CoordinatorTelemetry::default();
    let metrics = telemetry.metrics.clone();
    let coordinator = bed.shown(defaults(), telemetry).await;
    let prompt = [1, 2, 3];
    let whole = bed.text.decode(&bed.expected(&prompt, 60));
    let from = whole.char_indices().nth(10).unwrap().0;
    let to = whole.char_indices().nth(13).unwrap().0;
    // Tokens beyond the stop string are generated, and not counted.
    let stops = PromptRequest { stop: vec![whole[from..to].to_owned()], ..tokens(&prompt, 60) };
    let mut expected = [0; 4];
    // Two tokens only, so that look-up finds much to draft.
    let repeats = PromptRequest {
        temperature: Some(1.0),
        seed: Some(5),
        logit_bias: [(0, 20.0), (1, 20.0)].into(),
        draft_tokens: Some(4),
        ..tokens(&prompt, 60)
    };
    for request in [stops, repeats, tokens(&[5], 3)] {
        let (_, usage) = bed.ask(&request).await.done.unwrap();
        let counts = [
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.drafted_tokens,
            usage.accepted_tokens,
        ];
        expected.iter_mut().zip(counts).for_each(|(sum, count)| *sum += u64::from(count));
    }
    coordinator.end().await.unwrap();
    let counted = [
        metrics.prompt_tokens.get(),
        metrics.generated_tokens.get(),
        metrics.drafted_tokens.get(),
        metrics.accepted_tokens.get(),
    ];
    assert_eq!(counted, expected);
    assert!(expected[2] > 0, "nothing was drafted");
    assert_eq!((metrics.sessions.get(), metrics.queued.get()), (0, 0));
    assert_eq!((metrics.slow_consumer.get(), metrics.reconnects.get()), (0, 0));
}
