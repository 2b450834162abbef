//! What a step costs: per stage a straight line over the rows of its micro-batches.
//!
//! The line goes through what micro-batches of very different sizes took. Sizes are remembered for
//! as long as nothing newer is known of them: under steady load all micro-batches are about as
//! large, and a slope from their small differences would be noise.
//!
//! With `S` stages and `A` sessions that decode at the same time, a stage runs about `A / S` of
//! them in one micro-batch. A drafted token of every session therefore adds `A / S` rows to it, and
//! each session waits for all of them: that is what a row costs, not the one row of its own.

use std::time::Duration;

use crate::control::StepCosts;
use crate::windows::{StageCost, WindowCosts};

/// Weight of one new measurement against the past: about the last twenty count.
const SMOOTHING: f64 = 0.05;

/// Rows above which a micro-batch holds prompt rows and says nothing about decoding.
const MAX_DECODE_ROWS: u32 = 64;

/// Cost of a row relative to a one-row step until micro-batches of different sizes were seen.
const PRIOR_ROW_SHARE: f64 = 0.1;

/// Least variance of the sizes that shows a slope, in squares of their mean.
const MIN_SPREAD: f64 = 0.1;

/// Sizes that are told apart: 1, 2, 3-4, 5-8, 9-16, 17-32 and 33-64 rows.
const N_SIZES: usize = 7;

/// Margin of a draft where every stage always has a session's rows to work on. Rows that a draft
/// adds then delay everybody, and so does the processor time of a drafter on the same machine.
const MARGIN_SHARED: f64 = 0.2;

/// Margin of a draft elsewhere.
const MARGIN: f64 = 0.03;

/// Mean rows and seconds of micro-batches of about one size.
#[derive(Debug, Clone, Copy)]
struct Size {
    rows: f64,
    seconds: f64,
}

/// What micro-batches of a stage took, by size.
#[derive(Debug, Clone, Copy, Default)]
struct Line {
    sizes: [Option<Size>; N_SIZES],
}

/// One measured run of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageRun {
    /// Rows of the micro-batch.
    pub rows: u32,
    /// Its inference time.
    pub infer: Duration,
}

/// What the steps of all sessions have cost lately.
#[derive(Debug, Clone, Default)]
pub struct StepCostModel {
    stages: Vec<Line>,
    /// Seconds of a step that no stage accounts for: the broker and the processes around it.
    overhead: Option<f64>,
    /// Seconds per drafted token.
    draft: Option<f64>,
}

impl Line {
    fn add(&mut self, rows: u32, seconds: f64) {
        let index = rows.max(1).next_power_of_two().ilog2() as usize;
        let Some(size) = self.sizes.get_mut(index) else { return };
        let rows = f64::from(rows);
        match size {
            Some(size) => {
                size.rows += (rows - size.rows) * SMOOTHING;
                size.seconds += (seconds - size.seconds) * SMOOTHING;
            }
            None => *size = Some(Size { rows, seconds }),
        }
    }

    /// Value at 0 and slope of the least-squares line; neither is negative.
    fn coefficients(&self) -> Option<(f64, f64)> {
        let known = || self.sizes.iter().flatten();
        let n = known().count() as f64;
        if n == 0.0 {
            return None;
        }
        let mean = |of: &dyn Fn(&Size) -> f64| known().map(of).sum::<f64>() / n;
        let (rows, seconds) = (mean(&|size| size.rows), mean(&|size| size.seconds));
        let variance = mean(&|size| (size.rows - rows).powi(2));
        let slope = if variance < MIN_SPREAD * rows * rows {
            PRIOR_ROW_SHARE * seconds / (1.0 + PRIOR_ROW_SHARE * (rows - 1.0).max(0.0))
        } else {
            (mean(&|size| (size.rows - rows) * (size.seconds - seconds)) / variance)
                .clamp(0.0, seconds / rows.max(1.0))
        };
        Some(((seconds - slope * rows).max(0.0), slope))
    }
}

impl StepCostModel {
    /// Learns from a decode step: what each stage ran, and the time that no stage accounts for.
    pub fn step(&mut self, runs: &[StageRun], overhead: Duration) {
        self.stages.resize_with(self.stages.len().max(runs.len()), Line::default);
        for (line, run) in self.stages.iter_mut().zip(runs) {
            if (1..=MAX_DECODE_ROWS).contains(&run.rows) {
                line.add(run.rows, run.infer.as_secs_f64());
            }
        }
        smooth(&mut self.overhead, overhead.as_secs_f64());
    }

    /// Learns how long a session waited for its draft, per token.
    pub fn draft(&mut self, per_token: Duration) {
        smooth(&mut self.draft, per_token.as_secs_f64());
    }

