//! Models split into several files.

use std::path::{Path, PathBuf};

use stagebus_shards::gguf::{Gguf, GgufErrorKind};
use tempfile::TempDir;

use crate::writer::{GgufWriter, MetaValue};

fn part(index: u16, count: u16, n_tensors: i32) -> GgufWriter {
    let writer = GgufWriter::default()
        .meta("split.no", MetaValue::U16(index))
        .meta("split.count", MetaValue::U16(count))
        .meta("split.tensors.count", MetaValue::I32(n_tensors));
    match index {
        0 => writer.meta("general.name", MetaValue::str("whole")),
        _ => writer.tensor(&format!("blk.{index}"), 24, &[3], vec![index as u8; 3]),
    }
}

fn path(dir: &Path, index: u16) -> PathBuf {
    dir.join(format!("model-{:05}-of-00003.gguf", index + 1))
}

/// Writes three parts: the metadata, and two tensors.
fn write_parts(n_tensors: i32) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for index in 0..3 {
        std::fs::write(path(dir.path(), index), part(index, 3, n_tensors).bytes()).unwrap();
    }
    dir
}

#[test]
fn any_part_opens_the_whole_model() {
    let dir = write_parts(2);
    for index in 0..3 {
        let gguf = Gguf::open(path(dir.path(), index)).unwrap();
        assert_eq!(gguf.files().len(), 3);
        assert_eq!(gguf.metadata().str("general.name").unwrap(), "whole");
        let data: Vec<&[u8]> = gguf.tensors().map(|tensor| gguf.data(tensor)).collect();
        assert_eq!(data, [[1; 3], [2; 3]]);
        gguf.release(gguf.tensor("blk.2").unwrap());
        assert_eq!(gguf.data(gguf.tensor("blk.2").unwrap()), [2; 3]);
    }
}

#[test]
fn a_missing_part_is_named() {
    let dir = write_parts(2);
    std::fs::remove_file(path(dir.path(), 1)).unwrap();
    let error = Gguf::open(path(dir.path(), 0)).unwrap_err();
    assert_eq!(error.file(), path(dir.path(), 1));
    assert!(matches!(error.kind(), GgufErrorKind::MissingPart { part: 2, count: 3 }), "{error}");
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let dir = write_parts(2);
    std::fs::copy(path(dir.path(), 2), path(dir.path(), 1)).unwrap();
    let error = Gguf::open(path(dir.path(), 0)).unwrap_err();
    let swapped = GgufErrorKind::SplitPlace { found: 2, found_count: 3, expected: 1, count: 3 };
    assert_eq!(format!("{:?}", error.kind()), format!("{swapped:?}"));

    let dir = write_parts(5);
    let error = Gguf::open(path(dir.path(), 0)).unwrap_err();
    let lost = GgufErrorKind::SplitTensors { found: 2, expected: 5 };
    assert_eq!(format!("{:?}", error.kind()), format!("{lost:?}"));
}

#[test]
fn a_renamed_part_is_refused() {
    let dir = write_parts(2);
    let renamed = dir.path().join("model.gguf");
    std::fs::rename(path(dir.path(), 0), &renamed).unwrap();
    let error = Gguf::open(&renamed).unwrap_err();
    assert!(matches!(error.kind(), GgufErrorKind::SplitName { count: 3 }), "{error}");
}
