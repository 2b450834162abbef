//! What goes wrong while loading or running a stage on OpenVINO.

use std::io;
use std::path::PathBuf;

use crate::openvino::InferenceError;

/// Why a stage cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file of the stage cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        #[source]
        source: io::Error,
    },
    /// OpenVINO takes paths as UTF-8.
    #[error("the path {} is not UTF-8, which OpenVINO needs", path.display())]
    PathText {
        /// The path.
        path: PathBuf,
    },
    /// OpenVINO looks for the weights beside the graph, under the same name.
    #[error("the weights {} must stand beside {} under the same name", bin.display(), xml.display())]
    WeightsName {
        /// The graph.
        xml: PathBuf,
        /// The weights.
        bin: PathBuf,
    },
    /// The device does not take a property that the user chose.
    #[error("{device} does not take the property {key} = {value}")]
    Property {
        /// The property.
        key: String,
        /// Its value.
        value: String,
        /// The device.
        device: String,
        /// OpenVINO's reason.
        #[source]
        source: InferenceError,
    },
    /// OpenVINO cannot read the graph or compile it for the device.
    #[error("cannot compile {} for {device} (devices here: {available})", xml.display())]
    Compile {
        /// The graph.
        xml: PathBuf,
        /// The device.
        device: String,
        /// Devices that OpenVINO finds.
        available: String,
        /// OpenVINO's reason.
        #[source]
        source: InferenceError,
    },
    /// The compiled graph cannot be inspected.
    #[error("cannot inspect {}", xml.display())]
    Inspect {
        /// The graph.
        xml: PathBuf,
        /// OpenVINO's reason.
        #[source]
        source: InferenceError,
    },
    /// The graph has other inputs or outputs than a stage.
    #[error("{} is no graph of this stage: {what}", xml.display())]
    Graph {
        /// The graph.
        xml: PathBuf,
        /// The difference.
        what: GraphMismatch,
    },
    /// The graph does not run.
    #[error("{} does not run", xml.display())]
    Probe {
        /// The graph.
        xml: PathBuf,
        /// OpenVINO's reason.
        #[source]
        source: InferenceError,
    },
    /// The graph gives rows of another width.
    #[error("{} gives rows of {found} numbers, the manifest says {expected}", xml.display())]
    OutputWidth {
        /// The graph.
        xml: PathBuf,
        /// Width from the manifest.
        expected: usize,
        /// Width found.
        found: usize,
    },
}

/// How a graph differs from a stage's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GraphMismatch {
    /// An input is missing.
    #[error("the input {name} is missing")]
    MissingInput {
        /// Its name.
        name: &'static str,
    },
    /// An input that no stage has.
    #[error("the input {name} is not known")]
    UnknownInput {
        /// Its name.
        name: String,
    },
    /// Not exactly one output.
    #[error("it has {found} outputs, expected 1")]
    Outputs {
        /// Number found.
        found: usize,
    },
}

/// Why an inference failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum InferError {
    /// OpenVINO says so.
    #[error("OpenVINO failed")]
    OpenVino(#[source] InferenceError),
    /// The session went away.
    #[error("the session is closed")]
    Closed,
    /// The output has another size than rows and width ask for.
    #[error("the output has {found} numbers, expected {expected}")]
    Output {
        /// Numbers expected.
        expected: usize,
        /// Numbers found.
        found: usize,
    },
}
