//! Attention against its definition in f64, for all masks.

use crate::{
    testing::{assert_close, from_bf16, random, scaled, to_bf16},
    *,
};

const SCALE: f32 = 0.7;

/// A tensor with a gap after the values of each token, as in a joint projection of q, k and v.
struct Operand {
    data: Vec<f32>,
    strides: [usize; 3],
    dims: [usize; 4],
}

impl Operand {
    fn random([b, heads, n, width]: [usize; 4], gap: usize, seed: u32) -> Self {
        let token = heads * width + gap;
        let strides = [n * token, width, token];
        Self { data: random(b * n * token, seed), strides, dims: [b, heads, n, width] }
    }

    fn at(&self, b: usize, head: usize, token: usize, i: usize) -> f64 {
        let [b_stride, h_stride, t_stride] = self.strides;
        f64::from(self.data[b * b_stride + head * h_stride + token * t_stride + i])
    }

    fn dot(&self, [b, head, token]: [usize; 3], other: &Self, at: [usize; 3]) -> f64 {
        let terms = (0..self.dims[3])
            .map(|i| self.at(b, head, token, i) * other.at(at[0], at[1], at[2], i));
        terms.sum()
    }

    fn view<'a, T>(&self, data: &'a [T]) -> Strided<'a, T> {
        Strided { data, strides: self.strides, dims: self.dims }
    }
}

/// The masks of a test case.
#[derive(Clone, Copy)]
struct Masks<'a> {
    sequences: &'a [Sequence],
    visible: Option<&'a [u8]>,
    keep: Option<Broadcast<'a, u8>>,
    bias: Option<Broadcast<'a, f32>>,
    distance_bias: Option<DistanceBias<'a>>,
    relative: Option<Relative<'a>>,
    causal: bool,
    window: Option<usize>,
}

/// Relative positions: the tables of keys and of queries, and the table row of each distance.
#[derive(Clone, Copy)]
struct Relative<'a> {
    keys: Option<&'a Operand>,
    queries: Option<&'a Operand>,
    rows: &'a [u32],
}

