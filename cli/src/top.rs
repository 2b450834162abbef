//! `stagebus top`: the fleet as it works, look after look.

pub mod screen;

use std::io::{self, IsTerminal as _};
use std::pin::pin;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use futures::StreamExt as _;
use ratatui::DefaultTerminal;
use stagebus_bus::Bus;
use stagebus_coordinator::CoordinatorSettings;
use stagebus_schemas::ids::ModelName;
use stagebus_view::{Meter, Snapshot};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::client::ClientArgs;
use crate::console;
use crate::discover::Listener;
use crate::exit::{Outcome, UsageError};
use screen::Screen;

/// How long the broker may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Lines that a page key scrolls.
const PAGE: u16 = 10;

/// Arguments of `stagebus top`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = "Examples:
  stagebus top
  stagebus top --model smollm2 --interval 0.5
  stagebus top --json --count 10

Shows stages, workers, coordinators, sessions, rates, KV memory, the time of a decode step on each
worker and how many drafted tokens are accepted, from the announcements of the fleet; somebody who
misses three of them is gone. q, Esc or Ctrl-C leaves, arrows and page keys scroll. With --json each
look is one line, the first one after the first interval.")]
pub struct TopArgs {
    #[command(flatten)]
    client: ClientArgs,

    /// Look at one model only
    #[arg(long, value_name = "NAME")]
    model: Option<ModelName>,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,

    /// Leave after this many looks
    #[arg(long, value_name = "N")]
    count: Option<u64>,

    /// Print one JSON object per look instead of a screen
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 =
        text.parse().map_err(|_error| format!("{text:?} is no number of seconds"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(interval) if interval >= Duration::from_millis(100) => Ok(interval),
        _ => Err(format!("{text} is no number of seconds from 0.1 on")),
    }
}

/// Runs the command until the user leaves.
///
/// # Errors
/// A broker that cannot be reached or forbids to listen, a terminal that cannot be used.
pub async fn run(args: TopArgs, stop: CancellationToken) -> anyhow::Result<Outcome> {
    let is_terminal = io::stdout().is_terminal() && io::stdin().is_terminal();
    if !(args.json || is_terminal) {
        let (option, needs) = ("stagebus top", "a terminal, or --json");
        return Err(UsageError::Needs { option, needs }.into());
    }
    let settings =
        args.client.process.load::<CoordinatorSettings>("coordinator", &args.client.overrides())?;
    let unmeasured = Duration::from_millis(settings.process.step_timeout_ms);
    let bus = args.client.connect("stagebus-top").await?;
    let mut out = if args.json {
        Out::Lines
    } else {
        Out::Screen(Box::new(Watched::start(bus.url()).context("the terminal cannot be used")?))
    };
    let watch = Watch { bus: &bus, args: &args, unmeasured };
    watch.run(&mut out, &stop).await?;
    Ok(Outcome::Good)
}

/// Where snapshots go.
enum Out {
    Lines,
    Screen(Box<Watched>),
}

/// A terminal in the hands of this program; given back when dropped, and by a panic.
struct Watched {
    terminal: DefaultTerminal,
    keys: EventStream,
    screen: Screen,
}

impl Watched {
    fn start(broker: &str) -> io::Result<Self> {
        let terminal = ratatui::try_init()?;
        let screen = Screen { broker: broker.to_owned(), offset: 0 };
        Ok(Self { terminal, keys: EventStream::new(), screen })
    }

