//! `softmax(q·kᵀ · scale + bias) · v`, some queries and some keys at a time: the memory it takes
//! does not grow with their number.
//!
//! The keys of a block are packed into panels as weights are, so that both products are those of
//! [`crate::gemm`]; softmax is carried from block to block (Milakov and Gimelshein 2018,
//! <https://arxiv.org/abs/1805.02867>; Dao et al. 2022, <https://arxiv.org/abs/2205.14135>). Blocks
//! are counted from a sequence's first key, so that what a query gets does not depend on what else
//! is in the batch.

use std::{f32::consts::LOG2_E, mem::MaybeUninit, ops::Range};

use crate::{
    Isa,
    buffers::{Buffer, LINE, Shared},
    gemm::{Dot, Format, PANEL, Tile, Tiles, Work, run, tile_rows},
    lanes::{Lanes, MAX_LANES, prefetch, transpose},
    math::exp2,
    number::{Element, Number},
    team::share,
};

/// Keys of a block: their panels, and a tile's scores, stay in the nearer caches.
const BLOCK: usize = 384;

/// `(B, H, T, D)` numbers with any distance between sequences, heads and tokens; those of a token
/// and head lie together.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, T> {
    /// All of them.
    pub data: &'a [T],
    /// From one sequence, head and token to the next.
    pub strides: [usize; 3],
    /// B, H, T and D.
    pub dims: [usize; 4],
}

impl<T> Strided<'_, T> {
    /// # Panics
    /// If the dims reach beyond the data.
    fn check(&self) {
        if self.dims.contains(&0) {
            return;
        }
        let [b, h, t, d] = self.dims;
        let [of_b, of_h, of_t] = self.strides;
        let last = (b - 1) * of_b + (h - 1) * of_h + (t - 1) * of_t + d - 1;
        assert!(
            last < self.data.len(),
            "{:?} of {:?} in {}",
            self.dims,
            self.strides,
            self.data.len()
        );
    }

    /// Where a token of a head is.
    fn at(&self, b: usize, h: usize, t: usize) -> *const T {
        let [of_b, of_h, of_t] = self.strides;
        // SAFETY: within the data, as checked, or one past it.
        unsafe { self.data.as_ptr().add(b * of_b + h * of_h + t * of_t) }
    }
}

/// Some queries, and the keys that they may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Which of the B.
    pub b: usize,
    /// Which of the T.
    pub queries: Range<usize>,
    /// Which of the S.
    pub keys: Range<usize>,
}

/// Something told of each query and key, `(B, H, T, S)` where a stride may be 0.
#[derive(Clone, Copy, Debug)]
pub struct Broadcast<'a, T> {
    /// All that is told.
    pub data: &'a [T],
    /// From one sequence, head, query and key to the next.
    pub strides: [usize; 4],
}

impl<T: Copy> Broadcast<'_, T> {
    /// # Panics
    /// If the dims reach beyond the data.
    fn check(&self, dims: [usize; 4]) {
        let last: usize = dims.iter().zip(self.strides).map(|(&dim, s)| (dim.max(1) - 1) * s).sum();
        assert!(dims.contains(&0) || last < self.data.len(), "{dims:?} of {:?}", self.strides);
    }

    fn at(&self, b: usize, h: usize, t: usize, s: usize) -> T {
        let [of_b, of_h, of_t, of_s] = self.strides;
        self.data[b * of_b + h * of_h + t * of_t + s * of_s]
    }
}

/// What attention does.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, T> {
    /// `(B, H, T, D)`
    pub q: Strided<'a, T>,
    /// `(B, G, S, D)`, each of the G serving H / G heads.
    pub k: Strided<'a, T>,
    /// `(B, G, S, V)`
    pub v: Strided<'a, T>,
    /// Which queries attend to which keys; each query is in one of them.
    pub sequences: &'a [Sequence],
    /// `(B, S)`: 0 where no query may attend to a key.
    pub visible: Option<&'a [u8]>,
    /// 0 where a query may not attend to a key.
    pub keep: Option<Broadcast<'a, u8>>,
    /// What is added to the scaled scores; −∞ is like a `keep` of 0.
    pub bias: Option<Broadcast<'a, f32>>,
    /// Keys before the first query of a sequence, if no query may see later ones.
    pub causal: Option<usize>,
    /// What scores are multiplied with.
    pub scale: f32,
}

