//! Clients that listen, come back, or do not.

use bytes::Bytes;
use stagebus_schemas::codec::ContentType;

use super::*;

const PATIENCE: Duration = Duration::from_secs(2);

/// Outboxes with a clock and what a client that listens has got.
struct Bench {
    outboxes: Outboxes,
    subject: Arc<str>,
    now: Instant,
    listens: bool,
    got: Vec<u64>,
    gone: Vec<Arc<str>>,
}

impl Bench {
    fn new() -> Self {
        Self {
            outboxes: Outboxes::new(PATIENCE),
            subject: "inbox".into(),
            now: Instant::now(),
            listens: true,
            got: vec![],
            gone: vec![],
        }
    }

    /// What the broker does with a message.
    fn publish(&mut self, message: &Outgoing) {
        if self.listens {
            self.got.push(message.number.event);
        } else {
            self.outboxes.unheard(message.number, self.now);
        }
    }

    fn push(&mut self) {
        let event = Some(PublicMessage::plain(ContentType::Json, Bytes::new()));
        let number = self.outboxes.next_number(&self.subject);
        let message = self.outboxes.push(&self.subject, event, self.now);
        assert!(message.iter().all(|message| message.number == number));
        message.iter().for_each(|message| self.publish(message));
    }

    fn end(&mut self) {
        let message = self.outboxes.push(&self.subject, None, self.now);
        message.iter().for_each(|message| self.publish(message));
    }

    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(due) = self.outboxes.next_deadline().filter(|due| *due <= until) {
            self.now = self.now.max(due);
            let (messages, gone) = self.outboxes.tick(self.now);
            messages.iter().for_each(|message| self.publish(message));
            self.gone.extend(gone);
        }
        self.now = until;
    }
}

#[test]
fn who_listens_gets_everything_once_and_is_forgotten_after_the_end() {
    let mut bench = Bench::new();
    bench.push();
    bench.push();
    bench.end();
    assert_eq!(bench.got, [0, 1, 2]);
    bench.wait(LINGER);
    assert!(bench.outboxes.boxes.is_empty() && bench.outboxes.subjects.is_empty());
    assert!(bench.gone.is_empty());
}

#[test]
fn who_comes_back_gets_what_nobody_heard_in_order() {
    let mut bench = Bench::new();
    bench.push();
    bench.listens = false;
    for _ in 0..3 {
        bench.push();
        bench.wait(Duration::from_millis(120));
    }
    bench.listens = true;
    bench.push();
    bench.wait(Duration::from_millis(300));
    bench.push();
    assert_eq!(bench.got, [0, 1, 2, 3, 4, 5]);
    assert!(bench.gone.is_empty());
}

#[test]
fn who_does_not_come_back_is_gone() {
    let mut bench = Bench::new();
    bench.listens = false;
    bench.push();
    bench.wait(PATIENCE - Duration::from_millis(1));
    assert!(bench.gone.is_empty());
    bench.wait(Duration::from_millis(1));
    assert_eq!(&*bench.gone[0], "inbox");
    assert!(bench.got.is_empty());
    assert!(bench.outboxes.boxes.is_empty());
}

#[test]
fn a_slow_answer_of_the_broker_does_not_renew_the_patience() {
    let mut bench = Bench::new();
    bench.push();
    let first = bench.outboxes.boxes[&bench.subject].kept[0].0.number;
    for _ in 0..40 {
        bench.outboxes.unheard(first, bench.now);
        bench.wait(Duration::from_millis(160));
    }
    assert!(!bench.gone.is_empty());
}

#[test]
fn after_a_broken_connection_the_last_messages_come_again() {
    let mut bench = Bench::new();
    bench.push();
    bench.wait(ON_THEIR_WAY * 2);
    bench.push();
    bench.push();
    let broken = bench.now;
    bench.wait(Duration::from_secs(5));
    // Nobody is there at first.
    bench.listens = false;
    bench.outboxes.reconnected(broken, bench.now);
    bench.push();
    bench.wait(Duration::from_millis(400));
    bench.listens = true;
    bench.wait(Duration::from_millis(400));
    bench.push();
    assert_eq!(bench.got, [0, 1, 2, 1, 2, 3, 4]);
}

#[test]
fn a_client_that_cannot_be_given_what_it_missed_is_gone() {
    let mut bench = Bench::new();
    for _ in 0..=KEPT {
        bench.push();
    }
    let client = bench.outboxes.boxes[&bench.subject].client;
    bench.outboxes.unheard(UnheardEvent { client, event: 0 }, bench.now);
    bench.wait(PAUSE);
    assert_eq!(bench.gone.len(), 1);
}
