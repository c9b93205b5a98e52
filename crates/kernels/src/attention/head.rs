//! Attention of one head for a range of queries: for each block of keys, scores, online softmax and
//! weighted values.

use std::ops::Range;

use super::{
    args::{Attention, Sequence, Strided},
    pack::{KEY_BLOCK, pack_keys, pack_values},
    softmax::{SoftmaxState, apply_mask, online_softmax, scale_row},
};
use crate::{
    buffer::{F32_PER_LINE, ScratchBuf, SharedPtr},
    compute_type::ComputeType,
    gemm::{Element, RowAddresses},
    simd::{LANES, MAX_NR, Microkernel, ProductKernel, RegisterTile, Tile, split_evenly},
};

/// Row stride of the scores. It is not a power of two, so that rows fall into different cache sets.
pub(super) const SCORES_STRIDE: usize = KEY_BLOCK + LANES;

/// Row stride in lanes of copies of bf16 rows, packed or widened: an odd number of cache lines.
pub(super) fn bf16_row_stride(d: usize) -> usize {
    d.next_multiple_of(F32_PER_LINE) | F32_PER_LINE
}

/// A range of queries of a sequence, for one head.
pub(super) struct HeadTask<'a> {
    pub(super) sequence: &'a Sequence,
    pub(super) head: usize,
    /// The index of the weights `(T, S)` of this head among those of all sequences and heads that are
    /// computed.
    pub(super) weights_index: usize,
    pub(super) queries: Range<usize>,
}

/// The sizes of a thread's scratch memory.
pub(super) struct ScratchSizes {
    d: usize,
    value_d: usize,
    max_mr: usize,
    max_queries: usize,
    /// Maximum number of rows of relative positions that a task uses.
    max_rows: usize,
}

impl ScratchSizes {
    pub(super) fn new<T: Copy>(
        attention: &Attention<T>,
        tasks: &[HeadTask],
        max_mr: usize,
    ) -> Self {
        let rows = |task: &HeadTask| task.rows(attention).len();
        Self {
            d: attention.q.dims[3],
            value_d: attention.v.dims[3],
            max_mr,
            max_queries: tasks.iter().map(|task| task.queries.len()).max().unwrap_or(0),
            max_rows: tasks.iter().map(rows).max().unwrap_or(0),
        }
    }

    /// Row stride of the scores of queries and relative positions.
    fn position_scores_stride(&self) -> usize {
        self.max_rows.next_multiple_of(MAX_NR)
    }
}

impl HeadTask<'_> {
    /// The range of the rows of relative positions that the task uses.
    pub(super) fn rows<T: Copy>(&self, attention: &Attention<T>) -> Range<usize> {
        let relative = attention.relative.as_ref();
        relative.map_or(0..0, |relative| relative.range(self.sequence, &self.queries))
    }

    /// The keys that the causal mask and the window leave visible to a query, as positions in the
    /// sequence.
    fn keys_seen<T>(&self, attention: &Attention<T>, query: usize) -> Range<usize> {
        let (position, keys) = (self.sequence.position(query), self.sequence.keys.len());
        let radius = attention.window.unwrap_or(usize::MAX);
        let end = if attention.causal { position.saturating_add(1) } else { usize::MAX };
        let end = end.min(position.saturating_add(radius).saturating_add(1)).min(keys);
        position.saturating_sub(radius).min(end)..end
    }

    /// The start of the first block with keys that the window leaves visible to a query.
    fn first_block<T>(&self, attention: &Attention<T>, query: usize) -> usize {
        self.keys_seen(attention, query).start / KEY_BLOCK * KEY_BLOCK
    }
}

/// The scratch memory of a thread, in one allocation.
pub(super) struct Scratch {
    memory: ScratchBuf,
    lens: [usize; 11],
    pub(super) max_mr: usize,
    position_scores_stride: usize,
}

/// The parts of [`Scratch`].
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    /// A block of keys as panels of kᵀ.
    pub(super) k_panels: *mut f32,
    /// The values of the block as panels.
    v_panels: *mut f32,
    /// The scores of a tile.
    pub(super) scores: *mut f32,
    /// A [`SoftmaxState`] per query.
    states: *mut SoftmaxState,
    /// bf16: copies of the queries and of a block of keys, used if the rows of the arguments are
    /// not whole aligned lanes, or if the microkernel takes widened queries.
    q_lanes: *mut f32,
    k_lanes: *mut f32,
    /// bf16: the context (the sum of weighted values) in f32.
    context: *mut f32,
    /// The keys of the relative positions as panels.
    pub(super) position_panels: *mut f32,
    /// bf16: copies of the relative positions, used like `q_lanes`.
    pub(super) position_lanes: *mut f32,
    /// The products of queries and the keys of relative positions, a row per query.
    pub(super) query_position_scores: *mut f32,
    /// The products of the queries of relative positions and a block of keys, a row per position.
    pub(super) position_key_scores: *mut f32,
}

