//! The stages that the unit tests of this crate serve.

use std::sync::Arc;

use stagebus_schemas::ids::{ModelName, StageIndex, WorkerId};
use stagebus_schemas::subjects::Subjects;

use crate::stage::Stage;

/// Fingerprint of the test shard set.
pub(crate) const FINGERPRINT: &str = "f00d";

/// Elements per row of the test model.
pub(crate) const HIDDEN_DIM: usize = 4;

/// Stage `index` of `n_stages`, served by worker `w<index>`.
pub(crate) fn stage(index: u16, n_stages: u16) -> Arc<Stage> {
    let model = ModelName::new("tiny").expect("valid");
    Arc::new(Stage {
        worker: worker(index),
        subjects: Subjects::new(&model),
        model,
        fingerprint: FINGERPRINT.to_owned(),
        index: StageIndex::new(index),
        n_stages,
        first_layer: u32::from(index) * 3,
        end_layer: u32::from(index) * 3 + 3,
        hidden_dim: HIDDEN_DIM,
        vocab_size: 50,
        eos_ids: vec![],
        context_length: 64,
    })
}

/// The worker of stage `index`.
pub(crate) fn worker(index: u16) -> WorkerId {
    WorkerId::new(format!("w{index}")).expect("valid")
}
