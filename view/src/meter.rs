//! From announcements with counters to rates: what a fleet does per second.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use serde::Serialize;
use stagebus_schemas::ids::{CoordinatorId, ModelName, WorkerId};
use stagebus_schemas::messages::fleet::{CoordinatorAnnouncement, WorkerAnnouncement};

use crate::fleet_view::{FleetView, Heard, Problem, Stranger};

/// Rates of a model that are kept to be drawn.
const HISTORY: usize = 60;

/// A fleet at one moment, as `stagebus top --json` and the gateway's `/fleet` tell it.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Snapshot {
    /// Whether the connection to the broker stands.
    pub connected: bool,
    /// The way to the broker and back, in milliseconds; a hop between stages is two halves of such
    /// ways. Absent before it is measured.
    pub round_trip_ms: Option<f64>,
    /// The models.
    pub models: Vec<ModelRates>,
    /// Those whose announcements cannot be read.
    pub strangers: Vec<Stranger>,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelRates {
    /// Its name.
    pub model: ModelName,
    /// Whether a request would be served.
    pub served: bool,
    /// What stands in the way, or soon will.
    pub problems: Vec<Problem>,
    /// Number of stages.
    pub n_stages: u16,
    /// Sessions that run.
    pub sessions: u32,
    /// Tokens per second, over all coordinators.
    pub tok_s: f64,
    /// Part of the drafted tokens that the model chose too, 0 to 1, lately; absent while none are
    /// drafted.
    pub acceptance: Option<f64>,
    /// Tokens per second, the latest last; one value for each look or [`Meter::every`].
    pub history: Vec<f64>,
    /// Its workers, by stage.
    pub workers: Vec<WorkerRates>,
    /// Its coordinators.
    pub coordinators: Vec<CoordinatorRates>,
}

/// A worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerRates {
    /// Steps per second.
    pub steps_s: f64,
    /// Rows per second.
    pub rows_s: f64,
    /// Part of the KV memory that is in use, 0 to 1; absent where it has no limit.
    pub kv_part: Option<f64>,
    /// Whether its inference does not come to an end.
    pub is_stuck: bool,
    /// What it says.
    pub worker: WorkerAnnouncement,
}

/// A coordinator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CoordinatorRates {
    /// Tokens per second.
    pub tok_s: f64,
    /// Requests that ended, per second.
    pub requests_s: f64,
    /// Tokens drafted per second.
    pub drafted_s: f64,
    /// Drafted tokens that the model chose too, per second.
    pub accepted_s: f64,
    /// What it says.
    pub coordinator: CoordinatorAnnouncement,
}

/// Turns one look after the other into rates.
#[derive(Debug, Default)]
pub struct Meter {
    workers: HashMap<WorkerId, Mark<2>>,
    coordinators: HashMap<CoordinatorId, Mark<4>>,
    history: HashMap<ModelName, VecDeque<f64>>,
    /// Least time between two values of the history.
    pace: Duration,
    /// When the history got its last value.
    noted: Option<Instant>,
}

/// The counters of an announcement, and their rates since the one before.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Mark<const N: usize> {
    at: Instant,
    counts: [u64; N],
    rates: [f64; N],
}

impl<const N: usize> Mark<N> {
    /// The first one tells no rate.
    const fn first(at: Instant, counts: [u64; N]) -> Self {
        Self { at, counts, rates: [0.0; N] }
    }

    /// The next one. One that is not newer changes nothing, so that a rate stands until there is
    /// news of it.
    #[expect(clippy::cast_precision_loss, reason = "counts between two announcements")]
    fn next(self, at: Instant, counts: [u64; N]) -> Self {
        let seconds = at.saturating_duration_since(self.at).as_secs_f64();
        if seconds <= 0.0 {
            return self;
        }
        let rate = |i: usize| counts[i].saturating_sub(self.counts[i]) as f64 / seconds;
        Self { at, counts, rates: std::array::from_fn(rate) }
    }
}