impl Scratch {
    pub(super) fn new<T: Element>(sizes: &ScratchSizes) -> Self {
        let is_bf16 = usize::from(T::COMPUTE_TYPE == ComputeType::Bf16);
        let &ScratchSizes { d, value_d, max_mr, max_queries: queries, max_rows } = sizes;
        let position_scores_stride = sizes.position_scores_stride();
        // In the order of `Buffers`.
        let lens = [
            KEY_BLOCK * d.next_multiple_of(LANES),
            KEY_BLOCK * value_d.next_multiple_of(MAX_NR),
            max_mr * SCORES_STRIDE,
            queries * size_of::<SoftmaxState>() / size_of::<f32>(),
            is_bf16 * queries * bf16_row_stride(d),
            is_bf16 * KEY_BLOCK * bf16_row_stride(d),
            is_bf16 * queries * value_d,
            position_scores_stride * d.next_multiple_of(LANES),
            is_bf16 * max_rows * bf16_row_stride(d),
            queries * position_scores_stride,
            max_rows * SCORES_STRIDE,
        ];
        let lens = lens.map(|len| len.next_multiple_of(F32_PER_LINE));
        let memory = ScratchBuf::new(lens.iter().sum());
        Self { memory, lens, max_mr, position_scores_stride }
    }

    fn buffers(&mut self) -> Buffers {
        let mut end = self.memory.as_mut_ptr();
        let parts = self.lens.map(|len| {
            let start = end;
            end = end.wrapping_add(len);
            start
        });
        Buffers {
            k_panels: parts[0],
            v_panels: parts[1],
            scores: parts[2],
            states: parts[3].cast(),
            q_lanes: parts[4],
            k_lanes: parts[5],
            context: parts[6],
            position_panels: parts[7],
            position_lanes: parts[8],
            query_position_scores: parts[9],
            position_key_scores: parts[10],
        }
    }
}

/// The kernel of a [`HeadTask`]. [`Attention::check`] has checked the arguments, and the scratch
/// memory has room for the task.
pub(super) struct Head<'a, T> {
    pub(super) attention: &'a Attention<'a, T>,
    pub(super) task: &'a HeadTask<'a>,
    /// The task after this one, whose first keys are prefetched.
    pub(super) next: Option<&'a HeadTask<'a>>,
    pub(super) scratch: &'a mut Scratch,
    pub(super) out: SharedPtr<T>,
    /// The weights of all tasks, zeros so far, if the caller asks for them.
    pub(super) weights: Option<SharedPtr<f32>>,
}

