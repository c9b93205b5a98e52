//! The arguments of attention, and their checks.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, Ordering},
};

use crate::parallel::parallel_for;

/// A tensor `(B, H, T, D)` with any strides between sequences, heads and tokens. The D values of a
/// token and head are contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// The strides of B, H and T, in elements.
    pub strides: [usize; 3],
    /// B, H, T and D.
    pub dims: [usize; 4],
}

impl<T> Strided<'_, T> {
    /// # Panics
    /// If the tensor reaches beyond `data`.
    pub(crate) fn check(&self, name: &str) {
        let Self { dims, strides, data } = self;
        if dims.contains(&0) {
            return;
        }
        let [b, h, t, d] = *dims;
        let axes = [b, h, t].into_iter().zip(*strides);
        let end = axes
            .into_iter()
            .try_fold(d, |end, (n, stride)| end.checked_add((n - 1).checked_mul(stride)?));
        let len = data.len();
        assert!(
            end.is_some_and(|end| end <= len),
            "{name}: dims {dims:?} with strides {strides:?} exceed {len} elements"
        );
    }

    /// The address of the first value of a token and head.
    pub(crate) fn at(&self, b: usize, h: usize, t: usize) -> *const T {
        let [b_stride, h_stride, t_stride] = self.strides;
        // Within the data, as `check` ensures, unless a dim is 0.
        self.data.as_ptr().wrapping_add(b * b_stride + h * h_stride + t * t_stride)
    }
}

/// A tensor like [`Strided`] that a function changes in place.
#[derive(Debug)]
pub struct StridedMut<'a, T> {
    /// The elements.
    pub data: &'a mut [T],
    /// The strides of B, H and T, in elements.
    pub strides: [usize; 3],
    /// B, H, T and D.
    pub dims: [usize; 4],
}

impl<T> StridedMut<'_, T> {
    /// # Panics
    /// If the tensor reaches beyond `data`, or if a stride is below the extent of the axes with
    /// smaller strides, so that elements could overlap.
    pub(crate) fn check(&self) {
        let Self { ref data, strides, dims } = *self;
        Strided { data: &data[..], strides, dims }.check("x");
        if dims.contains(&0) {
            return; // no elements
        }
        let [b, h, t, d] = dims;
        let mut axes = [(strides[0], b), (strides[1], h), (strides[2], t)];
        axes.sort_unstable();
        let mut extent = d;
        for (stride, n) in axes.into_iter().filter(|&(_, n)| n > 1) {
            assert!(
                stride >= extent,
                "x: strides {strides:?} with dims {dims:?} may make elements overlap: expected \
                 each stride to be at least the extent of the axes with smaller strides"
            );
            extent = extent.saturating_add((n - 1).saturating_mul(stride));
        }
    }
}

impl Strided<'_, f32> {
    /// Whether no value is NaN or infinite.
    ///
    /// # Panics
    /// If the tensor reaches beyond its data.
    pub fn all_finite(&self) -> bool {
        self.all(|row| row.iter().fold(true, |all, x| all & x.is_finite()))
    }
}

impl Strided<'_, u16> {
    /// Whether no bf16 value is NaN or infinite.
    ///
    /// # Panics
    /// If the tensor reaches beyond its data.
    pub fn all_finite(&self) -> bool {
        const EXPONENT: u16 = 0x7f80;
        self.all(|row| row.iter().fold(true, |all, bits| all & (bits & EXPONENT != EXPONENT)))
    }
}

impl<T: Sync> Strided<'_, T> {
    /// Whether `test` is true for the D values of every token and head.
    fn all(&self, test: impl Fn(&[T]) -> bool + Sync) -> bool {
        const TOKENS_PER_TASK: usize = 32;
        self.check("x");
        let Self { data, strides: [b_stride, h_stride, t_stride], dims: [b, h, t, d] } = *self;
        if b * h * t * d == 0 {
            return true;
        }
        let all_pass = AtomicBool::new(true);
        parallel_for((b * t).div_ceil(TOKENS_PER_TASK), |task| {
            if !all_pass.load(Ordering::Relaxed) {
                return;
            }
            let tokens = task * TOKENS_PER_TASK..(b * t).min((task + 1) * TOKENS_PER_TASK);
            let passes = tokens.into_iter().all(|token| {
                let start = token / t * b_stride + token % t * t_stride;
                (0..h).all(|h| test(&data[start + h * h_stride..][..d]))
            });
            if !passes {
                all_pass.store(false, Ordering::Relaxed);
            }
        });
        all_pass.into_inner()
    }
}

/// A range of queries, and the range of keys that they attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// The batch index.
    pub b: usize,
    /// The queries, within 0..T.
    pub queries: Range<usize>,
    /// The keys, within 0..S.
    pub keys: Range<usize>,
    /// The position of the first query, counted from the first key.
    pub first_query: usize,
}

impl Sequence {
    /// The position of a query, counted from the first key.
    pub(super) fn position(&self, query: usize) -> usize {
        (query - self.queries.start).saturating_add(self.first_query)
    }
}

