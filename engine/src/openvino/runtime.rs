//! Loading the library, its version and its devices.

#![expect(unsafe_code, reason = "calls the C API")]

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};

use openvino_sys::{
    ov_available_devices_free, ov_available_devices_t, ov_core_create, ov_core_free,
    ov_core_get_available_devices, ov_core_get_property, ov_core_set_properties, ov_core_t,
    ov_free, ov_property_t,
};

use super::{InferenceError, c_text, check};

/// The oldest OpenVINO whose C API has everything called here: properties as arrays.
pub const MIN_VERSION: Version = Version { year: 2026, minor: 4 };

/// The library that this process has loaded. It stays loaded: plugins keep threads and static
/// data in it.
static LOADED: Mutex<Option<PathBuf>> = Mutex::new(None);

/// A release of OpenVINO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Year of the release.
    pub year: u32,
    /// Release within the year.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.year, self.minor)
    }
}

/// Why OpenVINO cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// No library was named.
    #[error(
        "this engine needs OpenVINO: run `cargo xtask setup`, or set STAGEBUS_OPENVINO to its C \
         library"
    )]
    NotGiven,
    /// The file is not there.
    #[error(
        "no OpenVINO C library at {}: run `cargo xtask setup`, or set STAGEBUS_OPENVINO to its \
         file (libopenvino_c.so, libopenvino_c.dylib or openvino_c.dll)", path.display()
    )]
    NotFound {
        /// Where it should be.
        path: PathBuf,
    },
    /// The system's loader refused the library, or it is older than the bindings.
    #[error("cannot open the OpenVINO C library {}: {reason}", path.display())]
    Open {
        /// The library.
        path: PathBuf,
        /// What loader or bindings say.
        reason: String,
    },
    /// A process can hold one OpenVINO only.
    #[error("this process has loaded OpenVINO from {}, not from {}", loaded.display(), path.display())]
    OtherLoaded {
        /// Library asked for.
        path: PathBuf,
        /// Library in use.
        loaded: PathBuf,
    },
    /// Too old, or no version at all.
    #[error("OpenVINO {found} is not supported, at least {MIN_VERSION} is needed")]
    Version {
        /// What the library says.
        found: String,
    },
    /// The library was loaded but does not start.
    #[error("OpenVINO does not start")]
    Start(#[source] InferenceError),
}

/// A loaded OpenVINO. Clones share it.
#[derive(Debug, Clone)]
pub struct Runtime {
    core: Arc<Core>,
    library: PathBuf,
    build: String,
}

impl Runtime {
    /// Opens the OpenVINO C library at `library` and starts it.
    ///
    /// The file's neighbours hold the rest of the runtime. A bare file name is looked up by the
    /// system's loader. Releases newer than the tested 2026.4 are accepted.
    ///
    /// # Errors
    /// [`RuntimeError`]; its message says what to do.
    pub fn load(library: &Path) -> Result<Self, RuntimeError> {
        load_library(library)?;
        let build = ::openvino::version().build_number;
        if parse_version(&build).is_none_or(|version| version < MIN_VERSION) {
            return Err(RuntimeError::Version { found: build });
        }
        let core = Arc::new(Core::new().map_err(RuntimeError::Start)?);
        Ok(Self { core, library: library.to_owned(), build })
    }

    /// The version as OpenVINO spells it, for example `2026.4.1-22982-c97fe0e5a1f`.
    #[must_use]
    pub fn build(&self) -> &str {
        &self.build
    }

    /// The library in use.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// Devices that OpenVINO finds on this machine, for example `CPU` and `GPU.0`.
    ///
    /// # Errors
    /// [`RuntimeError::Start`] if OpenVINO cannot tell.
    pub fn devices(&self) -> Result<Vec<String>, RuntimeError> {
        self.core.devices().map_err(RuntimeError::Start)
    }

    /// Asks `device` to take a property, on a core of its own that is dropped again.
    pub(crate) fn try_property(
        &self,
        device: &str,
        key: &str,
        value: &str,
    ) -> Result<(), InferenceError> {
        let core = Core::new()?;
        core.set_property(device, key, value)?;
        // A device is loaded, and its properties are looked at, when something is asked of it.
        core.property(device, "SUPPORTED_PROPERTIES").map(drop)
    }

    pub(super) fn core(&self) -> *const ov_core_t {
        self.core.0.as_ptr()
    }
}

fn load_library(library: &Path) -> Result<(), RuntimeError> {
    let path = || library.to_owned();
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(loaded) = loaded.as_ref() {
        if loaded == library {
            return Ok(());
        }
        return Err(RuntimeError::OtherLoaded { path: path(), loaded: loaded.clone() });
    }
    let bare_name = library.parent().is_some_and(|parent| parent.as_os_str().is_empty());
    if !bare_name && !library.is_file() {
        return Err(RuntimeError::NotFound { path: path() });
    }
    openvino_sys::library::load_from(library)
        .map_err(|reason| RuntimeError::Open { path: path(), reason })?;
    *loaded = Some(path());
    Ok(())
}

