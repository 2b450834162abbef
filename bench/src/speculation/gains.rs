//! What each draft length gains, by category and over all.

use serde::Serialize;

use super::Drafter;
use super::sweep::Point;
use super::verdict::{acceptance, categories, drafters, lengths, rate, speed_up};

/// The category of the figures over all categories.
const ALL: &str = "all";

/// A drafter with one draft length, over none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gain {
    /// The drafter.
    pub drafter: Drafter,
    /// Draft length in tokens; `None` leaves it to the coordinator.
    pub k: Option<u32>,
    /// Category of the prompts; `all` is the geometric mean over the categories.
    pub category: &'static str,
    /// Rate over that without drafts.
    pub speed_up: Option<f64>,
    /// Share of the drafted tokens that were right.
    pub acceptance: Option<f64>,
}

/// The gains of every drafter with every draft length.
pub(super) fn gains(points: &[Point]) -> Vec<Gain> {
    let mut gains = Vec::new();
    for drafter in drafters(points) {
        for k in lengths(points).into_iter().filter(|k| *k != Some(0)) {
            let of = |category: &'static str| {
                let same = move |point: &&Point| {
                    let here = category == ALL || point.category == category;
                    here && point.drafter == drafter && point.k == k
                };
                acceptance(points.iter().filter(same))
            };
            let all = speed_up(points, drafter, (k, Some(0)));
            gains.push(Gain { drafter, k, category: ALL, speed_up: all, acceptance: of(ALL) });
            for category in categories(points) {
                let over = |k| rate(points, drafter, k, category);
                let speed_up = over(k).zip(over(Some(0))).map(|(with, without)| with / without);
                gains.push(Gain { drafter, k, category, speed_up, acceptance: of(category) });
            }
        }
    }
    gains
}
