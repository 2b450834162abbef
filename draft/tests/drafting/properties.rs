//! What must hold for every history of drafts, acceptances and rejections.

use std::collections::HashMap;

use proptest::prelude::*;
use stagebus_draft::drafter::{DraftRequest, Drafter, HybridDrafter, ModelDrafter, NgramDrafter};
use stagebus_engine::SessionKey;

use super::{VOCAB_SIZE, drafter, head_token, params};

#[derive(Debug, Clone)]
enum Move {
    Open {
        session: u64,
        prompt: Vec<u32>,
    },
    /// Drafts for several sessions in one call, after the first tokens of the last draft and then
    /// others.
    Draft {
        sessions: Vec<u64>,
        n: usize,
        n_assumed: usize,
        others: Vec<u32>,
    },
    /// Accepts the first tokens of the last draft, then others.
    Accept {
        session: u64,
        n_drafted: usize,
        others: Vec<u32>,
    },
    Close {
        session: u64,
    },
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let token = 0..VOCAB_SIZE as u32;
    let session = 0_u64..4;
    let one = prop_oneof![
        1 => (session.clone(), prop::collection::vec(token.clone(), 1..20))
            .prop_map(|(session, prompt)| Move::Open { session, prompt }),
        6 => (
            prop::sample::subsequence(vec![0_u64, 1, 2, 3], 0..=4),
            0_usize..7,
            0_usize..16,
            prop::collection::vec(token.clone(), 0..2),
        ).prop_map(|(sessions, n, n_assumed, others)| {
            Move::Draft { sessions, n, n_assumed, others }
        }),
        4 => (session.clone(), 0_usize..12, prop::collection::vec(token, 0..3))
            .prop_map(|(session, n_drafted, others)| Move::Accept { session, n_drafted, others }),
        1 => session.prop_map(|session| Move::Close { session }),
    ];
    let open = (0_u64..4).map(|session| Move::Open { session, prompt: vec![1, 2, 3] });
    let opens: Vec<Move> = open.collect();
    prop::collection::vec(one, 1..30)
        .prop_map(move |rest| opens.iter().cloned().chain(rest).collect())
}

/// Text of a session and the length of its prompt.
type Texts = HashMap<u64, (Vec<u32>, usize)>;

/// Plays the moves; after every draft compares each answer with
/// `alone(text, n_prompt_and_standing, n, key)`.
fn play<D: Drafter>(
    drafter: &mut D,
    moves: &[Move],
    alone: impl Fn(&[u32], (usize, usize), usize, u64) -> Vec<u32>,
) -> Result<(), TestCaseError> {
    let mut texts = Texts::new();
    let mut last: HashMap<u64, Vec<u32>> = HashMap::new();
    for step in moves {
        match step {
            Move::Open { session, prompt } => {
                drafter.open(SessionKey(*session), prompt);
                texts.insert(*session, (prompt.clone(), prompt.len()));
                last.remove(session);
            }
            Move::Draft { sessions, n, n_assumed, others } => {
                let assumed: Vec<Vec<u32>> = sessions
                    .iter()
                    .map(|session| {
                        let drafted = last.get(session).into_iter().flatten();
                        drafted.take(*n_assumed).chain(others).copied().collect()
                    })
                    .collect();
                let params: Vec<_> = sessions.iter().map(|session| params(*session)).collect();
                let requests: Vec<_> = sessions
                    .iter()
                    .zip(params.iter().zip(&assumed))
                    .map(|(session, (params, assumed))| DraftRequest {
                        session: SessionKey(*session),
                        assumed,
                        n: *n,
                        params,
                    })
                    .collect();
                let drafts = drafter.draft(&requests).expect("drafts");
                for ((session, mut assumed), draft) in sessions.iter().zip(assumed).zip(drafts) {
                    let want = texts.get(session).map_or_else(Vec::new, |(text, prompt_len)| {
                        let whole = [&text[..], &assumed].concat();
                        alone(&whole, (*prompt_len, text.len()), *n, *session)
                    });
                    prop_assert_eq!(&draft, &want, "session {}", session);
                    assumed.extend(draft);
                    last.insert(*session, assumed);
                }
            }
            Move::Accept { session, n_drafted, others } => {
                let mut tokens = last.remove(session).unwrap_or_default();
                tokens.truncate(*n_drafted);
                tokens.extend(others);
                drafter.accept(SessionKey(*session), &tokens);
                if let Some((text, _)) = texts.get_mut(session) {
                    text.extend(tokens);
                }
            }
            Move::Close { session } => {
                drafter.close(SessionKey(*session));
                texts.remove(session);
            }
        }
    }
    Ok(())
}

/// The draft of a new drafter that knows one session only.
fn fresh<D: Drafter>(
    mut drafter: D,
    text: &[u32],
    (prompt_len, n_standing): (usize, usize),
    n: usize,
    key: u64,
) -> Vec<u32> {
    let session = SessionKey(key);
    drafter.open(session, &text[..prompt_len]);
    drafter.accept(session, &text[prompt_len..n_standing]);
    let params = params(key);
    let request = DraftRequest { session, assumed: &text[n_standing..], n, params: &params };
    drafter.draft(&[request]).expect("drafts").remove(0)
}

/// The tokens that the head itself chooses one after the other.
fn by_head(text: &[u32], (prompt_len, _): (usize, usize), n: usize, key: u64) -> Vec<u32> {
    let mut text = text.to_vec();
    let start = text.len();
    for _ in 0..n {
        text.push(head_token(&text, prompt_len, &params(key)));
    }
    text.split_off(start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Rewinds, batches and other sessions leave no trace, and a draft model that is the target
    /// drafts what the target's head chooses: greedy, sampled, with penalties and with bias.
    #[test]
    fn a_model_drafts_what_its_own_head_would_choose(moves in moves()) {
        play(&mut drafter(), &moves, by_head)?;
    }

    #[test]
    fn a_look_up_drafts_the_same_alone_and_in_company(moves in moves()) {
        play(&mut NgramDrafter::new(2), &moves, |text, lens, n, key| {
            fresh(NgramDrafter::new(2), text, lens, n, key)
        })?;
    }

    #[test]
    fn a_hybrid_drafts_the_same_alone_and_in_company(moves in moves()) {
        let new = || HybridDrafter::<ModelDrafter>::new(drafter());
        play(&mut new(), &moves, |text, lens, n, key| fresh(new(), text, lens, n, key))?;
    }
}
