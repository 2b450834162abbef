//! Where a second guess pays.
//!
//! A chain of drafts ends at the first token that is wrong, and what comes behind costs another
//! round trip. Where the drafter is unsure, its second guess may travel beside the chain
//! ([`crate::chain`]): if that one is right, the chain does not end there. It costs the stages one
//! more step of a few rows, for which the chain behind it waits, and the drafter its tokens. So it
//! pays where the tokens that it adds on average, relative to those of a chain, are more than the
//! time that it takes, relative to that of a chain.

use crate::drafter::Doubt;
use crate::windows::{Plan, WindowCosts};

/// Most alternatives beside one chain that anybody may ask for.
pub const MAX_ALTERNATIVES: usize = 4;

/// Most tokens of an alternative.
const MAX_TOKENS: usize = 6;

/// How much more an alternative must add than it takes: times are those of quiet stages. The
/// drafter's probabilities need no margin; SmolLM2's draft model is right about as often as it says.
const MARGIN: f64 = 1.1;

/// A place for an alternative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    /// Index of the drafted token that it stands beside.
    pub index: usize,
    /// Its first token.
    pub token: u32,
    /// Its number of tokens.
    pub n: usize,
}

/// What an alternative costs and must add, for one session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    /// Probability that a drafted token stands.
    p: f64,
    /// Tokens of a chain.
    ///
    /// **Units**: tokens per second.
    rate: f64,
    /// **Units**: seconds.
    step: f64,
    /// For each token.
    ///
    /// **Units**: seconds.
    token: f64,
}

impl Price {
    /// The price beside chains of a plan; `None` where alternatives are not looked for: where links
    /// take less of a round trip than the stages, these have no time to spare.
    #[must_use]
    pub fn new(plan: &Plan, p: f64, costs: &WindowCosts) -> Option<Self> {
        if !costs.is_far() || plan.k == 0 {
            return None;
        }
        let p = p.clamp(0.0, 0.999);
        let sharing = costs.disturbed();
        let slowest = |of: fn(&crate::windows::StageCost) -> f64| {
            costs.stages.iter().map(of).fold(0.0, f64::max)
        };
        Some(Self {
            p,
            rate: plan.rate(p, costs),
            step: slowest(|stage| stage.base) * sharing,
            token: slowest(|stage| stage.row) * sharing + costs.draft.as_secs_f64(),
        })
    }

    /// The places among drafted tokens at which an alternative pays, at most `most`, in order.
    /// `reach` is the probability that all tokens before the draft stand, `first` the first place
    /// that is open.
    #[must_use]
    pub fn places(&self, doubts: &[Doubt], reach: f64, first: usize, most: usize) -> Vec<Place> {
        let mut reach = reach;
        let mut found: Vec<(f64, Place)> = Vec::new();
        for (index, doubt) in doubts.iter().enumerate() {
            let share = reach * doubt.second_share;
            reach *= doubt.first;
            if index < first {
                continue;
            }
            let (mut gain, mut cost, mut n) = (0.0, self.step, 0);
            let mut adds = share;
            while n < (doubts.len() - index).min(MAX_TOKENS)
                && adds > self.rate * self.token * MARGIN
            {
                gain += adds;
                cost += self.token;
                adds *= self.p;
                n += 1;
            }
            let surplus = gain - self.rate * cost * MARGIN;
            if n > 0 && surplus > 0.0 {
                found.push((surplus, Place { index, token: doubt.second, n }));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut places: Vec<Place> = found.into_iter().take(most).map(|(_, place)| place).collect();
        places.sort_by_key(|place| place.index);
        places
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::windows::StageCost;

    fn costs(links_ms: u64, n_active: usize) -> WindowCosts {
        let stage = StageCost { base: 0.004, row: 0.001 };
        let links = Duration::from_millis(links_ms);
        WindowCosts { stages: vec![stage; 2], links, draft: Duration::from_millis(1), n_active }
    }

    fn doubts(of: &[(f64, f64)]) -> Vec<Doubt> {
        let doubt = |(i, &(first, second_share)): (usize, &(f64, f64))| Doubt {
            first,
            second: 100 + i as u32,
            second_share,
        };
        of.iter().enumerate().map(doubt).collect()
    }

    fn indexes(price: &Price, doubts: &[Doubt], first: usize, most: usize) -> Vec<usize> {
        price.places(doubts, 1.0, first, most).iter().map(|place| place.index).collect()
    }

    const PLAN: Plan = Plan { k: 4, depth: 3, lead: false };
    const UNSURE: [(f64, f64); 5] =
        [(0.97, 0.01), (0.5, 0.3), (0.9, 0.05), (0.4, 0.35), (0.6, 0.2)];

    #[test]
    fn the_places_of_most_doubt_are_taken_in_order() {
        let price = Price::new(&PLAN, 0.6, &costs(300, 1)).expect("far");
        let doubts = doubts(&UNSURE);
        assert_eq!(indexes(&price, &doubts, 0, 1), [1]);
        assert_eq!(indexes(&price, &doubts, 0, 2), [1, 3]);
        assert_eq!(indexes(&price, &doubts, 2, 1), [3]);
        let place = price.places(&doubts, 1.0, 0, 1)[0];
        assert_eq!(place.token, 101);
        assert!((2..=MAX_TOKENS).contains(&place.n), "{place:?}");
        assert_eq!(price.places(&doubts, 0.05, 0, 4), []);
        let last = price.places(&doubts[..2], 1.0, 0, 1)[0];
        assert_eq!(last.n, 1, "never beyond the chain");
    }

    #[test]
    fn nothing_is_tried_where_stages_have_no_time_to_spare() {
        assert_eq!(Price::new(&PLAN, 0.6, &costs(1, 1)), None);
        assert_eq!(Price::new(&Plan::single(0), 0.6, &costs(300, 1)), None);
        let alone = Price::new(&PLAN, 0.6, &costs(60, 1)).expect("far");
        let crowded = Price::new(&PLAN, 0.6, &costs(60, 16)).expect("far");
        let doubts = doubts(&UNSURE);
        assert!(indexes(&crowded, &doubts, 0, 4).len() < indexes(&alone, &doubts, 0, 4).len());
    }
}
