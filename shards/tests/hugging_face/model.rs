//! Writes small model folders, right and wrong ones.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use stagebus_shards::{Manifest, ShardError, ShardRequest, shard};
use tempfile::TempDir;

pub(crate) const VOCAB_SIZE: usize = 6;
const HIDDEN_DIM: usize = 32;

/// A tensor as the header names it, and its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// The content of a model folder.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: Vec<(String, Tensor)>,
    pub(crate) rank: Option<Vec<u16>>,
    pub(crate) tokenizer: Value,
}

/// A tensor whose elements are `element(index)`.
fn tensor(dtype: &'static str, shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    let value = |idx: usize| half::f16::from_f32(((idx * 7 + 3) % 11) as f32 / 16.0 - 0.25);
    let bytes = match dtype {
        "F32" => (0..n).flat_map(|idx| value(idx).to_f32().to_le_bytes()).collect(),
        "F16" => (0..n).flat_map(|idx| value(idx).to_le_bytes()).collect(),
        "BF16" => {
            (0..n).flat_map(|idx| half::bf16::from_f32(value(idx).to_f32()).to_le_bytes()).collect()
        }
        "I8" => (0..n).map(|idx| (idx * 31 % 255) as u8).collect(),
        _ => vec![0; n],
    };
    Tensor { dtype, shape: shape.to_vec(), bytes }
}

impl Default for Folder {
    /// Two layers in every supported type, with an int8 embedding that is the head too.
    fn default() -> Self {
        let config = json!({
            "model_type": "llama", "hidden_size": HIDDEN_DIM, "num_attention_heads": 2,
            "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 48,
            "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": [4, 5],
            "bos_token_id": 4, "rope_scaling": null,
        });
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_owned(), tensor("I8", &[VOCAB_SIZE, HIDDEN_DIM])),
            ("model.embed_tokens.weight_scale".to_owned(), tensor("F32", &[VOCAB_SIZE])),
            ("model.norm.weight".to_owned(), tensor("BF16", &[HIDDEN_DIM])),
        ];
        for (layer, dtype) in [(0, "F16"), (1, "I8")] {
            let mut matrix = |part: &str, n_rows: usize, n_cols: usize| {
                let name = format!("model.layers.{layer}.{part}.weight");
                tensors.push((name.clone(), tensor(dtype, &[n_rows, n_cols])));
                if dtype == "I8" {
                    tensors.push((format!("{name}_scale"), tensor("F32", &[n_rows])));
                }
            };
            matrix("self_attn.q_proj", 32, HIDDEN_DIM);
            matrix("self_attn.k_proj", 16, HIDDEN_DIM);
            matrix("self_attn.v_proj", 16, HIDDEN_DIM);
            matrix("self_attn.o_proj", HIDDEN_DIM, 32);
            matrix("mlp.gate_proj", 48, HIDDEN_DIM);
            matrix("mlp.up_proj", 48, HIDDEN_DIM);
            matrix("mlp.down_proj", HIDDEN_DIM, 48);
            for norm in ["input_layernorm", "post_attention_layernorm"] {
                let name = format!("model.layers.{layer}.{norm}.weight");
                tensors.push((name, tensor("F32", &[HIDDEN_DIM])));
            }
        }
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [
                {"id": 4, "content": "<s>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true},
                {"id": 5, "content": "</s>", "single_word": false, "lstrip": false,
                 "rstrip": false, "normalized": false, "special": true}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
                              "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                        "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null,
                      "continuing_subword_prefix": null, "end_of_word_suffix": null,
                      "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                      "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "<s>": 4, "</s>": 5},
                      "merges": [["a", "b"]]},
        });
        let config = config.as_object().unwrap().clone();
        Self { config, tensors, rank: Some(vec![3, 0, 5, 1, 4, 2]), tokenizer }
    }
}

impl Folder {
    /// The tensor of this name.
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        let found = self.tensors.iter_mut().find(|(found, _)| found == name);
        &mut found.unwrap_or_else(|| panic!("no {name}")).1
    }

    /// The weights, with each tensor's offsets passed through `place`.
    pub(crate) fn weights(&self, place: impl Fn(&str, [u64; 2]) -> [u64; 2]) -> Vec<u8> {
        let mut header = Map::new();
        let mut data: Vec<u8> = Vec::new();
        for (name, tensor) in &self.tensors {
            let start = data.len() as u64;
            data.extend(&tensor.bytes);
            let offsets = place(name, [start, data.len() as u64]);
            let (dtype, shape) = (tensor.dtype, &tensor.shape);
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        file
    }

    /// Replaces the file of weights in a folder by two and an index.
    pub(crate) fn write_parts(&self, dir: &Path) {
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        let (first, second) = self.tensors.split_at(self.tensors.len() / 2);
        let mut map = Map::new();
        for (name, tensors) in [("a.safetensors", first), ("b.safetensors", second)] {
            let part = Self { tensors: tensors.to_vec(), ..self.clone() };
            fs::write(dir.join(name), part.weights(|_, offsets| offsets)).unwrap();
            map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": 0}, "weight_map": map}).to_string();
        fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    }

    pub(crate) fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("config.json"), Value::Object(self.config.clone()).to_string()).unwrap();
        fs::write(dir.join("model.safetensors"), self.weights(|_, offsets| offsets)).unwrap();
        fs::write(dir.join("tokenizer.json"), self.tokenizer.to_string()).unwrap();
        if let Some(rank) = &self.rank {
            let bytes: Vec<u8> = rank.iter().flat_map(|token| token.to_le_bytes()).collect();
            fs::write(dir.join("token_rank.u16"), bytes).unwrap();
        }
    }
}

pub(crate) fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

/// A folder with a model in `model`, sharded into `set`.
pub(crate) struct Workshop {
    pub(crate) dir: TempDir,
}

impl Workshop {
    pub(crate) fn new(folder: &Folder) -> Self {
        let workshop = Self { dir: TempDir::new().unwrap() };
        folder.write(&workshop.model());
        workshop
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    pub(crate) fn set(&self) -> PathBuf {
        self.dir.path().join("set")
    }

    pub(crate) fn request(&self, head_tokens: Option<usize>) -> ShardRequest {
        ShardRequest { head_tokens, ..ShardRequest::new(self.model(), self.set(), 1) }
    }

    pub(crate) fn shard(&self, head_tokens: Option<usize>) -> Result<Manifest, ShardError> {
        shard(&self.request(head_tokens), &mut |_| {})
    }

    /// The error of a model that cannot be sharded; nothing is left of the attempt.
    pub(crate) fn refused(&self) -> ShardError {
        let error = self.shard(None).unwrap_err();
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 1, "only the model is there");
        error
    }
}
