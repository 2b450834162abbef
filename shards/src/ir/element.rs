//! Element types of graph values and constants.

/// An element type, in the two spellings that IR uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ElementType {
    Boolean,
    F64,
    F32,
    F16,
    Bf16,
    F8e4m3,
    F8e5m2,
    F8e8m0,
    F4e2m1,
    Nf4,
    I64,
    I32,
    I16,
    I8,
    I4,
    U64,
    U32,
    U16,
    U8,
    U4,
}

impl ElementType {
    /// All types.
    const ALL: [Self; 20] = [
        Self::Boolean,
        Self::F64,
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::F8e4m3,
        Self::F8e5m2,
        Self::F8e8m0,
        Self::F4e2m1,
        Self::Nf4,
        Self::I64,
        Self::I32,
        Self::I16,
        Self::I8,
        Self::I4,
        Self::U64,
        Self::U32,
        Self::U16,
        Self::U8,
        Self::U4,
    ];

    /// The spelling of `element_type` and `destination_type` attributes.
    pub(crate) fn attribute(self) -> &'static str {
        self.format().0
    }

    /// The spelling of a port's `precision`.
    pub(crate) fn precision(self) -> &'static str {
        self.format().1
    }

    /// Bits of an element.
    pub(crate) fn bits(self) -> u64 {
        self.format().2
    }

    /// The type that an `element_type` attribute names.
    pub(crate) fn from_attribute(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.attribute() == text)
    }

    /// The type that a port's `precision` names.
    pub(crate) fn from_precision(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|element| element.precision() == text)
    }

    fn format(self) -> (&'static str, &'static str, u64) {
        match self {
            Self::Boolean => ("boolean", "BOOL", 8),
            Self::F64 => ("f64", "FP64", 64),
            Self::F32 => ("f32", "FP32", 32),
            Self::F16 => ("f16", "FP16", 16),
            Self::Bf16 => ("bf16", "BF16", 16),
            Self::F8e4m3 => ("f8e4m3", "F8E4M3", 8),
            Self::F8e5m2 => ("f8e5m2", "F8E5M2", 8),
            Self::F8e8m0 => ("f8e8m0", "F8E8M0", 8),
            Self::F4e2m1 => ("f4e2m1", "F4E2M1", 4),
            Self::Nf4 => ("nf4", "NF4", 4),
            Self::I64 => ("i64", "I64", 64),
            Self::I32 => ("i32", "I32", 32),
            Self::I16 => ("i16", "I16", 16),
            Self::I8 => ("i8", "I8", 8),
            Self::I4 => ("i4", "I4", 4),
            Self::U64 => ("u64", "U64", 64),
            Self::U32 => ("u32", "U32", 32),
            Self::U16 => ("u16", "U16", 16),
            Self::U8 => ("u8", "U8", 8),
            Self::U4 => ("u4", "U4", 4),
        }
    }
}
