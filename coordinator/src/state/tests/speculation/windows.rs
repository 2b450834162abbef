//! Windows in flight against a last stage that keeps its text by the step contract, so that every
//! lost, doubled or misplaced row changes what it chooses.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const PROMPT: [u32; 3] = [97, 98, 99];

/// What follows a text: a letter that depends on all of it.
fn chosen(text: &[u32]) -> u32 {
    let mixed = text
        .iter()
        .fold(7_u32, |sum, token| (sum ^ token).wrapping_mul(0x9e37_79b1).rotate_left(7));
    97 + mixed % 26
}

/// The text that plain decoding makes.
fn plain(n: usize) -> Vec<u32> {
    let mut text = PROMPT.to_vec();
    for _ in 0..n {
        text.push(chosen(&text));
    }
    text.split_off(PROMPT.len())
}

/// Stages and a drafter around a coordinator.
struct World {
    bench: Bench,
    /// Rows in the caches.
    text: Vec<u32>,
    steps: VecDeque<Step>,
    /// Steps that have reached the stages, the oldest ones.
    n_arrived: usize,
    order: Option<DraftOrder>,
    /// What the drafter knows to stand.
    accepted: Vec<u32>,
    /// Tokens of the client.
    tokens: Vec<u32>,
    last_answer: Option<Head>,
    most_live: usize,
    /// Steps with rows beside the chain.
    n_beside: usize,
    /// The drafter is in doubt of every token whose position this divides.
    doubts_every: Option<usize>,
    is_done: bool,
}

impl World {
    fn new(k: u32, depth: u32, extra: &str) -> Self {
        let draft_tokens = AutoOr::Fixed(k);
        let windows = AutoOr::Fixed(depth);
        let settings = CoordinatorSettings { draft_tokens, windows, ..Default::default() };
        let mut bench = Bench::with(settings);
        let prefill = bench.started(extra);
        let mut world = Self {
            bench,
            text: Vec::new(),
            steps: VecDeque::from([prefill]),
            n_arrived: 0,
            order: None,
            accepted: PROMPT.to_vec(),
            tokens: Vec::new(),
            last_answer: None,
            most_live: 0,
            n_beside: 0,
            doubts_every: None,
            is_done: false,
        };
        world.collect();
        world.answer(false);
        world
    }

    /// Takes in what the coordinator wants.
    fn collect(&mut self) {
        let new = self.bench.steps();
        self.n_beside += new.windows(2).filter(|pair| is_beside(&pair[0], &pair[1])).count();
        self.steps.extend(new);
        let n_steps = self.steps.len();
        let counts = |i: &usize| {
            let next = self.steps.get(i + 1);
            !self.is_stale(*i, n_steps)
                && !next.is_some_and(|next| is_beside(&self.steps[*i], next))
        };
        self.most_live = self.most_live.max((0..n_steps).filter(counts).count());
        for command in self.bench.drafts() {
            if let DraftCommand::Draft(order) = command {
                self.accepted.extend(&order.accepted);
                self.order = Some(order);
            }
        }
        for event in self.bench.events() {
            match event {
                Some(Event::Token { tokens, .. }) => self.tokens.extend(tokens),
                Some(Event::Done { .. }) => self.is_done = true,
                _ => {}
            }
        }
    }

    /// Whether a later one of the first `n` steps takes back all rows of a waiting one.
    fn is_stale(&self, index: usize, n: usize) -> bool {
        let start_pos = self.steps[index].start_pos;
        self.steps.iter().take(n).skip(index + 1).any(|later| later.start_pos <= start_pos)
    }

    /// Answers the oldest step, without rows if a step that has arrived makes it stale; all have
    /// arrived if `notices`.
    fn answer(&mut self, notices: bool) {
        if self.steps.is_empty() {
            return;
        }
        self.n_arrived = if notices { self.steps.len() } else { self.n_arrived };
        let skips = self.is_stale(0, self.n_arrived);
        self.n_arrived = self.n_arrived.saturating_sub(1);
        let Some(step) = self.steps.pop_front() else { return };
        let mut answer = head(&step, 0);
        if skips {
            answer.steps[0].rows.clear();
        } else {
            let start_pos = step.start_pos as usize;
            assert!(start_pos <= self.text.len(), "rows are missing before {start_pos}");
            self.text.truncate(start_pos);
            self.text.extend(&step.tokens);
            for (row, wanted) in answer.steps[0].rows.iter_mut().zip(&step.wanted) {
                row.token = chosen(&self.text[..=start_pos + *wanted as usize]);
            }
        }
        self.last_answer = Some(answer.clone());
        // The way is long, so that second guesses pay.
        self.bench.now += Duration::from_millis(300);
        self.bench.act(Action::Head(answer));
        self.collect();
    }

