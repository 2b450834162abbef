//! Drafts, windows of several rows, and the edges inside a window.

mod windows;

use stagebus_draft::drafter::Doubt;

use super::*;
use crate::config::AutoOr;
use crate::drafting::{DraftCommand, DraftOrder, Drafted};

fn bench(k: u32) -> Bench {
    let draft_tokens = AutoOr::Fixed(k);
    Bench::with(CoordinatorSettings { draft_tokens, ..Default::default() })
}

impl Bench {
    /// What the drafter was told since the last call.
    fn drafts(&mut self) -> Vec<DraftCommand> {
        let (drafts, others) = std::mem::take(&mut self.effects)
            .into_iter()
            .partition(|effect| matches!(effect, Effect::Draft(_)));
        self.effects = others;
        let command = |effect| match effect {
            Effect::Draft(command) => command,
            other => panic!("{other:?}"),
        };
        Vec::into_iter(drafts).map(command).collect()
    }

    fn order(&mut self) -> DraftOrder {
        match self.drafts().pop() {
            Some(DraftCommand::Draft(order)) => order,
            other => panic!("{other:?} is no order"),
        }
    }

    fn drafted(&mut self, order: &DraftOrder, tokens: Option<&[u32]>) {
        self.drafted_in_doubt(order, tokens, Vec::new());
    }

    fn drafted_in_doubt(&mut self, order: &DraftOrder, tokens: Option<&[u32]>, doubts: Vec<Doubt>) {
        self.act(Action::Drafted(vec![Drafted {
            session: order.session,
            ticket: order.ticket,
            tokens: tokens.map(<[u32]>::to_vec),
            doubts,
        }]));
    }

    /// Answers the rows of a step one by one.
    fn choose(&mut self, step: &Step, tokens: &[u32]) {
        let mut head = head(step, 0);
        for (row, token) in head.steps[0].rows.iter_mut().zip(tokens) {
            row.token = *token;
        }
        assert_eq!(head.steps[0].rows.len(), tokens.len());
        self.act(Action::Head(head));
    }

    /// A session that waits for its first draft: the prompt "abc" is answered with "d".
    fn waiting(&mut self, extra: &str) -> DraftOrder {
        let prefill = self.started(extra);
        assert!(
            matches!(&self.drafts()[..], [DraftCommand::Open(_, prompt, None)] if *prompt == [97, 98, 99])
        );
        self.answer(&prefill, 100);
        self.events_of_start();
        self.order()
    }

    fn events_of_start(&mut self) {
        assert_eq!(self.events().len(), 2);
    }

