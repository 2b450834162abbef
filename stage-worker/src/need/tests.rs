//! Choosing, alone and at the same time.

use super::*;
use crate::load::worker_id;

fn model() -> ModelName {
    "m".parse().expect("a name")
}

fn offers(costs: &[f64]) -> Vec<Offer> {
    let offer = |(stage, &cost_share): (usize, &f64)| Offer {
        model: model(),
        fingerprint: "f".to_owned(),
        stage: u16::try_from(stage).expect("few"),
        cost_share,
    };
    costs.iter().enumerate().map(offer).collect()
}

fn id(stage: u16, suffix: &str) -> WorkerId {
    worker_id(None, stage, suffix).expect("an id")
}

fn other(stage: u16, suffix: &str, state: WorkerState) -> WorkerAnnouncement {
    let worker = stagebus_view::testing::worker("m", stage, id(stage, suffix).as_str());
    WorkerAnnouncement { state, ..worker }
}

/// The stage that a worker chooses among others.
fn chosen(costs: &[f64], others: &[WorkerAnnouncement]) -> u16 {
    let offers = offers(costs);
    let me = id(0, "m");
    neediest(&offers, || others.iter(), (&me, None)).expect("there are offers").stage
}

#[test]
fn an_empty_stage_comes_before_a_busy_one_before_an_expensive_one() {
    use WorkerState::{Draining, Leaving, Ready, Starting};
    let costs = [0.2, 0.3, 0.5];
    let ready = |stage| other(stage, "a", Ready);
    assert_eq!(chosen(&costs, &[]), 2);
    assert_eq!(chosen(&costs, &[ready(2)]), 1);
    assert_eq!(chosen(&costs, &[ready(0), other(1, "b", Starting), ready(2)]), 2);
    assert_eq!(chosen(&costs, &[ready(0), ready(1), other(2, "b", Draining)]), 2);
    assert_eq!(chosen(&costs, &[ready(0), ready(1), other(2, "b", Leaving)]), 2);
    let mut busy = ready(0);
    busy.load.queue_depth = 3;
    assert_eq!(chosen(&costs, &[busy.clone(), ready(1), ready(2)]), 0);
    assert_eq!(chosen(&costs, &[busy, ready(1), ready(2), other(0, "b", Ready)]), 2);
}

#[test]
fn other_models_and_shard_sets_do_not_count() {
    let mut stranger = other(1, "a", WorkerState::Ready);
    stranger.fingerprint = "g".to_owned();
    assert_eq!(chosen(&[0.4, 0.6], &[stranger]), 1);
    assert_eq!(neediest(&[], std::iter::empty, (&id(0, "m"), None)), None);
}

/// Lets workers choose in rounds, each with what the others told in the round before, until none
/// changes any more; returns the stage of each.
fn choose_together(costs: &[f64], suffixes: &[&str], there: &[WorkerAnnouncement]) -> Vec<u16> {
    let offers = offers(costs);
    let mut told: Vec<Option<u16>> = vec![None; suffixes.len()];
    for _ in 0..=suffixes.len() {
        let joining = |(suffix, stage): (&&str, &Option<u16>)| {
            stage.map(|stage| other(stage, suffix, WorkerState::Joining))
        };
        let heard: Vec<_> =
            there.iter().cloned().chain(suffixes.iter().zip(&told).filter_map(joining)).collect();
        let next: Vec<_> = suffixes
            .iter()
            .zip(&told)
            .map(|(suffix, mine)| {
                let me = id(mine.unwrap_or(0), suffix);
                let taken = mine.and_then(|stage| offers.get(usize::from(stage)));
                neediest(&offers, || heard.iter(), (&me, taken)).map(|offer| offer.stage)
            })
            .collect();
        if next == told {
            return told.into_iter().flatten().collect();
        }
        told = next;
    }
    panic!("they go on changing: {told:?}");
}

#[test]
fn workers_that_start_at_the_same_moment_share_the_stages() {
    for suffixes in [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]] {
        let mut stages = choose_together(&[0.2, 0.3, 0.5], &suffixes, &[]);
        stages.sort_unstable();
        assert_eq!(stages, [0, 1, 2], "{suffixes:?}");
    }
    // The smallest id keeps what all wanted.
    assert_eq!(choose_together(&[0.4, 0.6], &["b", "a"], &[]), [0, 1]);
    // Four for two stages, one of which has somebody who fetches it already.
    let there = [other(1, "x", WorkerState::Starting)];
    let stages = choose_together(&[0.4, 0.6], &["a", "b", "c"], &there);
    assert_eq!(stages.iter().filter(|&&stage| stage == 0).count(), 2, "{stages:?}");
}

#[test]
fn one_of_two_that_missed_each_other_changes_to_the_stage_that_nobody_has() {
    use WorkerState::{Joining, Ready, Starting};
    let offers = offers(&[0.4, 0.6]);
    let change = |others: &[WorkerAnnouncement]| {
        let mine = (&id(1, "m"), &offers[1]);
        forsaken(&offers, || others.iter(), mine).map(|offer| offer.stage)
    };
    assert_eq!(change(&[other(1, "a", Starting)]), Some(0));
    assert_eq!(change(&[other(1, "z", Ready)]), Some(0));
    assert_eq!(change(&[other(1, "z", Starting)]), None, "the other one changes");
    assert_eq!(change(&[other(1, "a", Joining)]), None, "the other one chooses again");
    assert_eq!(change(&[other(1, "a", Starting), other(0, "b", Joining)]), None);
    assert_eq!(change(&[]), None);
}
