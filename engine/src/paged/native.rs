//! The C ABI library of `native/paged.cpp`: loading it and calling it.
//!
//! The library is built beside this crate, carried inside it and opened after the OpenVINO runtime
//! that it needs, so that a binary starts and explains itself without OpenVINO.
#![expect(unsafe_code, reason = "the only way to call the C++-only parts of OpenVINO")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::io::Write as _;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::slice;

/// The library, empty if it could not be built.
const LIBRARY: &[u8] = include_bytes!(env!("STAGEBUS_PAGED_LIBRARY"));

/// Why there is no library, empty if there is one.
const BUILD_FAILURE: &str = env!("STAGEBUS_PAGED_FAILURE");

/// Why the paged part of the runtime cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// The library was not built with this binary.
    #[error("this build has no paged attention library: {reason}")]
    NotBuilt {
        /// What the build said.
        reason: &'static str,
    },
    /// The library could not be written to a temporary file.
    #[error("the paged attention library cannot be unpacked")]
    Unpack(#[source] std::io::Error),
    /// The library could not be opened.
    #[error("the paged attention library cannot be opened: is the OpenVINO runtime {expected}?")]
    Open {
        /// Version of OpenVINO that the library was built for.
        expected: &'static str,
        /// What the loader said.
        #[source]
        source: libloading::Error,
    },
    /// The runtime is of another version than the headers of the library.
    #[error("the paged attention library was built for OpenVINO {built}, the runtime is {loaded}")]
    Version {
        /// Version of the headers.
        built: String,
        /// Version of the runtime.
        loaded: String,
    },
    /// OpenVINO refused.
    #[error("{during}: {message}")]
    OpenVino {
        /// What was tried.
        during: &'static str,
        /// OpenVINO's own words.
        message: String,
    },
    /// A text holds a NUL character.
    #[error("{what} holds a NUL character")]
    Nul {
        /// Which text.
        what: &'static str,
    },
}

#[repr(C)]
struct RawModel {
    _private: [u8; 0],
}

/// One key and value of OpenVINO configuration.
#[repr(C)]
pub(crate) struct RawProperty {
    key: *const c_char,
    value: *const c_char,
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct RawCache {
    key_block_bytes: usize,
    value_block_bytes: usize,
    key_type: [u8; 16],
    value_type: [u8; 16],
    block_tokens: usize,
    by_token: i32,
}

#[repr(C)]
struct RawBatch {
    n_rows: usize,
    n_sequences: usize,
    n_block_indices: usize,
    token_ids: *const i64,
    hidden: *const f32,
    hidden_dim: usize,
    positions: *const i64,
    past_lens: *const i32,
    sequence_begins: *const i32,
    block_indices: *const i32,
    block_begins: *const i32,
    max_context_len: i32,
    logit_rows: *const i64,
    n_logit_rows: usize,
}

type TextFn = unsafe extern "C" fn() -> *const c_char;

type LoadFn = unsafe extern "C" fn(
    *const c_char,
    *const c_char,
    *const RawProperty,
    usize,
    *mut *mut RawModel,
) -> c_int;

struct Functions {
    last_error: TextFn,
    build_version: TextFn,
    runtime_version: TextFn,
    load: LoadFn,
    free: unsafe extern "C" fn(*mut RawModel),
    layers: unsafe extern "C" fn(*const RawModel, *mut usize) -> c_int,
    threads: unsafe extern "C" fn(*const RawModel, *mut usize) -> c_int,
    cache: unsafe extern "C" fn(*const RawModel, usize, *mut RawCache) -> c_int,
    allocate: unsafe extern "C" fn(*mut RawModel, usize) -> c_int,
    copy_block: unsafe extern "C" fn(*mut RawModel, usize, usize) -> c_int,
    run: unsafe extern "C" fn(*mut RawModel, *const RawBatch, *mut *const f32, *mut usize) -> c_int,
}

/// The opened library.
pub(crate) struct Library {
    functions: Functions,
    // Unloaded after the functions that point into it, before the file that it was opened from.
    library: libloading::Library,
    _file: tempfile::TempPath,
}

/// Layout of one layer's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CacheLayout {
    pub(super) block_bytes: usize,
    pub(super) block_tokens: usize,
    pub(super) dtype: String,
    /// Rewinding by length leaves no trace: each token's key is stored on its own.
    pub(super) by_token: bool,
}

