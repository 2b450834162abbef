//! How each source type is laid out in the graph, per weight mode.

use crate::gguf::GgmlType;
use crate::ir::element::ElementType;
use crate::manifest::WeightMode;
use crate::quant::BlockFormat;
use crate::tensor::Encoding;

/// The layout of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The source's floats, unchanged.
    Plain(ElementType),
    /// Integer codes with group scales.
    Grouped(Grouped),
    /// The source's int8 codes and row scales, unchanged.
    RowScaled,
}

/// Integer codes with group scales: `weight = scale * (code - zero) [+ correction]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grouped {
    pub(crate) format: BlockFormat,
    pub(crate) coding: Coding,
    /// Storage of the codes.
    pub(crate) code: ElementType,
    /// Storage of the scales.
    pub(crate) scale: ElementType,
}

/// What becomes of the source's codes and offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    /// Codes keep their value; the format has no offset.
    Same,
    /// Codes are centred by `shift`; what is left of the offset, `offset + shift * scale`, is
    /// constant in a group and is applied to the group's sum of inputs.
    Centred { shift: i8 },
    /// Codes keep their value; the offset becomes an integer zero point, rounded.
    ZeroPoint,
    /// Values are coded anew in eight bits, symmetric, with an f16 scale per group.
    Recoded,
}

/// Chooses the layout of a source's encoding, `None` if it is not supported.
pub(crate) fn layout(encoding: Encoding, mode: WeightMode) -> Option<Layout> {
    let Encoding::Ggml(ggml_type) = encoding else { return Some(Layout::RowScaled) };
    let plain = match ggml_type {
        GgmlType::F32 => Some(ElementType::F32),
        GgmlType::F16 => Some(ElementType::F16),
        GgmlType::BF16 => Some(ElementType::Bf16),
        _ => None,
    };
    if let Some(element) = plain {
        return Some(Layout::Plain(element));
    }
    let format = BlockFormat::from_ggml(ggml_type)?;
    let code = match format.code_bits() {
        4 => ElementType::I4,
        _ => ElementType::I8,
    };
    let exact_scale = if format.scales_are_f16() { ElementType::F16 } else { ElementType::F32 };
    let grouped = match (format.has_offset(), mode) {
        (false, WeightMode::Exact | WeightMode::NearLossless) => {
            Grouped { format, coding: Coding::Same, code, scale: exact_scale }
        }
        (false, WeightMode::Compact) => {
            Grouped { format, coding: Coding::Same, code, scale: ElementType::F16 }
        }
        (true, WeightMode::Exact) => {
            let shift = 1 << (format.code_bits() - 1);
            Grouped { format, coding: Coding::Centred { shift }, code, scale: exact_scale }
        }
        (true, WeightMode::NearLossless) => {
            let (code, scale) = (ElementType::I8, ElementType::F16);
            Grouped { format, coding: Coding::Recoded, code, scale }
        }
        (true, WeightMode::Compact) => {
            let code = if code == ElementType::I4 { ElementType::U4 } else { ElementType::U8 };
            Grouped { format, coding: Coding::ZeroPoint, code, scale: ElementType::F16 }
        }
    };
    Some(Layout::Grouped(grouped))
}
