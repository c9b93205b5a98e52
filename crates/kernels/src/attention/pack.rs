//! Keys and values of a block, packed into panels of nr columns ([`RegisterTile::NR`]).

use crate::{
    compute_type::ComputeType,
    gemm::Element,
    simd::{Dot, LANES, RegisterTile, prefetch_l2},
};

/// Keys per block: few enough that their panels and the scores of a tile stay in L1 and L2.
pub(super) const KEY_BLOCK: usize = 384;

/// Packs `n` keys of `d_lanes` lanes, of 32 bits each, as the columns of kᵀ, padded with zeros to
/// whole panels. `row_stride` is in lanes. `next` are rows that are read later, as a pointer and a row
/// stride: they are prefetched.
///
/// # Safety
/// The CPU supports the instructions of `V`; `from` holds the keys, and `to` has room for the
/// panels.
#[inline(always)]
pub(super) unsafe fn pack_keys<V: RegisterTile, T>(
    (from, row_stride): (*const f32, usize),
    [n, d_lanes]: [usize; 2],
    to: *mut f32,
    (next, next_stride): (*const T, usize),
) {
    for key in (0..n.next_multiple_of(V::NR)).step_by(LANES) {
        for i in (0..d_lanes).step_by(LANES) {
            let width = LANES.min(d_lanes - i);
            // SAFETY: upheld by the caller.
            unsafe {
                let mut rows = [V::splat(0.0); LANES];
                for (j, row) in rows.iter_mut().enumerate() {
                    if key + j < n {
                        let next = next.wrapping_add((key + j) * next_stride);
                        prefetch_l2(next.cast::<f32>().wrapping_add(i).cast());
                        *row = V::load_partial(from.add((key + j) * row_stride + i), width);
                    }
                }
                V::transpose(&mut rows);
                let to = to.add(key / V::NR * V::NR * d_lanes + i * V::NR + key % V::NR);
                for (j, column) in rows.into_iter().enumerate().take(width) {
                    column.store(to.add(j * V::NR));
                }
            }
        }
    }
}

/// Packs the values, `n` rows of width `d`, as panels of nr columns. A panel has room for
/// [`KEY_BLOCK`] rows of packed lanes; only the first `n` in f32, or `n / 2` rounded up in bf16,
/// are written. Masked values, the columns beyond `d`, and in bf16 the row beyond an odd `n` are
/// 0. `row_stride` is in elements. `next` is prefetched, as in [`pack_keys`].
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; `from` holds the values, and `to` has room for
/// the panels.
#[inline(always)]
pub(super) unsafe fn pack_values<V: RegisterTile, D: Dot<V>, T: Element>(
    (from, row_stride): (*const T, usize),
    [n, d]: [usize; 2],
    visible: Option<&[u8]>,
    to: *mut f32,
    (next, next_stride): (*const T, usize),
) {
    for row in 0..n.div_ceil(T::COMPUTE_TYPE.values_per_lane()) {
        for column in (0..d.next_multiple_of(V::NR)).step_by(LANES) {
            let width = LANES.min(d.saturating_sub(column));
            let row_of = |key: usize| {
                let is_masked = key >= n || visible.is_some_and(|visible| visible[key] == 0);
                prefetch_l2(next.wrapping_add(key * next_stride + column).cast());
                (from.wrapping_add(key * row_stride + column), is_masked)
            };
            // SAFETY: upheld by the caller.
            unsafe {
                let lanes = match T::COMPUTE_TYPE {
                    ComputeType::F32 => load_value(row_of(row), width),
                    _ => D::pack_bf16(
                        load_value(row_of(2 * row), width),
                        load_value(row_of(2 * row + 1), width),
                    ),
                };
                lanes.store(to.add((column / V::NR * KEY_BLOCK + row) * V::NR + column % V::NR));
            }
        }
    }
}

/// `width` values of a key, or zeros if the key is masked. This is not a closure, because a closure has
/// no `#[inline(always)]`.
///
/// # Safety
/// The CPU supports the instructions of `V`; `from` holds the values unless the key is masked.
#[inline(always)]
unsafe fn load_value<V: RegisterTile, T: Element>(
    (from, is_masked): (*const T, bool),
    width: usize,
) -> V {
    // SAFETY: upheld by the caller.
    unsafe { if is_masked { V::splat(0.0) } else { T::load::<V>(from, width) } }
}
