//! Greedy choice of a token: the index of the largest logit.

/// Numbers that are compared side by side; a multiple of every vector width in use.
const LANES: usize = 32;

/// A logits row has no largest number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GreedyError {
    /// The row is empty.
    #[error("the logits row is empty")]
    Empty,
    /// Nothing but NaN.
    #[error("all {len} logits are not a number")]
    AllNan {
        /// Length of the row.
        len: usize,
    },
}

/// The token with the largest logit; of equal ones the first. NaN never wins.
///
/// # Errors
/// [`GreedyError`] if the row is empty or holds nothing but NaN.
pub fn greedy(logits: &[f32]) -> Result<u32, GreedyError> {
    if logits.is_empty() {
        return Err(GreedyError::Empty);
    }
    let largest = max(logits);
    position(logits, largest)
        .map(|index| index as u32)
        .ok_or(GreedyError::AllNan { len: logits.len() })
}

/// The largest number that is not NaN, or minus infinity.
fn max(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, value);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// The first index that holds `wanted`.
#[expect(clippy::float_cmp, reason = "looks for a number that was read from the same row")]
fn position(row: &[f32], wanted: f32) -> Option<usize> {
    let (chunks, rest) = row.as_chunks::<LANES>();
    let holds = |chunk: &[f32; LANES]| chunk.iter().fold(false, |any, &v| any | (v == wanted));
    let start = chunks.iter().position(holds).map_or(row.len() - rest.len(), |i| i * LANES);
    row[start..].iter().position(|&v| v == wanted).map(|i| start + i)
}

#[cfg(test)]
mod tests {
    use super::{GreedyError, greedy};

    #[test]
    fn takes_the_first_of_equal_maxima_at_every_length() {
        for len in 1..200 {
            for at in 0..len {
                let mut row = vec![-1.0; len];
                row[at] = 3.0;
                row[len - 1] = 3.0;
                assert_eq!(greedy(&row), Ok(at as u32), "length {len}");
            }
        }
    }

    #[test]
    fn passes_over_nan() {
        let mut row = vec![f32::NAN; 100];
        assert_eq!(greedy(&row), Err(GreedyError::AllNan { len: 100 }));
        row[70] = f32::NEG_INFINITY;
        assert_eq!(greedy(&row), Ok(70));
        row[40] = -5.0;
        assert_eq!(greedy(&row), Ok(40));
        row[99] = f32::INFINITY;
        assert_eq!(greedy(&row), Ok(99));
    }

    #[test]
    fn refuses_an_empty_row() {
        assert_eq!(greedy(&[]), Err(GreedyError::Empty));
    }

    #[test]
    fn zeros_of_both_signs_are_equal() {
        assert_eq!(greedy(&[-1.0, -0.0, 0.0]), Ok(1));
    }
}