    fn draw(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        self.terminal.draw(|frame| self.screen.draw(frame, snapshot)).map(drop)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

impl Out {
    fn show(&mut self, snapshot: &Snapshot) -> io::Result<()> {
        match self {
            Self::Lines => console::print_json(snapshot),
            Self::Screen(watched) => watched.draw(snapshot),
        }
    }

    /// Waits for a key; for ever where there are none.
    async fn event(&mut self) -> io::Result<Event> {
        match self {
            Self::Lines => std::future::pending().await,
            Self::Screen(watched) => match watched.keys.next().await {
                Some(event) => event,
                None => Err(io::ErrorKind::UnexpectedEof.into()),
            },
        }
    }

    fn scroll(&mut self, scroll: Scroll) {
        let Self::Screen(watched) = self else { return };
        let offset = &mut watched.screen.offset;
        *offset = match scroll {
            Scroll::Down(lines) => offset.saturating_add(lines),
            Scroll::Up(lines) => offset.saturating_sub(lines),
        };
    }
}

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    Leave,
    Scroll(Scroll),
    /// Draw again: the terminal has another size.
    Draw,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scroll {
    Up(u16),
    Down(u16),
}

fn wish(event: &Event) -> Option<Wish> {
    let key = match event {
        Event::Resize(..) => return Some(Wish::Draw),
        Event::Key(key) if key.kind != KeyEventKind::Release => key,
        _ => return None,
    };
    let KeyEvent { code, modifiers, .. } = key;
    match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Some(Wish::Leave),
        KeyCode::Char('q') | KeyCode::Esc => Some(Wish::Leave),
        KeyCode::Up | KeyCode::Char('k') => Some(Wish::Scroll(Scroll::Up(1))),
        KeyCode::Down | KeyCode::Char('j') => Some(Wish::Scroll(Scroll::Down(1))),
        KeyCode::PageUp => Some(Wish::Scroll(Scroll::Up(PAGE))),
        KeyCode::PageDown => Some(Wish::Scroll(Scroll::Down(PAGE))),
        _ => None,
    }
}

/// The looks at a fleet.
struct Watch<'a> {
    bus: &'a Bus,
    args: &'a TopArgs,
    unmeasured: Duration,
}

impl Watch<'_> {
    async fn run(&self, out: &mut Out, stop: &CancellationToken) -> anyhow::Result<()> {
        let TopArgs { model, interval, count, json, .. } = self.args;
        let mut listener = Listener::start(self.bus, model.as_ref()).await?;
        let (mut meter, mut snapshot) = (Meter::default(), Snapshot::default());
        let mut n_looks = 0;
        let first = tokio::time::Instant::now() + *interval;
        let mut looks = tokio::time::interval_at(first, *interval);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut way = pin!(self.way(Duration::ZERO));
        if !json {
            snapshot.connected = self.bus.is_connected();
            out.show(&snapshot)?;
        }
        while count.is_none_or(|count| n_looks < count) {
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                heard = listener.hear() => heard?,
                round_trip = &mut way => {
                    snapshot.round_trip_ms = round_trip.map(|way| way.as_secs_f64() * 1e3);
                    way.set(self.way(*interval));
                }
                _ = looks.tick() => {
                    n_looks += 1;
                    let now = Instant::now();
                    listener.view.forget_silent(now);
                    snapshot.connected = self.bus.is_connected();
                    snapshot.models = meter.look(&listener.view, self.unmeasured, now);
                    snapshot.strangers = listener.view.strangers().cloned().collect();
                    out.show(&snapshot)?;
                }
                event = out.event() => match wish(&event?) {
                    Some(Wish::Leave) => return Ok(()),
                    Some(Wish::Scroll(scroll)) => {
                        out.scroll(scroll);
                        out.show(&snapshot)?;
                    }
                    Some(Wish::Draw) => out.show(&snapshot)?,
                    None => {}
                },
            }
        }
        Ok(())
    }

    /// The way to the broker and back, measured after a pause; nothing while it does not answer.
    async fn way(&self, pause: Duration) -> Option<Duration> {
        tokio::time::sleep(pause).await;
        self.bus.round_trip(ANSWER).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_leave_and_scroll() {
        let key = |code, modifiers| wish(&Event::Key(KeyEvent::new(code, modifiers)));
        let plain = |code| key(code, KeyModifiers::NONE);
        for code in [KeyCode::Char('q'), KeyCode::Esc] {
            assert_eq!(plain(code), Some(Wish::Leave));
        }
        assert_eq!(key(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Wish::Leave));
        assert_eq!(plain(KeyCode::Char('c')), None);
        assert_eq!(plain(KeyCode::Down), Some(Wish::Scroll(Scroll::Down(1))));
        assert_eq!(plain(KeyCode::PageUp), Some(Wish::Scroll(Scroll::Up(PAGE))));
        assert_eq!(wish(&Event::Resize(80, 24)), Some(Wish::Draw));
        assert_eq!(wish(&Event::FocusLost), None);
    }

    #[test]
    fn an_interval_is_a_number_of_seconds() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["", "x", "0", "0.01", "-1", "NaN", "1e300"] {
            interval(wrong).expect_err(wrong);
        }
    }
}
