//! llama.cpp over several nodes: an RPC server on each, and `llama-bench` that drives them.
//!
//! The layers are divided evenly. `llama-bench` is a star's centre: it sends each server its part
//! of the graph with what goes in, and fetches what comes out, so between two servers everything
//! goes through it. A message takes a hop's delay between it and a server.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use tokio::process::Child;

use super::{LlamaDecode, bench};
use crate::contender::Launch;
use crate::link::{Conditions, Link, LinkPlan};
use crate::node_fleet::cpu_list;

/// The server's program, beside `llama-bench`.
const SERVER: &str = "ggml-rpc-server";

/// How long a server may take to listen.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// How often a server that does not listen yet is tried.
const TRY_EVERY: Duration = Duration::from_millis(20);

/// The programs.
#[derive(Debug, Clone)]
pub struct Programs {
    bench: PathBuf,
    server: PathBuf,
}

/// The nodes: how many, their cores (empty where processes cannot be tied), and the time of a hop.
#[derive(Debug, Clone, Copy)]
pub struct Nodes<'a> {
    /// How many.
    pub n: usize,
    /// Their cores; empty where processes cannot be tied.
    pub cpus: &'a [usize],
    /// From a process to another, one way.
    pub hop: Duration,
}

impl Programs {
    /// The programs, where the named `llama-bench` is, or that of the set-up or of `PATH`; `None` if
    /// there is none or it has no RPC server beside it.
    #[must_use]
    pub fn find(named: Option<&Path>) -> Option<Self> {
        let bench = super::find(named)?;
        let server = bench.with_file_name(format!("{SERVER}{}", std::env::consts::EXE_SUFFIX));
        server.is_file().then_some(Self { bench, server })
    }

    /// Generates `n_tokens` tokens on the nodes, once.
    ///
    /// # Errors
    /// A program that does not run or prints something else, a system without ports.
    pub async fn decode(
        &self,
        model: &Path,
        n_tokens: usize,
        nodes: Nodes<'_>,
    ) -> anyhow::Result<LlamaDecode> {
        let mut servers = Vec::with_capacity(nodes.n);
        for node in 0..nodes.n {
            servers.push(self.serve(node, nodes).await?);
        }
        let addresses: Vec<String> =
            servers.iter().map(|server| server.address.to_string()).collect();
        let even = vec!["1"; nodes.n].join("/");
        let args = ["--rpc", &addresses.join(","), "-ngl", "999", "-ts", &even];
        let tied = (!nodes.cpus.is_empty()).then(|| cpu_list(nodes.cpus));
        bench(&self.bench, model, n_tokens, &args, tied).await
    }

    /// Starts the server of a node, and its link if hops take time.
    async fn serve(&self, node: usize, nodes: Nodes<'_>) -> anyhow::Result<Server> {
        let port = free_port()?;
        let args = ["-H", "127.0.0.1", "-t", "1", "-p", &port.to_string()].map(Into::into).into();
        let cpu = nodes.cpus.get(node % nodes.cpus.len().max(1)).copied();
        let launch = Launch { name: SERVER.to_owned(), program: self.server.clone(), args, cpu };
        let mut command = launch.command();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.kill_on_drop(true).spawn();
        let child = child.with_context(|| format!("cannot start {}", self.server.display()))?;
        let direct = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        listening(direct).await?;
        let link = match nodes.hop.is_zero() {
            true => None,
            false => {
                let plan = LinkPlan::both(Conditions::delay(nodes.hop));
                Some(Link::start(direct, plan).context("cannot open a link")?)
            }
        };
        let address = link.as_ref().map_or(direct, Link::address);
        Ok(Server { address, _link: link, _child: child })
    }
}

/// A running server; its process ends when dropped, after its link.
#[derive(Debug)]
struct Server {
    address: SocketAddr,
    _link: Option<Link>,
    _child: Child,
}

/// A port that is free at the moment: the server takes no other way to choose one.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("there is no free port")?;
    Ok(listener.local_addr()?.port())
}

async fn listening(address: SocketAddr) -> anyhow::Result<()> {
    let started = Instant::now();
    while TcpStream::connect(address).is_err() {
        anyhow::ensure!(started.elapsed() < READY_WITHIN, "{SERVER} does not listen on {address}");
        tokio::time::sleep(TRY_EVERY).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_beside_the_named_program() {
        let folder = tempfile::tempdir().expect("folder");
        let suffix = std::env::consts::EXE_SUFFIX;
        let bench = folder.path().join(format!("llama-bench{suffix}"));
        std::fs::write(&bench, "").expect("file");
        assert!(Programs::find(Some(&bench)).is_none(), "no RPC server");
        std::fs::write(folder.path().join(format!("{SERVER}{suffix}")), "").expect("file");
        assert!(Programs::find(Some(&bench)).is_some());
    }

    #[tokio::test]
    async fn a_port_that_listens_is_found() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listening(listener.local_addr().expect("an address")).await.expect("it listens");
        assert!(free_port().expect("a port") > 0);
    }
}
