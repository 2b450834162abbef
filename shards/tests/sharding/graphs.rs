//! The stage graphs as XML: well-formed, complete, and self-contained.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use roxmltree::{Document, Node};
use stagebus_shards::gguf::GgmlType;
use stagebus_shards::{Form, FormError, ShardError, ShardSet, StaticForm, WeightMode, shard};

use crate::Workshop;
use crate::synthetic::Synthetic;

pub(crate) fn children<'a>(node: Node<'a, 'a>, path: &[&'static str]) -> Vec<Node<'a, 'a>> {
    path.iter().fold(vec![node], |nodes, tag| {
        let tag = *tag;
        nodes.into_iter().flat_map(|n| n.children().filter(move |c| c.has_tag_name(tag))).collect()
    })
}

pub(crate) fn attribute<'a>(node: Node<'a, 'a>, name: &str) -> &'a str {
    node.attribute(name).unwrap_or_else(|| panic!("{node:?} has no attribute {name}"))
}

pub(crate) fn data<'a>(layer: Node<'a, 'a>, name: &str) -> &'a str {
    attribute(children(layer, &["data"])[0], name)
}

/// What a graph shows to its caller.
#[derive(Debug, PartialEq)]
pub(crate) struct Surface {
    pub(crate) inputs: HashSet<(String, String)>,
    pub(crate) outputs: HashSet<String>,
    pub(crate) states: HashSet<String>,
}

/// Checks ids, edges, constants and states of a graph; returns its surface.
pub(crate) fn check_graph(xml: &str, bin_bytes: u64) -> Surface {
    let document = Document::parse(xml).unwrap();
    let net = document.root_element();
    assert_eq!(attribute(net, "version"), "11");
    let layers = children(net, &["layers", "layer"]);
    let edges = children(net, &["edges", "edge"]);
    let by_id: HashMap<_, _> =
        layers.iter().map(|layer| (attribute(*layer, "id"), *layer)).collect();
    assert_eq!(by_id.len(), layers.len(), "ids repeat");
    let unique: HashSet<_> = layers.iter().map(|layer| attribute(*layer, "name")).collect();
    assert_eq!(unique.len(), layers.len(), "names repeat");

    let port = |layer: &str, direction: &'static str, id: &str| {
        let ports = children(by_id[layer], &[direction, "port"]);
        assert!(ports.iter().any(|port| attribute(*port, "id") == id), "{layer} has no port {id}");
    };
    let mut fed = HashSet::new();
    for edge in &edges {
        port(attribute(*edge, "from-layer"), "output", attribute(*edge, "from-port"));
        port(attribute(*edge, "to-layer"), "input", attribute(*edge, "to-port"));
        let target = (attribute(*edge, "to-layer"), attribute(*edge, "to-port"));
        assert!(fed.insert(target), "{target:?} has two sources");
        // Nodes come after what they read.
        let number = |name| attribute(*edge, name).parse::<usize>().unwrap();
        assert!(number("from-layer") < number("to-layer"));
    }
    let n_inputs: usize = layers.iter().map(|l| children(*l, &["input", "port"]).len()).sum();
    assert_eq!(fed.len(), n_inputs, "an input port has no source");

    let of_kind =
        |kind: &'static str| layers.iter().filter(move |l| attribute(**l, "type") == kind);
    for constant in of_kind("Const") {
        check_constant(*constant, bin_bytes);
    }
    let ids =
        |kind| of_kind(kind).map(|l| data(*l, "variable_id").to_owned()).collect::<HashSet<_>>();
    let states = ids("ReadValue");
    assert_eq!(states, ids("Assign"));
    assert_eq!(states.len(), of_kind("ReadValue").count());
    Surface {
        inputs: of_kind("Parameter")
            .map(|l| (attribute(*l, "name").to_owned(), data(*l, "element_type").to_owned()))
            .collect(),
        outputs: of_kind("Result").map(|l| attribute(*l, "name").to_owned()).collect(),
        states,
    }
}

