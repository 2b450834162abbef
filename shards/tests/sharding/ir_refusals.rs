//! Models in OpenVINO's format that are refused, by error and with nothing left behind.

use roxmltree::Document;
use stagebus_shards::ir_input::{IrError, IrErrorKind};
use stagebus_shards::{
    FloatCoding, FloatPlan, Form, ShardError, ShardRequest, StaticForm, WeightMode, shard,
};

use crate::graphs::attribute;
use crate::ir::{Exported, cache, edge_to, layer_of, of_type, redirected, with_shared_keys};

/// Shards a changed model, which must fail and leave nothing.
fn refused(exported: &Exported, split: &[usize]) -> IrError {
    match exported.shard(split) {
        Err(ShardError::Ir(error)) => {
            assert!(!exported.out().try_exists().unwrap(), "{error}");
            error
        }
        other => panic!("{other:?}"),
    }
}

/// Shards the model with another graph.
fn changed(change: impl FnOnce(&str) -> String) -> IrError {
    refused_with(&[2, 2], change)
}

fn refused_with(split: &[usize], change: impl FnOnce(&str) -> String) -> IrError {
    let exported = Exported::new();
    let xml = change(&exported.xml());
    std::fs::write(exported.source().join("openvino_model.xml"), xml).unwrap();
    refused(&exported, split)
}

/// Replaces a text that is there.
fn replaced(xml: &str, from: &str, to: &str) -> String {
    assert!(xml.contains(from), "{from} is not in the graph");
    xml.replace(from, to)
}

#[test]
fn files_that_are_missing_or_cut_off() {
    let exported = Exported::new();
    let bin = exported.source().join("openvino_model.bin");
    let bytes = std::fs::read(&bin).unwrap();
    std::fs::write(&bin, &bytes[..bytes.len() / 2]).unwrap();
    let error = refused(&exported, &[4]);
    let file_bytes = (bytes.len() / 2) as u64;
    assert!(
        matches!(error.kind(), IrErrorKind::ConstantRange { file_bytes: found, .. } if *found == file_bytes),
        "{error}"
    );
    std::fs::remove_file(&bin).unwrap();
    let error = refused(&exported, &[4]);
    assert!(matches!(error.kind(), IrErrorKind::Io { .. }), "{error}");
    assert_eq!(error.file(), bin);
}

#[test]
fn documents_that_are_no_graph() {
    let error = changed(|xml| xml[..xml.len() / 2].to_owned());
    assert!(matches!(error.kind(), IrErrorKind::Xml { .. }), "{error}");
    let error = changed(|xml| replaced(xml, "version=\"11\"", "version=\"9\""));
    assert!(matches!(error.kind(), IrErrorKind::Version { found } if found == "9"), "{error}");
    let malformed = |error: &IrError, expected: &str| {
        let IrErrorKind::Malformed { problem, .. } = error.kind() else { panic!("{error}") };
        assert_eq!(*problem, expected);
    };
    let error = changed(|xml| xml.replacen("<edge from-layer=\"", "<edge from-layer=\"x", 1));
    malformed(&error, "ends at a layer that is not there");
    let error = changed(|xml| xml.replacen("to-port=\"0\"", "to-port=\"77\"", 1));
    malformed(&error, "ends at a port that is not there");
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let attention = attribute(of_type(&document, "ScaledDotProductAttention")[0], "id");
        let mut xml = xml.to_owned();
        xml.replace_range(edge_to(&document, attention, "0").range(), "");
        xml
    });
    malformed(&error, "lacks an input");
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let result = attribute(of_type(&document, "Result")[0], "id");
        let attention = attribute(of_type(&document, "ScaledDotProductAttention")[0], "id");
        redirected(xml, (attention, "0"), (result, "0"))
    });
    malformed(&error, "reads what is made of it");
    let error = changed(|xml| {
        let nested = "<a>".repeat(100) + &"</a>".repeat(100);
        xml.replacen("<layers>", &format!("{nested}<layers>"), 1)
    });
    malformed(&error, "is nested too deep");
}