/// One micro-batch as the graph takes it.
///
/// Sequence `s` has the rows `sequence_begins[s]..sequence_begins[s + 1]` after `past_lens[s]`
/// cached positions in the blocks `block_indices[block_begins[s]..block_begins[s + 1]]`.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) token_ids: Vec<i64>,
    /// `[n_rows, hidden_dim]`; empty on the first stage.
    pub(super) hidden: Vec<f32>,
    pub(super) positions: Vec<i64>,
    pub(super) past_lens: Vec<i32>,
    pub(super) sequence_begins: Vec<i32>,
    pub(super) block_indices: Vec<i32>,
    pub(super) block_begins: Vec<i32>,
    pub(super) max_context_len: i32,
    pub(super) logit_rows: Vec<i64>,
}

impl Batch {
    /// Number of sequences.
    pub(super) fn n_sequences(&self) -> usize {
        self.past_lens.len()
    }

    /// Empties the batch and keeps its memory.
    pub(super) fn clear(&mut self) {
        self.token_ids.clear();
        self.hidden.clear();
        self.positions.clear();
        self.past_lens.clear();
        self.sequence_begins.clear();
        self.sequence_begins.push(0);
        self.block_indices.clear();
        self.block_begins.clear();
        self.block_begins.push(0);
        self.max_context_len = 0;
        self.logit_rows.clear();
    }
}

impl Library {
    /// Unpacks and opens the library; the OpenVINO runtime must be loaded already.
    pub(crate) fn open() -> Result<Self, NativeError> {
        if LIBRARY.is_empty() {
            return Err(NativeError::NotBuilt { reason: BUILD_FAILURE });
        }
        let mut file = tempfile::Builder::new()
            .prefix("stagebus-paged-")
            .suffix(std::env::consts::DLL_SUFFIX)
            .tempfile()
            .map_err(NativeError::Unpack)?;
        file.write_all(LIBRARY).map_err(NativeError::Unpack)?;
        // Closed before it is opened as a library: Windows does not load a file that is open.
        let file = file.into_temp_path();
        let opening =
            |source| NativeError::Open { expected: env!("STAGEBUS_PAGED_VERSION"), source };
        // SAFETY: the library is our own; its initialisers only register C++ statics.
        let library = unsafe { libloading::Library::new(&file) }.map_err(opening)?;
        let functions = Functions::find(&library).map_err(opening)?;
        let library = Self { functions, library, _file: file };
        library.check_version()?;
        Ok(library)
    }

    /// C++ inlines and class layouts hold within one release only.
    fn check_version(&self) -> Result<(), NativeError> {
        let built = self.text(self.functions.build_version);
        let loaded = self.text(self.functions.runtime_version);
        if loaded
            .strip_prefix(&built)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_digit()))
        {
            return Ok(());
        }
        Err(NativeError::Version { built, loaded })
    }

    /// The library as the loader knows it, for functions beside the paged ones.
    pub(crate) fn loaded(&self) -> &libloading::Library {
        &self.library
    }

    /// Turns a function's code into an error with the library's text.
    pub(crate) fn check(&self, during: &'static str, code: c_int) -> Result<(), NativeError> {
        if code == 0 {
            return Ok(());
        }
        Err(NativeError::OpenVino { during, message: self.text(self.functions.last_error) })
    }

    /// Copies a text of the library.
    fn text(&self, of: TextFn) -> String {
        // SAFETY: the function takes nothing; its text is static, or belongs to this thread and
        // lives until the next call.
        let pointer = unsafe { of() };
        if pointer.is_null() {
            return String::new();
        }
        // SAFETY: not null, and NUL-terminated as the header says.
        unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
    }
}

