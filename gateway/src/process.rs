//! The gateway as a process: flags, configuration, logging, the ready line, the order of its end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use stagebus_bus::{Bus, BusOptions, Role};
use stagebus_settings::{BrokerSettings, Overrides, ProcessArgs, logging, process};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::config::GatewaySettings;
use crate::error::GatewayError;
use crate::fleet::{self, Tell};
use crate::gateway::{Gateway, MAX_CANCELS, MAX_PROBES, TaskEnds, send_cancels};
use crate::keys::ApiKeys;
use crate::readiness;
use crate::server;
use crate::text::Texts;

/// How long to go on trying while the broker cannot be reached at the start.
const CONNECT_WAIT: Duration = Duration::from_secs(10);

/// How long the connection to the broker may take to send its last messages.
const FLUSH: Duration = Duration::from_secs(5);

/// Events that wait in one answer: as many tokens as a client may be behind before its answer is
/// lost.
const EVENTS: usize = 16_384;

/// Flags of `stagebus gateway`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GatewayArgs {
    /// Address to listen on [default: 127.0.0.1:8000]; others than loopback need keys and TLS
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,

    /// Address of the broker [default: nats://127.0.0.1:4222]
    #[arg(long, value_name = "URL")]
    pub broker: Option<String>,

    /// Shut down when standard input ends, as it does when the parent process ends
    #[arg(long)]
    pub exit_with_parent: bool,

    /// Configuration
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Everything that a gateway needs.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// The broker.
    pub broker: BrokerSettings,
    /// The table `[gateway]`.
    pub settings: GatewaySettings,
}

/// What a gateway says when it listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ready {
    /// True.
    pub ready: bool,
    /// The address that it listens on.
    pub listen: SocketAddr,
    /// The same for clients: what OpenAI's libraries call the base URL.
    pub base_url: String,
}

/// Loads the configuration and starts logging. If the flags say so, `stop` is cancelled when
/// standard input ends.
///
/// # Errors
/// [`GatewayError`].
pub fn prepare(args: GatewayArgs, stop: &CancellationToken) -> Result<GatewayConfig, GatewayError> {
    let mut flags = Overrides::default();
    flags.set_some("gateway.listen", args.listen, "--listen");
    flags.set_some("broker.url", args.broker, "--broker");
    let loaded = args.process.load::<GatewaySettings>("gateway", &flags)?;
    logging::init(&loaded.log)?;
    info!(broker = ?loaded.broker, settings = ?loaded.process, "configuration");
    if args.exit_with_parent {
        process::watch_parent(stop.clone()).map_err(GatewayError::Thread)?;
    }
    Ok(GatewayConfig { broker: loaded.broker, settings: loaded.process })
}

/// Runs a gateway until `stop` is cancelled, and prints one line of JSON on standard output when it
/// listens.
///
/// # Errors
/// [`GatewayError`].
pub async fn serve(config: GatewayConfig, stop: CancellationToken) -> Result<(), GatewayError> {
    run(config, stop, |ready| {
        info!(listen = %ready.listen, "ready");
        process::print_ready(ready).map_err(GatewayError::Ready)
    })
    .await
}

/// Runs a gateway until `stop` is cancelled; `on_ready` is called when it listens.
///
/// Order of the end: no more connections, the answers that are under way, the cancellations that
/// they leave, the connection to the broker.
///
/// # Errors
/// [`GatewayError`], also what `on_ready` returns.
pub async fn run(
    config: GatewayConfig,
    stop: CancellationToken,
    on_ready: impl FnOnce(&Ready) -> Result<(), GatewayError>,
) -> Result<(), GatewayError> {
    let GatewayConfig { broker, settings } = config;
    settings.validate()?;
    let keys = ApiKeys::load(&settings)?;
    let tls = server::load_tls(&settings.tls)?;
    let texts = Texts::load(settings.shards.clone()).await?;
    let mut options = BusOptions::from_settings(&broker, Role::Client, "stagebus-gateway")?;
    options.connect_wait = CONNECT_WAIT;
    options.subscription_capacity = EVENTS;
    let bus = Bus::connect(options).await?;
    let events = bus.events();
    let announcements = fleet::subscribe(&bus, &settings.models).await?;
    let cannot_listen = |source| GatewayError::Listen { listen: settings.listen, source };
    let listener = TcpListener::bind(settings.listen).await.map_err(cannot_listen)?;
    let listen = listener.local_addr().map_err(cannot_listen)?;
    let scheme = if tls.is_some() { "https" } else { "http" };
    let base_url = format!("{scheme}://{listen}/v1");

    // Ends the gateway: by `stop`, or because it hears nothing any more.
    let ending = stop.child_token();
    let ended = CancellationToken::new();
    let tasks = TaskTracker::new();
    let (tell_models, models) = watch::channel(Vec::new());
    let (tell_fleet, fleet) = watch::channel(fleet::nothing_known());
    let tell = Tell { models: tell_models, fleet: tell_fleet };
    let (cancels, cancelled) = mpsc::channel(MAX_CANCELS);
    let (probes, asked) = mpsc::channel(MAX_PROBES);
    let ends = TaskEnds { models, fleet, cancels, probes };
    let gateway = Arc::new(Gateway::new(settings, bus.clone(), keys, texts, ends));
    tasks.spawn(send_cancels(bus.clone(), cancelled, ended.clone()));
    tasks.spawn(readiness::answer(Arc::clone(&gateway), asked, ending.clone()));
    let hears = fleet::watch(bus.clone(), announcements, events, tell, ending.clone());
    let hears = tasks.spawn({
        let ending = ending.clone();
        async move {
            let heard = hears.await;
            ending.cancel();
            heard
        }
    });
    let told = on_ready(&Ready { ready: true, listen, base_url });
    if told.is_err() {
        ending.cancel();
    }
    let served = server::serve(listener, tls, gateway, ending).await;
    ended.cancel();
    tasks.close();
    tasks.wait().await;
    if let Err(error) = bus.drain(FLUSH).await {
        warn!(%error, "the connection to the broker did not end in order");
    }
    told?;
    // A task that panicked has said so.
    hears.await.unwrap_or(Ok(()))?;
    served
}
