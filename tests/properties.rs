//! Properties of attention for random shapes, masks and dtypes: attention equals `mha::reference`
//! in f64, and its code paths agree with each other.

use std::collections::HashMap;

use candle_core::{D, DType, Device::Cpu, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mha::{
    AttentionConfig, AttentionMask, AttentionOptions, CausalSelfAttention, CrossAttention,
    DisentangledPositions, HeadWeights, Init, KvCache, MultiHeadAttention, ProjectionBias,
    QueryKeyNorm, QueryKeyTransform, Rotary, RotaryAt, scaled_dot_product_attention,
    scaled_dot_product_attention_with_weights,
};
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{assert_close, max_difference};

/// Tolerance in f32, with values up to 2 and scores up to 11, or 16 with disentangled positions:
/// five times the rounding error of such a score.
const SAME: f64 = 5e-6;

/// B, key-value heads, query heads per key-value head, T, S, D, width of the values.
type Sizes = [usize; 7];

fn sizes() -> impl Strategy<Value = Sizes> {
    [1..4usize, 1..3, 1..4, 1..7, 1..8, 1..6, 1..6]
}

fn random(rng: &mut ChaCha8Rng, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let n = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|_| rng.random_range(-2.0..2.0)).collect();
    Tensor::from_vec(values, shape, &Cpu)?.to_dtype(dtype)
}

/// A mask, and the expected visibility and bias of each element of `(B, H, T, S)`.
struct Described {
    mask: AttentionMask,
    keep: Vec<bool>,
    bias: Vec<f64>,
}

fn describe(rng: &mut ChaCha8Rng, sizes: Sizes, parts: u16) -> Result<Described> {
    let [b, groups, of_group, t, s, ..] = sizes;
    let h = groups * of_group;
    let part = |i: u8| parts & (1 << i) != 0;
    let bits = |rng: &mut ChaCha8Rng, n| (0..n).map(|_| rng.random_bool(0.7)).collect::<Vec<_>>();
    let as_tensor = |bits: &[bool], shape: &[usize]| {
        Tensor::from_iter(bits.iter().map(|&bit| u8::from(bit)), &Cpu)?.reshape(shape)
    };
    let lens =
        |rng: &mut ChaCha8Rng, n| (0..n).map(|_| rng.random_range(0..=s)).collect::<Vec<_>>();
    let as_lens = |lens: &[usize], shape: &[usize]| {
        Tensor::from_iter(lens.iter().map(|&len| len as i64), &Cpu)?.reshape(shape)
    };
    let offset = rng.random_range(0..s);
    let (padding, of_queries, of_heads) =
        (bits(rng, b * s), bits(rng, t * s), bits(rng, b * h * t * s));
    let (lens_of_sequences, lens_of_queries) = (lens(rng, b), lens(rng, b * t));
    let bias: Vec<f32> = (0..h * s)
        .map(|_| if rng.random_bool(0.2) { f32::NEG_INFINITY } else { rng.random_range(-1.0..1.0) })
        .collect();

    let mut mask = if part(0) { AttentionMask::causal(offset) } else { AttentionMask::none() };
    if part(1) {
        mask = mask.with_padding(&as_tensor(&padding, &[b, s])?)?;
    }
    if part(2) {
        mask = mask.with_valid_lens(&as_lens(&lens_of_sequences, &[b])?)?;
    }
    if part(3) {
        mask = mask.with_valid_lens(&as_lens(&lens_of_queries, &[b, t])?)?;
    }
    if part(4) {
        mask = mask.with_keep(&as_tensor(&of_queries, &[t, s])?)?;
    }
    if part(5) {
        mask = mask.with_keep(&as_tensor(&of_heads, &[b, h, t, s])?)?;
    }
    if part(6) {
        mask = mask.with_bias(&Tensor::from_slice(&bias, (h, 1, s), &Cpu)?)?;
    }
    let radius = rng.random_range(0..s);
    if part(7) {
        mask = mask.with_window(radius);
    }
    let offset_of_queries = if part(0) { offset } else { 0 };
    let farthest = s + t + offset;
    let columns = 2 * farthest + 1;
    let by_distance: Vec<f32> = (0..h * columns)
        .map(|_| if rng.random_bool(0.2) { f32::NEG_INFINITY } else { rng.random_range(-1.0..1.0) })
        .collect();
    if part(8) {
        mask = mask.with_distance_bias(&Tensor::from_slice(&by_distance, (h, columns), &Cpu)?)?;
    }
    let mut described = Described { mask, keep: vec![], bias: vec![] };
    for (i, &of_head) in of_heads.iter().enumerate() {
        let [bi, hi, ti, si] = [i / (h * t * s), i / (t * s) % h, i / s % t, i % s];
        let bias = if part(6) { f64::from(bias[hi * s + si]) } else { 0.0 };
        let column = farthest + si - ti - offset_of_queries;
        let distance = if part(8) { f64::from(by_distance[hi * columns + column]) } else { 0.0 };
        described.bias.push(bias + distance);
        described.keep.push(
            (!part(0) || si <= ti + offset)
                && (!part(1) || padding[bi * s + si])
                && (!part(2) || si < lens_of_sequences[bi])
                && (!part(3) || si < lens_of_queries[bi * t + ti])
                && (!part(4) || of_queries[ti * s + si])
                && (!part(5) || of_head)
                && (!part(7) || (ti + offset_of_queries).abs_diff(si) <= radius)
                && bias + distance > f64::NEG_INFINITY,
        );
    }
    Ok(described)
}

/// Context `(B·H·T, V)` and weights `(B·H·T, S)` by [`mha::reference`] in f64; NaN for a query that
/// sees no key.
fn reference(qkv: [&[f64]; 3], sizes: Sizes, mask: &Described) -> Result<[Vec<Vec<f64>>; 2]> {
    let [b, groups, of_group, t, s, d, value_d] = sizes;
    let h = groups * of_group;
    let [q, k, v] = qkv;
    let q = Tensor::from_slice(q, (b, h, t, d), &Cpu)?;
    let repeated = |x: &[f64], width| {
        Tensor::from_slice(x, (b, groups, 1, s, width), &Cpu)?
            .broadcast_as((b, groups, of_group, s, width))?
            .reshape((b, h, s, width))
    };
    let keep = Tensor::from_iter(mask.keep.iter().map(|&keep| u8::from(keep)), &Cpu)?;
    let bias = Tensor::from_slice(&mask.bias, (b, h, t, s), &Cpu)?;
    let (context, weights) = mha::reference::attention(
        &q,
        &repeated(k, d)?,
        &repeated(v, value_d)?,
        Some(&keep.reshape((b, h, t, s))?),
        Some(&bias),
    )?;
    Ok([context.flatten_to(2)?.to_vec2()?, weights.flatten_to(2)?.to_vec2()?])
}

