//! Infer requests: the state of one session.

#![expect(unsafe_code, reason = "calls the C API")]

use std::ptr::NonNull;

use openvino_sys::{
    ov_infer_request_free, ov_infer_request_infer, ov_infer_request_set_input_tensor_by_index,
    ov_infer_request_set_output_tensor_by_index, ov_infer_request_t,
};

use super::tensor::{Input, Output};
use super::{InferenceError, check};

/// A request with its own KV state.
#[derive(Debug)]
pub(crate) struct InferRequest(NonNull<ov_infer_request_t>);

// SAFETY: ov::InferRequest has no thread affinity; it is used from one thread at a time.
unsafe impl Send for InferRequest {}

impl InferRequest {
    pub(super) fn from_handle(handle: NonNull<ov_infer_request_t>) -> Self {
        Self(handle)
    }

    /// Runs the model on `inputs` and waits until `outputs` are written. Every input and every
    /// output of the model must be among them: the request touches no other memory.
    pub(crate) fn infer(
        &mut self,
        inputs: &[Input<'_>],
        outputs: &mut [Output<'_>],
    ) -> Result<(), InferenceError> {
        let request = self.0.as_ptr();
        for input in inputs {
            let (index, tensor) = (input.index, input.tensor.as_ptr());
            // SAFETY: both handles are alive; the request takes its own share of the tensor.
            check(unsafe { ov_infer_request_set_input_tensor_by_index(request, index, tensor) })?;
        }
        for output in outputs {
            let (index, tensor) = (output.index, output.tensor.as_ptr());
            // SAFETY: both handles are alive; the request takes its own share of the tensor.
            check(unsafe { ov_infer_request_set_output_tensor_by_index(request, index, tensor) })?;
        }
        // SAFETY: the handle is alive and nobody else uses it. The inputs are borrowed and the
        // outputs are borrowed exclusively until the call returns.
        check(unsafe { ov_infer_request_infer(request) })
    }
}

impl Drop for InferRequest {
    fn drop(&mut self) {
        // SAFETY: the handle came from OpenVINO and is freed once.
        unsafe { ov_infer_request_free(self.0.as_ptr()) };
    }
}
