//! A private fleet that answers one request at a time, and the times of its steps.
//!
//! Steps are timed beside the broker: an observer subscribes to all messages of the model and notes
//! when each arrives. Two arrivals at one place need no synchronised clocks, and their difference
//! holds whatever lies between them: broker, wake-ups, decoding, queueing, encoding. Inference
//! times come with the head rows, measured by the stages. The observer costs the broker one more
//! delivery per message, so its figures are upper bounds; a request that is not observed gives the
//! coordinator's own mean beside them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Serialize;
use stagebus_bus::{Bus, BusOptions, Delivery, EventStream, Subscription};
use stagebus_fleet::{FleetSpec, LocalFleet};
use stagebus_schemas::messages::forward::{Forward, Phase, StageTime};
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::public::{Event, FinishReason, PromptRequest, Timings};
use stagebus_schemas::subjects::{Subject, Subjects};
use stagebus_shards::ShardSet;

/// Longest wait for an event: nobody else uses the fleet, so silence means trouble.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);

/// A running fleet and a connection to its broker.
#[derive(Debug)]
pub struct FleetRun {
    fleet: LocalFleet,
    bus: Bus,
    subjects: Subjects,
}

/// The answer to one request.
#[derive(Debug)]
pub struct Answer {
    /// Generated tokens, an end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What the coordinator measured.
    pub timings: Timings,
    /// From sending the request to the first token's arrival here.
    pub first_token: Duration,
    /// Times of the decode steps, if the request was observed.
    pub steps: Vec<StepTime>,
}

/// Where the time of one decode step went, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StepTime {
    /// From this step's message to the next one's.
    pub period_ms: f64,
    /// Inference of each stage.
    pub infer_ms: Vec<f64>,
    /// Of each stage, from the arrival of its message to the hand-over of its result, less its
    /// inference: decoding, queueing, choosing the token, encoding.
    pub worker_ms: Vec<f64>,
    /// The part of that which it waited for its turn.
    pub queue_ms: Vec<f64>,
    /// Of each stage, from the arrival of its message beside the broker to that of the message
    /// which it sends, less what it did in between: the way to it and the way back.
    pub legs_ms: Vec<f64>,
    /// From the head's message to the next step's: the coordinator with its two legs.
    pub coordinator_ms: f64,
}

impl StepTime {
    /// The part of the period that is no inference.
    #[must_use]
    pub fn overhead_ms(&self) -> f64 {
        self.period_ms - self.infer_ms.iter().sum::<f64>()
    }

    /// Messages that the step is made of: one to each stage and one back.
    #[must_use]
    pub fn n_hops(&self) -> usize {
        self.infer_ms.len() + 1
    }
}

impl FleetRun {
    /// Starts a fleet and connects to it.
    ///
    /// # Errors
    /// A fleet that does not start, a broker that cannot be reached.
    pub async fn start(spec: FleetSpec) -> anyhow::Result<Self> {
        let set = ShardSet::open(&spec.shards)?;
        let model = set.manifest.model.parse().context("the model's name is not valid")?;
        let fleet = LocalFleet::start(spec).await.context("the fleet did not start")?;
        let bus = Bus::connect(BusOptions::new(fleet.url(), "stagebus-bench")).await?;
        Ok(Self { fleet, bus, subjects: Subjects::new(&model) })
    }

    /// Sends a greedy request and reads its answer.
    ///
    /// # Errors
    /// A request that is refused or fails.
    pub async fn ask(
        &self,
        prompt: &[u32],
        n_tokens: usize,
        observed: bool,
    ) -> anyhow::Result<Answer> {
        let mut observer = match observed {
            true => Some(self.bus.subscribe(&self.subjects.all()).await?),
            false => None,
        };
        let request = PromptRequest {
            tokens: Some(prompt.to_vec()),
            max_tokens: Some(u32::try_from(n_tokens).context("too many tokens")?),
            ..PromptRequest::default()
        };
        let started = Instant::now();
        let mut events = self.bus.prompt(&self.subjects.prompt(), &request, IDLE_TIMEOUT).await?;
        let mut seen = Vec::new();
        let mut answer = Answer::new();
        while let Some(event) = next(&mut events, observer.as_mut(), &mut seen).await? {
            answer.take(event, started)?;
        }
        answer.steps = step_times(&self.subjects, &seen)?;
        Ok(answer)
    }

    /// Memory that each worker has for itself alone, files left out, in bytes (Linux only).
    ///
    /// # Errors
    /// A worker that is gone, a platform that does not tell.
    pub fn worker_bytes(&self) -> anyhow::Result<Vec<u64>> {
        let members = self.fleet.members();
        let workers = members.iter().filter(|member| member.stage.is_some());
        Ok(workers.map(|member| stagebus_fleet::own_bytes(member.pid)).collect::<Result<_, _>>()?)
    }

    /// Ends the fleet in order.
    ///
    /// # Errors
    /// A part that had to be killed, or left with a failure.
    pub async fn end(self) -> anyhow::Result<()> {
        end(self.fleet).await
    }
}

/// Ends a fleet in order.
///
/// # Errors
/// A part that had to be killed, or left with a failure.
pub(crate) async fn end(fleet: LocalFleet) -> anyhow::Result<()> {
    let report = fleet.shutdown().await?;
    anyhow::ensure!(
        report.killed.is_empty() && report.failed.is_empty(),
        "the fleet did not end in order: {report:?}"
    );
    Ok(())
}