fn to_f64(x: &Tensor) -> Result<Vec<f64>> {
    x.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Tolerance for values up to 2, if the reference gets the same inputs, rounded to `dtype`: in f16
/// and bf16 four times the rounding error of the result.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2e-3,
        DType::BF16 => 1.6e-2,
        _ => SAME,
    }
}

fn check_attention(sizes: Sizes, parts: u16, poison: bool, dtype: DType, seed: u64) -> Result<()> {
    let [b, groups, of_group, t, s, d, value_d] = sizes;
    let (h, mut rng) = (groups * of_group, ChaCha8Rng::seed_from_u64(seed));
    let described = describe(&mut rng, sizes, parts)?;
    let q = random(&mut rng, &[b, h, t, d], dtype)?;
    let mut k = to_f64(&random(&mut rng, &[b, groups, s, d], dtype)?)?;
    let mut v = to_f64(&random(&mut rng, &[b, groups, s, value_d], dtype)?)?;
    let (clean_k, clean_v) = (k.clone(), v.clone());
    // Some keys and values, visible or hidden, are NaN or infinite.
    let poisoned: Vec<bool> = (0..b * groups * s).map(|_| poison && rng.random_bool(0.3)).collect();
    for (i, _) in poisoned.iter().enumerate().filter(|(_, poisoned)| **poisoned) {
        let with = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY][i % 3];
        k[i * d..][..d].fill(with);
        v[i * value_d..][..value_d].fill(with);
    }
    let tensor =
        |x: &[f64], width| Tensor::from_slice(x, (b, groups, s, width), &Cpu)?.to_dtype(dtype);
    let (k_tensor, v_tensor) = (tensor(&k, d)?, tensor(&v, value_d)?);
    let mask = &described.mask;
    let plain = scaled_dot_product_attention(&q, &k_tensor, &v_tensor, mask, None)?;
    let (out, weights) =
        scaled_dot_product_attention_with_weights(&q, &k_tensor, &v_tensor, mask, None)?;
    let (plain, out, weights, q) = (to_f64(&plain)?, to_f64(&out)?, to_f64(&weights)?, to_f64(&q)?);

    let [contexts, all_weights] = reference([&q, &clean_k, &clean_v], sizes, &described)?;
    for row in 0..b * h * t {
        let kv = row / t / h * groups + row / t % h / of_group;
        let visible = |j: usize| described.keep[row * s + j];
        if (0..s).any(|j| visible(j) && poisoned[kv * s + j]) {
            // If a visible key is not finite, the context is not finite.
            let not_finite =
                |x: &[f64]| x[row * value_d..][..value_d].iter().all(|x| !x.is_finite());
            assert!(not_finite(&plain) && not_finite(&out), "{dtype:?}: finite row {row}");
            continue;
        }
        if !(0..s).any(visible) {
            let zeros = |x: &[f64], width| x[row * width..][..width].iter().all(|&x| x == 0.0);
            assert!(zeros(&plain, value_d) && zeros(&out, value_d) && zeros(&weights, s));
            continue;
        }
        let (expected, expected_weights) = (&contexts[row], &all_weights[row]);
        for (x, &expected) in expected.iter().enumerate() {
            for got in [plain[row * value_d + x], out[row * value_d + x]] {
                let difference = (got - expected).abs();
                assert!(
                    difference <= tolerance(dtype),
                    "{dtype:?}: {got} for {expected} in row {row}"
                );
            }
        }
        for (j, &expected) in expected_weights.iter().enumerate() {
            let got = weights[row * s + j];
            assert!(
                (got - expected).abs() <= tolerance(dtype),
                "{dtype:?}: weight {got} for {expected}"
            );
            assert!(visible(j) || got == 0.0, "a hidden key weighs {got}");
        }
    }
    Ok(())
}

/// Attention whose projections return their input, without biases.
fn identity_attention(config: AttentionConfig, dtype: DType) -> mha::Result<MultiHeadAttention> {
    let e = config.hidden_size;
    let identity = Tensor::eye(e, dtype, &Cpu)?;
    let names = ["query", "key", "value", "output"].map(|name| format!("{name}.weight"));
    let tensors = names.into_iter().map(|name| (name, identity.clone())).collect();
    let config = config.with_bias(ProjectionBias::NONE);
    MultiHeadAttention::new(&config, VarBuilder::from_tensors(tensors, dtype, &Cpu))
}