impl Meter {
    /// Makes one whose history has a value for each `pace`, however often it looks; that of
    /// [`Meter::default`] has one for each look.
    #[must_use]
    pub fn every(pace: Duration) -> Self {
        Self { pace, ..Self::default() }
    }

    /// Takes in what is known at `now`. `unmeasured` is how long a micro-batch may take of whose
    /// kind nothing has been measured.
    pub fn look(
        &mut self,
        view: &FleetView,
        unmeasured: Duration,
        now: Instant,
    ) -> Vec<ModelRates> {
        self.mark_all(view);
        let models = view.models().into_iter().map(|model| {
            let worker = |worker| self.worker(worker, unmeasured);
            let workers: Vec<_> = model.workers.into_iter().map(worker).collect();
            let coordinator = |coordinator| self.coordinator(coordinator);
            let coordinators: Vec<_> = model.coordinators.into_iter().map(coordinator).collect();
            let sum = |of: fn(&CoordinatorRates) -> f64| coordinators.iter().map(of).sum::<f64>();
            let (drafted, accepted) = (sum(|c| c.drafted_s), sum(|c| c.accepted_s));
            ModelRates {
                served: model.served,
                problems: model.problems,
                n_stages: model.n_stages,
                sessions: coordinators.iter().map(|c| c.coordinator.n_sessions).sum(),
                tok_s: sum(|c| c.tok_s),
                acceptance: (drafted > 0.0).then(|| (accepted / drafted).min(1.0)),
                history: Vec::new(),
                workers,
                coordinators,
                model: model.model,
            }
        });
        let mut models: Vec<ModelRates> = models.collect();
        self.remember(&mut models, now);
        models
    }

    fn mark_all(&mut self, view: &FleetView) {
        let mut workers = HashMap::new();
        for Heard { at, announcement } in view.workers() {
            let counts = [announcement.load.steps_completed, announcement.load.rows_completed];
            let mark = mark(self.workers.get(&announcement.worker), *at, counts);
            workers.insert(announcement.worker.clone(), mark);
        }
        let mut coordinators = HashMap::new();
        for Heard { at, announcement: c } in view.coordinators() {
            let counts = [c.tokens_out, c.requests_done, c.tokens_drafted, c.tokens_accepted];
            let mark = mark(self.coordinators.get(&c.coordinator), *at, counts);
            coordinators.insert(c.coordinator.clone(), mark);
        }
        // Those who are gone are forgotten.
        (self.workers, self.coordinators) = (workers, coordinators);
    }

    fn worker(&self, worker: WorkerAnnouncement, unmeasured: Duration) -> WorkerRates {
        let [steps_s, rows_s] =
            self.workers.get(&worker.worker).map_or([0.0; 2], |mark| mark.rates);
        let load = &worker.load;
        #[expect(clippy::cast_precision_loss, reason = "a share that is shown")]
        let kv_part =
            (load.kv_max_bytes > 0).then(|| load.kv_bytes as f64 / load.kv_max_bytes as f64);
        WorkerRates { steps_s, rows_s, kv_part, is_stuck: load.is_stuck(unmeasured), worker }
    }

    fn coordinator(&self, coordinator: CoordinatorAnnouncement) -> CoordinatorRates {
        let mark = self.coordinators.get(&coordinator.coordinator);
        let [tok_s, requests_s, drafted_s, accepted_s] = mark.map_or([0.0; 4], |mark| mark.rates);
        CoordinatorRates { tok_s, requests_s, drafted_s, accepted_s, coordinator }
    }

