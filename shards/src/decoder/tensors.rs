//! Finds the tensors of a model and checks their shapes.

use super::config::{DecoderConfig, Experts};
use super::names::{ExpertNames, Names};
use crate::floats::{FloatCoding, FloatPlan};
use crate::shard::ShardError;
use crate::source::Source;
use crate::tensor::Tensor;
use crate::weights::rows::RowOrder;

/// A matrix that inputs are multiplied with, and its bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Projection<'a> {
    pub(crate) weight: Tensor<'a>,
    pub(crate) bias: Option<Tensor<'a>>,
    pub(crate) order: RowOrder<'a>,
    pub(crate) n_rows: usize,
}

impl<'a> Projection<'a> {
    /// A whole matrix as it is stored.
    pub(crate) fn plain(weight: Tensor<'a>) -> Self {
        Self { weight, bias: None, order: RowOrder::Plain, n_rows: weight.n_rows }
    }

    /// Source bytes of the rows (biases, which are small, left out).
    pub(crate) fn n_bytes(&self) -> usize {
        let row_bytes = self.weight.encoding.row_bytes(self.weight.n_cols);
        self.n_rows * (row_bytes + self.weight.row_scale(0).len())
    }

    /// Weights of the matrix.
    pub(crate) fn n_weights(&self) -> u64 {
        self.n_rows as u64 * self.weight.n_cols as u64
    }
}

/// The tensors of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerTensors<'a> {
    pub(crate) attention_norm: Tensor<'a>,
    /// Queries, keys and values.
    pub(crate) qkv: [Projection<'a>; 3],
    pub(crate) head_norms: Option<HeadNorms<'a>>,
    pub(crate) output: Projection<'a>,
    /// Of what attention gives.
    pub(crate) attention_output_norm: Option<Tensor<'a>>,
    pub(crate) ffn_norm: Tensor<'a>,
    pub(crate) ffn: FeedForward<'a>,
    /// Of what the feed-forward gives.
    pub(crate) ffn_output_norm: Option<Tensor<'a>>,
}

/// Norms over each head of queries and keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadNorms<'a> {
    pub(crate) q: Tensor<'a>,
    pub(crate) k: Tensor<'a>,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub(crate) enum FeedForward<'a> {
    /// One for all rows.
    Dense(Box<DenseTensors<'a>>),
    /// A few of many for each row.
    Experts(Box<ExpertTensors<'a>>),
}

/// One feed-forward.
#[derive(Clone, Debug)]
pub(crate) struct DenseTensors<'a> {
    pub(crate) gate_up: [Projection<'a>; 2],
    pub(crate) down: Projection<'a>,
}

/// A mixture of experts. Each list has all rows of all experts, one expert behind the other.
#[derive(Clone, Debug)]
pub(crate) struct ExpertTensors<'a> {
    /// What weighs the experts.
    pub(crate) router: Projection<'a>,
    pub(crate) gate: Vec<Projection<'a>>,
    pub(crate) up: Vec<Projection<'a>>,
    pub(crate) down: Vec<Projection<'a>>,
}

/// All tensors of a model.
#[derive(Clone, Debug)]
pub(crate) struct DecoderTensors<'a> {
    pub(crate) embedding: Tensor<'a>,
    pub(crate) layers: Vec<LayerTensors<'a>>,
    pub(crate) output_norm: Tensor<'a>,
    /// The head's matrix, or some rows of it; the embedding table if the model has none of its own.
    pub(crate) head: Projection<'a>,
}

impl<'a> DecoderTensors<'a> {
    /// Finds and checks every tensor.
    ///
    /// # Errors
    /// [`ShardError::MissingTensor`], [`ShardError::TensorShape`], or the error of the source's
    /// format for a type that is not mapped.
    pub(crate) fn find(source: &'a Source, config: &DecoderConfig) -> Result<Self, ShardError> {
        let find = Finder { source, names: Names::of(source, config.family), config };
        let dims = &config.dims;
        let (vocab_size, hidden_dim) = (dims.vocab_size, dims.hidden_dim);
        let embedding = source.matrix(find.names.embedding, vocab_size, hidden_dim)?;
        let layers = (0..dims.n_layers).map(|layer| find.layer(layer)).collect::<Result<_, _>>()?;
        let output_norm = source.vector(find.names.output_norm, hidden_dim)?;
        let head_name = format!("{}.weight", find.names.head);
        let head = if config.tied_head && !source.has(&head_name) {
            Projection::plain(embedding)
        } else {
            find.projection(find.names.head, vocab_size, hidden_dim)?
        };
        Ok(Self { embedding, layers, output_norm, head })
    }

