//! What the thread measures for the announcements.

use std::time::Duration;

use stagebus_schemas::messages::forward::{Phase, Step};

use super::InferenceLoad;
use crate::results::{micros, u32_of};

/// Weight of a new measurement in the smoothed times: settles within about twenty steps, so a
/// busy spell shows and one outlier does not.
const SMOOTHING: f64 = 0.1;

/// Inference times of one micro-batch.
#[derive(Default)]
pub(super) struct Times {
    decode: Vec<f64>,
    prefill_row: Vec<f64>,
    n_done: u32,
}

impl Times {
    /// Takes in `n_rows` rows of a step.
    pub(super) fn add(&mut self, step: &Step, n_rows: usize, infer: Duration) {
        let infer_us = f64::from(micros(infer));
        match step.phase {
            Phase::Decode => self.decode.push(infer_us),
            Phase::Prefill => self.prefill_row.push(infer_us / f64::from(u32_of(n_rows.max(1)))),
        }
    }

    /// Counts steps that need no further run.
    pub(super) fn done(&mut self, n_steps: usize) {
        self.n_done += u32_of(n_steps);
    }

    pub(super) fn smooth_into(&self, load: &mut InferenceLoad) {
        load.steps_completed += u64::from(self.n_done);
        for (smoothed, measured) in
            [(&mut load.decode_us, &self.decode), (&mut load.prefill_row_us, &self.prefill_row)]
        {
            for time in measured {
                let weight = if *smoothed == 0.0 { 1.0 } else { SMOOTHING };
                *smoothed += (time - *smoothed) * weight;
            }
        }
    }
}