/// Compares disentangled attention with its definition in f64. Bit 0 of `terms` adds the keys of
/// positions, bit 1 their queries, each `(H, R, D)`; `kind` selects the mask: padding, causal with
/// an offset, or two ragged sequences.
fn check_disentangled(
    [b, h, t, s, d, r]: [usize; 6],
    terms: u8,
    kind: u8,
    dtype: DType,
    seed: u64,
) -> mha::Result<()> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let t = if kind == 2 { s } else { t }; // packed queries and keys are the same tokens
    let (b, e) = (if kind == 2 { 1 } else { b }, h * d);
    let offset = if kind == 1 { rng.random_range(0..4) } else { 0 };
    let cut = rng.random_range(0..=s);
    let mask = match kind {
        0 => AttentionMask::none().with_valid_lens(&Tensor::new(vec![cut as u32; b], &Cpu)?)?,
        1 => AttentionMask::causal(offset),
        _ => AttentionMask::none().with_sequences(&[0, cut, s])?,
    };
    let is_visible = |i: usize, j: usize| match kind {
        0 => j < cut,
        1 => j <= i + offset,
        _ => (i < cut) == (j < cut),
    };
    let radius = s.max(t + offset) - 1;
    let rows: Vec<u32> = (0..=2 * radius).map(|_| rng.random_range(0..r as u32)).collect();
    let mut tensor = |shape: &[usize]| random(&mut rng, shape, dtype);
    let (query, key, value) = (tensor(&[b, t, e])?, tensor(&[b, s, e])?, tensor(&[b, s, e])?);
    let mut term = |bit: u8| match terms & bit {
        0 => Ok(None),
        _ => tensor(&[h, r, d]).map(Some),
    };
    let (keys, queries) = (term(1)?, term(2)?);
    let positions =
        DisentangledPositions::new(keys.clone(), queries.clone(), rows.as_slice().into())?;

    let attention = identity_attention(AttentionConfig::new(e, h), dtype)?;
    let run = |weights| {
        let options = AttentionOptions::new().with_weights(weights).with_disentangled(&positions);
        attention.forward_with(&query, &key, &value, &mask, options)
    };
    let plain = to_f64(&run(HeadWeights::None)?.0)?;
    let (out, weights) = run(HeadWeights::All)?;
    let (out, weights) = (to_f64(&out)?, to_f64(&weights.unwrap())?);
    let last = to_f64(&run(HeadWeights::Heads(vec![h - 1]))?.1.unwrap())?;

    let [q, k, v] = [&query, &key, &value].map(|x| to_f64(x).unwrap());
    let [keys, queries] = [&keys, &queries].map(|x| x.as_ref().map(|x| to_f64(x).unwrap()));
    let scale = 1.0 / (d as f64 * f64::from(1 + terms.count_ones())).sqrt();
    for (bi, hi, i) in (0..b * h * t).map(|row| (row / t / h, row / t % h, row % t)) {
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let at = |x: &[f64], row: usize, token: usize| -> Vec<f64> {
            x[(row + token) * e + hi * d..][..d].to_vec()
        };
        let q_i = at(&q, bi * t, i);
        let mut expected: Vec<f64> = (0..s)
            .map(|j| {
                if !is_visible(i, j) {
                    return 0.0;
                }
                let k_j = at(&k, bi * s, j);
                // Both terms read the same row, that of the distance from query to key.
                let row = hi * r + rows[radius + j - i - offset] as usize;
                let position = |x: &Vec<f64>| x[row * d..][..d].to_vec();
                let mut score = dot(&q_i, &k_j);
                score += keys.as_ref().map_or(0.0, |x| dot(&q_i, &position(x)));
                score += queries.as_ref().map_or(0.0, |x| dot(&k_j, &position(x)));
                (score * scale).exp()
            })
            .collect();
        let sum: f64 = expected.iter().sum();
        expected.iter_mut().filter(|_| sum > 0.0).for_each(|x| *x /= sum);
        for (j, &expected) in expected.iter().enumerate() {
            let got = weights[((bi * h + hi) * t + i) * s + j];
            assert!((got - expected).abs() <= tolerance(dtype), "weight {got} for {expected}");
            let of_last = last[(bi * t + i) * s + j];
            assert!(hi + 1 < h || of_last == got, "{of_last} {got}");
        }
        for x in 0..d {
            let terms = (0..s).map(|j| expected[j] * at(&v, bi * s, j)[x]);
            let expected: f64 = terms.sum();
            for got in [&plain, &out].map(|y| y[(bi * t + i) * e + hi * d + x]) {
                let difference = (got - expected).abs();
                assert!(difference <= tolerance(dtype), "{dtype:?}: {got} for {expected}");
            }
        }
    }
    Ok(())
}

fn attention(config: AttentionConfig, seed: u64) -> mha::Result<MultiHeadAttention> {
    MultiHeadAttention::new(
        &config,
        Init::Xavier.var_builder(&VarMap::new(), seed, DType::F32, &Cpu),
    )
}

/// The tensors of attention with random weights, also of the normalisations: 0.5 to 1.5, or with a
/// unit offset −0.5 to 0.5.
fn random_tensors(config: AttentionConfig, seed: u64) -> anyhow::Result<HashMap<String, Tensor>> {
    let mut tensors = attention(config, seed)?.tensors()?;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    if let Some(norm) = config.query_key_norm {
        for name in ["query_norm.weight", "key_norm.weight"] {
            let offset = if norm.unit_offset { 0.0 } else { 1.0 };
            let weight = (random(&mut rng, &[config.head_dim()], DType::F32)? * 0.25)? + offset;
            tensors.insert(name.to_string(), weight?).expect("a weight of this name");
        }
    }
    Ok(tensors.into_iter().map(|(name, x)| (name, x.detach())).collect())
}

/// Attention by the operations of [`mha::reference`], in f64. Returns the output and the weights.
fn reference_module(
    config: AttentionConfig,
    tensors: &HashMap<String, Tensor>,
    [x, memory]: [&Tensor; 2],
    rotation: Option<&RotaryAt>,
    keep: Option<&Tensor>,
) -> anyhow::Result<(Tensor, Tensor)> {
    let d = config.head_dim();
    let tensor = |name: &str| tensors[name].to_dtype(DType::F64);
    let linear = |name: &str, x: &Tensor| -> anyhow::Result<Tensor> {
        let y = x.broadcast_matmul(&tensor(&format!("{name}.weight"))?.t()?)?;
        Ok(y.broadcast_add(&tensor(&format!("{name}.bias"))?)?)
    };
    let heads = |name: &str, x: &Tensor| -> anyhow::Result<Tensor> {
        let y = linear(name, &x.to_dtype(DType::F64)?)?;
        let (b, t, width) = y.dims3()?;
        let y = y.reshape((b, t, width / d, d))?.transpose(1, 2)?.contiguous()?;
        let Some(norm) = config.query_key_norm.filter(|_| name != "value") else { return Ok(y) };
        let weight = tensor(&format!("{name}_norm.weight"))?;
        let weight = if norm.unit_offset { (weight + 1.0)? } else { weight };
        Ok(mha::reference::rms_norm(&y, &weight, norm.eps)?)
    };
    let (mut q, mut k, v) = (heads("query", x)?, heads("key", memory)?, heads("value", memory)?);
    if let Some(rotation) = rotation {
        (q, k) = (rotation.query(&q)?, rotation.key(&k)?);
    }
    let of_group = config.num_attention_heads / config.num_key_value_heads;
    let groups = (0..config.num_attention_heads).map(|head| (head / of_group) as u32);
    let groups = Tensor::from_iter(groups, &Cpu)?;
    let [k, v] = [k, v].map(|x| x.index_select(&groups, 1).unwrap());
    // The reference multiplies the scores by 1/√D.
    let q = (q * config.scale.map_or(1.0, |scale| scale * (d as f64).sqrt()))?;
    let (context, weights) = mha::reference::attention(&q, &k, &v, keep, None)?;
    Ok((linear("output", &context.transpose(1, 2)?.flatten_from(2)?)?, weights))
}

