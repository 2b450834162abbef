//! One connection through a link.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;

use socket2::SockRef;

use super::pipe::Pipe;
use super::{Shared, named};

/// What the system may keep of what has arrived: bytes are to wait at the sender or in the link,
/// where they are counted.
const RECEIVE_BUFFER_BYTES: usize = 64 * 1024;

/// A connection with its four threads.
#[derive(Debug)]
pub(super) struct Connection {
    client: TcpStream,
    server: TcpStream,
    up: Arc<Pipe>,
    down: Arc<Pipe>,
    threads: Vec<JoinHandle<()>>,
}

impl Connection {
    /// Connects a client to the server; nothing moves yet.
    pub(super) fn open(client: TcpStream, server: SocketAddr) -> io::Result<Self> {
        let server = TcpStream::connect(server)?;
        for stream in [&client, &server] {
            // The link must not add to what it emulates.
            stream.set_nodelay(true)?;
            SockRef::from(stream).set_recv_buffer_size(RECEIVE_BUFFER_BYTES)?;
        }
        let (up, down) = (Arc::new(Pipe::default()), Arc::new(Pipe::default()));
        Ok(Self { client, server, up, down, threads: Vec::new() })
    }

    /// Starts to move bytes; a connection that cannot is closed.
    pub(super) fn spawn(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        let started = self.spawn_threads(shared);
        if started.is_err() {
            self.cut();
        }
        started
    }

    fn spawn_threads(&mut self, shared: &Arc<Shared>) -> io::Result<()> {
        for upwards in [true, false] {
            let (pipe, from, to) = match upwards {
                true => (&self.up, &self.client, &self.server),
                false => (&self.down, &self.server, &self.client),
            };
            let (reads, source, lanes) = (Arc::clone(pipe), from.try_clone()?, Arc::clone(shared));
            let (writes, target, back) = (Arc::clone(pipe), to.try_clone()?, from.try_clone()?);
            self.threads.push(named("link-read").spawn(move || {
                let lane = if upwards { &lanes.up } else { &lanes.down };
                reads.read(source, lane);
            })?);
            self.threads.push(named("link-write").spawn(move || {
                let ended = writes.write(&target);
                close(&target, if ended { Shutdown::Write } else { Shutdown::Both });
                if !ended {
                    close(&back, Shutdown::Both);
                    writes.cut();
                }
            })?);
        }
        Ok(())
    }

    /// Holds everything in both directions, or lets it go on.
    pub(super) fn hold(&self, held: bool) {
        self.up.hold(held);
        self.down.hold(held);
    }

    /// Closes both sides at once.
    pub(super) fn cut(&self) {
        self.up.cut();
        self.down.cut();
        close(&self.client, Shutdown::Both);
        close(&self.server, Shutdown::Both);
    }

    /// Whether all threads have ended.
    pub(super) fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the threads of a connection that was cut.
    pub(super) fn join(self) {
        for thread in self.threads {
            // One that panicked has ended, too.
            drop(thread.join());
        }
    }
}

/// Closes a stream; one that is closed already stays so.
fn close(stream: &TcpStream, how: Shutdown) {
    drop(stream.shutdown(how));
}
