//! Figures over the answers, and the claims.
//!
//! Categories are put together by the geometric mean, so that each weighs the same. The acceptance
//! `p` of a category is that of its answers with drafts in one chain: of all tokens but the
//! first and the last, the share that was drafted. A plain step is a round trip and one pass
//! through the stages, so the ceiling is `1 / (1 - p)` times the plain rate of the same prompts.

use serde::Serialize;

use super::{
    AUTO_VS_BEST, CEILING, FOUR, FOUR_VS_ONE, NOTHING_LOST, Point, RivalPoint, TREE, TWO,
    WanReport, Way, hosted,
};
use crate::harness::claims::{Claim, Target};
use crate::harness::stats::{geometric_mean, median};
use crate::harness::table::{number, table};

/// The delay of the claims about slow links, in milliseconds.
pub(super) const SLOW_MS: u32 = 100;

/// Share of drafted tokens among those that could be, for one session of a category.
fn acceptance(points: &[Point], hop_ms: u32, category: &str) -> Option<f64> {
    let chosen = points.iter().filter(|point| {
        (point.hop_ms, point.n_sessions, point.way) == (hop_ms, 1, Way::Chain)
            && point.category == category
    });
    let (accepted, tested) = chosen.fold((0.0, 0.0), |(accepted, tested), point| {
        let n_tested = point.n_tokens.saturating_sub(2) as f64;
        (accepted + f64::from(point.accepted_tokens), tested + n_tested)
    });
    (tested > 0.0).then(|| (accepted / tested).min(0.99))
}

fn categories(points: &[Point]) -> Vec<&'static str> {
    let mut all = Vec::new();
    for point in points {
        if !all.contains(&point.category) {
            all.push(point.category);
        }
    }
    all
}

/// Median rate of a session.
pub(super) fn rate(points: &[Point], case: (u32, usize, Way), category: &str) -> Option<f64> {
    let of_case = points.iter().filter(|point| {
        (point.hop_ms, point.n_sessions, point.way) == case && point.category == category
    });
    median(of_case.map(|point| point.tok_s))
}

/// Rate of all sessions together: the mean over categories, times the sessions.
fn all_sessions(points: &[Point], (hop_ms, n_sessions, way): (u32, usize, Way)) -> Option<f64> {
    let case = (hop_ms, n_sessions, way);
    let rates: Vec<f64> =
        categories(points).iter().filter_map(|category| rate(points, case, category)).collect();
    let n = rates.len();
    (n > 0).then(|| rates.iter().sum::<f64>() / n as f64 * n_sessions as f64)
}

/// Geometric mean over categories of the ratio of two ways of one session.
fn ratio(points: &[Point], hop_ms: u32, way: Way, other: Way) -> Option<f64> {
    let ratios = categories(points).into_iter().filter_map(|category| {
        let of = |way| rate(points, (hop_ms, 1, way), category);
        Some(of(way)? / of(other)?)
    });
    geometric_mean(ratios)
}

/// Share of the ceiling that one session reaches.
fn ceiling_share(points: &[Point], hop_ms: u32, way: Way, category: &str) -> Option<f64> {
    let p = acceptance(points, hop_ms, category)?;
    let plain = rate(points, (hop_ms, 1, Way::Plain), category)?;
    Some(rate(points, (hop_ms, 1, way), category)? * (1.0 - p) / plain)
}

fn delays(points: &[Point]) -> Vec<u32> {
    let mut all: Vec<u32> = points.iter().map(|point| point.hop_ms).collect();
    all.dedup();
    all
}

fn fixed_ways(points: &[Point]) -> Vec<Way> {
    let mut all = Vec::new();
    for point in points {
        if matches!(point.way, Way::Windows(_)) && !all.contains(&point.way) {
            all.push(point.way);
        }
    }
    all
}

/// The claims.
pub(super) fn claims(points: &[Point]) -> Vec<Claim> {
    let plain = all_sessions(points, (SLOW_MS, 1, Way::Plain));
    let auto = |n_sessions| all_sessions(points, (SLOW_MS, n_sessions, Way::Auto));
    let over = |target: &Target, value: Option<f64>, by: Option<f64>| match (value, by) {
        (Some(value), Some(by)) => {
            target.measured(value / by, format!("{value:.2} tok/s over {by:.2}"))
        }
        _ => target.missing(format!("not measured at {SLOW_MS} ms a hop")),
    };
    vec![
        ceiling(points, &CEILING, Way::Chain),
        ceiling(points, &TREE, Way::Auto),
        over(&TWO, auto(2), plain),
        over(&FOUR, auto(4), plain),
        over(&FOUR_VS_ONE, auto(4), auto(1)),
        match ratio(points, 0, Way::Auto, Way::Windows(1)) {
            Some(value) => NOTHING_LOST.measured(value, "eight categories, one session"),
            None => NOTHING_LOST.missing("not measured without delay"),
        },
        auto_vs_best(points),
    ]
}

