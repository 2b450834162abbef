//! Where the time of a token goes in a pipeline.
//!
//! A step is a ring: coordinator, stages, coordinator. The observer beside the broker sees each
//! message once, so what lies between two of them is one way from the broker to a process, that
//! process, and one way back. Processes report their own part, which leaves the ways, the **legs**.
//! The coordinator reports nothing: its legs are taken to last as long as those of a stage, all of
//! the time between its two messages at most, and the rest of that time is its own. All are medians over steps, so they add up
//! nearly, not exactly.

use serde::Serialize;

use super::BROKER_SHARE;
use super::hops::{Hops, Placement};
use crate::fleet_run::StepTime;
use crate::harness::claims::Claim;
use crate::harness::stats::median;

/// Name of the part that the broker costs.
const LEGS: &str = "broker legs";

/// One part of the time of a token.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    /// What it is.
    pub name: &'static str,
    /// Median, in milliseconds.
    pub ms: f64,
}

/// Divides the time of steps of a fleet; `layers` are the layers of each stage.
///
/// The head is told apart from the layers by comparison: the first stage has layers only, so what
/// the last one needs beyond as much for each of its layers is the head. With one stage the head is
/// among the layers.
pub(super) fn parts(steps: &[StepTime], layers: &[usize]) -> Vec<Part> {
    let n_stages = layers.len();
    let Some(last) = n_stages.checked_sub(1) else { return Vec::new() };
    let of = |at: &dyn Fn(&StepTime) -> Option<f64>| {
        median(steps.iter().filter_map(at)).unwrap_or_default()
    };
    let infer = of(&|step| Some(step.infer_ms.iter().sum()));
    let head = match n_stages {
        1 => 0.0,
        _ => {
            let stage = |stage: usize| of(&|step| step.infer_ms.get(stage).copied());
            let layer = stage(0) / layers[0].max(1) as f64;
            (stage(last) - layer * layers[last] as f64).max(0.0)
        }
    };
    let queue = of(&|step| Some(step.queue_ms.iter().sum()));
    let rest = |step: &StepTime, stage: usize| {
        Some(step.worker_ms.get(stage)? - step.queue_ms.get(stage)?)
    };
    let choice = of(&|step| rest(step, last));
    let others = match n_stages {
        1 => 0.0,
        _ => of(&|step| (0..last).map(|stage| rest(step, stage)).sum()),
    };
    let stage_legs = of(&|step| Some(step.legs_ms.iter().sum()));
    let coordinator = of(&|step| Some(step.coordinator_ms));
    let coordinator_legs = coordinator.min(stage_legs / n_stages as f64);
    vec![
        Part { name: "layers", ms: infer - head },
        Part { name: "head", ms: head },
        Part { name: "scheduling", ms: queue },
        Part { name: "sampling, last stage's encoding", ms: choice },
        Part { name: "encoding of other stages", ms: others },
        Part { name: "coordinator", ms: coordinator - coordinator_legs },
        Part { name: LEGS, ms: stage_legs + coordinator_legs },
    ]
}

/// The broker's share of the time of a token: two stages on one core count.
pub(super) fn claim(all: &[Hops]) -> Claim {
    let share = |placement| {
        let mut found = all.iter().filter(|hops| hops.placement == placement);
        let hops = found.find(|hops| hops.n_stages == 2)?;
        let legs = hops.parts.iter().find(|part| part.name == LEGS)?.ms;
        Some((legs, hops.period_ms?.median))
    };
    let Some((legs, period)) = share(Placement::OneCore) else {
        return BROKER_SHARE.missing("a fleet of 2 stages is needed: give --stages 1,2");
    };
    let mut how = format!(
        "2 stages on one core, medians: {legs:.3} of {period:.2} ms a token are on the way between \
         processes: 6 legs, observed beside the broker, which adds to them"
    );
    if let Some((legs, period)) = share(Placement::CorePerWorker) {
        how.push_str(&format!("; {:.3} with a core per worker", legs / period));
    }
    BROKER_SHARE.measured(legs / period, how)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepTime {
        StepTime {
            period_ms: 12.0,
            infer_ms: vec![4.0, 6.5],
            worker_ms: vec![0.2, 0.3],
            queue_ms: vec![0.1, 0.1],
            legs_ms: vec![0.2, 0.2],
            coordinator_ms: 0.6,
        }
    }

    #[test]
    fn the_parts_add_up_to_the_period() {
        let parts = parts(&[step()], &[15, 15]);
        let ms = |name| parts.iter().find(|part| part.name == name).map(|part| part.ms);
        let near = |name, expected: f64| {
            let found: f64 = ms(name).expect(name);
            assert!((found - expected).abs() < 1e-9, "{name}: {found}");
        };
        near("layers", 8.0);
        near("head", 2.5);
        near("scheduling", 0.2);
        near("sampling, last stage's encoding", 0.2);
        near("encoding of other stages", 0.1);
        near("coordinator", 0.4);
        near(LEGS, 0.6);
        let sum: f64 = parts.iter().map(|part| part.ms).sum();
        assert!((sum - step().period_ms).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn the_coordinators_legs_fit_between_its_messages() {
        let quick = StepTime { coordinator_ms: 0.1, ..step() };
        let parts = parts(&[quick], &[15, 15]);
        assert!((parts[5].ms).abs() < 1e-9 && (parts[6].ms - 0.5).abs() < 1e-9, "{parts:?}");
    }

    #[test]
    fn one_stage_has_its_head_among_the_layers() {
        let one = StepTime {
            infer_ms: vec![10.5],
            worker_ms: vec![0.3],
            queue_ms: vec![0.1],
            legs_ms: vec![0.2],
            ..step()
        };
        let parts = parts(&[one], &[30]);
        assert_eq!((parts[0].ms, parts[1].ms, parts[4].ms), (10.5, 0.0, 0.0));
    }
}
