//! The storage types of ggml and their block sizes.

use std::fmt;

macro_rules! ggml_types {
    ($($name:ident = $number:literal, $block:literal, $bytes:literal, $doc:literal;)*) => {
        /// How the elements of a tensor are stored.
        ///
        /// A row is a whole number of blocks; a block holds [`Self::block_len`] elements in
        /// [`Self::block_bytes`] bytes.
        ///
        /// **Source**: `enum ggml_type` and the block structs in ggml-org/ggml.
        #[expect(non_camel_case_types, reason = "the names that ggml and its users know")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum GgmlType {
            $(#[doc = $doc] $name = $number,)*
        }

        impl GgmlType {
            /// All types, by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The type of this number in a GGUF file.
            pub fn from_number(number: u32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Elements of a block.
            pub const fn block_len(self) -> u64 {
                match self { $(Self::$name => $block,)* }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes,)* }
            }

            /// The name that ggml uses.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }
        }
    };
}

ggml_types! {
    F32 = 0, 1, 4, "32-bit float.";
    F16 = 1, 1, 2, "16-bit float.";
    Q4_0 = 2, 32, 18, "4-bit, f16 scale.";
    Q4_1 = 3, 32, 20, "4-bit, f16 scale and minimum.";
    Q5_0 = 6, 32, 22, "5-bit, f16 scale.";
    Q5_1 = 7, 32, 24, "5-bit, f16 scale and minimum.";
    Q8_0 = 8, 32, 34, "8-bit, f16 scale.";
    Q8_1 = 9, 32, 36, "8-bit, f16 scale and sum; used for activations.";
    Q2_K = 10, 256, 84, "2-bit super-blocks.";
    Q3_K = 11, 256, 110, "3-bit super-blocks.";
    Q4_K = 12, 256, 144, "4-bit super-blocks.";
    Q5_K = 13, 256, 176, "5-bit super-blocks.";
    Q6_K = 14, 256, 210, "6-bit super-blocks.";
    Q8_K = 15, 256, 292, "8-bit super-blocks; used for activations.";
    IQ2_XXS = 16, 256, 66, "2.06 bits a weight, codebook.";
    IQ2_XS = 17, 256, 74, "2.31 bits a weight, codebook.";
    IQ3_XXS = 18, 256, 98, "3.06 bits a weight, codebook.";
    IQ1_S = 19, 256, 50, "1.56 bits a weight, codebook.";
    IQ4_NL = 20, 32, 18, "4-bit, not linear.";
    IQ3_S = 21, 256, 110, "3.44 bits a weight, codebook.";
    IQ2_S = 22, 256, 82, "2.56 bits a weight, codebook.";
    IQ4_XS = 23, 256, 136, "4-bit super-blocks, not linear.";
    I8 = 24, 1, 1, "8-bit integer.";
    I16 = 25, 1, 2, "16-bit integer.";
    I32 = 26, 1, 4, "32-bit integer.";
    I64 = 27, 1, 8, "64-bit integer.";
    F64 = 28, 1, 8, "64-bit float.";
    IQ1_M = 29, 256, 56, "1.75 bits a weight, codebook.";
    BF16 = 30, 1, 2, "Brain float.";
    TQ1_0 = 34, 256, 54, "Ternary, 1.69 bits a weight.";
    TQ2_0 = 35, 256, 66, "Ternary, 2.06 bits a weight.";
    MXFP4 = 39, 32, 17, "4-bit float with an 8-bit shared exponent.";
    NVFP4 = 40, 64, 36, "4-bit float with 8-bit float scales of 16 elements.";
    Q1_0 = 41, 128, 18, "1-bit, f16 scale.";
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