fn ceiling(points: &[Point], target: &Target, way: Way) -> Claim {
    let shares: Vec<(&str, f64, f64)> = categories(points)
        .into_iter()
        .filter_map(|category| {
            let p = acceptance(points, SLOW_MS, category)?;
            Some((category, p, ceiling_share(points, SLOW_MS, way, category)?))
        })
        .collect();
    let Some(mean) = geometric_mean(shares.iter().map(|(_, _, share)| *share)) else {
        return target.missing(format!("not measured at {SLOW_MS} ms a hop"));
    };
    let each: Vec<String> = shares
        .iter()
        .map(|(category, p, share)| format!("{category} {share:.2} (p {p:.2})"))
        .collect();
    target.measured(mean, each.join(", "))
}

fn auto_vs_best(points: &[Point]) -> Claim {
    let of_delay = |hop_ms: u32| {
        let best = fixed_ways(points)
            .into_iter()
            .filter_map(|way| Some((ratio(points, hop_ms, Way::Chain, way)?, way)))
            .min_by(|a, b| a.0.total_cmp(&b.0))?;
        Some((best.0, format!("{:.2} of {} at {hop_ms} ms", best.0, best.1.name())))
    };
    let all: Vec<(f64, String)> = delays(points).into_iter().filter_map(of_delay).collect();
    let Some(worst) = all.iter().map(|(value, _)| *value).min_by(f64::total_cmp) else {
        return AUTO_VS_BEST.missing("no answer was long enough to be timed");
    };
    let how: Vec<String> = all.into_iter().map(|(_, how)| how).collect();
    AUTO_VS_BEST.measured(worst, how.join(", "))
}

/// Rate of all sessions of a case together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rate {
    /// Time of a hop, in milliseconds.
    pub hop_ms: u32,
    /// Sessions at the same time.
    pub n_sessions: usize,
    /// How they decoded.
    pub way: String,
    /// Tokens per second: the mean over categories, times the sessions.
    pub tok_s: f64,
    /// The same over one session without drafts.
    pub over_plain: Option<f64>,
}

/// What one session does with prompts of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kind {
    /// Time of a hop, in milliseconds.
    pub hop_ms: u32,
    /// Kind of the prompts.
    pub category: &'static str,
    /// Tokens per second without drafts.
    pub plain_tok_s: Option<f64>,
    /// With drafts, a window at a time.
    pub one_window_tok_s: Option<f64>,
    /// With the coordinator's choice, but no second guesses.
    pub chain_tok_s: Option<f64>,
    /// With the coordinator's choice.
    pub auto_tok_s: Option<f64>,
    /// Share of drafted tokens among those that could be.
    pub acceptance: Option<f64>,
    /// What one chain of drafts cannot pass, in tokens per second.
    pub ceiling_tok_s: Option<f64>,
    /// Share of it that one chain reaches.
    pub chain_share: Option<f64>,
    /// Share of it that the coordinator's choice reaches.
    pub auto_share: Option<f64>,
}

/// Name of llama.cpp over as many nodes.
pub(crate) const RIVAL: &str = "llama.cpp RPC";

