//! The task that answers questions.

use std::io;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use stagebus_bus::{Bus, BusEvent, Delivery};
use stagebus_engine::Memory;
use stagebus_schemas::error::{ErrorClass, ErrorReply};
use stagebus_schemas::ids::NodeId;
use stagebus_schemas::messages::node::{
    Echo, NodeAnswer, NodeDescription, NodeMeasurement, NodeQuery, NodeQuestion, NodeReply, Probe,
    ProbeProgress, Ways,
};
use stagebus_schemas::subjects::nodes;
use stagebus_schemas::version::MessageVersion;
use stagebus_worker::WorkerSettings;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::measure::{self, Order};
use super::probe::Origin;

/// Longest wait for one echo: several times the way around the world and back.
const ECHO_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the broker may take to take in the subscriptions.
const SUBSCRIBED_TIMEOUT: Duration = Duration::from_secs(5);

/// Hand-offs that are timed; their median is stable, and all of them take some milliseconds.
const HANDOFFS: usize = 101;

/// What the agent knows of its machine without measuring.
#[derive(Debug)]
pub(super) struct Machine {
    /// Its name.
    pub(super) name: String,
    /// The host's.
    pub(super) host: String,
    /// Devices to measure.
    pub(super) devices: Vec<String>,
    /// Most memory that a stage may take, if that was said.
    pub(super) limit_bytes: Option<u64>,
}

impl Machine {
    /// Memory that a stage may take now, in bytes.
    fn free_bytes(&self) -> u64 {
        let free = Memory::look().available_bytes;
        self.limit_bytes.map_or(free, |limit| limit.min(free))
    }
}

/// What came of the last order to measure.
#[derive(Debug)]
enum Work {
    None,
    Underway {
        progress: watch::Receiver<ProbeProgress>,
        found: oneshot::Receiver<Result<NodeMeasurement, String>>,
    },
    Done(Result<NodeMeasurement, String>),
}

/// Answers questions about its machine.
#[derive(Debug)]
pub(super) struct Agent {
    id: NodeId,
    machine: Machine,
    /// Where models are had from.
    origin: Origin,
    settings: WorkerSettings,
    work: Work,
}

impl Agent {
    pub(super) fn new(
        id: NodeId,
        machine: Machine,
        origin: Origin,
        settings: WorkerSettings,
    ) -> Self {
        Self { id, machine, origin, settings, work: Work::None }
    }

    /// Answers until `stop` is cancelled; calls `on_ready` when it can be asked.
    pub(super) async fn serve(
        &mut self,
        bus: &Bus,
        stop: &CancellationToken,
        on_ready: impl FnOnce(&NodeId, &Machine) -> io::Result<()>,
    ) -> anyhow::Result<()> {
        let mut events = bus.events();
        let mut calls = bus.subscribe(nodes::CALL).await?;
        let mut asks = bus.subscribe(&nodes::ask(&self.id)).await?;
        echo_back(bus).await?;
        on_ready(&self.id, &self.machine).context("the ready line cannot be written")?;
        loop {
            let delivery = tokio::select! {
                biased;
                () = stop.cancelled() => return Ok(()),
                event = events.next() => match event {
                    Some(BusEvent::PermissionViolation(violation)) if violation.is_fatal() => {
                        return Err(violation.into());
                    }
                    Some(BusEvent::AuthRefused) | None => {
                        anyhow::bail!("the broker refuses this node, or the connection is closed")
                    }
                    Some(_) => continue,
                },
                delivery = asks.next() => delivery,
                delivery = calls.next() => delivery,
            };
            let delivery = delivery.context("the connection to the broker is closed")?;
            let answer = match delivery.decode::<NodeQuestion>() {
                Ok(question) => self.answer(bus, question.query, stop).await,
                Err(error) => failed(error.class(), error.to_string()),
            };
            self.reply(bus, &delivery, answer).await;
        }
    }

    async fn reply(&self, bus: &Bus, question: &Delivery, answer: NodeAnswer) {
        let (version, node) = (MessageVersion::CURRENT, self.id.clone());
        let reply = NodeReply { version, node, answer };
        if let Err(error) = bus.respond(question, &reply).await {
            // Whoever asked asks again, or hears nothing and says so.
            tracing::warn!(error = &error as &dyn std::error::Error, "a question is not answered");
        }
    }