/// The mixtures of values, `(B, T, H, V)`; zeros for a query that sees no key, NaN for one whose
/// scores of all it sees are −∞. The weights that they are mixed by are rounded as q, k and v are;
/// sums are in f32.
///
/// Under `causal`, `keep` and `bias`, values must be finite: a weight of 0 does not keep NaN out of
/// a sum. What `visible` hides may hold anything.
///
/// # Panics
/// If the dims do not fit together or reach beyond the data.
pub fn attention<T: Number>(isa: Isa, args: Attention<T>) -> Vec<T> {
    let Attention { q, k, v, sequences, visible, keep, bias, .. } = args;
    let ([b, h, t, d], [kb, g, s, kd], [vb, vg, vs, value_d]) = (q.dims, k.dims, v.dims);
    assert!(b == kb && b == vb && g == vg && s == vs && d == kd, "q, k and v fit together");
    assert!(g > 0 && h.is_multiple_of(g), "groups of heads");
    assert!(visible.is_none_or(|visible| visible.len() == b * s), "of all keys");
    [q, k, v].iter().for_each(Strided::check);
    keep.iter().for_each(|keep| keep.check([b, h, t, s]));
    bias.iter().for_each(|bias| bias.check([b, h, t, s]));
    let inside = |x: &Sequence| x.b < b && x.queries.end <= t && x.keys.end <= s;
    assert!(sequences.iter().all(inside), "sequences within B, T and S");
    let mut seen = vec![false; b * t];
    for sequence in sequences {
        for t in sequence.queries.clone().map(|query| sequence.b * t + query) {
            assert!(!std::mem::replace(&mut seen[t], true), "each query once");
        }
    }
    assert!(seen.into_iter().all(|seen| seen), "all queries");

    let len = b * t * h * value_d;
    let mut out = Vec::with_capacity(len);
    let spare: &mut [MaybeUninit<T>] = out.spare_capacity_mut();
    let shared = Shared::new(spare.as_mut_ptr().cast::<T>());

    // Few sequences and heads are split into parts of their queries, so that all threads have work.
    let enough = 4 * rayon::current_num_threads();
    let parts = enough.div_ceil((sequences.len() * h).max(1));
    // Not by thirds: there are few products in attention beside those of the linear maps.
    let isa = if isa.has_thirds(T::FORMAT) { Isa::AVX512_BF16_VNNI } else { isa };
    let tasks: Vec<Task> = sequences
        .iter()
        .flat_map(|sequence| {
            let part = sequence.queries.len().div_ceil(parts).max(4 * isa.tile_rows(T::FORMAT));
            let starts = sequence.queries.clone().step_by(part);
            starts.flat_map(move |start| {
                let queries = start..sequence.queries.end.min(start + part);
                (0..h).map(move |head| Task { sequence, head, queries: queries.clone() })
            })
        })
        .collect();
    let most_queries = tasks.iter().map(|task| task.queries.len()).max().unwrap_or(0);
    // Short sequences share their scratch with others.
    let together = tasks.len() / (16 * rayon::current_num_threads());
    let together: Vec<&[Task]> = tasks.chunks(together.max(1)).collect();
    share(together.len(), |i| {
        let mut scratch = Scratch::new::<T>([d, value_d], isa.tile_rows(T::FORMAT), most_queries);
        for task in together[i] {
            let scratch = &mut scratch;
            run(isa, T::FORMAT, Head { attention: &args, task, scratch, out: shared });
        }
    });
    // SAFETY: each query of each head was written, since each is in one of the sequences.
    unsafe { out.set_len(len) };
    out
}

/// Some queries of one head.
struct Task<'a> {
    sequence: &'a Sequence,
    head: usize,
    queries: Range<usize>,
}

struct Head<'a, T> {
    attention: &'a Attention<'a, T>,
    task: &'a Task<'a>,
    scratch: &'a mut Scratch,
    out: Shared<T>,
}

/// What one thread works with, in one piece.
struct Scratch {
    words: Buffer,
    lens: [usize; 7],
    highest: usize,
}

/// Words from one row of pairs to the next, an odd number of lines.
fn row_of_pairs(d: usize) -> usize {
    d.div_ceil(2).next_multiple_of(LINE) | LINE
}

