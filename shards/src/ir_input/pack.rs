//! How values travel between stages: side by side in one row per token.
//!
//! Engines and messages know one tensor `[batch, rows, width]`. The residual stream has that form
//! as it is. Whatever else crosses a cut (new rows of a cache that later layers read, embeddings
//! of single layers) is brought into it and put behind the residual stream.

use super::shapes::Dim;

/// How a value becomes a part of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// The axes of the value in the order batch, rows, others.
    pub(super) order: Vec<usize>,
    /// Sizes of the others.
    pub(super) others: Vec<u64>,
}

impl Layout {
    /// The layout of a value with these dimensions; `None` if it is not made of rows.
    pub(super) fn of(dims: &[Dim]) -> Option<Self> {
        let place = |wanted: Dim| dims.iter().position(|dim| *dim == wanted);
        let mut order = vec![place(Dim::Batch)?, place(Dim::Rows)?];
        let mut others = Vec::new();
        for (axis, dim) in dims.iter().enumerate().filter(|(axis, _)| !order[..2].contains(axis)) {
            let Dim::Fixed(size @ 1..=0xffff_ffff) = dim else { return None };
            others.push((axis, *size));
        }
        order.extend(others.iter().map(|(axis, _)| *axis));
        let others = others.into_iter().map(|(_, size)| size).collect();
        Some(Self { order, others })
    }

    /// Numbers of a row.
    pub(super) fn width(&self) -> u64 {
        self.others.iter().copied().fold(1, u64::saturating_mul)
    }

    /// Whether the value is a row as it is.
    pub(super) fn is_row(&self) -> bool {
        self.order == [0, 1, 2]
    }

    /// The order that brings back what [`Self::order`] has changed.
    pub(super) fn inverse(&self) -> Vec<i64> {
        let axis = |axis: usize| self.order.iter().position(|found| *found == axis);
        (0..self.order.len()).filter_map(axis).map(|axis| axis as i64).collect()
    }

    /// Whether the axes are in order already.
    pub(super) fn is_ordered(&self) -> bool {
        self.order.iter().enumerate().all(|(place, axis)| place == *axis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_form_have_a_layout() {
        let row = Layout::of(&[Dim::Batch, Dim::Rows, Dim::Fixed(64)]).unwrap();
        assert!(row.is_row() && row.is_ordered());
        assert_eq!(row.width(), 64);
        let keys = Layout::of(&[Dim::Batch, Dim::Fixed(2), Dim::Rows, Dim::Fixed(16)]).unwrap();
        assert_eq!((&keys.order[..], &keys.others[..]), (&[0, 2, 1, 3][..], &[2, 16][..]));
        assert_eq!((keys.width(), keys.inverse()), (32, vec![0, 2, 1, 3]));
        let stacked = Layout::of(&[Dim::Fixed(4), Dim::Batch, Dim::Rows, Dim::Fixed(8)]).unwrap();
        assert_eq!((&stacked.order[..], stacked.inverse()), (&[1, 2, 0, 3][..], vec![2, 0, 1, 3]));
        let scalar = Layout::of(&[Dim::Batch, Dim::Rows]).unwrap();
        assert_eq!((scalar.width(), scalar.is_row()), (1, false));
    }

    #[test]
    fn what_is_not_made_of_rows_has_none() {
        for dims in [
            &[Dim::Batch, Dim::Fixed(2), Dim::Slots, Dim::Fixed(16)][..],
            &[Dim::Batch, Dim::Rows, Dim::Unknown],
            &[Dim::Batch, Dim::Rows, Dim::Rows],
            &[Dim::Batch, Dim::Rows, Dim::Fixed(0)],
            &[Dim::Rows, Dim::Fixed(64)],
            &[],
        ] {
            assert_eq!(Layout::of(dims), None, "{dims:?}");
        }
    }
}
