//! Figures over the answers, and the claims.
//!
//! Rates of one prompt are compared within the round and the fleet; categories are put together by
//! the geometric mean, so that each weighs the same whatever its speed.

use std::collections::BTreeSet;

use super::sweep::{Drawn, Long, Point};
use super::{AUTO_VS_BEST, Drafter, IDENTICAL, MASK_VS_TRIM, POOR_VS_OFF};
use crate::harness::claims::Claim;
use crate::harness::stats::{geometric_mean, median};
use crate::rewind_once::Rewind;

/// Acceptance is poor below this share of drafted tokens, taken at [`ACCEPTANCE_K`].
const POOR: f64 = 0.3;

/// Draft length at which acceptance is judged, or the nearest that was measured.
const ACCEPTANCE_K: u32 = 5;

/// Share of the drafted tokens that were right; `None` if none were drafted.
pub(super) fn acceptance<'a>(points: impl Iterator<Item = &'a Point>) -> Option<f64> {
    let sums = points.fold((0.0, 0.0), |(accepted, drafted), point| {
        (accepted + f64::from(point.accepted_tokens), drafted + f64::from(point.drafted_tokens))
    });
    (sums.1 > 0.0).then(|| sums.0 / sums.1)
}

/// Categories in order of appearance.
pub(super) fn categories(points: &[Point]) -> Vec<&'static str> {
    let mut all = Vec::new();
    for point in points {
        if !all.contains(&point.category) {
            all.push(point.category);
        }
    }
    all
}

/// Drafters in order of appearance.
pub(super) fn drafters(points: &[Point]) -> Vec<Drafter> {
    let mut all = Vec::new();
    for point in points {
        if !all.contains(&point.drafter) {
            all.push(point.drafter);
        }
    }
    all
}

/// Draft lengths, the coordinator's choice last.
pub(super) fn lengths(points: &[Point]) -> Vec<Option<u32>> {
    let fixed: BTreeSet<u32> = points.iter().filter_map(|point| point.k).collect();
    let auto = points.iter().any(|point| point.k.is_none()).then_some(None);
    fixed.into_iter().map(Some).chain(auto).collect()
}

/// Median rate of one drafter, draft length and category.
pub(super) fn rate(
    points: &[Point],
    drafter: Drafter,
    k: Option<u32>,
    category: &str,
) -> Option<f64> {
    let same =
        |point: &&Point| point.drafter == drafter && point.k == k && point.category == category;
    median(points.iter().filter(same).map(|point| point.tok_s))
}

/// The fixed draft length with the best rate in a category, and that rate.
pub(super) fn best_fixed(points: &[Point], drafter: Drafter, category: &str) -> Option<(u32, f64)> {
    let fixed = lengths(points).into_iter().flatten();
    let rates = fixed.filter_map(|k| Some((k, rate(points, drafter, Some(k), category)?)));
    rates.max_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// Geometric mean over categories of the rate with one draft length over that with another.
pub(super) fn speed_up(
    points: &[Point],
    drafter: Drafter,
    (k, over): (Option<u32>, Option<u32>),
) -> Option<f64> {
    geometric_mean(categories(points).into_iter().filter_map(|category| {
        Some(rate(points, drafter, k, category)? / rate(points, drafter, over, category)?)
    }))
}

/// Auto over the best fixed length of each category.
fn auto_vs_best(points: &[Point], drafter: Drafter) -> Option<f64> {
    geometric_mean(categories(points).into_iter().filter_map(|category| {
        let (_, best) = best_fixed(points, drafter, category)?;
        Some(rate(points, drafter, None, category)? / best)
    }))
}

/// Auto over the one fixed length that is best over all categories, and that length.
fn auto_vs_one(points: &[Point], drafter: Drafter) -> Option<(u32, f64)> {
    let fixed = lengths(points).into_iter().flatten();
    let rates = fixed.filter_map(|k| Some((k, speed_up(points, drafter, (Some(k), Some(0)))?)));
    let (k, best) = rates.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    Some((k, speed_up(points, drafter, (None, Some(0)))? / best))
}

/// Everything that was measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evidence<'a> {
    pub(super) points: &'a [Point],
    pub(super) drawn: &'a [Drawn],
    pub(super) long: &'a [Long],
    pub(super) rewinds: &'a [Rewind],
}

impl Evidence<'_> {
    /// The claims of a run.
    pub(super) fn claims(&self, absent: &[String]) -> Vec<Claim> {
        vec![
            auto_claim(self.points, absent),
            poor_claim(self.points),
            identity_claim(self.points, self.drawn, self.long),
            mask_claim(self.rewinds),
        ]
    }
}

