//! A claimed size costs no memory: only what is really there is allocated.
//!
//! One test, alone in its process: it measures the peak of all allocations.

use peak_alloc::PeakAlloc;
use stagebus_schemas::codec::{self, ContentType};
use stagebus_schemas::messages::control::Control;
use stagebus_schemas::messages::forward::Forward;
use stagebus_schemas::messages::head::Head;
use stagebus_schemas::messages::public::PromptRequest;

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// A list is allocated for at most 1 MiB before its elements are seen, and lists nest.
const ALLOWED_BYTES: usize = 4 << 20;

/// Runs `decode`, which must fail, and checks what it allocated at most.
fn check(name: &str, decode: impl FnOnce() -> bool) {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    assert!(decode(), "{name} was accepted");
    let used = ALLOCATOR.peak_usage().saturating_sub(before);
    assert!(used < ALLOWED_BYTES, "{name} allocated {used} bytes");
}

/// A map of `n` fields: the version, then one key whose value is `claim`, 4 Gi of something.
fn claiming(n: u8, key: &str, claim: u8) -> Vec<u8> {
    let mut bytes = vec![0x80 | n];
    bytes.extend(b"\xa7version\x01");
    bytes.push(0xa0 | u8::try_from(key.len()).expect("a short key"));
    bytes.extend(key.as_bytes());
    bytes.extend([claim, 0xff, 0xff, 0xff, 0xff, 0x01]);
    bytes
}

#[test]
fn claims_cost_nothing() {
    // The meter works: it sees an allocation of 8 MiB.
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    drop(std::hint::black_box(vec![1_u8; 8 << 20]));
    assert!(ALLOCATOR.peak_usage() - before >= 8 << 20);

    let (bin32, str32, array32, map32) = (0xc6, 0xdb, 0xdd, 0xdf);
    for claim in [bin32, str32, array32, map32] {
        let steps = claiming(3, "steps", claim);
        check("steps", || codec::decode::<Forward>(&steps).is_err());
        check("head", || codec::decode::<Head>(&steps).is_err());
        let from = claiming(3, "from", claim);
        check("from", || codec::decode::<Forward>(&from).is_err());
        let hidden = claiming(3, "hidden", claim);
        check("hidden", || codec::decode::<Forward>(&hidden).is_err());
        let action = claiming(2, "action", claim);
        check("action", || codec::decode::<Control>(&action).is_err());
        let unknown = claiming(2, "unknown", claim);
        check("unknown", || codec::decode::<Control>(&unknown).is_err());
        for key in ["messages", "prompt", "tokens", "stop"] {
            let field = claiming(2, key, claim);
            let decode = || codec::decode_public::<PromptRequest>(ContentType::MessagePack, &field);
            check(key, || decode().is_err());
        }
    }
    // The tensor itself: the start of a step's tensor whose bytes are claimed and not there.
    let mut tensor = vec![0x82];
    tensor.extend(b"\xa7version\x01\xa6hidden\x84\xa4data");
    tensor.extend([bin32, 0xff, 0xff, 0xff, 0xff, 0x01]);
    check("tensor", || codec::decode::<Forward>(&tensor).is_err());
    // Lists in lists.
    let mut nested = vec![0x82];
    nested.extend(b"\xa7version\x01\xa5steps");
    nested.extend([array32, 0xff, 0xff, 0xff, 0xff, 0x81]);
    nested.extend(b"\xa6tokens");
    nested.extend([array32, 0xff, 0xff, 0xff, 0xff, 0x01]);
    check("nested", || codec::decode::<Forward>(&nested).is_err());
}
