//! Writes large GGUF files of random weights, to see what sharding them costs.
//!
//! The file is a valid `llama` model: real metadata, a byte-level tokenizer, blocks whose scales are
//! small numbers and whose quants are random. Its text is noise. Blocks are made and written piece
//! by piece, so the writer's memory does not depend on the file.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::Path;

/// Bytes of one Q4_1 block: two f16 (scale, minimum) and 32 quants of 4 bits.
const BLOCK_BYTES: u64 = 20;
/// Weights of one block.
const BLOCK_LEN: u64 = 32;
/// GGUF's numbers for tensor types.
const F32: u32 = 0;
const Q4_1: u32 = 3;
/// Scale and minimum of every block as f16 bits: 2^-9 and -2^-6, so that weights lie around 0.
const SCALE_BITS: [u8; 2] = 0x1800_u16.to_le_bytes();
const MINIMUM_BITS: [u8; 2] = 0xA400_u16.to_le_bytes();
/// Alignment of tensor data.
const ALIGNMENT: u64 = 32;
/// Blocks made at a time.
const BLOCKS_PER_PIECE: u64 = 4096;
/// Of so many pieces a sparse file has one.
pub const SPARSE_PIECES: u64 = 64;
/// Control tokens in front of the 256 byte tokens.
const CONTROL_TOKENS: [&str; 2] = ["<s>", "</s>"];

/// Sizes of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomModel {
    /// Layers.
    pub n_layers: u64,
    /// Width of the residual stream, a multiple of 32.
    pub hidden_dim: u64,
    /// Width inside the feed-forward part, a multiple of 32.
    pub ffn_dim: u64,
    /// Attention heads.
    pub n_heads: u64,
    /// Heads of key and value.
    pub n_kv_heads: u64,
    /// Token ids, at least 258.
    pub vocab_size: u64,
}

impl RandomModel {
    /// The sizes of a 7B model with this many layers; 32 of them make 4.2 GB.
    #[must_use]
    pub const fn large(n_layers: u64) -> Self {
        Self {
            n_layers,
            hidden_dim: 4096,
            ffn_dim: 11_008,
            n_heads: 32,
            n_kv_heads: 32,
            vocab_size: 32_000,
        }
    }

    /// The sizes of Llama 2 70B with this many layers; it has 80 of them.
    #[must_use]
    pub const fn huge(n_layers: u64) -> Self {
        Self {
            n_layers,
            hidden_dim: 8192,
            ffn_dim: 28_672,
            n_heads: 64,
            n_kv_heads: 8,
            vocab_size: 32_000,
        }
    }

    /// Width of keys and of values.
    #[must_use]
    pub const fn kv_dim(&self) -> u64 {
        self.hidden_dim / self.n_heads * self.n_kv_heads
    }

    /// Weights in the matrices of a layer.
    #[must_use]
    pub const fn layer_weights(&self) -> u64 {
        self.hidden_dim * (2 * self.hidden_dim + 2 * self.kv_dim() + 3 * self.ffn_dim)
    }

    /// Writes the model to a new file and returns its size in bytes.
    ///
    /// # Errors
    /// What the system reports, for example that the file exists or the disk is full.
    pub fn write(&self, path: &Path, fill: Fill) -> io::Result<u64> {
        let tensors = self.tensors();
        let mut out = HoledWriter::create(path)?;
        out.write(&self.header(&tensors))?;
        let mut random = Random::new();
        for tensor in &tensors {
            out.pad()?;
            tensor.write(&mut out, &mut random, fill)?;
        }
        out.finish()
    }

