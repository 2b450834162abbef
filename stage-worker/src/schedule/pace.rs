//! What the policy learns from the past: how long micro-batches take, and when sessions come back.

use std::time::Duration;

/// Weight of a new measurement in the smoothed times.
const SMOOTHING: f64 = 0.2;

/// A session that is away for longer than this many usual absences does not decode: its client is
/// slow, or it is gone.
const USUAL: u32 = 4;

/// An absence, in seconds, before one was seen.
const FIRST_AWAY: f64 = 0.25;

/// Share of a micro-batch's time by which a session may come late and still be waited for.
const LATE: f64 = 0.125;

/// Prefill rows beside decodes before anything is known of their time.
const FIRST_PREFILL_ROWS: usize = 16;

/// Sizes of micro-batches whose times are told apart: 1, 2, 3-4, 5-8 and so on.
const N_SIZES: usize = 10;

/// Where a session is in its decode loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// It does not decode.
    Resting,
    /// A decode step of it waits or runs here.
    Here,
    /// Its last decode step left here at this time.
    Away { left: Duration },
}

impl Pace {
    /// Notes the arrival of a decode step and returns how long the session was away.
    pub(super) fn came_back(&mut self, now: Duration) -> Option<Duration> {
        match std::mem::replace(self, Self::Here) {
            Self::Away { left } => Some(now.saturating_sub(left)),
            Self::Resting | Self::Here => None,
        }
    }
}

/// Smoothed times, in seconds.
#[derive(Debug, Default)]
pub(super) struct BatchTimes {
    decodes: [Option<f64>; N_SIZES],
    prefill_row: Option<f64>,
    away: Option<f64>,
    /// Follows the shortest absences.
    least_away: Option<f64>,
}

impl BatchTimes {
    /// Takes in the time of a micro-batch.
    pub(super) fn ran(&mut self, time: Duration, decode_rows: usize, prefill_rows: usize) {
        let time = time.as_secs_f64();
        if prefill_rows == 0 {
            smooth(&mut self.decodes[size_of(decode_rows)], time);
            return;
        }
        // What prefill added; a tenth of all at least, as the time without it is an estimate.
        let base = self.decodes_secs(decode_rows).unwrap_or(0.0);
        let added = (time - base).max(time / 10.0);
        smooth(&mut self.prefill_row, added / prefill_rows as f64);
    }

    /// Takes in how long a session was away; a pause of its client counts as a long absence.
    pub(super) fn came_back(&mut self, away: Duration) {
        let away = away.as_secs_f64();
        let most = self.away.map_or(away, |usual| usual * f64::from(USUAL));
        smooth(&mut self.away, away.min(most));
        let least = self.least_away.get_or_insert(away);
        *least = if away < *least { (*least + away) / 2.0 } else { *least * 1.01 };
    }

    /// Usual time of a micro-batch with this many decode rows.
    pub(super) fn decodes_take(&self, decode_rows: usize) -> Option<Duration> {
        self.decodes_secs(decode_rows).map(Duration::from_secs_f64)
    }

    /// Prefill rows that lengthen a micro-batch of decodes by `percent` of its time.
    pub(super) fn prefill_rows(&self, decode_rows: usize, percent: u32) -> usize {
        let (Some(base), Some(row)) = (self.decodes_secs(decode_rows.max(1)), self.prefill_row)
        else {
            return FIRST_PREFILL_ROWS;
        };
        whole(base * f64::from(percent) / 100.0 / row.max(1e-9))
    }

    /// Prefill rows that have run by `due`, or a little later, if they start now on their own.
    pub(super) fn prefill_rows_until(&self, due: Duration, now: Duration) -> usize {
        let (Some(base), Some(row)) = (self.decodes_secs(1), self.prefill_row) else {
            return FIRST_PREFILL_ROWS;
        };
        let early = self.away.unwrap_or(0.0) - self.least_away.unwrap_or(0.0);
        let time = due.saturating_sub(now).as_secs_f64() - early.max(0.0) - base * (1.0 - LATE);
        whole(time.max(0.0) / row.max(1e-9))
    }

    /// Whether a session at this pace takes part in the decoding.
    pub(super) fn decodes(&self, pace: Pace, now: Duration) -> bool {
        match pace {
            Pace::Resting => false,
            Pace::Here => true,
            Pace::Away { left } => {
                let usual = self.away.unwrap_or(FIRST_AWAY) * f64::from(USUAL);
                now.saturating_sub(left).as_secs_f64() <= usual
            }
        }
    }

    /// When the next session comes back, those left out that are overdue by more than `late`.
    pub(super) fn next_due(
        &self,
        paces: impl Iterator<Item = Pace>,
        now: Duration,
        late: Duration,
    ) -> Option<Duration> {
        let away = Duration::from_secs_f64(self.away?);
        paces
            .filter_map(|pace| match pace {
                Pace::Away { left } => Some(left + away),
                Pace::Resting | Pace::Here => None,
            })
            .filter(|due| *due + late > now)
            .min()
    }

    /// How late a session may come and still be waited for.
    pub(super) fn late(batch_time: Duration) -> Duration {
        batch_time.mul_f64(LATE)
    }

    /// The time of the size asked for, else of the nearest that was measured.
    fn decodes_secs(&self, decode_rows: usize) -> Option<f64> {
        let size = size_of(decode_rows);
        let measured = self.decodes.iter().enumerate();
        measured
            .filter_map(|(idx, time)| time.map(|time| (idx.abs_diff(size), time)))
            .min_by_key(|(distance, _)| *distance)
            .map(|(_, time)| time)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a non-negative number of rows; too many saturate"
)]
fn whole(n_rows: f64) -> usize {
    n_rows as usize
}

fn size_of(n_rows: usize) -> usize {
    (n_rows.max(1).next_power_of_two().trailing_zeros() as usize).min(N_SIZES - 1)
}

fn smooth(smoothed: &mut Option<f64>, measured: f64) {
    *smoothed = Some(smoothed.map_or(measured, |old| old + (measured - old) * SMOOTHING));
}
