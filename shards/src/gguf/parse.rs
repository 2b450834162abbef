//! Walks the header of a GGUF file and checks the place of every tensor.

use super::error::GgufErrorKind;
use super::metadata::{Entries, Entry, ValueType};
use super::{GgmlType, TensorInfo};

/// Where tensor data begins is a multiple of this unless `general.alignment` says otherwise.
const DEFAULT_ALIGNMENT: u64 = 32;
/// `GGML_MAX_DIMS`.
const MAX_DIMS: u32 = 4;
/// Arrays of arrays are legal but unused; a limit keeps the walk's stack small.
const MAX_NESTING: u32 = 4;

/// What the header of one file holds.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) entries: Entries,
    pub(super) tensors: Vec<TensorInfo>,
}

/// Reads the header of the file `bytes`, which is number `part` of its model.
pub(super) fn header(bytes: &[u8], part: usize) -> Result<Header, GgufErrorKind> {
    let mut cursor = Cursor { bytes, at: 0 };
    let magic = &bytes[..bytes.len().min(4)];
    if magic != b"GGUF" {
        return Err(GgufErrorKind::NotGguf { found: magic.to_vec() });
    }
    cursor.at = 4;
    let version = cursor.u32("the version")?;
    if !matches!(version, 2 | 3) {
        let swapped = version.swap_bytes();
        return Err(match swapped {
            1..=0xffff => GgufErrorKind::BigEndian { version: swapped },
            _ => GgufErrorKind::Version { found: version },
        });
    }
    let n_tensors = cursor.u64("the tensor count")?;
    let n_entries = cursor.u64("the metadata count")?;
    let mut entries = Entries::default();
    // Every round takes bytes from the file, so a false count ends at the end of the file.
    for _ in 0..n_entries {
        let (key, entry) = metadata_entry(&mut cursor)?;
        if entries.insert(key.clone(), entry).is_some() {
            return Err(GgufErrorKind::DuplicateKey { key });
        }
    }
    let mut claims = Vec::new();
    for _ in 0..n_tensors {
        claims.push(tensor_claim(&mut cursor)?);
    }
    let alignment = alignment(bytes, &entries)?;
    let tensors = place_tensors(claims, &cursor, alignment, part)?;
    Ok(Header { entries, tensors })
}

/// A tensor as the header describes it, not yet compared with the file's size.
struct Claim {
    name: String,
    ggml_type: GgmlType,
    dims: Vec<u64>,
    offset: u64,
}

fn metadata_entry(cursor: &mut Cursor<'_>) -> Result<(String, Entry), GgufErrorKind> {
    let key = cursor.name("a metadata key")?;
    let value_type = cursor.value_type(&key)?;
    let start = cursor.at;
    cursor.skip_value(value_type, &key, 0)?;
    Ok((key, Entry { value_type, start, end: cursor.at }))
}

fn tensor_claim(cursor: &mut Cursor<'_>) -> Result<Claim, GgufErrorKind> {
    let name = cursor.name("a tensor name")?;
    let n_dims = cursor.u32("a tensor's dimensions")?;
    if n_dims > MAX_DIMS {
        return Err(GgufErrorKind::Dimensions { tensor: name, found: n_dims });
    }
    let mut dims = Vec::new();
    for _ in 0..n_dims {
        dims.push(cursor.u64("a tensor's dimensions")?);
    }
    let number = cursor.u32("a tensor's type")?;
    let offset = cursor.u64("a tensor's offset")?;
    match GgmlType::from_number(number) {
        Some(ggml_type) => Ok(Claim { name, ggml_type, dims, offset }),
        None => Err(GgufErrorKind::UnknownTensorType { tensor: name, found: number }),
    }
}

fn alignment(bytes: &[u8], entries: &Entries) -> Result<u64, GgufErrorKind> {
    const KEY: &str = "general.alignment";
    let Some(entry) = entries.get(KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let alignment: u64 = entry.read(KEY, bytes)?;
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(GgufErrorKind::Alignment { found: alignment })
    }
}

