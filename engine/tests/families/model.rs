//! A reference, and the model files that it stands for.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use stagebus_shards::{Form, ShardRequest, ShardSet, shard};
use tempfile::TempDir;

use crate::gguf_writer::{GgufWriter, MetaValue};

/// Numbers of ggml's types.
const GGML_F32: u32 = 0;
const GGML_F16: u32 = 1;

/// Which kind of model file.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Format {
    Folder,
    Gguf,
}

/// What transformers computes with a model, and what the model is made of.
pub(crate) struct Reference {
    content: Value,
    pub(crate) prompt: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
    /// Rows over prompt and tokens, and their logits.
    pub(crate) logits: Vec<(usize, Vec<f32>)>,
}

/// A shard set in a folder of its own.
pub(crate) struct Shards {
    pub(crate) set: ShardSet,
    _folder: TempDir,
}

/// A tensor by its name in a folder; rows first.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Reference {
    pub(crate) fn read(name: &str) -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/families");
        let json = fs::read(dir.join(format!("{name}.json"))).unwrap();
        let content: Value = serde_json::from_slice(&json).unwrap();
        let ids = |key: &str| -> Vec<u32> { serde_json::from_value(content[key].clone()).unwrap() };
        let (prompt, tokens) = (ids("prompt"), ids("tokens"));
        let logits = serde_json::from_value(content["logits"].clone()).unwrap();
        Self { prompt, tokens, logits, content }
    }

    pub(crate) fn n_layers(&self) -> usize {
        self.content["config"]["num_hidden_layers"].as_u64().unwrap() as usize
    }

    pub(crate) fn has_gguf(&self) -> bool {
        !self.content["gguf"].is_null()
    }

    /// Writes the model file and shards it.
    pub(crate) fn shard(&self, format: Format, n_stages: usize, form: Form) -> Shards {
        let folder = tempfile::tempdir().unwrap();
        let source = match format {
            Format::Folder => self.write_folder(&folder.path().join("model")),
            Format::Gguf => self.write_gguf(&folder.path().join("model.gguf")),
        };
        let request = ShardRequest::new(source, folder.path().join("set"), n_stages);
        let request = ShardRequest { form, ..request };
        shard(&request, &mut |_| {}).unwrap_or_else(|error| panic!("{format:?}: {error}"));
        Shards { set: ShardSet::open(&request.out_dir).unwrap(), _folder: folder }
    }

    fn tensors(&self) -> Vec<Tensor> {
        let norm_base = self.content["norm_base"].as_f64().unwrap() as f32;
        let entries: Vec<(String, Vec<usize>)> =
            serde_json::from_value(self.content["tensors"].clone()).unwrap();
        let tensor = |(name, shape): (String, Vec<usize>)| {
            let values = values(&name, &shape, norm_base);
            Tensor { name, shape, values }
        };
        entries.into_iter().map(tensor).collect()
    }

    /// `config.json`, a tokenizer, and the weights in two files with an index: matrices in bf16.
    fn write_folder(&self, dir: &Path) -> PathBuf {
        fs::create_dir(dir).unwrap();
        fs::write(dir.join("config.json"), self.content["config"].to_string()).unwrap();
        fs::write(dir.join("tokenizer.json"), tokenizer().to_string()).unwrap();
        let tensors = self.tensors();
        let mut weight_map = Map::new();
        let halves = tensors.split_at(tensors.len() / 2);
        for (number, half) in [halves.0, halves.1].into_iter().enumerate() {
            let name = format!("model-{:05}-of-00002.safetensors", number + 1);
            fs::write(dir.join(&name), safetensors(half)).unwrap();
            weight_map.extend(half.iter().map(|tensor| (tensor.name.clone(), json!(name))));
        }
        let index = json!({"metadata": {}, "weight_map": weight_map});
        fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        dir.to_owned()
    }

    /// The file that llama.cpp's converter would write, matrices in f16.
    fn write_gguf(&self, path: &Path) -> PathBuf {
        let gguf = &self.content["gguf"];
        let architecture = gguf["architecture"].as_str().unwrap();
        let mut file =
            GgufWriter::default().meta("general.architecture", MetaValue::str(architecture));
        for (key, value) in gguf["metadata"].as_object().unwrap() {
            file = file.meta(key, meta_value(value));
        }
        file = with_tokenizer(file);
        let tensors = self.tensors();
        for entry in gguf["tensors"].as_array().unwrap() {
            let (name, how) = (entry[0].as_str().unwrap(), entry[1].as_str().unwrap());
            let sources: Vec<&Tensor> = entry[2]
                .as_array()
                .unwrap()
                .iter()
                .map(|name| tensors.iter().find(|tensor| *tensor.name == *name).unwrap())
                .collect();
            let (shape, values) = converted(how, &sources);
            let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
            file = match dims.len() {
                1 => file.tensor(name, GGML_F32, &dims, f32_bytes(&values)),
                _ => file.tensor(name, GGML_F16, &dims, f16_bytes(&values)),
            };
        }
        for (name, values) in gguf["values"].as_object().unwrap() {
            let values: Vec<f32> = serde_json::from_value(values.clone()).unwrap();
            let dims = [values.len() as u64];
            file = file.tensor(name, GGML_F32, &dims, f32_bytes(&values));
        }
        fs::write(path, file.bytes()).unwrap();
        path.to_owned()
    }
}

