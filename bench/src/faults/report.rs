//! What the scenario prints.

use serde::Serialize;

use super::disconnects::Disconnects;
use super::kills::{Kills, Strike, Struck};
use super::rolling::{Asked, Rolling};
use super::soak::Soak;
use super::{Context, DEATH, KILLS, LEAKS, RESUME, ROLLING, SOAK, WEDGE};
use crate::harness::claims::Claim;
use crate::harness::machine::Machine;
use crate::harness::table::{markdown, number};

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct FaultsReport {
    /// `faults`.
    pub scenario: &'static str,
    /// The machine.
    pub machine: Machine,
    /// Version of Stagebus.
    pub stagebus: &'static str,
    /// Tokens of an answer.
    pub tokens: u16,
    /// Workers that died or froze.
    pub kills: Kills,
    /// Clients that vanished.
    pub disconnects: Disconnects,
    /// Workers that were replaced.
    pub rolling: Rolling,
    /// The long run.
    pub soak: Soak,
    /// The claims.
    pub claims: Vec<Claim>,
}

impl FaultsReport {
    /// Puts the parts together and makes the claims.
    #[must_use]
    pub fn new(
        machine: Machine,
        context: &Context,
        kills: Kills,
        disconnects: Disconnects,
        rolling: Rolling,
        soak: Soak,
    ) -> Self {
        let claims = vec![
            identical(&kills),
            noticed(&kills, Strike::Kill),
            noticed(&kills, Strike::Freeze),
            resumed(&kills),
            leaks(&disconnects),
            rolling_failures(&rolling),
            soak_wrong(&soak),
        ];
        Self {
            scenario: "faults",
            machine,
            stagebus: env!("CARGO_PKG_VERSION"),
            tokens: context.args.tokens,
            kills,
            disconnects,
            rolling,
            soak,
            claims,
        }
    }

    /// The tables for people.
    #[must_use]
    pub fn describe(&self) -> String {
        let mut rows = Vec::new();
        for strike in [Strike::Kill, Strike::Freeze] {
            for stage in 0..super::fleet::N_STAGES {
                rows.extend(self.row(strike, stage));
            }
        }
        let header =
            ["fault", "stage", "n", "same", "failed", "noticed ms", "max", "next token ms", "max"];
        let kills = markdown(&header, &rows);
        let Disconnects { n, left, free_after_ms, n_neighbours, n_changed } = &self.disconnects;
        let rolling = &self.rolling;
        let soak = &self.soak;
        let faults: Vec<String> =
            soak.faults.iter().map(|(kind, n)| format!("{n} x {kind}")).collect();
        let memory = soak.memory().map_or_else(String::new, |(first, most, last)| {
            let [first, most, last] = [first, most, last].map(|bytes| bytes >> 20);
            format!("; memory {first} MiB after the first tenth, at most {most}, {last} at the end")
        });
        format!(
            "{kills}\nReading a prompt as long as the longest replay takes {:.0} ms.\n\n\
             {n} clients vanished: {left} sessions, tokens and steps left, all free after \
             {free_after_ms:.0} ms; {n_changed} of {n_neighbours} neighbours' answers changed.\n\
             {} workers replaced in {:.0} s: {} requests, {} failed, {} wrong. {:?}\n\
             {:.0} s under load with {}: {} requests, {} ended with their coordinator, \
             {} lost before anybody had accepted them, {} failed, {} wrong{memory}. {:?}\n",
            self.kills.prefill_ms,
            rolling.n_replaced,
            rolling.seconds,
            rolling.asked.n,
            rolling.asked.n_failed,
            rolling.asked.n_wrong,
            rolling.asked.failures,
            soak.seconds,
            faults.join(", "),
            soak.asked.n,
            soak.asked.n_orphans,
            soak.asked.n_unheard,
            soak.asked.n_failed,
            soak.asked.n_wrong,
            soak.asked.failures,
        )
    }

