//! The whole product: real processes, a real broker, a real model.

mod bad_files;
mod bad_requests;
mod bad_setup;
mod bulk;
mod chat;
mod command_line;
mod constrained;
mod crowds;
mod delivery;
mod doctor;
mod examples;
mod faults;
mod fixed_shapes;
mod foreign_client;
mod gateway;
mod gguf_edit;
mod hosted;
mod jobs;
mod links;
mod metrics;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod page;
mod plan;
mod prompts;
mod reference;
mod requests;
mod sampling;
mod secrets;
mod secured;
mod sessions;
mod speculation;
mod stages_on_the_wire;
mod top;
mod traces;
mod two_sites;
