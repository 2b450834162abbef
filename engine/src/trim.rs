//! Rewinding by cutting the state of a stateful request: what mask rewind spares.
//!
//! No backend does this; it is here to be measured beside [`StatefulBackend`](crate::StatefulBackend), which masks what a
//! rewind leaves behind. OpenVINO gives and takes the state as f32 whatever precision it is kept
//! in, so every cut moves all of it twice.
#![expect(unsafe_code, reason = "the state can be written through the C++ interface only")]

use std::ffi::{c_char, c_int};
use std::ptr::{self, NonNull};
use std::slice;

use stagebus_shards::shard_set::StageFiles;

use crate::openvino::Runtime;
use crate::options::EngineOptions;
use crate::paged::NativeError;
use crate::paged::native::{Library, LoadTexts, RawProperty};
use crate::properties;

/// Why the state of a request cannot be cut.
#[derive(Debug, thiserror::Error)]
pub enum TrimError {
    /// The library of the paged backend, which also has this, cannot be used, or it refused.
    #[error("the state cannot be cut")]
    Native(#[from] NativeError),
    /// The library lacks a function.
    #[error("the library has no function to cut a state")]
    Function(#[source] libloading::Error),
}

#[repr(C)]
struct RawState {
    _private: [u8; 0],
}

type LoadFn = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const RawProperty,
    usize,
    *mut *mut RawState,
) -> c_int;

type AppendFn =
    unsafe extern "C" fn(*mut RawState, *const i64, usize, *mut *const f32, *mut usize) -> c_int;

struct Functions {
    load: LoadFn,
    free: unsafe extern "C" fn(*mut RawState),
    append: AppendFn,
    trim: unsafe extern "C" fn(*mut RawState, usize) -> c_int,
}

impl Functions {
    fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the type stands in `native/state.hpp` beside the name.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }?
            }};
        }
        Ok(Self {
            load: function!("sb_state_load"),
            free: function!("sb_state_free"),
            append: function!("sb_state_append"),
            trim: function!("sb_state_trim"),
        })
    }
}

/// A model of one stage with one request, whose cache is cut instead of masked.
pub struct TrimmedModel {
    state: NonNull<RawState>,
    functions: Functions,
    // Last: the functions point into it.
    library: Library,
}

impl std::fmt::Debug for TrimmedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrimmedModel").finish_non_exhaustive()
    }
}

impl TrimmedModel {
    /// Compiles a stage that is the whole model, with the properties of the stateful backend.
    ///
    /// # Errors
    /// [`TrimError`].
    pub fn load(
        _runtime: &Runtime,
        files: &StageFiles,
        options: &EngineOptions,
    ) -> Result<Self, TrimError> {
        let library = Library::open()?;
        let functions = Functions::find(library.loaded()).map_err(TrimError::Function)?;
        let list = properties::properties(options, None);
        let texts = LoadTexts::new(&files.xml, &options.device, &list)?;
        let raw = texts.properties();
        let (xml, device) = (texts.xml.as_ptr(), texts.device.as_ptr());
        let mut state = ptr::null_mut();
        // SAFETY: all pointers live for the call; `raw` has the length given.
        let code =
            unsafe { (functions.load)(xml, device, raw.as_ptr(), raw.len(), &raw mut state) };
        let during = "the stage cannot be loaded";
        library.check(during, code)?;
        let none = || NativeError::OpenVino { during, message: "nothing was returned".to_owned() };
        Ok(Self { state: NonNull::new(state).ok_or_else(none)?, functions, library })
    }

    /// Appends tokens and returns the logits of the last one.
    ///
    /// # Errors
    /// [`TrimError::Native`].
    pub fn append(&mut self, tokens: &[u32]) -> Result<&[f32], TrimError> {
        let tokens: Vec<i64> = tokens.iter().map(|&token| i64::from(token)).collect();
        let (mut logits, mut n_floats) = (ptr::null(), 0);
        let state = self.state.as_ptr();
        // SAFETY: the state is alive and `tokens` has the length given.
        let code = unsafe {
            (self.functions.append)(
                state,
                tokens.as_ptr(),
                tokens.len(),
                &raw mut logits,
                &raw mut n_floats,
            )
        };
        self.library.check("inference failed", code)?;
        if logits.is_null() {
            return Ok(&[]);
        }
        // SAFETY: that many floats, which live until the next call, which needs `&mut self`.
        Ok(unsafe { slice::from_raw_parts(logits, n_floats) })
    }

    /// Cuts the cache to its first `len` tokens.
    ///
    /// # Errors
    /// [`TrimError::Native`], also if there are fewer.
    pub fn trim(&mut self, len: usize) -> Result<(), TrimError> {
        // SAFETY: the state is alive.
        let code = unsafe { (self.functions.trim)(self.state.as_ptr(), len) };
        Ok(self.library.check("the state cannot be cut", code)?)
    }
}

impl Drop for TrimmedModel {
    fn drop(&mut self) {
        // SAFETY: the state came from `sb_state_load` and is freed once.
        unsafe { (self.functions.free)(self.state.as_ptr()) };
    }
}
