//! A link emulator: a way to a TCP server that is slow, narrow, uneven, lossy or cut.
//!
//! ```text
//! client ──▶ reader ─▶ [ queue: bytes with their release times ] ─▶ writer ──▶ server     up
//! client ◀── writer ◀─ [ queue ] ◀─ reader ◀────────────────────────────────── server     down
//! ```
//! - Each direction of a link is one lane, [`Conditions`] say what it does. A lane gives every
//!   piece that comes in the moment at which its last byte reaches the far end; the piece waits in
//!   its connection's queue until then. Nothing else waits meanwhile: a delay costs no throughput.
//! - All connections of one link share its lanes, and with them its rate: several clients behind
//!   one link are a shared relay. A process with a link of its own has a way of its own.
//! - Order is kept. A lost piece holds up what follows it on its connection until it has been sent
//!   again, as TCP does; it holds up nothing on other connections.
//! - Memory is bounded: a reader stops reading while its connection has too much on the way, or
//!   the lane's queue is longer than [`Conditions::queue`]. The sender feels that as back pressure.
//! - Threads of the operating system keep the time (a runtime's timers tick in milliseconds): one
//!   that accepts, and two for each direction of each connection. [`Link`] joins them all when it
//!   is dropped.
//!
//! Connections end at the link, so the growth of TCP's own windows over a long way is not part of
//! what is emulated. [`accuracy`] measures what is.

pub mod accuracy;
mod conditions;
mod connection;
mod lane;
mod pipe;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

pub use conditions::{Conditions, LinkPlan, MAX_LOSS, mbit_s};
use connection::Connection;
use lane::Lane;
pub use lane::Passed;

/// Whether bytes get through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passage {
    /// They do.
    Open,
    /// They are held, and go on when it opens again: the way is gone, and nobody is told.
    Silent,
    /// Connections are closed with what they hold, and new ones as soon as they come.
    Cut,
}

/// What passed a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Traffic {
    /// From clients to the server.
    pub up: Passed,
    /// From the server to clients.
    pub down: Passed,
}

/// A running link; ends, with all its connections and threads, when dropped.
#[derive(Debug)]
pub struct Link {
    address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

/// What the threads of a link share.
#[derive(Debug)]
struct Shared {
    server: SocketAddr,
    up: Mutex<Lane>,
    down: Mutex<Lane>,
    doors: Mutex<Doors>,
}

#[derive(Debug)]
struct Doors {
    passage: Passage,
    ending: bool,
    connections: Vec<Connection>,
}

/// A lock's content; a thread that panicked leaves nothing half done in any of them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Opens a link to `server` on a loopback port of its own.
    ///
    /// # Errors
    /// A server whose name is unknown, a system without ports or threads.
    pub fn start(server: impl ToSocketAddrs, plan: LinkPlan) -> io::Result<Self> {
        let server = server.to_socket_addrs()?.next().ok_or(io::ErrorKind::AddrNotAvailable)?;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let address = listener.local_addr()?;
        let doors = Doors { passage: Passage::Open, ending: false, connections: Vec::new() };
        let shared = Arc::new(Shared {
            server,
            up: Mutex::new(Lane::new(plan.up, 1)),
            down: Mutex::new(Lane::new(plan.down, 2)),
            doors: Mutex::new(doors),
        });
        let for_thread = Arc::clone(&shared);
        let acceptor = named("link-accept").spawn(move || accept(&listener, &for_thread))?;
        Ok(Self { address, shared, acceptor: Some(acceptor) })
    }

    /// Opens a link to the broker at `url`, which speaks no TLS.
    ///
    /// # Errors
    /// As [`Link::start`]; another kind of address.
    pub fn to_broker(url: &str, plan: LinkPlan) -> io::Result<Self> {
        let server = url.strip_prefix("nats://").ok_or(io::ErrorKind::InvalidInput)?;
        Self::start(server, plan)
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address in the form of a broker's.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Changes what the link does to bytes that come from now on; what is on its way keeps its
    /// time.
    pub fn set(&self, plan: LinkPlan) {
        lock(&self.shared.up).set(plan.up);
        lock(&self.shared.down).set(plan.down);
    }

    /// Opens, silences or cuts the link.
    pub fn set_passage(&self, passage: Passage) {
        let mut doors = lock(&self.shared.doors);
        doors.passage = passage;
        for connection in &doors.connections {
            match passage {
                Passage::Open => connection.hold(false),
                Passage::Silent => connection.hold(true),
                Passage::Cut => connection.cut(),
            }
        }
    }

    /// What passed so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        Traffic { up: lock(&self.shared.up).passed(), down: lock(&self.shared.down).passed() }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let connections = {
            let mut doors = lock(&self.shared.doors);
            doors.ending = true;
            std::mem::take(&mut doors.connections)
        };
        // Wakes the thread that accepts; if that fails it has ended already.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
        for connection in connections {
            connection.cut();
            connection.join();
        }
    }
}

/// A thread with a name.
fn named(name: &str) -> thread::Builder {
    // They move bytes and hold their buffers on the heap.
    thread::Builder::new().name(name.to_owned()).stack_size(128 * 1024)
}

/// Takes connections until the link ends.
fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        let (ending, passage) = {
            let doors = lock(&shared.doors);
            (doors.ending, doors.passage)
        };
        if ending {
            return;
        }
        let (Ok(client), Passage::Open | Passage::Silent) = (client, passage) else { continue };
        // A server that is away, or a system without threads: the client sees its connection close.
        let Ok(mut connection) = Connection::open(client, shared.server) else { continue };
        let mut doors = lock(&shared.doors);
        doors.connections.retain(|connection| !connection.is_over());
        if doors.ending {
            return;
        }
        if doors.passage == Passage::Cut {
            continue;
        }
        connection.hold(doors.passage == Passage::Silent);
        if connection.spawn(shared).is_ok() {
            doors.connections.push(connection);
        }
    }
}

#[cfg(test)]
mod tests;
