//! How long a request and its steps take.

use std::time::{Duration, Instant};

use stagebus_schemas::messages::forward::StageTime;
use stagebus_schemas::messages::public::{StepTimes, Timings};

/// Weight of a new value in a smoothed time: about the last ten values count.
const SMOOTHING: f64 = 0.2;

/// How many smoothed round trips a step may take before it counts as lost.
const STEP_TIMEOUT_FACTOR: u32 = 20;

/// Least time for a message to get from one to the other before it counts as lost: far above what
/// any takes that is not large.
const LEAST_LOSS_GRACE: Duration = Duration::from_millis(250);

/// The same in smoothed round trips: large tensors go slowly over slow links.
const LOSS_ROUND_TRIPS: u32 = 4;

/// How many smoothed round trips a step takes before its workers are asked for it: in a busy fleet
/// most sessions wait for less.
const ASK_ROUND_TRIPS: u32 = 2;

/// A smoothed duration.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Smoothed(Option<Duration>);

impl Smoothed {
    /// Takes a new value.
    pub(crate) fn add(&mut self, value: Duration) {
        self.0 = Some(match self.0 {
            None => value,
            Some(old) => old.mul_f64(1.0 - SMOOTHING) + value.mul_f64(SMOOTHING),
        });
    }

    /// Returns the value; nothing before the first.
    pub(crate) fn get(self) -> Option<Duration> {
        self.0
    }
}

/// Returns the time that a step may take: `floor`, or many times the measured round trip where
/// stages are slow.
pub(crate) fn step_timeout(floor: Duration, round_trip: Smoothed) -> Duration {
    round_trip.get().map_or(floor, |measured| floor.max(measured * STEP_TIMEOUT_FACTOR))
}

/// Returns the time after which a message that was sent has come or is lost.
pub(crate) fn loss_grace(round_trip: Smoothed) -> Duration {
    round_trip
        .get()
        .map_or(LEAST_LOSS_GRACE, |measured| LEAST_LOSS_GRACE.max(measured * LOSS_ROUND_TRIPS))
}

/// Returns the time after which the workers of a step are asked how far it is.
pub(crate) fn ask_after(least: Duration, round_trip: Smoothed) -> Duration {
    round_trip.get().map_or(least, |measured| least.max(measured * ASK_ROUND_TRIPS))
}

/// Collects the times of one request.
#[derive(Debug, Clone)]
pub(crate) struct Stopwatch {
    /// Whether the client wants to know what each step took.
    pub(crate) tells_steps: bool,
    arrival: Instant,
    first_step: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    decode: DecodeTimes,
}

/// How long tokens took to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenGap {
    /// The first ones, since the arrival of the request.
    First(Duration),
    /// Later ones, since those before them.
    Later(Duration),
}

/// Sums over the decode steps.
#[derive(Debug, Clone, Default)]
struct DecodeTimes {
    n_steps: u32,
    round_trips: Duration,
    infer_us: Vec<u64>,
}

impl Stopwatch {
    /// Starts at the arrival of the request.
    pub(crate) fn new(arrival: Instant, n_stages: usize) -> Self {
        Self {
            tells_steps: false,
            arrival,
            first_step: None,
            first_token: None,
            last_token: None,
            decode: DecodeTimes { infer_us: vec![0; n_stages], ..DecodeTimes::default() },
        }
    }

    /// When the request arrived.
    pub(crate) fn arrival(&self) -> Instant {
        self.arrival
    }

    /// Notes that a step was sent.
    pub(crate) fn step_sent(&mut self, now: Instant) {
        self.first_step.get_or_insert(now);
    }

    /// Notes new tokens, and returns how long they took to come.
    pub(crate) fn tokens(&mut self, now: Instant) -> TokenGap {
        self.first_token.get_or_insert(now);
        match self.last_token.replace(now) {
            None => TokenGap::First(self.elapsed(now)),
            Some(last) => TokenGap::Later(now.saturating_duration_since(last)),
        }
    }

    /// Notes a finished decode step. Entries of `trace` for stages that do not exist are ignored.
    pub(crate) fn decode_step(&mut self, round_trip: Duration, trace: &[StageTime]) {
        self.decode.n_steps += 1;
        self.decode.round_trips += round_trip;
        for time in trace {
            if let Some(sum) = self.decode.infer_us.get_mut(time.stage.index()) {
                *sum += u64::from(time.infer_us);
            }
        }
    }

    /// Returns what a step took, if the client wants to know; the number of its tokens is not known
    /// here. Entries of `trace` for stages that do not exist are ignored.
    pub(crate) fn step_times(
        &self,
        round_trip: Duration,
        trace: &[StageTime],
    ) -> Option<StepTimes> {
        if !self.tells_steps {
            return None;
        }
        let n_stages = self.decode.infer_us.len();
        let (mut stage_queue_ms, mut stage_infer_ms) = (vec![0.0; n_stages], vec![0.0; n_stages]);
        for time in trace {
            let stage = time.stage.index();
            if let Some(queue) = stage_queue_ms.get_mut(stage) {
                *queue = milliseconds(Duration::from_micros(time.queue_us.into()));
            }
            if let Some(infer) = stage_infer_ms.get_mut(stage) {
                *infer = milliseconds(Duration::from_micros(time.infer_us.into()));
            }
        }
        Some(StepTimes {
            tokens: 0,
            round_trip_ms: milliseconds(round_trip),
            hops_ms: milliseconds(unaccounted(round_trip, trace)),
            stage_queue_ms,
            stage_infer_ms,
        })
    }

