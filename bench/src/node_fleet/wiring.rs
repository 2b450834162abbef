//! How the processes of a fleet reach its broker: directly, or over links.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use stagebus_fleet::{BrokerOptions, LocalBroker, Routes};

use crate::link::{Conditions, Link, LinkPlan};

/// How the processes of a fleet reach its broker. Whoever asks is beside the broker.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wiring {
    /// All directly.
    #[default]
    Direct,
    /// Each over a link of its own.
    Each {
        /// By stage; an absent one is beside the broker.
        workers: Vec<Option<LinkPlan>>,
        /// The coordinator's.
        coordinator: Option<LinkPlan>,
    },
    /// All workers and the coordinator over one link, whose rate they share.
    Relay(LinkPlan),
}

impl Wiring {
    /// Each process over a link of its own, so that a message from one to another takes `hop`: half
    /// of it to the broker, half of it from there.
    #[must_use]
    pub fn hops(n_stages: usize, hop: Duration) -> Self {
        let plan = LinkPlan::both(Conditions::delay(hop / 2));
        Self::Each { workers: vec![Some(plan); n_stages], coordinator: Some(plan) }
    }
}

/// A broker and the links to it.
#[derive(Debug)]
pub(super) struct WiredBroker {
    workers: Vec<Option<Arc<Link>>>,
    coordinator: Option<Arc<Link>>,
    broker: LocalBroker,
}

impl WiredBroker {
    /// Starts a broker, and the links that `wiring` asks for.
    pub(super) async fn start(
        options: BrokerOptions,
        wiring: &Wiring,
        n_stages: usize,
    ) -> anyhow::Result<Self> {
        let broker = LocalBroker::start(options).await.context("the broker did not start")?;
        let url = broker.url();
        let open = |plan: &LinkPlan| {
            Link::to_broker(&url, *plan).map(Arc::new).context("cannot open a link")
        };
        let (workers, coordinator) = match wiring {
            Wiring::Direct => (vec![None; n_stages], None),
            Wiring::Relay(plan) => {
                let relay = open(plan)?;
                (vec![Some(Arc::clone(&relay)); n_stages], Some(relay))
            }
            Wiring::Each { workers, coordinator } => {
                let workers = workers.iter().map(|plan| plan.as_ref().map(open).transpose());
                let coordinator = coordinator.as_ref().map(open).transpose()?;
                (workers.collect::<anyhow::Result<_>>()?, coordinator)
            }
        };
        Ok(Self { workers, coordinator, broker })
    }

    /// The broker.
    pub(super) fn broker(&self) -> &LocalBroker {
        &self.broker
    }

    /// The link of a stage's workers.
    pub(super) fn worker(&self, stage: usize) -> Option<&Link> {
        self.workers.get(stage)?.as_deref()
    }

    /// The coordinator's link.
    pub(super) fn coordinator(&self) -> Option<&Link> {
        self.coordinator.as_deref()
    }

    /// Where the processes connect.
    pub(super) fn routes(&self) -> Routes {
        let url = |link: &Option<Arc<Link>>| link.as_ref().map(|link| link.url());
        Routes {
            workers: self.workers.iter().map(url).collect(),
            coordinators: url(&self.coordinator),
        }
    }

    /// Ends the broker in order.
    pub(super) async fn end(mut self) -> anyhow::Result<()> {
        anyhow::ensure!(self.broker.stop().await?, "the broker had to be killed");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_relay_is_one_way_for_all_and_else_each_has_its_own() {
        let plan = LinkPlan::both(Conditions::CLEAR);
        let routes = async |wiring: Wiring| {
            let wired = WiredBroker::start(BrokerOptions::default(), &wiring, 2).await;
            let wired = wired.expect("a broker");
            let routes = wired.routes();
            wired.end().await.expect("it leaves");
            routes
        };
        let relay = routes(Wiring::Relay(plan)).await;
        assert!(relay.coordinators.is_some());
        assert!(relay.workers.iter().all(|url| *url == relay.coordinators), "{relay:?}");
        let each =
            routes(Wiring::Each { workers: vec![None, Some(plan)], coordinator: None }).await;
        assert_eq!((&each.workers[0], &each.coordinators), (&None, &None));
        assert!(each.workers[1].is_some());
        let hops = routes(Wiring::hops(2, Duration::from_millis(1))).await;
        assert_ne!(hops.workers[0], hops.workers[1]);
        assert_ne!(hops.workers[0], hops.coordinators);
    }
}