    async fn answer(
        &mut self,
        bus: &Bus,
        query: NodeQuery,
        stop: &CancellationToken,
    ) -> NodeAnswer {
        match query {
            NodeQuery::Describe => NodeAnswer::Here(self.describe()),
            NodeQuery::Measure(probe) => self.begin(probe, stop).await,
            NodeQuery::Measured => self.measured(),
            NodeQuery::Ways(ways) => match measure_ways(bus, &ways).await {
                Ok(times) => NodeAnswer::Ways(times),
                Err(error) => failed(ErrorClass::Internal, format!("{error:#}")),
            },
            NodeQuery::Echo(Echo { back_bytes, .. }) => NodeAnswer::Echo(zeros(back_bytes)),
        }
    }

    fn describe(&self) -> NodeDescription {
        let Machine { name, host, devices, .. } = &self.machine;
        let n_cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        NodeDescription {
            name: name.clone(),
            host: host.clone(),
            n_cores: u32::try_from(n_cores).unwrap_or(u32::MAX),
            memory_bytes: Memory::look().total_bytes,
            free_bytes: self.machine.free_bytes(),
            devices: devices.clone(),
            engine: self.settings.engine.kind().to_string(),
            profile: self.settings.profile.profile().to_string(),
            threads: self.settings.threads.into(),
            has_model: matches!(self.origin, Origin::Here { .. }),
        }
    }

    /// Starts the thread that measures.
    async fn begin(&mut self, probe: Probe, stop: &CancellationToken) -> NodeAnswer {
        if let Work::Underway { .. } = self.work {
            // What has ended in the meantime counts as done.
            self.measured();
        }
        if let Work::Underway { .. } = self.work {
            let busy = "this node is measuring for another plan, ask again when it is done";
            return failed(ErrorClass::Overloaded, busy.to_owned());
        }
        let handoff_ns = match handoff().await {
            Ok(time) => nanoseconds(time),
            Err(error) => return failed(ErrorClass::Internal, format!("{error:#}")),
        };
        let (tell, progress) = watch::channel(ProbeProgress::default());
        let (send, found) = oneshot::channel();
        let order = Order {
            probe,
            origin: self.origin.clone(),
            devices: self.machine.devices.clone(),
            settings: self.settings.clone(),
            free_bytes: self.machine.free_bytes(),
            runtime: tokio::runtime::Handle::current(),
            stop: stop.clone(),
        };
        let work = move || {
            let devices = measure::measure(&order, &tell).map_err(|error| format!("{error:#}"));
            // Nobody waits once the node has ended.
            drop(send.send(devices.map(|devices| NodeMeasurement { handoff_ns, devices })));
        };
        match std::thread::Builder::new().name("measure".to_owned()).spawn(work) {
            Ok(_running) => {
                self.work = Work::Underway { progress, found };
                NodeAnswer::Begun
            }
            Err(error) => failed(ErrorClass::Internal, format!("no thread to measure: {error}")),
        }
    }

    fn measured(&mut self) -> NodeAnswer {
        if let Work::Underway { progress, found } = &mut self.work {
            self.work = match found.try_recv() {
                Ok(result) => Work::Done(result),
                Err(oneshot::error::TryRecvError::Empty) => {
                    return NodeAnswer::Underway(*progress.borrow());
                }
                Err(oneshot::error::TryRecvError::Closed) => {
                    Work::Done(Err("the thread that measures has panicked".to_owned()))
                }
            };
        }
        match &self.work {
            Work::Done(Ok(found)) => NodeAnswer::Measured(found.clone()),
            Work::Done(Err(why)) => failed(ErrorClass::Internal, why.clone()),
            Work::None | Work::Underway { .. } => {
                failed(ErrorClass::InvalidRequest, "nothing was measured".to_owned())
            }
        }
    }
}

fn failed(class: ErrorClass, message: String) -> NodeAnswer {
    NodeAnswer::Failed(ErrorReply::new(class, message))
}

