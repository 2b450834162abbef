//! A local fleet: broker, workers and coordinators as child processes of this one.
//!
//! Who stops whom: an orderly [`LocalFleet::shutdown`] closes the standard input of the
//! coordinators, then of the workers (they were started with `--exit-with-parent` and leave when
//! it ends), and then asks the broker to end. What does not leave within the deadline is killed
//! by its handle. Dropping a fleet kills all of it. When this process itself dies, its ends of the
//! pipes close: coordinators and workers leave by themselves, and a watcher beside the broker,
//! which reads no standard input of its own, ends the broker.
//!
//! Children run in process groups of their own, so that Ctrl-C on a terminal reaches this process
//! alone and the order above holds. Each child writes one line of JSON to standard output when it
//! is ready; its standard error is the log, prefixed with the child's name, with the last lines
//! kept for error messages.

mod broker;
mod error;
mod local;
mod output;
mod process;
mod spec;

pub use broker::{BrokerOptions, LocalBroker};
pub use error::FleetError;
pub use local::{Ended, LocalFleet, Member, ShutdownReport, own_bytes, peak_rss_bytes, rss_bytes};
pub use output::LogSink;
pub use spec::{BrokerChoice, FleetSpec, Pinning, Routes, Timeouts};
