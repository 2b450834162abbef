//! Writes large model folders in the format of Hugging Face, to see what sharding them costs.
//!
//! The folder is a valid `llama` model in bf16: configuration, a tokenizer of two tokens, one file of
//! weights. Its text is noise.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value, json};

use crate::random_gguf::{Fill, HoledWriter, Random, RandomModel, pieces};

/// Weights made at a time.
const WEIGHTS_PER_PIECE: u64 = 1 << 15;
/// Bytes of a weight.
const BF16_BYTES: u64 = 2;
/// Sign and lower bits of four bf16 are random, their exponents are those of 2^-7: weights lie around
/// 0.
const RANDOM_BITS: u64 = 0x807F_807F_807F_807F;
const FIXED_BITS: u64 = 0x3C00_3C00_3C00_3C00;

/// Name and shape of a tensor.
type Tensor = (String, Vec<u64>);

/// Writes the model into a new folder and returns the size of its weights' file, in bytes.
///
/// # Errors
/// What the system reports, for example that the folder exists or the disk is full.
pub fn write(model: &RandomModel, dir: &Path, fill: Fill) -> io::Result<u64> {
    fs::create_dir(dir)?;
    fs::write(dir.join("config.json"), config(model).to_string())?;
    fs::write(dir.join("tokenizer.json"), tokenizer().to_string())?;
    let tensors = tensors(model);
    let mut out = HoledWriter::create(&dir.join("model.safetensors"))?;
    out.write(&header(&tensors))?;
    let mut random = Random::new();
    let mut piece = Vec::new();
    for (_, shape) in &tensors {
        let is_norm = shape.len() == 1;
        for (number, n_weights) in pieces(shape.iter().product(), WEIGHTS_PER_PIECE) {
            if fill.is_hole(number) && !is_norm {
                out.skip(n_weights * BF16_BYTES)?;
                continue;
            }
            piece.clear();
            for _ in 0..n_weights / 4 {
                let weights = random.next() & RANDOM_BITS | FIXED_BITS;
                piece.extend(weights.to_le_bytes());
            }
            out.write(&piece)?;
        }
    }
    out.finish()
}

fn tensors(model: &RandomModel) -> Vec<Tensor> {
    let (hidden, ffn, kv, vocab) =
        (model.hidden_dim, model.ffn_dim, model.kv_dim(), model.vocab_size);
    let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![vocab, hidden])];
    for layer in 0..model.n_layers {
        let mut put = |part: &str, shape: Vec<u64>| {
            tensors.push((format!("model.layers.{layer}.{part}.weight"), shape));
        };
        put("input_layernorm", vec![hidden]);
        put("self_attn.q_proj", vec![hidden, hidden]);
        put("self_attn.k_proj", vec![kv, hidden]);
        put("self_attn.v_proj", vec![kv, hidden]);
        put("self_attn.o_proj", vec![hidden, hidden]);
        put("post_attention_layernorm", vec![hidden]);
        put("mlp.gate_proj", vec![ffn, hidden]);
        put("mlp.up_proj", vec![ffn, hidden]);
        put("mlp.down_proj", vec![hidden, ffn]);
    }
    tensors.push(("model.norm.weight".to_owned(), vec![hidden]));
    tensors.push(("lm_head.weight".to_owned(), vec![vocab, hidden]));
    tensors
}

/// The header of a safetensors file: its length, and where every tensor lies.
fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut entries = Map::new();
    let mut begin = 0;
    for (name, shape) in tensors {
        let end = begin + shape.iter().product::<u64>() * BF16_BYTES;
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]});
        entries.insert(name.clone(), entry);
        begin = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

fn config(model: &RandomModel) -> Value {
    json!({
        "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "hidden_size": model.hidden_dim, "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.n_layers, "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads, "vocab_size": model.vocab_size,
        "max_position_embeddings": 4096, "tie_word_embeddings": false, "eos_token_id": 1,
    })
}

fn tokenizer() -> Value {
    json!({
        "version": "1.0",
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    })
}

#[cfg(test)]
mod tests {
    use stagebus_shards::{ShardRequest, shard};

    use super::*;

    #[test]
    fn a_small_one_can_be_sharded() {
        let model = RandomModel {
            n_layers: 2,
            hidden_dim: 128,
            ffn_dim: 384,
            n_heads: 4,
            n_kv_heads: 2,
            vocab_size: 320,
        };
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path().join("model");
        let bytes = write(&model, &dir, Fill::Sparse).expect("written");
        let n_weights = 2 * (model.layer_weights() + model.vocab_size * 128) + 5 * 128;
        assert!(bytes > n_weights * 2 && bytes < n_weights * 2 + 10_000, "{bytes}");
        let request = ShardRequest::new(dir, folder.path().join("set"), 2);
        let manifest = shard(&request, &mut |_| {}).expect("a shard set");
        assert_eq!((manifest.n_stages(), manifest.dims.vocab_size), (2, 320));
    }
}