/// The rates of all cases, in the order in which they were measured, and of the rival.
pub(super) fn rates(points: &[Point], rivals: &[RivalPoint]) -> Vec<Rate> {
    let mut cases: Vec<(u32, usize, Way)> = Vec::new();
    for point in points {
        let case = (point.hop_ms, point.n_sessions, point.way);
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    let rate = |(hop_ms, n_sessions): (u32, usize), way: String, tok_s: f64| {
        let plain = all_sessions(points, (hop_ms, 1, Way::Plain));
        Rate { hop_ms, n_sessions, way, tok_s, over_plain: plain.map(|plain| tok_s / plain) }
    };
    let ours = cases.into_iter().filter_map(|case| {
        let (hop_ms, n_sessions, way) = case;
        Some(rate((hop_ms, n_sessions), way.name(), all_sessions(points, case)?))
    });
    let theirs = delays(points).into_iter().filter_map(|hop_ms| {
        let of_delay = rivals.iter().filter(|rival| rival.hop_ms == hop_ms);
        let tok_s = median(of_delay.map(|rival| 1e3 / rival.decode.token_ms))?;
        Some(rate((hop_ms, 1), RIVAL.to_owned(), tok_s))
    });
    ours.chain(theirs).collect()
}

/// One session, by delays and kinds of prompts.
pub(super) fn kinds(points: &[Point]) -> Vec<Kind> {
    let mut kinds = Vec::new();
    for hop_ms in delays(points) {
        for category in categories(points) {
            let of = |way| rate(points, (hop_ms, 1, way), category);
            let p = acceptance(points, hop_ms, category);
            kinds.push(Kind {
                hop_ms,
                category,
                plain_tok_s: of(Way::Plain),
                one_window_tok_s: of(Way::Windows(1)),
                chain_tok_s: of(Way::Chain),
                auto_tok_s: of(Way::Auto),
                acceptance: p,
                ceiling_tok_s: of(Way::Plain).zip(p).map(|(plain, p)| plain / (1.0 - p)),
                chain_share: ceiling_share(points, hop_ms, Way::Chain, category),
                auto_share: ceiling_share(points, hop_ms, Way::Auto, category),
            });
        }
    }
    kinds
}

impl WanReport {
    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let row = |rate: &Rate| {
            vec![
                rate.hop_ms.to_string(),
                rate.n_sessions.to_string(),
                rate.way.clone(),
                number(Some(rate.tok_s), 2),
                number(rate.over_plain, 2),
            ]
        };
        let header = ["ms a hop", "sessions", "way", "tok/s, all sessions", "over one plain"];
        let all = table(&header, &self.rates.iter().map(row).collect::<Vec<_>>());
        let row = |kind: &Kind| {
            vec![
                kind.hop_ms.to_string(),
                kind.category.to_owned(),
                number(kind.plain_tok_s, 2),
                number(kind.one_window_tok_s, 2),
                number(kind.chain_tok_s, 2),
                number(kind.auto_tok_s, 2),
                number(kind.acceptance, 2),
                number(kind.ceiling_tok_s, 2),
                number(kind.chain_share, 2),
                number(kind.auto_share, 2),
            ]
        };
        let header = [
            "ms a hop",
            "category",
            "plain",
            "1 window",
            "one chain",
            "auto",
            "p",
            "ceiling",
            "one chain of it",
            "auto of it",
        ];
        format!(
            "{}, {} weights, in {} stages, every process on a link of its own, answers of {} tokens\n{all}\n{}\n{}",
            self.model,
            self.weights,
            self.n_stages,
            self.n_tokens,
            table(&header, &self.kinds.iter().map(row).collect::<Vec<_>>()),
            hosted::describe(&self.points, &self.hosted)
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::llama_cpp::LlamaDecode;

    use super::*;

    fn point(hop_ms: u32, n_sessions: usize, way: Way, tok_s: f64) -> Point {
        let (category, round, n_tokens) = ("list", 0, 62);
        let (drafted_tokens, accepted_tokens) = (90, if way == Way::Plain { 0 } else { 30 });
        Point {
            hop_ms,
            n_sessions,
            way,
            category,
            round,
            tok_s,
            n_tokens,
            drafted_tokens,
            accepted_tokens,
        }
    }

    #[test]
    fn the_ceiling_follows_from_plain_steps_and_acceptance() {
        let points = [
            point(100, 1, Way::Plain, 3.0),
            point(100, 1, Way::Windows(1), 5.0),
            point(100, 1, Way::Chain, 5.4),
            point(100, 1, Way::Auto, 6.6),
            point(100, 4, Way::Auto, 6.0),
            point(0, 1, Way::Chain, 98.0),
            point(0, 1, Way::Auto, 99.0),
            point(0, 1, Way::Windows(1), 100.0),
        ];
        let claims = claims(&points);
        let value = |name: &str| {
            let claim = claims.iter().find(|claim| claim.name == name).expect("a claim");
            claim.value.map(|value| (value * 100.0).round() / 100.0)
        };
        // Half of the tokens are drafted: two a step.
        assert_eq!(value("wan100_ceiling_share"), Some(0.9));
        assert_eq!(value("wan100_tree_ceiling_share"), Some(1.1));
        assert_eq!(value("wan100_two_sessions_vs_plain"), None);
        assert_eq!(value("wan100_four_sessions_vs_plain"), Some(8.0));
        assert_eq!(value("wan100_four_vs_one_session"), Some(3.64));
        assert_eq!(value("wan0_windows_vs_off"), Some(0.99));
        assert_eq!(value("wan_auto_depth_vs_best_fixed"), Some(0.98));
    }

    #[test]
    fn rates_are_those_of_all_sessions() {
        let points = [point(100, 1, Way::Plain, 3.0), point(100, 4, Way::Auto, 5.1)];
        let decode = LlamaDecode { token_ms: 500.0, build: "b".to_owned() };
        let rival = RivalPoint { hop_ms: 100, round: 0, n_tokens: 16, decode };
        let rates = rates(&points, &[rival]);
        assert_eq!((rates[2].way.as_str(), rates[2].tok_s), (RIVAL, 2.0));
        assert_eq!((rates[1].way.as_str(), rates[1].tok_s), ("auto", 20.4));
        assert!(rates[1].over_plain.is_some_and(|over| (over - 6.8).abs() < 1e-9), "{rates:?}");
        let kinds = kinds(&points);
        assert_eq!(kinds.len(), 1);
        assert_eq!((kinds[0].plain_tok_s, kinds[0].auto_tok_s), (Some(3.0), None));
    }

    #[test]
    fn without_answers_everything_is_missing() {
        assert!(claims(&[]).iter().all(|claim| claim.holds.is_none()));
    }
}
