//! The microkernel: an mr × nr tile of the product, accumulated in registers.

use std::{
    hint::black_box,
    sync::atomic::{Ordering, compiler_fence},
};

use super::{
    dot::{Bf16, Dot, F32, Int8},
    prefetch::{LINE_BYTES, prefetch, prefetch_l2},
    vector::{LANES, Vector},
};
use crate::buffer::F32_PER_LINE;

/// The largest nr ([`RegisterTile::NR`]).
pub(crate) const MAX_NR: usize = 32;

/// Splits `m` items into `(start, len)` parts of nearly equal length, at most `max_len` each.
pub(crate) fn split_evenly(m: usize, max_len: usize) -> impl Iterator<Item = (usize, usize)> {
    let parts = m.div_ceil(max_len).max(1);
    let (len, longer) = (m / parts, m % parts);
    (0..parts).map(move |i| (i * len + i.min(longer), len + usize::from(i < longer)))
}

/// The operands of one microkernel call: `c (+)= a · b` for mr rows and up to nr columns.
#[derive(Clone, Copy)]
pub(crate) struct Tile<'a> {
    /// mr rows of lanes, [`Dot::INPUT_LANES`] per step along k.
    pub(crate) a: *const f32,
    /// Row stride of `a` in lanes.
    pub(crate) a_stride: usize,
    /// A packed panel: nr lanes per step along k.
    pub(crate) b: *const f32,
    /// Number of bf16 terms per f32 value, 2 or 3, if the panel is a BF16x3 panel
    /// ([`bf16x3`](super::bf16x3)). Other panels set 3, and their kernels ignore the number.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "used by AMX only"))]
    pub(crate) terms: usize,
    /// k in packed lanes.
    pub(crate) k_lanes: usize,
    /// Memory that later calls read, to be prefetched into L2 during this call, at most one cache
    /// line per step along k.
    pub(crate) prefetch: &'a [f32],
    /// The accumulators.
    pub(crate) c: *mut f32,
    /// Row stride of `c`.
    pub(crate) c_stride: usize,
    /// Columns of `c` that are written, at most nr.
    pub(crate) columns: usize,
    /// Whether to add to the values in `c` instead of overwriting them.
    pub(crate) accumulate: bool,
}

impl Tile<'_> {
    /// [`Self::prefetch`] divided among the `iterations` of a loop: the first address, and the
    /// number of bytes per iteration, at most `max_lines` cache lines. If the range is longer than
    /// these bytes in all iterations together, its end is not prefetched.
    #[inline]
    pub(crate) fn prefetch_steps(&self, iterations: usize, max_lines: usize) -> (*const u8, usize) {
        if self.prefetch.is_empty() {
            return (self.b.cast(), 0); // prefetch the panel, which is already in cache
        }
        let step =
            size_of_val(self.prefetch).div_ceil(iterations.max(1)).min(max_lines * LINE_BYTES);
        (self.prefetch.as_ptr().cast(), step)
    }

    /// The microkernel with `MR` rows and `NV` vectors of columns in registers.
    ///
    /// # Safety
    /// The CPU supports the instructions of `V` and `D`; the pointers are valid for the tile's rows
    /// and columns.
    #[inline(always)]
    pub(super) unsafe fn multiply<V: RegisterTile, D: Dot<V>, const MR: usize, const NV: usize>(
        &self,
    ) {
        // With two input lanes, AVX2 is fastest with 4 packed lanes per iteration, and AVX-512
        // spills registers with fewer.
        let unroll = if D::INPUT_LANES == 1 { V::UNROLL } else { 4 };
        // SAFETY: upheld by the caller.
        unsafe {
            let iterations = self.k_lanes / unroll * self.columns.div_ceil(NV * LANES);
            let (mut next, next_step) = self.prefetch_steps(iterations, unroll);
            for first in (0..self.columns).step_by(NV * LANES) {
                let lanes = |v: usize| (self.columns - first).saturating_sub(v * LANES).min(LANES);
                for i in 0..MR {
                    // Prefetch the accumulators' cache lines while the products are computed.
                    let c = self.c.wrapping_add(i * self.c_stride + first);
                    (0..NV * LANES)
                        .step_by(F32_PER_LINE)
                        .for_each(|line| prefetch(c.wrapping_add(line)));
                }
                let mut acc = [[V::splat(0.0); NV]; MR];
                let mut a = [self.a; MR];
                for (i, row) in a.iter_mut().enumerate() {
                    *row = self.a.add(i * self.a_stride);
                }
                let mut b = self.b.add(first);
                let unrolled_lanes = self.k_lanes / unroll * unroll;
                for k in (0..unrolled_lanes).step_by(unroll) {
                    prefetch_l2(next);
                    for line in 1..unroll {
                        if line * LINE_BYTES < next_step {
                            prefetch_l2(next.wrapping_add(line * LINE_BYTES));
                        }
                    }
                    next = next.wrapping_add(next_step);
                    for lane in k..k + unroll {
                        if let Some(rows) = V::PREFETCH_DISTANCE {
                            for line in (0..NV * LANES).step_by(F32_PER_LINE) {
                                prefetch(b.wrapping_add(rows * V::NR + line));
                            }
                        }
                        accumulate_lane::<V, D, MR, NV>(&mut acc, &a, lane, b);
                        b = b.wrapping_add(V::NR);
                    }
                }
                for lane in unrolled_lanes..self.k_lanes {
                    accumulate_lane::<V, D, MR, NV>(&mut acc, &a, lane, b);
                    b = b.wrapping_add(V::NR);
                }
                // The addresses of vectors beyond the last column may be outside of the output, but
                // these vectors have 0 lanes.
                let c =
                    |i: usize, v: usize| self.c.wrapping_add(i * self.c_stride + first + v * LANES);
                if self.accumulate {
                    for (i, acc_row) in acc.iter_mut().enumerate() {
                        for (v, acc) in acc_row.iter_mut().enumerate() {
                            *acc = D::add(V::load_partial(c(i, v), lanes(v)), *acc);
                        }
                    }
                }
                for (i, acc_row) in acc.iter().enumerate() {
                    for (v, &acc) in acc_row.iter().enumerate() {
                        acc.store_partial(c(i, v), lanes(v));
                    }
                }
            }
        }
    }
}

