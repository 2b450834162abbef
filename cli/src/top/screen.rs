//! The screen: what a snapshot looks like, for any size of the terminal.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use stagebus_schemas::messages::fleet::WorkerState;
use stagebus_view::{CoordinatorRates, ModelRates, Snapshot, WorkerRates};

use crate::console;

/// Steps of height of a column in the curve of rates.
const COLUMNS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Cells of the bar of KV memory.
const BAR_CELLS: u8 = 8;

/// What the screen shows besides the snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Screen {
    /// Address of the broker.
    pub broker: String,
    /// Lines that are scrolled away.
    pub offset: u16,
}

impl Screen {
    /// Draws a snapshot.
    pub fn draw(&mut self, frame: &mut Frame<'_>, snapshot: &Snapshot) {
        let [head, body] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(frame.area());
        frame.render_widget(Paragraph::new(self.head(snapshot)), head);
        let lines = lines(snapshot);
        // A screen that grew, or a fleet that shrank, scrolls back.
        let n_lines = u16::try_from(lines.len()).unwrap_or(u16::MAX);
        self.offset = self.offset.min(n_lines.saturating_sub(body.height));
        frame.render_widget(Paragraph::new(lines).scroll((self.offset, 0)), body);
    }

    fn head(&self, snapshot: &Snapshot) -> Line<'static> {
        let way = match (snapshot.connected, snapshot.round_trip_ms) {
            (false, _) => Span::styled("connection lost".to_owned(), wrong()),
            (true, Some(ms)) => Span::raw(format!("{ms:.2} ms there and back")),
            (true, None) => Span::raw("connected"),
        };
        Line::from(vec![
            Span::styled(format!("stagebus top  {}  ", self.broker), strong()),
            way,
            Span::raw("  q leaves, arrows scroll"),
        ])
    }
}

fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn wrong() -> Style {
    Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
}

fn lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    if snapshot.models.is_empty() {
        return vec![Line::raw(""), Line::raw("nobody announces itself")];
    }
    snapshot.models.iter().flat_map(model_lines).collect()
}

fn model_lines(model: &ModelRates) -> Vec<Line<'static>> {
    let state = if model.served {
        Span::raw(format!("served, {} stages", model.n_stages))
    } else {
        Span::styled(format!("CANNOT BE SERVED, {} stages", model.n_stages), wrong())
    };
    let acceptance = model
        .acceptance
        .map(|part| format!(", {:.0} % of drafts accepted", part * 100.0))
        .unwrap_or_default();
    let mut lines = vec![
        Line::raw(""),
        Line::from(vec![
            Span::styled(format!("{}  ", model.model), strong()),
            state,
            Span::raw(format!(
                ", {} sessions, {:.1} tokens/s{acceptance}",
                model.sessions, model.tok_s
            )),
        ]),
        Line::styled(curve(&model.history), Style::new().fg(Color::Cyan)),
    ];
    let problems = model.problems.iter();
    lines.extend(problems.map(|problem| Line::styled(format!("! {problem}"), wrong())));
    lines.extend(table(&WORKER_HEADER, &model.workers, worker_row, |worker| worker.is_stuck));
    lines.extend(table(&COORDINATOR_HEADER, &model.coordinators, coordinator_row, |_| false));
    lines
}

const WORKER_HEADER: [&str; 11] = [
    "stage", "worker", "state", "sessions", "queue", "steps/s", "rows/s", "step ms", "kv",
    "device", "host",
];

const COORDINATOR_HEADER: [&str; 8] =
    ["coordinator", "state", "sessions", "tokens/s", "drafted/s", "accepted/s", "replays", "host"];

/// A table under its header; rows that are wrong are marked.
fn table<T>(
    header: &[&str],
    rows: &[T],
    cells: fn(&T) -> Vec<String>,
    is_wrong: fn(&T) -> bool,
) -> Vec<Line<'static>> {
    if rows.is_empty() {
        return Vec::new();
    }
    let text = console::table(header, &rows.iter().map(cells).collect::<Vec<_>>());
    let marks = std::iter::once(strong())
        .chain(rows.iter().map(|row| if is_wrong(row) { wrong() } else { Style::new() }));
    text.lines().zip(marks).map(|(line, style)| Line::styled(line.to_owned(), style)).collect()
}

