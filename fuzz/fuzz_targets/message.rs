//! Fuzz target `message`: see [`stagebus_fuzz::message`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::message(data));