/// A constant lies inside the weight file, aligned, and is as long as its shape says.
fn check_constant(constant: Node<'_, '_>, bin_bytes: u64) {
    let number = |name| data(constant, name).parse::<u64>().unwrap();
    let (offset, size) = (number("offset"), number("size"));
    assert_eq!(offset % 64, 0);
    assert!(offset + size <= bin_bytes);
    let shape = data(constant, "shape");
    let parsed = |dim: &str| dim.parse::<u64>().unwrap();
    let n: u64 = shape.split(',').map(str::trim).filter(|d| !d.is_empty()).map(parsed).product();
    let bits = match data(constant, "element_type") {
        "i64" => 64,
        "f32" | "i32" => 32,
        "f16" | "bf16" => 16,
        "i8" | "u8" | "boolean" => 8,
        "i4" | "u4" => 4,
        other => panic!("unexpected element type {other}"),
    };
    assert_eq!(size * 8, n * bits);
}

fn pairs(items: &[(&str, &str)]) -> HashSet<(String, String)> {
    items.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
}

/// Checks that every stage of a set is a whole graph with the inputs, the output and the states of
/// its place.
pub(crate) fn check_stages(out: &Path) {
    let set = ShardSet::open(out).unwrap();
    let stages = &set.manifest.stages;
    for (index, stage) in stages.iter().enumerate() {
        let xml = std::fs::read_to_string(set.stage_files(index).unwrap().xml).unwrap();
        let surface = check_graph(&xml, stage.bin.bytes);
        let (is_first, is_last) = (index == 0, index + 1 == stages.len());
        let rows = if is_first { ("input_ids", "i64") } else { ("inputs_embeds", "f32") };
        let mut inputs =
            vec![rows, ("attention_mask", "i64"), ("position_ids", "i64"), ("beam_idx", "i32")];
        if is_last {
            inputs.push(("logit_rows", "i64"));
        }
        assert_eq!(surface.inputs, pairs(&inputs));
        let output = if is_last { "logits" } else { "hidden_states" };
        assert_eq!(surface.outputs, HashSet::from([output.to_owned()]));
        let states = (stage.first_layer..stage.end_layer).flat_map(|n| {
            [
                format!("past_key_values.{n}.keypresent.{n}.key"),
                format!("past_key_values.{n}.valuepresent.{n}.value"),
            ]
        });
        assert_eq!(surface.states, states.collect());
    }
}

#[test]
fn every_stage_of_every_count_is_a_graph_of_its_own() {
    let workshop = Workshop::new(&Synthetic { n_layers: 5, ..Synthetic::default() });
    for n_stages in 1..=5 {
        let mut request = workshop.request(n_stages);
        request.force = true;
        let manifest = shard(&request, &mut |_| {}).unwrap();
        assert_eq!(manifest.n_stages(), n_stages);
        check_stages(&workshop.out());
    }
}

/// Name and shape of every input.
fn input_shapes(xml: &str) -> HashMap<String, String> {
    let document = Document::parse(xml).unwrap();
    children(document.root_element(), &["layers", "layer"])
        .into_iter()
        .filter(|layer| attribute(*layer, "type") == "Parameter")
        .map(|layer| (attribute(layer, "name").to_owned(), data(layer, "shape").to_owned()))
        .collect()
}

