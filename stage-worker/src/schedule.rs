//! Which steps run next: the scheduling policy of a stage, and nothing else.
//!
//! - A session runs one step at a time, in the order in which its steps came.
//! - Sessions of one phase take turns: a session whose step was taken goes to the back, so twenty
//!   queued prefill chunks of one prompt do not hold up another prompt's first chunk.
//! - Decode goes before prefill: a decode step costs little and a reader waits for its token.
//! - Neither starves: while a prefill chunk waits, at most `decodes_per_prefill` decode
//!   micro-batches run before one chunk does; and after a chunk, waiting decodes go first again.
//! - A micro-batch holds steps of one phase. Prefill chunks run alone, they fill the device.
//!
//! The queue is not bounded here: whoever pushes bounds it, because only the sender of a step can
//! be told that there is no room.

use std::collections::{HashMap, VecDeque};

use stagebus_engine::backend::{RowPath, SessionKey};

/// Steps that wait, and the order in which they leave. `T` is whatever a step carries.
#[derive(Debug)]
pub(crate) struct Schedule<T> {
    waiting: HashMap<SessionKey, VecDeque<(RowPath, T)>>,
    /// Sessions whose oldest step is a decode step, in order of their turn.
    decode: VecDeque<SessionKey>,
    /// Sessions whose oldest step is a prefill chunk, in order of their turn.
    prefill: VecDeque<SessionKey>,
    decodes_since_prefill: u32,
    decodes_per_prefill: u32,
    len: usize,
}

impl<T> Schedule<T> {
    /// Makes an empty queue that lets `decodes_per_prefill` decode micro-batches pass a waiting
    /// prefill chunk; 0 counts as 1, else prompts could starve running sessions.
    pub(crate) fn new(decodes_per_prefill: u32) -> Self {
        Self {
            waiting: HashMap::new(),
            decode: VecDeque::new(),
            prefill: VecDeque::new(),
            decodes_since_prefill: 0,
            decodes_per_prefill: decodes_per_prefill.max(1),
            len: 0,
        }
    }

    /// Returns true if no step waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the next step of a session.
    pub(crate) fn push(&mut self, session: SessionKey, path: RowPath, step: T) {
        let steps = self.waiting.entry(session).or_default();
        let was_idle = steps.is_empty();
        steps.push_back((path, step));
        self.len += 1;
        if was_idle {
            self.turns(path).push_back(session);
        }
    }

    /// Drops all waiting steps of a session and returns how many there were.
    pub(crate) fn remove(&mut self, session: SessionKey) -> usize {
        let Some(steps) = self.waiting.remove(&session) else { return 0 };
        self.decode.retain(|other| *other != session);
        self.prefill.retain(|other| *other != session);
        self.len -= steps.len();
        steps.len()
    }

    /// Moves the steps of the next micro-batch to `batch`: at most `max_sessions` decode steps of
    /// different sessions, or one prefill chunk. Nothing is moved only if nothing waits.
    pub(crate) fn take(&mut self, max_sessions: usize, batch: &mut Vec<(SessionKey, T)>) {
        let passed_over = self.decodes_since_prefill >= self.decodes_per_prefill;
        let prefill_now = !self.prefill.is_empty() && (self.decode.is_empty() || passed_over);
        let (path, n_sessions) = if prefill_now {
            self.decodes_since_prefill = 0;
            (RowPath::Prefill, 1)
        } else {
            self.decodes_since_prefill =
                if self.prefill.is_empty() { 0 } else { self.decodes_since_prefill + 1 };
            (RowPath::Decode, max_sessions.max(1).min(self.decode.len()))
        };
        for _ in 0..n_sessions {
            let Some(session) = self.turns(path).pop_front() else { return };
            let Some(steps) = self.waiting.get_mut(&session) else { continue };
            if let Some((_, step)) = steps.pop_front() {
                self.len -= 1;
                batch.push((session, step));
            }
            match steps.front().map(|(next_path, _)| *next_path) {
                Some(next_path) => self.turns(next_path).push_back(session),
                None => drop(self.waiting.remove(&session)),
            }
        }
    }

    fn turns(&mut self, path: RowPath) -> &mut VecDeque<SessionKey> {
        match path {
            RowPath::Decode => &mut self.decode,
            RowPath::Prefill => &mut self.prefill,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes steps written as `d1` or `p2` (phase, session) and returns the micro-batches in
    /// which they leave, in the same notation.
    fn check(pushed: &str, max_sessions: usize, decodes_per_prefill: u32, expected: &str) {
        let mut schedule = Schedule::new(decodes_per_prefill);
        for text in pushed.split(' ') {
            let path = if text.starts_with('d') { RowPath::Decode } else { RowPath::Prefill };
            schedule.push(SessionKey(text[1..].parse().expect("number")), path, text);
        }
        let mut batches = Vec::new();
        while !schedule.is_empty() {
            let mut batch = Vec::new();
            schedule.take(max_sessions, &mut batch);
            let steps: Vec<&str> = batch.iter().map(|(_, step)| *step).collect();
            batches.push(steps.join("+"));
        }
        assert_eq!(batches.join(" "), expected);
    }

    #[test]
    fn decodes_leave_in_order_of_arrival() {
        check("d1 d2 d3", 1, 8, "d1 d2 d3");
    }

    #[test]
    fn a_micro_batch_holds_one_step_of_each_session() {
        check("d1 d2 d1 d3 d1", 2, 8, "d1+d2 d3+d1 d1");
        check("d1 d1 d1", 4, 8, "d1 d1 d1");
    }

    #[test]
    fn decode_goes_before_prefill_until_prefill_has_been_passed_over() {
        check("p9 d1 d2 d3 d4 d5", 1, 2, "d1 d2 p9 d3 d4 d5");
        check("p9 p9 d1 d2 d3 d4 d5", 1, 2, "d1 d2 p9 d3 d4 p9 d5");
    }

    #[test]
    fn prefill_chunks_run_alone_and_prompts_take_turns() {
        check("p1 p1 p1 p2 p2", 4, 8, "p1 p2 p1 p2 p1");
    }

    #[test]
    fn a_session_keeps_its_order_across_phases() {
        check("p1 d1 d2", 1, 8, "d2 p1 d1");
    }

    #[test]
    fn the_least_patience_alternates() {
        check("p1 p2 d3 d3", 1, 1, "d3 p1 d3 p2");
        check("p1 p2 d3 d3", 1, 0, "d3 p1 d3 p2");
    }

    #[test]
    fn a_removed_session_leaves_nothing_behind() {
        let mut schedule = Schedule::new(8);
        for step in 0..3 {
            schedule.push(SessionKey(1), RowPath::Decode, step);
        }
        schedule.push(SessionKey(2), RowPath::Prefill, 7);
        assert_eq!(schedule.remove(SessionKey(1)), 3);
        assert_eq!(schedule.remove(SessionKey(1)), 0);
        let mut batch = Vec::new();
        schedule.take(4, &mut batch);
        assert_eq!(batch, vec![(SessionKey(2), 7)]);
        assert!(schedule.is_empty());
        // The session may come back under the same key.
        schedule.push(SessionKey(1), RowPath::Decode, 9);
        batch.clear();
        schedule.take(4, &mut batch);
        assert_eq!(batch, vec![(SessionKey(1), 9)]);
    }
}