    fn row(&self, strike: Strike, stage: usize) -> Option<Vec<String>> {
        let of: Vec<&Struck> = self
            .kills
            .struck
            .iter()
            .filter(|struck| (struck.strike, struck.stage) == (strike, stage))
            .collect();
        let count = |test: fn(&Struck) -> bool| of.iter().filter(|struck| test(struck)).count();
        let times = |time: fn(&Struck) -> Option<f64>| {
            let mut times: Vec<f64> = of.iter().filter_map(|struck| time(struck)).collect();
            times.sort_by(f64::total_cmp);
            (times.get(times.len() / 2).copied(), times.last().copied())
        };
        let (noticed, latest) = times(|struck| struck.noticed_ms);
        let (resumed, slowest) = times(|struck| struck.resumed_ms);
        (!of.is_empty()).then(|| {
            let name = if strike == Strike::Kill { "killed" } else { "frozen" };
            vec![
                name.to_owned(),
                stage.to_string(),
                of.len().to_string(),
                count(|struck| struck.identical).to_string(),
                count(|struck| struck.failure.is_some()).to_string(),
                number(noticed, 0),
                number(latest, 0),
                number(resumed, 0),
                number(slowest, 0),
            ]
        })
    }
}

fn identical(kills: &Kills) -> Claim {
    let n = kills.struck.len();
    if n == 0 {
        return KILLS.missing("no worker was struck");
    }
    let same = kills.struck.iter().filter(|struck| struck.identical).count();
    KILLS.measured(same as f64 / n as f64, format!("{same} of {n} answers"))
}

fn longest(times: impl Iterator<Item = f64>) -> Option<f64> {
    times.max_by(f64::total_cmp)
}

fn noticed(kills: &Kills, strike: Strike) -> Claim {
    let target = if strike == Strike::Kill { DEATH } else { WEDGE };
    let of = |struck: &Struck| struck.noticed_ms;
    let times = kills.struck.iter().filter(|struck| struck.strike == strike).filter_map(of);
    match (longest(times), kills.times(strike, of)) {
        (Some(longest), Some(summary)) => {
            let how = format!("longest of {}, median {:.0} ms", summary.n, summary.median);
            target.measured(longest, how)
        }
        _ => target.missing("no such fault was noticed by a client"),
    }
}

fn resumed(kills: &Kills) -> Claim {
    match longest(kills.struck.iter().filter_map(|struck| struck.resumed_ms)) {
        Some(longest) => RESUME.measured(
            (longest - kills.prefill_ms).max(0.0),
            format!("longest {longest:.0} ms, prefill {:.0} ms", kills.prefill_ms),
        ),
        None => RESUME.missing("no answer went on after a fault"),
    }
}

fn leaks(disconnects: &Disconnects) -> Claim {
    if disconnects.n == 0 {
        return LEAKS.missing("no client vanished");
    }
    let leaks = disconnects.left as f64 + disconnects.n_changed as f64;
    LEAKS.measured(leaks, format!("{} clients vanished", disconnects.n))
}

fn rolling_failures(rolling: &Rolling) -> Claim {
    let Asked { n_failed, n_wrong, n_orphans, n_unheard, .. } = rolling.asked;
    let bad = n_failed + n_wrong + n_orphans + n_unheard;
    let how = format!("{} requests, {} workers replaced", rolling.asked.n, rolling.n_replaced);
    ROLLING.measured(bad as f64, how)
}

fn soak_wrong(soak: &Soak) -> Claim {
    if soak.asked.n == 0 {
        return SOAK.missing("nothing was asked");
    }
    let n_faults: usize = soak.faults.iter().map(|(_, n)| n).sum();
    let how = format!(
        "{} answers in {:.0} s with {n_faults} faults, {} failed",
        soak.asked.n, soak.seconds, soak.asked.n_failed
    );
    SOAK.measured(soak.asked.n_wrong as f64, how)
}