    fn tensors(&self) -> Vec<Tensor> {
        let (hidden, ffn) = (self.hidden_dim, self.ffn_dim);
        let matrix = |name: String, n_rows, n_cols| Tensor { name, n_rows, n_cols, kind: Q4_1 };
        let norm = |name: String| Tensor { name, n_rows: 1, n_cols: hidden, kind: F32 };
        let mut tensors = vec![matrix("token_embd.weight".to_owned(), self.vocab_size, hidden)];
        for layer in 0..self.n_layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            tensors.push(norm(name("attn_norm")));
            for (part, n_rows) in [
                ("attn_q", hidden),
                ("attn_k", self.kv_dim()),
                ("attn_v", self.kv_dim()),
                ("attn_output", hidden),
            ] {
                tensors.push(matrix(name(part), n_rows, hidden));
            }
            tensors.push(norm(name("ffn_norm")));
            tensors.push(matrix(name("ffn_gate"), ffn, hidden));
            tensors.push(matrix(name("ffn_up"), ffn, hidden));
            tensors.push(matrix(name("ffn_down"), hidden, ffn));
        }
        tensors.push(norm("output_norm.weight".to_owned()));
        tensors.push(matrix("output.weight".to_owned(), self.vocab_size, hidden));
        tensors
    }

    /// Everything before the tensors' data.
    fn header(&self, tensors: &[Tensor]) -> Vec<u8> {
        let mut metadata = Metadata::default();
        let number = |value: u64| Value::U32(value as u32);
        metadata.put("general.architecture", &Value::Text("llama"));
        metadata.put("llama.block_count", &number(self.n_layers));
        metadata.put("llama.context_length", &number(4096));
        metadata.put("llama.embedding_length", &number(self.hidden_dim));
        metadata.put("llama.feed_forward_length", &number(self.ffn_dim));
        metadata.put("llama.attention.head_count", &number(self.n_heads));
        metadata.put("llama.attention.head_count_kv", &number(self.n_kv_heads));
        metadata.put("llama.attention.layer_norm_rms_epsilon", &Value::F32(1e-5));
        metadata.put("tokenizer.ggml.model", &Value::Text("gpt2"));
        metadata.put("tokenizer.ggml.pre", &Value::Text("gpt-2"));
        let tokens = self.vocabulary();
        let is_control = |index| index < CONTROL_TOKENS.len();
        let kinds = (0..tokens.len()).map(|index| if is_control(index) { 3 } else { 1 });
        metadata.put("tokenizer.ggml.tokens", &Value::Texts(&tokens));
        metadata.put("tokenizer.ggml.token_type", &Value::I32s(&kinds.collect::<Vec<i32>>()));
        metadata.put("tokenizer.ggml.merges", &Value::Texts(&["! !".to_owned()]));
        metadata.put("tokenizer.ggml.bos_token_id", &number(0));
        metadata.put("tokenizer.ggml.eos_token_id", &number(1));

        let mut header = b"GGUF".to_vec();
        header.extend(3_u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend(metadata.n_entries.to_le_bytes());
        header.extend(metadata.bytes);
        let mut offset = 0_u64;
        for tensor in tensors {
            put_text(&mut header, &tensor.name);
            let dims: &[u64] = match tensor.kind {
                F32 => &[tensor.n_cols],
                _ => &[tensor.n_cols, tensor.n_rows],
            };
            header.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
            header.extend(tensor.kind.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
        }
        header
    }

    /// Control tokens, the 256 printable characters that stand for bytes, `!!`, then made-up words.
    fn vocabulary(&self) -> Vec<String> {
        let own = |code: &u32| matches!(code, 33..=126 | 161..=172 | 174..=255);
        let codes = (0..256).filter(own).chain(256..256 + 68);
        let bytes = codes.filter_map(char::from_u32).map(String::from);
        let mut tokens: Vec<String> = CONTROL_TOKENS.map(str::to_owned).into();
        tokens.extend(bytes);
        tokens.push("!!".to_owned());
        let n_made = self.vocab_size.saturating_sub(tokens.len() as u64);
        tokens.extend((0..n_made).map(|number| format!("word{number}")));
        tokens
    }
}

/// A tensor in the making.
#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    n_rows: u64,
    n_cols: u64,
    kind: u32,
}

impl Tensor {
    fn n_blocks(&self) -> u64 {
        self.n_rows * self.n_cols / BLOCK_LEN
    }

    fn bytes(&self) -> u64 {
        match self.kind {
            F32 => self.n_rows * self.n_cols * 4,
            _ => self.n_blocks() * BLOCK_BYTES,
        }
    }

    fn write(&self, out: &mut HoledWriter, random: &mut Random, fill: Fill) -> io::Result<()> {
        if self.kind == F32 {
            return out.write(&1_f32.to_le_bytes().repeat(self.n_cols as usize));
        }
        let mut piece = Vec::new();
        for (number, n_blocks) in pieces(self.n_blocks(), BLOCKS_PER_PIECE) {
            if fill.is_hole(number) {
                out.skip(n_blocks * BLOCK_BYTES)?;
                continue;
            }
            piece.clear();
            for _ in 0..n_blocks {
                piece.extend(SCALE_BITS);
                piece.extend(MINIMUM_BITS);
                piece.extend(random.next().to_le_bytes());
                piece.extend(random.next().to_le_bytes());
            }
            out.write(&piece)?;
        }
        Ok(())
    }
}

/// Pieces of at most `size` out of `total`: their numbers from 0 on, and their sizes.
pub(crate) fn pieces(total: u64, size: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..total.div_ceil(size)).map(move |number| (number, size.min(total - number * size)))
}

/// How much of a matrix is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// All of it.
    Whole,
    /// Every 64th piece; the others are holes, which read as zeros and take no room where the file
    /// system knows them.
    Sparse,
}

impl Fill {
    pub(crate) fn is_hole(self, piece: u64) -> bool {
        self == Self::Sparse && !piece.is_multiple_of(SPARSE_PIECES)
    }
}