    fn remember(&mut self, models: &mut [ModelRates], now: Instant) {
        let is_due = self.noted.is_none_or(|noted| now >= noted + self.pace);
        if is_due {
            self.noted = Some(now);
        }
        self.history.retain(|name, _| models.iter().any(|model| model.model == *name));
        for model in models {
            let history = self.history.entry(model.model.clone()).or_default();
            // A model that is new begins at once.
            if is_due || history.is_empty() {
                if history.len() == HISTORY {
                    history.pop_front();
                }
                history.push_back(model.tok_s);
            }
            model.history = history.iter().copied().collect();
        }
    }
}

fn mark<const N: usize>(before: Option<&Mark<N>>, at: Instant, counts: [u64; N]) -> Mark<N> {
    before.map_or_else(|| Mark::first(at, counts), |before| before.next(at, counts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{coordinator, worker};

    const UNMEASURED: Duration = Duration::from_secs(30);

    /// A fleet whose counters stand at `n` times one second's work.
    fn view(at: Instant, n: u64) -> FleetView {
        let mut view = FleetView::default();
        let mut one = coordinator("m", "c");
        (one.tokens_out, one.requests_done) = (40 * n, 2 * n);
        (one.tokens_drafted, one.tokens_accepted) = (60 * n, 30 * n);
        view.hear_coordinator(one, at);
        let mut first = worker("m", 0, "w");
        (first.load.steps_completed, first.load.rows_completed) = (20 * n, 80 * n);
        (first.load.kv_bytes, first.load.kv_max_bytes) = (1 << 20, 4 << 20);
        view.hear_worker(first, at);
        view
    }

    #[test]
    fn rates_are_counted_between_announcements() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        let first = &meter.look(&view(start, 1), UNMEASURED, start)[0];
        assert_eq!((first.tok_s, first.acceptance), (0.0, None), "one look tells no rate");
        let half = start + Duration::from_millis(500);
        let second = &meter.look(&view(half, 2), UNMEASURED, half)[0];
        assert_eq!((second.tok_s, second.acceptance), (80.0, Some(0.5)));
        assert_eq!((second.workers[0].steps_s, second.workers[0].rows_s), (40.0, 160.0));
        assert_eq!(second.workers[0].kv_part, Some(0.25));
        let coordinator = &second.coordinators[0];
        assert_eq!((coordinator.requests_s, coordinator.drafted_s), (4.0, 120.0));
        // No news: the rate stands.
        let third = &meter.look(&view(half, 2), UNMEASURED, half)[0];
        assert_eq!((third.tok_s, third.history.as_slice()), (80.0, &[0.0, 80.0, 80.0][..]));
    }

    #[test]
    fn who_is_gone_is_forgotten() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        meter.look(&view(start, 1), UNMEASURED, start);
        assert!(meter.look(&FleetView::default(), UNMEASURED, start).is_empty());
        assert!(meter.workers.is_empty() && meter.history.is_empty());
        let later = start + Duration::from_secs(1);
        let anew = meter.look(&view(later, 9), UNMEASURED, later);
        assert_eq!(anew[0].history, [0.0], "it begins anew");
    }

    #[test]
    fn the_history_has_a_bound() {
        let (mut meter, start) = (Meter::default(), Instant::now());
        for n in 0..100 {
            let at = start + Duration::from_secs(n);
            meter.look(&view(at, n), UNMEASURED, at);
        }
        let at = start + Duration::from_secs(100);
        let history = &meter.look(&view(at, 100), UNMEASURED, at)[0].history;
        assert_eq!((history.len(), history.last()), (HISTORY, Some(&40.0)));
    }

    #[test]
    fn a_history_keeps_its_pace_however_often_it_is_looked_at() {
        let (mut meter, start) = (Meter::every(Duration::from_secs(1)), Instant::now());
        for n in 0..9 {
            let at = start + Duration::from_millis(400 * n);
            meter.look(&view(at, n), UNMEASURED, at);
        }
        // At 0, 1.2, 2.4 s; the look at 3.2 s comes before the next one is due.
        assert_eq!(meter.history[&"m".parse().expect("a name")].len(), 3);
    }
}