/// Self-attention in one product and with separate projections, with autograd, cached steps,
/// cross-attention, and returned weights; with and without rotation.
#[test]
fn attention_with_query_key_norm_and_scale_equals_the_reference() -> anyhow::Result<()> {
    let [b, t, s, e, h, groups, d] = [2, 5, 7, 11, 6, 2, 4];
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let x = random(&mut rng, &[b, t, e], DType::F32)?;
    let other = random(&mut rng, &[b, s, e], DType::F32)?;
    let rotary = Rotary::new(100.0, d, t, &Cpu)?;
    let rotation = rotary.at(&[0, 1, 2, 3, 4])?;
    let causal = (0..t * t).map(|i| u8::from(i % t <= i / t));
    let causal = Tensor::from_iter(causal, &Cpu)?.reshape((t, t))?;
    for (seed, unit_offset, scale) in
        [(2, None, Some(0.3)), (3, Some(false), None), (4, Some(true), Some(0.2))]
    {
        let mut config = AttentionConfig::new(e, h).with_key_value_heads(groups);
        config.head_dim = Some(d);
        config.scale = scale;
        config.query_key_norm =
            unit_offset.map(|unit_offset| QueryKeyNorm { eps: 0.1, unit_offset });
        let tensors = random_tensors(config, seed)?;
        let count: usize = tensors.values().map(Tensor::elem_count).sum();
        assert_eq!(count, config.parameter_count());
        let frozen = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Cpu);
        let frozen = MultiHeadAttention::new(&config, frozen)?;
        let vars = VarMap::new();
        for (name, x) in &tensors {
            let var = Var::from_tensor(x)?;
            vars.data().lock().unwrap().insert(name.clone(), var);
        }
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
        let trained = MultiHeadAttention::new(&config, vb)?;

        let mask = AttentionMask::causal(0);
        for rotation in [None, Some(&rotation)] {
            let (expected, expected_weights) =
                reference_module(config, &tensors, [&x, &x], rotation, Some(&causal))?;
            let options = || match rotation {
                None => AttentionOptions::new(),
                Some(rotation) => AttentionOptions::new().with_transform(rotation),
            };
            for module in [&frozen, &trained] {
                // Equal tensors with different ids are projected separately.
                for memory in [&x, &x.copy()?] {
                    let run = |options| module.forward_with(&x, memory, memory, &mask, options);
                    assert_close("output", &run(options())?.0, &expected, SAME);
                    let all = run(options().with_weights(HeadWeights::All))?;
                    assert_close("output beside weights", &all.0, &expected, SAME);
                    assert_close("weights", &all.1.unwrap(), &expected_weights, SAME);
                    let (_, some) = run(options().with_weights(HeadWeights::Heads(vec![4])))?;
                    let expected = expected_weights.narrow(1, 4, 1)?;
                    assert_close("weights of a head", &some.unwrap(), &expected, SAME);
                }
            }
            let decoder = CausalSelfAttention::from(frozen.clone());
            let mut cache = KvCache::new(t);
            for (start, len) in [(0, 2), (2, 1), (3, 2)] {
                let positions: Vec<u32> = (start..start + len).map(|i| i as u32).collect();
                let at = rotary.at(&positions)?;
                let options = match rotation {
                    None => AttentionOptions::new(),
                    Some(_) => AttentionOptions::new().with_transform(&at),
                };
                let tokens = x.narrow(1, start, len)?;
                let (step, _) = decoder.step_with(&tokens, None, &mut cache, options)?;
                assert_close("step", &step, &expected.narrow(1, start, len)?, SAME);
            }
        }

        let (expected, expected_weights) =
            reference_module(config, &tensors, [&x, &other], None, None)?;
        let cross = CrossAttention::from(frozen);
        let memory = cross.memory(&other)?;
        assert_close("cross", &cross.forward(&x, &memory, None)?, &expected, SAME);
        let (_, weights) = cross.forward_with_weights(&x, &memory, None)?;
        assert_close("weights of cross-attention", &weights, &expected_weights, SAME);
    }
    Ok(())
}

/// In bf16, the kernels normalise and rotate queries and keys that are rounded to bf16.
#[test]
fn modules_in_bf16_normalise_and_rotate_as_the_reference_does() -> anyhow::Result<()> {
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[2, 6, 32], DType::F32)?;
    let rotation = Rotary::new(100.0, 8, 6, &Cpu)?.at(&[0, 1, 2, 3, 4, 5])?;
    for unit_offset in [false, true] {
        let norm = QueryKeyNorm { eps: 0.1, unit_offset };
        let config = AttentionConfig::new(32, 4).with_key_value_heads(2).with_scale(0.3);
        let config = config.with_query_key_norm(norm).with_compute_type(mha::ComputeType::Bf16);
        let tensors = random_tensors(config.with_compute_type(mha::ComputeType::F32), 5)?;
        let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Cpu);
        let attention = MultiHeadAttention::new(&config, vb)?;
        for rotation in [None, Some(&rotation)] {
            let options = match rotation {
                None => AttentionOptions::new(),
                Some(rotation) => AttentionOptions::new().with_transform(rotation),
            };
            let (expected, _) = reference_module(config, &tensors, [&x, &x], rotation, None)?;
            let (got, _) = attention.forward_with(&x, &x, &x, &AttentionMask::none(), options)?;
            assert_close("bf16", &got, &expected, 0.03);
        }
    }
    Ok(())
}

#[test]
fn gradients_reach_the_weights_of_query_key_norm() -> anyhow::Result<()> {
    let norm = QueryKeyNorm { eps: 1e-6, unit_offset: true };
    let config = AttentionConfig::new(8, 2).with_query_key_norm(norm);
    let vars = VarMap::new();
    let vb = Init::Xavier.var_builder(&vars, 1, DType::F32, &Cpu);
    let attention = MultiHeadAttention::new(&config, vb)?;
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[2, 5, 8], DType::F32)?;
    let y = attention.forward(&x, &x, &x, &AttentionMask::causal(0))?;
    let gradients = y.sqr()?.sum_all()?.backward()?;
    for name in ["query_norm.weight", "key_norm.weight"] {
        let vars = vars.data().lock().unwrap();
        let gradient = gradients.get(&vars[name]).expect("a gradient");
        let largest = gradient.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(largest > 1e-3 && largest < 1e3, "{name}: {largest}");
    }
    Ok(())
}