/// Checks every claim against the file and gives each tensor its absolute place.
fn place_tensors(
    claims: Vec<Claim>,
    cursor: &Cursor<'_>,
    alignment: u64,
    part: usize,
) -> Result<Vec<TensorInfo>, GgufErrorKind> {
    let file_len = cursor.bytes.len() as u64;
    let data_start = (cursor.at as u64).checked_next_multiple_of(alignment);
    let mut tensors = Vec::with_capacity(claims.len());
    for claim in claims {
        let (n_elements, len) = size(&claim)?;
        if claim.offset % alignment != 0 {
            return Err(GgufErrorKind::Misaligned {
                tensor: claim.name,
                offset: claim.offset,
                alignment,
            });
        }
        let start = data_start.and_then(|start| start.checked_add(claim.offset));
        let range = start.and_then(|start| Some((start, start.checked_add(len)?)));
        let Some((start, end)) = range else {
            return Err(GgufErrorKind::TooLarge { tensor: claim.name, dims: claim.dims });
        };
        if end > file_len && len > 0 {
            let missing = end - file_len;
            return Err(GgufErrorKind::TruncatedTensor { tensor: claim.name, missing });
        }
        // Both fit: they are at most the length of the map, or the tensor is empty.
        let start = if len == 0 { 0 } else { start };
        let (Ok(start), Ok(len)) = (usize::try_from(start), usize::try_from(len)) else {
            return Err(GgufErrorKind::TooLarge { tensor: claim.name, dims: claim.dims });
        };
        let Claim { name, ggml_type, dims, .. } = claim;
        tensors.push(TensorInfo { name, ggml_type, dims, n_elements, part, start, len });
    }
    check_overlaps(&tensors)?;
    Ok(tensors)
}

/// Elements and bytes of a tensor.
fn size(claim: &Claim) -> Result<(u64, u64), GgufErrorKind> {
    let block = claim.ggml_type.block_len();
    let row = claim.dims.first().copied().unwrap_or(1);
    if row % block != 0 {
        return Err(GgufErrorKind::PartialBlock { tensor: claim.name.clone(), found: row, block });
    }
    let n_elements = claim.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let n_bytes = n_elements.and_then(|n| (n / block).checked_mul(claim.ggml_type.block_bytes()));
    match (n_elements, n_bytes) {
        (Some(n_elements), Some(n_bytes)) => Ok((n_elements, n_bytes)),
        _ => Err(GgufErrorKind::TooLarge { tensor: claim.name.clone(), dims: claim.dims.clone() }),
    }
}

fn check_overlaps(tensors: &[TensorInfo]) -> Result<(), GgufErrorKind> {
    let mut by_start: Vec<&TensorInfo> = tensors.iter().filter(|t| t.len > 0).collect();
    by_start.sort_by_key(|tensor| tensor.start);
    for pair in by_start.windows(2) {
        if pair[0].start + pair[0].len > pair[1].start {
            return Err(GgufErrorKind::Overlap {
                first: pair[0].name.clone(),
                second: pair[1].name.clone(),
            });
        }
    }
    Ok(())
}

/// A place in the file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, len: u64, reading: &'static str) -> Result<&'a [u8], GgufErrorKind> {
        let left = (self.bytes.len() - self.at) as u64;
        if len > left {
            return Err(GgufErrorKind::Truncated {
                reading,
                offset: self.at as u64,
                missing: len - left,
            });
        }
        // `len` is at most the length of a slice.
        let end = self.at + usize::try_from(len).unwrap_or(0);
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self, reading: &'static str) -> Result<u32, GgufErrorKind> {
        let mut number = [0; 4];
        number.copy_from_slice(self.take(4, reading)?);
        Ok(u32::from_le_bytes(number))
    }

    fn u64(&mut self, reading: &'static str) -> Result<u64, GgufErrorKind> {
        let mut number = [0; 8];
        number.copy_from_slice(self.take(8, reading)?);
        Ok(u64::from_le_bytes(number))
    }

    fn name(&mut self, reading: &'static str) -> Result<String, GgufErrorKind> {
        let offset = self.at as u64;
        let len = self.u64(reading)?;
        let bytes = self.take(len, reading)?;
        match std::str::from_utf8(bytes) {
            Ok(name) => Ok(name.to_owned()),
            Err(_not_utf8) => Err(GgufErrorKind::NameNotUtf8 { offset }),
        }
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufErrorKind> {
        let number = self.u32("a metadata value's type")?;
        ValueType::from_number(number)
            .ok_or_else(|| GgufErrorKind::UnknownValueType { key: key.to_owned(), found: number })
    }

    /// Steps over a value, checking that it lies inside the file.
    fn skip_value(
        &mut self,
        value_type: ValueType,
        key: &str,
        depth: u32,
    ) -> Result<(), GgufErrorKind> {
        const READING: &str = "a metadata value";
        if let Some(width) = value_type.width() {
            self.take(width as u64, READING)?;
        } else if value_type == ValueType::String {
            let len = self.u64(READING)?;
            self.take(len, READING)?;
        } else {
            if depth == MAX_NESTING {
                return Err(GgufErrorKind::NestedTooDeep {
                    key: key.to_owned(),
                    limit: MAX_NESTING,
                });
            }
            let element = self.value_type(key)?;
            let len = self.u64(READING)?;
            if let Some(width) = element.width() {
                self.take(len.saturating_mul(width as u64), READING)?;
            } else {
                for _ in 0..len {
                    self.skip_value(element, key, depth + 1)?;
                }
            }
        }
        Ok(())
    }
}
