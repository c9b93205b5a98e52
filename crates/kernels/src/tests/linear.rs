//! Matrix products against f64 and the scalar path: accuracy, invariance, non-finite values.

use libm::log1pf;

use crate::{
    testing::{COMPUTE_TYPES, assert_close, from_bf16, random, scaled, to_bf16},
    *,
};

/// Every ISA of this machine with every compute type.
fn isas_and_compute_types() -> impl Iterator<Item = (Isa, ComputeType)> {
    Isa::available()
        .into_iter()
        .flat_map(|isa| COMPUTE_TYPES.map(|compute_type| (isa, compute_type)))
}

/// Multiplies each whole block of 64 values by the Hadamard matrix divided by √64. This product is
/// its own inverse. The remaining values are unchanged.
fn rotate(row: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| [0.125, -0.125][(i & j).count_ones() as usize % 2];
    let (blocks, rest) = row.as_chunks::<64>();
    let dot = |block: &[f64; 64], i| block.iter().enumerate().map(|(j, x)| x * sign(i, j)).sum();
    let blocks = blocks.iter().flat_map(|block| (0..64).map(|i| dot(block, i)));
    blocks.chain(rest.iter().copied()).collect()
}

/// The rows of `x`, rounded to a compute type.
fn round(compute_type: ComputeType, x: &[f32], k: usize) -> Vec<f64> {
    let round_row = |row: &[f32]| -> Vec<f64> {
        let row: Vec<f64> = row.iter().map(|&x| x.into()).collect();
        match compute_type {
            ComputeType::F32 => row,
            ComputeType::Bf16 => {
                let ulp = |x: f64| 2f64.powi(x.abs().log2().floor() as i32 - 7);
                row.into_iter().map(|x| (x / ulp(x)).round_ties_even() * ulp(x)).collect()
            }
            ComputeType::Int8 => {
                let row = rotate(&row);
                let max = row.iter().fold(0f64, |max, &x| max.max(x));
                let min = row.iter().fold(0f64, |min, &x| min.min(x));
                let scale = (max - min) / 255.0;
                let zero_point = (-min / scale).round();
                let quantise = |x: f64| (x / scale + zero_point).round().clamp(0.0, 255.0);
                let dequantised = |x: f64| (quantise(x) - zero_point) * scale;
                rotate(&row.into_iter().map(dequantised).collect::<Vec<_>>())
            }
        }
    };
    x.chunks(k).flat_map(round_row).collect()
}