    /// Returns the time from arrival until `now`.
    pub(crate) fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.arrival)
    }

    /// Returns the time since the first step was sent; nothing before it.
    pub(crate) fn running(&self, now: Instant) -> Option<Duration> {
        self.first_step.map(|first| now.saturating_duration_since(first))
    }

    /// Returns what `done` reports for a request of `n_tokens` generated tokens.
    pub(crate) fn report(&self, n_tokens: u32, now: Instant) -> Timings {
        let since_arrival = |at: Option<Instant>| {
            at.map_or(0.0, |at| milliseconds(at.saturating_duration_since(self.arrival)))
        };
        let decode_tok_s = match (self.first_token, self.last_token) {
            (Some(first), Some(last)) if n_tokens > 1 && last > first => {
                f64::from(n_tokens - 1) / (last - first).as_secs_f64()
            }
            _ => 0.0,
        };
        let stage_infer_ms = self.decode.stage_infer_ms();
        Timings {
            queue_ms: since_arrival(self.first_step),
            ttft_ms: since_arrival(self.first_token),
            decode_tok_s,
            total_ms: milliseconds(self.elapsed(now)),
            overhead_ms: self.decode.overhead_ms(&stage_infer_ms),
            stage_infer_ms,
        }
    }
}

impl DecodeTimes {
    fn stage_infer_ms(&self) -> Vec<f64> {
        let n_steps = self.n_steps.max(1);
        self.infer_us
            .iter()
            .map(|sum| milliseconds(Duration::from_micros(*sum) / n_steps))
            .collect()
    }

    fn overhead_ms(&self, stage_infer_ms: &[f64]) -> f64 {
        if self.n_steps == 0 {
            return 0.0;
        }
        milliseconds(self.round_trips / self.n_steps) - stage_infer_ms.iter().sum::<f64>()
    }
}

/// Returns the part of a round trip in which no stage had the step.
pub(crate) fn unaccounted(round_trip: Duration, trace: &[StageTime]) -> Duration {
    let in_stages: u64 = trace.iter().map(|time| u64::from(time.total_us)).sum();
    round_trip.saturating_sub(Duration::from_micros(in_stages))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::ids::StageIndex;

    use super::*;

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }

    #[test]
    fn a_request_reports_its_times() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut watch = Stopwatch::new(start, 2);
        watch.step_sent(at(2));
        watch.step_sent(at(3));
        assert_eq!(watch.tokens(at(10)), TokenGap::First(Duration::from_millis(10)));
        let trace: Vec<StageTime> = [3000, 4000]
            .into_iter()
            .enumerate()
            .map(|(stage, infer_us)| StageTime {
                stage: StageIndex::new(u16::try_from(stage).unwrap()),
                queue_us: 0,
                infer_us,
                rows: 1,
                masked: 0,
                total_us: infer_us,
            })
            .collect();
        for ms in [20, 30] {
            watch.decode_step(Duration::from_millis(10), &trace);
            assert_eq!(watch.tokens(at(ms)), TokenGap::Later(Duration::from_millis(10)));
        }
        let timings = watch.report(3, at(31));
        close(timings.queue_ms, 2.0);
        close(timings.ttft_ms, 10.0);
        close(timings.decode_tok_s, 100.0);
        close(timings.total_ms, 31.0);
        close(timings.stage_infer_ms[0], 3.0);
        close(timings.stage_infer_ms[1], 4.0);
        close(timings.overhead_ms, 3.0);
    }

    #[test]
    fn a_request_without_tokens_reports_zeros() {
        let start = Instant::now();
        let timings = Stopwatch::new(start, 1).report(0, start);
        assert_eq!(timings, Timings { stage_infer_ms: vec![0.0], ..Timings::default() });
    }

    #[test]
    fn a_slow_pipeline_gets_more_time_per_message() {
        let least = Duration::from_millis(25);
        let mut measured = Smoothed::default();
        assert_eq!((loss_grace(measured), ask_after(least, measured)), (LEAST_LOSS_GRACE, least));
        measured.add(Duration::from_millis(10));
        assert_eq!((loss_grace(measured), ask_after(least, measured)), (LEAST_LOSS_GRACE, least));
        let mut slow = Smoothed::default();
        slow.add(Duration::from_millis(300));
        let (grace, patience) = (Duration::from_millis(1200), Duration::from_millis(600));
        assert_eq!((loss_grace(slow), ask_after(least, slow)), (grace, patience));
    }

    #[test]
    fn a_slow_pipeline_gets_more_time_per_step() {
        let floor = Duration::from_secs(30);
        let mut measured = Smoothed::default();
        assert_eq!(step_timeout(floor, measured), floor);
        measured.add(Duration::from_secs(1));
        assert_eq!(step_timeout(floor, measured), floor);
        measured.add(Duration::from_secs(11));
        assert_eq!(step_timeout(floor, measured), Duration::from_secs(60));
    }
}
