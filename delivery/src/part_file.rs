//! A file that comes in parts: `<name>.part` holds what has come, followed by a note of where to go
//! on. Part and note are written with one call, so a process that is killed leaves both or neither.
//! A note that does not fit what stands before it (a power cut) makes the file begin anew.

use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use stagebus_bus::Part;
use stagebus_shards::manifest::hex;

/// Bytes of the note: parts, bytes, sequence of the last part.
const NOTE_BYTES: usize = 24;

/// Bytes read at once while hashing.
const CHUNK_BYTES: usize = 1 << 20;

/// A file that comes in parts.
#[derive(Debug)]
pub(crate) struct PartFile {
    path: PathBuf,
    /// Held as long as somebody may write.
    _lock: Arc<File>,
    file: File,
    hash: Sha256,
    /// Parts that are here.
    pub(crate) n_parts: u64,
    /// Bytes that are here.
    pub(crate) bytes: u64,
    /// Sequence of the last part.
    pub(crate) sequence: u64,
    buffer: Vec<u8>,
}

impl PartFile {
    /// Opens what has come so far of a file of `total` bytes in parts of `part_bytes`, for whoever
    /// holds the `lock`.
    pub(crate) fn open(
        path: PathBuf,
        lock: &Arc<File>,
        (part_bytes, total): (u64, u64),
    ) -> io::Result<Self> {
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path)?;
        let mut part_file = Self {
            path,
            _lock: Arc::clone(lock),
            file,
            hash: Sha256::new(),
            n_parts: 0,
            bytes: 0,
            sequence: 0,
            buffer: Vec::new(),
        };
        if let Some([n_parts, bytes, sequence]) = part_file.read_note()?
            && n_parts > 0
            && bytes == n_parts.saturating_mul(part_bytes).min(total)
        {
            part_file.hash = hash(&mut part_file.file, bytes)?;
            (part_file.n_parts, part_file.bytes, part_file.sequence) = (n_parts, bytes, sequence);
        } else {
            part_file.file.set_len(0)?;
        }
        Ok(part_file)
    }

    /// The note at the end; nothing if it does not fit the file's length.
    fn read_note(&mut self) -> io::Result<Option<[u64; 3]>> {
        let Some(at) = self.file.metadata()?.len().checked_sub(NOTE_BYTES as u64) else {
            return Ok(None);
        };
        self.file.seek(SeekFrom::Start(at))?;
        let mut note = [[0; 8]; 3];
        for number in &mut note {
            self.file.read_exact(number)?;
        }
        let note = note.map(u64::from_le_bytes);
        Ok((note[1] == at).then_some(note))
    }

    /// Adds the next part.
    pub(crate) fn append(&mut self, part: &Part) -> io::Result<()> {
        let bytes = self.bytes + part.bytes.len() as u64;
        self.buffer.clear();
        self.buffer.extend_from_slice(&part.bytes);
        for number in [part.index + 1, bytes, part.sequence] {
            self.buffer.extend_from_slice(&number.to_le_bytes());
        }
        self.file.seek(SeekFrom::Start(self.bytes))?;
        self.file.write_all(&self.buffer)?;
        self.hash.update(&part.bytes);
        (self.n_parts, self.bytes, self.sequence) = (part.index + 1, bytes, part.sequence);
        Ok(())
    }

    /// Moves the file to its place if it has this hash; otherwise removes it and returns its hash.
    pub(crate) fn finish(self, place: &Path, sha256: &str) -> io::Result<Result<(), String>> {
        let found = hex(&self.hash.finalize());
        if found != sha256 {
            fs::remove_file(&self.path)?;
            return Ok(Err(found));
        }
        self.file.set_len(self.bytes)?;
        self.file.sync_all()?;
        fs::rename(&self.path, place)?;
        Ok(Ok(()))
    }
}

/// Hashes the first `bytes` of a file.
fn hash(file: &mut File, bytes: u64) -> io::Result<Sha256> {
    file.seek(SeekFrom::Start(0))?;
    let mut hash = Sha256::new();
    let mut left = file.take(bytes);
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match left.read(&mut chunk)? {
            0 => return Ok(hash),
            n => hash.update(&chunk[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PART: u64 = 10;
    const TOTAL: u64 = 25;

    fn content() -> Vec<u8> {
        (0..TOTAL).map(|i| i.to_le_bytes()[0]).collect()
    }

    fn part(index: u64) -> Part {
        let (from, to) = (index * PART, ((index + 1) * PART).min(TOTAL));
        let (from, to) =
            (usize::try_from(from).expect("small"), usize::try_from(to).expect("small"));
        Part { index, sequence: 100 + index, bytes: content()[from..to].to_vec().into() }
    }

    fn open_with(path: &Path, part_bytes: u64) -> PartFile {
        // Any file will do as a lock of one's own.
        let lock = Arc::new(tempfile::tempfile().expect("a file"));
        PartFile::open(path.to_owned(), &lock, (part_bytes, TOTAL)).expect("it opens")
    }

    fn open(path: &Path) -> PartFile {
        open_with(path, PART)
    }

    #[test]
    fn a_file_goes_on_where_it_was_and_appears_when_it_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, place) = (folder.path().join("f.part"), folder.path().join("f"));
        for index in 0..3 {
            // Each part by another process.
            let mut file = open(&path);
            assert_eq!((file.n_parts, file.bytes), (index, index * PART));
            assert_eq!(file.sequence, if index == 0 { 0 } else { 99 + index });
            file.append(&part(index)).expect("it is written");
        }
        let sha256 = hex(&Sha256::digest(content()));
        open(&path).finish(&place, &sha256).expect("it is written").expect("it is the right one");
        assert_eq!(fs::read(&place).expect("it is there"), content());
        assert!(fs::metadata(&path).is_err(), "nothing is left");
    }

    #[test]
    fn what_does_not_fit_its_note_begins_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("f.part");
        let mut file = open(&path);
        for index in 0..2 {
            file.append(&part(index)).expect("it is written");
        }
        let whole = fs::read(&path).expect("it is there");
        let spoilt: [Vec<u8>; 4] = [
            whole[..whole.len() - 1].to_vec(),
            [whole.as_slice(), &[0]].concat(),
            Vec::new(),
            vec![0; NOTE_BYTES],
        ];
        for bytes in spoilt {
            fs::write(&path, &bytes).expect("it is written");
            assert_eq!(open(&path).n_parts, 0, "{bytes:?}");
        }
        fs::write(&path, &whole).expect("it is written");
        assert_eq!(open(&path).n_parts, 2);
        // Parts of another size are another file.
        assert_eq!(open_with(&path, 11).n_parts, 0);
    }

    #[test]
    fn a_wrong_hash_is_told_and_nothing_is_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, place) = (folder.path().join("f.part"), folder.path().join("f"));
        let mut file = open(&path);
        file.append(&part(0)).expect("it is written");
        let found = file.finish(&place, "00").expect("it is removed").expect_err("another hash");
        assert_eq!(found, hex(&Sha256::digest(&content()[..10])));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }
}
