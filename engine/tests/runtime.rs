//! Opening the OpenVINO library: in a process of its own, since a process opens one only.

use std::path::Path;

use stagebus_engine::{Runtime, RuntimeError};

#[test]
fn a_missing_or_foreign_library_is_told_and_the_right_one_opens() {
    let missing = Runtime::load(Path::new("/no/such/libopenvino_c.so")).unwrap_err();
    assert!(matches!(missing, RuntimeError::NotFound { .. }), "{missing:?}");
    assert!(missing.to_string().contains("cargo xtask setup"), "{missing}");

    let folder = tempfile::tempdir().unwrap();
    let is_folder = Runtime::load(folder.path()).unwrap_err();
    assert!(matches!(is_folder, RuntimeError::NotFound { .. }), "{is_folder:?}");

    let foreign = folder.path().join("libopenvino_c.so");
    std::fs::write(&foreign, "no library").unwrap();
    let foreign = Runtime::load(&foreign).unwrap_err();
    assert!(matches!(foreign, RuntimeError::Open { .. }), "{foreign:?}");

    let found = stagebus_settings::find_openvino().unwrap();
    let runtime = Runtime::load(found.path()).unwrap_or_else(|error| panic!("{error}"));
    assert!(runtime.devices().unwrap().contains(&"CPU".to_owned()));
    assert!(runtime.build().starts_with("20"), "{}", runtime.build());
}
