//! Builds the graph of a stage: copies operations and constants, and adds its inputs and output.

use std::collections::HashMap;
use std::io;

use super::cut::{Mended, Part, Stage, Traveller};
use super::element::Element;
use super::layers::Layers;
use super::net::{Net, Node, Place, Value};
use crate::ir::bin::{BinWriter, Span};
use crate::ir::element::ElementType;
use crate::ir::graph::{self, Copied, Graph};
use crate::map::Map;
use crate::shard::OnConverted;

/// Bytes of a constant that are copied before their pages are given back.
const COPY_BYTES: usize = 8 << 20;

/// Constants up to this size are stored once per content.
const SMALL_BYTES: u64 = 64;

/// Names that the graph of a stage gives to its own inputs and output.
const OWN_NAMES: [&str; 8] = [
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "beam_idx",
    "logit_rows",
    "hidden_states",
    "logits",
];

/// What stages are built from.
#[derive(Clone, Copy)]
pub(super) struct Material<'a> {
    pub(super) net: &'a Net,
    pub(super) layers: &'a Layers,
    /// The weight file.
    pub(super) weights: &'a Map,
    /// Width of what travels between stages.
    pub(super) width: usize,
    /// Width of the rows that the head takes.
    pub(super) head_width: usize,
    /// Width of the logits.
    pub(super) vocab_size: usize,
}

/// A graph under construction.
struct Builder<'a> {
    material: Material<'a>,
    graph: Graph,
    /// What stands for each value of the source.
    values: HashMap<Value, graph::Value>,
    /// Constants that are in the weight file already.
    spans: HashMap<Place, Span>,
    on_copied: &'a mut OnConverted<'a>,
}

/// Writes the weights of a stage and builds its graph, with the inputs and the output that
/// [`crate::decoder::stage::build_stage`] names.
///
/// # Errors
/// The weight file cannot be written.
pub(super) fn build<'a>(
    material: Material<'a>,
    stage: &Stage,
    bin: BinWriter,
    on_copied: &'a mut OnConverted<'a>,
) -> io::Result<Graph> {
    let mut graph = Graph::new(bin);
    graph.scope("stage");
    let (values, spans) = (HashMap::new(), HashMap::new());
    let mut builder = Builder { material, graph, values, spans, on_copied };
    builder.inputs(stage)?;
    for &index in &stage.order {
        builder.add(index, stage.mended.get(&index))?;
    }
    builder.output(stage)?;
    for element in &material.net.info {
        element.render(&mut builder.graph.model_info);
    }
    builder.graph.model_info.push('\n');
    Ok(builder.graph)
}