/// From one row of scores to the next: no power of two divides it.
const SCORES: usize = BLOCK + MAX_LANES;

impl Scratch {
    fn new<T: Element>([d, value_d]: [usize; 2], highest: usize, queries: usize) -> Self {
        let of_bf16 = usize::from(T::FORMAT == Format::Bf16);
        let lens = [
            // A block of keys side by side, as the columns of kᵀ, and their values.
            BLOCK * d.next_multiple_of(MAX_LANES),
            BLOCK * value_d.next_multiple_of(PANEL),
            // A tile's scores; of each query, the largest so far and the sum of the exponentials.
            highest * SCORES,
            2 * queries,
            // The queries and a block of keys, if they are not whole words, and the mixtures in f32.
            of_bf16 * queries * row_of_pairs(d),
            of_bf16 * BLOCK * row_of_pairs(d),
            of_bf16 * queries * value_d,
        ];
        let lens = lens.map(|len| len.next_multiple_of(LINE));
        Self { words: Buffer::new(lens.iter().sum()), lens, highest }
    }

    /// Where each part begins.
    fn parts(&mut self) -> [*mut f32; 7] {
        let mut end = self.words.as_mut_ptr();
        self.lens.map(|len| {
            let start = end;
            end = end.wrapping_add(len);
            start
        })
    }
}

/// Dims and ranges are as [`attention`] has checked them, and there is scratch for them.
impl<T: Element> Work for Head<'_, T> {
    #[inline(always)]
    unsafe fn run<L: Tiles, D: Dot<L>>(self) {
        let Self { attention, task, scratch, out } = self;
        let Task { sequence, head, ref queries } = *task;
        let Attention { q, k, v, visible, keep, bias, causal, .. } = *attention;
        let ([_, h, t, d], [_, g, s, _], value_d) = (q.dims, k.dims, v.dims[3]);
        let (b, group) = (sequence.b, head / (h / g));
        let visible = visible.map(|visible| &visible[b * s..][..s]);
        let [k_panels, v_panels, scores, states, q_words, k_words, sums] = scratch.parts();
        let (per_word, of_row) = (T::FORMAT.per_word(), row_of_pairs(d));
        let words = d.div_ceil(per_word);
        // How many of the sequence's keys a query may see, and so all before it.
        let seen = |query: usize| match causal {
            None => sequence.keys.len(),
            Some(offset) => sequence.keys.len().min(query - sequence.queries.start + offset + 1),
        };
        let sees = |query: usize, key: usize| {
            visible.is_none_or(|visible| visible[key] != 0)
                && keep.is_none_or(|keep| keep.at(b, head, query, key) != 0)
                && bias.is_none_or(|bias| bias.at(b, head, query, key) != f32::NEG_INFINITY)
        };
        let sees_any = |query| sequence.keys.clone().take(seen(query)).any(|key| sees(query, key));
        // SAFETY: reads are of tokens and heads within the dims; writes within the scratch, and the
        // output's rows of these queries and this head, which are this task's alone.
        unsafe {
            let (out, of_query) =
                (out.get().add(((b * t + queries.start) * h + head) * value_d), h * value_d);
            let (mixtures, of_mixture) = match T::FORMAT {
                Format::F32 => (out.cast(), of_query),
                _ => (sums, value_d),
            };
            for i in 0..queries.len() {
                *states.add(2 * i) = f32::MIN;
                *states.add(2 * i + 1) = 0.0;
            }
            let rows = (q.at(b, head, queries.start), q.strides[2]);
            let to = (q_words, of_row);
            let (q_rows, q_row) = T::words(rows, [queries.len(), d], to);
            for first in (0..seen(queries.end.saturating_sub(1))).step_by(BLOCK) {
                let first_key = sequence.keys.start + first;
                let n = BLOCK.min(sequence.keys.len() - first);
                let rows = (k.at(b, group, first_key), k.strides[2]);
                let to = (k_words, of_row);
                let (rows, stride) = T::words(rows, [n, d], to);
                pack_keys::<L>(rows, stride, n, words, k_panels);
                let visible = visible.map(|visible| &visible[first_key..][..n]);
                let values = (v.at(b, group, first_key), v.strides[2]);
                pack_values::<L, D, T>(values, [n, value_d], visible, v_panels);
                for (start, height) in tile_rows(queries.len(), scratch.highest) {
                    let query = queries.start + start;
                    let seen = |query| n.min(seen(query).saturating_sub(first));
                    let most = seen(query + height - 1);
                    for panel in 0..most.div_ceil(PANEL) {
                        let tile = Tile {
                            a: q_rows.add(start * q_row),
                            a_row: q_row,
                            b: k_panels.add(panel * PANEL * words),
                            thirds: 3,
                            steps: words,
                            next: &[],
                            c: scores.add(panel * PANEL),
                            c_row: SCORES,
                            columns: PANEL,
                            go_on: false,
                        };
                        D::tile(height, &tile);
                    }
                    for i in 0..height {
                        let (scores, query) = (scores.add(i * SCORES), query + i);
                        let own = std::slice::from_raw_parts_mut(scores, most);
                        let scale = mask(attention, own, [b, head, query, first_key]);
                        own[seen(query)..].fill(f32::NEG_INFINITY);
                        let visible = visible.unwrap_or_default();
                        for (score, _) in own.iter_mut().zip(visible).filter(|(_, v)| **v == 0) {
                            *score = f32::NEG_INFINITY;
                        }
                        let state = states.add(2 * (start + i));
                        let shrunk = softmax::<L, D>(T::FORMAT, scores, most, scale, state);
                        if first > 0 && shrunk != 1.0 {
                            let mixture = mixtures.add((start + i) * of_mixture);
                            scaled::<L, D, f32>(mixture, value_d, shrunk, mixture);
                        }
                    }
                    for panel in 0..value_d.div_ceil(PANEL) {
                        let tile = Tile {
                            a: scores,
                            a_row: SCORES,
                            b: v_panels.add(panel * BLOCK * PANEL),
                            thirds: 3,
                            steps: most.div_ceil(per_word),
                            next: &[],
                            c: mixtures.add(start * of_mixture + panel * PANEL),
                            c_row: of_mixture,
                            columns: PANEL.min(value_d - panel * PANEL),
                            go_on: first > 0,
                        };
                        D::tile(height, &tile);
                    }
                }
            }
            for i in 0..queries.len() {
                let (mixture, to) = (mixtures.add(i * of_mixture), out.add(i * of_query));
                match *states.add(2 * i + 1) {
                    0.0 if !sees_any(queries.start + i) => to.write_bytes(0, value_d),
                    sum => scaled::<L, D, T>(mixture, value_d, 1.0 / sum, to),
                }
            }
        }
    }
}