impl Functions {
    fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: the type stands in `native/paged.hpp` beside the name.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }?
            }};
        }
        Ok(Self {
            last_error: function!("sb_last_error"),
            build_version: function!("sb_build_version"),
            runtime_version: function!("sb_runtime_version"),
            load: function!("sb_model_load"),
            free: function!("sb_model_free"),
            layers: function!("sb_model_layers"),
            threads: function!("sb_model_threads"),
            cache: function!("sb_model_cache"),
            allocate: function!("sb_model_allocate"),
            copy_block: function!("sb_model_copy_block"),
            run: function!("sb_model_run"),
        })
    }
}

/// The texts of a load in C's form.
pub(crate) struct LoadTexts {
    pub(crate) xml: CString,
    pub(crate) device: CString,
    properties: Vec<(CString, CString)>,
}

impl LoadTexts {
    pub(crate) fn new(
        xml: &Path,
        device: &str,
        properties: &[(String, String)],
    ) -> Result<Self, NativeError> {
        let c_text =
            |what, text: &str| CString::new(text).map_err(|_nul| NativeError::Nul { what });
        let pair = |(key, value): &(String, String)| {
            Ok((c_text("property", key)?, c_text("property value", value)?))
        };
        Ok(Self {
            xml: c_text("path of the stage graph", &xml.to_string_lossy())?,
            device: c_text("device", device)?,
            properties: properties.iter().map(pair).collect::<Result<_, NativeError>>()?,
        })
    }

    /// Pointers into the texts, which must outlive their use.
    pub(crate) fn properties(&self) -> Vec<RawProperty> {
        self.properties
            .iter()
            .map(|(key, value)| RawProperty { key: key.as_ptr(), value: value.as_ptr() })
            .collect()
    }
}

/// A stage graph in its paged form with its one request and its caches.
pub(super) struct NativeModel {
    library: Library,
    model: NonNull<RawModel>,
    output: Option<(NonNull<f32>, usize)>,
}

// SAFETY: OpenVINO's objects may move between threads; `&mut self` keeps calls apart.
unsafe impl Send for NativeModel {}

impl NativeModel {
    /// Reads, rewrites and compiles a stage graph.
    pub(super) fn load(
        library: Library,
        xml: &Path,
        device: &str,
        properties: &[(String, String)],
    ) -> Result<Self, NativeError> {
        let texts = LoadTexts::new(xml, device, properties)?;
        let raw = texts.properties();
        let (xml, device) = (texts.xml.as_ptr(), texts.device.as_ptr());
        let mut model = ptr::null_mut();
        // SAFETY: all pointers live for the call; `raw` has the length given.
        let code = unsafe {
            (library.functions.load)(xml, device, raw.as_ptr(), raw.len(), &raw mut model)
        };
        library.check("stage graph cannot be loaded for paged attention", code)?;
        let model = NonNull::new(model).ok_or_else(|| NativeError::OpenVino {
            during: "stage graph cannot be loaded for paged attention",
            message: "no model was returned".to_owned(),
        })?;
        Ok(Self { library, model, output: None })
    }

    /// Layout of every layer's cache.
    pub(super) fn layouts(&self) -> Result<Vec<CacheLayout>, NativeError> {
        let mut n_layers = 0;
        // SAFETY: the model is alive and the place is ours.
        let code =
            unsafe { (self.library.functions.layers)(self.model.as_ptr(), &raw mut n_layers) };
        self.library.check("caches cannot be counted", code)?;
        (0..n_layers)
            .map(|layer| {
                let mut raw = RawCache::default();
                let model = self.model.as_ptr();
                // SAFETY: the model is alive and the place is ours.
                let code = unsafe { (self.library.functions.cache)(model, layer, &raw mut raw) };
                self.library.check("cache layout cannot be read", code)?;
                let end = raw.key_type.iter().position(|b| *b == 0).unwrap_or(raw.key_type.len());
                Ok(CacheLayout {
                    block_bytes: raw.key_block_bytes + raw.value_block_bytes,
                    block_tokens: raw.block_tokens,
                    dtype: String::from_utf8_lossy(&raw.key_type[..end]).into_owned(),
                    by_token: raw.by_token != 0,
                })
            })
            .collect()
    }