fn worker_row(rates: &WorkerRates) -> Vec<String> {
    let (worker, load) = (&rates.worker, &rates.worker.load);
    let state = match (rates.is_stuck, worker.state) {
        (true, _) => format!("STUCK {} s", load.busy_ms / 1000),
        (false, WorkerState::Joining) => "joining".to_owned(),
        (false, WorkerState::Starting) => "starting".to_owned(),
        (false, WorkerState::Ready) => "ready".to_owned(),
        (false, WorkerState::Draining) => "draining".to_owned(),
        (false, WorkerState::Leaving) => "leaving".to_owned(),
    };
    let kv = match rates.kv_part {
        Some(part) => format!("{} {:.0} %", bar(part), part * 100.0),
        None => format!("{} MiB", load.kv_bytes >> 20),
    };
    vec![
        worker.stage.to_string(),
        worker.worker.to_string(),
        state,
        format!("{}/{}", load.n_sessions, load.max_sessions),
        load.queue_depth.to_string(),
        format!("{:.1}", rates.steps_s),
        format!("{:.1}", rates.rows_s),
        format!("{:.2}", f64::from(load.decode_us) / 1e3),
        kv,
        worker.device.clone(),
        worker.host.clone(),
    ]
}

fn coordinator_row(rates: &CoordinatorRates) -> Vec<String> {
    let coordinator = &rates.coordinator;
    vec![
        coordinator.coordinator.to_string(),
        if coordinator.accepting { "ready" } else { "draining" }.to_owned(),
        coordinator.n_sessions.to_string(),
        format!("{:.1}", rates.tok_s),
        format!("{:.1}", rates.drafted_s),
        format!("{:.1}", rates.accepted_s),
        coordinator.recoveries.to_string(),
        coordinator.host.clone(),
    ]
}

/// A bar of which a part is filled.
fn bar(part: f64) -> String {
    let is_full = |cell: u8| (f64::from(cell) + 0.5) / f64::from(BAR_CELLS) <= part;
    (0..BAR_CELLS).map(|cell| if is_full(cell) { '█' } else { '░' }).collect()
}

