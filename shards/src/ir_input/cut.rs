//! Chooses the operations of a stage, what it receives and sends, and what takes the place of what
//! it lacks.
//!
//! A stage computes what it sends (or the logits) and the caches of its layers. Everything that
//! these need is taken along, back to what the stage receives. Where a layer reads the cache of an
//! earlier stage, the rows that the cache grows by travel, and the stage keeps a cache of its own.
//! What is left to mend are shapes: masks and rotary tables are computed in every stage, and some
//! take the number of rows or the length of the past from a value that another stage has.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::error::IrErrorKind;
use super::layers::{Cache, Layers};
use super::net::{Net, Value};
use super::pack::Layout;
use super::shapes::{Dim, Shapes, from_front, integers};
use crate::ir::element::ElementType;

/// One dimension of a shape that is put together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Always the same.
    Fixed(u64),
    /// An axis of a value's shape.
    Axis(Value, usize),
}

/// What becomes of an operation that takes the shape of a value of another stage.
#[derive(Debug)]
pub(super) enum Mended {
    /// It takes that of another value.
    Of(Value),
    /// Its result is put together.
    Parts(Vec<Part>),
}

/// A value that travels.
#[derive(Clone, Debug)]
pub(super) struct Traveller {
    pub(super) value: Value,
    pub(super) layout: Layout,
}

/// A stage.
#[derive(Debug)]
pub(super) struct Stage {
    /// What it is given, the residual stream first; nothing for the first stage.
    pub(super) received: Vec<Traveller>,
    /// What it gives, likewise; nothing for the last stage.
    pub(super) sent: Vec<Traveller>,
    /// The operations to take over, each behind what it reads.
    pub(super) order: Vec<usize>,
    /// The `ShapeOf` operations among them that are mended.
    pub(super) mended: HashMap<usize, Mended>,
    layers: Range<usize>,
}

impl Stage {
    /// Numbers of a row that it sends.
    pub(super) fn sent_width(&self) -> u64 {
        self.sent.iter().map(|sent| sent.layout.width()).fold(0, u64::saturating_add)
    }
}

/// What stages are cut from.
#[derive(Clone, Copy)]
pub(super) struct Cutter<'a> {
    pub(super) net: &'a Net,
    /// Bytes of the weight file.
    pub(super) weights: &'a [u8],
    pub(super) layers: &'a Layers,
    pub(super) shapes: &'a Shapes,
}

