//! This machine: runtime, device, folders, disk, key.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use stagebus_engine::Runtime;
use stagebus_settings::{OpenVinoLibrary, find_nats_server, find_openvino};

use super::finding::{Check, Fault, Findings};
use crate::exit::render;

/// Free bytes below which a disk counts as nearly full: a small model, its shards and a log.
const LOW_DISK_BYTES: u64 = 1 << 30;

/// What OpenVINO puts before the names of several devices.
const COMPOUNDS: [&str; 3] = ["HETERO:", "MULTI:", "AUTO:"];

/// Looks for OpenVINO and the device.
pub fn runtime(device: &str, findings: &mut Findings) {
    let library = match find_openvino() {
        Ok(library) => library,
        Err(error) => return no_runtime(Fault::OpenvinoMissing, &error.into(), findings),
    };
    let runtime = match Runtime::load(library.path()) {
        Ok(runtime) => runtime,
        Err(error) => {
            return match library.not_found() {
                Some(missing) => no_runtime(Fault::OpenvinoMissing, &missing.into(), findings),
                None => no_runtime(Fault::OpenvinoUnusable, &error.into(), findings),
            };
        }
    };
    findings.ok(Check::Openvino, format!("{} at {}", runtime.build(), place(&library)));
    match runtime.devices() {
        Ok(devices) => judge_device(device, &devices, findings),
        Err(error) => findings.fault(Fault::OpenvinoUnusable, line(&error.into())),
    }
}

fn no_runtime(fault: Fault, error: &anyhow::Error, findings: &mut Findings) {
    findings.fault(fault, line(error));
    findings.skip(Check::Device, "OpenVINO tells which devices there are");
}

fn place(library: &OpenVinoLibrary) -> String {
    library.path().display().to_string()
}

/// Whether OpenVINO lists a device, or every device that a compound one is made of.
fn judge_device(device: &str, devices: &[String], findings: &mut Findings) {
    let listed = devices.join(", ");
    let compound = COMPOUNDS.iter().find_map(|prefix| device.strip_prefix(prefix));
    let parts = compound.unwrap_or(if device == "AUTO" { "" } else { device });
    // GPU means the first of GPU.0, GPU.1, and so on; a part may carry a priority, as in GPU(2).
    let is_there = |part: &str| {
        let part = part.split('(').next().unwrap_or(part);
        devices.iter().any(|found| {
            found == part || found.strip_prefix(part).is_some_and(|rest| rest.starts_with('.'))
        })
    };
    let mut missing = parts.split(',').map(str::trim).filter(|part| !part.is_empty());
    match missing.find(|part| !is_there(part)) {
        Some(part) => {
            findings.fault(Fault::DeviceMissing, format!("{part} is not among {listed}"));
        }
        None => findings.ok(Check::Device, format!("{device}; there are {listed}")),
    }
}

/// Looks for the broker's program.
pub fn nats_server(findings: &mut Findings) {
    match find_nats_server() {
        Ok(path) => findings.ok(Check::NatsServer, path.display().to_string()),
        Err(error) => findings.fault(Fault::NatsServerMissing, line(&error.into())),
    }
}

/// Looks whether the folder for shard sets can be written, and at the room on its disk.
pub fn cache(folder: &Path, findings: &mut Findings) {
    let there = existing(folder);
    match try_write(&there) {
        Ok(()) => findings.ok(Check::Cache, folder.display().to_string()),
        Err(error) => {
            findings.fault(Fault::CacheNotWritable, format!("{}: {error}", folder.display()));
        }
    }
    match fs4::available_space(&there) {
        Ok(free) => judge_space(free, &there, findings),
        Err(error) => findings.skip(Check::Disk, format!("{}: {error}", there.display())),
    }
}

fn judge_space(free: u64, folder: &Path, findings: &mut Findings) {
    let found = format!("{} MiB are free at {}", free >> 20, folder.display());
    if free < LOW_DISK_BYTES {
        findings.fault(Fault::DiskLow, found);
    } else {
        findings.ok(Check::Disk, found);
    }
}

/// The folder, or the nearest one above it that is there.
fn existing(folder: &Path) -> PathBuf {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    let there = folder.ancestors().find(|path| path.symlink_metadata().is_ok());
    there.unwrap_or(&folder).to_owned()
}

/// Makes a file of a name that nobody else uses, and removes it.
fn try_write(folder: &Path) -> io::Result<()> {
    let probe = folder.join(format!(".stagebus-doctor-{}", std::process::id()));
    drop(fs::File::create_new(&probe)?);
    fs::remove_file(&probe)
}

/// Looks whether others can read the file with the key.
pub fn key_file(path: Option<&Path>, findings: &mut Findings) {
    let Some(path) = path else {
        return findings.skip(Check::KeyFile, "none is configured");
    };
    match fs::metadata(path) {
        Ok(data) if others_read(&data) => {
            findings.fault(Fault::KeyReadable, path.display().to_string());
        }
        Ok(_) => findings.ok(Check::KeyFile, path.display().to_string()),
        Err(error) => findings.fault(Fault::KeyUnusable, format!("{}: {error}", path.display())),
    }
}

#[cfg(unix)]
fn others_read(data: &fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    data.permissions().mode() & 0o077 != 0
}

/// Access lists are not read: folders of users are closed to others by default.
#[cfg(not(unix))]
fn others_read(_data: &fs::Metadata) -> bool {
    false
}

/// An error and its causes in one line.
pub(super) fn line(error: &anyhow::Error) -> String {
    let text = render(error);
    text.trim_start_matches("error: ").trim_end().replace("\n  caused by: ", ": ")
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    fn device(device: &str) -> Option<Fault> {
        let devices = ["CPU", "GPU.0", "GPU.1"].map(str::to_owned);
        let mut findings = Findings::default();
        judge_device(device, &devices, &mut findings);
        let [finding] = findings.all() else { panic!("one finding: {findings:?}") };
        finding.fault
    }

    #[test]
    fn a_device_is_there_if_all_its_parts_are() {
        for there in ["CPU", "GPU", "GPU.1", "AUTO", "AUTO:GPU,CPU", "HETERO:GPU.0,CPU"] {
            assert_eq!(device(there), None, "{there}");
        }
        for missing in ["NPU", "GPU.2", "XPU", "HETERO:NPU,CPU", "MULTI:CPU(2),NPU(1)"] {
            assert_eq!(device(missing), Some(Fault::DeviceMissing), "{missing}");
        }
    }

    #[test]
    fn little_room_is_a_warning() {
        let mut findings = Findings::default();
        judge_space(LOW_DISK_BYTES, Path::new("a"), &mut findings);
        assert_eq!(findings.worst(), Level::Ok);
        judge_space(LOW_DISK_BYTES - 1, Path::new("a"), &mut findings);
        assert_eq!(findings.worst(), Level::Warn);
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_made_where_one_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut findings = Findings::default();
        cache(&folder.path().join("a").join("b"), &mut findings);
        assert_eq!(findings.all()[0].level, Level::Ok, "{findings}");
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "nothing is left");
        let file = folder.path().join("file");
        fs::write(&file, "").expect("a file");
        cache(&file.join("b"), &mut findings);
        assert!(findings.all().iter().any(|f| f.fault == Some(Fault::CacheNotWritable)));
    }
}
