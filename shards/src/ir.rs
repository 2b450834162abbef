//! Builds OpenVINO graphs and writes them as IR version 11: an XML file and a weight file.
//!
//! **Source**: OpenVINO documentation, "Operation Sets" and "Intermediate Representation".

pub(crate) mod bin;
pub(crate) mod element;
pub(crate) mod graph;
pub(crate) mod ops;
pub(crate) mod xml;