/// `n` keys of `d` words, `stride` apart, as panels of [`PANEL`] columns; zeros in those that are
/// left over.
///
/// # Safety
/// The instructions of `L`; so many keys, and room for them.
#[inline(always)]
unsafe fn pack_keys<L: Lanes>(from: *const f32, stride: usize, n: usize, d: usize, to: *mut f32) {
    for key in (0..n.next_multiple_of(PANEL)).step_by(L::N) {
        for i in (0..d).step_by(L::N) {
            let width = L::N.min(d - i);
            // SAFETY: the caller's.
            unsafe {
                let mut rows = [L::splat(0.0); MAX_LANES];
                for (j, row) in rows.iter_mut().enumerate().take(L::N) {
                    if key + j < n {
                        let from = from.add((key + j) * stride + i);
                        prefetch(from.wrapping_add(d));
                        *row = L::load_first(from, width);
                    }
                }
                transpose::<L>(&mut rows);
                let to = to.add(key / PANEL * PANEL * d + i * PANEL + key % PANEL);
                for (j, column) in rows.into_iter().enumerate().take(width) {
                    column.store(to.add(j * PANEL));
                }
            }
        }
    }
}

/// `n` values of width `d` as panels of [`PANEL`] columns and [`BLOCK`] rows, a row for as many values
/// as a word of the format holds; zeros for those that are not visible, and beyond `d` and `n`.
///
/// # Safety
/// The instructions of `L` and `D`; so many values, and room for them.
#[inline(always)]
unsafe fn pack_values<L: Lanes, D: Dot<L>, T: Element>(
    (from, stride): (*const T, usize),
    [n, d]: [usize; 2],
    visible: Option<&[u8]>,
    to: *mut f32,
) {
    let per_word = T::FORMAT.per_word();
    for row in 0..n.div_ceil(per_word) {
        for column in (0..d.next_multiple_of(PANEL)).step_by(L::N) {
            let width = L::N.min(d.saturating_sub(column));
            let value = |key: usize| {
                let hidden = key >= n || visible.is_some_and(|visible| visible[key] == 0);
                // SAFETY: the caller's; nothing is read of a key that is not there.
                unsafe {
                    let from = from.wrapping_add(key * stride + column);
                    prefetch(from.wrapping_add(d).cast());
                    if hidden { L::splat(0.0) } else { T::load::<L>(from, width) }
                }
            };
            // SAFETY: the caller's.
            unsafe {
                let words = match T::FORMAT {
                    Format::F32 => value(row),
                    _ => D::pair_bf16(value(2 * row), value(2 * row + 1)),
                };
                words.store(to.add((column / PANEL * BLOCK + row) * PANEL + column % PANEL));
            }
        }
    }
}

