//! Compiled models and their ports.

#![expect(unsafe_code, reason = "calls the C API")]

use std::ffi::CString;
use std::ptr::{self, NonNull};

use openvino_sys::{
    ov_compiled_model_create_infer_request, ov_compiled_model_free, ov_compiled_model_get_property,
    ov_compiled_model_input_by_index, ov_compiled_model_inputs_size,
    ov_compiled_model_output_by_index, ov_compiled_model_outputs_size, ov_compiled_model_t,
    ov_core_compile_model_from_file_props, ov_output_const_port_free, ov_output_const_port_t,
    ov_port_get_any_name, ov_property_t,
};

use super::runtime::{Runtime, Text, not_null};
use super::{InferRequest, InferenceError, c_text, check};

/// A model on a device.
#[derive(Debug)]
pub(crate) struct CompiledModel {
    handle: NonNull<ov_compiled_model_t>,
    /// Freed after the model.
    _runtime: Runtime,
}

// SAFETY: ov::CompiledModel is thread-safe and has no thread affinity.
unsafe impl Send for CompiledModel {}

impl CompiledModel {
    /// Reads the IR at `xml`, with its weights beside it, and compiles it for `device`.
    pub(crate) fn compile(
        runtime: &Runtime,
        xml: &str,
        device: &str,
        properties: &[(String, String)],
    ) -> Result<Self, InferenceError> {
        let xml = c_text(xml)?;
        let device = c_text(device)?;
        let texts = properties
            .iter()
            .map(|(key, value)| Ok((c_text(key)?, c_text(value)?)))
            .collect::<Result<Vec<(CString, CString)>, InferenceError>>()?;
        let list: Vec<ov_property_t> = texts
            .iter()
            .map(|(key, value)| ov_property_t { key: key.as_ptr(), value: value.as_ptr().cast() })
            .collect();
        let mut handle = ptr::null_mut();
        // SAFETY: the core is alive; all strings are NUL-terminated and, like the list, live until
        // the call returns; the keys used here take string values.
        check(unsafe {
            ov_core_compile_model_from_file_props(
                runtime.core(),
                xml.as_ptr(),
                device.as_ptr(),
                list.len(),
                list.as_ptr(),
                &raw mut handle,
            )
        })?;
        Ok(Self { handle: not_null(handle)?, _runtime: runtime.clone() })
    }

    /// A name of every input, in order.
    pub(crate) fn input_names(&self) -> Result<Vec<String>, InferenceError> {
        let mut n_inputs = 0;
        // SAFETY: the model is alive; `n_inputs` is a valid place for the result.
        check(unsafe { ov_compiled_model_inputs_size(self.handle.as_ptr(), &raw mut n_inputs) })?;
        (0..n_inputs).map(|index| self.input_name(index)).collect()
    }

    fn input_name(&self, index: usize) -> Result<String, InferenceError> {
        let (model, mut port) = (self.handle.as_ptr(), ptr::null_mut());
        // SAFETY: the model is alive; `port` is a valid place for the result.
        check(unsafe { ov_compiled_model_input_by_index(model, index, &raw mut port) })?;
        Port(not_null(port)?).name()
    }

    /// A name of every output, in order.
    pub(crate) fn output_names(&self) -> Result<Vec<String>, InferenceError> {
        (0..self.n_outputs()?).map(|index| self.output_name(index)).collect()
    }

    fn output_name(&self, index: usize) -> Result<String, InferenceError> {
        let (model, mut port) = (self.handle.as_ptr(), ptr::null_mut());
        // SAFETY: the model is alive; `port` is a valid place for the result.
        check(unsafe { ov_compiled_model_output_by_index(model, index, &raw mut port) })?;
        Port(not_null(port)?).name()
    }

    /// Number of outputs.
    pub(crate) fn n_outputs(&self) -> Result<usize, InferenceError> {
        let mut n_outputs = 0;
        // SAFETY: the model is alive; `n_outputs` is a valid place for the result.
        check(unsafe { ov_compiled_model_outputs_size(self.handle.as_ptr(), &raw mut n_outputs) })?;
        Ok(n_outputs)
    }

    /// The value of a property, as text.
    pub(crate) fn property(&self, key: &str) -> Result<String, InferenceError> {
        let (key, mut value) = (c_text(key)?, ptr::null_mut());
        let model = self.handle.as_ptr();
        // SAFETY: the model is alive, the key NUL-terminated; `value` is a valid place.
        check(unsafe { ov_compiled_model_get_property(model, key.as_ptr(), &raw mut value) })?;
        Ok(Text(not_null(value)?).read())
    }

    /// A request with an empty state.
    pub(crate) fn request(&self) -> Result<InferRequest, InferenceError> {
        let mut request = ptr::null_mut();
        let model = self.handle.as_ptr();
        // SAFETY: the model is alive; `request` is a valid place for the result.
        check(unsafe { ov_compiled_model_create_infer_request(model, &raw mut request) })?;
        not_null(request).map(InferRequest::from_handle)
    }
}

impl Drop for CompiledModel {
    fn drop(&mut self) {
        // SAFETY: the handle came from OpenVINO and is freed once; requests hold their own share.
        unsafe { ov_compiled_model_free(self.handle.as_ptr()) };
    }
}

struct Port(NonNull<ov_output_const_port_t>);

impl Port {
    fn name(&self) -> Result<String, InferenceError> {
        let mut name = ptr::null_mut();
        // SAFETY: the port is alive; `name` is a valid place for the result.
        check(unsafe { ov_port_get_any_name(self.0.as_ptr(), &raw mut name) })?;
        Ok(Text(not_null(name)?).read())
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: the handle came from OpenVINO and is freed once.
        unsafe { ov_output_const_port_free(self.0.as_ptr()) };
    }
}
