//! Which workers live, and which of them a new session goes to.
//!
//! A worker lives while its announcements come; three missed ones, a broker answer that nobody
//! hears it, or its own goodbye end that. Only workers of the same shard set count.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::messages::fleet::{WorkerAnnouncement, WorkerLoad, WorkerState};

use crate::prefixes::Matches;

/// Missed announcements after which a worker counts as dead.
const MISSED_ANNOUNCEMENTS: u32 = 3;

/// Bounds on the interval that a worker may claim: a wrong one must neither flood nor blind us.
const INTERVAL_LIMITS_MS: (u32, u32) = (20, 60_000);

/// How long a worker gets no new sessions after it left a request unanswered, in its intervals.
const SUSPECT_INTERVALS: u32 = 3;

/// Sessions that a worker may have more than the least busy one and still get a prompt whose
/// beginning it has cached: skipping a prefill is worth a short queue.
const PREFIX_SLACK: u32 = 2;

/// Share of its KV memory up to which the worker in this process gets all sessions: fuller, it
/// would soon make sessions give way that fit elsewhere.
const HOSTED_KV_PERCENT: u64 = 75;

/// Workers of other shard sets that are remembered, so that each is warned about once; beyond
/// that the memory starts anew.
const MAX_REFUSED: usize = 1024;

/// Workers that are known at a time: far more than a fleet has. Beyond them new ones are not used,
/// so that a flood of announcements takes no memory.
const MAX_WORKERS: usize = 1024;

/// The shard set that a coordinator works with.
#[derive(Debug, Clone)]
pub(crate) struct ShardSetIdentity {
    /// Name of the model.
    pub(crate) model: ModelName,
    /// Fingerprint of the shard set.
    pub(crate) fingerprint: String,
    /// Number of stages.
    pub(crate) n_stages: u16,
}

/// The workers of one shard set.
#[derive(Debug)]
pub(crate) struct FleetView {
    identity: ShardSetIdentity,
    /// The worker in this process.
    hosted: Option<WorkerId>,
    workers: HashMap<WorkerId, Member>,
    refused: HashSet<WorkerId>,
    /// It was said that there are too many workers.
    is_full: bool,
}

#[derive(Debug)]
struct Member {
    stage: StageIndex,
    state: WorkerState,
    interval: Duration,
    last_seen: Instant,
    load: WorkerLoad,
    /// Fewest bytes per position that its KV caches were ever seen to take: short sessions leave
    /// much of their last block empty.
    token_bytes: Option<f64>,
    /// Sessions of this coordinator on it.
    own_sessions: u32,
    /// The same when its last announcement came, which counts those.
    own_when_announced: u32,
    suspect_until: Option<Instant>,
    /// Its inference does not come to an end.
    stuck: bool,
    /// When it was last asked whether it lives.
    checked: Option<Instant>,
}

/// KV caches, in positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct KvRoom {
    /// Positions held.
    pub(crate) held: f64,
    /// Positions that fit.
    pub(crate) room: f64,
}

/// Bytes per position of a worker's KV caches; nothing while they are empty or without a limit.
fn token_bytes(load: &WorkerLoad) -> Option<f64> {
    let known = load.kv_tokens > 0 && load.kv_bytes > 0 && load.kv_max_bytes > 0;
    known.then(|| number(load.kv_bytes) / number(load.kv_tokens))
}

fn smaller(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// A count as a number to reckon with; exact up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "memory sizes are far below 2^53")]
const fn number(count: u64) -> f64 {
    count as f64
}

/// What an announcement changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Observed {
    /// A worker that was not known.
    Joined,
    /// A known worker.
    Known,
    /// A known worker that may have missed messages since it was last heard.
    Lossy,
    /// A worker whose inference does not come to an end, seen for the first time.
    Stuck,
    /// A worker said goodbye.
    Left,
    /// A worker of another shard set, seen for the first time or again.
    Refused {
        /// Whether it was not refused before.
        first: bool,
    },
    /// As many workers are known as may be, and this one is not among them.
    Full {
        /// Whether it is the first of those.
        first: bool,
    },
}

impl Member {
    fn expires(&self) -> Instant {
        self.last_seen + self.interval * MISSED_ANNOUNCEMENTS
    }

    fn takes_sessions(&self, now: Instant) -> bool {
        self.state == WorkerState::Ready && self.is_well(now)
    }

