//! Summaries of samples.

use serde::{Deserialize, Serialize};

/// Order statistics of a set of samples, in the unit of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of samples.
    pub n: usize,
    /// Smallest.
    pub min: f64,
    /// Tenth percentile.
    pub p10: f64,
    /// Median.
    pub median: f64,
    /// Ninetieth percentile.
    pub p90: f64,
    /// Ninety-ninth percentile.
    pub p99: f64,
}

impl Summary {
    /// Summarises samples; `None` without any. Samples that are not numbers are left out.
    #[must_use]
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = samples.into_iter().filter(|x| !x.is_nan()).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share| quantile(&sorted, share);
        Some(Self {
            n: sorted.len(),
            min: at(0.0)?,
            p10: at(0.1)?,
            median: at(0.5)?,
            p90: at(0.9)?,
            p99: at(0.99)?,
        })
    }
}

/// The median; `None` without samples.
#[must_use]
pub fn median(samples: impl IntoIterator<Item = f64>) -> Option<f64> {
    Summary::of(samples).map(|summary| summary.median)
}

/// The geometric mean of positive values; `None` without any. Others are left out.
#[must_use]
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let logarithms: Vec<f64> =
        values.into_iter().filter(|value| *value > 0.0).map(f64::ln).collect();
    let n = logarithms.len();
    (n > 0).then(|| (logarithms.into_iter().sum::<f64>() / n as f64).exp())
}

/// The quantile `share` of ascending samples, with linear interpolation between neighbours.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let position = share * last as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    let weight = position - low as f64;
    Some(sorted[low] * (1.0 - weight) + sorted[high.min(last)] * weight)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_the_middle_or_between_the_two_middles() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([5.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 10.0]), Some(3.0));
        assert_eq!(median([f64::NAN, 2.0]), Some(2.0));
    }

    #[test]
    fn the_geometric_mean_weighs_ratios_alike() {
        let mean = geometric_mean([0.5, 2.0]).expect("there are values");
        assert!((mean - 1.0).abs() < 1e-12, "{mean}");
        assert_eq!(geometric_mean([]), None);
        assert_eq!(geometric_mean([0.0, f64::NAN]), None);
    }

    #[test]
    fn a_summary_orders_its_values() {
        let summary = Summary::of((0..=100).rev().map(f64::from)).expect("there are samples");
        let expected = Summary { n: 101, min: 0.0, p10: 10.0, median: 50.0, p90: 90.0, p99: 99.0 };
        assert_eq!(summary, expected);
    }
}
