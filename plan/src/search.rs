//! The best layout with a given number of stages.
//!
//! For nodes in a given order the best cut is found by dynamic programming over the layers. A lone
//! session wants the least sum of passes, and of cuts that hardly differ in it the most even one.
//! Several want the least of `max(sum, batches * slowest)`:
//! with a limit on every stage's pass the least sum falls as the limit rises, so the best limit is
//! found by bisection.
//!
//! Up to [`MAX_EXHAUSTIVE`] nodes, every choice and order of them is tried. Of more nodes, those with
//! most room are taken first, and then nodes are exchanged and swapped while that makes it better.

use std::ops::Range;

use crate::facts::Question;
use crate::layout::{Layout, Spot, batches, between, device_for};

/// Most nodes of which every choice and order is tried: 325 orders for five nodes.
const MAX_EXHAUSTIVE: usize = 5;

/// Steps of the search for the limit of a pass: its error is then a billionth.
const LIMIT_STEPS: usize = 30;

/// How much longer a lone session may take for stages that are more even: they serve several sessions
/// better, and a smaller difference between nodes is no more than noise.
const EVEN: f64 = 1.02;

/// The passes of all layer ranges on all nodes.
pub(crate) struct Search<'a> {
    question: &'a Question,
    n_stages: usize,
    n_batches: usize,
    /// By node, by start, by length less one.
    passes: Vec<Vec<Vec<Option<Pass>>>>,
}

/// Device and time, in milliseconds.
type Pass = (usize, f64);

/// A cut for nodes in an order, and what is to be as small as possible.
struct Found {
    spots: Vec<Spot>,
    round_ms: f64,
}

impl<'a> Search<'a> {
    /// Prepares the search for layouts with `n_stages` stages.
    pub(crate) fn new(question: &'a Question, n_stages: usize) -> Self {
        let (n_batches, duty) = batches(question.wish.sessions, n_stages);
        let n_layers = question.model.n_layers();
        let pass = |node: usize, layers: Range<usize>| device_for(question, node, &layers, duty);
        let from = |node: usize, start: usize| {
            (start + 1..=n_layers).map(|end| pass(node, start..end)).collect::<Vec<_>>()
        };
        let of = |node: usize| (0..n_layers).map(|start| from(node, start)).collect::<Vec<_>>();
        let passes = (0..question.nodes.len()).map(of).collect();
        Self { question, n_stages, n_batches, passes }
    }

    /// The best layout; `None` if none fits.
    pub(crate) fn best(&self) -> Option<Layout> {
        let n_nodes = self.question.nodes.len();
        if self.n_stages == 0 || self.n_stages > n_nodes.min(self.question.model.n_layers()) {
            return None;
        }
        let found = match n_nodes {
            0..=MAX_EXHAUSTIVE => self.try_all(&mut Vec::with_capacity(self.n_stages)),
            _ => self.improve(),
        };
        Some(Layout::of(self.question, &found?.spots))
    }

    /// Tries every way to go on after `chosen`.
    fn try_all(&self, chosen: &mut Vec<usize>) -> Option<Found> {
        if chosen.len() == self.n_stages {
            return self.cut(chosen);
        }
        let mut best: Option<Found> = None;
        for node in 0..self.question.nodes.len() {
            if chosen.contains(&node) {
                continue;
            }
            chosen.push(node);
            let found = self.try_all(chosen);
            chosen.pop();
            best = better(best, found);
        }
        best
    }

