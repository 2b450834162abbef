//! The place of a message in a trace, as the W3C header `traceparent` says it.
//!
//! It travels in a header and not in messages: whoever knows nothing of traces passes them by, and
//! without a collector there is no header.
//!
//! **Source**: W3C Trace Context, level 1, section 3.2.

use std::fmt;
use std::str::FromStr;

/// Name of the header.
pub const TRACEPARENT: &str = "traceparent";

/// Length of a `traceparent` of version 00, in bytes.
const LEN: usize = 55;

/// The bit of the flags that says that spans are recorded.
const SAMPLED: u8 = 1;

/// The span in which a message was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// The trace; never 0.
    pub trace_id: u128,
    /// The span; never 0.
    pub span_id: u64,
    /// Whether the sender records its spans, and so should others.
    pub is_sampled: bool,
}

/// Text that is no `traceparent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a W3C traceparent, expected 00-<32 hex digits>-<16 hex digits>-<2 hex digits>")]
pub struct TraceContextError;

impl FromStr for TraceContext {
    type Err = TraceContextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (known, more) = text.split_at_checked(LEN).ok_or(TraceContextError)?;
        let mut parts = known.split('-');
        let mut hex = |len: usize| {
            let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
            let part = parts.next().filter(|part| part.len() == len && part.bytes().all(is_hex));
            let part = part.ok_or(TraceContextError)?;
            u128::from_str_radix(part, 16).map_err(|_no_number| TraceContextError)
        };
        let (version, trace_id, span_id, flags) = (hex(2)?, hex(32)?, hex(16)?, hex(2)?);
        // Later versions may go on after another dash.
        let is_whole = match version {
            0 => more.is_empty(),
            0xff => false,
            _ => more.is_empty() || more.starts_with('-'),
        };
        let span_id = u64::try_from(span_id).map_err(|_too_long| TraceContextError)?;
        if !is_whole || trace_id == 0 || span_id == 0 {
            return Err(TraceContextError);
        }
        let is_sampled = flags & u128::from(SAMPLED) != 0;
        Ok(Self { trace_id, span_id, is_sampled })
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trace_id, span_id, is_sampled } = self;
        write!(f, "00-{trace_id:032x}-{span_id:016x}-{:02x}", u8::from(*is_sampled) * SAMPLED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn the_example_of_the_recommendation_is_read_and_written() {
        let context: TraceContext = EXAMPLE.parse().expect("valid");
        assert_eq!(context.trace_id, 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736);
        assert_eq!(context.span_id, 0x00f0_67aa_0ba9_02b7);
        assert!(context.is_sampled);
        assert_eq!(context.to_string(), EXAMPLE);
        let unsampled = TraceContext { is_sampled: false, ..context };
        assert_eq!(unsampled.to_string().parse(), Ok(unsampled));
    }

    #[test]
    fn later_versions_are_read_as_far_as_they_are_known() {
        let later = EXAMPLE.replacen("00-", "01-", 1);
        assert_eq!(format!("{later}-more").parse::<TraceContext>(), EXAMPLE.parse());
        assert!(format!("{later}more").parse::<TraceContext>().is_err());
        assert!(format!("{EXAMPLE}-more").parse::<TraceContext>().is_err());
    }

    #[test]
    fn what_is_no_traceparent_is_refused() {
        for wrong in [
            "".to_owned(),
            "00".to_owned(),
            EXAMPLE.to_uppercase(),
            EXAMPLE.replacen("00-", "ff-", 1),
            EXAMPLE.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            EXAMPLE.replace("00f067aa0ba902b7", &"0".repeat(16)),
            EXAMPLE.replace("-00f067", "000f067"),
            EXAMPLE.replace("-01", "-0g"),
            EXAMPLE.replace("-01", "-\u{e9}"),
            EXAMPLE.replace("4bf92f", "+bf92f"),
        ] {
            assert_eq!(wrong.parse::<TraceContext>(), Err(TraceContextError), "{wrong}");
        }
    }
}