#[test]
fn operations_and_types_that_nothing_is_known_of() {
    let error = changed(|xml| xml.replacen("type=\"Swish\"", "type=\"NoSuchOp\"", 1));
    let IrErrorKind::UnknownOperation { kind, opset, .. } = error.kind() else { panic!("{error}") };
    assert_eq!((kind.as_str(), opset.as_str()), ("NoSuchOp", "opset4"));
    let swish = "type=\"Swish\" version=\"opset4\"";
    let error = changed(|xml| replaced(xml, swish, "type=\"Swish\" version=\"extension\""));
    assert!(
        matches!(error.kind(), IrErrorKind::UnknownOperation { opset, .. } if opset == "extension"),
        "{error}"
    );
    let error = changed(|xml| replaced(xml, "element_type=\"f16\"", "element_type=\"f12\""));
    assert!(
        matches!(error.kind(), IrErrorKind::ElementType { found, .. } if found == "f12"),
        "{error}"
    );
    let error = changed(|xml| replaced(xml, "shape=\"320, 64\"", "shape=\"320, 65\""));
    let IrErrorKind::ConstantSize { expected, found, .. } = error.kind() else { panic!("{error}") };
    assert_eq!((*expected, *found), (320 * 65 * 2, 320 * 64 * 2));
}

#[test]
fn inputs_and_outputs_that_no_stage_has() {
    let parameter = |xml: &str, from: &str, to: &str| {
        let document = Document::parse(xml).unwrap();
        let parameters = of_type(&document, "Parameter");
        let ids = parameters.iter().find(|layer| attribute(**layer, "name") == "input_ids");
        let range = ids.unwrap().range();
        let mut changed = xml.to_owned();
        changed.replace_range(range.clone(), &replaced(&xml[range], from, to));
        changed
    };
    let error = changed(|xml| parameter(xml, "input_ids", "pixel_values"));
    assert!(
        matches!(error.kind(), IrErrorKind::UnknownInput { name } if name == "pixel_values"),
        "{error}"
    );
    let error = changed(|xml| parameter(xml, "element_type=\"i64\"", "element_type=\"i32\""));
    let IrErrorKind::ElementType { name, found, expected } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!((name.as_str(), found.as_str(), *expected), ("input_ids", "i32", "i64"));
    let error = changed(|xml| parameter(xml, "<dim>-1</dim>", "<dim>1</dim>"));
    assert!(matches!(error.kind(), IrErrorKind::InputShape { name: "input_ids", .. }), "{error}");
    let error = changed(|xml| replaced(xml, "type=\"Result\"", "type=\"Convert\""));
    assert!(matches!(error.kind(), IrErrorKind::Outputs { found: 0 }), "{error}");
}

#[test]
fn models_without_state_attention_or_the_usual_cache() {
    let error = changed(|xml| replaced(xml, "type=\"ReadValue\"", "type=\"Convert\""));
    assert!(matches!(error.kind(), IrErrorKind::NoState), "{error}");
    let attention = "type=\"ScaledDotProductAttention\"";
    let error = changed(|xml| replaced(xml, attention, "type=\"Einsum\""));
    assert!(matches!(error.kind(), IrErrorKind::NoAttention), "{error}");
    let state = |error: &IrError, expected: &str| {
        let IrErrorKind::State { variable, problem } = error.kind() else { panic!("{error}") };
        assert!(variable.starts_with("past_key_values."), "{variable}");
        assert_eq!(*problem, expected);
    };
    let error = changed(|xml| replaced(xml, "type=\"Assign\"", "type=\"Convert\""));
    state(&error, "is never kept");
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let assigns = of_type(&document, "Assign");
        let [first, second] = [assigns[0], assigns[1]].map(|assign| attribute(assign, "id"));
        redirected(xml, (first, "0"), (second, "0"))
    });
    state(&error, "does not grow by rows behind those that it holds");
}

#[test]
fn caches_that_are_read_behind_a_cut_but_cannot_travel() {
    for (split, layer) in [([2, 2], 2), ([3, 1], 3)] {
        let error = refused_with(&split, |xml| {
            let xml = with_shared_keys(xml, 1, 3);
            let document = Document::parse(&xml).unwrap();
            let key = cache(&document, 1, "key");
            let rows = attribute(edge_to(&document, key, "1"), "from-layer");
            let range = layer_of(&document, rows).range();
            let mut halved = xml.clone();
            let layer = replaced(&xml[range.clone()], "precision=\"FP32\"", "precision=\"FP16\"");
            halved.replace_range(range, &layer);
            halved
        });
        let IrErrorKind::SharedCache { layer: found, owner: 1, reader: 3, value, dims } =
            error.kind()
        else {
            panic!("{error}")
        };
        assert_eq!(*found, layer);
        assert!(!value.is_empty() && dims.starts_with("f16 of "), "{error}");
    }
}