/// A xorshift generator: quick, and good enough for weights that mean nothing.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) const fn new() -> Self {
        Self(0x5354_4147_4542_5553)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// A metadata value.
enum Value<'a> {
    U32(u32),
    F32(f32),
    Text(&'a str),
    Texts(&'a [String]),
    I32s(&'a [i32]),
}

#[derive(Debug, Default)]
struct Metadata {
    n_entries: u64,
    bytes: Vec<u8>,
}

impl Metadata {
    /// Appends an entry, with the numbers that GGUF gives to value types.
    fn put(&mut self, key: &str, value: &Value<'_>) {
        const TYPE_U32: u32 = 4;
        const TYPE_I32: u32 = 5;
        const TYPE_F32: u32 = 6;
        const TYPE_TEXT: u32 = 8;
        const TYPE_ARRAY: u32 = 9;
        self.n_entries += 1;
        let out = &mut self.bytes;
        put_text(out, key);
        let head = |out: &mut Vec<u8>, kind: u32| out.extend(kind.to_le_bytes());
        match value {
            Value::U32(number) => {
                head(out, TYPE_U32);
                out.extend(number.to_le_bytes());
            }
            Value::F32(number) => {
                head(out, TYPE_F32);
                out.extend(number.to_le_bytes());
            }
            Value::Text(text) => {
                head(out, TYPE_TEXT);
                put_text(out, text);
            }
            Value::Texts(texts) => {
                head(out, TYPE_ARRAY);
                head(out, TYPE_TEXT);
                out.extend((texts.len() as u64).to_le_bytes());
                texts.iter().for_each(|text| put_text(out, text));
            }
            Value::I32s(numbers) => {
                head(out, TYPE_ARRAY);
                head(out, TYPE_I32);
                out.extend((numbers.len() as u64).to_le_bytes());
                numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
            }
        }
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Writes a new file that may have holes.
#[derive(Debug)]
pub(crate) struct HoledWriter {
    inner: BufWriter<File>,
    /// Bytes so far, holes among them.
    bytes: u64,
}

impl HoledWriter {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { inner: BufWriter::new(File::create_new(path)?), bytes: 0 })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        self.inner.write_all(bytes)
    }

    pub(crate) fn skip(&mut self, n_bytes: u64) -> io::Result<()> {
        self.bytes += n_bytes;
        self.inner.seek(SeekFrom::Start(self.bytes)).map(drop)
    }

    fn pad(&mut self) -> io::Result<()> {
        let n_zeros = self.bytes.next_multiple_of(ALIGNMENT) - self.bytes;
        self.write(&vec![0; n_zeros as usize])
    }

    /// The size of the file, which may end with a hole.
    pub(crate) fn finish(mut self) -> io::Result<u64> {
        self.inner.flush()?;
        self.inner.get_ref().set_len(self.bytes)?;
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use stagebus_shards::gguf::Gguf;
    use stagebus_shards::{ShardRequest, shard};

    use super::*;

    const SMALL: RandomModel = RandomModel {
        n_layers: 2,
        hidden_dim: 64,
        ffn_dim: 96,
        n_heads: 2,
        n_kv_heads: 1,
        vocab_size: 300,
    };

    #[test]
    fn a_small_one_can_be_read_and_sharded() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("random.gguf");
        let sparse = SMALL.write(&folder.path().join("sparse.gguf"), Fill::Sparse);
        let bytes = SMALL.write(&path, Fill::Whole).expect("written");
        assert_eq!(sparse.expect("written"), bytes);
        assert_eq!(std::fs::metadata(&path).expect("the file").len(), bytes);
        let gguf = Gguf::open(&path).expect("a valid file");
        assert_eq!(gguf.metadata().u32("llama.block_count").expect("a number"), 2);
        drop(gguf);
        let request = ShardRequest::new(path, folder.path().join("set"), 2);
        let manifest = shard(&request, &mut |_| {}).expect("a shard set");
        assert_eq!((manifest.n_stages(), manifest.dims.vocab_size), (2, 300));
    }

    #[test]
    fn the_large_one_is_as_large_as_promised() {
        let bytes = |n_layers| -> u64 {
            RandomModel::large(n_layers).tensors().iter().map(Tensor::bytes).sum()
        };
        assert!(bytes(32) >= 4_000_000_000, "{}", bytes(32));
        assert!(bytes(4) < bytes(32) / 5);
    }

    #[test]
    fn pieces_add_up_and_a_sparse_file_has_one_in_64() {
        let all: Vec<_> = pieces(130 * 10 + 3, 10).collect();
        assert_eq!(all.iter().map(|(_, size)| size).sum::<u64>(), 1303);
        let written = all.iter().filter(|(number, _)| !Fill::Sparse.is_hole(*number));
        assert_eq!(written.count(), 3);
        assert!(all.iter().all(|(number, _)| !Fill::Whole.is_hole(*number)));
    }
}
