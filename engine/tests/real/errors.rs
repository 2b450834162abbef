//! What is refused, and that a refusal changes nothing.

use std::path::Path;

use stagebus_engine::{
    Backend, EngineKind, EngineOptions, GraphMismatch, LoadError, OpenError, OpenStageError,
    RowPath, RuntimeError, SessionKey, StageRequest, StageSpec, StatefulBackend, StepError,
    StepRows, open_backend,
};
use stagebus_shards::shard_set::StageFiles;

use crate::chain::{ANSWER, Chain, ONE, PROMPT, TWO, exact, library, runtime, whole};

#[test]
fn bad_steps_are_refused_and_change_nothing() {
    let mut chain = whole();
    let unknown = chain.step(20, 0, &[1], &[0]);
    assert!(matches!(unknown, Err(StepError::UnknownSession { .. })), "{unknown:?}");
    chain.open(20);
    let first = chain.token(20, 0, &PROMPT);
    let gap = chain.step(20, 38, &[1], &[0]);
    assert!(matches!(gap, Err(StepError::Gap { kv_len: 37, start_pos: 38, .. })), "{gap:?}");
    let token = chain.step(20, 37, &[49_152], &[0]);
    assert!(matches!(token, Err(StepError::Token { token: 49_152, .. })), "{token:?}");
    let empty = chain.step(20, 37, &[], &[]);
    assert!(matches!(empty, Err(StepError::Shape { .. })), "{empty:?}");
    let wanted = chain.step(20, 37, &[1], &[1]);
    assert!(matches!(wanted, Err(StepError::Shape { .. })), "{wanted:?}");
    let full = chain.step(20, 37, &vec![1; 8156], &[]);
    assert!(matches!(full, Err(StepError::ContextFull { len: 8193, limit: 8192, .. })), "{full:?}");
    assert_eq!(chain.token(20, 37, &[first]), ANSWER[1]);
    chain.close(20);
}

#[test]
fn a_session_runs_once_per_micro_batch() {
    let mut chain = whole();
    chain.open(21);
    let rows = StepRows {
        session: SessionKey(21),
        start_pos: 0,
        path: RowPath::Prefill,
        tokens: &PROMPT,
        hidden: None,
        wanted: &[36],
    };
    let mut results = Vec::new();
    chain.stages[0].run(&[rows, rows], &mut |done| {
        results.push((done.index, done.output.is_ok()));
    });
    assert_eq!(results, [(0, true), (1, false)]);
    chain.close(21);
}

#[test]
fn limits_of_sessions_context_and_masked_slots_hold() {
    let options = EngineOptions {
        max_sessions: 1,
        context_limit: Some(20),
        max_masked: 10,
        compact_at: 4,
        ..exact()
    };
    let mut chain = Chain::load(&ONE, &options);
    chain.open(1);
    let second = chain.stages[0].open(SessionKey(2), &[], 10);
    assert!(matches!(second, Err(OpenError::Full { n_sessions: 1, max_sessions: 1 })));
    let full = chain.step(1, 0, &PROMPT, &[]);
    assert!(matches!(full, Err(StepError::ContextFull { len: 37, limit: 20, .. })), "{full:?}");
    chain.step(1, 0, &PROMPT[..12], &[]).unwrap();
    chain.step(1, 4, &PROMPT[4..6], &[]).unwrap();
    let used = chain.stages[0].kv_use();
    assert_eq!((used.tokens, used.masked_tokens, used.n_to_compact), (14, 8, 1));
    let bloated = chain.step(1, 2, &[1], &[]);
    let Err(StepError::Bloated { masked: 12, limit: 10, .. }) = bloated else {
        panic!("{bloated:?}")
    };
    chain.step(1, 6, &PROMPT[6..7], &[]).unwrap();
    chain.step(1, 0, &PROMPT[..7], &[]).unwrap();
    assert_eq!(chain.stages[0].kv_use().masked_tokens, 0);
}

#[track_caller]
fn refused(files: &StageFiles, spec: StageSpec, options: &EngineOptions) -> LoadError {
    StatefulBackend::load(&runtime(), files, spec, options).unwrap_err()
}

