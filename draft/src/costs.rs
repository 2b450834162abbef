//! What a step costs: what each stage took by the rows of its micro-batches.
//!
//! Sizes are remembered for as long as nothing newer is known of them: under steady load all
//! micro-batches are about as large, and a slope from their small differences would be noise. A row
//! more is not always as dear as the one before it (kernels take some rows at a time), so a step
//! costs what micro-batches of its size took, and between known sizes what lies between. Beyond the
//! known ones, and for windows in flight, a straight line through all of them goes on.
//!
//! With `S` stages and `A` sessions that decode at the same time, a stage runs about `A / S` of
//! them in one micro-batch. A drafted token of every session therefore adds `A / S` rows to it, and
//! each session waits for all of them: that is what a row costs, not the one row of its own.

use std::time::Duration;

use crate::control::{MAX_DRAFT_TOKENS, StepCosts};
use crate::windows::{StageCost, WindowCosts};

/// Weight of one new measurement against the past: about the last twenty count.
const SMOOTHING: f64 = 0.05;

/// Rows above which a micro-batch holds prompt rows and says nothing about decoding.
const MAX_DECODE_ROWS: u32 = 64;

/// Cost of a row relative to a one-row step until micro-batches of different sizes were seen.
const PRIOR_ROW_SHARE: f64 = 0.1;

/// Least variance of the sizes that shows a slope, in squares of their mean.
const MIN_SPREAD: f64 = 0.1;

/// Rows up to which every number is a size of its own: those of one session's step.
const MAX_EXACT: u32 = 8;

/// Sizes that are told apart: 1 to 8, then 9-16, 17-32 and 33-64 rows.
const N_SIZES: usize = 11;

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
struct Stage {
    sizes: [Option<Size>; N_SIZES],
}

/// What a stage takes for any number of rows.
#[derive(Debug, Clone)]
struct Curve {
    /// The known sizes, the times not falling.
    sizes: Vec<Size>,
    /// The straight line through all of them.
    line: StageCost,
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
    stages: Vec<Stage>,
    /// Seconds of a step that no stage accounts for: the broker and the processes around it.
    overhead: Option<f64>,
    /// Seconds per drafted token.
    draft: Option<f64>,
}

impl Stage {
    fn add(&mut self, rows: u32, seconds: f64) {
        let Some(size) = self.sizes.get_mut(size_index(rows)) else { return };
        let rows = f64::from(rows);
        match size {
            Some(size) => {
                size.rows += (rows - size.rows) * SMOOTHING;
                size.seconds += (seconds - size.seconds) * SMOOTHING;
            }
            None => *size = Some(Size { rows, seconds }),
        }
    }

    /// The least-squares line; neither its base nor its slope is negative.
    fn line(&self) -> Option<StageCost> {
        let known = || self.sizes.iter().flatten();
        let n = known().count() as f64;
        if n == 0.0 {
            return None;
        }
        let mean = |of: &dyn Fn(&Size) -> f64| known().map(of).sum::<f64>() / n;
        let (rows, seconds) = (mean(&|size| size.rows), mean(&|size| size.seconds));
        let variance = mean(&|size| (size.rows - rows).powi(2));
        let row = if variance < MIN_SPREAD * rows * rows {
            PRIOR_ROW_SHARE * seconds / (1.0 + PRIOR_ROW_SHARE * (rows - 1.0).max(0.0))
        } else {
            (mean(&|size| (size.rows - rows) * (size.seconds - seconds)) / variance)
                .clamp(0.0, seconds / rows.max(1.0))
        };
        Some(StageCost { base: (seconds - row * rows).max(0.0), row })
    }

    fn curve(&self) -> Option<Curve> {
        let line = self.line()?;
        // More rows take no less time: where measurements say so, it is noise, and their mean stands
        // for all of them (isotonic regression by pooling neighbours).
        let mut pools: Vec<Vec<Size>> = Vec::new();
        for size in self.sizes.iter().flatten() {
            let mut pool = vec![*size];
            while pools.last().is_some_and(|before| mean_seconds(before) > mean_seconds(&pool)) {
                let mut before = pools.pop().unwrap_or_default();
                before.append(&mut pool);
                pool = before;
            }
            pools.push(pool);
        }
        let level = |pool: Vec<Size>| {
            let seconds = mean_seconds(&pool);
            pool.into_iter().map(move |size| Size { seconds, ..size })
        };
        Some(Curve { sizes: pools.into_iter().flat_map(level).collect(), line })
    }
}

fn mean_seconds(sizes: &[Size]) -> f64 {
    sizes.iter().map(|size| size.seconds).sum::<f64>() / sizes.len().max(1) as f64
}

fn size_index(rows: u32) -> usize {
    let rows = rows.max(1);
    let doublings = rows.div_ceil(MAX_EXACT).next_power_of_two().ilog2();
    (rows.min(MAX_EXACT) - 1 + doublings) as usize
}