impl Cutter<'_> {
    /// Chooses the operations of the stage with these layers.
    ///
    /// # Errors
    /// [`IrErrorKind::SharedCache`], [`IrErrorKind::Crossing`] or [`IrErrorKind::Shape`].
    pub(super) fn stage(&self, layers: Range<usize>) -> Result<Stage, IrErrorKind> {
        let mut stage = Stage {
            received: self.travellers(layers.start)?,
            sent: self.travellers(layers.end)?,
            order: Vec::new(),
            mended: HashMap::new(),
            layers,
        };
        let mut places = Places { done: HashSet::new(), under_way: HashSet::new() };
        for root in self.roots(&stage) {
            self.collect(root, &mut stage, &mut places)?;
        }
        // Caches of earlier layers that are read here are kept here too. Keeping one may need
        // the shape of another.
        loop {
            let is_missing = |cache: &&Cache| {
                !places.done.contains(&cache.assign)
                    && [cache.past, cache.all].iter().any(|node| places.done.contains(node))
            };
            let Some(cache) = self.layers.caches.iter().find(is_missing) else { return Ok(stage) };
            self.collect(cache.assign, &mut stage, &mut places)?;
        }
    }

    /// What travels over a cut in front of a layer.
    fn travellers(&self, layer: usize) -> Result<Vec<Traveller>, IrErrorKind> {
        let Some(stream) = self.layers.stream(layer) else { return Ok(Vec::new()) };
        let refused = |(value, dims)| IrErrorKind::Crossing { layer, value, dims };
        let mut travellers = vec![self.traveller(stream).map_err(refused)?];
        for (value, reader) in self.layers.crossing(self.net, layer) {
            let cache = self.layers.cache_behind(self.net, value);
            let value = cache.map_or(value, |cache| cache.rows);
            if travellers.iter().any(|found| found.value == value) {
                continue;
            }
            let traveller = self.traveller(value).map_err(|(value, dims)| match cache {
                Some(cache) => {
                    let owner = self.layers.level(cache.all).unwrap_or_default();
                    IrErrorKind::SharedCache { layer, owner, reader, value, dims }
                }
                None => refused((value, dims)),
            });
            travellers.push(traveller?);
        }
        Ok(travellers)
    }

    /// A value with its layout, or its name and what it is instead.
    fn traveller(&self, value: Value) -> Result<Traveller, (String, String)> {
        let is_f32 = self.net.port(value).element == ElementType::F32;
        let layout = Layout::of(self.shapes.of(value)).filter(|_| is_f32);
        Ok(Traveller { value, layout: layout.ok_or_else(|| self.found(value))? })
    }

    /// A value's name, and its type and dimensions, for errors.
    fn found(&self, value: Value) -> (String, String) {
        let element = self.net.port(value).element.attribute();
        (self.net.name(value).to_owned(), format!("{element} of {:?}", self.shapes.of(value)))
    }

    /// What the stage must compute.
    fn roots(&self, stage: &Stage) -> Vec<usize> {
        let kept = self.layers.caches.iter().filter(|cache| self.is_own(cache.all, stage));
        let kept = kept.map(|cache| cache.assign);
        if stage.sent.is_empty() {
            return kept.chain([self.layers.logits.node]).collect();
        }
        kept.chain(stage.sent.iter().map(|sent| sent.value.node)).collect()
    }

    /// Whether an operation belongs to a layer of the stage, or to none.
    fn is_own(&self, node: usize, stage: &Stage) -> bool {
        let is_last = stage.sent.is_empty();
        self.layers.level(node).is_none_or(|level| {
            level >= stage.layers.start && (is_last || level < stage.layers.end)
        })
    }

    /// Adds an operation behind all that it needs, without recursion: graphs are deep.
    fn collect(
        &self,
        root: usize,
        stage: &mut Stage,
        places: &mut Places,
    ) -> Result<(), IrErrorKind> {
        let mut stack = vec![(Value { node: root, output: 0 }, false)];
        while let Some((value, is_ready)) = stack.pop() {
            let node = value.node;
            if is_ready {
                places.under_way.remove(&node);
                places.done.insert(node);
                stage.order.push(node);
                continue;
            }
            if places.done.contains(&node) || self.is_input(value, stage)? {
                continue;
            }
            // Only a mended shape can lead back to what needs it.
            if !places.under_way.insert(node) {
                return Err(IrErrorKind::Shape { name: self.net.nodes[node].name.clone() });
            }
            stack.push((value, true));
            stack.extend(self.needs(node, stage)?.into_iter().map(|input| (input, false)));
        }
        Ok(())
    }

    /// Whether a value is an input of the stage. Tokens are one of the first stage only.
    fn is_input(&self, value: Value, stage: &Stage) -> Result<bool, IrErrorKind> {
        if stage.received.iter().any(|received| received.value == value) {
            return Ok(true);
        }
        if value != self.layers.inputs.input_ids || stage.received.is_empty() {
            return Ok(self.net.nodes[value.node].is("Parameter"));
        }
        let (value, dims) = self.found(value);
        Err(IrErrorKind::Crossing { layer: stage.layers.start, value, dims })
    }

    /// What an operation reads in this stage.
    fn needs(&self, node: usize, stage: &mut Stage) -> Result<Vec<Value>, IrErrorKind> {
        let found = &self.net.nodes[node];
        if !found.is("ShapeOf") || self.is_own(found.inputs[0].node, stage) {
            return Ok(found.inputs.clone());
        }
        let mended = self.mend(node, stage)?;
        let values = match &mended {
            Mended::Of(value) => vec![*value],
            Mended::Parts(parts) => {
                let value = |part: &Part| match part {
                    Part::Axis(value, _) => Some(*value),
                    Part::Fixed(_) => None,
                };
                parts.iter().filter_map(value).collect()
            }
        };
        stage.mended.insert(node, mended);
        Ok(values)
    }

    /// Finds what has the shape that a `ShapeOf` asks for.
    fn mend(&self, node: usize, stage: &Stage) -> Result<Mended, IrErrorKind> {
        let dims = self.shapes.of(self.net.nodes[node].inputs[0]);
        let asked = self.asked(node, dims.len());
        let stands = self.stands(stage);
        let agrees = |stand: &&Value| {
            let found = self.shapes.of(**stand);
            let same = |axis: &usize| found[*axis] == dims[*axis] && dims[*axis] != Dim::Unknown;
            found.len() == dims.len() && asked.iter().all(same)
        };
        if let Some(stand) = stands.iter().find(agrees) {
            return Ok(Mended::Of(*stand));
        }
        let part = |axis: usize| match dims[axis] {
            Dim::Fixed(number) => Some(Part::Fixed(number)),
            // Nobody looks at it.
            _ if !asked.contains(&axis) => Some(Part::Fixed(1)),
            Dim::Unknown => None,
            dim => stands.iter().find_map(|stand| {
                let axis = self.shapes.of(*stand).iter().position(|found| *found == dim)?;
                Some(Part::Axis(*stand, axis))
            }),
        };
        let parts: Option<Vec<Part>> = (0..dims.len()).map(part).collect();
        let name = || self.net.nodes[node].name.clone();
        parts.map(Mended::Parts).ok_or_else(|| IrErrorKind::Shape { name: name() })
    }

    /// Values of the stage that shapes can be taken from, the best first.
    fn stands(&self, stage: &Stage) -> Vec<Value> {
        let inputs = &self.layers.inputs;
        let is_own = |cache: &&Cache| self.is_own(cache.all, stage);
        let is_received =
            |cache: &&Cache| stage.received.iter().any(|received| received.value == cache.rows);
        // One of the stage's own costs nothing; another one would have to be kept for it.
        let caches = self.layers.caches.iter();
        let caches = caches.clone().filter(is_own).chain(caches.filter(is_received));
        let caches = caches.flat_map(|cache| [cache.past, cache.all]);
        let mut stands: Vec<Value> = stage.received.iter().map(|received| received.value).collect();
        if stands.is_empty() {
            stands.push(inputs.input_ids);
        }
        stands.extend(inputs.position_ids);
        stands.extend(caches.map(|node| Value { node, output: 0 }));
        stands.push(inputs.attention_mask);
        stands
    }

    /// The axes of a shape that are looked at.
    fn asked(&self, shape_of: usize, rank: usize) -> Vec<usize> {
        let value = Value { node: shape_of, output: 0 };
        let mut axes = Vec::new();
        for node in self.net.nodes.iter().filter(|node| node.inputs.contains(&value)) {
            let indices = node.inputs.get(1).filter(|_| node.is("Gather"));
            let indices =
                indices.and_then(|indices| integers(&self.net.nodes[indices.node], self.weights));
            let Some(indices) = indices else { return (0..rank).collect() };
            axes.extend(indices.filter_map(|index| from_front(index, rank)));
        }
        axes
    }
}

/// Operations that have their place, and those whose needs are being collected.
struct Places {
    done: HashSet<usize>,
    under_way: HashSet<usize>,
}
