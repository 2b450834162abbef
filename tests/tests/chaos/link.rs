//! A way to the broker that loses, doubles, swaps and delays the steps that go to a worker or the
//! answers that go to a coordinator, or breaks.
//!
//! ```text
//! member ──── bytes as they are ────▶ broker
//! member ◀─ frames, as Mischief says ─ broker
//! ```
//! What the broker sends is cut into the frames of its protocol (a line, and for messages the bytes
//! that it announces), so that single messages can be chosen. One task for each direction of each
//! connection; all end with the link.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, copy};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to steps and answers on their way to the member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mischief {
    /// Nothing.
    None,
    /// Every n-th is dropped.
    Drop(usize),
    /// Every one comes twice.
    Double,
    /// Every n-th comes after the one that follows it.
    Swap(usize),
    /// Every n-th comes again after five others: in a later epoch or as a late repeat.
    Late(usize),
    /// Connections are cut, and no new ones are taken.
    Cut,
}

/// A running link.
pub(crate) struct Link {
    port: u16,
    mischief: watch::Sender<Mischief>,
    n_struck: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Link {
    /// Starts a link to the broker at `url`.
    pub(crate) async fn start(url: &str) -> Result<Self> {
        let broker = url.strip_prefix("nats://").context("a plain address")?.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let (mischief, seen) = watch::channel(Mischief::None);
        let n_struck = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        tasks.spawn(accept(listener, broker, seen, Arc::clone(&n_struck)));
        Ok(Self { port, mischief, n_struck, _tasks: tasks })
    }

    /// The address for the member.
    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Changes what happens from now on.
    pub(crate) fn set(&self, mischief: Mischief) {
        self.mischief.send_replace(mischief);
    }

    /// Steps and answers that were struck so far.
    pub(crate) fn n_struck(&self) -> usize {
        self.n_struck.load(Ordering::Relaxed)
    }
}

async fn accept(
    listener: TcpListener,
    broker: String,
    mischief: watch::Receiver<Mischief>,
    n_struck: Arc<AtomicUsize>,
) {
    let mut connections = JoinSet::new();
    while let Ok((member, _)) = listener.accept().await {
        if *mischief.borrow() == Mischief::Cut {
            continue;
        }
        let Ok(broker) = TcpStream::connect(&broker).await else { continue };
        connections.spawn(connect(member, broker, mischief.clone(), Arc::clone(&n_struck)));
        while connections.try_join_next().is_some() {}
    }
}

async fn connect(
    member: TcpStream,
    broker: TcpStream,
    mut mischief: watch::Receiver<Mischief>,
    n_struck: Arc<AtomicUsize>,
) {
    // The link must not add to what it emulates.
    if member.set_nodelay(true).and(broker.set_nodelay(true)).is_err() {
        return;
    }
    let (mut from_member, to_member) = member.into_split();
    let (from_broker, mut to_broker) = broker.into_split();
    let seen = mischief.clone();
    tokio::select! {
        _ = copy(&mut from_member, &mut to_broker) => {}
        _ = relay(from_broker, to_member, seen, n_struck) => {}
        _ = mischief.wait_for(|mischief| *mischief == Mischief::Cut) => {}
    }
}

async fn relay(
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mischief: watch::Receiver<Mischief>,
    n_struck: Arc<AtomicUsize>,
) -> Result<()> {
    let mut from = BufReader::new(from);
    let mut n_seen = 0_usize;
    let mut held: Vec<(usize, Vec<u8>)> = Vec::new();
    while let Some((frame, may_strike)) = read_frame(&mut from).await? {
        if !may_strike {
            to.write_all(&frame).await?;
            continue;
        }
        n_seen += 1;
        let strikes = |n: usize| n_seen.is_multiple_of(n);
        let now = *mischief.borrow();
        let (first, again) = match now {
            Mischief::Drop(n) if strikes(n) => (None, None),
            Mischief::Double => (Some(&frame), Some(n_seen)),
            Mischief::Swap(n) if strikes(n) => (None, Some(n_seen + 1)),
            Mischief::Late(n) if strikes(n) => (Some(&frame), Some(n_seen + 5)),
            _ => (Some(&frame), None),
        };
        if first.is_none() || again.is_some() {
            n_struck.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(frame) = first {
            to.write_all(frame).await?;
        }
        if let Some(at) = again {
            held.push((at, frame.clone()));
        }
        for (_, frame) in held.extract_if(.., |(at, _)| *at <= n_seen) {
            to.write_all(&frame).await?;
        }
    }
    Ok(())
}

/// Reads one frame, and tells whether it is a step or an answer; `None` at the end of the connection.
async fn read_frame(from: &mut BufReader<OwnedReadHalf>) -> Result<Option<(Vec<u8>, bool)>> {
    let mut frame = Vec::new();
    if from.read_until(b'\n', &mut frame).await? == 0 {
        return Ok(None);
    }
    let line = String::from_utf8_lossy(&frame).into_owned();
    let words: Vec<&str> = line.split_whitespace().collect();
    let is_message = matches!(words.first(), Some(&("MSG" | "HMSG")));
    if !is_message {
        return Ok(Some((frame, false)));
    }
    let n_bytes: usize = words.last().context("a size")?.parse()?;
    let start = frame.len();
    frame.resize(start + n_bytes + 2, 0);
    from.read_exact(&mut frame[start..]).await?;
    let is_struck = |subject: &&str| subject.ends_with(".step") || subject.contains(".head.");
    Ok(Some((frame, words.get(1).is_some_and(is_struck))))
}
