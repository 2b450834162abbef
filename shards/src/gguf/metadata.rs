//! Typed access to the metadata of a GGUF file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::error::{GgufError, GgufErrorKind};

/// Type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 32-bit integer.
    U32,
    /// Signed 32-bit integer.
    I32,
    /// 32-bit float.
    F32,
    /// One byte; zero is false.
    Bool,
    /// Length and bytes.
    String,
    /// Element type, length and elements.
    Array,
    /// Unsigned 64-bit integer.
    U64,
    /// Signed 64-bit integer.
    I64,
    /// 64-bit float.
    F64,
}

impl ValueType {
    pub(super) fn from_number(number: u32) -> Option<Self> {
        const BY_NUMBER: [ValueType; 13] = [
            ValueType::U8,
            ValueType::I8,
            ValueType::U16,
            ValueType::I16,
            ValueType::U32,
            ValueType::I32,
            ValueType::F32,
            ValueType::Bool,
            ValueType::String,
            ValueType::Array,
            ValueType::U64,
            ValueType::I64,
            ValueType::F64,
        ];
        BY_NUMBER.get(usize::try_from(number).ok()?).copied()
    }

    /// Bytes of a value; none for strings and arrays.
    pub(super) fn width(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "a u8",
            Self::I8 => "an i8",
            Self::U16 => "a u16",
            Self::I16 => "an i16",
            Self::U32 => "a u32",
            Self::I32 => "an i32",
            Self::F32 => "an f32",
            Self::Bool => "a bool",
            Self::String => "a string",
            Self::Array => "an array of another type",
            Self::U64 => "a u64",
            Self::I64 => "an i64",
            Self::F64 => "an f64",
        })
    }
}

/// All entries of a file, by key.
pub(super) type Entries = BTreeMap<String, Entry>;

/// Where the value of an entry lies; the range was checked when the file was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) value_type: ValueType,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Entry {
    /// Decodes the value.
    pub(super) fn read<'a, T: FromMetadata<'a>>(
        self,
        key: &str,
        bytes: &'a [u8],
    ) -> Result<T, GgufErrorKind> {
        let value = Value { value_type: self.value_type, bytes: &bytes[self.start..self.end] };
        T::from_value(value).map_err(|mismatch| match mismatch {
            Mismatch::Type(found) => {
                GgufErrorKind::WrongType { key: key.to_owned(), expected: T::EXPECTED, found }
            }
            Mismatch::Range(found) => {
                GgufErrorKind::OutOfRange { key: key.to_owned(), expected: T::EXPECTED, found }
            }
            Mismatch::Utf8(index) => GgufErrorKind::StringNotUtf8 { key: key.to_owned(), index },
        })
    }
}

/// The metadata of a GGUF file.
///
/// Integers of any width are accepted where an integer is asked for, as long as the value fits.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    entries: &'a Entries,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(file: &'a Path, bytes: &'a [u8], entries: &'a Entries) -> Self {
        Self { file, bytes, entries }
    }

    /// The keys, in alphabetical order.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &'a str> {
        self.entries.keys().map(String::as_str)
    }

    /// Tells whether the file has this key.
    pub fn contains(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// The value of a key that may be missing.
    ///
    /// # Errors
    /// [`GgufErrorKind::WrongType`], [`GgufErrorKind::OutOfRange`] or
    /// [`GgufErrorKind::StringNotUtf8`] if the value is there but is not a `T`.
    pub fn get<T: FromMetadata<'a>>(&self, key: &str) -> Result<Option<T>, GgufError> {
        let Some(entry) = self.entries.get(key) else { return Ok(None) };
        entry.read(key, self.bytes).map(Some).map_err(|kind| GgufError::new(self.file, kind))
    }

    /// The value of a key that has to be there.
    ///
    /// # Errors
    /// Those of [`Self::get`], and [`GgufErrorKind::MissingKey`].
    pub fn require<T: FromMetadata<'a>>(&self, key: &str) -> Result<T, GgufError> {
        self.get(key)?.ok_or_else(|| {
            GgufError::new(
                self.file,
                GgufErrorKind::MissingKey { key: key.to_owned(), expected: T::EXPECTED },
            )
        })
    }

    /// The value of an integer key.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.require(key)
    }

    /// The value of an integer key.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.require(key)
    }

    /// The value of a float key.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.require(key)
    }

    /// The value of a bool key.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        self.require(key)
    }

    /// The value of a string key.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn str(&self, key: &str) -> Result<&'a str, GgufError> {
        self.require(key)
    }

    /// The value of a key that holds an array of strings.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn strs(&self, key: &str) -> Result<Vec<&'a str>, GgufError> {
        self.require(key)
    }

    /// The value of a key that holds an array of integers.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, GgufError> {
        self.require(key)
    }

    /// The value of a key that holds an array of integers.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn u32s(&self, key: &str) -> Result<Vec<u32>, GgufError> {
        self.require(key)
    }

    /// The value of a key that holds an array of floats.
    ///
    /// # Errors
    /// Those of [`Self::require`].
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.require(key)
    }
}

/// A Rust type that a metadata value can be read as.
pub trait FromMetadata<'a>: Sized {
    /// How error messages call the type.
    const EXPECTED: &'static str;

    /// Reads the value.
    ///
    /// # Errors
    /// Tells how the value differs from the type.
    fn from_value(value: Value<'a>) -> Result<Self, Mismatch>;
}

