//! Tensors whose memory OpenVINO owns.

#![expect(unsafe_code, reason = "calls the C API")]

use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::slice;

use openvino_sys::{
    ov_element_type_e, ov_shape_t, ov_tensor_create, ov_tensor_data, ov_tensor_free,
    ov_tensor_get_byte_size, ov_tensor_set_shape, ov_tensor_t,
};

use super::runtime::not_null;
use super::{InferenceError, check};

/// A number format that has a Rust type.
///
/// # Safety
/// Every bit pattern of `ELEMENT` must be a valid value of the type, of the same size.
pub(crate) unsafe trait Element: Copy {
    /// OpenVINO's name of the format.
    const ELEMENT: ov_element_type_e;
}

// SAFETY: 32-bit IEEE floats on both sides.
unsafe impl Element for f32 {
    const ELEMENT: ov_element_type_e = ov_element_type_e::F32;
}
// SAFETY: 32-bit signed integers on both sides.
unsafe impl Element for i32 {
    const ELEMENT: ov_element_type_e = ov_element_type_e::I32;
}
// SAFETY: 64-bit signed integers on both sides.
unsafe impl Element for i64 {
    const ELEMENT: ov_element_type_e = ov_element_type_e::I64;
}

/// A dense tensor of `T`.
#[derive(Debug)]
pub(crate) struct Tensor<T> {
    raw: RawTensor,
    /// Values that there is initialised memory for.
    capacity: usize,
    element: PhantomData<T>,
}

impl<T: Element> Tensor<T> {
    /// An empty tensor, to be reshaped or written by an inference.
    pub(crate) fn new() -> Result<Self, InferenceError> {
        let mut dims = [0];
        let shape = ov_shape_t { rank: 1, dims: dims.as_mut_ptr() };
        let mut tensor = ptr::null_mut();
        // SAFETY: the shape's number is alive, `tensor` is a valid place for the result.
        check(unsafe { ov_tensor_create(T::ELEMENT, shape, &raw mut tensor) })?;
        Ok(Self { raw: RawTensor(not_null(tensor)?), capacity: 0, element: PhantomData })
    }

    /// A tensor of fixed shape, all zero.
    ///
    /// **Shape**: at most 4 dimensions.
    pub(crate) fn zeroed(dims: &[usize]) -> Result<Self, InferenceError> {
        let mut tensor = Self::new()?;
        let n_values = dims.iter().product();
        tensor.make_room(n_values)?;
        tensor.raw.set_shape(dims)?;
        Ok(tensor)
    }

    /// Gives the tensor another shape and returns its numbers, which are unspecified. Memory
    /// doubles when it does not suffice and never shrinks.
    ///
    /// **Shape**: at most 4 dimensions.
    pub(crate) fn reshape(&mut self, dims: &[usize]) -> Result<&mut [T], InferenceError> {
        let n_values = dims.iter().product::<usize>();
        if n_values > self.capacity {
            self.make_room(n_values.next_power_of_two())?;
        }
        self.raw.set_shape(dims)?;
        self.values_mut()
    }

    /// Makes initialised memory for so many numbers.
    fn make_room(&mut self, n_values: usize) -> Result<(), InferenceError> {
        self.raw.set_shape(&[n_values])?;
        let data = self.raw.data()?;
        // SAFETY: the call above made room for `n_values` of `T`, and no inference runs.
        unsafe { ptr::write_bytes(data, 0, n_values * size_of::<T>()) };
        self.capacity = n_values;
        Ok(())
    }

    /// The numbers, row-major, to be written.
    pub(crate) fn values_mut(&mut self) -> Result<&mut [T], InferenceError> {
        let n_values = self.raw.n_bytes()? / size_of::<T>();
        if n_values == 0 {
            return Ok(&mut []);
        }
        let data = self.raw.data()?.cast::<T>();
        // SAFETY: the tensor has `n_values` of `T`, initialised by `make_room` or written by an
        // inference, and all bit patterns are valid; requests that share the tensor touch it only
        // while an inference borrows it.
        Ok(unsafe { slice::from_raw_parts_mut(data, n_values) })
    }

