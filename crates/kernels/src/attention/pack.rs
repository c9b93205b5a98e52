//! Keys and values of a block, packed into panels of nr columns ([`RegisterTile::NR`]).

use crate::{
    gemm::{Element, RowAddresses},
    simd::{Dot, LANES, RegisterTile, prefetch_l2},
};

/// Keys per block: few enough that their panels and the scores of a tile stay in L1 and L2.
pub(super) const KEY_BLOCK: usize = 384;

/// Packs `n` keys of `d_lanes` lanes, of 32 bits each, as the columns of kᵀ, padded with zeros to
/// whole panels. `next` are rows that are read later: they are prefetched.
///
/// # Safety
/// The CPU supports the instructions of `V`; `from` holds the keys, and `to` has room for the
/// panels.
#[inline(always)]
pub(super) unsafe fn pack_keys<V: RegisterTile, T>(
    from: RowAddresses<f32>,
    [n, d_lanes]: [usize; 2],
    to: *mut f32,
    next: RowAddresses<T>,
) {
    for key in (0..n.next_multiple_of(V::NR)).step_by(LANES) {
        let (mut rows, mut next_rows) = ([from.first; LANES], [next.first; LANES]);
        for j in 0..LANES {
            (rows[j], next_rows[j]) = (from.at(key + j), next.at(key + j));
        }
        for i in (0..d_lanes).step_by(LANES) {
            let width = LANES.min(d_lanes - i);
            // SAFETY: upheld by the caller.
            unsafe {
                let mut block = [V::splat(0.0); LANES];
                if key + LANES <= n && width == LANES {
                    for j in 0..LANES {
                        prefetch_l2(next_rows[j].cast::<f32>().wrapping_add(i).cast());
                        block[j] = V::load(rows[j].add(i));
                    }
                } else {
                    for j in 0..LANES.min(n.saturating_sub(key)) {
                        prefetch_l2(next_rows[j].cast::<f32>().wrapping_add(i).cast());
                        block[j] = V::load_partial(rows[j].add(i), width);
                    }
                }
                V::transpose(&mut block);
                let to = to.add(key / V::NR * V::NR * d_lanes + i * V::NR + key % V::NR);
                for (j, column) in block.into_iter().enumerate().take(width) {
                    column.store(to.add(j * V::NR));
                }
            }
        }
    }
}

/// Packs the values, `n` rows of width `d`, as panels of nr columns. A panel has room for
/// [`KEY_BLOCK`] rows of packed lanes; only the first `n` in f32, or `n / 2` rounded up in bf16,
/// are written. Masked values, the columns beyond `d`, and in bf16 the row beyond an odd `n` are
/// 0. `next` is prefetched, as in [`pack_keys`].
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `from` holds the values, and `to` has room for
/// the panels.
#[inline(always)]
pub(super) unsafe fn pack_values<V: RegisterTile, D: Dot<V>, T: Element>(
    from: RowAddresses<T>,
    [n, d]: [usize; 2],
    visible: Option<&[u8]>,
    to: *mut f32,
    next: RowAddresses<T>,
) {
    let values_per_lane = T::COMPUTE_TYPE.values_per_lane();
    for row in 0..n.div_ceil(values_per_lane) {
        let row_of = |key: usize| {
            let is_masked = key >= n || visible.is_some_and(|visible| visible[key] == 0);
            (from.at(key), next.at(key), is_masked)
        };
        let first = row * values_per_lane;
        let (low, high) = (row_of(first), row_of(first + values_per_lane - 1));
        for column in (0..d.next_multiple_of(V::NR)).step_by(LANES) {
            let width = LANES.min(d.saturating_sub(column));
            // SAFETY: upheld by the caller.
            unsafe {
                let mut lanes = load_value::<V, T>(low, column, width);
                if values_per_lane == 2 {
                    lanes = D::pack_bf16(lanes, load_value(high, column, width));
                }
                lanes.store(to.add((column / V::NR * KEY_BLOCK + row) * V::NR + column % V::NR));
            }
        }
    }
}

/// `width` values of a key from `column` on, or zeros if the key is masked. The row is that of the key,
/// one that is prefetched, and whether the key is masked. This is not a closure, because a closure has
/// no `#[inline(always)]`.
///
/// # Safety
/// The CPU supports the instructions of `V`; the row holds the values unless the key is masked.
#[inline(always)]
unsafe fn load_value<V: RegisterTile, T: Element>(
    (row, next, is_masked): (*const T, *const T, bool),
    column: usize,
    width: usize,
) -> V {
    prefetch_l2(next.wrapping_add(column).cast());
    // SAFETY: upheld by the caller.
    unsafe { if is_masked { V::splat(0.0) } else { T::load::<V>(row.wrapping_add(column), width) } }
}
