//! How long stages were busy with inference, from the times that they report with every step.
//!
//! Every answer of the last stage carries, for each stage, the inference time and the rows of the
//! micro-batch that held the step. Steps of one micro-batch carry the same pair, to the
//! microsecond, and come close together: each pair counts once among the last 64. Steps of
//! a prompt are left out, those up to a session's first token: they may run in parts, and carry
//! the sum of several micro-batches, which the decode steps in them carry as well.

use std::collections::{HashSet, VecDeque};

use anyhow::Context as _;
use stagebus_schemas::ids::SessionId;
use stagebus_schemas::messages::forward::StageTime;
use stagebus_schemas::messages::head::{Head, HeadStep};

use crate::load::{self, Ask, Served};
use crate::node_fleet::NodeFleet;

/// Steps of a stage among which a micro-batch is looked for: more than users, so that none is
/// counted twice, and few enough that two of them seldom last equally long.
const RECENT: usize = 64;

/// Inference time of the stages of a pipeline.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BusyTime {
    stages: Vec<StageBusy>,
    /// Sessions that have their first token.
    decoding: HashSet<SessionId>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct StageBusy {
    recent: VecDeque<(u32, u32)>,
    busy_us: u64,
    n_batches: u64,
    n_rows: u64,
}

impl BusyTime {
    /// Takes one answer of the last stage.
    pub fn step(&mut self, step: &HeadStep) {
        if self.decoding.contains(&step.session) {
            self.add(&step.trace);
        } else if !step.rows.is_empty() {
            self.decoding.insert(step.session);
        }
    }

    /// Takes the times of one decode step.
    fn add(&mut self, trace: &[StageTime]) {
        for time in trace {
            let stage = time.stage.index();
            if self.stages.len() <= stage {
                self.stages.resize(stage + 1, StageBusy::default());
            }
            let busy = &mut self.stages[stage];
            let batch = (time.infer_us, time.rows);
            if busy.recent.contains(&batch) {
                continue;
            }
            busy.busy_us += u64::from(time.infer_us);
            busy.n_batches += 1;
            busy.n_rows += u64::from(time.rows);
            busy.recent.push_back(batch);
            if busy.recent.len() > RECENT {
                busy.recent.pop_front();
            }
        }
    }

    /// Milliseconds of every stage.
    #[must_use]
    pub fn ms(&self) -> Vec<f64> {
        self.stages.iter().map(|stage| stage.busy_us as f64 / 1e3).collect()
    }

    /// Mean rows of a micro-batch of every stage.
    #[must_use]
    pub fn rows(&self) -> Vec<f64> {
        self.stages.iter().map(|stage| stage.n_rows as f64 / stage.n_batches as f64).collect()
    }
}

/// As [`load::users`], and also returns what the stages were busy with.
///
/// The answers of the last stage are read beside the coordinator: that costs the broker one more
/// delivery each, so such a turn is not timed.
///
/// # Errors
/// As [`load::users`]; a message that cannot be read.
pub async fn observed_users(
    fleet: &NodeFleet,
    n_users: usize,
    asks: &[Ask<'_>],
) -> anyhow::Result<(Vec<Served>, BusyTime)> {
    let subject = fleet.head_subject().context("the fleet has no coordinator")?;
    let mut heads = fleet.bus().subscribe(&subject).await?;
    let mut seen = Vec::new();
    let work = load::users(fleet, n_users, asks);
    let mut work = std::pin::pin!(work);
    let answers = loop {
        tokio::select! {
            answers = &mut work => break answers?,
            head = heads.next() => {
                seen.push(head.context("the observer's connection was closed")?);
            }
        }
    };
    while let Some(head) = heads.try_next() {
        seen.push(head);
    }
    let mut busy = BusyTime::default();
    for head in seen {
        for step in head.decode::<Head>()?.steps {
            busy.step(&step);
        }
    }
    Ok((answers, busy))
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::ids::StageIndex;

    use super::*;

    fn time(stage: u16, infer_us: u32, rows: u32) -> StageTime {
        let stage = StageIndex::new(stage);
        StageTime { stage, queue_us: 0, infer_us, rows, masked: 0, total_us: infer_us }
    }

    #[test]
    fn a_micro_batch_counts_once() {
        let mut busy = BusyTime::default();
        // Two sessions share stage 0's micro-batch and are apart on stage 1.
        busy.add(&[time(0, 5_000, 2), time(1, 3_000, 1)]);
        busy.add(&[time(0, 5_000, 2), time(1, 3_001, 1)]);
        assert_eq!(busy.ms(), [5.0, 6.001]);
        assert_eq!(busy.rows(), [2.0, 1.0]);
    }

    #[test]
    fn steps_of_a_prompt_are_left_out() {
        use stagebus_schemas::ids::{Epoch, StepNumber};
        use stagebus_schemas::messages::head::HeadRow;
        let mut busy = BusyTime::default();
        let mut step = |number: u32, rows: Vec<HeadRow>| {
            busy.step(&HeadStep {
                session: SessionId::from_u64(7),
                epoch: Epoch::FIRST,
                step: StepNumber::new(number),
                rows,
                logits: None,
                trace: vec![time(0, 1_000 + number, 1)],
            });
        };
        step(0, vec![]);
        step(1, vec![HeadRow::new(9, 1)]);
        step(2, vec![HeadRow::new(10, 1)]);
        assert_eq!(busy.ms(), [1.002]);
    }

    #[test]
    fn equal_times_far_apart_are_two_micro_batches() {
        let mut busy = BusyTime::default();
        for infer_us in (1..=RECENT as u32 + 1).chain([1]) {
            busy.add(&[time(0, infer_us, 1)]);
        }
        let expected: u32 = (1..=RECENT as u32 + 1).sum::<u32>() + 1;
        assert_eq!(busy.ms(), [f64::from(expected) / 1e3]);
    }
}