/// Tolerances: sums of up to 1,600 products reach 20, where one rounding is up to 1e-6. The
/// roundings of one sum add up to about 2e-5. In int8, a quantisation step is up to 1/50, and a
/// value near the middle of two steps may round to a different step in f32 than in f64. A rotated
/// weight is off by at most half a step. Rotating back sums 64 such errors with signs and divides
/// by 8, which can exceed half a step.
///
/// AMX computes f32 and bf16 in another order, so that the bits differ from those of the scalar
/// path; so do the products of bf16 on AArch64, which round their sums to odd. On AVX2, the
/// quantisation steps of int8 weights are up to twice as large, so that the weights differ.
#[test]
fn products_are_close_to_f64_and_equal_the_scalar_path_to_the_bit() {
    let shapes = [
        (1, 1, 1),
        (3, 5, 7),
        (13, 33, 5),
        (29, 70, 50),
        (200, 40, 33),
        (5, 64, 1600),
        (1, 1, 401),
        (0, 4, 3),
    ];
    let shapes = shapes.into_iter().filter(|(m, n, k)| m * n * k < scaled(usize::MAX, 3000));
    for ((m, n, k), compute_type) in shapes.flat_map(|shape| COMPUTE_TYPES.map(|c| (shape, c))) {
        let (x, w, bias) = (random(m * k, 1), random(n * k, 2), random(n, 3));
        let pack = |isa, bias| PackedLinear::pack(isa, compute_type, &w, n, k, bias);
        let packed = pack(Isa::SCALAR, Some(&bias));
        let x_rounded = round(compute_type, &x, k);
        let tolerance = if compute_type == ComputeType::Int8 { 0.02 } else { 3e-5 };
        let scalar = linear(Isa::SCALAR, &x, &[&packed], Activation::None);
        for isa in Isa::available() {
            let name = format!("{} {compute_type:?} {m}×{n}×{k}", isa.name());
            let products = isa.products(compute_type);
            let (packed, without_bias) = (pack(isa, Some(&bias)), pack(isa, None));
            let w_rounded = packed.unpack();
            match compute_type {
                ComputeType::F32 => assert_eq!(w_rounded, w, "{name}"),
                ComputeType::Bf16 => {
                    assert_close(&name, &w_rounded, &round(compute_type, &w, k), 0.0);
                }
                ComputeType::Int8 => {
                    let w: Vec<f64> = w.iter().map(|&w| w.into()).collect();
                    let step = if products.adds_int8_pairs_in_i16 { 2.0 } else { 1.0 };
                    assert_close(&name, &w_rounded, &w, 0.03 * step);
                }
            }
            let dot = |i: usize, j: usize| -> f64 {
                (0..k).map(|s| x_rounded[i * k + s] * f64::from(w_rounded[j * k + s])).sum()
            };
            let positions = (0..m).flat_map(|i| (0..n).map(move |j| (i, j)));
            let expected: Vec<f64> =
                positions.map(|(i, j)| dot(i, j) + f64::from(bias[j])).collect();
            let got = linear(isa, &x, &[&packed], Activation::None);
            assert_close(&name, &got, &expected, tolerance);
            let has_special_layout = products != isa.without_tiles().products(compute_type);
            let has_equal_bits = match compute_type {
                ComputeType::Int8 => !products.adds_int8_pairs_in_i16,
                ComputeType::F32 => !has_special_layout,
                ComputeType::Bf16 => !has_special_layout && isa.name() != "neon-bfdot",
            };
            assert!(got == scalar || !has_equal_bits, "{name}: differs from the scalar path");
            let side_by_side = linear(isa, &x, &[&packed, &without_bias], Activation::Relu);
            for (i, row) in side_by_side.chunks(2 * n).enumerate() {
                let relu: Vec<f64> = expected[i * n..][..n].iter().map(|y| y.max(0.0)).collect();
                assert_close(&name, &row[..n], &relu, tolerance);
                let without_bias = expected[i * n..][..n].iter().zip(&bias);
                let relu: Vec<f64> =
                    without_bias.map(|(y, &b)| (y - f64::from(b)).max(0.0)).collect();
                assert_close(&name, &row[n..], &relu, tolerance);
            }
        }
    }
}