#[test]
fn a_stage_that_does_not_fit_is_refused() {
    let spec = |stage| StageSpec::from_manifest(&TWO.manifest, stage).unwrap();
    let files = |stage| TWO.stage_files(stage).unwrap();
    let swapped = refused(&files(1), spec(0), &exact());
    let LoadError::Graph { what: GraphMismatch::UnknownInput { name }, .. } = swapped else {
        panic!("{swapped}")
    };
    assert!(name == "inputs_embeds" || name == "logit_rows", "{name}");
    let narrow = refused(&files(0), StageSpec { hidden_dim: 512, ..spec(0) }, &exact());
    let LoadError::OutputWidth { expected: 512, found: 576, .. } = narrow else {
        panic!("{narrow}")
    };
    let missing = StageFiles { xml: "none.xml".into(), bin: "none.bin".into() };
    let missing = refused(&missing, spec(0), &exact());
    assert!(matches!(missing, LoadError::Read { .. }), "{missing}");
    let apart = StageFiles { bin: files(1).bin, ..files(0) };
    let apart = refused(&apart, spec(0), &exact());
    assert!(matches!(apart, LoadError::WeightsName { .. }), "{apart}");
}

#[test]
fn a_damaged_graph_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let files = StageFiles { xml: folder.path().join("s.xml"), bin: folder.path().join("s.bin") };
    let whole_files = TWO.stage_files(1).unwrap();
    let xml = std::fs::read(&whole_files.xml).unwrap();
    std::fs::write(&files.xml, &xml[..xml.len() / 2]).unwrap();
    std::fs::copy(&whole_files.bin, &files.bin).unwrap();
    let spec = StageSpec::from_manifest(&TWO.manifest, 1).unwrap();
    let cut = refused(&files, spec.clone(), &exact());
    assert!(matches!(cut, LoadError::Compile { .. }), "{cut}");
    std::fs::write(&files.xml, &xml).unwrap();
    let weights = std::fs::read(&whole_files.bin).unwrap();
    std::fs::write(&files.bin, &weights[..weights.len() / 2]).unwrap();
    let short = refused(&files, spec, &exact());
    assert!(matches!(short, LoadError::Compile { .. }), "{short}");
}

#[test]
fn the_property_at_fault_is_named() {
    let spec = StageSpec::from_manifest(&ONE.manifest, 0).unwrap();
    let files = ONE.stage_files(0).unwrap();
    for (bad_key, bad_value) in [("NO_SUCH_PROPERTY", "1"), ("KV_CACHE_PRECISION", "i7")] {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let properties = vec![pair("NUM_STREAMS", "1"), pair(bad_key, bad_value)];
        let error = refused(&files, spec.clone(), &EngineOptions { properties, ..exact() });
        let LoadError::Property { key, value, device, .. } = error else { panic!("{error}") };
        assert_eq!((&*key, &*value, &*device), (bad_key, bad_value, "CPU"));
    }
    let options = EngineOptions { device: "NO_SUCH_DEVICE".to_owned(), ..exact() };
    let error = refused(&files, spec, &options);
    let LoadError::Compile { device, available, .. } = error else { panic!("{error}") };
    assert_eq!(device, "NO_SUCH_DEVICE");
    assert!(available.contains("CPU"), "{available}");
}

#[test]
fn only_engines_that_need_openvino_ask_for_it() {
    let request = StageRequest { shards: &ONE, stage: 0, library: None };
    let options = EngineOptions::default();
    let mut test = open_backend(EngineKind::Test, &request, &options).unwrap();
    assert_eq!(test.open(SessionKey(1), &[], 10).unwrap(), 0);
    for kind in [EngineKind::Auto, EngineKind::Stateful] {
        let error = open_backend(kind, &request, &options).err();
        let Some(OpenStageError::Runtime(RuntimeError::NotGiven)) = error else {
            panic!("{error:?}")
        };
    }
    let library = library();
    let beyond = StageRequest { stage: 1, library: Some(&library), ..request };
    let error = open_backend(EngineKind::Auto, &beyond, &options).err();
    assert!(matches!(error, Some(OpenStageError::Stage(_))), "{error:?}");
    let mut auto = open_backend(
        EngineKind::Auto,
        &StageRequest { library: Some(&library), ..request },
        &exact(),
    )
    .unwrap();
    assert_eq!(auto.open(SessionKey(1), &[], 10).unwrap(), 0);
}

#[test]
fn another_library_is_refused() {
    let _loaded = runtime();
    let error = stagebus_engine::Runtime::load(Path::new("elsewhere/libopenvino_c.so"));
    assert!(matches!(error, Err(RuntimeError::OtherLoaded { .. })), "{error:?}");
}