    /// Keeps only the head's rows of these tokens, which the vocabulary has.
    pub(crate) fn cut_head(&mut self, tokens: &'a [u32]) {
        self.head =
            Projection { order: RowOrder::Picked(tokens), n_rows: tokens.len(), ..self.head };
    }

    /// How a matrix is stored if it is one of floats.
    pub(crate) fn coding(&self, projection: &Projection<'_>, plan: &FloatPlan) -> FloatCoding {
        let Projection { weight, .. } = projection;
        if !weight.encoding.is_float() {
            return FloatCoding::Keep;
        }
        let is_table = weight.is(&self.embedding) || weight.is(&self.head.weight);
        plan.coding(weight.name, is_table)
    }

    /// Checks that a plan names tensors of this model only, and nothing else than the same for all
    /// experts of a layer, which are stored as one.
    ///
    /// # Errors
    /// [`ShardError::NoSuchTensor`] or [`ShardError::UnequalExperts`].
    pub(crate) fn check_plan(&self, plan: &FloatPlan) -> Result<(), ShardError> {
        let layers = self.layers.iter().flat_map(LayerTensors::matrices);
        let names: Vec<&str> = layers
            .map(|projection| projection.weight.name)
            .chain([self.embedding.name, self.head.weight.name])
            .collect();
        for exception in &plan.exceptions {
            if !names.iter().any(|name| exception.fits(name)) {
                return Err(ShardError::NoSuchTensor { pattern: exception.pattern.clone() });
            }
        }
        for layer in &self.layers {
            let FeedForward::Experts(experts) = &layer.ffn else { continue };
            for all in [&experts.gate, &experts.up, &experts.down] {
                let coding = |projection| self.coding(projection, plan);
                let other = all.iter().find(|one| coding(one) != coding(&all[0]));
                if let Some(other) = other {
                    let tensor = other.weight.name.to_owned();
                    return Err(ShardError::UnequalExperts { tensor });
                }
            }
        }
        Ok(())
    }

    /// Whether the head is the whole embedding table.
    pub(crate) fn head_is_embedding(&self) -> bool {
        self.head.weight.is(&self.embedding) && self.head.order == RowOrder::Plain
    }
}

struct Finder<'a, 'c> {
    source: &'a Source,
    names: &'static Names,
    config: &'c DecoderConfig,
}

