//! What goes wrong while running a stage on OpenVINO.

use crate::openvino::InferenceError;

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
