//! Speculation and sampling: who proposes tokens, how many, and how a token is chosen.
//!
//! No clock, no network. A [`drafter::Drafter`] keeps the text of its sessions; everything else is
//! a pure function or plain bookkeeping. The argument that holds it together: the token at position
//! `p` is a function of the logits row before it, the request's parameters and `(seed, p)` alone
//! ([`sampling`]). Whether that row was drafted or not does not enter, so a speculative run gives
//! the tokens of a plain run; a drafter only decides how soon.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::float_cmp,
    reason = "vocabulary indexes fit u32, probabilities are f32, and ties are exact by design"
)]

pub mod acceptance;
pub mod alternatives;
pub mod chain;
pub mod constraint;
pub mod control;
pub mod costs;
pub mod drafter;
pub mod ngram;
pub mod noise;
pub mod sampling;
pub mod windows;
