//! The broker, behind our own types: the only crate that calls the NATS client.
//!
//! - [`Bus`] is one connection: a cheap clone, no lock, nothing that blocks for ever. Every wait
//!   has a bound ([`BusOptions::publish_timeout`], the timeouts of requests, the idle time of
//!   event streams).
//! - Core NATS is at most once. Whatever may have lost messages (a full subscription, a broken
//!   connection) raises [`Bus::loss_generation`]: a change means "assume a gap", even when an
//!   event of [`Bus::events`] was missed.
//! - Connections of one process may share a [`Switch`]: what one of them sends to an address of
//!   another one does not go through the broker.
//! - A host that is not this machine is refused without TLS and credentials.
//!
//! # Tasks
//! A connection runs two tasks, both made by the NATS client: one that owns the socket, one that
//! delivers connection events to a callback of ours, which never blocks. Both end when the last
//! [`Bus`], [`Subscription`] and [`EventStream`] of the connection is gone or [`Bus::drain`] was
//! called; while the broker is away they go on trying until it is back or the runtime ends. A
//! [`JobStore`], a [`Results`], a [`ModelStore`] and an [`ObjectWriter`] have one more each, also made by
//! the client, which ends with them.

mod address;
mod broker;
mod bulk;
mod connection;
mod credentials;
mod error;
mod events;
mod jetstream;
mod jobs;
mod options;
mod publish;
mod request;
mod settings;
mod store;
mod stream;
mod subscription;
mod switch;
mod violation;

pub use bulk::{Bulk, BulkDelivery, BulkLosses, BulkReceiver, BulkSender};
pub use connection::Bus;
pub use credentials::{Credentials, Tls, TlsIdentity};
pub use error::{
    BusError, CloseError, PublishError, RequestError, Requirement, StreamError, SubscribeError,
    is_access_refusal,
};
pub use events::{BusEvent, BusEvents};
pub use jobs::{
    JobDelivery, JobError, JobLimits, JobStore, JobTime, NewEvent, Results, StoredEvent, Submitted,
};
pub use options::BusOptions;
pub use settings::SeedError;
pub use stagebus_schemas::access::Role;
pub use store::{
    ModelStore, NewObject, ObjectReader, ObjectWriter, PART_BYTES, Part, StoreError, StoredObject,
};
pub use stream::EventStream;
pub use subscription::{Delivery, Subscription};
pub use switch::Switch;
pub use violation::{Operation, Violation};