    /// Gives the draft that was ordered, right but for those tokens whose positions are `wrong`, and
    /// only the first `most` of it.
    fn draft(&mut self, wrong: impl Fn(usize) -> bool, most: usize) {
        let Some(order) = self.order.take() else { return };
        let mut text = [&self.accepted[..], &order.assumed].concat();
        let (mut drafted, mut doubts) = (Vec::new(), Vec::new());
        for _ in 0..order.n.min(most) {
            let right = chosen(&text);
            let other = 97 + (right - 96) % 26;
            let is_wrong = wrong(text.len());
            let (token, second) = if is_wrong { (other, right) } else { (right, other) };
            let doubtful = self.doubts_every.is_some_and(|every| text.len().is_multiple_of(every));
            let (first, second_share) = if doubtful { (0.5, 0.4) } else { (0.99, 0.001) };
            drafted.push(token);
            doubts.push(Doubt { first, second, second_share });
            text.push(token);
        }
        if order.params.top_logprobs.is_none() {
            doubts.clear();
        }
        self.bench.drafted_in_doubt(&order, Some(&drafted), doubts);
        self.collect();
    }

    /// A stage loses the session, which is opened again.
    fn lose(&mut self) {
        let Some(step) = self.steps.front().cloned() else { return };
        self.bench.act(Action::Head(fault(&step, ErrorClass::UnknownSession)));
        self.steps.clear();
        self.n_arrived = 0;
        self.text.clear();
        self.bench.open_all();
        self.collect();
    }

    fn repeat_answer(&mut self) {
        if let Some(answer) = self.last_answer.clone() {
            self.bench.act(Action::Head(answer));
            self.collect();
        }
    }
}

/// Whether a step carries rows that the next one takes back on purpose.
fn is_beside(step: &Step, next: &Step) -> bool {
    let end = step.start_pos as usize + step.tokens.len();
    step.start_pos < next.start_pos && (next.start_pos as usize) < end
}

