//! The wire: round trips, hostile input, subjects, ids, CloudEvents and the public contract.

mod cloud_events;
mod constraints;
mod hostile;
mod ids;
mod public;
mod requests;
mod round_trip;
mod samples;
mod subjects;
