//! An HTTP API in the form of OpenAI's, in front of the public subjects, and a page.
//!
//! A gateway is a client of the fleet like any other: it publishes prompts and cancellations, hears
//! announcements, and keeps nothing that another gateway would need. So as many may run as are
//! wanted, beside each other or behind a load balancer.
//!
//! # Tasks
//! ```text
//! server::serve ──▶ one task per connection: reads requests, writes answers; a dropped answer is
//!                   cancelled through a bounded channel
//! fleet::watch        owns the view of the fleet
//! readiness::answer   owns what is known of readiness
//! send_cancels        publishes cancellations
//! ```
//! All of them end in [`run`], the last three after the connections.

mod answers;
mod api_error;
mod body;
mod config;
mod error;
mod fleet;
mod gateway;
mod generation;
mod keys;
mod live;
mod openai;
mod page;
mod process;
mod readiness;
mod router;
mod server;
mod text;

pub use config::{GatewaySettings, ServerTls, SettingError};
pub use error::GatewayError;
pub use keys::KeyError;
pub use process::{GatewayArgs, GatewayConfig, Ready, prepare, run, serve};