    /// The numbers, row-major.
    pub(crate) fn values(&self) -> Result<&[T], InferenceError> {
        let n_values = self.raw.n_bytes()? / size_of::<T>();
        if n_values == 0 {
            return Ok(&[]);
        }
        let data = self.raw.data()?.cast::<T>().cast_const();
        // SAFETY: the tensor has `n_values` of `T`, initialised by `make_room` or written by an
        // inference, and all bit patterns are valid. An inference that writes it needs `&mut`.
        Ok(unsafe { slice::from_raw_parts(data, n_values) })
    }

    /// The tensor as input `index` of a model.
    pub(crate) fn input(&self, index: usize) -> Input<'_> {
        Input { index, tensor: &self.raw }
    }

    /// The tensor as output `index` of a model.
    pub(crate) fn output(&mut self, index: usize) -> Output<'_> {
        Output { index, tensor: &mut self.raw }
    }
}

/// A tensor and its place among the model's inputs or outputs.
#[derive(Debug)]
pub(crate) struct Placed<T> {
    pub(crate) tensor: Tensor<T>,
    pub(crate) index: usize,
}

impl<T: Element> Placed<T> {
    /// An empty tensor for place `index`.
    pub(crate) fn new(index: usize) -> Result<Self, InferenceError> {
        Ok(Self { tensor: Tensor::new()?, index })
    }

    /// A tensor of fixed shape for place `index`, all zero.
    ///
    /// **Shape**: at most 4 dimensions.
    pub(crate) fn zeroed(index: usize, dims: &[usize]) -> Result<Self, InferenceError> {
        Ok(Self { tensor: Tensor::zeroed(dims)?, index })
    }

    /// Gives the tensor a shape and the numbers for it.
    pub(crate) fn write(
        &mut self,
        dims: &[usize],
        values: impl Iterator<Item = T>,
    ) -> Result<(), InferenceError> {
        for (to, value) in self.tensor.reshape(dims)?.iter_mut().zip(values) {
            *to = value;
        }
        Ok(())
    }

    pub(crate) fn input(&self) -> Input<'_> {
        self.tensor.input(self.index)
    }

    pub(crate) fn output(&mut self) -> Output<'_> {
        self.tensor.output(self.index)
    }
}

/// A tensor, borrowed as an output.
#[derive(Debug)]
pub(crate) struct Output<'a> {
    /// Place among the model's outputs.
    pub(super) index: usize,
    pub(super) tensor: &'a mut RawTensor,
}

/// A tensor, borrowed as an input.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    /// Place among the model's inputs.
    pub(super) index: usize,
    pub(super) tensor: &'a RawTensor,
}

/// An owned `ov_tensor_t` handle of any format.
#[derive(Debug)]
pub(super) struct RawTensor(NonNull<ov_tensor_t>);

// SAFETY: the handle has no thread affinity; it is used from one thread at a time.
unsafe impl Send for RawTensor {}

impl RawTensor {
    fn n_bytes(&self) -> Result<usize, InferenceError> {
        let mut n_bytes = 0;
        // SAFETY: the tensor is alive; `n_bytes` is a valid place for the result.
        check(unsafe { ov_tensor_get_byte_size(self.0.as_ptr(), &raw mut n_bytes) })?;
        Ok(n_bytes)
    }

    fn data(&self) -> Result<*mut u8, InferenceError> {
        let mut data = ptr::null_mut();
        // SAFETY: the tensor is alive; `data` is a valid place for the result.
        check(unsafe { ov_tensor_data(self.0.as_ptr(), &raw mut data) })?;
        Ok(data.cast())
    }

    fn set_shape(&mut self, dims: &[usize]) -> Result<(), InferenceError> {
        let mut numbers: [i64; 4] =
            std::array::from_fn(|i| dims.get(i).map_or(0, |&dim| dim as i64));
        let shape = ov_shape_t { rank: dims.len() as i64, dims: numbers.as_mut_ptr() };
        // SAFETY: the tensor is alive and no inference runs on it; the shape's numbers are alive
        // until the call returns.
        check(unsafe { ov_tensor_set_shape(self.0.as_ptr(), shape) })
    }

    pub(super) fn as_ptr(&self) -> *const ov_tensor_t {
        self.0.as_ptr()
    }
}

impl Drop for RawTensor {
    fn drop(&mut self) {
        // SAFETY: the handle came from OpenVINO and is freed once.
        unsafe { ov_tensor_free(self.0.as_ptr()) };
    }
}
