//! Every kept input, and small changes of it, through the function that is fuzzed with it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use stagebus_fuzz::{TARGETS, Target};

/// The kept inputs of a target.
fn inputs(name: &str) -> Result<Vec<Vec<u8>>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let mut inputs: Vec<Vec<u8>> = Vec::new();
    if folder.is_dir() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            inputs.push(fs::read(&path).with_context(|| path.display().to_string())?);
        }
    }
    if name == "message" {
        inputs.extend(stagebus_fuzz::golden());
    }
    ensure!(!inputs.is_empty(), "{} holds nothing for {name}", folder.display());
    Ok(inputs)
}

/// The input, and what a bad line or a hostile hand makes of it: cut short, with single bytes
/// changed at places that spread over it.
fn with_changes(input: &[u8], target: Target) {
    const CHANGES: usize = 24;
    target(input);
    for change in 0..CHANGES {
        let at = input.len() * change / CHANGES;
        target(&input[..at]);
        let mut changed = input.to_vec();
        if let Some(byte) = changed.get_mut(at) {
            *byte ^= [0xff, 0x01, 0x80][change % 3];
            target(&changed);
        }
    }
}

#[test]
fn kept_inputs_and_small_changes_of_them_do_no_harm() -> Result<()> {
    for (name, target) in TARGETS {
        for input in inputs(name)? {
            with_changes(&input, target);
        }
    }
    Ok(())
}
