//! Memory of sessions, in a process of its own so that nothing else moves it.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "the other tests use the rest")]
#[path = "real/chain.rs"]
mod chain;

use stagebus_engine::{
    Backend, EngineKind, EngineOptions, Profile, RowPath, SessionKey, StageRequest, StepRows,
    open_backend,
};

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn sessions_cost_their_kv_cache_and_little_else() {
    stateful_sessions_cost_their_kv_cache_and_give_it_back();
    idle_paged_sessions_cost_their_blocks();
}

fn idle_paged_sessions_cost_their_blocks() {
    const N_SESSIONS: u32 = 128;
    let library = chain::library();
    let request = StageRequest { shards: &chain::ONE, stage: 0, library: Some(&library) };
    let options = EngineOptions { kv_bytes: Some(160 << 20), max_sessions: 256, ..chain::exact() };
    let options = EngineOptions { profile: Profile::Fast, ..options };
    let mut backend = open_backend(EngineKind::Paged, &request, &options).unwrap();
    let mut open = |session: u32| {
        let key = SessionKey(u64::from(session));
        let prompt: Vec<u32> = (0..32).map(|i| 100 + (31 * session + i) % 40_000).collect();
        backend.open(key, &prompt, 32).unwrap();
        let path = RowPath::Prefill;
        let rows = StepRows {
            session: key,
            start_pos: 0,
            path,
            tokens: &prompt,
            hidden: None,
            wanted: &[],
        };
        backend.run(&[rows], &mut |done| assert!(done.output.is_ok()));
        (resident(), backend.kv_use().bytes)
    };
    // The first sessions also bring the runtime's scratch memory to its size.
    let (before, held_before) = (0..8).map(&mut open).last().unwrap();
    let (after, held_after) = (8..8 + N_SESSIONS).map(&mut open).last().unwrap();
    let kv_bytes = held_after - held_before;
    assert!(kv_bytes >= u64::from(N_SESSIONS) * 32 * 10_000, "{kv_bytes} bytes of blocks");
    let each = after.saturating_sub(before).saturating_sub(kv_bytes) / u64::from(N_SESSIONS);
    assert!(each < 200_000, "an idle session takes {each} bytes beside its blocks");
}

fn stateful_sessions_cost_their_kv_cache_and_give_it_back() {
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
