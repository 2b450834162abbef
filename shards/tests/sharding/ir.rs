//! Cutting a model in OpenVINO's format: every stage is a graph of its own, with its own weights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use roxmltree::{Document, Node};
use stagebus_shards::{Manifest, Progress, ShardError, ShardRequest, ShardSet, model_dims, shard};
use tempfile::TempDir;

use crate::graphs::{attribute, check_graph, check_stages, children, data};

/// A copy of a tiny model that optimum-intel exported, see `tools/ir`.
pub(crate) struct Exported {
    dir: TempDir,
}

impl Exported {
    pub(crate) fn new() -> Self {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ir/llama");
        let dir = TempDir::new().unwrap();
        let source = dir.path().join("exported");
        std::fs::create_dir(&source).unwrap();
        for entry in std::fs::read_dir(fixture).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), source.join(entry.file_name())).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn source(&self) -> PathBuf {
        self.dir.path().join("exported")
    }

    pub(crate) fn out(&self) -> PathBuf {
        self.dir.path().join("set")
    }

    pub(crate) fn xml(&self) -> String {
        std::fs::read_to_string(self.source().join("openvino_model.xml")).unwrap()
    }

    pub(crate) fn request(&self, split: &[usize]) -> ShardRequest {
        ShardRequest {
            split: Some(split.to_vec()),
            force: true,
            ..ShardRequest::new(self.source(), self.out(), split.len())
        }
    }

    pub(crate) fn shard(&self, split: &[usize]) -> Result<Manifest, ShardError> {
        shard(&self.request(split), &mut |_| {})
    }
}

#[test]
fn every_cut_gives_graphs_of_their_own() {
    let exported = Exported::new();
    let splits: [&[usize]; 5] = [&[4], &[1, 3], &[2, 2], &[3, 1], &[1, 1, 1, 1]];
    for split in splits {
        let manifest = exported.shard(split).unwrap();
        assert_eq!(manifest.n_stages(), split.len());
        assert_eq!(model_dims(&exported.source()).unwrap(), manifest.dims);
        check_stages(&exported.out());
    }
}

#[test]
fn the_manifest_says_what_graph_and_configuration_say() {
    let exported = Exported::new();
    let manifest = exported.shard(&[2, 2]).unwrap();
    let dims = &manifest.dims;
    assert_eq!((dims.n_layers, dims.hidden_dim, dims.vocab_size), (4, 64, 320));
    assert_eq!((dims.n_heads, dims.n_kv_heads, dims.head_dim), (4, 2, 16));
    assert_eq!((dims.context_length, manifest.architecture.as_str()), (512, "llama"));
    assert_eq!((manifest.bos_id, manifest.eos_ids.as_slice()), (Some(0), &[1][..]));
    assert_eq!(manifest.model, "exported");
    let named = |request: &ShardRequest| shard(request, &mut |_| {}).unwrap();
    let mut request = exported.request(&[2, 2]);
    request.source.push("openvino_model.xml");
    assert_eq!(named(&request).fingerprint, manifest.fingerprint);
    assert_eq!(named(&request).model, "exported");
    let shares: f64 = manifest.stages.iter().map(|stage| stage.cost_share).sum();
    assert!((shares - 1.0).abs() < 1e-9, "{shares}");
}

/// Name, type, shape and bytes of every constant of a graph.
fn constants(xml: &str, bin: &[u8]) -> HashMap<String, (String, String, Vec<u8>)> {
    let document = Document::parse(xml).unwrap();
    let layers = children(document.root_element(), &["layers", "layer"]);
    let constants = layers.iter().filter(|layer| attribute(**layer, "type") == "Const");
    constants
        .map(|layer| {
            let number = |name| data(*layer, name).parse::<usize>().unwrap();
            let bytes = bin[number("offset")..][..number("size")].to_vec();
            let (element, shape) = (data(*layer, "element_type"), data(*layer, "shape"));
            let name = attribute(*layer, "name").to_owned();
            (name, (element.to_owned(), shape.to_owned(), bytes))
        })
        .collect()
}

#[test]
fn weights_are_the_bytes_of_the_source_and_go_where_they_are_used() {
    let exported = Exported::new();
    let bin = std::fs::read(exported.source().join("openvino_model.bin")).unwrap();
    let source = constants(&exported.xml(), &bin);
    let manifest = exported.shard(&[1, 1, 2]).unwrap();
    let mut used: HashMap<String, Vec<usize>> = HashMap::new();
    for (stage, entry) in manifest.stages.iter().enumerate() {
        let xml = std::fs::read_to_string(exported.out().join(&entry.xml.name)).unwrap();
        let bin = std::fs::read(exported.out().join(&entry.bin.name)).unwrap();
        for (name, constant) in constants(&xml, &bin) {
            // What a stage adds of its own bears the stage's name.
            if !name.starts_with("stage.") {
                assert_eq!(Some(&constant), source.get(&name), "{name} in stage {stage}");
                used.entry(name).or_default().push(stage);
            }
        }
    }
    let large = |name: &&String| source[*name].2.len() > 2000;
    let twice: Vec<_> =
        used.iter().filter(|(name, stages)| large(name) && stages.len() > 1).collect();
    // The tied table is what the first and the last stage both need.
    let [(table, stages)] = twice[..] else { panic!("{twice:?}") };
    assert_eq!((source[table].1.replace(' ', "").as_str(), &stages[..]), ("320,64", &[0, 2][..]));
    for name in source.keys().filter(large) {
        assert!(used.contains_key(name), "{name} is in no stage");
    }
}