#[test]
fn static_graphs_have_fixed_shapes_and_their_caches_outside() {
    let workshop = Workshop::new(&Synthetic { n_layers: 3, ..Synthetic::default() });
    let form = StaticForm { window: 64, rows: 4, slots: 2 };
    for n_stages in 1..=3 {
        let mut request = workshop.request(n_stages);
        (request.form, request.force) = (Form::Static(form), true);
        let manifest = shard(&request, &mut |_| {}).unwrap();
        assert_eq!((manifest.form, manifest.dims.context_length), (Form::Static(form), 64));
        let set = ShardSet::open(&workshop.out()).unwrap();
        for (index, stage) in manifest.stages.iter().enumerate() {
            let xml = std::fs::read_to_string(set.stage_files(index).unwrap().xml).unwrap();
            let surface = check_graph(&xml, stage.bin.bytes);
            assert!(surface.states.is_empty(), "{:?}", surface.states);
            let rows = if index == 0 { ("input_ids", "1,4") } else { ("inputs_embeds", "1,4,256") };
            let mut inputs = HashMap::from([
                (rows.0.to_owned(), rows.1.to_owned()),
                ("position_ids".to_owned(), "1,4".to_owned()),
                ("attention_mask".to_owned(), "1,1,4,132".to_owned()),
            ]);
            let is_last = index == n_stages - 1;
            let output = if is_last { "logits" } else { "hidden_states" };
            let mut outputs = HashSet::from([output.to_owned()]);
            for layer in stage.first_layer..stage.end_layer {
                for part in ["key", "value"] {
                    let name = format!("past_key_values.{layer}.{part}");
                    inputs.insert(name, "1,2,128,64".to_owned());
                    outputs.insert(format!("present.{layer}.{part}"));
                }
            }
            assert_eq!(input_shapes(&xml), inputs);
            assert_eq!(surface.outputs, outputs);
        }
    }
}

#[test]
fn a_static_window_follows_the_model_and_its_limits() {
    let workshop = Workshop::new(&Synthetic::default());
    let mut request = workshop.request(1);
    request.form = Form::Static(StaticForm { window: 1 << 30, rows: 4, slots: 1 });
    let whole = workshop.shard(1).unwrap();
    std::fs::remove_dir_all(workshop.out()).unwrap();
    let manifest = shard(&request, &mut |_| {}).unwrap();
    assert_eq!(manifest.dims, whole.dims);
    let Form::Static(form) = manifest.form else { panic!("{:?}", manifest.form) };
    assert_eq!(form.window, whole.dims.context_length);
    request.force = true;
    request.form = Form::Static(StaticForm { rows: 0, ..form });
    let error = shard(&request, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ShardError::Form(FormError::Range { key: "rows", .. })), "{error}");
    assert_eq!(ShardSet::open(&workshop.out()).unwrap().manifest, manifest, "left alone");
}

#[test]
fn every_type_makes_a_graph_in_every_mode() {
    let types = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::BF16,
        GgmlType::Q8_0,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q4_K,
        GgmlType::Q5_K,
        GgmlType::Q6_K,
    ];
    for (index, ggml_type) in types.into_iter().enumerate() {
        let workshop = Workshop::new(&Synthetic {
            n_layers: 2,
            layer_type: ggml_type,
            table_type: types[(index + 1) % types.len()],
            tied: index % 2 == 0,
            biased: index % 3 == 0,
            ..Synthetic::default()
        });
        for weights in WeightMode::ALL {
            let mut request = workshop.request(2);
            request.force = true;
            request.weights = weights;
            let manifest = shard(&request, &mut |_| {}).unwrap();
            assert_eq!(manifest.weights, weights);
            for stage in &manifest.stages {
                let xml = std::fs::read_to_string(workshop.out().join(&stage.xml.name)).unwrap();
                check_graph(&xml, stage.bin.bytes);
            }
        }
    }
}

#[test]
fn a_tied_table_is_stored_once_in_a_single_stage() {
    let workshop = Workshop::new(&Synthetic { vocab_size: 8192, ..Synthetic::default() });
    let one = workshop.shard(1).unwrap();
    std::fs::remove_dir_all(workshop.out()).unwrap();
    let two = workshop.shard(2).unwrap();
    let bytes = |manifest: &stagebus_shards::Manifest| {
        manifest.stages.iter().map(|stage| stage.bin.bytes).sum::<u64>()
    };
    // Q6_K: one byte per code and four per group of 16.
    let table = 8192 * 256 * 5 / 4;
    assert!(bytes(&two) - bytes(&one) >= table);
    assert!(bytes(&two) - bytes(&one) < table + table / 10);
}
