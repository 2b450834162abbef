//! What the announcements of a fleet tell: who is there, what stands in the way of a request, and
//! what is done per second.
//!
//! No I/O: whoever listens hands the messages in, with the time at which they came.

mod fleet_view;
mod meter;
pub mod testing;

pub use fleet_view::{FleetView, HearError, Heard, ModelView, Problem, Stranger};
pub use meter::{CoordinatorRates, Meter, ModelRates, Snapshot, WorkerRates};
