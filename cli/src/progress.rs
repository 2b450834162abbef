//! Progress bars on standard error: drawn on a terminal only, and never with `--quiet`.

use indicatif::{ProgressBar, ProgressStyle};
use stagebus_delivery::Progress as Delivered;
use stagebus_shards::Progress;

/// Shows how far a shard set is.
#[derive(Debug, Clone)]
pub struct ShardProgress {
    bar: ProgressBar,
}

impl ShardProgress {
    /// Makes a bar; hidden if `quiet` or if standard error is no terminal.
    #[must_use]
    pub fn new(quiet: bool) -> Self {
        Self { bar: bytes_bar(quiet) }
    }

    /// Moves the bar.
    pub fn update(&self, progress: Progress<'_>) {
        self.bar.set_length(progress.bytes_total);
        self.bar.set_position(progress.bytes_done);
        self.bar.set_message(format!("stage {} of {}", progress.stage + 1, progress.n_stages));
    }

    /// Takes the bar away.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Shows how far a push or pull is.
#[derive(Debug, Clone)]
pub struct DeliveryProgress {
    bar: ProgressBar,
}

impl DeliveryProgress {
    /// Makes a bar; hidden if `quiet` or if standard error is no terminal.
    #[must_use]
    pub fn new(quiet: bool) -> Self {
        Self { bar: bytes_bar(quiet) }
    }

    /// Moves the bar.
    pub fn update(&self, progress: &Delivered) {
        self.bar.set_length(progress.bytes_total);
        self.bar.set_position(progress.bytes_done);
        self.bar.set_message(progress.file.clone());
    }

    /// Takes the bar away.
    pub fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// A bar of bytes with a rate.
fn bytes_bar(quiet: bool) -> ProgressBar {
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(0) };
    if let Ok(style) = ProgressStyle::with_template(
        "{msg:24} [{bar:32}] {bytes:>10} of {total_bytes} {bytes_per_sec} {eta}",
    ) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Shows how many of a known number of things are done.
#[must_use]
pub fn count_bar(quiet: bool, n_total: u64, what: &'static str) -> ProgressBar {
    let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(n_total) };
    if let Ok(style) = ProgressStyle::with_template("{msg:24} [{bar:32}] {pos} of {len}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what);
    bar
}