#[test]
fn modules_with_query_key_norm_accept_zero_tokens() -> anyhow::Result<()> {
    let norm = QueryKeyNorm { eps: 1e-6, unit_offset: false };
    let config = AttentionConfig::new(8, 2).with_query_key_norm(norm);
    let tensors = VarBuilder::from_tensors(random_tensors(config, 1)?, DType::F32, &Cpu);
    let attention = MultiHeadAttention::new(&config, tensors)?;
    for dims in [(2, 0, 8), (0, 3, 8)] {
        let x = Tensor::zeros(dims, DType::F32, &Cpu)?;
        for memory in [&x, &x.copy()?] {
            let y = attention.forward(&x, memory, memory, &AttentionMask::none())?;
            assert_eq!(y.dims3()?, dims);
        }
    }
    Ok(())
}

/// In disentangled attention with n terms, a scale of `1/√D` equals the default of `1/√(n·D)`.
#[test]
fn disentangled_attention_divides_the_scale_by_the_root_of_its_terms() -> anyhow::Result<()> {
    let config = AttentionConfig::new(12, 3);
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[2, 4, 12], DType::F32)?;
    let embeddings = random(&mut ChaCha8Rng::seed_from_u64(2), &[7, 12], DType::F32)?;
    let run = |config: AttentionConfig| -> anyhow::Result<Tensor> {
        let attention = attention(config, 3)?;
        let (keys, queries) = attention.project_positions(&embeddings)?;
        let rows: Vec<u32> = (0..7).collect();
        let positions =
            DisentangledPositions::new(Some(keys), Some(queries), rows.as_slice().into())?;
        let options = AttentionOptions::new().with_disentangled(&positions);
        Ok(attention.forward_with(&x, &x, &x, &AttentionMask::none(), options)?.0)
    };
    let default = run(config)?;
    assert_close("1/√D", &run(config.with_scale(0.5))?, &default, SAME);
    assert!(max_difference(&run(config.with_scale(0.25))?, &default)? > 1e-3);

    let norm = QueryKeyNorm { eps: 1e-6, unit_offset: false };
    let config = config.with_query_key_norm(norm);
    let keys = Tensor::zeros((3, 7, 4), DType::F32, &Cpu)?;
    let positions = DisentangledPositions::new(Some(keys), None, [0; 7].as_slice().into())?;
    let options = AttentionOptions::new().with_disentangled(&positions);
    let without_projection =
        attention(config, 3)?.forward_with(&x, &x, &x, &AttentionMask::none(), options);
    assert!(matches!(without_projection, Err(mha::Error::DisentangledNorm)));
    assert_eq!(
        run(config).unwrap_err().to_string(),
        "the config has a query_key_norm: expected none for disentangled attention, because no \
         published model defines whether it also normalises the keys and queries of relative \
         positions"
    );
    Ok(())
}