impl Builder<'_> {
    /// Adds the inputs of the stage and takes apart what it is given.
    fn inputs(&mut self, stage: &Stage) -> io::Result<()> {
        let inputs = &self.material.layers.inputs;
        if stage.received.is_empty() {
            let ids = self.graph.parameter("input_ids", ElementType::I64, &[None, None]);
            self.values.insert(inputs.input_ids, ids);
        } else {
            let dims = [None, None, Some(self.material.width as u64)];
            let rows = self.graph.parameter("inputs_embeds", ElementType::F32, &dims);
            self.unpack(rows, &stage.received)?;
        }
        let mask = self.graph.parameter("attention_mask", ElementType::I64, &[None, None]);
        self.values.insert(inputs.attention_mask, mask);
        // Engines give positions to every stage, also to those that count them themselves.
        let positions = self.graph.parameter("position_ids", ElementType::I64, &[None, None]);
        self.values.extend(inputs.position_ids.map(|value| (value, positions)));
        let beams = self.graph.parameter("beam_idx", ElementType::I32, &[None]);
        self.values.insert(inputs.beam_idx, beams);
        Ok(())
    }

    /// Takes the rows of the stage before apart.
    fn unpack(&mut self, rows: graph::Value, received: &[Traveller]) -> io::Result<()> {
        let mut widths: Vec<i64> =
            received.iter().map(|found| found.layout.width() as i64).collect();
        let rest = self.material.width as i64 - widths.iter().sum::<i64>();
        let mut pieces = vec![rows];
        if received.len() > 1 || rest > 0 {
            widths.extend(Some(rest).filter(|rest| *rest > 0));
            pieces = self.graph.split(rows, 2, &widths)?;
        }
        for (found, mut piece) in received.iter().zip(pieces) {
            let layout = &found.layout;
            if !layout.is_row() {
                let dims: Vec<i64> =
                    [0, 0].into_iter().chain(layout.others.iter().map(|dim| *dim as i64)).collect();
                piece = self.graph.reshape(piece, &dims)?;
                if !layout.is_ordered() {
                    piece = self.graph.transpose(piece, &layout.inverse())?;
                }
            }
            self.values.insert(found.value, piece);
        }
        Ok(())
    }

    /// Puts what the next stage is given side by side, as wide as at every other cut.
    fn pack(&mut self, stage: &Stage) -> io::Result<graph::Value> {
        let mut pieces = Vec::with_capacity(stage.sent.len());
        for found in &stage.sent {
            let (layout, mut piece) = (&found.layout, self.values[&found.value]);
            if !layout.is_ordered() {
                let order: Vec<i64> = layout.order.iter().map(|axis| *axis as i64).collect();
                piece = self.graph.transpose(piece, &order)?;
            }
            if !layout.is_row() {
                piece = self.graph.reshape(piece, &[0, 0, layout.width() as i64])?;
            }
            pieces.push(piece);
        }
        let rows = match pieces[..] {
            [rows] => rows,
            _ => self.graph.concat(&pieces, 2),
        };
        match self.material.width as i64 - stage.sent_width() as i64 {
            0 => Ok(rows),
            missing => self.graph.pad(rows, &[0, 0, missing]),
        }
    }

    /// Adds the output.
    fn output(&mut self, stage: &Stage) -> io::Result<()> {
        if stage.sent.is_empty() {
            let logits = self.values[&self.material.layers.logits];
            let logits = self.graph.reshape(logits, &[-1, self.material.vocab_size as i64])?;
            self.graph.result("logits", logits);
        } else {
            let rows = self.pack(stage)?;
            self.graph.result("hidden_states", rows);
        }
        Ok(())
    }

    /// Adds an operation of the source.
    fn add(&mut self, index: usize, mended: Option<&Mended>) -> io::Result<()> {
        let node = &self.material.net.nodes[index];
        let made = match (mended, node.place) {
            (Some(mended), _) => vec![self.shape(node, mended)?],
            (None, Some(place)) => vec![self.constant(node, place)?],
            (None, None) => self.copy(node)?,
        };
        for (output, value) in made.into_iter().enumerate() {
            self.values.insert(Value { node: index, output }, value);
        }
        let head = self.material.layers.head;
        if head.node == index {
            let rows = self.wanted_rows(self.values[&head])?;
            self.values.insert(head, rows);
        }
        Ok(())
    }

    /// An operation as it is.
    fn copy(&mut self, node: &Node) -> io::Result<Vec<graph::Value>> {
        let mut extra = String::new();
        for element in &node.extra {
            self.with_own_constants(element)?.render(&mut extra);
        }
        let inputs = node.inputs.iter().map(|input| self.values[input]).collect();
        Ok(self.copy_with(node, inputs, extra))
    }

    fn copy_with(
        &mut self,
        node: &Node,
        inputs: Vec<graph::Value>,
        extra: String,
    ) -> Vec<graph::Value> {
        self.graph.copy(Copied {
            kind: node.kind.clone(),
            opset: node.opset.clone(),
            name: own_name(&node.name),
            attributes: node.attributes.clone(),
            inputs,
            outputs: node.outputs.iter().map(|port| port.element).collect(),
            extra,
        })
    }

    /// A constant, with its bytes copied.
    fn constant(&mut self, node: &Node, place: Place) -> io::Result<graph::Value> {
        let span = self.stored(place)?;
        let mut extra = String::new();
        node.extra.iter().for_each(|element| element.render(&mut extra));
        let copied = self.copy_with(node, Vec::new(), extra)[0];
        self.graph.set_attribute(copied, "offset", span.offset.to_string());
        Ok(copied)
    }

    /// Copies the bytes of a constant into the weight file of the stage, unless they are there.
    fn stored(&mut self, place: Place) -> io::Result<Span> {
        if let Some(span) = self.spans.get(&place) {
            return Ok(*span);
        }
        let map = self.material.weights;
        let (start, len) = (place.offset as usize, place.bytes as usize);
        let bytes = &map.bytes()[start..start + len];
        let bin = &mut self.graph.bin;
        let span = if place.bytes <= SMALL_BYTES {
            bin.store(bytes)?
        } else {
            let offset = bin.start()?;
            for (piece, bytes) in bytes.chunks(COPY_BYTES).enumerate() {
                bin.write(bytes)?;
                map.release(start + piece * COPY_BYTES, bytes.len());
            }
            bin.finish(offset)
        };
        self.spans.insert(place, span);
        (self.on_copied)(place.bytes, &[]);
        Ok(span)
    }

    /// The body of a loop, whose constants are in the weight file of the stage.
    fn with_own_constants(&mut self, element: &Element) -> io::Result<Element> {
        let mut element = element.clone();
        element.visit_constants(&mut |data| {
            let Some(place) = Place::of(data) else { return Ok(()) };
            let span = self.stored(place)?;
            data.set("offset", span.offset.to_string());
            Ok::<(), io::Error>(())
        })?;
        Ok(element)
    }

    /// The shape that a mended operation gives.
    fn shape(&mut self, node: &Node, mended: &Mended) -> io::Result<graph::Value> {
        let parts = match mended {
            Mended::Of(value) => {
                let input = self.values[value];
                return Ok(self.copy_with(node, vec![input], String::new())[0]);
            }
            Mended::Parts(parts) => parts,
        };
        let mut dims = Vec::with_capacity(parts.len());
        for part in parts {
            dims.push(match part {
                Part::Fixed(number) => self.graph.i64s(&[*number as i64])?,
                Part::Axis(value, axis) => {
                    let shape = self.graph.shape_of(self.values[value]);
                    let axis = self.graph.i64s(&[*axis as i64])?;
                    self.graph.gather(shape, axis, 0)?
                }
            });
        }
        let shape = self.graph.concat(&dims, 0);
        let element = node.outputs[0].element;
        Ok(if element == ElementType::I64 { shape } else { self.graph.convert(shape, element) })
    }

    /// The rows whose logits are asked for, `[1, R, hidden_dim]`.
    fn wanted_rows(&mut self, hidden: graph::Value) -> io::Result<graph::Value> {
        let graph = &mut self.graph;
        let logit_rows = graph.parameter("logit_rows", ElementType::I64, &[None]);
        let rows = graph.reshape(hidden, &[-1, self.material.head_width as i64])?;
        let rows = graph.gather(rows, logit_rows, 0)?;
        graph.unsqueeze(rows, &[0])
    }
}

/// The name of an operation of the source, out of the way of the stage's own.
fn own_name(name: &str) -> String {
    if OWN_NAMES.contains(&name) { format!("source.{name}") } else { name.to_owned() }
}