impl<T: Element> ProductKernel for Head<'_, T> {
    #[inline(always)]
    unsafe fn run<V: RegisterTile, D: Microkernel<V>>(self) {
        let Self { attention, task, next, scratch, out, weights } = self;
        let ([_, h, t, d], value_d) = (attention.q.dims, attention.v.dims[3]);
        let (b, queries) = (task.sequence.b, &task.queries);
        let (max_mr, buffers) = (scratch.max_mr, scratch.buffers());
        let position_scores_stride = scratch.position_scores_stride;
        let s = attention.k.dims[2];
        let first_weight = (task.weights_index * t + queries.start) * s + task.sequence.keys.start;
        // SAFETY: reads are of tokens and heads within the dims. Writes are to the scratch memory
        // and to the rows of the output and of the weights of these queries and this head, which
        // belong to this task.
        unsafe {
            let out_stride = h * value_d;
            let out = out.get().add(((b * t + queries.start) * h + task.head) * value_d);
            // In f32, the output itself holds the context.
            let (context, context_stride) = match T::COMPUTE_TYPE {
                ComputeType::F32 => (out.cast(), out_stride),
                _ => (buffers.context, value_d),
            };
            for i in 0..queries.len() {
                buffers.states.add(i).write(SoftmaxState::NEW);
            }
            let rows = (attention.q.at(b, task.head, queries.start), attention.q.strides[2]);
            let to = (buffers.q_lanes, bf16_row_stride(d));
            let (q, q_stride) = T::input_rows::<V, D>(rows, [queries.len(), d], to);
            let pass = Pass {
                attention,
                task,
                next,
                buffers,
                max_mr,
                q,
                q_stride,
                context,
                context_stride,
                weights: weights.map(|weights| weights.get().wrapping_add(first_weight)),
                rows: task.rows(attention),
                position_scores_stride,
            };
            pass.multiply_positions_by_queries::<V, D>();

            let last_query = queries.end.saturating_sub(1);
            let first_block = task.first_block(attention, queries.start);
            for first_key in (first_block..pass.keys_seen(last_query).end).step_by(KEY_BLOCK) {
                let keys = KEY_BLOCK.min(task.sequence.keys.len() - first_key);
                pass.pack_block::<V, D>(first_key, keys);
                pass.multiply_positions_by_keys::<V, D>(keys);
                for (start, mr) in split_evenly(queries.len(), max_mr) {
                    let seen = pass.block_keys_seen(start, mr, first_key, keys);
                    if seen.is_empty() {
                        continue;
                    }
                    let is_first = first_key == task.first_block(attention, queries.start + start);
                    pass.compute_scores::<V, D>(start, mr, &seen);
                    pass.add_position_scores(start, mr, first_key, &seen);
                    pass.apply_softmax::<V, D>(start, mr, first_key, &seen, is_first);
                    pass.add_values::<V, D>(start, mr, &seen, is_first);
                }
            }
            for i in 0..queries.len() {
                let (row, to) = (context.add(i * context_stride), out.add(i * out_stride));
                match (*buffers.states.add(i)).sum {
                    0.0 if !pass.sees_any_key(queries.start + i) => to.write_bytes(0, value_d),
                    sum => {
                        scale_row::<V, D, T>(row, value_d, 1.0 / sum, to);
                        let keys = pass.keys_seen(queries.start + i);
                        pass.scale_weights::<V, D>(i, keys, 1.0 / sum);
                    }
                }
            }
        }
    }
}

/// The state of a [`Head`] between blocks. In the methods, `start` is the index of a tile's first
/// query in the task, `mr` the number of its queries, and key indices start at 0 with the
/// sequence's first key.
pub(super) struct Pass<'a, T> {
    pub(super) attention: &'a Attention<'a, T>,
    pub(super) task: &'a HeadTask<'a>,
    next: Option<&'a HeadTask<'a>>,
    pub(super) buffers: Buffers,
    pub(super) max_mr: usize,
    /// The queries as input rows of the microkernel.
    pub(super) q: *const f32,
    pub(super) q_stride: usize,
    /// The sum of weighted values so far, a row of V per query.
    context: *mut f32,
    context_stride: usize,
    /// The weights of the first query and key, if they are asked for. The weights of a query have a
    /// row stride of S.
    weights: Option<*mut f32>,
    /// The rows of relative positions that the task uses.
    pub(super) rows: Range<usize>,
    pub(super) position_scores_stride: usize,
}