/// Adds the bias to a query's scores of keys from `key` on, and hides what it may not see; gives
/// what the scores are still to be multiplied with.
fn mask<T>(attention: &Attention<T>, scores: &mut [f32], [b, h, t, key]: [usize; 4]) -> f32 {
    let mut scale = attention.scale;
    if let Some(bias) = attention.bias {
        for (i, score) in scores.iter_mut().enumerate() {
            let bias = bias.at(b, h, t, key + i);
            *score = if bias == f32::NEG_INFINITY { bias } else { *score * scale + bias };
        }
        scale = 1.0;
    }
    if let Some(keep) = attention.keep {
        for (i, score) in scores.iter_mut().enumerate() {
            if keep.at(b, h, t, key + i) == 0 {
                *score = f32::NEG_INFINITY;
            }
        }
    }
    scale
}

/// # Safety
/// The instructions of `L` and `D`; rows of `width`.
#[inline(always)]
unsafe fn scaled<L: Lanes, D: Dot<L>, T: Element>(
    row: *const f32,
    width: usize,
    scale: f32,
    to: *mut T,
) {
    for column in (0..width).step_by(L::N) {
        // SAFETY: within the rows.
        unsafe {
            let n = L::N.min(width - column);
            let x = L::load_first(row.add(column), n).mul(L::splat(scale));
            T::store::<L, D>(x, to.add(column), n);
        }
    }
}

/// Scores into `exp(score·scale − largest)`, as words of a format, where `largest` is that of this
/// block and those before; adds them to the sum so far, and gives what that and the mixture so far
/// had to be multiplied with. All of it is in powers of 2.
///
/// # Safety
/// The instructions of `L` and `D`; `n` scores, and a state of the largest and the sum.
#[inline(always)]
unsafe fn softmax<L: Lanes, D: Dot<L>>(
    format: Format,
    scores: *mut f32,
    n: usize,
    scale: f32,
    state: *mut f32,
) -> f32 {
    // SAFETY: all places are within the `n` scores and the state.
    unsafe {
        let scale = scale * LOG2_E;
        let scale_all = L::splat(scale);
        let whole = n - n % L::N;
        let mut most = L::splat(f32::NEG_INFINITY);
        for i in (0..whole).step_by(L::N) {
            most = most.max(L::load(scores.add(i)).mul(scale_all));
        }
        let rest = (whole..n).fold(most.largest(), |most, i| most.max(*scores.add(i) * scale));
        let (before, largest) = (*state, rest.max(*state));
        let mut sum = L::splat(0.0);
        for i in (0..n.next_multiple_of(2)).step_by(L::N) {
            let (place, len) = (scores.add(i), L::N.min(n.saturating_sub(i)));
            let e = exp2(L::load_first(place, len).mul(scale_all).sub(L::splat(largest)));
            e.store_first(place, len);
            let e = L::load_first(place, len); // zeros beyond the last
            sum = sum.add(e);
            if format == Format::Bf16 {
                D::store_bf16(e, scores.cast::<u16>().add(i)); // before all scores still to be read
            }
        }
        let shrunk = if before == largest { 1.0 } else { exp2::<f32>(before - largest) };
        *state = largest;
        *state.add(1) = *state.add(1) * shrunk + sum.sum();
        shrunk
    }
}