#[test]
fn second_guesses_stand_where_the_first_ones_do_not() {
    const N: usize = 40;
    let run = |doubts_every, extra: &str| {
        let mut world = World::new(6, 2, &format!(r#","max_tokens":{N}{extra}"#));
        world.doubts_every = doubts_every;
        let mut n_answers = 0;
        while !world.is_done {
            while world.order.is_some() {
                world.draft(|pos| pos % 3 == 0, usize::MAX);
            }
            world.answer(n_answers % 2 == 0);
            n_answers += 1;
        }
        assert_eq!(world.tokens, plain(N));
        let counters = world.bench.state.counters;
        (world.n_beside, counters.tokens_accepted)
    };
    let (n_beside, n_alone) = run(None, "");
    assert_eq!(n_beside, 0);
    let (n_beside, n_accepted) = run(Some(3), "");
    assert!(n_beside > 3 && n_accepted > n_alone + 5, "{n_beside} {n_accepted} {n_alone}");
    let extra = r#","draft_alternatives":0"#;
    assert_eq!(run(Some(3), extra), (0, n_alone));
    let extra = r#","temperature":0.5"#;
    assert_eq!(run(Some(3), extra).0, 0, "a draw has no second guess");
}

#[test]
fn a_difference_at_any_place_of_any_window_is_found() {
    const N: usize = 24;
    for wrong in PROMPT.len()..PROMPT.len() + N {
        for notices in [false, true] {
            let mut world = World::new(2, 3, &format!(r#","max_tokens":{N}"#));
            while !world.is_done {
                // The drafter is ahead of the answers.
                while world.order.is_some() {
                    world.draft(|pos| pos == wrong, usize::MAX);
                }
                world.answer(notices);
            }
            assert_eq!(world.tokens, plain(N), "wrong at {wrong}");
            assert_eq!(world.most_live, 3);
        }
    }
}

#[test]
fn windows_leave_without_waiting_and_end_with_the_room() {
    let mut world = World::new(2, 3, r#","max_tokens":9,"draft_alternatives":0"#);
    let rows = |world: &World| -> Vec<(u32, usize)> {
        world.steps.iter().map(|step| (step.start_pos, step.tokens.len())).collect()
    };
    assert_eq!(rows(&world), [(3, 1)], "the first row leads");
    world.draft(|_| false, 9);
    world.draft(|_| false, 9);
    assert_eq!(rows(&world), [(3, 1), (4, 2), (6, 2)]);
    let order = world.order.clone().unwrap();
    assert_eq!((order.n, order.assumed.len()), (2, 4), "a window is ready when a place is free");
    world.draft(|_| false, 9);
    assert!(world.steps.len() == 3 && world.order.is_none());
    world.answer(false);
    assert_eq!(rows(&world)[2], (8, 2));
    world.draft(|_| false, 9);
    assert_eq!(rows(&world).len(), 3);
    while !world.is_done {
        world.answer(false);
        world.draft(|_| false, 9);
    }
    assert_eq!(world.tokens, plain(9));
    assert_eq!(
        world.bench.state.counters.tokens_accepted, 7,
        "the room is for eight, one is first"
    );
}

#[test]
fn a_stop_string_is_found_while_windows_are_in_flight() {
    let text: String = plain(24).iter().filter_map(|token| char::from_u32(*token)).collect();
    for at in 2..20 {
        let (stop, kept) = (&text[at..at + 2], &text[..at]);
        if text.find(stop) != Some(at) {
            continue;
        }
        let mut world = World::new(3, 3, &format!(r#","max_tokens":24,"stop":["{stop}"]"#));
        while !world.is_done {
            world.draft(|pos| pos % 7 == 0, 9);
            world.draft(|pos| pos % 7 == 0, 9);
            world.answer(true);
        }
        let n_out = world.bench.state.counters.tokens_out;
        assert_eq!(n_out, kept.len() as u64 + 2, "the tokens that end the stop string");
        // What was under way is for nobody.
        for _ in 0..4 {
            world.answer(false);
        }
    }
}

#[test]
fn a_drafter_that_fails_leaves_windows_in_flight_standing() {
    let mut world = World::new(2, 3, r#","max_tokens":12"#);
    world.draft(|_| false, 9);
    let order = world.order.take().unwrap();
    world.bench.drafted(&order, None);
    world.collect();
    while !world.is_done {
        assert!(world.order.is_none());
        world.answer(false);
    }
    assert_eq!(world.tokens, plain(12));
}

#[derive(Debug, Clone)]
enum Move {
    Answer { notices: bool },
    Draft { wrong_every: usize, most: usize },
    Lose,
    Repeat,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        8 => any::<bool>().prop_map(|notices| Move::Answer { notices }),
        8 => (2_usize..9, 0_usize..8)
            .prop_map(|(wrong_every, most)| Move::Draft { wrong_every, most }),
        1 => Just(Move::Lose),
        1 => Just(Move::Repeat),
    ];
    prop::collection::vec(one, 8..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever comes in whichever order, the tokens are those of plain decoding.
    #[test]
    fn no_order_of_events_changes_a_token(
        moves in moves(),
        k in 1_u32..5,
        depth in 1_u32..6,
        n in 1_usize..40,
        doubts_every in prop::option::of(1_usize..5),
    ) {
        let mut world = World::new(k, depth, &format!(r#","max_tokens":{n}"#));
        world.doubts_every = doubts_every;
        let mut n_lost = 0;
        for one in moves.iter().cycle().take(2_000) {
            if world.is_done {
                break;
            }
            match one {
                Move::Answer { notices } => world.answer(*notices),
                Move::Draft { wrong_every, most } => {
                    world.draft(|pos| pos % wrong_every == 0, *most);
                }
                // More without a token between them end the session.
                Move::Lose if n_lost < 3 => {
                    n_lost += 1;
                    world.lose();
                }
                Move::Lose => {}
                Move::Repeat => world.repeat_answer(),
            }
            prop_assert!(world.most_live <= depth.max(3) as usize);
        }
        // Nobody waits for ever, whatever the moves were.
        while !world.is_done {
            prop_assert!(!world.steps.is_empty() || world.order.is_some(), "nothing goes on");
            world.draft(|_| false, 9);
            world.answer(true);
        }
        prop_assert_eq!(world.tokens, plain(n));
        let counters = world.bench.state.counters;
        prop_assert!(counters.tokens_accepted <= counters.tokens_drafted);
    }
}