#[test]
fn progress_ends_at_all_bytes() {
    let exported = Exported::new();
    let (mut last, mut coded) = (None, 0);
    let mut follow = |progress: Progress<'_>| {
        coded += progress.coded.len();
        last = Some((progress.stage, progress.bytes_done, progress.bytes_total));
    };
    shard(&exported.request(&[1, 3]), &mut follow).unwrap();
    let (stage, bytes_done, bytes_total) = last.unwrap();
    assert_eq!((stage, bytes_done, coded), (1, bytes_total, 0));
    assert!(bytes_total > 100_000, "{bytes_total}");
}

/// The layers of one type, in the order of the file.
pub(crate) fn of_type<'a>(document: &'a Document<'a>, kind: &str) -> Vec<Node<'a, 'a>> {
    let layers = children(document.root_element(), &["layers", "layer"]);
    layers.into_iter().filter(|layer| attribute(*layer, "type") == kind).collect()
}

/// The layer with this id.
pub(crate) fn layer_of<'a>(document: &'a Document<'a>, id: &str) -> Node<'a, 'a> {
    let layers = children(document.root_element(), &["layers", "layer"]);
    layers.into_iter().find(|layer| attribute(*layer, "id") == id).unwrap()
}

/// The id of the layer in which a cache meets the rows of the step.
pub(crate) fn cache<'a>(document: &'a Document<'a>, layer: usize, kind: &str) -> &'a str {
    let variable = format!("past_key_values.{layer}.{kind}present.{layer}.{kind}");
    let assigns = of_type(document, "Assign");
    let assign = assigns.into_iter().find(|assign| data(*assign, "variable_id") == variable);
    let id = attribute(assign.unwrap(), "id");
    attribute(edge_to(document, id, "0"), "from-layer")
}

/// The edge that ends at a port.
pub(crate) fn edge_to<'a>(document: &'a Document<'a>, layer: &str, port: &str) -> Node<'a, 'a> {
    let edges = children(document.root_element(), &["edges", "edge"]);
    let ends = |edge: &Node<'_, '_>| {
        attribute(*edge, "to-layer") == layer && attribute(*edge, "to-port") == port
    };
    edges.into_iter().find(ends).unwrap()
}

/// The graph with a port fed from where another one is.
pub(crate) fn redirected(xml: &str, to: (&str, &str), like: (&str, &str)) -> String {
    let document = Document::parse(xml).unwrap();
    let from = edge_to(&document, like.0, like.1);
    let edge = format!(
        "<edge from-layer=\"{}\" from-port=\"{}\" to-layer=\"{}\" to-port=\"{}\"/>",
        attribute(from, "from-layer"),
        attribute(from, "from-port"),
        to.0,
        to.1
    );
    let mut changed = xml.to_owned();
    changed.replace_range(edge_to(&document, to.0, to.1).range(), &edge);
    changed
}

/// The graph with a layer that reads the keys of an earlier one.
pub(crate) fn with_shared_keys(xml: &str, owner: usize, reader: usize) -> String {
    let document = Document::parse(xml).unwrap();
    let attentions = of_type(&document, "ScaledDotProductAttention");
    let [owner, reader] = [owner, reader].map(|layer| attribute(attentions[layer], "id"));
    redirected(xml, (reader, "1"), (owner, "1"))
}

#[test]
fn a_cache_that_later_layers_read_travels_by_its_rows() {
    let exported = Exported::new();
    let xml = with_shared_keys(&exported.xml(), 1, 3);
    std::fs::write(exported.source().join("openvino_model.xml"), xml).unwrap();
    // The residual stream, and two heads of sixteen numbers where the keys cross.
    for (split, width, owners) in
        [(&[1, 3][..], 64, &[1][..]), (&[2, 2], 96, &[0, 1]), (&[1, 1, 1, 1], 96, &[1, 3])]
    {
        let manifest = exported.shard(split).unwrap();
        assert_eq!(manifest.dims.hidden_dim, width, "{split:?}");
        let set = ShardSet::open(&exported.out()).unwrap();
        let mut found = Vec::new();
        for (index, stage) in manifest.stages.iter().enumerate() {
            let xml = std::fs::read_to_string(set.stage_files(index).unwrap().xml).unwrap();
            let surface = check_graph(&xml, stage.bin.bytes);
            if surface.states.contains("past_key_values.1.keypresent.1.key") {
                found.push(index);
            }
        }
        assert_eq!(found, owners, "{split:?}");
    }
}