/// The second text was written before `scale` and `query_key_norm` existed.
#[test]
fn configs_are_read_from_json_with_and_without_the_newer_fields() -> anyhow::Result<()> {
    let norm = QueryKeyNorm { eps: 1e-6, unit_offset: true };
    let config = AttentionConfig::new(12, 3).with_scale(0.0625).with_query_key_norm(norm);
    let json = serde_json::to_string(&config)?;
    assert_eq!(serde_json::from_str::<AttentionConfig>(&json)?, config);
    let old = r#"{"hidden_size":12,"num_attention_heads":3,"num_key_value_heads":3,
        "head_dim":null,"value_head_dim":null,"kdim":null,"vdim":null,
        "bias":{"query":true,"key":true,"value":true,"output":true}}"#;
    assert_eq!(serde_json::from_str::<AttentionConfig>(old)?, AttentionConfig::new(12, 3));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn attention_equals_the_reference_with_any_mask_and_dtype(
        sizes in sizes(), parts in 0..512u16, poison: bool, dtype in 0..3usize, seed: u64,
    ) {
        let dtype = [DType::F32, DType::F16, DType::BF16][dtype];
        check_attention(sizes, parts, poison, dtype, seed).unwrap();
    }

    #[test]
    fn disentangled_attention_equals_its_definition(
        sizes in [1..3usize, 1..4, 1..7, 1..8, 1..6, 1..9], terms in 0..4u8, kind in 0..3u8,
        dtype in 0..3usize, seed: u64,
    ) {
        let dtype = [DType::F32, DType::F16, DType::BF16][dtype];
        check_disentangled(sizes, terms, kind, dtype, seed).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cached_steps_of_any_length_equal_the_full_forward(
        splits in prop::collection::vec(1..5usize, 1..5), padded: bool, seed: u64,
    ) {
        let t = splits.iter().sum::<usize>();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let config = AttentionConfig::new(12, 4).with_key_value_heads(2);
        let vb = Init::Xavier.var_builder(&VarMap::new(), seed, DType::F32, &Cpu);
        let attention = CausalSelfAttention::new(&config, vb).unwrap();
        let x = random(&mut rng, &[2, t, 12], DType::F32).unwrap();
        let padding: Vec<u8> = (0..2 * t).map(|_| u8::from(!padded || rng.random_bool(0.7))).collect();
        let padding = Tensor::from_vec(padding, (2, t), &Cpu).unwrap();
        let whole = attention.forward(&x, Some(&padding)).unwrap();

        let mut cache = KvCache::new(t);
        let mut steps = vec![];
        for len in splits {
            let seen = padding.narrow(1, 0, cache.len() + len).unwrap();
            let new = x.narrow(1, cache.len(), len).unwrap();
            steps.push(attention.step_padded(&new, Some(&seen), &mut cache).unwrap());
        }
        assert_close("steps", &Tensor::cat(&steps, 1).unwrap(), &whole, SAME);
    }

    #[test]
    fn the_order_of_keys_does_not_matter(sizes in sizes(), seed: u64) {
        let [b, groups, of_group, t, s, d, value_d] = sizes;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut tensor = |h, n, d| random(&mut rng, &[b, h, n, d], DType::F32).unwrap();
        let (q, k, v) = (tensor(groups * of_group, t, d), tensor(groups, s, d), tensor(groups, s, value_d));
        let keep: Vec<u8> = (0..b * t * s).map(|_| u8::from(rng.random_bool(0.7))).collect();
        let keep = Tensor::from_vec(keep, (b, 1, t, s), &Cpu).unwrap();
        let mut order: Vec<u32> = (0..s as u32).collect();
        rand::seq::SliceRandom::shuffle(&mut order[..], &mut rng);
        let order = Tensor::new(order, &Cpu).unwrap();
        let attend = |k: &Tensor, v: &Tensor, keep: &Tensor| {
            let mask = AttentionMask::none().with_keep(keep).unwrap();
            scaled_dot_product_attention(&q, k, v, &mask, None).unwrap()
        };
        let shuffled = |x: &Tensor, dim| x.index_select(&order, dim).unwrap();
        let got = attend(&shuffled(&k, 2), &shuffled(&v, 2), &shuffled(&keep, 3));
        assert_close("shuffled", &got, &attend(&k, &v, &keep), SAME);
    }

    #[test]
    fn the_output_is_the_sum_over_heads(heads in 1..5usize, d in 1..5usize, seed: u64) {
        let e = heads * d;
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let attention = attention(AttentionConfig::new(e, heads), seed).unwrap();
        let x = random(&mut rng, &[2, 5, e], DType::F32).unwrap();
        let whole = attention.forward(&x, &x, &x, &AttentionMask::none()).unwrap();

        // Each head uses its rows of W_Q, W_K and W_V and its columns of W_O; the outputs are
        // summed.
        let tensors = attention.tensors().unwrap();
        let by_heads = (0..heads).map(|head| -> Result<Tensor> {
            let project = |name: &str| {
                let own = |end: &str| tensors[&format!("{name}.{end}")].narrow(0, head * d, d);
                x.broadcast_matmul(&own("weight")?.t()?)?.broadcast_add(&own("bias")?)?.unsqueeze(1)
            };
            let (q, k, v) = (project("query")?, project("key")?, project("value")?);
            let context = scaled_dot_product_attention(&q, &k, &v, &AttentionMask::none(), None)?;
            context.squeeze(1)?.broadcast_matmul(&tensors["output.weight"].narrow(1, head * d, d)?.t()?)
        });
        let sum = by_heads.map(Result::unwrap).reduce(|a, b| (a + b).unwrap()).unwrap();
        let sum = sum.broadcast_add(&tensors["output.bias"]).unwrap();
        assert_close("by heads", &sum, &whole, 1e-5);
    }

    #[test]
    fn grouped_heads_equal_heads_with_repeated_keys_and_values(
        groups in 1..4usize, of_group in 1..4usize, d in 1..5usize, seed: u64,
    ) {
        let (h, mut rng) = (groups * of_group, ChaCha8Rng::seed_from_u64(seed));
        let config = AttentionConfig::new(h * d, h).with_key_value_heads(groups);
        let grouped = attention(config, seed).unwrap();
        let repeated = grouped.tensors().unwrap().into_iter().map(|(name, x)| {
            if !name.starts_with("key") && !name.starts_with("value") {
                return (name, x);
            }
            let rows = (0..h * d).map(|row| (row / d / of_group * d + row % d) as u32);
            let rows = Tensor::from_iter(rows, &Cpu).unwrap();
            (name, x.index_select(&rows, 0).unwrap())
        });
        let vb = VarBuilder::from_tensors(repeated.collect(), DType::F32, &Cpu);
        let full = MultiHeadAttention::new(&AttentionConfig::new(h * d, h), vb).unwrap();
        let x = random(&mut rng, &[2, 5, h * d], DType::F32).unwrap();
        let mask = AttentionMask::causal(0);
        let (out, weights) = grouped.forward_with_weights(&x, &x, &x, &mask).unwrap();
        let (expected, expected_weights) = full.forward_with_weights(&x, &x, &x, &mask).unwrap();
        assert_close("output", &out, &expected, SAME);
        assert_close("weights", &weights, &expected_weights, SAME);
    }

    #[test]
    fn pruning_heads_equals_masking_them(
        groups in 1..3usize, of_group in 1..4usize, kept in 0..64u8, has_norm: bool, seed: u64,
    ) {
        // Pruning is allowed if all groups that remain have the same size.
        let (h, d, mut rng) = (groups * of_group, 3, ChaCha8Rng::seed_from_u64(seed));
        let mut config = AttentionConfig::new(h * d, h).with_key_value_heads(groups);
        if has_norm {
            let norm = QueryKeyNorm { eps: 1e-3, unit_offset: false };
            config = config.with_query_key_norm(norm).with_scale(0.3);
        }
        let mut whole = attention(config, seed).unwrap();
        if has_norm {
            let tensors = random_tensors(config, seed).unwrap();
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
            whole = MultiHeadAttention::new(&config, vb).unwrap();
        }
        let pruned: Vec<usize> = (0..h).filter(|head| kept & (1 << head) == 0).collect();
        prop_assume!(pruned.len() < h);
        let left = |g: usize| (g * of_group..(g + 1) * of_group).filter(|head| !pruned.contains(head)).count();
        let mut sizes: Vec<usize> = (0..groups).map(left).filter(|&n| n > 0).collect();
        sizes.dedup();
        let small = match whole.prune_heads(&pruned) {
            Ok(small) => small,
            Err(error) => {
                prop_assert!(sizes.len() > 1, "{}", error);
                return Ok(());
            }
        };
        prop_assert_eq!(sizes.len(), 1);
        prop_assert_eq!(small.config().num_attention_heads, h - pruned.len());

        // Save the pruned module and load it again.
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("attention.safetensors");
        candle_core::safetensors::save(&small.tensors().unwrap(), &file).unwrap();
        let tensors = candle_core::safetensors::load(&file, &Cpu).unwrap();
        let count: usize = tensors.values().map(Tensor::elem_count).sum();
        prop_assert_eq!(count, small.config().parameter_count());
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let json = serde_json::to_string(small.config()).unwrap();
        let config: AttentionConfig = serde_json::from_str(&json).unwrap();
        let small = MultiHeadAttention::new(&config, vb).unwrap();

        let x = random(&mut rng, &[2, 5, h * d], DType::F32).unwrap();
        let on: Vec<f32> = (0..h).map(|head| if pruned.contains(&head) { 0. } else { 1. }).collect();
        let off = AttentionMask::none().with_head_mask(&Tensor::new(on, &Cpu).unwrap()).unwrap();
        let (expected, weights) = whole.forward_with_weights(&x, &x, &x, &off).unwrap();
        let got = small.forward(&x, &x, &x, &AttentionMask::none()).unwrap();
        assert_close("pruned", &got, &expected, SAME);
        for &head in &pruned {
            let off = weights.narrow(1, head, 1).unwrap().abs().unwrap().sum_all().unwrap();
            prop_assert_eq!(off.to_scalar::<f32>().unwrap(), 0.0);
        }
    }
}

