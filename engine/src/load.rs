//! Reading and compiling a stage's graph, and what goes wrong while that happens.

use std::io;
use std::path::{Path, PathBuf};

use stagebus_shards::shard_set::StageFiles;

use crate::openvino::{CompiledModel, InferenceError, Runtime};
use crate::options::EngineOptions;
use crate::properties;

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
        name: String,
    },
    /// An output is missing.
    #[error("the output {name} is missing")]
    MissingOutput {
        /// Its name.
        name: String,
    },
    /// An input that no stage has.
    #[error("the input {name} is not known")]
    UnknownInput {
        /// Its name.
        name: String,
    },
    /// Too few or too many outputs.
    #[error("it has {found} outputs, expected {expected}")]
    Outputs {
        /// Number expected.
        expected: usize,
        /// Number found.
        found: usize,
    },
}

/// Compiles with the options' properties. If that fails and the user chose properties, each of
/// those is tried alone, so that the error can name the one at fault.
pub(crate) fn compile(
    runtime: &Runtime,
    files: &StageFiles,
    options: &EngineOptions,
) -> Result<CompiledModel, LoadError> {
    let text = |path: &Path| match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(LoadError::PathText { path: path.to_owned() }),
    };
    for path in [&files.xml, &files.bin] {
        std::fs::File::open(path)
            .map_err(|source| LoadError::Read { path: path.clone(), source })?;
    }
    let (xml, bin, device) = (&files.xml, &files.bin, &options.device);
    if xml.with_extension("bin") != *bin {
        return Err(LoadError::WeightsName { xml: xml.clone(), bin: bin.clone() });
    }
    let cache_dir = options.cache_dir.as_deref().map(text).transpose()?;
    let list = properties::properties(options, cache_dir.as_deref());
    let failed = match CompiledModel::compile(runtime, &text(xml)?, device, &list) {
        Ok(model) => return Ok(model),
        Err(source) => source,
    };
    let base_device = device.split(':').next().unwrap_or(device);
    for (key, value) in &options.properties {
        if let Err(source) = runtime.try_property(base_device, key, value) {
            let (key, value, device) = (key.clone(), value.clone(), device.clone());
            return Err(LoadError::Property { key, value, device, source });
        }
    }
    let available = runtime.devices().unwrap_or_default().join(", ");
    Err(LoadError::Compile { xml: xml.clone(), device: device.clone(), available, source: failed })
}