    /// Threads that one inference runs on.
    pub(super) fn n_threads(&self) -> Result<usize, NativeError> {
        let mut n_threads = 0;
        // SAFETY: the model is alive and the place is ours.
        let code =
            unsafe { (self.library.functions.threads)(self.model.as_ptr(), &raw mut n_threads) };
        self.library.check("threads cannot be counted", code)?;
        Ok(n_threads)
    }

    /// Allocates the caches.
    pub(super) fn allocate(&mut self, n_blocks: usize) -> Result<(), NativeError> {
        // SAFETY: the model is alive.
        let code = unsafe { (self.library.functions.allocate)(self.model.as_ptr(), n_blocks) };
        self.library.check("KV blocks cannot be allocated", code)
    }

    /// Copies a block of every layer.
    pub(super) fn copy_block(&mut self, from: usize, to: usize) -> Result<(), NativeError> {
        // SAFETY: the model is alive; the library checks both numbers.
        let code = unsafe { (self.library.functions.copy_block)(self.model.as_ptr(), from, to) };
        self.library.check("KV block cannot be copied", code)
    }

    /// Runs a micro-batch; [`Self::output`] then gives its output.
    pub(super) fn run(&mut self, batch: &Batch, hidden_dim: usize) -> Result<(), NativeError> {
        let or_null = |slice: &[i64]| if slice.is_empty() { ptr::null() } else { slice.as_ptr() };
        let first_stage = batch.hidden.is_empty();
        let raw = RawBatch {
            n_rows: batch.positions.len(),
            n_sequences: batch.past_lens.len(),
            n_block_indices: batch.block_indices.len(),
            token_ids: if first_stage { batch.token_ids.as_ptr() } else { ptr::null() },
            hidden: if first_stage { ptr::null() } else { batch.hidden.as_ptr() },
            hidden_dim,
            positions: batch.positions.as_ptr(),
            past_lens: batch.past_lens.as_ptr(),
            sequence_begins: batch.sequence_begins.as_ptr(),
            block_indices: batch.block_indices.as_ptr(),
            block_begins: batch.block_begins.as_ptr(),
            max_context_len: batch.max_context_len,
            logit_rows: or_null(&batch.logit_rows),
            n_logit_rows: batch.logit_rows.len(),
        };
        let (mut output, mut n_floats) = (ptr::null(), 0);
        let model = self.model.as_ptr();
        // SAFETY: the model is alive, every array has the length that the batch's own vectors
        // give, and all live for the call.
        let code = unsafe {
            (self.library.functions.run)(model, &raw const raw, &raw mut output, &raw mut n_floats)
        };
        self.output = None;
        self.library.check("inference failed", code)?;
        self.output = NonNull::new(output.cast_mut()).map(|output| (output, n_floats));
        Ok(())
    }

    /// Output of the last micro-batch that ran, empty if it failed.
    pub(super) fn output(&self) -> &[f32] {
        let Some((output, n_floats)) = self.output else { return &[] };
        // SAFETY: the output holds that many floats and lives until the next run, which needs
        // `&mut self`.
        unsafe { slice::from_raw_parts(output.as_ptr(), n_floats) }
    }
}

impl Drop for NativeModel {
    fn drop(&mut self) {
        // SAFETY: the model came from `sb_model_load` and is freed once.
        unsafe { (self.library.functions.free)(self.model.as_ptr()) };
    }
}
