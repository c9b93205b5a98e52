//! `softmax(q·kᵀ · scale) · v`, some queries at a time: memory grows with the keys, not with
//! queries times keys.
//!
//! Keys and values are packed into panels as weights are, so that both products are those of
//! [`crate::gemm`]. Each output is one sum over its keys in order, whatever else is in the batch.

use std::{mem::MaybeUninit, ops::Range};

use rayon::prelude::*;

use crate::{
    Isa,
    buffers::{Buffer, Shared},
    gemm::{F32, Format, PANEL, Tile, Tiles, tile_rows},
    lanes::{Lanes, on_isa},
    math::exp,
};

/// `(B, H, T, D)` numbers with any distance between sequences, heads and tokens; those of a token
/// and head lie together.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// All of them.
    pub data: &'a [f32],
    /// From one sequence, head and token to the next.
    pub strides: [usize; 3],
    /// B, H, T and D.
    pub dims: [usize; 4],
}

impl Strided<'_> {
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
    fn at(&self, b: usize, h: usize, t: usize) -> *const f32 {
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

/// What attention does.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `(B, H, T, D)`
    pub q: Strided<'a>,
    /// `(B, G, S, D)`, each of the G serving H / G heads.
    pub k: Strided<'a>,
    /// `(B, G, S, V)`
    pub v: Strided<'a>,
    /// Which queries attend to which keys; each query is in one of them.
    pub sequences: &'a [Sequence],
    /// `(B, S)`: 0 where no query may attend to a key.
    pub keep: Option<&'a [u8]>,
    /// Keys before the first query of a sequence, if no query may see later ones.
    pub causal: Option<usize>,
    /// What scores are multiplied with.
    pub scale: f32,
}