    fn is_well(&self, now: Instant) -> bool {
        now < self.expires() && !self.stuck && self.suspect_until.is_none_or(|until| until <= now)
    }

    /// Whether it has room for one more session before others of its stage should get it.
    fn has_room(&self) -> bool {
        let WorkerLoad { kv_bytes, kv_max_bytes, max_sessions, .. } = self.load;
        self.n_sessions() < max_sessions
            && (kv_max_bytes == 0 || kv_bytes < kv_max_bytes / 100 * HOSTED_KV_PERCENT)
    }

    /// Sessions as announced, with those that this coordinator opened or closed since.
    fn n_sessions(&self) -> u32 {
        (self.load.n_sessions + self.own_sessions).saturating_sub(self.own_when_announced)
    }
}

impl FleetView {
    /// Makes an empty view; `hosted` is the worker in this process.
    pub(crate) fn new(identity: ShardSetIdentity, hosted: Option<WorkerId>) -> Self {
        let (workers, refused) = (HashMap::new(), HashSet::new());
        Self { identity, hosted, workers, refused, is_full: false }
    }

    /// Takes an announcement.
    ///
    /// `unmeasured` is the time that a micro-batch may take whose like was never measured.
    pub(crate) fn observe(
        &mut self,
        announcement: &WorkerAnnouncement,
        unmeasured: Duration,
        now: Instant,
    ) -> Observed {
        let worker = &announcement.worker;
        let same = announcement.model == self.identity.model
            && announcement.fingerprint == self.identity.fingerprint
            && announcement.n_stages == self.identity.n_stages
            && announcement.stage.index() < usize::from(self.identity.n_stages);
        if !same {
            if self.refused.len() >= MAX_REFUSED {
                self.refused.clear();
            }
            return Observed::Refused { first: self.refused.insert(worker.clone()) };
        }
        if announcement.state == WorkerState::Leaving {
            self.workers.remove(worker);
            return Observed::Left;
        }
        if self.workers.len() >= MAX_WORKERS && !self.workers.contains_key(worker) {
            return Observed::Full { first: !std::mem::replace(&mut self.is_full, true) };
        }
        let (least, most) = INTERVAL_LIMITS_MS;
        let interval =
            Duration::from_millis(u64::from(announcement.interval_ms.clamp(least, most)));
        let known = self.workers.get(worker);
        let own_sessions = known.map_or(0, |member| member.own_sessions);
        let load = &announcement.load;
        let stuck = load.is_stuck(unmeasured);
        let was_stuck = known.is_some_and(|member| member.stuck);
        let is_lossy = known.is_some_and(|member| load.losses > member.load.losses);
        let member = Member {
            stuck,
            checked: known.and_then(|member| member.checked),
            stage: announcement.stage,
            state: announcement.state,
            interval,
            last_seen: now,
            load: announcement.load.clone(),
            token_bytes: smaller(
                token_bytes(&announcement.load),
                known.and_then(|m| m.token_bytes),
            ),
            own_sessions,
            own_when_announced: own_sessions,
            suspect_until: known.and_then(|member| member.suspect_until),
        };
        match self.workers.insert(worker.clone(), member) {
            _ if stuck && !was_stuck => Observed::Stuck,
            None => Observed::Joined,
            Some(_) if is_lossy => Observed::Lossy,
            Some(_) => Observed::Known,
        }
    }

    /// Whether a worker is to be asked whether it lives, which it has not been for `patience`; it
    /// counts as asked then.
    pub(crate) fn take_check(
        &mut self,
        worker: &WorkerId,
        patience: Duration,
        now: Instant,
    ) -> bool {
        let Some(member) = self.workers.get_mut(worker) else { return false };
        let is_due = member.checked.is_none_or(|checked| checked + patience <= now);
        if is_due {
            member.checked = Some(now);
        }
        is_due
    }

    /// The workers that live, with their stages.
    pub(crate) fn members(&self) -> impl Iterator<Item = (StageIndex, &WorkerId)> {
        self.workers.iter().map(|(id, member)| (member.stage, id))
    }

    /// Whether a session may go on with the worker that has it: also one that drains may.
    pub(crate) fn may_keep(&self, worker: &WorkerId, now: Instant) -> bool {
        self.workers.get(worker).is_some_and(|member| member.is_well(now))
    }