    fn usage(&mut self) -> (FinishReason, Vec<u32>) {
        match self.events().as_slice() {
            [.., Some(Event::Done { finish_reason, usage, .. }), None] => (
                *finish_reason,
                vec![
                    usage.completion_tokens,
                    usage.drafted_tokens,
                    usage.accepted_tokens,
                    usage.steps,
                ],
            ),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn accepted_tokens_and_the_bonus_token_stand() {
    let mut bench = bench(3);
    let order = bench.waiting("");
    assert_eq!((order.n, &order.accepted[..]), (3, &[100][..]));
    assert!(bench.steps().is_empty(), "the step waits for its draft");
    bench.drafted(&order, Some(&[101, 102, 103]));
    let step = bench.step();
    assert_eq!((step.start_pos, &step.tokens[..]), (3, &[100, 101, 102, 103][..]));
    assert_eq!((step.phase, &step.wanted[..]), (Phase::Decode, &[0, 1, 2, 3][..]));
    bench.choose(&step, &[101, 102, 120, 121]);
    assert_eq!(bench.events(), [token_event(1, "efx", &[101, 102, 120])]);
    let order = bench.order();
    assert_eq!(order.accepted, [101, 102, 120]);
    bench.drafted(&order, Some(&[]));
    let step = bench.step();
    // The rejected row is taken back by the position of the next one.
    assert_eq!((step.start_pos, &step.tokens[..]), (6, &[120][..]));
    bench.choose(&step, &[END]);
    assert_eq!(bench.usage(), (FinishReason::Stop, vec![5, 3, 2, 3]));
    assert!(matches!(bench.drafts()[..], [DraftCommand::Close(_)]));
}

#[test]
fn an_end_token_inside_an_accepted_run_ends_the_output() {
    let mut bench = bench(3);
    let order = bench.waiting("");
    bench.drafted(&order, Some(&[101, END, 103]));
    let step = bench.step();
    bench.choose(&step, &[101, END, 103, 104]);
    assert!(bench.steps().is_empty() && bench.drafts().len() == 1);
    assert_eq!(bench.usage(), (FinishReason::Stop, vec![3, 3, 3, 2]));
}

#[test]
fn a_window_never_passes_max_tokens() {
    let mut bench = bench(10);
    let order = bench.waiting(r#","max_tokens":4"#);
    assert_eq!(order.n, 2, "one generated, the step yields one more than it verifies");
    bench.drafted(&order, Some(&[101, 102]));
    let step = bench.step();
    bench.choose(&step, &[101, 102, 103]);
    assert_eq!(bench.usage(), (FinishReason::Length, vec![4, 2, 2, 2]));

    let mut last = super::speculation::bench(10);
    let prefill = last.started(r#","max_tokens":2"#);
    last.answer(&prefill, 100);
    assert_eq!(last.step().tokens, [100], "the last token needs no draft");
}

#[test]
fn a_window_never_passes_the_context() {
    let mut bench = bench(10);
    bench.worker("w0", 0);
    bench.worker("w1", 1);
    let tokens = vec![1; shard_set::CONTEXT - 3];
    bench.request(&format!(r#"{{"tokens":{tokens:?},"max_tokens":100}}"#));
    bench.open_all();
    for step in bench.steps() {
        bench.answer(&step, 100);
    }
    while let [step] = &bench.steps()[..] {
        bench.answer(step, 100);
    }
    let order = bench.order();
    assert_eq!(order.n, 1);
    bench.drafted(&order, Some(&[101]));
    let step = bench.step();
    assert_eq!(step.start_pos as usize + step.tokens.len(), shard_set::CONTEXT - 1);
}

#[test]
fn a_stop_string_across_a_window_cuts_what_follows() {
    let mut bench = bench(3);
    let order = bench.waiting(r#","stop":["ef"]"#);
    bench.drafted(&order, Some(&[101, 102, 103]));
    let step = bench.step();
    bench.choose(&step, &[101, 102, 103, 104]);
    assert_eq!(bench.usage(), (FinishReason::Stop, vec![3, 3, 3, 2]));
    assert_eq!(bench.state.counters.tokens_out, 3);
}

#[test]
fn the_request_may_ask_for_no_drafts() {
    let mut bench = bench(3);
    let prefill = bench.started(r#","draft_tokens":0"#);
    bench.answer(&prefill, 100);
    assert_eq!(bench.step().tokens, [100]);
    assert!(bench.drafts().is_empty());
}

#[test]
fn a_failed_or_late_drafter_only_costs_its_drafts() {
    for late in [false, true] {
        let mut bench = bench(3);
        let order = bench.waiting("");
        if late {
            let deadline = bench.state.next_deadline().unwrap();
            bench.now = deadline;
            bench.act(Action::Tick);
        } else {
            bench.drafted(&order, None);
        }
        let step = bench.step();
        assert_eq!(step.tokens, [100]);
        // An answer to an order that is over changes nothing.
        bench.drafted(&order, Some(&[101]));
        assert!(bench.steps().is_empty());
        bench.answer(&step, 101);
        assert_eq!(bench.step().tokens, [101], "no more drafts");
    }
}

#[test]
fn a_session_that_is_replayed_keeps_its_drafter() {
    let mut bench = bench(2);
    let order = bench.waiting("");
    bench.drafted(&order, Some(&[101, 102]));
    let step = bench.step();
    bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
    bench.open_all();
    let fill = bench.step();
    assert!(fill.wanted.is_empty());
    bench.answer(&fill, 0);
    let order = bench.order();
    assert!(order.accepted.is_empty());
    bench.drafted(&order, Some(&[101, 102]));
    assert_eq!(bench.step().tokens, [100, 101, 102]);
}

#[test]
fn drafts_are_adjusted_to_what_is_accepted() {
    let windows = AutoOr::Fixed(1);
    let mut bench = Bench::with(CoordinatorSettings { windows, ..CoordinatorSettings::default() });
    let mut order = bench.waiting(r#","max_tokens":400"#);
    let mut asked = vec![order.n];
    for _ in 0..30 {
        let drafted = vec![101; order.n];
        bench.drafted(&order, Some(&drafted));
        let step = bench.step();
        bench.now += Duration::from_millis(20);
        let chosen = vec![101; step.tokens.len()];
        bench.choose(&step, &chosen);
        order = bench.order();
        asked.push(order.n);
    }
    assert!(asked[0] <= 2 && asked[30] >= 8, "everything is accepted: {asked:?}");
}