/// The mixtures of values, `(B, T, H, V)`; zeros for a query that sees no key.
///
/// Under `causal`, values must be finite: a weight of 0 does not keep NaN out of a sum.
///
/// # Panics
/// If the dims do not fit together or reach beyond the data.
pub fn attention(isa: Isa, args: Attention) -> Vec<f32> {
    let Attention { q, k, v, sequences, keep, .. } = args;
    let ([b, h, t, d], [kb, g, s, kd], [vb, vg, vs, value_d]) = (q.dims, k.dims, v.dims);
    assert!(b == kb && b == vb && g == vg && s == vs && d == kd, "q, k and v fit together");
    assert!(g > 0 && h.is_multiple_of(g), "groups of heads");
    assert!(keep.is_none_or(|keep| keep.len() == b * s), "a keep mask of (B, S)");
    [q, k, v].iter().for_each(Strided::check);
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
    let spare: &mut [MaybeUninit<f32>] = out.spare_capacity_mut();
    let shared = Shared::new(spare.as_mut_ptr().cast::<f32>());

    // Few sequences and heads are split into parts of their queries, so that all threads have work.
    let enough = 4 * rayon::current_num_threads();
    let parts = enough.div_ceil((sequences.len() * h).max(1));
    let tasks: Vec<Task> = sequences
        .iter()
        .flat_map(|sequence| {
            let part = sequence.queries.len().div_ceil(parts).max(4 * isa.tile_rows(Format::F32));
            let starts = sequence.queries.clone().step_by(part);
            starts.flat_map(move |start| {
                let queries = start..sequence.queries.end.min(start + part);
                (0..h).map(move |head| Task { sequence, head, queries: queries.clone() })
            })
        })
        .collect();
    tasks.into_par_iter().for_each(|task| {
        let args =
            Args { attention: &args, task, out: shared, highest: isa.tile_rows(Format::F32) };
        on_isa!(isa, head, args: Args);
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

struct Args<'a> {
    attention: &'a Attention<'a>,
    task: Task<'a>,
    out: Shared<f32>,
    highest: usize,
}

/// # Safety
/// The instructions of `L`; dims and ranges as [`attention`] has checked them.
#[inline(always)]
unsafe fn head<L: Tiles>(args: Args) {
    let Args { attention, task: Task { sequence, head, queries }, out, highest } = args;
    let Attention { q, k, v, keep, causal, scale, .. } = *attention;
    let ([_, h, t, d], [_, g, s, _], value_d) = (q.dims, k.dims, v.dims[3]);
    let (b, group, first) = (sequence.b, head / (h / g), sequence.keys.start);
    let keys = sequence.keys.len();
    let keep = keep.map(|keep| &keep[b * s + first..][..keys]);
    let hidden = |key: usize| keep.is_some_and(|keep| keep[key] == 0);

    // Keys side by side in panels, as the columns of kᵀ; values as they are, PANEL columns a panel.
    let padded = keys.next_multiple_of(PANEL);
    let value_panels = value_d.div_ceil(PANEL);
    let mut k_panels = Buffer::new(padded * d);
    let mut v_panels = Buffer::new(keys * value_panels * PANEL);
    let row = padded + L::N; // a distance that no power of two divides
    let mut scores = Buffer::new(highest * row);
    let (k_panels, v_panels) = (k_panels.as_mut_ptr(), v_panels.as_mut_ptr());
    let scores = scores.as_mut_ptr();
    // SAFETY: reads are of tokens and heads within the dims; writes within the buffers just made,
    // and the output's rows of these queries and this head, which are this task's alone.
    unsafe {
        for key in 0..keys {
            let from = k.at(b, group, first + key);
            let to = k_panels.add(key / PANEL * PANEL * d + key % PANEL);
            for i in 0..d {
                *to.add(i * PANEL) = *from.add(i);
            }
        }
        for key in keys..padded {
            for i in 0..d {
                *k_panels.add(key / PANEL * PANEL * d + i * PANEL + key % PANEL) = 0.0;
            }
        }
        for key in 0..keys {
            let from = v.at(b, group, first + key);
            for panel in 0..value_panels {
                let to = v_panels.add((panel * keys + key) * PANEL);
                for i in 0..PANEL {
                    let column = panel * PANEL + i;
                    let inside = column < value_d && !hidden(key);
                    *to.add(i) = if inside { *from.add(column) } else { 0.0 };
                }
            }
        }
        for (start, height) in tile_rows(queries.len(), highest) {
            let query = queries.start + start;
            // How many keys the last query of the tile may see, and so the most.
            let visible = |query: usize| match causal {
                None => keys,
                Some(offset) => keys.min(query - sequence.queries.start + offset + 1),
            };
            let most = visible(query + height - 1);
            for panel in 0..most.div_ceil(PANEL) {
                let tile = Tile {
                    a: q.at(b, head, query),
                    a_row: q.strides[2],
                    b: k_panels.add(panel * PANEL * d),
                    steps: d,
                    c: scores.add(panel * PANEL),
                    c_row: row,
                    columns: PANEL,
                    go_on: false,
                };
                L::tile::<F32>(height, &tile);
            }
            let mut sums = [0f32; 16];
            for (i, sum) in sums.iter_mut().enumerate().take(height) {
                let scores = scores.add(i * row);
                for key in visible(query + i)..most {
                    *scores.add(key) = f32::NEG_INFINITY;
                }
                if keep.is_some() {
                    for key in (0..most).filter(|&key| hidden(key)) {
                        *scores.add(key) = f32::NEG_INFINITY;
                    }
                }
                *sum = softmax::<L>(scores, most, scale);
            }
            let to = out.get().add(((b * t + query) * h + head) * value_d);
            for panel in 0..value_panels {
                let tile = Tile {
                    a: scores,
                    a_row: row,
                    b: v_panels.add(panel * keys * PANEL),
                    steps: most,
                    c: to.add(panel * PANEL),
                    c_row: h * value_d,
                    columns: PANEL.min(value_d - panel * PANEL),
                    go_on: false,
                };
                L::tile::<F32>(height, &tile);
            }
            for (i, &sum) in sums.iter().enumerate().take(height) {
                let scale = if sum == 0.0 { 0.0 } else { 1.0 / sum };
                for column in (0..value_d).step_by(L::N) {
                    let n = L::N.min(value_d - column);
                    let place = to.add(i * h * value_d + column);
                    L::load_first(place, n).mul(L::splat(scale)).store_first(place, n);
                }
            }
        }
    }
}

/// Scores into `exp(score·scale − largest)`; gives their sum, 0 if all are −∞.
///
/// # Safety
/// The instructions of `L`; `n` scores.
#[inline(always)]
unsafe fn softmax<L: Lanes>(scores: *mut f32, n: usize, scale: f32) -> f32 {
    let scale_all = scale;
    // SAFETY: all places are within the `n` scores.
    unsafe {
        let scale = L::splat(scale_all);
        let whole = n - n % L::N;
        let mut largest = L::splat(f32::NEG_INFINITY);
        for i in (0..whole).step_by(L::N) {
            largest = largest.max(L::load(scores.add(i)).mul(scale));
        }
        let mut largest = largest.largest();
        for i in whole..n {
            largest = largest.max(*scores.add(i) * scale_all);
        }
        let largest = L::splat(largest.max(f32::MIN));
        let mut sum = L::splat(0.0);
        for i in (0..n).step_by(L::N) {
            let len = L::N.min(n - i);
            let place = scores.add(i);
            let e = exp(L::load_first(place, len).mul(scale).sub(largest));
            e.store_first(place, len);
            sum = sum.add(L::load_first(place, len)); // zeros beyond the last
        }
        sum.sum()
    }
}