#[test]
fn values_that_are_needed_behind_a_cut_but_are_not_rows() {
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let attentions = of_type(&document, "ScaledDotProductAttention");
        // The fourth layer reads what the first one knew before the step.
        let late = attribute(attentions[3], "id");
        redirected(xml, (late, "2"), (cache(&document, 0, "value"), "0"))
    });
    let IrErrorKind::Crossing { layer: 2, dims, .. } = error.kind() else { panic!("{error}") };
    assert!(dims.contains("Past"), "{dims}");
}

#[test]
fn caches_that_begin_with_something_of_another_stage() {
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let first = attribute(of_type(&document, "ScaledDotProductAttention")[0], "id");
        let gathered = attribute(edge_to(&document, cache(&document, 3, "key"), "0"), "from-layer");
        let read = attribute(edge_to(&document, gathered, "0"), "from-layer");
        redirected(xml, (read, "0"), (first, "0"))
    });
    let IrErrorKind::Crossing { layer: 2, value, .. } = error.kind() else { panic!("{error}") };
    assert_eq!(value, "input_ids");
}

#[test]
fn vectors_that_double_with_every_operation_are_not_followed() {
    let exported = Exported::new();
    let port = |id| format!("<port id=\"{id}\" precision=\"I64\"><dim>-1</dim></port>");
    let mut layers = format!(
        "<layer id=\"d0\" name=\"d0\" type=\"Const\" version=\"opset1\"><data \
         element_type=\"i64\" shape=\"16\" offset=\"0\" size=\"128\"/><output>{}</output></layer>",
        port(0)
    );
    let mut edges = String::new();
    for n in 1..60 {
        let (a, b, out) = (port(0), port(1), port(2));
        layers += &format!(
            "<layer id=\"d{n}\" name=\"d{n}\" type=\"Concat\" version=\"opset1\"><data axis=\"0\"/>\
             <input>{a}{b}</input><output>{out}</output></layer>"
        );
        let from = if n == 1 { 0 } else { 2 };
        for to in [0, 1] {
            let before = n - 1;
            edges += &format!(
                "<edge from-layer=\"d{before}\" from-port=\"{from}\" to-layer=\"d{n}\" \
                 to-port=\"{to}\"/>"
            );
        }
    }
    let xml = exported.xml().replacen("<layers>", &format!("<layers>{layers}"), 1);
    let xml = replaced(&xml, "<edges>", &format!("<edges>{edges}"));
    std::fs::write(exported.source().join("openvino_model.xml"), xml).unwrap();
    exported.shard(&[2, 2]).unwrap();
}

#[test]
fn heads_that_mix_rows() {
    let error = changed(|xml| {
        let document = Document::parse(xml).unwrap();
        let result = attribute(of_type(&document, "Result")[0], "id");
        let product = attribute(edge_to(&document, result, "0"), "from-layer");
        let first = attribute(of_type(&document, "ScaledDotProductAttention")[0], "id");
        redirected(xml, (product, "1"), (first, "0"))
    });
    assert!(matches!(error.kind(), IrErrorKind::Head), "{error}");
}

#[test]
fn requests_that_do_not_fit_a_graph() {
    let exported = Exported::new();
    let (compact, int4) = (WeightMode::Compact, FloatPlan::of(FloatCoding::Int4));
    let searched = FloatPlan { search_scales: true, ..FloatPlan::default() };
    for (weights, floats) in
        [(compact, FloatPlan::default()), (WeightMode::Exact, int4), (WeightMode::Exact, searched)]
    {
        let request = ShardRequest { weights, floats: floats.clone(), ..exported.request(&[4]) };
        let Err(ShardError::Ir(error)) = shard(&request, &mut |_| {}) else { panic!("no error") };
        let IrErrorKind::Weights { mode, floats: layers } = error.kind() else { panic!("{error}") };
        assert_eq!((*mode, *layers), (weights, floats.layers));
        assert!(!exported.out().try_exists().unwrap());
    }
    let form = Form::Static(StaticForm::default());
    let request = ShardRequest { form, ..exported.request(&[4]) };
    let Err(ShardError::Ir(error)) = shard(&request, &mut |_| {}) else { panic!("no error") };
    assert!(matches!(error.kind(), IrErrorKind::Form), "{error}");
    let mut request = exported.request(&[4]);
    request.head_tokens = Some(16);
    let error = shard(&request, &mut |_| {}).unwrap_err();
    assert!(matches!(error, ShardError::NoTokenRank { .. }), "{error}");
    std::fs::remove_file(exported.source().join("config.json")).unwrap();
    let error = exported.shard(&[4]).unwrap_err();
    assert!(matches!(error, ShardError::HuggingFace(_)), "{error}");
}