/// Only hidden keys are excluded: a visible NaN reaches the output.
#[test]
fn a_visible_nan_reaches_the_output() -> anyhow::Result<()> {
    let x = Tensor::new(&[[[[1f32], [f32::NAN], [2.]]]], &Cpu)?;
    let ones = x.ones_like()?;
    let out = scaled_dot_product_attention(&ones, &ones, &x, &AttentionMask::causal(0), None)?;
    let out = out.flatten_all()?.to_vec1::<f32>()?;
    assert!(out[0] == 1.0 && out[1].is_nan() && out[2].is_nan(), "{out:?}");
    Ok(())
}

#[test]
fn attention_accepts_zero_queries_or_keys() -> anyhow::Result<()> {
    for dtype in [DType::F32, DType::F16] {
        let x = |width| Tensor::zeros((1, 2, 0, width), dtype, &Cpu);
        let packed = AttentionMask::none().with_sequences(&[0])?;
        let out = scaled_dot_product_attention(&x(4)?, &x(4)?, &x(3)?, &packed, None)?;
        assert_eq!(out.dims(), [1, 2, 0, 3], "{dtype:?}");
    }
    for (b, t, s) in [(0, 2, 3), (1, 0, 3), (1, 2, 0)] {
        let q = Tensor::ones((b, 2, t, 4), DType::F32, &Cpu)?;
        let k = Tensor::ones((b, 2, s, 4), DType::F32, &Cpu)?;
        let (out, weights) =
            scaled_dot_product_attention_with_weights(&q, &k, &k, &AttentionMask::none(), None)?;
        assert_eq!((out.dims(), weights.dims()), (&[b, 2, t, 4][..], &[b, 2, t, s][..]));
        assert!(out.elem_count() == 0 || out.sum_all()?.to_scalar::<f32>()? == 0.0);
    }
    Ok(())
}

#[test]
fn modules_accept_zero_queries_or_keys() -> anyhow::Result<()> {
    let attention = attention(AttentionConfig::new(8, 2), 3)?;
    let x = |n| Tensor::zeros((1, n, 8), DType::F32, &Cpu);
    let none = AttentionMask::none();
    assert_eq!(attention.forward(&x(0)?, &x(3)?, &x(3)?, &none)?.dims(), [1, 0, 8]);
    assert_eq!(attention.forward(&x(2)?, &x(0)?, &x(0)?, &none)?.dims(), [1, 2, 8]);
    for (queries, keys) in [(0, 3), (2, 0), (0, 0)] {
        let dims = |weights| {
            let (q, k) = (x(queries)?, x(keys)?);
            let options = AttentionOptions::new().with_weights(weights);
            let (_, weights) = attention.forward_with(&q, &k, &k, &none, options)?;
            anyhow::Ok(weights.expect("the requested weights").dims().to_vec())
        };
        assert_eq!(dims(HeadWeights::All)?, [1, 2, queries, keys]);
        assert_eq!(dims(HeadWeights::Mean)?, [1, queries, keys]);
        assert_eq!(dims(HeadWeights::Heads(vec![1]))?, [1, 1, queries, keys]);
    }
    let packed = AttentionMask::none().with_sequences(&[0])?;
    assert_eq!(attention.forward(&x(0)?, &x(0)?, &x(0)?, &packed)?.dims(), [1, 0, 8]);
    Ok(())
}

/// bf16 and int8 modules: the kernels and candle's operations agree when weights are returned, with
/// a trained bias, with a cache, and with zero queries or keys.
#[test]
fn rounded_modules_agree_on_every_code_path() -> anyhow::Result<()> {
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[2, 6, 12], DType::F32)?;
    for compute_type in [mha::ComputeType::Bf16, mha::ComputeType::Int8] {
        let config = AttentionConfig::new(12, 2).with_compute_type(compute_type);
        let exact = attention(AttentionConfig::new(12, 2), 3)?;
        let tensors = exact.tensors()?.into_iter().map(|(name, x)| (name, x.detach())).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
        let rounded = MultiHeadAttention::new(&config, vb.clone())?;
        let (none, zero) = (AttentionMask::none(), Var::zeros((6, 6), DType::F32, &Cpu)?);
        let out = rounded.forward(&x, &x, &x, &none)?;
        assert_close("f32", &out, &exact.forward(&x, &x, &x, &none)?.detach(), 0.03);
        assert!(max_difference(&out, &exact.forward(&x, &x, &x, &none)?)? > 0.0);
        let (with_weights, weights) = rounded.forward_with_weights(&x, &x, &x, &none)?;
        assert_close("with weights", &with_weights, &out, 0.01);
        assert_eq!((out.dtype(), weights.dtype()), (DType::F32, DType::F32));
        let trained = rounded.forward(&x, &x, &x, &none.clone().with_bias(&zero)?)?;
        assert!(trained.backward()?.get(&zero).is_some());
        assert_close("trained", &trained, &out, 0.01);

        let causal = CausalSelfAttention::new(&config, vb)?;
        let mut cache = KvCache::new(6);
        let step = |x: &Tensor, cache: &mut KvCache| causal.step(x, cache);
        step(&x.narrow(1, 0, 0)?, &mut cache)?;
        let first = step(&x.narrow(1, 0, 4)?, &mut cache)?;
        let steps = Tensor::cat(&[first, step(&x.narrow(1, 4, 2)?, &mut cache)?], 1)?;
        assert_close("steps", &steps, &causal.forward(&x, None)?, 0.01);
        for (queries, keys) in [(0, 6), (6, 0), (0, 0)] {
            let (queries, keys) = (x.narrow(1, 0, queries)?, x.narrow(1, 0, keys)?);
            let out = rounded.forward(&queries, &keys, &keys, &none)?;
            assert_eq!((out.dims(), out.dtype()), (queries.dims(), DType::F32));
        }
    }
    Ok(())
}