    /// Removes and returns the workers whose announcements stopped.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<WorkerId> {
        self.workers.extract_if(|_, member| member.expires() <= now).map(|(id, _)| id).collect()
    }

    /// When the next worker expires if nothing is heard.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.workers.values().map(Member::expires).min()
    }

    /// Chooses the worker of a stage for a new session: the one in this process while it has room,
    /// since no hop to it costs anything. Else, among the workers that are not much busier
    /// than the least busy one, the longest cached beginning counts first; then fewest sessions,
    /// then the shortest queue, then the name, so that the choice is reproducible. Workers in
    /// `avoid` are left out.
    pub(crate) fn pick(
        &self,
        stage: StageIndex,
        avoid: &HashSet<WorkerId>,
        matches: &Matches,
        now: Instant,
    ) -> Option<WorkerId> {
        let candidates = || {
            self.workers.iter().filter(|(id, member)| {
                member.stage == stage && member.takes_sessions(now) && !avoid.contains(*id)
            })
        };
        let hosted = candidates().find(|(id, _)| self.hosted.as_ref() == Some(*id));
        if let Some((id, _)) = hosted.filter(|(_, member)| member.has_room()) {
            return Some(id.clone());
        }
        let fewest = candidates().map(|(_, member)| member.n_sessions()).min()?;
        let most = fewest + (fewest / 2).max(PREFIX_SLACK);
        candidates()
            .filter(|(_, member)| member.n_sessions() <= most)
            .min_by_key(|(id, member)| {
                let cached = Reverse(matches.of(id));
                (cached, member.n_sessions(), member.load.queue_depth, *id)
            })
            .map(|(id, _)| id.clone())
    }

    /// The KV caches of a stage's workers that take sessions; nothing while it is not known how
    /// much they hold, or where nothing limits them.
    pub(crate) fn kv(&self, stage: StageIndex, now: Instant) -> Option<KvRoom> {
        let mut kv = KvRoom { held: 0.0, room: 0.0 };
        let of_stage = |member: &&Member| member.stage == stage && member.takes_sessions(now);
        for member in self.workers.values().filter(of_stage) {
            kv.held += number(member.load.kv_tokens);
            kv.room += number(member.load.kv_max_bytes) / member.token_bytes?;
        }
        (kv.room > 0.0).then_some(kv)
    }

    /// Workers of a stage that take sessions.
    pub(crate) fn n_that_take_sessions(&self, stage: StageIndex, now: Instant) -> usize {
        let of_stage = |member: &&Member| member.stage == stage && member.takes_sessions(now);
        self.workers.values().filter(of_stage).count()
    }

    /// Whether every stage has a worker that takes sessions.
    pub(crate) fn is_complete(&self, now: Instant) -> bool {
        self.stages()
            .all(|stage| self.pick(stage, &HashSet::new(), &Matches::default(), now).is_some())
    }

    /// Stages of the shard set, in order.
    pub(crate) fn stages(&self) -> impl Iterator<Item = StageIndex> + use<> {
        (0..self.identity.n_stages).map(StageIndex::new)
    }

    /// Workers seen that belong to another shard set.
    pub(crate) fn n_refused(&self) -> usize {
        self.refused.len()
    }

    /// Counts a session of this coordinator on a worker.
    pub(crate) fn session_opened(&mut self, worker: &WorkerId) {
        if let Some(member) = self.workers.get_mut(worker) {
            member.own_sessions += 1;
        }
    }

    /// Takes a session of this coordinator off a worker.
    pub(crate) fn session_closed(&mut self, worker: &WorkerId) {
        if let Some(member) = self.workers.get_mut(worker) {
            member.own_sessions = member.own_sessions.saturating_sub(1);
        }
    }

    /// Gives a worker no new sessions for a while: it left a request unanswered.
    pub(crate) fn suspect(&mut self, worker: &WorkerId, now: Instant) {
        if let Some(member) = self.workers.get_mut(worker) {
            member.suspect_until = Some(now + member.interval * SUSPECT_INTERVALS);
        }
    }

    /// Gives all workers a full time to be heard: this side was not listening.
    pub(crate) fn restart_clocks(&mut self, now: Instant) {
        for member in self.workers.values_mut() {
            member.last_seen = now;
        }
    }

    /// Removes a worker that nobody hears any more.
    pub(crate) fn remove(&mut self, worker: &WorkerId) {
        self.workers.remove(worker);
    }
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::version::MessageVersion;

    use super::*;
    use crate::prefixes::PrefixIndex;

    const UNMEASURED: Duration = Duration::from_secs(30);

    fn view() -> FleetView {
        hosting(None)
    }

    fn hosting(worker: Option<&str>) -> FleetView {
        let identity = ShardSetIdentity {
            model: ModelName::new("m").unwrap(),
            fingerprint: "f".to_owned(),
            n_stages: 2,
        };
        FleetView::new(identity, worker.map(id))
    }

    fn id(name: &str) -> WorkerId {
        WorkerId::new(name).unwrap()
    }

    fn announcement(name: &str, stage: u16, n_sessions: u32) -> WorkerAnnouncement {
        WorkerAnnouncement {
            version: MessageVersion::CURRENT,
            worker: id(name),
            model: ModelName::new("m").unwrap(),
            fingerprint: "f".to_owned(),
            stage: StageIndex::new(stage),
            n_stages: 2,
            first_layer: 0,
            end_layer: 1,
            device: "CPU".to_owned(),
            profile: "fast".to_owned(),
            host: "h".to_owned(),
            state: WorkerState::Ready,
            interval_ms: 1000,
            load: WorkerLoad {
                n_sessions,
                max_sessions: 8,
                queue_depth: 0,
                kv_tokens: 0,
                kv_bytes: 0,
                kv_max_bytes: 0,
                steps_completed: 0,
                decode_us: 0,
                prefill_row_us: 0,
                ..WorkerLoad::default()
            },
        }
    }

    fn pick(view: &FleetView, now: Instant) -> Option<WorkerId> {
        view.pick(StageIndex::FIRST, &HashSet::new(), &Matches::default(), now)
    }

    #[test]
    fn sessions_go_to_the_worker_with_the_fewest() {
        let (mut view, now) = (view(), Instant::now());
        assert_eq!(view.observe(&announcement("a", 0, 2), UNMEASURED, now), Observed::Joined);
        assert_eq!(view.observe(&announcement("b", 0, 1), UNMEASURED, now), Observed::Joined);
        assert_eq!(pick(&view, now), Some(id("b")));
        // Own sessions count before the worker announces them, and once afterwards.
        view.session_opened(&id("b"));
        view.session_opened(&id("b"));
        assert_eq!(pick(&view, now), Some(id("a")));
        assert_eq!(view.observe(&announcement("b", 0, 3), UNMEASURED, now), Observed::Known);
        view.session_closed(&id("b"));
        view.session_closed(&id("b"));
        assert_eq!(pick(&view, now), Some(id("b")));
        let avoid = HashSet::from([id("b")]);
        assert_eq!(view.pick(StageIndex::FIRST, &avoid, &Matches::default(), now), Some(id("a")));
        assert!(!view.is_complete(now));
        view.observe(&announcement("c", 1, 0), UNMEASURED, now);
        assert!(view.is_complete(now));
    }

    #[test]
    fn the_shorter_queue_decides_a_tie() {
        let (mut view, now) = (view(), Instant::now());
        let mut busy = announcement("a", 0, 1);
        busy.load.queue_depth = 4;
        view.observe(&busy, UNMEASURED, now);
        view.observe(&announcement("b", 0, 1), UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("b")));
    }

    #[test]
    fn a_cached_beginning_draws_a_session_unless_its_worker_is_busy() {
        let (mut view, now) = (view(), Instant::now());
        let prompt = [7; 64];
        let mut prefixes = PrefixIndex::default();
        prefixes.note(&prompt, &[id("b")]);
        let pick = |view: &FleetView| {
            view.pick(StageIndex::FIRST, &HashSet::new(), &prefixes.matches(&prompt), now)
        };
        view.observe(&announcement("a", 0, 0), UNMEASURED, now);
        view.observe(&announcement("b", 0, PREFIX_SLACK), UNMEASURED, now);
        assert_eq!(pick(&view), Some(id("b")));
        view.observe(&announcement("b", 0, PREFIX_SLACK + 1), UNMEASURED, now);
        assert_eq!(pick(&view), Some(id("a")));
    }

    #[test]
    fn the_worker_in_this_process_gets_all_sessions_that_it_has_room_for() {
        let (mut view, now) = (hosting(Some("b")), Instant::now());
        view.observe(&announcement("a", 0, 0), UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("a")));
        let mut hosted = announcement("b", 0, 7);
        view.observe(&hosted, UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("b")));
        view.session_opened(&id("b"));
        assert_eq!(pick(&view, now), Some(id("a")), "it has as many as it takes");
        view.session_closed(&id("b"));
        (hosted.load.kv_bytes, hosted.load.kv_max_bytes) = (75, 100);
        view.observe(&hosted, UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("a")), "its memory is nearly full");
        hosted.load.kv_bytes = 74;
        view.observe(&hosted, UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("b")));
        hosted.state = WorkerState::Draining;
        view.observe(&hosted, UNMEASURED, now);
        assert_eq!(pick(&view, now), Some(id("a")));
    }

    #[test]
    fn three_missed_announcements_end_a_worker() {
        let (mut view, now) = (view(), Instant::now());
        view.observe(&announcement("a", 0, 0), UNMEASURED, now);
        let later = now + Duration::from_millis(2999);
        assert!(view.expire(later).is_empty());
        assert_eq!(pick(&view, later), Some(id("a")));
        assert_eq!(view.next_expiry(), Some(now + Duration::from_secs(3)));
        let dead = now + Duration::from_secs(3);
        assert_eq!(pick(&view, dead), None);
        assert_eq!(view.expire(dead), [id("a")]);
        assert_eq!(view.observe(&announcement("a", 0, 0), UNMEASURED, dead), Observed::Joined);
    }

    #[test]
    fn draining_leaving_and_suspect_workers_get_no_sessions() {
        let (mut view, now) = (view(), Instant::now());
        let mut worker = announcement("a", 0, 0);
        view.observe(&worker, UNMEASURED, now);
        view.suspect(&id("a"), now);
        assert_eq!(pick(&view, now), None);
        view.observe(&worker, UNMEASURED, now + Duration::from_secs(3));
        assert_eq!(pick(&view, now + Duration::from_secs(3)), Some(id("a")));
        worker.state = WorkerState::Draining;
        assert_eq!(view.observe(&worker, UNMEASURED, now), Observed::Known);
        assert_eq!(pick(&view, now), None);
        worker.state = WorkerState::Leaving;
        assert_eq!(view.observe(&worker, UNMEASURED, now), Observed::Left);
        assert_eq!(view.next_expiry(), None);
    }

    #[test]
    fn other_shard_sets_are_refused_and_reported_once() {
        let (mut view, now) = (view(), Instant::now());
        let mut other = announcement("a", 0, 0);
        other.fingerprint = "g".to_owned();
        assert_eq!(view.observe(&other, UNMEASURED, now), Observed::Refused { first: true });
        assert_eq!(view.observe(&other, UNMEASURED, now), Observed::Refused { first: false });
        let mut stages = announcement("b", 0, 0);
        stages.n_stages = 3;
        assert_eq!(view.observe(&stages, UNMEASURED, now), Observed::Refused { first: true });
        assert_eq!(
            view.observe(&announcement("c", 2, 0), UNMEASURED, now),
            Observed::Refused { first: true }
        );
        assert_eq!(pick(&view, now), None);
        assert_eq!(view.n_refused(), 3);
    }

    #[test]
    fn a_flood_of_workers_is_refused_and_those_that_are_known_stay() {
        let (mut view, now) = (view(), Instant::now());
        let join = |view: &mut FleetView, n: usize, now| {
            view.observe(&announcement(&format!("w{n}"), 0, 0), UNMEASURED, now)
        };
        for n in 0..MAX_WORKERS {
            assert_eq!(join(&mut view, n, now), Observed::Joined);
        }
        assert_eq!(join(&mut view, MAX_WORKERS, now), Observed::Full { first: true });
        assert_eq!(join(&mut view, MAX_WORKERS + 1, now), Observed::Full { first: false });
        assert_eq!(join(&mut view, 7, now), Observed::Known);
        assert_eq!(view.members().count(), MAX_WORKERS);
        // When others are gone there is room.
        let later = now + Duration::from_secs(3);
        assert_eq!(view.expire(later).len(), MAX_WORKERS);
        assert_eq!(join(&mut view, MAX_WORKERS, later), Observed::Joined);
    }
}