    /// Starts from the nodes with most room and exchanges while that is better.
    fn improve(&self) -> Option<Found> {
        let mut free: Vec<usize> = (0..self.question.nodes.len()).collect();
        // Of equal room, the quicker one.
        free.sort_by(|&a, &b| self.room(b).cmp(&self.room(a)).then(self.pace(a, b)));
        let mut chosen: Vec<usize> = free.drain(..self.n_stages).collect();
        let mut best = self.cut(&chosen);
        loop {
            let least = best.as_ref().map_or(f64::INFINITY, |found| found.round_ms);
            let mut next: Option<(Vec<usize>, Found)> = None;
            for order in neighbours(&chosen, &free) {
                let least = next.as_ref().map_or(least, |(_, found)| found.round_ms);
                if let Some(found) = self.cut(&order).filter(|found| found.round_ms < least) {
                    next = Some((order, found));
                }
            }
            let Some((order, found)) = next else { return best };
            free.extend(chosen.iter().filter(|node| !order.contains(node)));
            free.retain(|node| !order.contains(node));
            (chosen, best) = (order, Some(found));
        }
    }

    /// Most inner layers that fit a node.
    fn room(&self, node: usize) -> usize {
        let longest = |passes: &Vec<Option<Pass>>| passes.iter().flatten().count();
        self.passes[node].iter().map(longest).max().unwrap_or(0)
    }

    fn pace(&self, a: usize, b: usize) -> std::cmp::Ordering {
        let of = |node: usize| {
            let passes = self.passes[node].iter().filter_map(|passes| passes.first().copied());
            passes.flatten().map(|(_, ms)| ms).fold(f64::INFINITY, f64::min)
        };
        of(a).total_cmp(&of(b))
    }

    /// The best cut for nodes in this order.
    fn cut(&self, order: &[usize]) -> Option<Found> {
        let between = between(self.question, order);
        let fixed = between.links_ms + between.handoffs_ms;
        let round = |spots: &[Spot]| {
            let passes = || spots.iter().filter_map(|spot| self.pass(spot.0, &spot.2));
            let slowest = passes().map(|(_, ms)| ms).fold(0.0, f64::max);
            let sum: f64 = passes().map(|(_, ms)| ms).sum();
            ((fixed + sum).max(slowest * self.n_batches as f64), slowest)
        };
        let mut spots = self.least_sum(order, f64::INFINITY)?;
        let (mut round_ms, mut high) = round(&spots);
        if self.n_batches > 1 {
            let mut low = 0.0;
            for _ in 0..LIMIT_STEPS {
                let limit = (low + high) / 2.0;
                let Some(tried) = self.least_sum(order, limit) else {
                    low = limit;
                    continue;
                };
                let (ms, slowest) = round(&tried);
                // Beyond the crossing a lower limit only lengthens the sum.
                if ms > slowest * self.n_batches as f64 {
                    low = limit;
                } else {
                    high = limit;
                }
                if ms < round_ms {
                    (spots, round_ms) = (tried, ms);
                }
            }
        } else {
            (spots, round_ms) = self.even(order, (spots, round_ms), high, &round);
        }
        Some(Found { spots, round_ms })
    }

    /// The most even cut that takes hardly longer than the quickest one, whose slowest pass is `high`.
    fn even(
        &self,
        order: &[usize],
        quickest: (Vec<Spot>, f64),
        mut high: f64,
        round: &dyn Fn(&[Spot]) -> (f64, f64),
    ) -> (Vec<Spot>, f64) {
        let allowed = quickest.1 * EVEN;
        let (mut best, mut low) = (quickest, 0.0);
        for _ in 0..LIMIT_STEPS {
            let limit = (low + high) / 2.0;
            let tried = self.least_sum(order, limit);
            match tried.map(|spots| (round(&spots).0, spots)) {
                Some((ms, spots)) if ms <= allowed => (best, high) = ((spots, ms), limit),
                _ => low = limit,
            }
        }
        best
    }