/// The longest cache counts.
fn mask_claim(rewinds: &[Rewind]) -> Claim {
    let Some(longest) = rewinds.iter().max_by_key(|rewind| rewind.cache_tokens) else {
        return MASK_VS_TRIM.missing("no rewinds were measured");
    };
    let text = |rewind: &Rewind| {
        format!(
            "{} cached tokens: {:.1} ms a step with a mask, {:.1} ms with a cut ({:.1} ms of them \
             the cut)",
            rewind.cache_tokens, rewind.mask_ms.median, rewind.trim_ms.median, rewind.cut_ms.median
        )
    };
    let how = rewinds.iter().map(text).collect::<Vec<_>>().join("; ");
    MASK_VS_TRIM.measured(longest.trim_ms.median - longest.mask_ms.median, how)
}

/// The product's drafter counts, the last one measured; the others stand in `how`.
fn auto_claim(points: &[Point], absent: &[String]) -> Claim {
    let drafters = drafters(points);
    let of = |drafter| Some((drafter, auto_vs_best(points, drafter)?));
    let ratios: Vec<(Drafter, f64)> = drafters.iter().copied().filter_map(of).collect();
    let Some(&(drafter, ratio)) = ratios.last() else {
        return AUTO_VS_BEST.missing("no drafter was measured");
    };
    let list: Vec<String> =
        ratios.iter().map(|(who, ratio)| format!("{} {ratio:.3}", who.name())).collect();
    let one = auto_vs_one(points, drafter).map_or_else(String::new, |(k, ratio)| {
        format!("; over the one length that is best for all, {k}: {ratio:.3}")
    });
    let absent = if absent.is_empty() { "" } else { "; some drafters are absent" };
    let how = format!(
        "{}, over the best length of each category, one of {}; by drafter: {}{one}{absent}",
        drafter.name(),
        lengths(points).len().saturating_sub(1),
        list.join(", ")
    );
    AUTO_VS_BEST.measured(ratio, how)
}

/// A prompt with a drafter, how often it was right and what its drafting gained.
#[derive(Debug, Clone, Copy)]
struct Judged {
    acceptance: f64,
    ratio: f64,
}

fn poor_claim(points: &[Point]) -> Claim {
    let judged = judged(points);
    let poor: Vec<Judged> =
        judged.iter().copied().filter(|judged| judged.acceptance < POOR).collect();
    let worst = judged.iter().copied().min_by(|a, b| a.acceptance.total_cmp(&b.acceptance));
    let (chosen, what) = match (poor.is_empty(), worst) {
        (false, _) => (poor, format!("acceptance below {POOR}")),
        (true, Some(worst)) => (vec![worst], format!("none is below {POOR}; the poorest")),
        (true, None) => return POOR_VS_OFF.missing("no tokens were drafted"),
    };
    let acceptances = chosen.iter().map(|judged| judged.acceptance);
    let how = format!(
        "geometric mean over {} pairs of prompt and drafter, {what}, {:.2} in the middle, least \
         ratio {:.3}",
        chosen.len(),
        median(acceptances).unwrap_or_default(),
        chosen.iter().map(|judged| judged.ratio).fold(f64::INFINITY, f64::min)
    );
    match geometric_mean(chosen.iter().map(|judged| judged.ratio)) {
        Some(ratio) => POOR_VS_OFF.measured(ratio, how),
        None => POOR_VS_OFF.missing("no rates were measured"),
    }
}

/// Acceptance and gain of the coordinator's choice, for every prompt and drafter.
fn judged(points: &[Point]) -> Vec<Judged> {
    let distance = |k: &u32| k.abs_diff(ACCEPTANCE_K);
    let k = lengths(points).into_iter().flatten().filter(|&k| k > 0).min_by_key(distance);
    let n_prompts = points.iter().map(|point| point.prompt + 1).max().unwrap_or(0);
    let mut all = Vec::new();
    for drafter in drafters(points) {
        for prompt in 0..n_prompts {
            let of = |k: Option<u32>| {
                let same = move |point: &&Point| {
                    point.drafter == drafter && point.prompt == prompt && point.k == k
                };
                points.iter().filter(same)
            };
            let rate = |k| median(of(k).map(|point| point.tok_s));
            let ratio = rate(None).zip(rate(Some(0))).map(|(auto, off)| auto / off);
            if let Some((acceptance, ratio)) = acceptance(of(k)).zip(ratio) {
                all.push(Judged { acceptance, ratio });
            }
        }
    }
    all
}

