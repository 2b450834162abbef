//! The toy model: pure functions of 64-bit row states.

use std::ops::Range;

use stagebus_shards::Manifest;

use crate::stage::StageSpec;

/// Numbers of a hidden state that carry the row's state, one byte each.
const STATE_DIM: usize = 8;

/// Sets the head apart from the layers.
const HEAD_SALT: u64 = 0x6865_6164;

/// Sets the embedding apart from the layers.
const EMBED_SALT: u64 = 0x656d_6265;

/// A deterministic toy model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestModel {
    /// Layers; at least the number of stages.
    pub n_layers: usize,
    /// Width of a hidden state, at least 8.
    pub hidden_dim: usize,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub context_length: usize,
    /// Another seed is another model.
    pub seed: u64,
}

impl Default for TestModel {
    fn default() -> Self {
        Self { n_layers: 6, hidden_dim: 16, vocab_size: 258, context_length: 4096, seed: 1 }
    }
}

impl TestModel {
    /// A toy with the dimensions of a real model and a seed from its fingerprint: every worker
    /// with the same shard set computes the same toy.
    #[must_use]
    pub fn from_manifest(manifest: &Manifest) -> Self {
        let seed = manifest.fingerprint.bytes().fold(0, |seed, byte| mix(seed ^ u64::from(byte)));
        let dims = &manifest.dims;
        Self {
            n_layers: dims.n_layers,
            hidden_dim: dims.hidden_dim.max(STATE_DIM),
            vocab_size: dims.vocab_size,
            context_length: dims.context_length,
            seed,
        }
    }

    /// The specification of a stage with these layers.
    #[must_use]
    pub fn stage(&self, layers: Range<usize>) -> StageSpec {
        StageSpec {
            layers,
            n_layers: self.n_layers,
            hidden_dim: self.hidden_dim,
            n_kv_heads: 1,
            head_dim: 1,
            vocab_size: self.vocab_size,
            n_head_rows: self.vocab_size,
            context_length: self.context_length,
        }
    }

    /// The `n` tokens that greedy decoding gives after `prompt`, computed without any backend.
    ///
    /// **Example**: an answer over any number of stages must equal `expected(&prompt, 20)`.
    #[must_use]
    pub fn expected(&self, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut chains = vec![0; self.n_layers];
        let mut last = 0;
        let mut append = |position: usize, token: u32| {
            let mut state = self.embed(token);
            for (layer, chain) in chains.iter_mut().enumerate() {
                *chain = next_chain(*chain, state, token);
                state = self.layer(layer, *chain, position);
            }
            state
        };
        for (position, &token) in prompt.iter().enumerate() {
            last = append(position, token);
        }
        let mut tokens = Vec::with_capacity(n);
        for position in prompt.len()..prompt.len() + n {
            let token = self.token(last);
            tokens.push(token);
            last = append(position, token);
        }
        tokens
    }

    /// State of a row that enters the first layer.
    pub(super) fn embed(&self, token: u32) -> u64 {
        mix(self.seed ^ EMBED_SALT ^ (u64::from(token) << 32))
    }

    /// State of a row behind a layer: `chain` holds all rows up to and with this one.
    pub(super) fn layer(&self, layer: usize, chain: u64, position: usize) -> u64 {
        mix(mix(self.seed ^ layer as u64) ^ mix(chain ^ position as u64))
    }

    /// The token that a row's final state chooses.
    pub(super) fn token(&self, state: u64) -> u32 {
        (mix(state ^ self.seed ^ HEAD_SALT) % self.vocab_size as u64) as u32
    }

    /// Appends the logits of a final state: noise below 1, and 2 at the chosen token.
    pub(super) fn push_logits(&self, state: u64, logits: &mut Vec<f32>) {
        let start = logits.len();
        let noise = (0..self.vocab_size as u64).map(|id| {
            let sixteen_bits = (mix(state.wrapping_add(id)) >> 48) as u16;
            f32::from(sixteen_bits) / 65536.0
        });
        logits.extend(noise);
        logits[start + self.token(state) as usize] = 2.0;
    }

    /// Appends the hidden state of a row.
    pub(super) fn push_hidden(&self, state: u64, hidden: &mut Vec<f32>) {
        hidden.extend((0..self.hidden_dim).map(|i| hidden_at(state, i)));
    }

    /// Reads the hidden state of a row. Numbers that no state gives change the result.
    pub(super) fn read_hidden(&self, row: &[f32]) -> u64 {
        let bytes: [u8; STATE_DIM] = std::array::from_fn(|i| row[i] as u8);
        let written = u64::from_le_bytes(bytes);
        let damaged = |state: u64, (i, value): (usize, &f32)| {
            let bits = value.to_bits();
            if bits == hidden_at(written, i).to_bits() {
                state
            } else {
                mix(state ^ (u64::from(bits) << 16) ^ i as u64)
            }
        };
        row.iter().enumerate().fold(written, damaged)
    }
}

/// Adds a row to what a layer has seen of a session. The token counts in every layer, so that a
/// later stage that is told other tokens than the first one gives another answer.
pub(super) fn next_chain(chain: u64, state: u64, token: u32) -> u64 {
    mix(chain.rotate_left(17) ^ state ^ (u64::from(token) << 24))
}

/// Number `i` of the hidden state that carries `state`.
fn hidden_at(state: u64, i: usize) -> f32 {
    let bytes = state.to_le_bytes();
    let byte = bytes.get(i).copied().unwrap_or_else(|| mix(state ^ i as u64) as u8);
    f32::from(byte)
}

/// A mixing function with good diffusion (the finaliser of SplitMix64).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
