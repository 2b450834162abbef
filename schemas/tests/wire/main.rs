//! The wire: round trips, hostile input, subjects, ids and the public contract.

mod hostile;
mod ids;
mod public;
mod requests;
mod round_trip;
mod samples;
mod subjects;