impl Answer {
    fn new() -> Self {
        Self {
            tokens: Vec::new(),
            finish_reason: FinishReason::Cancelled,
            timings: Timings::default(),
            first_token: Duration::ZERO,
            steps: Vec::new(),
        }
    }

    fn take(&mut self, event: Event, started: Instant) -> anyhow::Result<()> {
        match event {
            Event::Accepted { .. } | Event::Status { .. } => {}
            Event::Token { tokens, .. } => {
                if self.tokens.is_empty() {
                    self.first_token = started.elapsed();
                }
                self.tokens.extend(tokens);
            }
            Event::Done { finish_reason, timings, .. } => {
                self.finish_reason = finish_reason;
                self.timings = timings;
            }
            Event::Error { class, message, .. } => {
                anyhow::bail!("the request failed: {message} ({class:?})")
            }
        }
        Ok(())
    }
}

/// Waits for the next event and notes what the observer sees meanwhile.
async fn next(
    events: &mut EventStream,
    observer: Option<&mut Subscription>,
    seen: &mut Vec<(Instant, Delivery)>,
) -> anyhow::Result<Option<Event>> {
    let Some(observer) = observer else { return Ok(events.next().await?) };
    loop {
        tokio::select! {
            // The observer first: its times count.
            biased;
            delivery = observer.next() => {
                let delivery = delivery.context("the observer's connection was closed")?;
                seen.push((Instant::now(), delivery));
            }
            event = events.next() => return Ok(event?),
        }
    }
}

/// What was seen of one step.
#[derive(Debug, Clone, Default)]
struct Marks {
    decode: bool,
    /// The messages to the stages.
    sent: BTreeMap<usize, Instant>,
    /// The head's message.
    answered: Option<Instant>,
    trace: Vec<StageTime>,
}

/// Puts the messages of one session together; steps that were not seen whole are left out.
fn step_times(subjects: &Subjects, seen: &[(Instant, Delivery)]) -> anyhow::Result<Vec<StepTime>> {
    let mut marks: BTreeMap<u32, Marks> = BTreeMap::new();
    for (at, delivery) in seen {
        match subjects.parse(delivery.subject()) {
            Ok(Subject::Step(stage, _)) => {
                for step in delivery.decode::<Forward>()?.steps {
                    let entry = marks.entry(step.step.number()).or_default();
                    entry.decode = step.phase == Phase::Decode;
                    entry.sent.insert(stage.index(), *at);
                }
            }
            Ok(Subject::Head(_)) => {
                for step in delivery.decode::<Head>()?.steps {
                    let entry = marks.entry(step.step.number()).or_default();
                    entry.answered = Some(*at);
                    entry.trace = step.trace;
                }
            }
            _ => {}
        }
    }
    let next_of = |number: u32| marks.get(&number.checked_add(1)?)?.sent.get(&0).copied();
    let time = |(&number, marks): (&u32, &Marks)| {
        marks.decode.then(|| step_time(marks, next_of(number)?)).flatten()
    };
    Ok(marks.iter().filter_map(time).collect())
}

fn step_time(marks: &Marks, next_sent: Instant) -> Option<StepTime> {
    let ms = |us: u32| f64::from(us) / 1e3;
    let gap = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
    let mut trace = marks.trace.clone();
    trace.sort_by_key(|time| time.stage);
    let answered = marks.answered?;
    let leg = |time: &StageTime| {
        let stage = time.stage.index();
        let after = marks.sent.get(&(stage + 1)).copied().unwrap_or(answered);
        Some(gap(*marks.sent.get(&stage)?, after) - ms(time.total_us))
    };
    let rest = |time: &StageTime| ms(time.total_us.saturating_sub(time.infer_us));
    Some(StepTime {
        period_ms: gap(*marks.sent.get(&0)?, next_sent),
        coordinator_ms: gap(answered, next_sent),
        infer_ms: trace.iter().map(|time| ms(time.infer_us)).collect(),
        worker_ms: trace.iter().map(rest).collect(),
        queue_ms: trace.iter().map(|time| ms(time.queue_us)).collect(),
        legs_ms: trace.iter().map(leg).collect::<Option<_>>()?,
    })
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::ids::StageIndex;

    use super::*;

    #[test]
    fn the_period_is_divided_without_a_rest() {
        let start = Instant::now();
        let at = |us: u64| start + Duration::from_micros(us);
        let stage = |stage, queue_us, infer_us, total_us| StageTime {
            stage: StageIndex::new(stage),
            queue_us,
            infer_us,
            rows: 1,
            masked: 0,
            total_us,
        };
        let marks = Marks {
            decode: true,
            sent: BTreeMap::from([(0, at(0)), (1, at(5_250))]),
            answered: Some(at(11_600)),
            trace: vec![stage(1, 30, 6_000, 6_150), stage(0, 50, 5_000, 5_100)],
        };
        let time = step_time(&marks, at(12_000)).expect("the step was seen whole");
        assert_eq!(time.infer_ms, [5.0, 6.0]);
        assert_eq!(time.n_hops(), 3);
        assert!((time.overhead_ms() - 1.0).abs() < 1e-9, "{time:?}");
        assert!((time.worker_ms[0] - 0.1).abs() < 1e-9, "{time:?}");
        assert!((time.coordinator_ms - 0.4).abs() < 1e-9, "{time:?}");
        assert!((time.legs_ms[0] - 0.15).abs() < 1e-9, "{time:?}");
        assert!((time.legs_ms[1] - 0.2).abs() < 1e-9, "{time:?}");
        assert_eq!(step_time(&Marks { answered: None, ..marks }, at(12_000)), None);
    }
}
