//! Fuzz target `graph`: see [`stagebus_fuzz::graph`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::graph(data));
