//! Who is asked: a running fleet, or one that is started for the purpose.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use stagebus_worker::ProfileChoice;
use tokio_util::sync::CancellationToken;

use super::converse::Target;
use crate::client::ClientArgs;
use crate::console;
use crate::discover;
use crate::exit::UsageError;
use crate::local::{self, LocalArgs, Wanted};

/// Options that say who is asked.
#[derive(Debug, Clone, clap::Args)]
pub struct TargetArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Name of the model; found through the fleet's announcements when absent. With --local: a
    /// GGUF file
    #[arg(long, value_name = "NAME|FILE")]
    model: Option<String>,

    #[command(flatten)]
    private: PrivateArgs,

    /// Longest wait for each event, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    timeout: u64,
}

/// The fleet of `--local`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct PrivateArgs {
    /// Start a private fleet and end it afterwards
    #[arg(long, conflicts_with = "broker")]
    local: bool,

    /// With --local: number of stages of a model file [default: 2]
    #[arg(long, value_name = "N", requires = "local")]
    stages: Option<usize>,

    /// With --local: numerics, fast or exact
    #[arg(long, value_name = "PROFILE", requires = "local")]
    profile: Option<ProfileChoice>,

    #[command(flatten)]
    fleet: LocalArgs,
}

impl PrivateArgs {
    /// Options of a private fleet mean nothing to a running one.
    fn refuse_without_local(&self) -> Result<(), UsageError> {
        match self.fleet.first_given() {
            Some(option) => Err(UsageError::Needs { option, needs: "--local" }),
            None => Ok(()),
        }
    }
}

impl TargetArgs {
    /// Runs `work` with the fleet that the options name and, where that is known beforehand, its
    /// number of stages. A private fleet is started before and ended afterwards. `name` is shown
    /// in the broker's lists.
    ///
    /// # Errors
    /// Configuration that is wrong, a broker that cannot be reached, a fleet without a model or
    /// with several, a private fleet that does not start, and what `work` reports.
    pub async fn with_target<T>(
        &self,
        name: &str,
        quiet: bool,
        stop: &CancellationToken,
        work: impl AsyncFnOnce(Target, Option<usize>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let idle_timeout = Duration::from_secs(self.timeout);
        if self.private.local {
            return self.with_private(quiet, stop, work).await;
        }
        self.private.refuse_without_local()?;
        let bus = self.client.connect(name).await?;
        let model = match &self.model {
            Some(name) => name.parse().context("--model is not a model's name")?,
            None => discover::only_model(&bus).await?,
        };
        work(Target { bus, model, idle_timeout }, None).await
    }

    async fn with_private<T>(
        &self,
        quiet: bool,
        stop: &CancellationToken,
        work: impl AsyncFnOnce(Target, Option<usize>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let PrivateArgs { stages, profile, fleet, .. } = &self.private;
        let model = self.model.as_deref().map(Path::new);
        let wanted = Wanted { model, n_stages: *stages, profile: *profile, quiet };
        let set = fleet.shard_set(&wanted, stop).await?;
        let spec = fleet.spec(&set, *profile, None, &self.client.process)?;
        let n_stages = set.manifest.n_stages();
        if std::io::stderr().is_terminal() && !quiet {
            console::note(&format!("starting a private fleet of {n_stages} stages"));
        }
        local::with_fleet(spec, stop, async |target| {
            let target = Target { idle_timeout: Duration::from_secs(self.timeout), ..target };
            work(target, Some(n_stages)).await
        })
        .await
    }
}