impl<'a> Relative<'a> {
    fn view<T>(&self, [keys, queries]: [&'a [T]; 2]) -> RelativePositions<'a, T> {
        let keys = self.keys.map(|x| x.view(keys));
        let queries = self.queries.map(|x| x.view(queries));
        RelativePositions { keys, queries, rows: self.rows }
    }
}

/// Attention by its definition, in f64.
fn reference([q, k, v]: [&Operand; 3], masks: Masks) -> Vec<f64> {
    let ([b, h, t, _], [_, g, s, value_d]) = (q.dims, v.dims);
    let mut out = vec![0.0; b * t * h * value_d];
    for Sequence { b, queries, keys, first_query } in masks.sequences {
        for (head, query) in (0..h).flat_map(|head| queries.clone().map(move |t| (head, t))) {
            let (group, position) = (head / (h / g), query - queries.start + first_query);
            let offset =
                |s: [usize; 4], key: usize| b * s[0] + head * s[1] + query * s[2] + key * s[3];
            let is_kept = |key: usize| {
                masks.visible.is_none_or(|visible| visible[b * s + key] == 1)
                    && masks.keep.is_none_or(|x| x.data[offset(x.strides, key)] == 1)
                    && (!masks.causal || key - keys.start <= position)
                    && masks
                        .window
                        .is_none_or(|radius| position.abs_diff(key - keys.start) <= radius)
            };
            let weight = |key: usize| {
                let mut dot = q.dot([*b, head, query], k, [*b, group, key]);
                if let Some(relative) = masks.relative {
                    let Relative { keys: relative_keys, queries: relative_queries, rows } =
                        relative;
                    let row = rows[rows.len() / 2 + key - keys.start - position] as usize;
                    dot +=
                        relative_keys.map_or(0.0, |x| q.dot([*b, head, query], x, [0, head, row]));
                    dot += relative_queries
                        .map_or(0.0, |x| k.dot([*b, group, key], x, [0, head, row]));
                }
                let bias = masks.bias.map_or(0.0, |x| f64::from(x.data[offset(x.strides, key)]));
                let by_distance = masks.distance_bias.map_or(0.0, |x| {
                    let row = &x.data[head * (2 * x.radius + 1)..][..2 * x.radius + 1];
                    f64::from(row[x.radius + key - keys.start - position])
                });
                (dot * f64::from(SCALE) + bias + by_distance).exp()
            };
            let weights: Vec<(usize, f64)> = keys
                .clone()
                .filter(|&key| is_kept(key))
                .map(|key| (key, weight(key)))
                .filter(|(_, weight)| *weight > 0.0) // 0 for a bias of −∞
                .collect();
            let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
            for i in 0..value_d {
                let terms = weights.iter().map(|&(key, w)| w / sum * v.at(*b, group, key, i));
                out[((b * t + query) * h + head) * value_d + i] = terms.sum();
            }
        }
    }
    out
}

/// The sums of all values of each batch index, multiplied by the weights `(B, heads, T, S)`:
/// `(B, T, H, V)`.
fn weighted_values(weights: &[f32], heads: &[usize], v: &Operand, [h, t]: [usize; 2]) -> Vec<f32> {
    let [b, g, s, value_d] = v.dims;
    let mut out = vec![0.0; b * t * h * value_d];
    for (row, weights) in weights.chunks(s).enumerate() {
        let (query, head, b) = (row % t, heads[row / t % h], row / t / h);
        for i in 0..value_d {
            let value = |key| v.at(b, head / (h / g), key, i);
            let terms = weights.iter().enumerate().map(|(key, w)| f64::from(*w) * value(key));
            out[((b * t + query) * h + head) * value_d + i] = terms.sum::<f64>() as f32;
        }
    }
    out
}

/// Compares every ISA with the reference, for heads of width `d`. Outside Miri, the keys exceed a
/// block, and all dims but B and G differ.
fn check_attention(d: usize, gap: usize) {
    let [b, h, t, s, value_d] = [2, scaled(4, 1), scaled(37, 3), scaled(600, 34), scaled(19, 3)];
    let g = h.div_ceil(2);
    let (q, k, v) = (
        Operand::random([b, h, t, d], gap, 1),
        Operand::random([b, g, s, d], gap, 2),
        Operand::random([b, g, s, value_d], gap, 3),
    );
    let visible: Vec<u8> = (0..b * s).map(|i| u8::from(i % 5 != 0)).collect();
    let visible = Some(&visible[..]);
    let kept: Vec<u8> = (0..b * t * s).map(|i| u8::from(i / 7 % 3 != 0)).collect();
    let keep = Some(Broadcast { data: &kept[..], strides: [t * s, 0, s, 1] });
    let mut added = random(h * s, 4);
    added.iter_mut().step_by(11).for_each(|bias| *bias = f32::NEG_INFINITY);
    let bias = Some(Broadcast { data: &added[..], strides: [0, s, 0, 1] });
    let whole_from = |first_query| -> Vec<Sequence> {
        (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s, first_query }).collect()
    };
    // The first queries have different positions.
    let split_from = |first: usize| -> Vec<Sequence> {
        [
            (0, 0..t / 4, 0..s / 2, first),
            (0, t / 4..t, s / 2..s, first / 2 + 1),
            (1, 0..t, 3..3, first),
        ]
        .map(|(b, queries, keys, first_query)| Sequence { b, queries, keys, first_query })
        .into()
    };
    let (whole, split) = (whole_from(0), split_from(0));
    let radius = s + 3;
    let table = random(h * (2 * radius + 1), 5);
    let distances = Some(DistanceBias { data: &table[..], radius });
    // Three consecutive distances share a row. The rows are not in order, and some are unused.
    let rows: Vec<u32> = (0..2 * radius as u32 + 1).map(|i| 3 + i / 3 * 7 % 40).collect();
    let rows = &rows[..];
    let relative_keys = Operand::random([1, h, 50, d], gap, 6);
    let relative_queries = Operand::random([1, h, 44, d], gap + 1, 7);
    let (keys, queries) = (Some(&relative_keys), Some(&relative_queries));
    let relative = Some(Relative { keys, queries, rows });
    let key_term = Some(Relative { keys, queries: None, rows });
    let query_term = Some(Relative { keys: None, queries, rows });
    let cases = [
        (&whole, None, None, None, None, None, false, None),
        (&whole, visible, None, None, None, None, false, None),
        (&whole_from(233), None, None, None, None, None, true, None),
        (&whole, None, keep, None, None, None, false, None),
        (&whole, None, None, bias, None, None, false, None),
        (&whole, None, None, None, distances, None, false, None),
        (&split, None, None, None, None, None, false, None),
        (&split_from(2), None, None, None, distances, None, true, None),
        (&split_from(2), visible, keep, bias, None, None, true, None),
        (&split_from(270), visible, keep, bias, None, None, true, None),
        (&split_from(20), visible, keep, bias, distances, None, true, None),
        (&whole, None, None, None, None, None, false, Some(3)),
        (&whole_from(500), None, None, None, None, None, true, Some(9)),
        (&split, visible, None, None, distances, None, false, Some(0)),
        (&split_from(2), visible, keep, bias, None, None, true, Some(20)),
        (&split_from(20), None, None, None, None, None, false, Some(12)),
        (&whole, None, None, None, None, key_term, false, None),
        (&whole, visible, None, None, None, query_term, false, None),
        (&whole, None, None, None, None, relative, false, None),
        (&split, visible, None, None, None, relative, false, None),
        (&split_from(20), visible, None, None, distances, relative, false, None),
        (&split_from(1), visible, keep, bias, distances, relative, true, Some(20)),
    ];
    for (i, case) in cases.into_iter().enumerate() {
        let (sequences, visible, keep, bias, distance_bias, relative, causal, window) = case;
        let masks =
            Masks { sequences, visible, keep, bias, distance_bias, relative, causal, window };
        let expected = reference([&q, &k, &v], masks);
        let name = |isa: Isa, dtype| format!("{} {dtype}, D = {d}, case {i}", isa.name());
        let bf16 = [&q, &k, &v, &relative_keys, &relative_queries].map(|x| to_bf16(&x.data));
        for isa in Isa::available() {
            let qkv = [&q, &k, &v].map(|x| x.view(&x.data));
            let args = Attention {
                visible,
                keep,
                bias,
                distance_bias,
                relative: relative
                    .map(|x| x.view([&relative_keys.data[..], &relative_queries.data])),
                causal,
                window,
                ..Attention::new(qkv, sequences, SCALE)
            };
            assert_close(&name(isa, "f32"), &attention_f32(isa, args), &expected, 1e-6);
            let heads: Vec<usize> = (0..h).rev().collect();
            let weights = attention_weights_f32(isa, args, &heads);
            let got = weighted_values(&weights, &heads, &v, [h, t]);
            assert_close(&name(isa, "weights, f32"), &got, &expected, 1e-6);

            let qkv = [q.view(&bf16[0]), k.view(&bf16[1]), v.view(&bf16[2])];
            let args = Attention {
                visible,
                keep,
                bias,
                distance_bias,
                relative: relative.map(|x| x.view([&bf16[3][..], &bf16[4]])),
                causal,
                window,
                ..Attention::new(qkv, sequences, SCALE)
            };
            let got = from_bf16(&attention_bf16(isa, args));
            // The inputs, the softmax weights and the output are rounded to bf16. For values of up
            // to 1, the error of each is at most 1/512.
            assert_close(&name(isa, "bf16"), &got, &expected, 1.2e-2);
        }
    }
}

#[test]
fn attention_matches_f64_for_every_mask() {
    check_attention(5, 3);
}

/// In bf16, rows of an even width are whole packed lanes, which the kernel reads without a copy.
#[test]
fn attention_matches_f64_for_heads_of_even_width() {
    check_attention(6, 2);
}

#[test]
fn attention_matches_f64_for_heads_of_several_vectors_and_an_odd_remainder() {
    check_attention(scaled(35, 3), 3);
}

/// Outside Miri, queries and keys exceed a block. Windows end within panels, at the edges of blocks
/// and beyond the last key.
#[test]
fn windows_of_many_tiles_and_blocks_match_f64() {
    let [b, h, t, d] = [1, 2, scaled(900, 40), 6];
    let [q, k, v] = [1, 2, 3].map(|seed| Operand::random([b, h, t, d], 2, seed));
    let whole = [Sequence { b: 0, queries: 0..t, keys: 0..t, first_query: 0 }];
    let split: Vec<Sequence> = [0..t / 3, t / 3..t]
        .map(|range| Sequence { b: 0, queries: range.clone(), keys: range, first_query: 0 })
        .into();
    let visible: Vec<u8> = (0..t).map(|i| u8::from(i % 5 != 0)).collect();
    for (sequences, visible, causal, radius) in [
        (&whole[..], None, false, 0),
        (&whole, None, false, 64),
        (&whole, Some(&visible[..]), false, 200),
        (&whole, None, true, 100),
        (&split, None, false, 33),
        (&split, Some(&visible), true, 384),
        (&whole, None, false, 2000),
    ] {
        let (keep, bias, distance_bias, relative) = (None, None, None, None);
        let window = Some(radius);
        let masks =
            Masks { sequences, visible, keep, bias, distance_bias, relative, causal, window };
        let expected = reference([&q, &k, &v], masks);
        for isa in Isa::available() {
            let qkv = [&q, &k, &v].map(|x| x.view(&x.data));
            let args =
                Attention { visible, causal, window, ..Attention::new(qkv, sequences, SCALE) };
            let name = format!("{} window {radius}", isa.name());
            assert_close(&name, &attention_f32(isa, args), &expected, 1e-6);
        }
    }
}

#[test]
fn all_finite_finds_nan_and_infinity() {
    let mut x = Operand::random([2, 3, 70, 5], 1, 4);
    let bits = to_bf16(&x.data);
    assert!(x.view(&x.data).all_finite() && x.view(&bits).all_finite());
    let gap = x.strides[2] - 1; // not an element of the tensor
    x.data[gap] = f32::NAN;
    assert!(x.view(&x.data).all_finite());
    for (at, value) in [(0, f32::NAN), (70 * x.strides[2] + 7, f32::INFINITY)] {
        x.data[at] = value;
        let bits = to_bf16(&x.data);
        assert!(!x.view(&x.data).all_finite() && !x.view(&bits).all_finite());
        x.data[at] = 1.0;
    }
}

#[test]
fn non_finite_keys_affect_the_result_only_if_visible() {
    // One head of width 1 and three keys, of which the second is not finite. Its value is finite.
    let (q, v) = ([1.0; 3], [1.0, 2.0, 3.0]);
    for isa in Isa::available() {
        let attend = |second_key: f32, visible: Option<&[u8]>| {
            let k = [0.0, second_key, 0.0];
            let strided = |data| Strided { data, strides: [3, 3, 1], dims: [1, 1, 3, 1] };
            let sequences = &[Sequence { b: 0, queries: 0..3, keys: 0..3, first_query: 0 }];
            let qkv = [strided(&q), strided(&k), strided(&v)];
            let args = Attention { visible, ..Attention::new(qkv, sequences, 1.0) };
            attention_f32(isa, args)
        };
        assert!(attend(f32::NAN, None).iter().all(|x| x.is_nan()), "{}", isa.name());
        assert_eq!(attend(f32::NAN, Some(&[1, 0, 1])), [2.0; 3], "{}", isa.name());
        // A key with the score −∞ has weight 0 if another visible key has a finite score. If it is
        // the only visible key, the result is NaN.
        assert_eq!(attend(f32::NEG_INFINITY, None), [2.0; 3], "{}", isa.name());
        let alone = attend(f32::NEG_INFINITY, Some(&[0, 1, 0]));
        assert!(alone.iter().all(|x| x.is_nan()), "{}: {alone:?}", isa.name());
        assert_eq!(attend(1.0, Some(&[0; 3])), [0.0; 3], "{}: no visible key", isa.name());
    }
}

/// The sum of the biases hides the second of three keys, which is not finite.
#[test]
fn a_key_hidden_by_biases_does_not_affect_the_result() {
    let (q, k, v) = ([1.0], [0.0, f32::NAN, 0.0], [1.0, 2.0, 3.0]);
    for isa in Isa::available() {
        let attend = |bias: Option<f32>, distance_bias: Option<f32>| {
            let strided = |data| Strided { data, strides: [3, 3, 1], dims: [1, 1, 3, 1] };
            let q = Strided { data: &q[..], strides: [1; 3], dims: [1; 4] };
            // The second key has the distance 1 from the query.
            let sequences = &[Sequence { b: 0, queries: 0..1, keys: 0..3, first_query: 0 }];
            let by_distance = [0.0, 0.0, 0.0, distance_bias.unwrap_or(0.0), 0.0];
            let by_key = [0.0, bias.unwrap_or(0.0), 0.0];
            let args = Attention {
                bias: bias.map(|_| Broadcast { data: &by_key[..], strides: [0, 0, 0, 1] }),
                distance_bias: distance_bias
                    .map(|_| DistanceBias { data: &by_distance[..], radius: 2 }),
                ..Attention::new([q, strided(&k), strided(&v)], sequences, 1.0)
            };
            attention_f32(isa, args)[0]
        };
        let hidden = f32::NEG_INFINITY;
        for biases in [
            (Some(hidden), None),
            (None, Some(hidden)),
            (Some(hidden), Some(1.0)),
            (Some(1.0), Some(hidden)),
            (Some(f32::MIN), Some(f32::MIN)),
        ] {
            assert_eq!(attend(biases.0, biases.1), 2.0, "{} {biases:?}", isa.name());
        }
        assert!(attend(None, Some(f32::MIN)).is_nan(), "{}: the key is visible", isa.name());
    }
}

#[test]
fn masks_hide_keys_for_every_scale() {
    let (q, k, v) = ([1.0, 2.0], [0.5, -1.0], [1.0, 3.0]);
    let strided = |data| Strided { data, strides: [2, 2, 1], dims: [1, 1, 2, 1] };
    let sequences = &[Sequence { b: 0, queries: 0..2, keys: 0..2, first_query: 0 }];
    for (isa, scale) in
        Isa::available().into_iter().flat_map(|isa| [1.5, 0.0, -1.5].map(|s| (isa, s)))
    {
        let qkv = [strided(&q), strided(&k), strided(&v)];
        let causal = Attention { causal: true, ..Attention::new(qkv, sequences, scale) };
        let [first, second] = attention_f32(isa, causal)[..] else { panic!("two queries") };
        let weight = 1.0 / (1.0 + (scale * 2.0 * (-1.0 - 0.5)).exp()); // of the first key
        assert_eq!(first, 1.0, "{} {scale}", isa.name());
        assert!((second - (weight + 3.0 * (1.0 - weight))).abs() < 1e-5, "{} {scale}", isa.name());
        let qkv = [strided(&q), strided(&k), strided(&v)];
        let padded = Attention { visible: Some(&[0, 1]), ..Attention::new(qkv, sequences, scale) };
        assert_eq!(attention_f32(isa, padded), [3.0; 2], "{} {scale}", isa.name());
    }
}

/// Run by Miri, this test checks the addresses of tensors without elements.
#[test]
fn queries_of_width_0_give_all_keys_the_same_weight() {
    let empty = Strided { data: &[], strides: [0, 0, 1], dims: [1, 1, 2, 0] };
    let v = Strided { data: &[1.0, 2.0], strides: [2, 2, 1], dims: [1, 1, 2, 1] };
    let sequences = &[Sequence { b: 0, queries: 0..2, keys: 0..2, first_query: 0 }];
    for isa in Isa::available() {
        let args = Attention::new([empty, empty, v], sequences, 1.0);
        assert_eq!(attention_f32(isa, args), [1.5; 2], "{}", isa.name());
    }
}

#[test]
fn keys_after_the_queries_are_within_the_radius_of_a_distance_bias() {
    let strided = |data, t| Strided { data, strides: [t, t, 1], dims: [1, 1, t, 1] };
    let sequences = &[Sequence { b: 0, queries: 0..1, keys: 0..8, first_query: 5 }];
    let v: Vec<f32> = (0..8).map(|i| i as f32).collect();
    // The query has the position 5, so that the distances are −5 to 2. All weight is at the distance 2.
    let mut biases = [f32::NEG_INFINITY; 11];
    biases[5 + 2] = 0.0;
    let bias = DistanceBias { data: &biases, radius: 5 };
    for isa in Isa::available() {
        let qkv = [strided(&[0.0], 1), strided(&[0.0; 8], 8), strided(&v, 8)];
        let args = Attention { distance_bias: Some(bias), ..Attention::new(qkv, sequences, 1.0) };
        assert_eq!(attention_f32(isa, args), [7.0], "{}", isa.name());
    }
}

#[test]
#[should_panic(expected = "query 3 of batch index 1 is in several sequences")]
fn overlapping_sequences_panic() {
    let x = random(24, 1);
    let x = Strided { data: &x, strides: [12, 2, 2], dims: [2, 1, 6, 2] };
    let sequence = |b, queries| Sequence { b, queries, keys: 0..6, first_query: 0 };
    let sequences = [sequence(0, 0..6), sequence(1, 0..4), sequence(1, 3..6)];
    attention_f32(Isa::SCALAR, Attention::new([x; 3], &sequences, 1.0));
}

/// Keys and values of other batch indices have the bits of their copies, as whole packed lanes and not.
#[test]
fn key_sources_select_the_keys_and_values_of_other_batch_indices() {
    let [b, h, g, t, s] = [3, 4, 2, 2, scaled(400, 34)];
    let key_sources: Vec<u32> = (0..b * s).map(|i| (i * i / 7 % b) as u32).collect();
    let sequences: Vec<Sequence> =
        (0..b).map(|b| Sequence { b, queries: 0..t, keys: 2..s, first_query: s - t }).collect();
    for (d, gap) in [(5, 3), (6, 2), (16, 1)] {
        let q = Operand::random([b, h, t, d], gap, 1);
        let [k, v] = [2, 3].map(|seed| Operand::random([b, g, s, d], gap, seed));
        let copied = |x: &Operand| {
            let mut copy = Operand { data: x.data.clone(), ..*x };
            for (row, &source) in key_sources.iter().enumerate() {
                let [to, from] =
                    [row / s, source as usize].map(|b| b * x.strides[0] + row % s * x.strides[2]);
                let width = g * d;
                copy.data[to..to + width].copy_from_slice(&x.data[from..from + width]);
            }
            copy
        };
        for isa in Isa::available() {
            let run = |k: &Operand, v: &Operand, key_sources| {
                let [q16, k16, v16] = [&q, k, v].map(|x| to_bf16(&x.data));
                let narrow = [q.view(&q16), k.view(&k16), v.view(&v16)];
                let wide = [&q, k, v].map(|x| x.view(&x.data));
                let wide = Attention { key_sources, ..Attention::new(wide, &sequences, SCALE) };
                let narrow = Attention { key_sources, ..Attention::new(narrow, &sequences, SCALE) };
                (attention_f32(isa, wide), attention_bf16(isa, narrow))
            };
            let expected = run(&copied(&k), &copied(&v), None);
            assert!(run(&k, &v, Some(&key_sources[..])) == expected, "{}, D = {d}", isa.name());
            assert!(
                run(&k, &v, None) != expected,
                "{}, D = {d}: the sources are unused",
                isa.name()
            );
        }
    }
}

#[test]
#[should_panic(expected = "key_sources: expected (B, S) batch indices below 1")]
fn a_key_source_that_does_not_exist_panics() {
    let x = Strided { data: &[1.0], strides: [1; 3], dims: [1; 4] };
    let sequences = &[Sequence { b: 0, queries: 0..1, keys: 0..1, first_query: 0 }];
    let args = Attention::new([x; 3], sequences, 1.0);
    attention_f32(Isa::SCALAR, Attention { key_sources: Some(&[1]), ..args });
}