#[test]
fn dropout_preserves_the_mean_and_follows_its_seed() -> anyhow::Result<()> {
    let attention = attention(AttentionConfig::new(8, 2), 3)?;
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[1, 6, 8], DType::F32)?;
    let run = |dropout: &mut mha::Dropout| {
        let options = AttentionOptions::new().with_dropout(dropout);
        attention.forward_with(&x, &x, &x, &AttentionMask::none(), options)
    };
    let expected = attention.forward(&x, &x, &x, &AttentionMask::none())?;
    let mut dropout = mha::Dropout::new(0.3, 9)?;
    let (first, _) = run(&mut dropout)?;
    assert!(max_difference(&first, &expected)? > 1e-3, "nothing was dropped");
    assert_close("same seed", &run(&mut mha::Dropout::new(0.3, 9)?)?.0, &first, 0.0);
    let runs = (0..2000).map(|_| Ok(run(&mut dropout)?.0)).collect::<anyhow::Result<Vec<_>>>()?;
    let mean = Tensor::cat(&runs, 0)?.mean_keepdim(0)?;
    assert_close("mean of 2000 runs", &mean, &expected, 0.05); // 4 standard errors
    Ok(())
}

#[test]
fn weights_of_chosen_heads_equal_slices_of_all_weights() -> anyhow::Result<()> {
    let config = AttentionConfig::new(12, 4).with_key_value_heads(2);
    let attention = attention(config, 3)?;
    let x = random(&mut ChaCha8Rng::seed_from_u64(1), &[2, 6, 12], DType::F32)?;
    let heads = Tensor::new(&[1f32, 0.5, 1., 0.], &Cpu)?;
    let mask = AttentionMask::causal(0).with_head_mask(&heads)?;
    let (out, all) = attention.forward_with_weights(&x, &x, &x, &mask)?;
    let run = |weights| {
        let options = AttentionOptions::new().with_weights(weights);
        attention.forward_with(&x, &x, &x, &mask, options)
    };
    let (plain, none) = run(HeadWeights::None)?;
    assert!(none.is_none());
    assert_close("output", &plain, &out, 1e-6);
    let got = |weights| anyhow::Ok(run(weights)?.1.expect("the requested weights"));
    assert_close("all", &got(HeadWeights::All)?, &all, 1e-6);
    assert_close("mean", &got(HeadWeights::Mean)?, &all.mean(1)?, 1e-6);
    let two = Tensor::cat(&[all.narrow(1, 3, 1)?, all.narrow(1, 1, 1)?], 1)?;
    assert_close("two", &got(HeadWeights::Heads(vec![3, 1]))?, &two, 1e-6);
    let error = run(HeadWeights::Heads(vec![4])).unwrap_err().to_string();
    assert_eq!(error, "head 4 does not exist: expected heads below 4");
    assert_eq!(all.sum(D::Minus1)?.mean((0, 2))?.to_vec1::<f32>()?[3], 0.0);
    Ok(())
}

#[test]
fn pruning_all_heads_is_an_error() {
    let whole = attention(AttentionConfig::new(6, 2), 0).unwrap();
    let error = whole.prune_heads(&[0, 1]).err().map(|error| error.to_string());
    let expected = "pruning leaves no head: expected at least one of 2 heads to remain";
    assert_eq!(error.as_deref(), Some(expected));
}

/// One tensor as query, key and value, in a module with another `kdim`.
#[test]
fn a_key_of_the_wrong_width_is_an_error_in_self_attention() -> anyhow::Result<()> {
    let config = AttentionConfig::new(8, 2).with_memory_widths(5, 8);
    let vars = VarMap::new();
    MultiHeadAttention::new(&config, Init::XavierSeparate.var_builder(&vars, 1, DType::F32, &Cpu))?;
    let tensors = vars.data().lock().unwrap().clone().into_iter();
    let tensors = tensors.map(|(name, var)| (name, var.as_detached_tensor())).collect();
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
    let x = Tensor::zeros((1, 3, 8), DType::F32, &Cpu)?;
    let error = MultiHeadAttention::new(&config, vb)?.forward(&x, &x, &x, &AttentionMask::none());
    assert_eq!(
        error.unwrap_err().to_string(),
        "key has the wrong shape: expected (B, S, kdim) = [1, 3, 5], got [1, 3, 8]"
    );
    Ok(())
}

/// `Debug` prints no weights.
#[test]
fn display_and_debug_print_the_sizes_of_a_module() -> anyhow::Result<()> {
    let plain = attention(AttentionConfig::new(8, 2), 1)?;
    let vb = VarBuilder::from_tensors(plain.tensors()?, DType::F32, &Cpu);
    let packed = MultiHeadAttention::new(plain.config(), vb)?;
    for attention in [plain, packed] {
        assert_eq!(attention.to_string(), "MultiHeadAttention(hidden_size 8, 2 heads of 4)");
        let debug = format!("{attention:?}");
        assert!(debug.contains('8') && debug.len() < 1000, "{debug}");
    }
    Ok(())
}

#[test]
fn each_projection_has_its_own_bias() -> anyhow::Result<()> {
    for bits in 0..16 {
        let bit = |i: u8| bits & (1 << i) != 0;
        let bias = ProjectionBias { query: bit(0), key: bit(1), value: bit(2), output: bit(3) };
        let config = AttentionConfig::new(8, 2).with_bias(bias).with_memory_widths(5, 8);
        let tensors = attention(config, 1)?.tensors()?;
        for (i, name) in (0..).zip(["query", "key", "value", "output"]) {
            assert_eq!(tensors.contains_key(&format!("{name}.bias")), bit(i), "{bias:?}");
        }
        let count: usize = tensors.values().map(Tensor::elem_count).sum();
        assert_eq!(count, config.parameter_count());
    }
    Ok(())
}

#[test]
fn modules_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<MultiHeadAttention>();
    shared::<mha::SelfAttention>();
    shared::<CausalSelfAttention>();
    shared::<CrossAttention>();
    shared::<AttentionMask>();
    shared::<KvCache>();
    shared::<encoder::EncoderModel>();
    shared::<encoder::CausalLm>();
    shared::<encoder::EncoderDecoder>();
    shared::<encoder::Embedder>();
}
