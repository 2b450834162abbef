//! Writes a made-up `llama` model of any size: `synthetic_gguf FILE GIGABYTES`.

#![expect(clippy::cast_possible_truncation, reason = "sizes of made-up models are small")]

use std::error::Error;
use std::path::Path;

#[path = "../tests/support/synthetic.rs"]
#[expect(dead_code, reason = "tests also write wrong models")]
mod synthetic;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(path), Some(gigabytes)) = (arguments.next(), arguments.next()) else {
        return Err("usage: synthetic_gguf FILE GIGABYTES".into());
    };
    let n_bytes = gigabytes.parse::<u64>()?.saturating_mul(1_000_000_000);
    synthetic::Synthetic::of_bytes(n_bytes).write(Path::new(&path))?;
    Ok(())
}
