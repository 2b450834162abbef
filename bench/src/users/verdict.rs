//! The claims, from what was measured.
//!
//! A ratio of two cells is taken within each round that measured both; its median over rounds is
//! the value. A rival with one user counts with its rate after the first token, without its
//! prefill, while ours count from the first request to the last token: that favours the rival.

use stagebus_shards::WeightMode;

use super::contestant::Kind;
use super::identity::Identity;
use super::long_prompt::LongPrompt;
use super::matrix::{Cell, MANY, PAIR, Round, single_rivals};
use super::prefix::Prefix;
use super::replicas::Replicas;
use super::{
    IDENTICAL, LONG_PROMPT, ONE_NODE_VS_BATCH, PAGED_VS_STATEFUL, PIPELINE_EFFICIENCY, PREFIX,
    SPECULATION_VS_SINGLE, TWO_NODES_VS_SINGLE,
};
use crate::genai::GenaiUsers;
use crate::harness::claims::{Claim, Target};
use crate::harness::stats::median;

/// Everything that was measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evidence<'a> {
    pub(super) matrix: &'a [Cell],
    pub(super) replicas: Option<&'a Replicas>,
    pub(super) absent: &'a [String],
    pub(super) identity: &'a Identity,
    pub(super) long_prompt: &'a LongPrompt,
    pub(super) prefix: &'a Prefix,
}

/// Whose rate of which cell.
#[derive(Debug, Clone, Copy)]
struct Rate {
    kind: Kind,
    users: usize,
    speculation: bool,
    figure: fn(&Round) -> Option<f64>,
}

fn whole(kind: Kind, users: usize, speculation: bool) -> Rate {
    Rate { kind, users, speculation, figure: |round| Some(round.tok_s) }
}

fn after_first(kind: Kind) -> Rate {
    Rate { kind, users: 1, speculation: false, figure: |round| round.decode_tok_s }
}