    /// What the parts of a window's way cost while `n_active` sessions decode; `None` before the
    /// first measurement.
    #[must_use]
    pub fn windows(&self, n_active: usize) -> Option<WindowCosts> {
        let cost = |line: &Line| line.coefficients().map(|(base, row)| StageCost { base, row });
        let stages: Option<Vec<StageCost>> = self.stages.iter().map(cost).collect();
        Some(WindowCosts {
            stages: stages.filter(|stages| !stages.is_empty())?,
            links: Duration::from_secs_f64(self.overhead.unwrap_or(0.0)),
            draft: Duration::from_secs_f64(self.draft.unwrap_or(0.0)),
            n_active,
        })
    }

    /// What a step costs while `n_active` sessions decode; `None` before the first measurement.
    #[must_use]
    pub fn costs(&self, n_active: usize) -> Option<StepCosts> {
        let lines: Option<Vec<(f64, f64)>> = self.stages.iter().map(Line::coefficients).collect();
        let lines = lines.filter(|lines| !lines.is_empty())?;
        let sharing = (n_active as f64 / lines.len() as f64).max(1.0);
        let base: f64 = lines.iter().map(|(base, slope)| base + slope * sharing).sum();
        let row: f64 = lines.iter().map(|(_, slope)| slope * sharing).sum();
        Some(StepCosts {
            round_trip: Duration::from_secs_f64(base + self.overhead.unwrap_or(0.0)),
            row: Duration::from_secs_f64(row),
            draft: Duration::from_secs_f64(self.draft.unwrap_or(0.0)),
            margin: if n_active > 1 && n_active >= lines.len() { MARGIN_SHARED } else { MARGIN },
        })
    }
}

fn smooth(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + (new - old) * SMOOTHING));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rows: u32, infer_us: u64) -> StageRun {
        StageRun { rows, infer: Duration::from_micros(infer_us) }
    }

    fn close(found: Duration, expected_us: f64) {
        let found = found.as_secs_f64() * 1e6;
        assert!((found - expected_us).abs() < expected_us * 0.01 + 0.1, "{found} {expected_us}");
    }

    #[test]
    fn the_line_of_each_stage_is_found() {
        let mut model = StepCostModel::default();
        assert_eq!(model.costs(1), None);
        for rows in [1, 4, 2, 6, 3, 1, 8] {
            let us = |base: u64, slope: u64| base + slope * u64::from(rows);
            let runs = [run(rows, us(5_000, 500)), run(rows, us(6_000, 700))];
            model.step(&runs, Duration::from_micros(300));
        }
        let costs = model.costs(1).unwrap();
        close(costs.round_trip, 5_500.0 + 6_700.0 + 300.0);
        close(costs.row, 1_200.0);
        // Eight sessions over two stages: four share each micro-batch.
        let costs = model.costs(8).unwrap();
        close(costs.round_trip, 5_000.0 + 2_000.0 + 6_000.0 + 2_800.0 + 300.0);
        close(costs.row, 4_800.0);
        assert!(costs.margin > model.costs(1).unwrap().margin);
    }

    #[test]
    fn steps_of_one_size_leave_the_prior() {
        let mut model = StepCostModel::default();
        for _ in 0..10 {
            model.step(&[run(1, 10_000)], Duration::ZERO);
        }
        close(model.costs(1).unwrap().row, 1_000.0);
        close(model.costs(1).unwrap().round_trip, 10_000.0);
    }

    #[test]
    fn a_steady_load_does_not_wash_out_what_a_row_costs() {
        let mut model = StepCostModel::default();
        model.step(&[run(1, 5_000)], Duration::ZERO);
        for i in 0..1_000_u64 {
            // Eight or nine rows whose times are noise: the larger ones happen to be quicker.
            let (rows, us) = if i % 2 == 0 { (8, 13_000) } else { (9, 12_000) };
            model.step(&[run(rows, us)], Duration::ZERO);
        }
        let row = model.costs(1).unwrap().row;
        assert!((700..1_200).contains(&row.as_micros()), "{row:?}");
    }

    #[test]
    fn prompt_chunks_do_not_count() {
        let mut model = StepCostModel::default();
        model.step(&[run(1, 10_000)], Duration::ZERO);
        model.step(&[run(130, 500_000)], Duration::ZERO);
        close(model.costs(1).unwrap().round_trip, 10_000.0);
    }

    #[test]
    fn noise_never_makes_a_row_free_of_charge_below_zero() {
        let mut model = StepCostModel::default();
        model.step(&[run(1, 10_000)], Duration::ZERO);
        model.step(&[run(5, 4_000)], Duration::ZERO);
        let costs = model.costs(1).unwrap();
        assert_eq!(costs.row, Duration::ZERO);
        assert!(costs.round_trip > Duration::ZERO);
    }
}