/// The inputs −1 and 1 become the bytes 0 and 255. The weights −1 and 1 become −127 and 127, or −63
/// and 63 on AVX2. Rows of fewer than 64 values are not rotated.
#[test]
fn int8_products_of_the_largest_values_do_not_saturate() {
    const K: usize = 63;
    for (isa, x) in Isa::available().into_iter().flat_map(|isa| [(isa, -1.0), (isa, 1.0)]) {
        let weight = [vec![-1.0; K], vec![1.0; K], random(scaled(500, 2) * K, 1)].concat();
        let packed = PackedLinear::pack(isa, ComputeType::Int8, &weight, weight.len() / K, K, None);
        let got = linear(isa, &[x; K], &[&packed], Activation::None);
        let sum = |row: &[f32]| row.iter().map(|&w| f64::from(w * x)).sum();
        let expected: Vec<f64> = packed.unpack().chunks(K).map(sum).collect();
        let name = format!("{} {x}", isa.name());
        assert_close(&name, &got, &expected, 1e-4);
        assert_close(&name, &got[..2], &[-(K as f64), K as f64].map(|y| y * f64::from(x)), 1e-4);
        // Inputs from −z to 255 − z have the scale 1 and the zero point z, and are not rounded.
        for z in [0.0, 1.0, 128.0, 255.0] {
            let x: Vec<f32> = (0..K).map(|j| (j * 85 % 256) as f32 - z).collect();
            let got = linear(isa, &x, &[&packed], Activation::None);
            let sum = |row: &[f32]| row.iter().zip(&x).map(|(&w, &x)| f64::from(w * x)).sum();
            let expected: Vec<f64> = packed.unpack().chunks(K).map(sum).collect();
            assert_close(&format!("{name}, zero point {z}"), &got, &expected, 5e-3);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes hours in Miri")]
fn f32_products_are_as_accurate_as_scalar_and_a_non_finite_value_affects_one_row_or_column() {
    let (m, n, k) = (33, 40, 1700);
    let (x, w) = (random(m * k, 1), random(n * k, 2));
    let products = |isa, x: &[f32], w: &[f32]| {
        let w = PackedLinear::pack(isa, ComputeType::F32, w, n, k, None);
        linear(isa, x, &[&w], Activation::None)
    };
    let rms_error = |y: &[f32]| {
        let squares = y.iter().enumerate().map(|(at, &y)| {
            let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
            let exact: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            (f64::from(y) - exact).powi(2)
        });
        (squares.sum::<f64>() / y.len() as f64).sqrt()
    };
    let scalar_error = rms_error(&products(Isa::SCALAR, &x, &w));
    for isa in Isa::available() {
        let (name, y) = (isa.name(), products(isa, &x, &w));
        assert!(rms_error(&y) <= scalar_error, "{name}: {} > {scalar_error}", rms_error(&y));
        let scale_by_exp2 = |values: &[f32], power| -> Vec<f32> {
            values.iter().map(|x| x * 2f32.powi(power)).collect()
        };
        for (x_power, w_power) in [(-75, 60), (60, -75), (-60, 0), (0, 60), (100, -40)] {
            let got = products(isa, &scale_by_exp2(&x, x_power), &scale_by_exp2(&w, w_power));
            let expected = scale_by_exp2(&y, x_power + w_power);
            assert_eq!(got, expected, "{name}: x · 2^{x_power}, w · 2^{w_power}");
        }
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
            for (in_x, at) in [(true, 5), (true, 1699), (false, 6), (false, 1031)] {
                let (mut x, mut w) = (x.clone(), w.clone());
                let operand = if in_x { &mut x } else { &mut w };
                operand[k + at] = special;
                let got = products(isa, &x, &w);
                for (i, (got, y)) in got.into_iter().zip(&y).enumerate() {
                    let is_affected = if in_x { i / n == 1 } else { i % n == 1 };
                    let holds = if is_affected { !got.is_finite() } else { got == *y };
                    assert!(holds, "{name}: {special} in {}", if in_x { "x" } else { "w" });
                }
            }
        }
    }
}

/// AMX stores a weight as two bf16 terms per value if all its significands fit in 16 bits (as those
/// of f16 do), otherwise as three.
#[test]
#[cfg_attr(miri, ignore = "takes hours in Miri")]
fn a_column_does_not_depend_on_the_precision_of_other_columns() {
    let (m, n, k) = (35, 40, 1700);
    let (x, mut w) = (random(m * k, 1), random(n * k, 2));
    w.iter_mut().for_each(|w| *w = f32::from_bits(w.to_bits() & !0x1fff));
    let mut mixed = w.clone();
    mixed[(n - 1) * k..].copy_from_slice(&random(k, 3));
    for isa in Isa::available() {
        let [w, mixed] =
            [&w, &mixed].map(|w| PackedLinear::pack(isa, ComputeType::F32, w, n, k, None));
        let [y, y_mixed] = [&w, &mixed].map(|w| linear(isa, &x, &[w], Activation::None));
        let both = linear(isa, &x, &[&w, &mixed], Activation::None);
        for (i, both) in both.chunks(2 * n).enumerate() {
            let (y, y_mixed) = (&y[i * n..][..n], &y_mixed[i * n..][..n]);
            assert_eq!(both, [y, y_mixed].concat(), "{}", isa.name());
            assert_eq!(y[..n - 1], y_mixed[..n - 1], "{}", isa.name());
        }
    }
}

#[test]
fn a_row_does_not_depend_on_other_rows_or_on_threads() {
    let (n, k) = (scaled(70, 3), scaled(1700, 20));
    let x = random(scaled(57, 5) * k, 1);
    for (isa, compute_type) in isas_and_compute_types() {
        let w = PackedLinear::pack(isa, compute_type, &random(n * k, 2), n, k, None);
        let y = linear(isa, &x, &[&w], Activation::Gelu);
        for (i, row) in x.chunks(k).enumerate() {
            let alone = linear(isa, row, &[&w], Activation::Gelu);
            assert_eq!(alone, y[i * n..][..n], "{compute_type:?} on {}", isa.name());
        }
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| linear(isa, &x, &[&w], Activation::Gelu));
            assert_eq!(got, y, "{compute_type:?} on {threads} threads, {}", isa.name());
        }
    }
}

