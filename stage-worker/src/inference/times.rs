//! What the thread measures for the announcements.

use std::time::Duration;

use stagebus_schemas::messages::forward::{Phase, Step};

use super::InferenceLoad;
use crate::results::{micros, u32_of};

/// Weight of a new measurement in the smoothed times: settles within about twenty steps, so a
/// busy spell shows and one outlier does not.
const SMOOTHING: f64 = 0.1;

/// How long a micro-batch of these parts should take by what `load` has measured; nothing before
/// every kind of part has been measured.
pub(super) fn expected(
    load: &InferenceLoad,
    parts: impl Iterator<Item = (Phase, usize)>,
) -> Option<Duration> {
    let (mut decode_us, mut prefill_us) = (0.0_f64, 0.0);
    for (phase, n_rows) in parts {
        let rows = f64::from(u32_of(n_rows.max(1)));
        match phase {
            // A replay runs many generated rows at once, each at most as long as a step alone.
            Phase::Decode if load.decode_us > 0.0 => {
                decode_us = decode_us.max(load.decode_us * rows)
            }
            Phase::Prefill if load.prefill_row_us > 0.0 => prefill_us += load.prefill_row_us * rows,
            Phase::Decode | Phase::Prefill => return None,
        }
    }
    Some(Duration::from_secs_f64((decode_us + prefill_us) / 1e6))
}

/// Inference times of one micro-batch.
#[derive(Default)]
pub(super) struct Times {
    decode: Vec<f64>,
    prefill_row: Vec<f64>,
    n_done: u32,
    n_rows: u64,
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

    /// Counts rows that have run.
    pub(super) fn rows(&mut self, n_rows: usize) {
        self.n_rows += u64::from(u32_of(n_rows));
    }

    /// Counts steps that need no further run.
    pub(super) fn done(&mut self, n_steps: usize) {
        self.n_done += u32_of(n_steps);
    }

    pub(super) fn smooth_into(&self, load: &mut InferenceLoad) {
        load.steps_completed += u64::from(self.n_done);
        load.rows_completed += self.n_rows;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_expected_to_take_what_its_like_took() {
        let load =
            InferenceLoad { decode_us: 5_000.0, prefill_row_us: 1_000.0, ..Default::default() };
        let of = |load: &InferenceLoad, parts: &[(Phase, usize)]| {
            expected(load, parts.iter().copied()).map(|time| time.as_millis())
        };
        let (decode, prefill) = (Phase::Decode, Phase::Prefill);
        assert_eq!(of(&load, &[(decode, 1), (decode, 1)]), Some(5), "they run together");
        assert_eq!(of(&load, &[(decode, 1), (prefill, 100)]), Some(105));
        assert_eq!(of(&load, &[(decode, 10)]), Some(50));
        let unmeasured = InferenceLoad { prefill_row_us: 0.0, ..load };
        assert_eq!(of(&unmeasured, &[(decode, 1), (prefill, 100)]), None);
        assert_eq!(of(&unmeasured, &[(decode, 1)]), Some(5));
    }
}
