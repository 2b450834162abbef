//! The OpenVINO runtime behind safe types; the only module with unsafe code.
//!
//! It calls the C API through `openvino-sys` instead of the `openvino` crate's wrappers: those
//! pass properties through C variadics (undefined on targets where variadic arguments travel
//! elsewhere, such as macOS on arm64), hand out output tensors without a lifetime, and cannot
//! give properties to one compilation. From the `openvino` crate come version and error types.
//!
//! **Invariant**: an inference touches only tensors that its caller lends it for the call, so
//! Rust's borrows hold for memory that OpenVINO owns.

mod allocator;
mod compiled;
mod request;
mod runtime;
mod tensor;

pub use ::openvino::InferenceError;
pub(crate) use allocator::trim;
pub(crate) use compiled::CompiledModel;
pub(crate) use request::InferRequest;
pub use runtime::{MIN_VERSION, Runtime, RuntimeError, Version};
pub(crate) use tensor::{Input, Placed, Tensor};

use ::openvino::get_last_error_message;
use openvino_sys::ov_status_e;

/// Turns a status into an error with OpenVINO's message.
fn check(status: ov_status_e) -> Result<(), InferenceError> {
    if status == ov_status_e::OK {
        return Ok(());
    }
    InferenceError::convert(status, get_last_error_message())
}

/// Text for a C call. Text with a NUL byte names nothing that OpenVINO knows.
fn c_text(text: &str) -> Result<std::ffi::CString, InferenceError> {
    std::ffi::CString::new(text).map_err(|error| InferenceError {
        kind: ::openvino::InferenceErrorKind::InvalidCParam,
        message: Some(error.to_string()),
    })
}