fn identity_claim(points: &[Point], drawn: &[Drawn], long: &[Long]) -> Claim {
    let drafted = points.iter().filter(|point| point.drafted_tokens > 0);
    let greedy: Vec<bool> = drafted.map(|point| point.identical).collect();
    let plain_differs = points.iter().any(|point| point.drafted_tokens == 0 && !point.identical);
    let n_drawn: usize = drawn.iter().map(|drawn| drawn.n_answers).sum();
    let n_drawn_differing: usize = drawn.iter().map(|drawn| drawn.n_differing).sum();
    let long: Vec<bool> =
        long.iter().filter(|long| long.drafted_tokens > 0).map(|long| long.identical).collect();
    let n_greedy = greedy.len() + long.len();
    let n_greedy_equal = greedy.iter().chain(&long).filter(|&&identical| identical).count();
    if n_greedy == 0 {
        return IDENTICAL.missing("no tokens were drafted");
    }
    let n_equal = n_greedy_equal + (n_drawn - n_drawn_differing);
    let share = n_equal as f64 / (n_greedy + n_drawn) as f64;
    let plain = if plain_differs { "; answers WITHOUT drafts differ too" } else { "" };
    let how = format!(
        "{n_greedy_equal} of {n_greedy} greedy answers and {} of {n_drawn} drawn ones{plain}",
        n_drawn - n_drawn_differing
    );
    IDENTICAL.measured(share, how)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::stats::Summary;
    use crate::speculation::gains::gains;

    fn point(k: Option<u32>, prompt: usize, tok_s: f64, accepted: u32) -> Point {
        Point {
            drafter: Drafter::Hybrid,
            k,
            prompt,
            category: ["code", "chat"][prompt],
            round: 0,
            tok_s,
            n_tokens: 100,
            drafted_tokens: if k == Some(0) { 0 } else { 100 },
            accepted_tokens: accepted,
            steps: 50,
            bloat: 0.0,
            identical: true,
        }
    }

    /// Code gains by drafting, chat loses.
    fn points() -> Vec<Point> {
        vec![
            point(Some(0), 0, 100.0, 0),
            point(Some(5), 0, 200.0, 80),
            point(None, 0, 180.0, 80),
            point(Some(0), 1, 100.0, 0),
            point(Some(5), 1, 50.0, 10),
            point(None, 1, 90.0, 10),
        ]
    }

    fn value(claim: &Claim) -> f64 {
        (claim.value.expect("a value") * 1e6).round() / 1e6
    }

    #[test]
    fn auto_is_compared_with_the_best_length_of_each_category() {
        let points = points();
        assert_eq!(best_fixed(&points, Drafter::Hybrid, "code"), Some((5, 200.0)));
        assert_eq!(best_fixed(&points, Drafter::Hybrid, "chat"), Some((0, 100.0)));
        let claim = auto_claim(&points, &[]);
        assert_eq!((value(&claim), claim.holds), (0.9, Some(false)));
        // No one length serves both: drafting gains as much here as it loses there.
        assert!(claim.how.contains("best for all, "), "{}", claim.how);
    }

    #[test]
    fn gains_are_rates_over_none() {
        let gains = gains(&points());
        let of = |k, category| {
            let found = gains.iter().find(|gain| (gain.k, gain.category) == (k, category));
            let gain = found.expect("measured");
            (gain.speed_up.expect("a rate"), gain.acceptance.expect("drafted"))
        };
        assert_eq!(of(Some(5), "code"), (2.0, 0.8));
        assert_eq!(of(Some(5), "all"), (1.0, 0.45));
        assert_eq!(of(None, "chat"), (0.9, 0.1));
        assert_eq!(gains.len(), 6, "none for drafting nothing");
    }

    #[test]
    fn only_prompts_with_poor_acceptance_count_as_poor() {
        let claim = poor_claim(&points());
        assert_eq!((value(&claim), claim.holds), (0.9, Some(false)));
        let good: Vec<Point> = points().into_iter().filter(|point| point.prompt == 0).collect();
        let claim = poor_claim(&good);
        assert_eq!((value(&claim), claim.holds), (1.8, Some(true)));
        assert!(claim.how.contains("none is below"), "{}", claim.how);
    }

    #[test]
    fn the_longest_cache_decides_over_the_mask() {
        let summary = |ms| Summary::of([ms]).expect("a sample");
        let rewind = |cache_tokens, mask, trim| Rewind {
            cache_tokens,
            mask_ms: summary(mask),
            trim_ms: summary(trim),
            cut_ms: summary(1.0),
        };
        let claim = mask_claim(&[rewind(72, 14.0, 15.0), rewind(512, 16.0, 36.0)]);
        assert_eq!((value(&claim), claim.holds), (20.0, Some(true)));
        assert!(claim.how.contains("72 cached tokens: 14.0 ms"), "{}", claim.how);
    }

    #[test]
    fn one_answer_that_differs_spoils_the_share() {
        let drawn =
            [Drawn { drafter: Drafter::Hybrid, n_answers: 4, n_differing: 1, drafted_tokens: 9 }];
        let claim = identity_claim(&points(), &drawn, &[]);
        assert_eq!((value(&claim), claim.holds), (0.875, Some(false)));
        assert_eq!(identity_claim(&points(), &[], &[]).holds, Some(true));
        assert_eq!(identity_claim(&points()[..1], &[], &[]).value, None);
    }
}