/// What the converter makes of tensors: shape (rows first) and values.
fn converted(how: &str, sources: &[&Tensor]) -> (Vec<usize>, Vec<f32>) {
    let first = sources[0];
    let (shape, mut values) = (first.shape.clone(), first.values.clone());
    match how.split_once(' ').unwrap_or((how, "")) {
        ("same", _) => (shape, values),
        ("add", _) => {
            values.iter_mut().for_each(|value| *value += 1.0);
            (shape, values)
        }
        ("stack", _) => {
            let shape = [&[sources.len()], &shape[..]].concat();
            (shape, sources.iter().flat_map(|source| source.values.clone()).collect())
        }
        // The two rows of a rotary pair, half a head apart, become neighbours.
        ("pair", n_heads) => {
            let (n_cols, half) = (shape[1], shape[0] / n_heads.parse::<usize>().unwrap() / 2);
            let mut paired = Vec::with_capacity(values.len());
            for row in 0..shape[0] {
                let (head, within) = (row / (2 * half), row % (2 * half));
                let source = head * 2 * half + within / 2 + (within % 2) * half;
                paired.extend_from_slice(&values[source * n_cols..][..n_cols]);
            }
            (shape, paired)
        }
        other => panic!("{other:?}"),
    }
}

/// A tensor's values, which follow from its name; see `weights` in `tools/references/generate.py`.
fn values(name: &str, shape: &[usize], norm_base: f32) -> Vec<f32> {
    let state = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let (base, divisor) = match shape.len() {
        1 if name.ends_with("norm.weight") => (norm_base, 512.0),
        1 => (0.0, 512.0),
        _ => (0.0, 1024.0),
    };
    let n: usize = shape.iter().product();
    (1..=n as u64)
        .map(|place| {
            let mut z = state.wrapping_add(place.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            base + (((z ^ (z >> 31)) >> 56) as f32 - 128.0) / divisor
        })
        .collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Every value of a matrix is exact in f16 and in bf16.
fn f16_bytes(values: &[f32]) -> Vec<u8> {
    // A whole number of at most seven bits over 1024: an f32's exponent and first bits, moved.
    let bits = |value: &f32| match value.to_bits() {
        bits if bits << 1 == 0 => 0_u16,
        bits => {
            let exponent = (bits >> 23 & 0xff) + 15 - 127;
            ((bits >> 16 & 0x8000) | exponent << 10 | (bits >> 13 & 0x3ff)) as u16
        }
    };
    values.iter().flat_map(|value| bits(value).to_le_bytes()).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors {
        let start = data.len();
        let dtype = if tensor.shape.len() == 1 { "F32" } else { "BF16" };
        match dtype {
            "F32" => data.extend(f32_bytes(&tensor.values)),
            _ => data.extend(bf16_bytes(&tensor.values)),
        }
        let offsets = [start, data.len()];
        let entry = json!({"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets});
        header.insert(tensor.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

fn meta_value(value: &Value) -> MetaValue {
    match value {
        Value::String(text) => MetaValue::str(text),
        Value::Number(number) if number.is_u64() => MetaValue::U32(number.as_u64().unwrap() as u32),
        Value::Number(number) => MetaValue::F32(number.as_f64().unwrap() as f32),
        other => panic!("{other}"),
    }
}

/// A few tokens: models are fed with ids here.
fn with_tokenizer(file: GgufWriter) -> GgufWriter {
    let kinds = [1, 1, 1, 3].map(MetaValue::I32).to_vec();
    file.meta("tokenizer.ggml.model", MetaValue::str("gpt2"))
        .meta("tokenizer.ggml.pre", MetaValue::str("gpt-2"))
        .meta("tokenizer.ggml.tokens", MetaValue::strs(["a", "b", "ab", "<end>"]))
        .meta("tokenizer.ggml.token_type", MetaValue::Array(kinds))
        .meta("tokenizer.ggml.merges", MetaValue::strs(["a b"]))
        .meta("tokenizer.ggml.eos_token_id", MetaValue::U32(3))
}

fn tokenizer() -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [], "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
                  "continuing_subword_prefix": null, "end_of_word_suffix": null,
                  "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": {"a": 0, "b": 1}, "merges": []},
    })
}
