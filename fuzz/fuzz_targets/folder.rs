//! Fuzz target `folder`: see [`stagebus_fuzz::folder`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::folder(data));
