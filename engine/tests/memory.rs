//! Memory of sessions, in a process of its own so that nothing else moves it.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "the other tests use the rest")]
#[path = "real/chain.rs"]
mod chain;

use stagebus_engine::{Backend, EngineOptions, Profile};

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn sessions_cost_their_kv_cache_and_give_it_back() {
    let options = EngineOptions { profile: Profile::Exact, ..chain::exact() };
    let mut chain = chain::Chain::load(&chain::ONE, &options);
    let prompt: Vec<u32> = (0..128).map(|i| 100 + 7 * i).collect();
    let fill = |chain: &mut chain::Chain| {
        for session in 0..16 {
            chain.open(session);
            chain.step(session, 0, &prompt, &[127]).unwrap();
        }
        let full = resident();
        let used = chain.stages[0].kv_use();
        for session in 0..16 {
            chain.close(session);
        }
        (full, used.bytes, resident())
    };
    // The first round also brings the runtime's scratch memory to its size.
    let (_, _, empty) = fill(&mut chain);
    let (full, kv_bytes, after) = fill(&mut chain);
    assert_eq!(kv_bytes, 16 * 128 * 46_080);
    let (grown, kept) = (full.saturating_sub(empty), after.saturating_sub(empty));
    // Twice the positions may be reserved ahead, and little else.
    assert!(grown < 2 * kv_bytes + (16 << 20), "16 sessions took {grown} bytes");
    assert!(kept < kv_bytes / 4, "{kept} of {grown} bytes stayed");
    let no_session = chain.stages[0].kv_use();
    assert_eq!((no_session.n_sessions, no_session.bytes), (0, 0));
}
