//! Links between real sockets.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use super::*;

/// A server that sends back what it gets, until its connections end.
fn echo_server() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let serve = move || {
        for stream in listener.incoming().flatten() {
            let echo = move || {
                let (mut from, mut to) = (stream.try_clone().expect("a handle"), stream);
                std::io::copy(&mut from, &mut to).map(drop).unwrap_or_default();
                to.shutdown(std::net::Shutdown::Write).unwrap_or_default();
            };
            named("test-echo").spawn(echo).expect("a thread");
        }
    };
    named("test-server").spawn(serve).expect("a thread");
    address
}

fn linked(conditions: Conditions) -> (Link, TcpStream) {
    let link = Link::start(echo_server(), LinkPlan::both(conditions)).expect("a link");
    let stream = TcpStream::connect(link.address()).expect("connects");
    (link, stream)
}

fn noise(n_bytes: usize) -> Vec<u8> {
    let mut dice = crate::faults::Dice::new(5);
    (0..n_bytes).map(|_| dice.below(256) as u8).collect()
}

/// Sends bytes and reads them back while they are sent.
fn exchange(stream: &TcpStream, bytes: &[u8]) -> Vec<u8> {
    let mut sender = stream.try_clone().expect("a handle");
    let mut receiver = stream.try_clone().expect("a handle");
    let sent = bytes.to_vec();
    let thread = named("test-send").spawn(move || {
        sender.write_all(&sent).expect("sends");
        sender.shutdown(std::net::Shutdown::Write).expect("ends");
    });
    let mut back = Vec::new();
    receiver.read_to_end(&mut back).expect("reads");
    thread.expect("a thread").join().expect("sent");
    back
}

#[test]
fn bytes_arrive_whole_and_in_order() {
    let conditions = Conditions {
        delay: Duration::from_millis(2),
        jitter: Duration::from_millis(3),
        bytes_per_s: Some(20_000_000),
        loss: 0.01,
        retransmit: Duration::from_millis(2),
        ..Conditions::CLEAR
    };
    let (link, stream) = linked(conditions);
    let bytes = noise(1_000_000);
    assert!(exchange(&stream, &bytes) == bytes, "what came back differs");
    let Traffic { up, down } = link.traffic();
    assert_eq!((up.n_bytes, down.n_bytes), (1_000_000, 1_000_000));
    assert!(up.n_lost > 0 && down.n_lost > 0);
}

#[test]
fn nothing_arrives_before_its_time_and_conditions_change_at_run_time() {
    let delay = Duration::from_millis(30);
    let (link, mut stream) = linked(Conditions::delay(delay));
    let mut round = |least: Duration| {
        let started = Instant::now();
        stream.write_all(b"ping").expect("sends");
        let mut back = [0; 4];
        stream.read_exact(&mut back).expect("reads");
        assert!(started.elapsed() >= least, "{:?}", started.elapsed());
    };
    round(2 * delay);
    link.set(LinkPlan { up: Conditions::delay(3 * delay), down: Conditions::CLEAR });
    round(3 * delay);
}

#[test]
fn a_silent_link_holds_bytes_until_it_opens() {
    let (link, mut stream) = linked(Conditions::CLEAR);
    link.set_passage(Passage::Silent);
    stream.write_all(b"ping").expect("sends");
    let mut other = TcpStream::connect(link.address()).expect("a silent link takes connections");
    other.write_all(b"ping").expect("sends");
    for stream in [&mut stream, &mut other] {
        stream.set_read_timeout(Some(Duration::from_millis(50))).expect("an option");
        stream.read_exact(&mut [0; 4]).expect_err("nothing passes");
        stream.set_read_timeout(None).expect("an option");
    }
    link.set_passage(Passage::Open);
    for stream in [&mut stream, &mut other] {
        let mut back = [0; 4];
        stream.read_exact(&mut back).expect("it passes");
        assert_eq!(&back, b"ping");
    }
}

#[test]
fn a_cut_link_closes_connections_and_heals() {
    let (link, mut stream) = linked(Conditions::delay(Duration::from_secs(600)));
    stream.write_all(b"lost").expect("sends");
    link.set_passage(Passage::Cut);
    // Closed, or reset with what it held.
    assert!(!matches!(stream.read(&mut [0; 4]), Ok(1..)));
    let mut refused = TcpStream::connect(link.address()).expect("accepted and closed");
    assert!(!matches!(refused.read(&mut [0; 4]), Ok(1..)));
    link.set(LinkPlan::both(Conditions::CLEAR));
    link.set_passage(Passage::Open);
    let stream = TcpStream::connect(link.address()).expect("connects");
    assert_eq!(exchange(&stream, b"healed"), b"healed");
}

#[test]
fn back_pressure_bounds_what_is_on_the_way() {
    // A minute per segment: nothing gets through while this test runs.
    let (link, mut stream) = linked(Conditions::queued(Duration::ZERO, 24));
    stream.set_write_timeout(Some(Duration::from_millis(200))).expect("an option");
    let bytes = noise(1 << 20);
    let mut n_sent = 0;
    // The system's own buffers are a few megabytes.
    while n_sent < 64 << 20 {
        match stream.write(&bytes) {
            Ok(n_bytes) => n_sent += n_bytes,
            Err(_) => break,
        }
    }
    assert!(n_sent < 64 << 20, "everything was taken");
    assert!(link.traffic().up.n_bytes < 1 << 20, "{:?}", link.traffic());
}

#[test]
fn a_dropped_link_leaves_nothing_behind() {
    let (link, mut stream) = linked(Conditions::delay(Duration::from_secs(600)));
    stream.write_all(b"lost").expect("sends");
    let address = link.address();
    let watch = Arc::downgrade(&link.shared);
    drop(link);
    assert!(!matches!(stream.read(&mut [0; 4]), Ok(1..)));
    assert!(watch.upgrade().is_none(), "a thread still runs");
    TcpStream::connect(address).expect_err("nobody listens");
}
