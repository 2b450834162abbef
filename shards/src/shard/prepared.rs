//! Writes the shard set of a model, whatever it was read from.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::ops::Range;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::{OnConverted, Progress, ShardError, ShardRequest};
use crate::floats::FloatCoding;
use crate::form::Form;
use crate::ir::bin::BinWriter;
use crate::ir::graph::Graph;
use crate::manifest::{
    self, FORMAT_VERSION, FileEntry, MANIFEST_FILE, Manifest, ModelDims, StageEntry,
};
use crate::output::{OutputDir, io_error};
use crate::shard_set::{ShardSet, hash_file};
use crate::split::Costs;
use crate::text::{self, TextFiles};

/// The file of [`Manifest::head_tokens`].
const HEAD_TOKENS_FILE: &str = "head_tokens.u32";

/// Writes the weights of the stage with this number and builds its graph.
type BuildStage<'a> =
    dyn for<'b> Fn(usize, BinWriter, &'b mut OnConverted<'b>) -> io::Result<Graph> + 'a;

/// Writes the model's own tokenizer and chat template into a folder.
type WriteText<'a> = dyn Fn(&Path) -> Result<TextFiles, ShardError> + 'a;

/// A model that is checked and split.
pub(super) struct Prepared<'a> {
    /// Its name on the wire.
    pub(super) name: String,
    pub(super) architecture: &'a str,
    pub(super) form: Form,
    pub(super) dims: &'a ModelDims,
    /// The layers of each stage.
    pub(super) ranges: &'a [Range<usize>],
    pub(super) costs: &'a Costs,
    /// Source bytes that all stages need together.
    pub(super) bytes_total: u64,
    /// The tokens that a cut head keeps.
    pub(super) head_tokens: Option<&'a [u32]>,
    pub(super) write_text: &'a WriteText<'a>,
    pub(super) build: &'a BuildStage<'a>,
}

impl Prepared<'_> {
    /// Writes the set, complete or not at all.
    ///
    /// # Errors
    /// [`ShardError`]; nothing is left behind.
    pub(super) fn write(
        self,
        request: &ShardRequest,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Manifest, ShardError> {
        let output = OutputDir::create(&request.out_dir, request.force)?;
        let text = self.text(request.tokenizer_from.as_deref(), output.path())?;
        let text_files = text
            .files
            .iter()
            .map(|name| file_entry(output.path(), name))
            .collect::<Result<Vec<_>, _>>()?;
        let head_tokens = write_head_tokens(self.head_tokens, output.path())?;
        let stages = self.stages(output.path(), progress)?;
        let source = request.source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut manifest = Manifest {
            format_version: FORMAT_VERSION,
            model: self.name,
            architecture: self.architecture.to_owned(),
            fingerprint: String::new(),
            source,
            weights: request.weights,
            floats: Some(request.floats.layers).filter(|coding| *coding != FloatCoding::Keep),
            form: self.form,
            dims: self.dims.clone(),
            bos_id: text.bos_id,
            eos_ids: text.eos_ids,
            stages,
            text_files,
            head_tokens,
        };
        manifest.fingerprint = manifest.content_fingerprint();
        write_manifest(&manifest, output.path())?;
        output.publish()?;
        Ok(manifest)
    }

    /// Writes the tokenizer and the chat template, those of another set if one is given.
    fn text(&self, other: Option<&Path>, dir: &Path) -> Result<TextFiles, ShardError> {
        let text = match other {
            Some(other) => {
                let set = ShardSet::open(other).map_err(ShardError::TokenizerFrom)?;
                set.verify_text().map_err(ShardError::TokenizerFrom)?;
                let mut text = text::copy_text_files(&set.dir, dir)?;
                text.bos_id = set.manifest.bos_id;
                text.eos_ids.clone_from(&set.manifest.eos_ids);
                text
            }
            None => (self.write_text)(dir)?,
        };
        let (n_tokens, vocab_size) = (text.n_tokens, self.dims.vocab_size);
        if n_tokens > vocab_size {
            return Err(ShardError::Vocabulary { n_tokens, vocab_size });
        }
        Ok(text)
    }

    fn stages(
        &self,
        dir: &Path,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Vec<StageEntry>, ShardError> {
        let (n_stages, bytes_total) = (self.ranges.len(), self.bytes_total);
        let mut bytes_done = 0;
        let mut stages = Vec::with_capacity(n_stages);
        for (index, range) in self.ranges.iter().enumerate() {
            let (xml, bin) = write_stage(self.build, index, dir, &mut |bytes, coded| {
                bytes_done += bytes;
                progress(Progress { stage: index, n_stages, bytes_done, bytes_total, coded });
            })?;
            let cost_share = self.costs.share(range);
            let (first_layer, end_layer) = (range.start, range.end);
            stages.push(StageEntry { index, first_layer, end_layer, cost_share, xml, bin });
        }
        Ok(stages)
    }
}

fn write_head_tokens(tokens: Option<&[u32]>, dir: &Path) -> Result<Option<FileEntry>, ShardError> {
    let Some(tokens) = tokens else { return Ok(None) };
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    write_durably(&dir.join(HEAD_TOKENS_FILE), &bytes)?;
    file_entry(dir, HEAD_TOKENS_FILE).map(Some)
}

fn write_stage<'a>(
    build: &BuildStage<'_>,
    index: usize,
    dir: &Path,
    on_converted: &'a mut OnConverted<'a>,
) -> Result<(FileEntry, FileEntry), ShardError> {
    let bin_name = format!("stage-{index}.bin");
    let bin_path = dir.join(&bin_name);
    let bin_error = |source| io_error(&bin_path, source);
    let bin = BinWriter::create(&bin_path).map_err(bin_error)?;
    let graph = build(index, bin, on_converted).map_err(bin_error)?;
    let mut xml = Vec::new();
    let xml_name = format!("stage-{index}.xml");
    let xml_path = dir.join(&xml_name);
    graph.write_xml(&format!("stage-{index}"), &mut xml).map_err(|e| io_error(&xml_path, e))?;
    let (bytes, sha256) = graph.bin.close().map_err(bin_error)?;
    let bin = FileEntry { name: bin_name, bytes, sha256 };
    write_durably(&xml_path, &xml)?;
    let sha256 = manifest::hex(&Sha256::digest(&xml));
    Ok((FileEntry { name: xml_name, bytes: xml.len() as u64, sha256 }, bin))
}

/// The entry of a file that has been written by someone else.
fn file_entry(dir: &Path, name: &str) -> Result<FileEntry, ShardError> {
    let path = dir.join(name);
    let (bytes, sha256) = hash_file(&path).map_err(|source| io_error(&path, source))?;
    Ok(FileEntry { name: name.to_owned(), bytes, sha256 })
}

fn write_manifest(manifest: &Manifest, dir: &Path) -> Result<(), ShardError> {
    let path = dir.join(MANIFEST_FILE);
    let mut json =
        serde_json::to_vec_pretty(manifest).map_err(|source| io_error(&path, source.into()))?;
    json.push(b'\n');
    write_durably(&path, &json)
}

fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), ShardError> {
    let write = || {
        let mut out = BufWriter::new(File::create_new(path)?);
        out.write_all(bytes)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    };
    write().map_err(|source| io_error(path, source))
}
