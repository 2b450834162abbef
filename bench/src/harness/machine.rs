//! The machine that a result was measured on, and what a process has used of it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Serialize;

/// The machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Operating system.
    pub os: &'static str,
    /// Processor architecture.
    pub arch: &'static str,
    /// The processor's own name, if the system tells it.
    pub processor: Option<String>,
    /// Cores that this process may use.
    pub n_cpus: usize,
    /// Load average of the last minute when the run began; above 0 others are busy too.
    pub load_at_start: Option<f64>,
    /// The same when the run ended.
    pub load_at_end: Option<f64>,
}

impl Machine {
    /// Looks at this machine.
    #[must_use]
    pub fn look() -> Self {
        Self {
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            processor: fs::read_to_string("/proc/cpuinfo").ok().as_deref().and_then(processor),
            n_cpus: n_cpus(),
            load_at_start: load(),
            load_at_end: None,
        }
    }

    /// Notes the load at the end of a run.
    pub fn finish(&mut self) {
        self.load_at_end = load();
    }
}

/// Cores that this process may use.
#[must_use]
pub fn n_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

/// Whether processes can be tied to processors here, with the command `taskset`.
#[must_use]
pub fn can_pin() -> bool {
    cfg!(target_os = "linux")
        && stagebus_settings::environment::program_folders()
            .iter()
            .any(|folder| folder.join("taskset").is_file())
}

/// Ties a running process, with all its threads, to cores.
///
/// # Errors
/// There is no `taskset`, or it fails.
pub async fn tie_to(pid: u32, cpus: &str) -> anyhow::Result<()> {
    let output = tokio::process::Command::new("taskset")
        .args(["-a", "-c", "-p", cpus, &pid.to_string()])
        .output()
        .await
        .context("cannot start taskset")?;
    anyhow::ensure!(
        output.status.success(),
        "cannot tie process {pid} to {cpus}: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

/// The program that a scenario starts as a child: the one named by `STAGEBUS_BIN`, else this one.
///
/// # Errors
/// The running program cannot be found.
pub fn this_program() -> std::io::Result<PathBuf> {
    match stagebus_settings::environment::stagebus_bin() {
        Some(program) => Ok(program),
        None => std::env::current_exe(),
    }
}

/// Processor time that all threads of a process have used so far, in milliseconds (Linux only).
#[must_use]
pub fn cpu_ms(pid: u32) -> Option<f64> {
    let tasks = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task")).ok()?;
    let nanoseconds = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    let sum: u64 = nanoseconds.sum();
    (sum > 0).then_some(sum as f64 / 1e6)
}

fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn load() -> Option<f64> {
    fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processors_name_is_read() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n";
        assert_eq!(processor(text).as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(processor("processor: 0\n"), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn processor_time_grows_with_work() {
        let before = cpu_ms(std::process::id()).expect("this process runs");
        let mut x = 1_u64;
        while cpu_ms(std::process::id()).expect("this process runs") < before + 1.0 {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
        assert_eq!(cpu_ms(0), None);
    }
}
