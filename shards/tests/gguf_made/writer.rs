//! Writes small GGUF files for tests, right ones and wrong ones.

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    Array(Vec<MetaValue>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl MetaValue {
    pub(crate) fn str(text: &str) -> Self {
        Self::Str(text.to_owned())
    }

    pub(crate) fn strs<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self::Array(texts.into_iter().map(Self::str).collect())
    }

    fn number(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::Str(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::U8(value) => out.push(*value),
            Self::I8(value) => out.extend(value.to_le_bytes()),
            Self::U16(value) => out.extend(value.to_le_bytes()),
            Self::I16(value) => out.extend(value.to_le_bytes()),
            Self::U32(value) => out.extend(value.to_le_bytes()),
            Self::I32(value) => out.extend(value.to_le_bytes()),
            Self::F32(value) => out.extend(value.to_le_bytes()),
            Self::Bool(value) => out.push(u8::from(*value)),
            Self::Str(value) => write_str(out, value),
            Self::Array(values) => {
                let element = values.first().map_or(4, Self::number);
                out.extend(element.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| value.write(out));
            }
            Self::U64(value) => out.extend(value.to_le_bytes()),
            Self::I64(value) => out.extend(value.to_le_bytes()),
            Self::F64(value) => out.extend(value.to_le_bytes()),
        }
    }
}

/// A tensor with the bytes of its data.
#[derive(Clone, Debug)]
pub(crate) struct TestTensor {
    pub(crate) name: String,
    pub(crate) ggml_type: u32,
    pub(crate) dims: Vec<u64>,
    pub(crate) data: Vec<u8>,
}

/// A GGUF file in the making.
#[derive(Clone, Debug)]
pub(crate) struct GgufWriter {
    pub(crate) version: u32,
    pub(crate) alignment: u64,
    pub(crate) metadata: Vec<(String, MetaValue)>,
    pub(crate) tensors: Vec<TestTensor>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self { version: 3, alignment: 32, metadata: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufWriter {
    pub(crate) fn meta(mut self, key: &str, value: MetaValue) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    pub(crate) fn tensor(
        mut self,
        name: &str,
        ggml_type: u32,
        dims: &[u64],
        data: Vec<u8>,
    ) -> Self {
        self.tensors.push(TestTensor {
            name: name.to_owned(),
            ggml_type,
            dims: dims.to_vec(),
            data,
        });
        self
    }

    /// The bytes of the file; the last tensor is not padded.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_str(&mut out, key);
            out.extend(value.number().to_le_bytes());
            value.write(&mut out);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment as usize), 0);
            write_str(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.ggml_type.to_le_bytes());
            out.extend((data.len() as u64).to_le_bytes());
            data.extend_from_slice(&tensor.data);
        }
        if !data.is_empty() {
            out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        }
        out.extend(data);
        out
    }
}

fn write_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
