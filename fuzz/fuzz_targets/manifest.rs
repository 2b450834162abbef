//! Fuzz target `manifest`: see [`stagebus_fuzz::manifest`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::manifest(data));