#[test]
fn a_layer_without_inputs_returns_its_bias() {
    for (isa, compute_type) in isas_and_compute_types() {
        let no_outputs = PackedLinear::pack(isa, compute_type, &[], 0, 2, None);
        let no_inputs = PackedLinear::pack(isa, compute_type, &[], 3, 0, Some(&[1.0, 2.0, 3.0]));
        let weights = [[&no_outputs], [&no_inputs]];
        let layers = weights.each_ref().map(|w| LinearMap {
            weights: w,
            activation: Activation::None,
            factor: None,
        });
        let y = chain_f32(isa, Rows::F32(&[5.0, 6.0, 7.0, 8.0]), &layers);
        assert_eq!(y, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], "{compute_type:?} on {}", isa.name());
    }
}

#[test]
fn a_chain_equals_its_layers_one_by_one_to_the_bit() {
    // The first layer has two weights side by side. The width of the first weight is a multiple of
    // every nr (64) or not (50 and 33). The layer's k is up to 1,601, which in f32 and bf16 is more
    // than one range of kc lanes.
    let shapes = [(130, [50, 41], 40), (70, [64, 41], 5), (scaled(1601, 5), [33, 9], 3)];
    for (k, widths, n) in shapes.into_iter().skip(scaled(0, 2)) {
        for (isa, compute_type) in isas_and_compute_types() {
            let pack = |out: usize, input: usize, seed, bias: Option<&[f32]>| {
                let weight = random(out * input, seed);
                PackedLinear::pack(isa, compute_type, &weight, out, input, bias)
            };
            let first = widths.map(|out| pack(out, k, 2, Some(&random(out, 4))));
            let second = pack(n, widths[0] + widths[1], 3, None);
            let layers = [
                LinearMap {
                    weights: &[&first[0], &first[1]],
                    activation: Activation::Gelu,
                    factor: None,
                },
                LinearMap { weights: &[&second], activation: Activation::None, factor: None },
            ];
            for m in [1, 30, 450].into_iter().take(scaled(3, 1)) {
                let x = to_bf16(&random(m * k, 1));
                let apply =
                    |x: &[f32], layer: &LinearMap| linear(isa, x, layer.weights, layer.activation);
                let wide = from_bf16(&x);
                let expected = layers.iter().fold(wide.clone(), |x, layer| apply(&x, layer));
                for threads in [1, 2, 3] {
                    let pool =
                        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let name = format!("{m} rows of {compute_type:?} on {threads}, {}", isa.name());
                    for rows in [Rows::F32(&wide), Rows::Bf16(&x)] {
                        let got = pool.install(|| chain_f32(isa, rows, &layers));
                        assert!(got == expected, "{name}: f32");
                        let got = pool.install(|| chain_bf16(isa, rows, &layers));
                        assert!(got == to_bf16(&expected), "{name}: bf16");
                    }
                }
            }
        }
    }
}