impl Curve {
    /// Seconds of a micro-batch of so many rows.
    fn at(&self, rows: f64) -> f64 {
        let behind = self.sizes.partition_point(|size| size.rows < rows);
        match (behind.checked_sub(1).and_then(|i| self.sizes.get(i)), self.sizes.get(behind)) {
            (Some(below), Some(above)) => {
                let part = (rows - below.rows) / (above.rows - below.rows);
                below.seconds + (above.seconds - below.seconds) * part
            }
            (Some(last), None) => last.seconds + self.line.row * (rows - last.rows),
            (None, Some(first)) => {
                let on_the_line = first.seconds - self.line.row * (first.rows - rows);
                on_the_line.max(first.seconds * rows / first.rows)
            }
            (None, None) => self.line.base + self.line.row * rows,
        }
    }
}

impl StepCostModel {
    /// Learns from a decode step: what each stage ran, and the time that no stage accounts for.
    pub fn step(&mut self, runs: &[StageRun], overhead: Duration) {
        self.stages.resize_with(self.stages.len().max(runs.len()), Stage::default);
        for (stage, run) in self.stages.iter_mut().zip(runs) {
            if (1..=MAX_DECODE_ROWS).contains(&run.rows) {
                stage.add(run.rows, run.infer.as_secs_f64());
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
        let stages: Option<Vec<StageCost>> = self.stages.iter().map(Stage::line).collect();
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
        let curves: Option<Vec<Curve>> = self.stages.iter().map(Stage::curve).collect();
        let curves = curves.filter(|curves| !curves.is_empty())?;
        let sharing = (n_active as f64 / curves.len() as f64).max(1.0);
        let overhead = self.overhead.unwrap_or(0.0);
        let step = |n_drafted: u64| {
            let rows = (1 + n_drafted) as f64 * sharing;
            let stages: f64 = curves.iter().map(|curve| curve.at(rows)).sum();
            Duration::from_secs_f64(stages + overhead)
        };
        Some(StepCosts {
            steps: (0..=MAX_DRAFT_TOKENS).map(step).collect(),
            draft: Duration::from_secs_f64(self.draft.unwrap_or(0.0)),
            margin: if n_active > 1 && n_active >= curves.len() { MARGIN_SHARED } else { MARGIN },
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
        close(costs.steps[0], 5_500.0 + 6_700.0 + 300.0);
        close(costs.steps[1] - costs.steps[0], 1_200.0);
        // Eight sessions over two stages: four share each micro-batch.
        let costs = model.costs(8).unwrap();
        close(costs.steps[0], 5_000.0 + 2_000.0 + 6_000.0 + 2_800.0 + 300.0);
        close(costs.steps[1] - costs.steps[0], 4_800.0);
        assert!(costs.margin > model.costs(1).unwrap().margin);
    }

    #[test]
    fn steps_of_one_size_leave_the_prior() {
        let mut model = StepCostModel::default();
        for _ in 0..10 {
            model.step(&[run(1, 10_000)], Duration::ZERO);
        }
        let costs = model.costs(1).unwrap();
        close(costs.steps[0], 10_000.0);
        close(costs.steps[1] - costs.steps[0], 1_000.0);
    }

    #[test]
    fn rows_that_run_together_cost_what_they_took() {
        // Six rows take as long as one, then the weights are read again.
        let us = |rows: u32| 10_000 * u64::from(rows.div_ceil(6));
        let mut model = StepCostModel::default();
        for rows in [1, 3, 6, 7, 11] {
            model.step(&[run(rows, us(rows))], Duration::ZERO);
        }
        let steps = model.costs(1).unwrap().steps;
        steps[..=5].iter().for_each(|step| close(*step, 10_000.0));
        steps[6..=10].iter().for_each(|step| close(*step, 20_000.0));
        assert!(steps[20] > steps[10]);
    }

    #[test]
    fn every_size_has_its_place() {
        let rows = [1, 2, 7, 8, 9, 16, 17, 32, 33, 64];
        assert_eq!(rows.map(size_index), [0, 1, 6, 7, 8, 8, 9, 9, 10, 10]);
        assert_eq!(size_index(MAX_DECODE_ROWS), N_SIZES - 1);
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
        let steps = model.costs(1).unwrap().steps;
        let row = steps[1] - steps[0];
        assert!((700..1_200).contains(&row.as_micros()), "{row:?}");
    }

    #[test]
    fn prompt_chunks_do_not_count() {
        let mut model = StepCostModel::default();
        model.step(&[run(1, 10_000)], Duration::ZERO);
        model.step(&[run(130, 500_000)], Duration::ZERO);
        close(model.costs(1).unwrap().steps[0], 10_000.0);
    }

    #[test]
    fn noise_never_makes_a_row_free_of_charge_below_zero() {
        let mut model = StepCostModel::default();
        model.step(&[run(1, 10_000)], Duration::ZERO);
        model.step(&[run(5, 4_000)], Duration::ZERO);
        let costs = model.costs(1).unwrap();
        assert!(costs.steps.iter().all(|step| *step == costs.steps[0]));
        close(costs.steps[0], 7_000.0);
    }
}
