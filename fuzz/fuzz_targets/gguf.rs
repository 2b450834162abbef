//! Fuzz target `gguf`: see [`stagebus_fuzz::gguf`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stagebus_fuzz::gguf(data));
