//! The two sides of a hop: one that measures, and one that sends back what it gets.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use bytes::Bytes;
use stagebus_bus::{Bus, BusOptions, Subscription};

use crate::link::{Link, LinkPlan};

/// Where the other side listens.
const THERE: &str = "bench.hop.there";

/// Where its answers go.
const BACK: &str = "bench.hop.back";

/// Messages before the first timed one.
const WARM_UP: u16 = 2;

/// Ends the measuring of one size when its time is over; a few are always taken.
fn goes_on(n_done: usize, n: u16, started: Instant, patience: Duration) -> bool {
    n_done < usize::from(n + WARM_UP) && (n_done < 3 || started.elapsed() < patience)
}

/// Half of the times there and back, without those of the first messages.
fn halves(mut times: Vec<f64>) -> Vec<f64> {
    let n_cold = usize::from(WARM_UP).min(times.len().saturating_sub(1));
    times.drain(..n_cold);
    times.iter_mut().for_each(|ms| *ms /= 2.0);
    times
}

/// A partner by NATS, on a thread with a runtime of its own, as a process has it.
pub(super) struct NatsPeer {
    bus: Bus,
    back: Subscription,
    there: JoinHandle<anyhow::Result<()>>,
}

impl NatsPeer {
    /// Starts a partner that reaches the broker at `far_url`; this side reaches it at `url`.
    pub(super) async fn start(url: &str, far_url: &str) -> anyhow::Result<Self> {
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let far_url = far_url.to_owned();
        let echo = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let bus = Bus::connect(BusOptions::new(far_url, "stagebus-bench-echo")).await?;
                let mut messages = bus.subscribe(THERE).await?;
                // A message to itself comes back when the broker knows the subscription.
                let hello = Bytes::from_static(b"hello");
                bus.publish_bytes(THERE, None, hello).await?;
                messages.next().await.context("the broker is gone")?;
                ready.send(()).ok().context("nobody waits for the partner")?;
                while let Some(message) = messages.next().await {
                    if message.payload.is_empty() {
                        return Ok(());
                    }
                    bus.publish_bytes(BACK, None, message.payload).await?;
                }
                anyhow::bail!("the partner's connection was closed")
            })
        };
        let there = thread::Builder::new().name("hop-nats".to_owned()).spawn(echo)?;
        let bus = Bus::connect(BusOptions::new(url, "stagebus-bench")).await?;
        let back = bus.subscribe(BACK).await?;
        is_ready.await.context("the partner did not start")?;
        Ok(Self { bus, back, there })
    }

    /// Sends messages one after the other; returns the time of one way each, in milliseconds.
    pub(super) async fn ways_ms(
        &mut self,
        message: &Bytes,
        n: u16,
        patience: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let (started, mut times) = (Instant::now(), Vec::new());
        while goes_on(times.len(), n, started, patience) {
            let sent = Instant::now();
            self.bus.publish_bytes(THERE, None, message.clone()).await?;
            let back = self.back.next().await.context("the connection was closed")?;
            times.push(sent.elapsed().as_secs_f64() * 1e3);
            anyhow::ensure!(back.payload == *message, "other bytes came back by NATS");
        }
        Ok(halves(times))
    }

    /// Ends the partner.
    pub(super) async fn end(self) -> anyhow::Result<()> {
        self.bus.publish_bytes(THERE, None, Bytes::new()).await?;
        let there = self.there;
        let ended = tokio::task::spawn_blocking(move || there.join()).await?;
        ended.ok().context("the partner panicked")?
    }
}

/// A partner by TCP, on a thread; every message goes behind its length.
pub(super) struct TcpPeer {
    stream: TcpStream,
    /// The way to the partner; both sides end with it.
    _link: Option<Link>,
}

impl TcpPeer {
    /// Starts a partner behind a link, if one is planned.
    pub(super) fn start(plan: Option<LinkPlan>) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let mut address = listener.local_addr()?;
        let link = plan.map(|plan| Link::start(address, plan)).transpose()?;
        if let Some(link) = &link {
            address = link.address();
        }
        let echo = move || {
            // It ends with the connection, in order or not.
            if let Ok((stream, _)) = listener.accept() {
                drop(echo(&stream));
            }
        };
        thread::Builder::new().name("hop-tcp".to_owned()).spawn(echo)?;
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, _link: link })
    }

    /// As [`NatsPeer::ways_ms`].
    pub(super) fn ways_ms(
        &mut self,
        message: &[u8],
        n: u16,
        patience: Duration,
    ) -> anyhow::Result<Vec<f64>> {
        let (started, mut times) = (Instant::now(), Vec::new());
        let mut back = Vec::new();
        while goes_on(times.len(), n, started, patience) {
            let sent = Instant::now();
            send(&self.stream, message)?;
            receive(&self.stream, &mut back)?;
            times.push(sent.elapsed().as_secs_f64() * 1e3);
            anyhow::ensure!(back == message, "other bytes came back by TCP");
        }
        Ok(halves(times))
    }
}

fn echo(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut message = Vec::new();
    loop {
        receive(stream, &mut message)?;
        send(stream, &message)?;
    }
}

fn send(mut stream: &TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    let head = length.to_le_bytes();
    // One write for head and message, as long as the system takes both.
    let n_written = stream.write_vectored(&[io::IoSlice::new(&head), io::IoSlice::new(message)])?;
    match n_written.checked_sub(head.len()) {
        Some(n_written) => stream.write_all(&message[n_written..]),
        None => {
            stream.write_all(&head[n_written..])?;
            stream.write_all(message)
        }
    }
}

fn receive(mut stream: &TcpStream, message: &mut Vec<u8>) -> io::Result<()> {
    let mut head = [0; 4];
    stream.read_exact(&mut head)?;
    message.resize(u32::from_le_bytes(head) as usize, 0);
    stream.read_exact(message)
}