    /// The cut with the least sum of passes, none of them above `limit`.
    fn least_sum(&self, order: &[usize], limit: f64) -> Option<Vec<Spot>> {
        let n_layers = self.question.model.n_layers();
        // By stage and end: the least sum so far, and where the stage starts.
        let mut table: Vec<Vec<Option<(f64, usize)>>> = Vec::with_capacity(order.len());
        for (stage, &node) in order.iter().enumerate() {
            let mut row = vec![None; n_layers + 1];
            for (end, best) in row.iter_mut().enumerate().skip(stage + 1) {
                for start in stage..end {
                    let before = match table.last() {
                        None if start == 0 => 0.0,
                        None => break,
                        Some(row) => match row[start] {
                            Some((sum, _)) => sum,
                            None => continue,
                        },
                    };
                    let Some((_, ms)) = self.pass(node, &(start..end)) else { continue };
                    let sum: f64 = before + ms;
                    if ms <= limit && best.is_none_or(|(least, _)| sum < least) {
                        *best = Some((sum, start));
                    }
                }
            }
            table.push(row);
        }
        let mut spots = Vec::with_capacity(order.len());
        let mut end = n_layers;
        for (row, &node) in table.iter().zip(order).rev() {
            let (_, start) = row[end]?;
            let (device, _) = self.pass(node, &(start..end))?;
            spots.push((node, device, start..end));
            end = start;
        }
        spots.reverse();
        Some(spots)
    }

    fn pass(&self, node: usize, layers: &Range<usize>) -> Option<(usize, f64)> {
        self.passes[node][layers.start][layers.len() - 1]
    }
}

/// The orders that differ in one exchange or one swap.
fn neighbours(chosen: &[usize], free: &[usize]) -> Vec<Vec<usize>> {
    let mut orders = Vec::new();
    for at in 0..chosen.len() {
        for &node in free {
            let mut order = chosen.to_vec();
            order[at] = node;
            orders.push(order);
        }
        for other in at + 1..chosen.len() {
            let mut order = chosen.to_vec();
            order.swap(at, other);
            orders.push(order);
        }
    }
    orders
}