/// Reads `2026.4.1-...`.
fn parse_version(build: &str) -> Option<Version> {
    let mut parts = build.split(['.', '-']);
    let year = parts.next()?.parse().ok()?;
    let minor = parts.next()?.parse().ok()?;
    Some(Version { year, minor })
}

/// An `ov_core_t`.
#[derive(Debug)]
struct Core(NonNull<ov_core_t>);

// SAFETY: ov::Core is documented as thread-safe, and the handle has no thread affinity.
unsafe impl Send for Core {}
// SAFETY: as above; every call takes the handle as const.
unsafe impl Sync for Core {}

impl Core {
    fn new() -> Result<Self, InferenceError> {
        let mut core = ptr::null_mut();
        // SAFETY: the library is loaded; `core` is a valid place for the result.
        check(unsafe { ov_core_create(&raw mut core) })?;
        not_null(core).map(Self)
    }

    fn devices(&self) -> Result<Vec<String>, InferenceError> {
        let mut list = ov_available_devices_t { devices: ptr::null_mut(), size: 0 };
        // SAFETY: the core is alive; `list` is a valid place for the result.
        check(unsafe { ov_core_get_available_devices(self.0.as_ptr(), &raw mut list) })?;
        let mut devices = Vec::with_capacity(list.size);
        for i in 0..list.size {
            // SAFETY: OpenVINO gives `size` pointers at `devices`.
            let place = unsafe { list.devices.add(i) };
            // SAFETY: as above; `i` is below `size`.
            let name = unsafe { *place };
            // SAFETY: each one is a NUL-terminated string until the list is freed below.
            let name = unsafe { CStr::from_ptr(name) };
            devices.push(name.to_string_lossy().into_owned());
        }
        // SAFETY: the list came from OpenVINO and is not used again.
        unsafe { ov_available_devices_free(&raw mut list) };
        Ok(devices)
    }

    fn set_property(&self, device: &str, key: &str, value: &str) -> Result<(), InferenceError> {
        let (device, key, value) = (c_text(device)?, c_text(key)?, c_text(value)?);
        let property = ov_property_t { key: key.as_ptr(), value: value.as_ptr().cast() };
        let (core, device) = (self.0.as_ptr(), device.as_ptr());
        // SAFETY: all strings are NUL-terminated and live until the call returns, and the one
        // array entry is alive as well. The keys used here take string values.
        check(unsafe { ov_core_set_properties(core, device, 1, &raw const property) })
    }

    fn property(&self, device: &str, key: &str) -> Result<String, InferenceError> {
        let (device, key, mut value) = (c_text(device)?, c_text(key)?, ptr::null_mut());
        let (core, device, key) = (self.0.as_ptr(), device.as_ptr(), key.as_ptr());
        // SAFETY: both strings are NUL-terminated and alive; `value` is a valid place.
        check(unsafe { ov_core_get_property(core, device, key, &raw mut value) })?;
        Ok(Text(not_null(value)?).read())
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: the handle came from ov_core_create and is freed once.
        unsafe { ov_core_free(self.0.as_ptr()) };
    }
}

/// A string that OpenVINO allocated.
pub(super) struct Text(pub(super) NonNull<c_char>);

impl Text {
    pub(super) fn read(&self) -> String {
        // SAFETY: OpenVINO returns NUL-terminated strings that live until they are freed.
        unsafe { CStr::from_ptr(self.0.as_ptr()) }.to_string_lossy().into_owned()
    }
}

impl Drop for Text {
    fn drop(&mut self) {
        // SAFETY: the string came from OpenVINO and is freed once.
        unsafe { ov_free(self.0.as_ptr()) };
    }
}

/// A handle that a successful call returned.
pub(super) fn not_null<T>(handle: *mut T) -> Result<NonNull<T>, InferenceError> {
    NonNull::new(handle).ok_or_else(|| InferenceError {
        kind: ::openvino::InferenceErrorKind::Unexpected,
        message: Some("a call succeeded without a result".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered() {
        let parse = |text| parse_version(text).unwrap();
        assert_eq!(parse("2026.4.1-22982-c97fe0e5a1f"), MIN_VERSION);
        assert!(parse("2026.3.0-1") < MIN_VERSION);
        assert!(parse("2025.4.1-20426") < MIN_VERSION);
        assert!(parse("2027.0.0-1") > MIN_VERSION);
        assert_eq!(parse_version("custom"), None);
    }
}
