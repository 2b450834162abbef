//! Writes `llama` GGUF files of any size, filled with random quantised blocks.
//!
//! A file is streamed: a model of many gigabytes takes no more memory than one buffer.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use half::f16;
use stagebus_shards::gguf::GgmlType;

/// The sizes and types of a made-up model.
#[derive(Clone, Debug)]
pub(crate) struct Synthetic {
    pub(crate) n_layers: u64,
    pub(crate) hidden_dim: u64,
    pub(crate) n_heads: u64,
    pub(crate) n_kv_heads: u64,
    pub(crate) ffn_dim: u64,
    pub(crate) vocab_size: u64,
    /// Type of the layers' matrices.
    pub(crate) layer_type: GgmlType,
    /// Type of the embedding table and of the head.
    pub(crate) table_type: GgmlType,
    /// Whether the head is the embedding table.
    pub(crate) tied: bool,
    /// Whether projections have biases.
    pub(crate) biased: bool,
    /// `general.architecture`, also the prefix of the keys.
    pub(crate) architecture: &'static str,
    /// Tensors that are written with another type or number of rows, to be refused.
    pub(crate) wrong: Option<Wrong>,
}

/// What is wrong with one tensor.
#[derive(Clone, Debug)]
pub(crate) enum Wrong {
    Type(&'static str, GgmlType),
    Rows(&'static str, u64),
    Missing(&'static str),
}

impl Default for Synthetic {
    fn default() -> Self {
        Self {
            n_layers: 3,
            hidden_dim: 256,
            n_heads: 4,
            n_kv_heads: 2,
            ffn_dim: 512,
            vocab_size: 320,
            layer_type: GgmlType::Q4_K,
            table_type: GgmlType::Q6_K,
            tied: true,
            biased: false,
            architecture: "llama",
            wrong: None,
        }
    }
}

struct Tensor {
    name: String,
    ggml_type: GgmlType,
    /// Columns first; a vector has one dimension.
    dims: Vec<u64>,
}

impl Tensor {
    fn n_bytes(&self) -> u64 {
        let n: u64 = self.dims.iter().product();
        n / self.ggml_type.block_len() * self.ggml_type.block_bytes()
    }
}

impl Synthetic {
    /// A model of about this many bytes with matrices of a fixed size, so that only the number of
    /// layers grows.
    pub(crate) fn of_bytes(n_bytes: u64) -> Self {
        let mut model = Self {
            hidden_dim: 2048,
            n_heads: 32,
            n_kv_heads: 8,
            ffn_dim: 8192,
            vocab_size: 32_000,
            n_layers: 1,
            ..Self::default()
        };
        let size = |model: &Self| model.tensors().iter().map(Tensor::n_bytes).sum::<u64>();
        let one = size(&model);
        model.n_layers = 2;
        let layer = size(&model) - one;
        model.n_layers = (n_bytes.saturating_sub(one) / layer + 1).max(1);
        model
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let tensors = self.tensors();
        let mut header = b"GGUF".to_vec();
        header.extend(3_u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        self.write_metadata(&mut header);
        let mut offset = 0_u64;
        for tensor in &tensors {
            write_str(&mut header, &tensor.name);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
            header.extend((tensor.ggml_type as u32).to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.n_bytes().next_multiple_of(32);
        }
        header.resize(header.len().next_multiple_of(32), 0);
        let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
        out.write_all(&header)?;
        let mut random = Random(0x5eed);
        for tensor in &tensors {
            write_data(tensor, &mut random, &mut out)?;
        }
        out.flush()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, ffn) = (self.hidden_dim, self.ffn_dim);
        let kv = hidden / self.n_heads * self.n_kv_heads;
        let mut tensors = vec![
            self.matrix("token_embd.weight".to_owned(), self.vocab_size, hidden, self.table_type),
            vector("output_norm.weight".to_owned(), hidden),
        ];
        if !self.tied {
            tensors.push(self.matrix(
                "output.weight".to_owned(),
                self.vocab_size,
                hidden,
                self.table_type,
            ));
        }
        for layer in 0..self.n_layers {
            let shapes = [
                ("attn_q", hidden, hidden),
                ("attn_k", kv, hidden),
                ("attn_v", kv, hidden),
                ("attn_output", hidden, hidden),
                ("ffn_gate", ffn, hidden),
                ("ffn_up", ffn, hidden),
                ("ffn_down", hidden, ffn),
            ];
            for norm in ["attn_norm", "ffn_norm"] {
                tensors.push(vector(format!("blk.{layer}.{norm}.weight"), hidden));
            }
            for (part, rows, cols) in shapes {
                let name = format!("blk.{layer}.{part}.weight");
                tensors.push(self.matrix(name, rows, cols, self.layer_type));
                if self.biased {
                    tensors.push(vector(format!("blk.{layer}.{part}.bias"), rows));
                }
            }
        }
        if let Some(Wrong::Missing(name)) = self.wrong {
            tensors.retain(|tensor| tensor.name != name);
        }
        tensors
    }

    fn matrix(&self, name: String, rows: u64, cols: u64, ggml_type: GgmlType) -> Tensor {
        let (mut rows, mut ggml_type) = (rows, ggml_type);
        match self.wrong {
            Some(Wrong::Type(wrong, found)) if wrong == name => ggml_type = found,
            Some(Wrong::Rows(wrong, found)) if wrong == name => rows = found,
            _ => {}
        }
        Tensor { name, ggml_type, dims: vec![cols, rows] }
    }

    fn write_metadata(&self, out: &mut Vec<u8>) {
        let arch = self.architecture;
        let sizes = [
            ("block_count", self.n_layers),
            ("context_length", 4096),
            ("embedding_length", self.hidden_dim),
            ("feed_forward_length", self.ffn_dim),
            ("attention.head_count", self.n_heads),
            ("attention.head_count_kv", self.n_kv_heads),
        ];
        out.extend((sizes.len() as u64 + 9).to_le_bytes());
        write_str(out, "general.architecture");
        write_string_value(out, arch);
        for (key, value) in sizes {
            write_str(out, &format!("{arch}.{key}"));
            write_u32_value(out, value as u32);
        }
        write_str(out, &format!("{arch}.attention.layer_norm_rms_epsilon"));
        out.extend(6_u32.to_le_bytes());
        out.extend(1e-5_f32.to_le_bytes());
        self.write_tokenizer(out);
    }

    /// The 256 bytes, two special tokens, one merge, and names for the rest.
    fn write_tokenizer(&self, out: &mut Vec<u8>) {
        let own = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let bytes = (0..256).filter(own).chain(256..256 + 68);
        let mut tokens: Vec<String> = vec!["<s>".to_owned(), "</s>".to_owned(), "!!".to_owned()];
        tokens.extend(bytes.filter_map(char::from_u32).map(String::from));
        tokens.extend((tokens.len() as u64..self.vocab_size).map(|id| format!("<unused{id}>")));
        let kinds: Vec<i32> = tokens
            .iter()
            .map(|token| if token.starts_with('<') && token.len() > 1 { 3 } else { 1 })
            .collect();
        for (key, value) in [("model", "gpt2"), ("pre", "smollm")] {
            write_str(out, &format!("tokenizer.ggml.{key}"));
            write_string_value(out, value);
        }
        write_strings(out, "tokenizer.ggml.tokens", &tokens);
        write_str(out, "tokenizer.ggml.token_type");
        out.extend(9_u32.to_le_bytes());
        out.extend(5_u32.to_le_bytes());
        out.extend((kinds.len() as u64).to_le_bytes());
        kinds.iter().for_each(|kind| out.extend(kind.to_le_bytes()));
        write_strings(out, "tokenizer.ggml.merges", &["! !".to_owned()]);
        for (key, value) in [("bos_token_id", 0), ("eos_token_id", 1)] {
            write_str(out, &format!("tokenizer.ggml.{key}"));
            write_u32_value(out, value);
        }
    }
}

fn vector(name: String, len: u64) -> Tensor {
    Tensor { name, ggml_type: GgmlType::F32, dims: vec![len] }
}

fn write_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_string_value(out: &mut Vec<u8>, text: &str) {
    out.extend(8_u32.to_le_bytes());
    write_str(out, text);
}

fn write_u32_value(out: &mut Vec<u8>, value: u32) {
    out.extend(4_u32.to_le_bytes());
    out.extend(value.to_le_bytes());
}

fn write_strings(out: &mut Vec<u8>, key: &str, texts: &[String]) {
    write_str(out, key);
    out.extend(9_u32.to_le_bytes());
    out.extend(8_u32.to_le_bytes());
    out.extend((texts.len() as u64).to_le_bytes());
    texts.iter().for_each(|text| write_str(out, text));
}

/// A small generator (splitmix64): blocks only have to look random.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// A factor between 0.5 and 1.
    fn factor(&mut self) -> f32 {
        0.5 + (self.next() >> 40) as f32 / (1_u64 << 25) as f32
    }
}

/// Writes random blocks whose scales make weights of about 0.05, and pads.
fn write_data(tensor: &Tensor, random: &mut Random, out: &mut impl Write) -> io::Result<()> {
    let block_bytes = tensor.ggml_type.block_bytes() as usize;
    let n_blocks = tensor.n_bytes() as usize / block_bytes;
    let mut block = vec![0; block_bytes];
    for _ in 0..n_blocks {
        random.fill(&mut block);
        // Where a block keeps its f16 scale and its f16 minimum.
        let (scale, min) = match tensor.ggml_type {
            GgmlType::Q8_0 => (Some((0, 0.05 / 127.0)), None),
            GgmlType::Q4_0 => (Some((0, 0.05 / 8.0)), None),
            GgmlType::Q4_1 => (Some((0, 0.05 / 8.0)), Some((2, -0.05))),
            GgmlType::Q5_0 => (Some((0, 0.05 / 16.0)), None),
            GgmlType::Q5_1 => (Some((0, 0.05 / 16.0)), Some((2, -0.05))),
            GgmlType::Q4_K => (Some((0, 0.05 / 8.0 / 63.0)), Some((2, 0.05 / 63.0))),
            GgmlType::Q5_K => (Some((0, 0.05 / 16.0 / 63.0)), Some((2, 0.05 / 63.0))),
            GgmlType::Q6_K => (Some((208, 0.05 / 32.0 / 127.0)), None),
            GgmlType::F32 => {
                block.copy_from_slice(&random.factor().to_le_bytes());
                (None, None)
            }
            GgmlType::F16 => (Some((0, 0.05)), None),
            GgmlType::BF16 => {
                let bits = (random.factor() * 0.05).to_bits() >> 16;
                block.copy_from_slice(&(bits as u16).to_le_bytes());
                (None, None)
            }
            _ => (None, None),
        };
        for (at, size) in [scale, min].into_iter().flatten() {
            let value = f16::from_f32(size * random.factor());
            block[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        out.write_all(&block)?;
    }
    let padding = tensor.n_bytes().next_multiple_of(32) - tensor.n_bytes();
    out.write_all(&[0; 32][..padding as usize])
}