#[test]
fn a_gated_layer_equals_the_product_of_its_layers_to_the_bit() {
    for (k, width, n) in [(130, 91, 40), (70, 64, 5), (scaled(1601, 5), 33, 3)] {
        for (isa, compute_type) in isas_and_compute_types() {
            let pack = |out: usize, input: usize, seed| {
                let (weight, bias) = (random(out * input, seed), random(out, seed + 1));
                PackedLinear::pack(isa, compute_type, &weight, out, input, Some(&bias))
            };
            let (gate, factor, then) = (pack(width, k, 2), pack(width, k, 4), pack(n, width, 6));
            let gated = LinearMap {
                weights: &[&gate],
                activation: Activation::Gelu,
                factor: Some(&factor),
            };
            let then = LinearMap { weights: &[&then], activation: Activation::None, factor: None };
            for m in [1, 30, 450].into_iter().take(scaled(3, 1)) {
                let x = random(m * k, 1);
                let product: Vec<f32> = linear(isa, &x, &[&gate], Activation::Gelu)
                    .into_iter()
                    .zip(linear(isa, &x, &[&factor], Activation::None))
                    .map(|(gate, factor)| gate * factor)
                    .collect();
                let name = format!("{m} rows of {compute_type:?}, {}", isa.name());
                assert!(chain_f32(isa, Rows::F32(&x), &[gated]) == product, "{name}");
                let expected = linear(isa, &product, then.weights, Activation::None);
                for threads in [1, 3] {
                    let pool =
                        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let got = pool.install(|| chain_f32(isa, Rows::F32(&x), &[gated, then]));
                    assert!(got == expected, "{name}, {threads} threads");
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "factor: expected exactly one weight")]
fn a_factor_of_another_width_panics() {
    let pack = |out| {
        let weight = vec![1.0; out];
        PackedLinear::pack(Isa::SCALAR, ComputeType::F32, &weight, out, 1, None)
    };
    let (gate, factor) = (pack(2), pack(3));
    let weights = &[&gate];
    let gated = LinearMap { weights, activation: Activation::Gelu, factor: Some(&factor) };
    chain_f32(Isa::SCALAR, Rows::F32(&[1.0]), &[gated]);
}

#[test]
fn a_value_that_is_not_finite_affects_its_row_only() {
    for (isa, compute_type) in isas_and_compute_types() {
        for special in [f32::NAN, f32::INFINITY] {
            let rows = [[1.0, special, 2.0], [0.0; 3], [1.0, 2.0, 3.0]].concat();
            let ones = PackedLinear::pack(isa, compute_type, &[1.0; 3], 1, 3, None);
            let got = linear(isa, &rows, &[&ones], Activation::None);
            let name = format!("{compute_type:?} on {}", isa.name());
            assert!(!got[0].is_finite(), "{name}: {got:?}");
            assert!(got[1] == 0.0 && (got[2] - 6.0).abs() < 0.02, "{name}: {got:?}");
            let w = PackedLinear::pack(isa, compute_type, &[1.0, special, 1.0], 1, 3, None);
            let got = linear(isa, &rows[6..], &[&w], Activation::None);
            assert!(!got[0].is_finite(), "{name}: {got:?}");
        }
    }
}

/// The rows of the product, pooled in their order. The bits are those of the product, and do not
/// depend on the other sequences. Sequences begin and end within blocks of rows.
#[test]
fn pooled_products_have_the_bits_of_the_product() {
    const K: usize = 40;
    let (n, out) = (scaled(200, 8), 70);
    let offsets = [0, 1, 1, n / 3, n];
    let (x, w, bias) = (random(n * K, 1), random(out * K, 2), random(out, 3));
    for (isa, compute_type) in isas_and_compute_types() {
        let packed = PackedLinear::pack(isa, compute_type, &w, out, K, Some(&bias));
        let product = linear(isa, &x, &[&packed], Activation::None);
        for pooling in [RowPooling::Max, RowPooling::SumLog1p, RowPooling::SumLog1pTwice] {
            let got = pooled_linear(isa, Rows::F32(&x), &packed, &offsets, pooling);
            for (i, range) in offsets.windows(2).enumerate() {
                let pooled = |column: usize| {
                    let values = (range[0]..range[1]).map(|row| product[row * out + column]);
                    match pooling {
                        RowPooling::Max => values.fold(f32::NEG_INFINITY, f32::max),
                        RowPooling::SumLog1p => values.map(|x| log1pf(x.max(0.0))).sum(),
                        RowPooling::SumLog1pTwice => {
                            values.map(|x| log1pf(log1pf(x.max(0.0)))).sum()
                        }
                    }
                };
                let expected: Vec<f32> = (0..out).map(pooled).collect();
                assert_eq!(got[i * out..][..out], expected, "{} {compute_type:?}", isa.name());
            }
            if compute_type != ComputeType::Int8 {
                let mut x = x.clone();
                x[K + 1] = f32::NAN; // in the first row of sequence 2
                let got = pooled_linear(isa, Rows::F32(&x), &packed, &offsets, pooling);
                assert!(got[2 * out..3 * out].iter().all(|x| x.is_nan()), "{}", isa.name());
                assert!(got[3 * out..].iter().all(|x| x.is_finite()), "{}", isa.name());
            }
            let part = &x[offsets[2] * K..offsets[3] * K];
            let alone = [0, part.len() / K];
            let alone = pooled_linear(isa, Rows::F32(part), &packed, &alone, pooling);
            assert_eq!(alone, got[2 * out..3 * out]);
        }
    }
}
