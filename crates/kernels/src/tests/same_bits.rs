//! Every instruction set computes the same bits as the scalar reference.

use crate::{
    testing::{ACTIVATIONS, random, scaled},
    *,
};

/// Results in f32 of all kernels but matrix products, which `linear.rs` compares. The widths are not
/// multiples of the number of lanes, and the numbers of keys exceed a block of keys.
fn results(isa: Isa) -> Vec<(String, Vec<f32>)> {
    let mut results = vec![];
    let mut add = |name: String, values| results.push((name, values));
    for width in [1, 7, 24, 50, scaled(384, 33)] {
        let rows = scaled(19, 3);
        let (x, y) = (random(rows * width, 1), random(rows * width, 2));
        let (weight, bias) = (random(width, 3), random(width, 4));
        let layer = RowNorm::Layer { weight: &weight, bias: &bias, eps: 1e-12 };
        add(format!("LayerNorm of {width}"), add_norm(isa, &x, None, layer));
        add(format!("LayerNorm of a sum of {width}"), add_norm(isa, &x, Some(&y), layer));
        let rms = RowNorm::Rms { weight: &weight, eps: 1e-6 };
        add(format!("RMSNorm of {width}"), add_norm(isa, &x, Some(&y), rms));
        let ids: Vec<u32> = (0..rows as u32).rev().collect();
        let table = Lookup { table: EmbeddingTable::F32(&x), ids: &ids };
        let embedded = embed_layer_norm(isa, [table; 3], &weight, &bias, 1e-12);
        add(format!("embedding of {width}"), embedded.unwrap_or_default());
        add(format!("mean of {width}"), mean_pool(isa, &x, width, &[0, 1, rows]));
        let sums = log_sum_exp(isa, &x, width).into_iter().map(|sum| sum as f32);
        add(format!("sum of exponentials of {width}"), sums.collect());
        let mut quotients = x.clone();
        softmax(isa, &mut quotients, width);
        add(format!("softmax of {width}"), quotients);
        add(format!("unit length of {width}"), l2_normalize(isa, &x, width));
        for activation in ACTIVATIONS {
            add(format!("{activation:?} of {width}"), activate(isa, &x, activation));
        }
        for queries in [1, 3] {
            let queries = &y[..queries.min(rows) * width];
            let name = format!("cosines of {width}, {} queries", queries.len() / width);
            add(name, cosine_similarities(isa, &x, queries, width));
        }
    }
    for d in [2, 34, 64] {
        let dims = [1, 3, 5, d];
        let mut heads = random(dims.iter().product(), 1);
        let (query, key, angles) = (random(d, 2), random(d, 3), random(5 * d / 2, 4));
        let norms = HeadNorms { query_heads: 2, query: &query, key: &key, eps: 1e-6 };
        let view = StridedMut { data: &mut heads, strides: [15 * d, d, 3 * d], dims };
        let rotation = Rotation { cos: &angles, sin: &angles };
        transform_heads_f32(isa, view, Some(norms), Some(rotation));
        add(format!("heads of {d}"), heads);
    }
    for (t, d) in [(5, 4), (scaled(40, 6), 33), (scaled(500, 9), 64)] {
        let dims = [1, 2, t, d];
        let [q, k, v] = [1, 2, 3].map(|seed| random(2 * t * d, seed));
        let tensor = |data| Strided { data, strides: [2 * t * d, d, 2 * d], dims };
        let sequences = [Sequence { b: 0, queries: 0..t, keys: 0..t, first_query: 0 }];
        let biases = random(2 * t * t, 4);
        let all = Attention::new([tensor(&q), tensor(&k), tensor(&v)], &sequences, 0.3);
        let strides = [2 * t * t, t * t, t, 1];
        let variants = [
            ("", all),
            ("causal ", Attention { causal: true, ..all }),
            ("windowed ", Attention { window: Some(7), ..all }),
            ("biased ", Attention { bias: Some(Broadcast { data: &biases, strides }), ..all }),
        ];
        for (kind, attention) in variants {
            add(format!("{kind}attention of {t} × {d}"), attention_f32(isa, attention));
            let weights = attention_weights_f32(isa, attention, &[1, 0]);
            add(format!("{kind}weights of {t} × {d}"), weights);
        }
    }
    results
}

/// The results of a gated layer and a layer after it, for each activation.
fn chains(isa: Isa, compute_type: ComputeType) -> Vec<(String, Vec<f32>)> {
    let (m, k, n) = (scaled(37, 3), scaled(201, 17), scaled(77, 9));
    let x: Vec<f32> = random(m * k, 1).iter().map(|x| 4.0 * x).collect();
    let pack = |rows: usize, columns: usize, seed| {
        let weight = random(rows * columns, seed);
        PackedLinear::pack(isa, compute_type, &weight, rows, columns, Some(&random(rows, 9)))
    };
    let (up, factor, down) = (pack(n, k, 2), pack(n, k, 3), pack(k, n, 4));
    let chain = |activation| {
        let layers = [
            LinearMap { weights: &[&up], activation, factor: Some(&factor) },
            LinearMap { weights: &[&down], activation: Activation::None, factor: None },
        ];
        let name = format!("{compute_type:?}, {activation:?}");
        (name, chain_f32(isa, Rows::F32(&x), &layers))
    };
    ACTIVATIONS.map(chain).into()
}

fn assert_same_bits(isa: Isa, results: fn(Isa) -> Vec<(String, Vec<f32>)>) {
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for ((name, got), (_, scalar)) in results(isa).iter().zip(results(Isa::SCALAR)) {
        assert!(!got.is_empty() && got.iter().all(|x| x.is_finite()), "{name}: not finite");
        assert_eq!(bits(got), bits(&scalar), "{name}: {} differs from scalar", isa.name());
    }
}

#[test]
fn every_instruction_set_has_the_bits_of_the_scalar_reference() {
    for isa in Isa::available() {
        assert_same_bits(isa, results);
    }
}

/// Except f32 on AMX, which multiplies bf16 terms, and int8 on AVX2, which rounds weights to fewer
/// steps.
#[test]
fn every_instruction_set_has_the_bits_of_the_scalar_reference_in_chains_of_layers() {
    for isa in Isa::available() {
        if !isa.products(ComputeType::F32).is_bf16x3 {
            assert_same_bits(isa, |isa| chains(isa, ComputeType::F32));
        }
        if !isa.products(ComputeType::Int8).adds_int8_pairs_in_i16 {
            assert_same_bits(isa, |isa| chains(isa, ComputeType::Int8));
        }
    }
}