/// The rates as columns, the highest one at full height.
fn curve(rates: &[f64]) -> String {
    let highest = rates.iter().copied().fold(0.0, f64::max);
    // The highest column whose lower edge the rate reaches; the lowest one is always drawn.
    let column = |rate: &f64| {
        let edges = (0_u8..).map(|level| highest * f64::from(level) / 8.0);
        let reached = COLUMNS.iter().zip(edges).take_while(|(_, edge)| *edge <= *rate);
        reached.last().filter(|_| highest > 0.0).map_or(COLUMNS[0], |(column, _)| *column)
    };
    rates.iter().map(column).collect()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use stagebus_view::Problem;
    use stagebus_view::testing::{coordinator, worker};

    use super::*;

    fn snapshot() -> Snapshot {
        let mut stuck = worker("smollm2", 1, "w1-b");
        (stuck.load.busy_ms, stuck.load.queue_depth) = (42_000, 3);
        Snapshot {
            connected: true,
            round_trip_ms: Some(0.5),
            models: vec![ModelRates {
                model: "smollm2".parse().expect("a name"),
                served: true,
                problems: Vec::new(),
                n_stages: 2,
                sessions: 1,
                tok_s: 42.5,
                acceptance: Some(0.75),
                history: vec![0.0, 20.0, 42.5],
                workers: vec![
                    WorkerRates {
                        steps_s: 17.0,
                        rows_s: 52.0,
                        kv_part: Some(0.5),
                        is_stuck: false,
                        worker: worker("smollm2", 0, "w0-a"),
                    },
                    WorkerRates {
                        steps_s: 0.0,
                        rows_s: 0.0,
                        kv_part: None,
                        is_stuck: true,
                        worker: stuck,
                    },
                ],
                coordinators: vec![CoordinatorRates {
                    tok_s: 42.5,
                    requests_s: 0.2,
                    drafted_s: 60.0,
                    accepted_s: 37.5,
                    coordinator: coordinator("smollm2", "c-x"),
                }],
            }],
            strangers: Vec::new(),
        }
    }

    /// The screen's lines without the spaces at their ends.
    fn drawn(screen: &mut Screen, size: (u16, u16), snapshot: &Snapshot) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(size.0, size.1)).expect("a screen");
        terminal.draw(|frame| screen.draw(frame, snapshot)).expect("drawn");
        let buffer = terminal.backend().buffer();
        let row = |y| (0..size.0).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..size.1).map(|y| row(y).trim_end().to_owned()).collect()
    }

    fn screen() -> Screen {
        Screen { broker: "nats://box:4222".to_owned(), offset: 0 }
    }

    #[test]
    fn a_fleet_is_drawn_with_its_rates_and_what_is_wrong() {
        let lines = drawn(&mut screen(), (110, 12), &snapshot());
        let expected = [
            "stagebus top  nats://box:4222  0.50 ms there and back  q leaves, arrows scroll",
            "",
            "smollm2  served, 2 stages, 1 sessions, 42.5 tokens/s, 75 % of drafts accepted",
            "▁▄█",
            "stage  worker  state       sessions  queue  steps/s  rows/s  step ms  kv             device  host",
            "    0  w0-a    ready           1/64      0     17.0    52.0     5.25  ████░░░░ 50 %  CPU     box",
            "    1  w1-b    STUCK 42 s      1/64      3      0.0     0.0     5.25          0 MiB  CPU     box",
            "coordinator  state  sessions  tokens/s  drafted/s  accepted/s  replays  host",
            "c-x          ready         1      42.5       60.0        37.5        0  box",
        ];
        assert_eq!(lines[..expected.len()], expected, "{lines:#?}");
    }

    #[test]
    fn every_size_can_be_drawn_and_scrolls_to_the_end_only() {
        let snapshot = snapshot();
        for size in [(1, 1), (10, 2), (80, 5), (300, 100)] {
            let mut screen = Screen { offset: u16::MAX, ..screen() };
            drawn(&mut screen, size, &snapshot);
            assert_eq!(screen.offset, 8_u16.saturating_sub(size.1 - 1), "{size:?}");
        }
        let mut screen = Screen { offset: 7, ..screen() };
        let lines = drawn(&mut screen, (110, 4), &snapshot);
        assert!(lines[3].starts_with("c-x"), "{lines:#?}");
    }

    #[test]
    fn nobody_and_a_lost_connection_are_told() {
        let lines = drawn(&mut screen(), (80, 5), &Snapshot::default());
        assert!(lines[0].contains("connection lost"), "{lines:#?}");
        assert_eq!(lines[2], "nobody announces itself");
    }

    #[test]
    fn a_problem_is_shown_in_a_line_of_its_own() {
        let mut snapshot = snapshot();
        let problem = Problem::NoCoordinator { n_leaving: 0 };
        snapshot.models[0].problems.push(problem);
        snapshot.models[0].served = false;
        let lines = drawn(&mut screen(), (80, 12), &snapshot);
        assert!(lines[2].contains("CANNOT BE SERVED"), "{lines:#?}");
        assert_eq!(lines[4], "! no coordinator is there");
    }

    #[test]
    fn curves_reach_from_the_lowest_to_the_highest_column() {
        assert_eq!(curve(&[]), "");
        assert_eq!(curve(&[0.0, 0.0]), "▁▁");
        assert_eq!(curve(&[1.0, 8.0, 4.0]), "▂█▅");
        assert_eq!((bar(0.0), bar(1.0)), ("░░░░░░░░".to_owned(), "████████".to_owned()));
    }
}