/// # Safety
/// The unsafe methods require that the CPU supports the instructions of `V` and `D`, and that tiles
/// and blocks of keys are within the task.
impl<T: Element> Pass<'_, T> {
    /// [`HeadTask::keys_seen`] of this task.
    fn keys_seen(&self, query: usize) -> Range<usize> {
        self.task.keys_seen(self.attention, query)
    }

    /// The keys of a block, as indices in the block, that the causal mask and the window leave
    /// visible to some query of a tile. The start is rounded down to a multiple of [`MAX_NR`], and
    /// so of every nr.
    fn block_keys_seen(
        &self,
        start: usize,
        mr: usize,
        first_key: usize,
        keys: usize,
    ) -> Range<usize> {
        let first = self.task.queries.start + start;
        let [seen_from, seen_to] =
            [self.keys_seen(first).start, self.keys_seen(first + mr - 1).end];
        let [from, to] = [seen_from, seen_to].map(|key| keys.min(key.saturating_sub(first_key)));
        let first_seen = from / MAX_NR * MAX_NR;
        first_seen..if from < to { to } else { first_seen }
    }

    /// Whether the masks leave at least one key visible to a query.
    fn sees_any_key(&self, query: usize) -> bool {
        let HeadTask { sequence, head, .. } = *self.task;
        let Attention { keep, bias, distance_bias, .. } = *self.attention;
        let (b, visible) = (sequence.b, self.visible());
        let sees = |index: usize| {
            let key = sequence.keys.start + index;
            let position = sequence.position(query);
            visible.is_none_or(|visible| visible[key] != 0)
                && keep.is_none_or(|keep| keep.at(b, head, query, key) != 0)
                && bias.map_or(0.0, |bias| bias.at(b, head, query, key))
                    + distance_bias.map_or(0.0, |bias| bias.row(head, position, index, 1)[0])
                    != f32::NEG_INFINITY
        };
        self.keys_seen(query).any(sees)
    }

    /// The row of `visible` for the sequence's batch index, `(S,)`.
    fn visible(&self) -> Option<&[u8]> {
        let s = self.attention.k.dims[2];
        self.attention.visible.map(|visible| &visible[self.task.sequence.b * s..][..s])
    }

    /// The elements of `visible` for `keys` keys from `first_key` on.
    fn visible_in_block(&self, first_key: usize, keys: usize) -> Option<&[u8]> {
        let start = self.task.sequence.keys.start + first_key;
        self.visible().map(|visible| &visible[start..][..keys])
    }

    /// D in packed lanes.
    pub(super) fn d_lanes(&self) -> usize {
        self.attention.q.dims[3].div_ceil(T::COMPUTE_TYPE.values_per_lane())
    }

    /// The rows of the keys from `first_key` on for a task's head. `x` is the keys or the values.
    fn rows_at<'b>(
        &'b self,
        x: &Strided<T>,
        task: &HeadTask,
        first_key: usize,
    ) -> RowAddresses<'b, T> {
        let group = task.head / (self.attention.q.dims[1] / x.dims[1]);
        let (b, key) = (task.sequence.b, task.sequence.keys.start + first_key);
        let [b_stride, _, stride] = x.strides;
        match self.attention.key_sources {
            None => RowAddresses::new(x.at(b, group, key), stride),
            Some(sources) => {
                let s = x.dims[2];
                let batch = Some((&sources[b * s..][key..s], b_stride));
                RowAddresses { first: x.at(0, group, key), stride, batch }
            }
        }
    }

    /// Packs the keys and values of a block. The values are prefetched while the keys are packed, and
    /// the keys of the next block, of this task or the next one, while the values are packed.
    #[inline(always)]
    unsafe fn pack_block<V: RegisterTile, D: Microkernel<V>>(&self, first_key: usize, keys: usize) {
        let ([.., d], [.., value_d]) = (self.attention.q.dims, self.attention.v.dims);
        let Attention { k, v, .. } = self.attention;
        let task = self.task;
        let last_query = task.queries.end.saturating_sub(1);
        let [of_keys, of_values] = [k, v].map(|x| self.rows_at(x, task, first_key));
        let of_next_keys = match self.next {
            Some(next) if first_key + keys >= self.keys_seen(last_query).end => {
                self.rows_at(k, next, next.first_block(self.attention, next.queries.start))
            }
            _ => of_keys.after(keys),
        };
        // SAFETY: upheld by the caller.
        unsafe {
            let to = (self.buffers.k_lanes, bf16_row_stride(d));
            let rows = T::packed_rows(of_keys, [keys, d], to);
            pack_keys::<V, T>(rows, [keys, self.d_lanes()], self.buffers.k_panels, of_values);
            let visible = self.visible_in_block(first_key, keys);
            let (n_d, to) = ([keys, value_d], self.buffers.v_panels);
            pack_values::<V, D, T>(of_values, n_d, visible, to, of_next_keys);
        }
    }

    /// Computes `q·kᵀ` for a tile and the keys `seen` of the block.
    #[inline(always)]
    unsafe fn compute_scores<V: RegisterTile, D: Microkernel<V>>(
        &self,
        start: usize,
        mr: usize,
        seen: &Range<usize>,
    ) {
        // SAFETY: upheld by the caller; the block's panels and scores have room for `seen`.
        unsafe {
            let q = (self.q.add(start * self.q_stride), self.q_stride);
            let panels = self.buffers.k_panels.add(seen.start * self.d_lanes());
            let to = (self.buffers.scores.add(seen.start), SCORES_STRIDE);
            self.multiply_panels::<V, D>(q, mr, (panels, seen.len()), to);
        }
    }

    /// Multiplies `mr` rows of D values by `n` columns in panels. `rows` and `to` are pairs of a
    /// pointer and a row stride. The rows of `to` have room for whole panels.
    #[inline(always)]
    pub(super) unsafe fn multiply_panels<V: RegisterTile, D: Microkernel<V>>(
        &self,
        (rows, row_stride): (*const f32, usize),
        mr: usize,
        (panels, n): (*const f32, usize),
        (to, to_stride): (*mut f32, usize),
    ) {
        let d_lanes = self.d_lanes();
        for panel in 0..n.div_ceil(V::NR) {
            // SAFETY: upheld by the caller.
            unsafe {
                let tile = Tile {
                    a: rows,
                    a_stride: row_stride,
                    b: panels.add(panel * V::NR * d_lanes),
                    terms: 3,
                    k_lanes: d_lanes,
                    prefetch: &[],
                    c: to.add(panel * V::NR),
                    c_stride: to_stride,
                    columns: V::NR,
                    accumulate: false,
                };
                D::multiply_tile(mr, &tile);
            }
        }
    }

    /// Masks the scores of a tile, replaces them by softmax weights, and rescales the context to
    /// the new maximum.
    #[inline(always)]
    unsafe fn apply_softmax<V: RegisterTile, D: Microkernel<V>>(
        &self,
        start: usize,
        mr: usize,
        first_key: usize,
        seen: &Range<usize>,
        is_first: bool,
    ) {
        let HeadTask { sequence, head, ref queries, .. } = *self.task;
        let value_d = self.attention.v.dims[3];
        let first_key = first_key + seen.start;
        let visible = self.visible_in_block(first_key, seen.len()).unwrap_or_default();
        for i in 0..mr {
            let query = queries.start + start + i;
            let of_query = self.keys_seen(query);
            let [seen_from, seen_to] = [of_query.start, of_query.end]
                .map(|key| seen.len().min(key.saturating_sub(first_key)));
            // SAFETY: upheld by the caller; the scores and the row of weights have room for the block.
            unsafe {
                let scores = self.buffers.scores.add(i * SCORES_STRIDE + seen.start);
                let row = std::slice::from_raw_parts_mut(scores, seen.len());
                let position = [head, query, first_key];
                let scale = apply_mask(self.attention, row, sequence, position);
                row[..seen_from].fill(f32::NEG_INFINITY);
                row[seen_to..].fill(f32::NEG_INFINITY);
                for (score, _) in row.iter_mut().zip(visible).filter(|(_, v)| **v == 0) {
                    *score = f32::NEG_INFINITY;
                }
                let state = &mut *self.buffers.states.add(start + i);
                let rescale =
                    online_softmax::<V, D>(T::COMPUTE_TYPE, scores, seen.len(), scale, state);
                if !is_first && rescale != 1.0 {
                    let context = self.context.add((start + i) * self.context_stride);
                    scale_row::<V, D, f32>(context, value_d, rescale, context);
                    self.scale_weights::<V, D>(start + i, 0..first_key, rescale);
                }
                if let Some(weights) = self.weights_at(start + i, first_key) {
                    weights.copy_from_nonoverlapping(scores, seen.len());
                }
            }
        }
    }

    /// The address of the weight of query `i` of the task and `key`, if the weights are asked for.
    fn weights_at(&self, i: usize, key: usize) -> Option<*mut f32> {
        let weights = self.weights?;
        Some(weights.wrapping_add(i * self.attention.k.dims[2] + key))
    }

    /// Multiplies the weights of query `i` of the task and some keys of the sequence, if they are
    /// asked for.
    #[inline(always)]
    unsafe fn scale_weights<V: RegisterTile, D: Microkernel<V>>(
        &self,
        i: usize,
        keys: Range<usize>,
        scale: f32,
    ) {
        if let Some(row) = self.weights_at(i, keys.start) {
            // SAFETY: upheld by the caller; the keys are within the sequence.
            unsafe { scale_row::<V, D, f32>(row, keys.len(), scale, row) }
        }
    }

    /// Adds the weighted values of the keys `seen` of the block to the context.
    #[inline(always)]
    unsafe fn add_values<V: RegisterTile, D: Microkernel<V>>(
        &self,
        start: usize,
        mr: usize,
        seen: &Range<usize>,
        is_first: bool,
    ) {
        let value_d = self.attention.v.dims[3];
        let (per_lane, panels) = (T::COMPUTE_TYPE.values_per_lane(), self.buffers.v_panels);
        for panel in 0..value_d.div_ceil(V::NR) {
            // SAFETY: upheld by the caller; the weights, panels and context include this panel.
            unsafe {
                let tile = Tile {
                    a: self.buffers.scores.add(seen.start),
                    a_stride: SCORES_STRIDE,
                    b: panels.add((panel * KEY_BLOCK + seen.start / per_lane) * V::NR),
                    terms: 3,
                    k_lanes: seen.len().div_ceil(per_lane),
                    prefetch: &[],
                    c: self.context.add(start * self.context_stride + panel * V::NR),
                    c_stride: self.context_stride,
                    columns: V::NR.min(value_d - panel * V::NR),
                    accumulate: !is_first,
                };
                D::multiply_tile(mr, &tile);
            }
        }
    }
}
