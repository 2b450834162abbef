//! Fuzz target `request`: see [`stagebus_fuzz::request`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::request(data));