fn better(a: Option<Found>, b: Option<Found>) -> Option<Found> {
    match (a, b) {
        (Some(a), Some(b)) => Some(if b.round_ms < a.round_ms { b } else { a }),
        (a, b) => a.or(b),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::facts::{DeviceCosts, RowCost};
    use crate::testing::{LAYER_BYTES, question};

    fn round_ms(question: &Question, layout: &Layout) -> f64 {
        question.wish.sessions as f64 * 1e3 / layout.tok_s
    }

    /// Every cut of `n_layers` layers into `n_stages` stages.
    fn all_splits(n_layers: usize, n_stages: usize) -> Vec<Vec<usize>> {
        if n_stages == 1 {
            return vec![vec![n_layers]];
        }
        let first = 1..=n_layers.saturating_sub(n_stages - 1);
        let with = |layers: usize| {
            let rest = all_splits(n_layers - layers, n_stages - 1);
            rest.into_iter().map(move |rest| [vec![layers], rest].concat())
        };
        first.flat_map(with).collect()
    }

    /// Every order of `n_stages` of the nodes.
    fn all_orders(n_nodes: usize, n_stages: usize) -> Vec<Vec<usize>> {
        if n_stages == 0 {
            return vec![Vec::new()];
        }
        let shorter = all_orders(n_nodes, n_stages - 1);
        let longer = |order: Vec<usize>| {
            let free = (0..n_nodes).filter(|node| !order.contains(node)).collect::<Vec<_>>();
            free.into_iter().map(move |node| [order.clone(), vec![node]].concat())
        };
        shorter.into_iter().flat_map(longer).collect()
    }

    /// The least round of all layouts, by trying each.
    fn least_round(question: &Question, n_stages: usize) -> Option<f64> {
        let (_, duty) = batches(question.wish.sessions, n_stages);
        let mut least: Option<f64> = None;
        for order in all_orders(question.nodes.len(), n_stages) {
            for split in all_splits(question.model.n_layers(), n_stages) {
                let mut end = 0;
                let spots: Option<Vec<Spot>> = order
                    .iter()
                    .zip(&split)
                    .map(|(&node, layers)| {
                        let layers = end..end + layers;
                        end = layers.end;
                        let (device, _) = device_for(question, node, &layers, duty)?;
                        Some((node, device, layers))
                    })
                    .collect();
                let Some(spots) = spots else { continue };
                let round = round_ms(question, &Layout::of(question, &spots));
                least = Some(least.map_or(round, |least| least.min(round)));
            }
        }
        least
    }

    prop_compose! {
        fn device()(ms in [0.0_f64..1.0, 0.1..4.0, 0.0..8.0], growth in 1.0_f64..4.0) -> DeviceCosts {
            let cost = |ms: f64| RowCost { one_ms: ms, many_ms: ms * growth, rested_ms: ms * 1.25 };
            DeviceCosts {
                call: cost(ms[0]),
                layer: cost(ms[1]),
                head: cost(ms[2]),
                ..question(1, 1).nodes[0].devices[0].clone()
            }
        }
    }

    fn small_question() -> impl Strategy<Value = Question> {
        let devices = vec(vec(device(), 1..3), 1..4);
        let rooms = vec(1_u64..12, 3);
        let ways = vec(vec(0.0_f64..20.0, 3), 3);
        (devices, rooms, ways, 3_usize..8, 1_usize..9).prop_map(
            |(devices, rooms, ways, n_layers, sessions)| {
                let mut question = question(devices.len(), n_layers);
                for ((node, devices), room) in question.nodes.iter_mut().zip(devices).zip(rooms) {
                    (node.devices, node.memory_bytes) = (devices, room * LAYER_BYTES);
                }
                (question.links.hidden_ms, question.links.token_ms) = (ways.clone(), ways);
                question.wish.sessions = sessions;
                question
            },
        )
    }

    proptest! {
        #[test]
        fn no_layout_is_better_than_the_one_found(question in small_question()) {
            for n_stages in 1..=question.nodes.len() {
                let found = Search::new(&question, n_stages).best();
                let least = least_round(&question, n_stages);
                prop_assert_eq!(found.is_some(), least.is_some(), "{} stages", n_stages);
                let (Some(found), Some(least)) = (found, least) else { continue };
                let round = round_ms(&question, &found);
                let allowed = if question.wish.sessions == 1 { EVEN } else { 1.0 };
                let most = least * allowed * (1.0 + 1e-6);
                prop_assert!(round <= most, "{round} {least}: {found:?}");
                for stage in &found.stages {
                    let room = question.nodes[stage.node].memory_bytes;
                    prop_assert!(stage.memory_bytes <= room, "{found:?}");
                }
            }
        }

        #[test]
        fn of_many_nodes_no_exchange_is_better(
            devices in vec(device(), 6..9),
            n_stages in 1_usize..5,
            sessions in 1_usize..9,
        ) {
            let mut question = question(devices.len(), 12);
            question.wish.sessions = sessions;
            for (node, device) in question.nodes.iter_mut().zip(devices) {
                node.devices = vec![device];
            }
            let search = Search::new(&question, n_stages);
            let found = search.best().expect("there is room for everything");
            let order: Vec<usize> = found.stages.iter().map(|stage| stage.node).collect();
            let free: Vec<usize> =
                (0..question.nodes.len()).filter(|node| !order.contains(node)).collect();
            prop_assert_eq!(free.len() + n_stages, question.nodes.len(), "no node twice");
            let round = round_ms(&question, &found);
            for other in neighbours(&order, &free) {
                let other = search.cut(&other).expect("there is room for everything");
                prop_assert!(round <= other.round_ms * (1.0 + 1e-9), "{order:?}");
            }
        }
    }

    #[test]
    fn equal_nodes_get_even_stages_although_a_lone_session_does_not_care() {
        let found = Search::new(&question(2, 10), 2).best().expect("it fits");
        assert_eq!(found.split(), [6, 4], "the head takes the time of two layers");
    }

    #[test]
    fn there_are_no_more_stages_than_nodes_or_layers() {
        let two = question(2, 8);
        assert!(Search::new(&two, 3).best().is_none());
        assert!(Search::new(&two, 0).best().is_none());
        assert!(Search::new(&question(5, 3), 4).best().is_none());
    }
}