fn zeros(bytes: u32) -> Bytes {
    vec![0; usize::try_from(bytes).unwrap_or(0)].into()
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Waits for a message to this connection itself, which comes behind whatever the broker has to say
/// about the subscriptions before it.
async fn echo_back(bus: &Bus) -> anyhow::Result<()> {
    let inbox = bus.new_inbox();
    let mut echo = bus.subscribe(&inbox).await?;
    bus.publish_bytes(&inbox, None, Bytes::new()).await?;
    let heard = tokio::time::timeout(SUBSCRIBED_TIMEOUT, echo.next()).await;
    heard
        .with_context(|| format!("the broker did not answer within {SUBSCRIBED_TIMEOUT:?}"))?
        .context("the connection to the broker is closed")?;
    Ok(())
}

/// Times echoes to another node, one after the other.
async fn measure_ways(bus: &Bus, ways: &Ways) -> anyhow::Result<Vec<u64>> {
    let subject = nodes::ask(&ways.to);
    let echo = Echo { payload: zeros(ways.bytes), back_bytes: ways.back_bytes };
    let question = NodeQuestion { version: MessageVersion::CURRENT, query: NodeQuery::Echo(echo) };
    let mut times = Vec::new();
    for _ in 0..ways.count {
        let sent = Instant::now();
        let reply: NodeReply = bus.request(&subject, &question, ECHO_TIMEOUT).await?;
        anyhow::ensure!(
            matches!(reply.answer, NodeAnswer::Echo(_)),
            "node {} gave no echo: {:?}",
            ways.to,
            reply.answer
        );
        times.push(nanoseconds(sent.elapsed()));
    }
    Ok(times)
}

/// The median time from this task to a thread and back.
async fn handoff() -> anyhow::Result<Duration> {
    let (send, orders) = sync_channel::<()>(1);
    let (tell, mut answers) = mpsc::channel::<()>(1);
    let echo = move || {
        while orders.recv().is_ok() && tell.blocking_send(()).is_ok() {}
    };
    std::thread::Builder::new()
        .name("hand-off".to_owned())
        .spawn(echo)
        .context("no thread to hand over to")?;
    let mut times = Vec::with_capacity(HANDOFFS);
    for _ in 0..HANDOFFS {
        let sent = Instant::now();
        send.send(()).context("the thread has ended")?;
        answers.recv().await.context("the thread has ended")?;
        times.push(sent.elapsed());
    }
    times.sort_unstable();
    Ok(times[HANDOFFS / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_handoff_takes_time() {
        assert!(handoff().await.expect("a thread") > Duration::ZERO);
    }

    #[test]
    fn a_limit_never_adds_memory() {
        let machine = |limit_bytes| Machine {
            name: "n".to_owned(),
            host: "h".to_owned(),
            devices: Vec::new(),
            limit_bytes,
        };
        assert_eq!(machine(Some(1 << 20)).free_bytes(), 1 << 20);
        assert!(machine(Some(u64::MAX)).free_bytes() < u64::MAX);
    }

    #[test]
    fn nothing_measured_is_said() {
        let machine = Machine {
            name: "n".to_owned(),
            host: "h".to_owned(),
            devices: Vec::new(),
            limit_bytes: None,
        };
        let origin = Origin::Here { model: "m.gguf".into(), cache: "cache".into() };
        let mut agent = Agent::new(NodeId::random(), machine, origin, WorkerSettings::default());
        let NodeAnswer::Failed(error) = agent.measured() else { panic!("there is nothing") };
        assert_eq!(error.class, ErrorClass::InvalidRequest);
        let (send, found) = oneshot::channel();
        let (_tell, progress) = watch::channel(ProbeProgress { done: 1, total: 3 });
        agent.work = Work::Underway { progress, found };
        let underway = NodeAnswer::Underway(ProbeProgress { done: 1, total: 3 });
        assert_eq!(agent.measured(), underway);
        drop(send);
        let NodeAnswer::Failed(error) = agent.measured() else { panic!("it is gone") };
        assert!(error.message.contains("panicked"), "{error}");
    }
}