impl Evidence<'_> {
    /// All claims of the scenario.
    pub(super) fn claims(&self) -> Vec<Claim> {
        let one = |weights| whole(Kind::nodes(1, weights), MANY, false);
        let two = |weights| whole(Kind::nodes(2, weights), MANY, false);
        let pair = |weights| whole(Kind::nodes(2, weights), PAIR, true);
        let batch = whole(Kind::Genai(GenaiUsers::Batch), MANY, false);
        let paged = after_first(Kind::nodes(1, WeightMode::Compact));
        vec![
            self.against_single(&TWO_NODES_VS_SINGLE, two),
            self.efficiency_claim(two, one),
            self.against_single(&SPECULATION_VS_SINGLE, pair),
            self.versus(&ONE_NODE_VS_BATCH, one, |_| batch, 1.0),
            self.versus(&PAGED_VS_STATEFUL, |_| paged, |_| after_first(Kind::STATEFUL), 1.0),
            self.long_prompt_claim(),
            self.prefix_claim(),
            self.identity_claim(),
        ]
    }

    fn cell(&self, rate: &Rate) -> Option<&Cell> {
        self.matrix.iter().find(|cell| {
            let place = &cell.place;
            place.kind == rate.kind
                && place.users == rate.users
                && place.speculation == rate.speculation
        })
    }

    fn value(&self, rate: &Rate) -> Option<f64> {
        self.cell(rate)?.median(rate.figure)
    }

    /// Median over rounds of `ours` over `factor` times `theirs`.
    fn ratio(&self, ours: &Rate, theirs: &Rate, factor: f64) -> Option<f64> {
        let (our_cell, their_cell) = (self.cell(ours)?, self.cell(theirs)?);
        let ratios = our_cell.rounds.iter().filter_map(|round| {
            let same = their_cell.rounds.iter().find(|other| other.round == round.round)?;
            Some((ours.figure)(round)? / (factor * (theirs.figure)(same)?))
        });
        median(ratios)
    }

    /// Against the faster one of the rivals with one user.
    fn against_single(&self, target: &Target, ours: impl Fn(WeightMode) -> Rate) -> Claim {
        let rivals = single_rivals().map(after_first);
        let speed = |rate: &Rate| self.value(rate).unwrap_or(0.0);
        let fastest = rivals.into_iter().max_by(|a, b| speed(a).total_cmp(&speed(b)));
        match fastest {
            Some(rival) => self.versus(target, ours, |_| rival, 1.0),
            None => target.missing("there is no rival"),
        }
    }

    /// The claim for compact weights; the default weights' figure stands in `how`.
    fn versus(
        &self,
        target: &Target,
        ours: impl Fn(WeightMode) -> Rate,
        theirs: impl Fn(WeightMode) -> Rate,
        factor: f64,
    ) -> Claim {
        let (compact, exact) = (WeightMode::Compact, WeightMode::Exact);
        let (our_rate, their_rate) = (ours(compact), theirs(compact));
        if our_rate.speculation && !self.drafted(&our_rate) {
            return target.missing("no token was drafted: the coordinator has no drafter");
        }
        let Some(ratio) = self.ratio(&our_rate, &their_rate, factor) else {
            return target.missing(self.what_is_missing(&our_rate, &their_rate));
        };
        let figure = |rate: &Rate| {
            let value = self.value(rate).unwrap_or_default();
            format!("{value:.1} tok/s of {} ({} users)", rate.kind.name(), rate.users)
        };
        let beside = self
            .ratio(&ours(exact), &theirs(exact), factor)
            .filter(|_| ours(exact).kind != our_rate.kind)
            .map_or_else(String::new, |ratio| format!("; with the default weights {ratio:.2}"));
        let times = if factor > 1.0 { format!("{factor} x ") } else { String::new() };
        let how = format!(
            "median over rounds: {} over {times}{}{beside}",
            figure(&our_rate),
            figure(&their_rate)
        );
        target.measured(ratio, how)
    }

    /// Two nodes over twice one node; beside it, what two nodes with the whole model each reach at
    /// the same time on these cores.
    fn efficiency_claim(
        &self,
        two: impl Fn(WeightMode) -> Rate,
        one: impl Fn(WeightMode) -> Rate,
    ) -> Claim {
        let ours = self.value(&two(WeightMode::Compact));
        let mut claim = self.versus(&PIPELINE_EFFICIENCY, two, one, 2.0);
        let both = self.replicas.and_then(|replicas| median(replicas.tok_s.iter().copied()));
        if let Some((ours, both)) = ours.zip(both) {
            claim.how.push_str(&format!(
                "; two nodes with the whole model each, at the same time, reach {both:.1} tok/s \
                 together, of which the pipeline's is {:.2}",
                ours / both
            ));
        }
        claim
    }

    fn drafted(&self, rate: &Rate) -> bool {
        let drafted = |cell: &Cell| cell.rounds.iter().any(|round| round.drafted_tokens > 0);
        self.cell(rate).is_none_or(drafted)
    }

    fn what_is_missing(&self, ours: &Rate, theirs: &Rate) -> String {
        let missing: Vec<String> = [ours, theirs]
            .into_iter()
            .filter(|rate| self.value(rate).is_none())
            .map(|rate| format!("{} with {} users", rate.kind.name(), rate.users))
            .collect();
        let mut text = format!("not measured: {}", missing.join(", "));
        let rival = |rate: &Rate| matches!(rate.kind, Kind::Genai(_)) && self.value(rate).is_none();
        if let Some(why) = self.absent.first().filter(|_| rival(theirs)) {
            text.push_str(&format!(" ({why})"));
        }
        text
    }

    fn long_prompt_claim(&self) -> Claim {
        let long = self.long_prompt;
        let (Some(ratio), Some(with), Some(without)) =
            (long.ratio(), long.with_ms, long.without_ms)
        else {
            return LONG_PROMPT.missing("no times between tokens were seen");
        };
        let how = format!(
            "{} users on {}, median over {} rounds; over all: {:.1} ms with, {:.1} ms without",
            long.n_users,
            long.kind.name(),
            long.p99_ratio.len(),
            with.p99,
            without.p99
        );
        LONG_PROMPT.measured(ratio, how)
    }

    fn prefix_claim(&self) -> Claim {
        let prefix = self.prefix;
        let Some(ratio) = prefix.ratio() else {
            return PREFIX.missing("no first tokens were seen");
        };
        let how = format!(
            "{}, medians of {}: {:.0} ms cold, {:.0} ms known, {} tokens cached, {} answers differ",
            prefix.kind.name(),
            prefix.cold_ms.len(),
            median(prefix.cold_ms.iter().copied()).unwrap_or_default(),
            median(prefix.known_ms.iter().copied()).unwrap_or_default(),
            prefix.cached_tokens.iter().min().copied().unwrap_or_default(),
            prefix.n_differing
        );
        if prefix.n_differing > 0 {
            return PREFIX
                .missing(format!("the tokens are wrong, so the time does not count: {how}"));
        }
        PREFIX.measured(ratio, how)
    }

    fn identity_claim(&self) -> Claim {
        let identity = self.identity;
        let n_differing: usize = self.ours().map(|round| round.n_differing).sum();
        let how = format!(
            "{} prompts x {} tokens on {}: {} differ beside 15 others, {} with speculation ({} \
             tokens drafted), {} on a fresh fleet with little KV memory and small chunks ({} sessions \
             gave way there, {} tokens were cached for those compared with); {n_differing} answers of all timed turns differ \
             from their first",
            identity.n_prompts,
            identity.max_tokens,
            identity.kind.name(),
            identity.differ_with_neighbours.len(),
            identity.differ_with_speculation.len(),
            identity.drafted_tokens,
            identity.differ_cramped.len(),
            identity.n_replays,
            identity.cached_tokens
        );
        match identity.share() {
            Some(share) if share < 1.0 || identity.shows_all() => {
                // A timed answer that differs is as wrong as a compared one.
                let share = if n_differing > 0 { share.min(1.0 - f64::EPSILON) } else { share };
                IDENTICAL.measured(share, how)
            }
            Some(_) if n_differing > 0 => IDENTICAL.measured(1.0 - f64::EPSILON, how),
            Some(_) => IDENTICAL.missing(format!("not everything was tried: {how}")),
            None => IDENTICAL.missing("no prompts were compared: give --check-prompts"),
        }
    }

    /// All turns of our fleets with the paged engine.
    fn ours(&self) -> impl Iterator<Item = &Round> {
        let is_ours = |cell: &&Cell| {
            !matches!(cell.place.kind, Kind::Genai(_)) && cell.place.kind != Kind::STATEFUL
        };
        self.matrix.iter().filter(is_ours).flat_map(|cell| &cell.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::Place;
    use super::*;

    fn round(round: usize, tok_s: f64) -> Round {
        Round {
            round,
            tok_s,
            user_tok_s: tok_s,
            decode_tok_s: Some(tok_s),
            wall_ms: 1.0,
            n_tokens: 1,
            cached_tokens: 0,
            drafted_tokens: 0,
            accepted_tokens: 0,
            steps: 1,
            n_differing: 0,
            cpu: None,
        }
    }

    fn cell(kind: Kind, users: usize, rates: &[f64]) -> Cell {
        let rounds = rates.iter().enumerate().map(|(index, &tok_s)| round(index, tok_s)).collect();
        Cell {
            place: Place { kind, users, speculation: false },
            tok_s: None,
            rounds,
            ttft_ms: None,
            gap_ms: None,
            stages: None,
        }
    }

    fn claim(matrix: &[Cell], name: &str) -> Claim {
        let kind = Kind::nodes(2, WeightMode::Compact);
        let identity = Identity {
            kind,
            n_prompts: 2,
            max_tokens: 64,
            differ_with_neighbours: vec![],
            differ_with_speculation: vec![],
            drafted_tokens: 0,
            cached_tokens: 0,
            differ_cramped: vec![],
            n_replays: 0,
        };
        let long_prompt = LongPrompt {
            kind,
            n_users: 8,
            long_tokens: 4000,
            with_ms: None,
            without_ms: None,
            long_ttft_ms: vec![],
            p99_ratio: vec![],
        };
        let prefix = Prefix {
            kind,
            prefix_tokens: 1500,
            cold_ms: vec![100.0],
            known_ms: vec![10.0],
            cached_tokens: vec![1472],
            n_differing: 1,
        };
        let replicas = Replicas { users: MANY, tok_s: vec![500.0] };
        let evidence = Evidence {
            matrix,
            replicas: Some(&replicas),
            absent: &[],
            identity: &identity,
            long_prompt: &long_prompt,
            prefix: &prefix,
        };
        let all = evidence.claims();
        all.into_iter().find(|claim| claim.name == name).expect("a claim of this name")
    }

    #[test]
    fn ratios_are_taken_within_a_round() {
        let compact = |n_stages| Kind::nodes(n_stages, WeightMode::Compact);
        let matrix = [
            cell(compact(1), MANY, &[100.0, 200.0, 400.0]),
            cell(compact(2), MANY, &[190.0, 400.0, 720.0]),
        ];
        let claim = claim(&matrix, "users16_pipeline_efficiency");
        assert_eq!((claim.value, claim.holds), (Some(0.95), Some(true)));
        assert!(claim.how.contains("2 x 200.0 tok/s of 1 x compact"), "{}", claim.how);
        assert!(claim.how.contains("reach 500.0 tok/s together, of which the pipeline's is 0.80"));
    }

    #[test]
    fn the_faster_rival_counts_and_the_default_weights_stand_beside() {
        let [slow, fast] = single_rivals();
        let matrix = [
            cell(Kind::nodes(2, WeightMode::Compact), MANY, &[800.0]),
            cell(Kind::nodes(2, WeightMode::Exact), MANY, &[400.0]),
            cell(slow, 1, &[80.0]),
            cell(fast, 1, &[100.0]),
        ];
        let claim = claim(&matrix, "users16_two_nodes_vs_genai_single");
        assert_eq!(claim.value, Some(8.0));
        assert!(claim.how.ends_with("with the default weights 4.00"), "{}", claim.how);
    }

    #[test]
    fn what_was_not_measured_is_named() {
        let matrix = [cell(Kind::nodes(1, WeightMode::Compact), MANY, &[400.0])];
        let claim = claim(&matrix, "users16_one_node_vs_genai_cb");
        assert_eq!(claim.value, None);
        assert!(claim.how.contains("genai-batch with 16 users"), "{}", claim.how);
    }

    #[test]
    fn wrong_tokens_spoil_the_claims_that_rest_on_them() {
        assert_eq!(claim(&[], "prefix1500_ttft_ratio").value, None);
        assert_eq!(claim(&[], "tokens_identical").value, None);
        let mut wrong = cell(Kind::nodes(1, WeightMode::Compact), 1, &[90.0]);
        wrong.rounds[0].n_differing = 1;
        assert_eq!(claim(&[wrong], "tokens_identical").holds, Some(false));
    }
}
