//! What a step costs: per stage a straight line over the rows of its micro-batches.
//!
//! With `S` stages and `A` sessions that decode at the same time, a stage runs about `A / S` of
//! them in one micro-batch. A drafted token of every session therefore adds `A / S` rows to it, and
//! each session waits for all of them: that is what a row costs, not the one row of its own.

use std::time::Duration;

use crate::control::StepCosts;

/// Weight of the past against one new measurement: about the last hundred count.
const DECAY: f64 = 0.99;

/// Rows above which a micro-batch holds prompt rows and says nothing about decoding.
const MAX_DECODE_ROWS: u32 = 64;

/// Cost of a row relative to a one-row step until micro-batches of different sizes were seen.
const PRIOR_ROW_SHARE: f64 = 0.1;

/// Least spread of the rows, in squared rows, that shows a slope.
const MIN_VARIANCE: f64 = 0.05;

/// Margin of a draft where every stage always has a session's rows to work on. Rows that a draft
/// adds then delay everybody, and so does the processor time of a drafter on the same machine.
const MARGIN_SHARED: f64 = 0.2;

/// Margin of a draft elsewhere.
const MARGIN: f64 = 0.03;

/// A least-squares line through decayed points.
#[derive(Debug, Clone, Copy, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
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
    fn add(&mut self, x: f64, y: f64) {
        for sum in [&mut self.weight, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= DECAY;
        }
        self.weight += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    /// Value at 0 and slope; neither is negative.
    fn coefficients(&self) -> Option<(f64, f64)> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let variance = self.xx / self.weight - mean_x * mean_x;
        let slope = if variance < MIN_VARIANCE {
            PRIOR_ROW_SHARE * mean_y / (1.0 + PRIOR_ROW_SHARE * (mean_x - 1.0).max(0.0))
        } else {
            ((self.xy / self.weight - mean_x * mean_y) / variance)
                .clamp(0.0, mean_y / mean_x.max(1.0))
        };
        Some(((mean_y - slope * mean_x).max(0.0), slope))
    }
}

impl StepCostModel {
    /// Learns from a decode step: what each stage ran, and the time that no stage accounts for.
    pub fn step(&mut self, runs: &[StageRun], overhead: Duration) {
        self.stages.resize_with(self.stages.len().max(runs.len()), Line::default);
        for (line, run) in self.stages.iter_mut().zip(runs) {
            if (1..=MAX_DECODE_ROWS).contains(&run.rows) {
                line.add(f64::from(run.rows), run.infer.as_secs_f64());
            }
        }
        smooth(&mut self.overhead, overhead.as_secs_f64());
    }

    /// Learns how long a session waited for its draft, per token.
    pub fn draft(&mut self, per_token: Duration) {
        smooth(&mut self.draft, per_token.as_secs_f64());
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
            margin: if n_active > lines.len() { MARGIN_SHARED } else { MARGIN },
        })
    }
}

fn smooth(value: &mut Option<f64>, new: f64) {
    const WEIGHT: f64 = 0.05;
    *value = Some(value.map_or(new, |old| old + (new - old) * WEIGHT));
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
        assert!(costs.margin > model.costs(2).unwrap().margin);
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
