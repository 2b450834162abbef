//! What a worker is: its place in the pipeline and the shape of what it accepts.

use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::subjects::Subjects;

/// The stage that a worker serves, fixed for the life of the process.
#[derive(Debug, Clone)]
pub(crate) struct Stage {
    /// This start of this worker.
    pub worker: WorkerId,
    /// Model served.
    pub model: ModelName,
    /// Subjects of the model.
    pub subjects: Subjects,
    /// Fingerprint of the shard set.
    pub fingerprint: String,
    /// Place in the pipeline.
    pub index: StageIndex,
    /// Stages of the shard set.
    pub n_stages: u16,
    /// First layer of the stage.
    pub first_layer: u32,
    /// Layer after the last one of the stage.
    pub end_layer: u32,
    /// Elements per row of the hidden states.
    pub hidden_dim: usize,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Tokens that end a text.
    pub eos_ids: Vec<u32>,
    /// Most positions of a session.
    pub context_length: usize,
}

impl Stage {
    /// Returns true for the stage that takes token ids.
    pub(crate) fn is_first(&self) -> bool {
        self.index == StageIndex::FIRST
    }

    /// Returns true for the stage that gives logits.
    pub(crate) fn is_last(&self) -> bool {
        self.index.index() + 1 == usize::from(self.n_stages)
    }
}