/// A metadata value in the file.
#[derive(Clone, Copy, Debug)]
pub struct Value<'a> {
    value_type: ValueType,
    bytes: &'a [u8],
}

/// How a value differs from the type asked for.
#[derive(Clone, Copy, Debug)]
pub enum Mismatch {
    /// Another type.
    Type(ValueType),
    /// A number that does not fit.
    Range(i128),
    /// A string (with its place in the array) that is not UTF-8.
    Utf8(usize),
}

impl<'a> Value<'a> {
    /// The little-endian bytes of a number, filled up to 8 bytes with its sign.
    fn integer(self) -> Result<i128, Mismatch> {
        let signed = match self.value_type {
            ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => false,
            ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64 => true,
            ValueType::F32
            | ValueType::F64
            | ValueType::Bool
            | ValueType::String
            | ValueType::Array => return Err(Mismatch::Type(self.value_type)),
        };
        let negative = signed && self.bytes.last().is_some_and(|&top| top >= 0x80);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..self.bytes.len()].copy_from_slice(self.bytes);
        Ok(i128::from_le_bytes(wide))
    }

    fn float(self) -> Result<f32, Mismatch> {
        match (self.value_type, self.bytes) {
            (ValueType::F32, &[a, b, c, d]) => Ok(f32::from_le_bytes([a, b, c, d])),
            (ValueType::F64, &[a, b, c, d, e, f, g, h]) => {
                Ok(narrow(f64::from_le_bytes([a, b, c, d, e, f, g, h])))
            }
            (found, _) => Err(Mismatch::Type(found)),
        }
    }

    fn string(self) -> Result<&'a str, Mismatch> {
        if self.value_type != ValueType::String {
            return Err(Mismatch::Type(self.value_type));
        }
        match std::str::from_utf8(&self.bytes[8..]) {
            Ok(text) => Ok(text),
            Err(_not_utf8) => Err(Mismatch::Utf8(0)),
        }
    }

    /// The elements of an array, each as a value of its own.
    fn elements(self) -> Result<Elements<'a>, Mismatch> {
        if self.value_type != ValueType::Array {
            return Err(Mismatch::Type(self.value_type));
        }
        let element = u32::try_from(length(&self.bytes[..4])).ok().and_then(ValueType::from_number);
        match element {
            Some(element) if element != ValueType::Array => {
                Ok(Elements { element, left: length(&self.bytes[4..12]), bytes: &self.bytes[12..] })
            }
            _ => Err(Mismatch::Type(ValueType::Array)),
        }
    }
}

/// A float of twice the width, rounded.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest is what is wanted")]
fn narrow(wide: f64) -> f32 {
    wide as f32
}

/// A little-endian number of up to 8 bytes that was checked to fit the file.
fn length(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |length, &byte| (length << 8) | usize::from(byte))
}

/// Steps through an array whose extent was checked when the file was opened.
struct Elements<'a> {
    element: ValueType,
    left: usize,
    bytes: &'a [u8],
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        let width = self.element.width().unwrap_or_else(|| 8 + length(&self.bytes[..8]));
        let (bytes, rest) = self.bytes.split_at(width);
        self.bytes = rest;
        Some(Value { value_type: self.element, bytes })
    }
}

macro_rules! integers {
    ($($type:ty, $expected:literal;)*) => {
        $(impl<'a> FromMetadata<'a> for $type {
            const EXPECTED: &'static str = $expected;

            fn from_value(value: Value<'a>) -> Result<Self, Mismatch> {
                let wide = value.integer()?;
                Self::try_from(wide).map_err(|_out_of_range| Mismatch::Range(wide))
            }
        })*
    };
}

integers! {
    u16, "an integer (u16)";
    u32, "an integer (u32)";
    u64, "an integer (u64)";
    i32, "an integer (i32)";
    i64, "an integer (i64)";
}

impl<'a> FromMetadata<'a> for f32 {
    const EXPECTED: &'static str = "a float";

    fn from_value(value: Value<'a>) -> Result<Self, Mismatch> {
        value.float()
    }
}

impl<'a> FromMetadata<'a> for bool {
    const EXPECTED: &'static str = "a bool";

    fn from_value(value: Value<'a>) -> Result<Self, Mismatch> {
        match (value.value_type, value.bytes) {
            (ValueType::Bool, &[byte]) => Ok(byte != 0),
            (found, _) => Err(Mismatch::Type(found)),
        }
    }
}

impl<'a> FromMetadata<'a> for &'a str {
    const EXPECTED: &'static str = "a string";

    fn from_value(value: Value<'a>) -> Result<Self, Mismatch> {
        value.string()
    }
}

macro_rules! arrays {
    ($($type:ty, $expected:literal;)*) => {
        $(impl<'a> FromMetadata<'a> for Vec<$type> {
            const EXPECTED: &'static str = $expected;

            fn from_value(value: Value<'a>) -> Result<Self, Mismatch> {
                let mut read = Vec::new();
                for (index, element) in value.elements()?.enumerate() {
                    read.push(<$type>::from_value(element).map_err(|mismatch| match mismatch {
                        Mismatch::Utf8(_) => Mismatch::Utf8(index),
                        Mismatch::Type(_) => Mismatch::Type(ValueType::Array),
                        Mismatch::Range(found) => Mismatch::Range(found),
                    })?);
                }
                Ok(read)
            }
        })*
    };
}

arrays! {
    &'a str, "an array of strings";
    i32, "an array of integers (i32)";
    u32, "an array of integers (u32)";
    f32, "an array of floats";
}