/// A broadcast operand `(B, H, T, S)`: a stride of 0 repeats it along that dimension.
#[derive(Clone, Copy, Debug)]
pub struct Broadcast<'a, T> {
    /// The elements.
    pub data: &'a [T],
    /// The strides of B, H, T and S, in elements.
    pub strides: [usize; 4],
}

impl<T: Copy> Broadcast<'_, T> {
    /// # Panics
    /// If an operand of these dims reaches beyond `data`.
    fn check(&self, name: &str, dims: [usize; 4]) {
        let Self { strides, data } = self;
        let last: usize = dims.iter().zip(strides).map(|(&dim, s)| (dim.max(1) - 1) * s).sum();
        let len = data.len();
        assert!(
            dims.contains(&0) || last < len,
            "{name}: dims {dims:?} with strides {strides:?} exceed {len} elements"
        );
    }

    pub(super) fn at(&self, b: usize, h: usize, t: usize, s: usize) -> T {
        let [b_stride, h_stride, t_stride, s_stride] = self.strides;
        self.data[b * b_stride + h * h_stride + t * t_stride + s * s_stride]
    }
}

/// A bias that depends on the head and on the distance from the query to the key.
#[derive(Clone, Copy, Debug)]
pub struct DistanceBias<'a> {
    /// `(H, 2·radius + 1)`: the element `[h, radius + d]` is added to the scaled score of head h
    /// for a key at the distance d, the position of the key minus that of the query.
    pub data: &'a [f32],
    /// The largest distance.
    pub radius: usize,
}

impl<'a> DistanceBias<'a> {
    /// # Panics
    /// If the data do not have `heads` rows, or if a distance exceeds the radius.
    fn check(&self, heads: usize, sequences: &[Sequence]) {
        let Self { data, radius } = *self;
        assert_eq!(
            data.len(),
            heads * (2 * radius + 1),
            "distance_bias: expected (H, 2·radius + 1)"
        );
        assert!(are_near(sequences, radius), "distance_bias: a distance exceeds {radius}");
    }

    /// The biases of `keys` keys from `first_key` on, for the query at `position`; both are
    /// positions in the sequence.
    pub(super) fn row(
        &self,
        head: usize,
        position: usize,
        first_key: usize,
        keys: usize,
    ) -> &'a [f32] {
        let start = head * (2 * self.radius + 1) + self.radius + first_key - position;
        &self.data[start..start + keys]
    }
}

/// Whether no distance from a query to a key of its sequence exceeds `radius`.
fn are_near(sequences: &[Sequence], radius: usize) -> bool {
    sequences.iter().filter(|sequence| !sequence.queries.is_empty()).all(|sequence| {
        let before = sequence.position(sequence.queries.end - 1);
        let after = sequence.keys.len().saturating_sub(1).saturating_sub(sequence.first_query);
        before.max(after) <= radius
    })
}

/// Projected relative positions, as in disentangled attention. The score of query i and key j
/// before scaling is `qᵢ·kⱼ + qᵢ·keys[h, r] + kⱼ·queries[h, r]`. The row r is `rows[radius + d]`,
/// where d is the position of the key minus that of the query. The length of `rows` is `2·radius + 1`,
/// and its elements are below R.
#[derive(Clone, Copy, Debug)]
pub struct RelativePositions<'a, T> {
    /// The vectors that are multiplied by queries, `(1, H, R, D)`; `None` omits the term.
    pub keys: Option<Strided<'a, T>>,
    /// The vectors that are multiplied by keys, `(1, H, R, D)`; `None` omits the term.
    pub queries: Option<Strided<'a, T>>,
    /// The row of each distance.
    pub rows: &'a [u32],
}

impl<T> RelativePositions<'_, T> {
    /// # Panics
    /// If the dims do not fit, or if a distance or a row is out of range.
    fn check(&self, [heads, d]: [usize; 2], sequences: &[Sequence]) {
        let radius = self.rows.len() / 2;
        assert!(
            self.rows.len() % 2 == 1,
            "relative positions: expected an odd number of rows (2·radius + 1)"
        );
        assert!(are_near(sequences, radius), "relative positions: a distance exceeds {radius}");
        let rows = self.rows.iter().max().map_or(0, |row| *row as usize + 1);
        for vectors in [&self.keys, &self.queries].into_iter().flatten() {
            vectors.check("relative positions");
            let [b, h, r, width] = vectors.dims;
            assert!(
                (b, h, width) == (1, heads, d) && r >= rows,
                "relative positions: expected (1, H, R, D) with R of at least {rows}, got {:?}",
                vectors.dims
            );
        }
    }

    /// The row of each distance from the query at `position` to the keys at the positions
    /// `first_key..first_key + keys`.
    pub(super) fn rows_of(&self, position: usize, first_key: usize, keys: usize) -> &[u32] {
        &self.rows[self.rows.len() / 2 + first_key - position..][..keys]
    }

    /// The range that contains the rows of all distances from some queries of a sequence to its
    /// keys.
    pub(super) fn range(&self, sequence: &Sequence, queries: &Range<usize>) -> Range<usize> {
        let keys = sequence.keys.len();
        if queries.is_empty() || keys == 0 {
            return 0..0;
        }
        let last = sequence.position(queries.end - 1);
        let all = self.rows_of(last, 0, keys + queries.len() - 1);
        let [min, max] = [all.iter().min(), all.iter().max()].map(|row| row.map_or(0, |r| *r));
        min as usize..max as usize + 1
    }
}

