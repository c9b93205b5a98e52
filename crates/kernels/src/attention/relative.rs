//! The scores of relative positions: `qᵢ·keys[r] + kⱼ·queries[r]`. `keys` and `queries` are the
//! projected embeddings of the relative positions (see `RelativePositions`); their row r depends on
//! the distance from query i to key j.
//!
//! The products of queries and `keys` are computed once per task, and the products of keys and
//! `queries` once per block of keys. The results are two tables: one indexed by query and row r,
//! one by row r and key. The score of a query and a key is the sum of one element of each table, so
//! no `(T, S)` matrix is stored.

use std::ops::Range;

use super::{
    head::{Pass, SCORES_STRIDE, bf16_row_stride},
    pack::pack_keys,
};
use crate::{
    gemm::{Element, RowAddresses},
    simd::{Microkernel, RegisterTile, split_evenly},
};

/// # Safety
/// The unsafe methods require that the CPU supports the instructions of `V` and `D`, and that tiles
/// and blocks of keys are within the task.
impl<T: Element> Pass<'_, T> {
    /// Multiplies all queries of the task by the keys of the relative positions.
    #[inline(always)]
    pub(super) unsafe fn multiply_positions_by_queries<V: RegisterTile, D: Microkernel<V>>(&self) {
        let Some(keys) = self.attention.relative.and_then(|relative| relative.keys) else { return };
        let (n, d) = (self.rows.len(), keys.dims[3]);
        // SAFETY: upheld by the caller; the rows are within `keys`, and the buffers have room for
        // them.
        unsafe {
            let first = keys.at(0, self.task.head, self.rows.start);
            let to = (self.buffers.position_lanes, bf16_row_stride(d));
            let rows = RowAddresses::new(first, keys.strides[2]);
            let rows = T::packed_rows(rows, [n, d], to);
            // If heads are adjacent in memory, the next task reads the lanes after these.
            let next = RowAddresses::new(rows.first.wrapping_add(self.d_lanes()), rows.stride);
            pack_keys::<V, f32>(rows, [n, self.d_lanes()], self.buffers.position_panels, next);
            for (start, mr) in split_evenly(self.task.queries.len(), self.max_mr) {
                let q = (self.q.add(start * self.q_stride), self.q_stride);
                let stride = self.position_scores_stride;
                let to = (self.buffers.query_position_scores.add(start * stride), stride);
                self.multiply_panels::<V, D>(q, mr, (self.buffers.position_panels, n), to);
            }
        }
    }

    /// Multiplies the queries of the relative positions by the `n` keys of the packed block.
    #[inline(always)]
    pub(super) unsafe fn multiply_positions_by_keys<V: RegisterTile, D: Microkernel<V>>(
        &self,
        n: usize,
    ) {
        let relative = self.attention.relative;
        let Some(queries) = relative.and_then(|relative| relative.queries) else { return };
        let d = queries.dims[3];
        // SAFETY: upheld by the caller; the rows are within `queries`, and the buffers have room
        // for them.
        unsafe {
            let rows = (queries.at(0, self.task.head, self.rows.start), queries.strides[2]);
            let to = (self.buffers.position_lanes, bf16_row_stride(d));
            let (rows, row_stride) = T::input_rows::<V, D>(rows, [self.rows.len(), d], to);
            for (start, mr) in split_evenly(self.rows.len(), self.max_mr) {
                let rows = (rows.add(start * row_stride), row_stride);
                let to = self.buffers.position_key_scores.add(start * SCORES_STRIDE);
                let panels = (self.buffers.k_panels.cast_const(), n);
                self.multiply_panels::<V, D>(rows, mr, panels, (to, SCORES_STRIDE));
            }
        }
    }

    /// Adds the scores of the relative positions to those of a tile, for the keys `seen` of the
    /// block that starts at `first_key`.
    #[inline(always)]
    pub(super) unsafe fn add_position_scores(
        &self,
        start: usize,
        mr: usize,
        first_key: usize,
        seen: &Range<usize>,
    ) {
        let Some(relative) = self.attention.relative else { return };
        let first_row = self.rows.start;
        for i in start..start + mr {
            let position = self.task.sequence.position(self.task.queries.start + i);
            let rows = relative.rows_of(position, first_key + seen.start, seen.len());
            // SAFETY: upheld by the caller. The rows are within `self.rows`, for which both tables
            // have been computed.
            unsafe {
                let scores = self.buffers.scores.add((i - start) * SCORES_STRIDE + seen.start);
                let scores = std::slice::from_raw_parts_mut(scores, seen.len());
                if relative.keys.is_some() {
                    let table =
                        self.buffers.query_position_scores.add(i * self.position_scores_stride);
                    for (score, &row) in scores.iter_mut().zip(rows) {
                        *score += *table.add(row as usize - first_row);
                    }
                }
                if relative.queries.is_some() {
                    let table = self.buffers.position_key_scores.add(seen.start);
                    for (key, (score, &row)) in scores.iter_mut().zip(rows).enumerate() {
                        *score += *table.add((row as usize - first_row) * SCORES_STRIDE + key);
                    }
                }
            }
        }
    }
}