/// Adds the products of one lane of k: `acc[i] += a[i][lane] · b`, with `NV` vectors of `b`.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`; the rows of `a` have this lane, and `b` has
/// `NV` vectors.
#[inline(always)]
unsafe fn accumulate_lane<V: Vector, D: Dot<V>, const MR: usize, const NV: usize>(
    acc: &mut [[V; NV]; MR],
    a: &[*const f32; MR],
    lane: usize,
    b: *const f32,
) {
    // SAFETY: upheld by the caller.
    unsafe {
        for i in (0..D::INPUT_LANES).rev() {
            if D::INPUT_LANES > 1 {
                // Without the fence, the compiler keeps the vectors of b from one iteration to the
                // next, and spills registers: the accumulators leave too few free.
                compiler_fence(Ordering::SeqCst);
            }
            let mut b_row = [V::splat(0.0); NV];
            for (v, b_vector) in b_row.iter_mut().enumerate() {
                *b_vector = D::load_panel(b.add(v * LANES), i);
            }
            for (acc_row, row) in acc.iter_mut().zip(a) {
                D::multiply_lane(*row, lane * D::INPUT_LANES + i, &b_row, acc_row);
            }
        }
    }
}

/// Calls [`Tile::multiply`] with a value of mr that is known at run time only. The call is in a
/// function with its own target features, so that the microkernels are compiled once for `V` and
/// `D`, and not once in each kernel that uses them.
macro_rules! multiply_for_mr {
    (
        $V:ty, $D:ty, $(features: $features:literal,)? NV: $NV:literal, MR: [$($MR:literal)*],
        $mr:expr, $tile:expr
    ) => {{
        $(#[target_feature(enable = $features)])?
        #[inline(never)]
        unsafe fn multiply<D: Dot<$V>>(mr: usize, tile: &Tile) {
            // SAFETY: upheld by the caller.
            unsafe {
                match mr {
                    $($MR => tile.multiply::<$V, D, $MR, $NV>(),)*
                    _ => unreachable!("mr is outside 1..=max_mr"),
                }
            }
        }
        // SAFETY: upheld by the caller.
        unsafe { multiply::<$D>($mr, $tile) }
    }};
}

pub(super) use multiply_for_mr;

/// A vector type with the microkernels that fit its registers.
pub(crate) trait RegisterTile: Vector {
    /// nr: columns of a packed panel, and of a tile.
    const NR: usize;
    /// The largest mr of products in f32, limited by the number of registers.
    const MAX_MR: usize;
    /// The largest mr of [`Bf16`], whose intermediate results take registers too.
    const MAX_MR_BF16: usize = Self::MAX_MR;
    /// The largest mr of [`Int8`], as for bf16.
    const MAX_MR_INT8: usize = Self::MAX_MR;
    /// Packed lanes of k in one iteration of the microkernel's loop if [`Dot::INPUT_LANES`] is 1.
    /// Unrolling divides the loop overhead among several lanes.
    const UNROLL: usize = 1;
    /// The number of rows of b between the row that is multiplied and the row that is prefetched.
    /// `None` leaves the prefetching to the CPU.
    const PREFETCH_DISTANCE: Option<usize> = Some(32);

    /// # Safety
    /// As for [`Tile::multiply`]; mr is at least 1 and at most [`Microkernel::MAX_MR`] of `D`.
    unsafe fn multiply_tile<D: Dot<Self>>(mr: usize, tile: &Tile);
}

/// A way to multiply tiles. The default is the register tile of `V` with the products of [`Dot`]. A
/// product that needs CPU features beyond those of `V` overrides [`Self::multiply_tile`] with a
/// function that enables these features.
///
/// # Safety
/// All methods require that the CPU supports the instructions of `V` and of the implementing type.
pub(crate) trait Microkernel<V: RegisterTile>: Dot<V> {
    /// The largest mr.
    const MAX_MR: usize;
    /// kc: lanes of k per pass over the rows. The kc lanes of a panel stay in cache during the
    /// pass.
    const KC: usize = 768;
    /// mc in tiles and nc in panels. A task's panels and the rows of a block stay in L2 while they
    /// are multiplied: 0.8 MB and 0.2 MB in f32, 256 columns and 72 rows.
    const BLOCK: (usize, usize) = (72 / Self::MAX_MR, 256 / V::NR);

    /// Multiplies a tile; `1 ≤ mr ≤` [`Self::MAX_MR`].
    #[inline(always)]
    unsafe fn multiply_tile(mr: usize, tile: &Tile) {
        // SAFETY: upheld by the caller.
        unsafe { V::multiply_tile::<Self>(mr, tile) }
    }

    /// Multiplies the same few vectors in a loop and returns the number of lane products. Measures
    /// the peak rate.
    #[inline(always)]
    unsafe fn multiply_registers(steps: usize) -> usize {
        // At least eight accumulators, to hide the latency, and few enough vectors to stay in
        // registers.
        // SAFETY: upheld by the caller.
        unsafe {
            match V::REGISTERS {
                1 => multiply_vectors::<V, Self, 10>(steps),
                2 => multiply_vectors::<V, Self, 4>(steps),
                _ => multiply_vectors::<V, Self, 2>(steps),
            }
        }
    }
}

/// [`Microkernel::multiply_registers`] with `N` vectors of accumulators.
///
/// # Safety
/// The CPU supports the instructions of `V` and `D`.
#[inline(always)]
unsafe fn multiply_vectors<V: RegisterTile, D: Dot<V>, const N: usize>(steps: usize) -> usize {
    // SAFETY: upheld by the caller.
    unsafe {
        // The operands of each product differ, and `a` changes, so that the compiler can neither
        // share the products nor move them out of the loop.
        let mut a = V::splat(black_box(0.0));
        let mut b = [a; N];
        for b in &mut b {
            *b = V::splat(black_box(0.0));
        }
        let mut acc = [V::splat(0.0); N];
        for _ in 0..steps {
            for i in 0..N {
                acc[i] = D::dot(a, b[i], acc[i]);
            }
            a = D::add(a, b[0]);
        }
        for acc in acc {
            black_box(acc.reduce_add());
        }
    }
    steps * N * LANES / D::INPUT_LANES
}

impl<V: RegisterTile> Microkernel<V> for F32 {
    const MAX_MR: usize = V::MAX_MR;
}
impl<V: RegisterTile> Microkernel<V> for Bf16 {
    const MAX_MR: usize = V::MAX_MR_BF16;
}
impl<V: RegisterTile> Microkernel<V> for Int8 {
    const MAX_MR: usize = V::MAX_MR_INT8;
}