impl<'a> Finder<'a, '_> {
    fn layer(&self, layer: usize) -> Result<LayerTensors<'a>, ShardError> {
        let (config, names) = (self.config, self.names);
        let (family, hidden) = (config.family, config.dims.hidden_dim);
        let stem = |part: &str| format!("{}{layer}.{part}", names.layer);
        let norm = |part, len| self.source.vector(&format!("{}.weight", stem(part)), len);
        let output_norm = |part| family.output_norms.then(|| norm(part, hidden)).transpose();
        let head_norm = |part| norm(part, config.dims.head_dim);
        let head_norms = match family.head_norms {
            true => Some(HeadNorms { q: head_norm(names.q_norm)?, k: head_norm(names.k_norm)? }),
            false => None,
        };
        Ok(LayerTensors {
            attention_norm: norm(names.attention_norm, hidden)?,
            qkv: self.qkv(&stem)?,
            head_norms,
            output: self.projection(&stem(names.output), hidden, config.q_rows())?,
            attention_output_norm: output_norm(names.attention_output_norm)?,
            ffn_norm: norm(names.ffn_norm, hidden)?,
            ffn: match &config.experts {
                Some(experts) => FeedForward::Experts(Box::new(self.experts(&stem, experts)?)),
                None => self.dense(&stem)?,
            },
            ffn_output_norm: output_norm(names.ffn_output_norm)?,
        })
    }

    fn qkv(&self, stem: &impl Fn(&str) -> String) -> Result<[Projection<'a>; 3], ShardError> {
        let (config, names) = (self.config, self.names);
        let hidden = config.dims.hidden_dim;
        let (q_rows, kv_rows) = (config.q_rows(), config.kv_rows());
        if config.family.fused {
            return self.fused(&stem(names.qkv), [q_rows, kv_rows, kv_rows], hidden);
        }
        let order = match self.source {
            Source::Gguf(_) if config.family.gguf_pairs_rows => RowOrder::InterleavedPairs {
                head_dim: config.dims.head_dim,
                rotary_dim: config.rope.dim,
            },
            Source::Gguf(_) | Source::HuggingFace(_) => RowOrder::Plain,
        };
        let find = |part, n_rows| self.projection(&stem(part), n_rows, hidden);
        Ok([
            Projection { order, ..find(names.q, q_rows)? },
            Projection { order, ..find(names.k, kv_rows)? },
            find(names.v, kv_rows)?,
        ])
    }

    fn dense(&self, stem: &impl Fn(&str) -> String) -> Result<FeedForward<'a>, ShardError> {
        let (names, hidden, ffn) = (self.names, self.config.dims.hidden_dim, self.config.ffn_dim);
        let gate_up = if self.config.family.fused {
            self.fused(&stem(names.gate_up), [ffn, ffn], hidden)?
        } else {
            let find = |part| self.projection(&stem(part), ffn, hidden);
            [find(names.gate)?, find(names.up)?]
        };
        let down = self.projection(&stem(names.down), hidden, ffn)?;
        Ok(FeedForward::Dense(Box::new(DenseTensors { gate_up, down })))
    }

    fn experts(
        &self,
        stem: &impl Fn(&str) -> String,
        experts: &Experts,
    ) -> Result<ExpertTensors<'a>, ShardError> {
        let (hidden, ffn) = (self.config.dims.hidden_dim, self.config.ffn_dim);
        let ExpertNames { router, each, gate, up, down } = self.names.experts;
        let all = |part: &str, n_rows, n_cols| match each {
            Some(each) => {
                let one = |expert| stem(&format!("{each}{expert}.{part}"));
                self.of_one_type((0..experts.n).map(one), n_rows, n_cols)
            }
            None => {
                let name = format!("{}.weight", stem(part));
                let tensor = self.source.matrices(&name, experts.n, (n_rows, n_cols))?;
                Ok(vec![Projection::plain(tensor)])
            }
        };
        Ok(ExpertTensors {
            router: self.projection(&stem(router), experts.n, hidden)?,
            gate: all(gate, ffn, hidden)?,
            up: all(up, ffn, hidden)?,
            down: all(down, hidden, ffn)?,
        })
    }

    /// Matrices that are stored as one, and so must have one type.
    fn of_one_type(
        &self,
        stems: impl Iterator<Item = String>,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Vec<Projection<'a>>, ShardError> {
        let mut all: Vec<Projection<'a>> = Vec::new();
        for stem in stems {
            let found = self.projection(&stem, n_rows, n_cols)?;
            if all.first().is_some_and(|first| first.weight.encoding != found.weight.encoding) {
                return Err(ShardError::UnequalExperts { tensor: format!("{stem}.weight") });
            }
            all.push(found);
        }
        Ok(all)
    }

    fn projection(
        &self,
        stem: &str,
        n_rows: usize,
        n_cols: usize,
    ) -> Result<Projection<'a>, ShardError> {
        let weight = self.source.matrix(&format!("{stem}.weight"), n_rows, n_cols)?;
        let bias = self.optional_vector(&format!("{stem}.bias"), n_rows)?;
        Ok(Projection { bias, ..Projection::plain(weight) })
    }

    /// Matrices that one tensor holds, one behind the other.
    fn fused<const N: usize>(
        &self,
        stem: &str,
        n_rows: [usize; N],
        n_cols: usize,
    ) -> Result<[Projection<'a>; N], ShardError> {
        let whole = self.projection(stem, n_rows.iter().sum(), n_cols)?;
        let mut first = 0;
        Ok(n_rows.map(|n_rows| {
            let order = RowOrder::From(first);
            first += n_rows;
            Projection { order, n_rows, ..whole }
        }))
    }

    fn optional_vector(&self, name: &str, len: usize) -> Result<Option<Tensor<'a>>, ShardError> {
        self.source.has(name).then(|| self.source.vector(name, len)).transpose()
    }
}

impl<'a> LayerTensors<'a> {
    /// The matrices.
    pub(crate) fn matrices(&self) -> impl Iterator<Item = Projection<'a>> {
        let ffn: Vec<Projection<'a>> = match &self.ffn {
            FeedForward::Dense(dense) => dense.gate_up.into_iter().chain([dense.down]).collect(),
            FeedForward::Experts(experts) => {
                let ExpertTensors { router, gate, up, down } = &**experts;
                std::iter::once(router).chain(gate).chain(up).chain(down).copied().collect()
            }
        };
        self.qkv.into_iter().chain([self.output]).chain(ffn)
    }

    fn norms(&self) -> impl Iterator<Item = Tensor<'a>> {
        let heads = self.head_norms.map(|norms| [norms.q, norms.k]).into_iter().flatten();
        let outputs = self.attention_output_norm.into_iter().chain(self.ffn_output_norm);
        [self.attention_norm, self.ffn_norm].into_iter().chain(heads).chain(outputs)
    }

    /// Source bytes of the norms and matrices.
    pub(crate) fn n_bytes(&self) -> u64 {
        let norms: usize = self.norms().map(|norm| norm.n_bytes()).sum();
        let matrices: usize = self.matrices().map(|projection| projection.n_bytes()).sum();
        (norms + matrices) as u64
    }
}
