//! Which stage needs a worker most, and who gives way when two choose the same one.
//!
//! Everybody sees the same announcements and follows the same order, so nobody has to be asked:
//! whoever has begun to fetch or serve a stage stays, and among those that still choose the one with
//! the smaller id does. A worker that gives way chooses again without what is taken. The one with the
//! smallest id never gives way to another that chooses, then the next one, so choosing ends.

use std::cmp::Ordering;

use stagebus_schemas::ids::{ModelName, WorkerId};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerState};

use crate::load::suffix;

/// A stage that a worker may take.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Offer {
    /// The model.
    pub(crate) model: ModelName,
    /// Fingerprint of its shard set.
    pub(crate) fingerprint: String,
    /// The stage.
    pub(crate) stage: u16,
    /// The stage's estimated part of the decode time of the whole model.
    pub(crate) cost_share: f64,
}

/// What is known of an offer.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Need {
    /// Workers that have it or will have it.
    n_workers: usize,
    /// Steps that wait at them.
    n_waiting: u64,
    cost_share: f64,
}

impl Need {
    /// Fewer workers first; then more steps that wait; then the more expensive stage.
    fn order(&self, other: &Self) -> Ordering {
        self.n_workers
            .cmp(&other.n_workers)
            .then_with(|| other.n_waiting.cmp(&self.n_waiting))
            .then_with(|| other.cost_share.total_cmp(&self.cost_share))
    }
}

/// Whether an announcement is about an offered stage.
fn is_about(offer: &Offer, worker: &WorkerAnnouncement) -> bool {
    worker.model == offer.model
        && worker.fingerprint == offer.fingerprint
        && worker.stage.index() == usize::from(offer.stage)
}

/// Whether another worker keeps its stage although `me` is still choosing.
fn stays(me: &WorkerId, other: &WorkerAnnouncement) -> bool {
    match other.state {
        WorkerState::Ready | WorkerState::Starting => true,
        WorkerState::Joining => suffix(&other.worker) < suffix(me),
        WorkerState::Draining | WorkerState::Leaving => false,
    }
}

fn need<'a>(
    offer: &Offer,
    others: impl Iterator<Item = &'a WorkerAnnouncement>,
    counts: impl Fn(&WorkerAnnouncement) -> bool,
) -> Need {
    let mut need = Need { n_workers: 0, n_waiting: 0, cost_share: offer.cost_share };
    for worker in others.filter(|worker| is_about(offer, worker) && counts(worker)) {
        need.n_workers += 1;
        need.n_waiting += u64::from(worker.load.queue_depth);
    }
    need
}

/// The offer that `me`, a worker that chooses, should take; `taken` is the one that it has told the
/// others, which it keeps unless another one has fewer workers. Nothing without offers.
pub(crate) fn neediest<'a, 'b, I>(
    offers: &'a [Offer],
    others: impl Fn() -> I,
    (me, taken): (&WorkerId, Option<&'a Offer>),
) -> Option<&'a Offer>
where
    I: Iterator<Item = &'b WorkerAnnouncement>,
{
    let need_of = |offer: &Offer| {
        let others = others().filter(|worker| suffix(&worker.worker) != suffix(me));
        need(offer, others, |worker| stays(me, worker))
    };
    let best = offers.iter().min_by(|a, b| need_of(a).order(&need_of(b)))?;
    match taken {
        Some(taken) if need_of(taken).n_workers <= need_of(best).n_workers => Some(taken),
        _ => Some(best),
    }
}

/// The offer to which `me`, which has fetched the stage `taken`, should change: one that nobody has
/// or chooses, while somebody else has `taken` too. It happens when two did not hear each other in
/// time; the one with the smaller id stays.
pub(crate) fn forsaken<'a, 'b, I>(
    offers: &'a [Offer],
    others: impl Fn() -> I,
    (me, taken): (&WorkerId, &Offer),
) -> Option<&'a Offer>
where
    I: Iterator<Item = &'b WorkerAnnouncement>,
{
    let others = || others().filter(|worker| suffix(&worker.worker) != suffix(me));
    let has_it = |worker: &WorkerAnnouncement| match worker.state {
        WorkerState::Ready => true,
        WorkerState::Starting => suffix(&worker.worker) < suffix(me),
        WorkerState::Joining | WorkerState::Draining | WorkerState::Leaving => false,
    };
    if need(taken, others(), has_it).n_workers == 0 {
        return None;
    }
    let will_stay = |worker: &WorkerAnnouncement| {
        !matches!(worker.state, WorkerState::Draining | WorkerState::Leaving)
    };
    let is_empty = |offer: &&Offer| need(offer, others(), will_stay).n_workers == 0;
    let empty = offers.iter().filter(is_empty);
    empty.max_by(|a, b| a.cost_share.total_cmp(&b.cost_share))
}

#[cfg(test)]
mod tests;
