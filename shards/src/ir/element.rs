//! Element types of graph values and constants.

/// An element type, in the two spellings that IR uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ElementType {
    Boolean,
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I8,
    U8,
    I4,
    U4,
}

impl ElementType {
    /// The spelling of `element_type` and `destination_type` attributes.
    pub(crate) fn attribute(self) -> &'static str {
        match self {
            Self::Boolean => "boolean",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::I8 => "i8",
            Self::U8 => "u8",
            Self::I4 => "i4",
            Self::U4 => "u4",
        }
    }

    /// The spelling of a port's `precision`.
    pub(crate) fn precision(self) -> &'static str {
        match self {
            Self::Boolean => "BOOL",
            Self::F32 => "FP32",
            Self::F16 => "FP16",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I8 => "I8",
            Self::U8 => "U8",
            Self::I4 => "I4",
            Self::U4 => "U4",
        }
    }
}
