//! Shards a model: `shard GGUF --stages N --out DIR [--weights MODE] [--split 16,14] [--force]`.

use std::error::Error;
use std::time::Instant;

use stagebus_shards::{ShardRequest, WeightMode, shard};

fn main() -> Result<(), Box<dyn Error>> {
    let mut request = ShardRequest {
        source: Default::default(),
        out_dir: Default::default(),
        n_stages: 1,
        split: None,
        weights: WeightMode::Exact,
        model_name: None,
        force: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--stages" => request.n_stages = value()?.parse()?,
            "--out" => request.out_dir = value()?.into(),
            "--weights" => request.weights = value()?.parse()?,
            "--split" => {
                let layers = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?;
                request.split = Some(layers);
            }
            "--force" => request.force = true,
            _ => request.source = argument.into(),
        }
    }
    let started = Instant::now();
    let manifest = shard(&request, &mut |_| {})?;
    println!("{} in {:.2?}", serde_json::to_string_pretty(&manifest)?, started.elapsed());
    Ok(())
}