/// The arguments of [`attention_f32`](crate::attention_f32),
/// [`attention_bf16`](crate::attention_bf16) and
/// [`attention_weights_f32`](crate::attention_weights_f32).
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a, T> {
    /// The queries, `(B, H, T, D)`.
    pub q: Strided<'a, T>,
    /// The keys, `(B, G, S, D)`. Each of the G groups serves H / G heads.
    pub k: Strided<'a, T>,
    /// The values, `(B, G, S, V)`.
    pub v: Strided<'a, T>,
    /// `(B, S)`: the batch index of `k` and `v` from which each key and value is read. `None` reads
    /// those of each batch index from itself.
    pub key_sources: Option<&'a [u32]>,
    /// Ranges of queries with the keys that they attend to. Each query must be in exactly one
    /// sequence.
    pub sequences: &'a [Sequence],
    /// `(B, S)`: 0 masks a key for all queries.
    pub visible: Option<&'a [u8]>,
    /// 0 masks a key for a query.
    pub keep: Option<Broadcast<'a, u8>>,
    /// Added to the scaled scores. If the sum of `bias` and `distance_bias` is −∞, the key is
    /// masked, as by a `keep` of 0.
    pub bias: Option<Broadcast<'a, f32>>,
    /// Added to the scaled scores, as `bias` is.
    pub distance_bias: Option<DistanceBias<'a>>,
    /// Relative positions, whose scores are added to `q·kᵀ` before scaling.
    pub relative: Option<RelativePositions<'a, T>>,
    /// Whether a query attends to no key at a later position.
    pub causal: bool,
    /// A query attends to the keys at a distance of at most this number from its position.
    pub window: Option<usize>,
    /// The factor of the scores, usually 1/√D.
    pub scale: f32,
}

impl<'a, T> Attention<'a, T> {
    /// Attention without masks and biases.
    pub fn new([q, k, v]: [Strided<'a, T>; 3], sequences: &'a [Sequence], scale: f32) -> Self {
        Self {
            q,
            k,
            v,
            key_sources: None,
            sequences,
            visible: None,
            keep: None,
            bias: None,
            distance_bias: None,
            relative: None,
            causal: false,
            window: None,
            scale,
        }
    }
}

impl<T: Copy> Attention<'_, T> {
    /// # Panics
    /// If the dims do not fit together or reach beyond the data, if a range exceeds B, T or S, if
    /// `visible`, `key_sources`, `distance_bias` or `relative` has the wrong size, if a key source is not
    /// below B, if a distance exceeds the radius of `distance_bias` or `relative`, or if a query is
    /// not in exactly one sequence.
    pub(super) fn check(&self) {
        let Self { q, k, v, sequences, visible, keep, bias, distance_bias, relative, .. } = self;
        let ([b, h, t, d], [kb, g, s, kd], [vb, vg, vs, _]) = (q.dims, k.dims, v.dims);
        assert!(
            b == kb && b == vb && g == vg && s == vs && d == kd,
            "q, k and v: the shapes {:?}, {:?} and {:?} do not fit together",
            q.dims,
            k.dims,
            v.dims
        );
        assert!(
            g > 0 && h.is_multiple_of(g),
            "q: {h} heads are not a multiple of the {g} key-value heads"
        );
        assert!(visible.is_none_or(|visible| visible.len() == b * s), "visible: expected (B, S)");
        let exist = |sources: &[u32]| sources.iter().all(|&source| (source as usize) < b);
        assert!(
            self.key_sources.is_none_or(|sources| sources.len() == b * s && exist(sources)),
            "key_sources: expected (B, S) batch indices below {b}"
        );
        [(q, "q"), (k, "k"), (v, "v")].iter().for_each(|(x, name)| x.check(name));
        keep.iter().for_each(|keep| keep.check("keep", [b, h, t, s]));
        bias.iter().for_each(|bias| bias.check("bias", [b, h, t, s]));
        distance_bias.iter().for_each(|bias| bias.check(h, sequences));
        relative.iter().for_each(|relative| relative.check([h, d], sequences));
        let within = |x: &Sequence| x.b < b && x.queries.end <= t && x.keys.end <= s;
        assert!(
            sequences.iter().all(within),
            "sequences: a batch index or a range is out of range: expected batch indices below \
             {b}, queries within 0..{t} and keys within 0..{s}"
        );
        let mut covered = vec![false; b * t];
        for sequence in *sequences {
            let b = sequence.b;
            for query in sequence.queries.clone() {
                assert!(
                    !std::mem::replace(&mut covered[b * t + query], true),
                    "sequences: query {query} of batch index {b} is in several sequences: expected \
                     exactly one"
                );
            }
        }
        assert!(
            covered.into_iter().all(|covered| covered),
            "sequences: a query is in no sequence: expected exactly one"
        );
    }
}
