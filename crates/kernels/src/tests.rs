//! Every path that this machine has, against definitions in f64.

use crate::{gemm::bf16, *};

/// Miri does about a thousand products a second.
pub(crate) const fn size(usual: usize, in_miri: usize) -> usize {
    if cfg!(miri) { in_miri } else { usual }
}

/// Numbers between −1 and 1 that look random.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// As bf16.
fn narrow(x: &[f32]) -> Vec<u16> {
    x.iter().map(|&x| bf16(x)).collect()
}

fn wide(x: &[u16]) -> Vec<f32> {
    x.iter().map(|&x| f32::from_bits(u32::from(x) << 16)).collect()
}

#[track_caller]
fn assert_close(name: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let difference = (f64::from(got) - expected).abs();
        assert!(difference <= tolerance, "{name}: {got} for {expected} at {i}");
    }
}

const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::Int8];

/// Each whole block of 64 times Hadamard's matrix over √64, which is its own inverse.
fn rotated(row: &[f64]) -> Vec<f64> {
    let sign = |i: usize, j: usize| [0.125, -0.125][(i & j).count_ones() as usize % 2];
    let (blocks, rest) = row.as_chunks::<64>();
    let dot = |block: &[f64; 64], i| block.iter().enumerate().map(|(j, x)| x * sign(i, j)).sum();
    let blocks = blocks.iter().flat_map(|block| (0..64).map(|i| dot(block, i)));
    blocks.chain(rest.iter().copied()).collect()
}

/// The rows of `x` as a format has them.
fn rounded(format: Format, x: &[f32], k: usize) -> Vec<f64> {
    let row = |row: &[f32]| -> Vec<f64> {
        let row: Vec<f64> = row.iter().map(|&x| x.into()).collect();
        match format {
            Format::F32 => row,
            Format::Bf16 => {
                let step = |x: f64| 2f64.powi(x.abs().log2().floor() as i32 - 7);
                row.into_iter().map(|x| (x / step(x)).round_ties_even() * step(x)).collect()
            }
            Format::Int8 => {
                let row = rotated(&row);
                let most = row.iter().fold(0f64, |most, &x| most.max(x));
                let least = row.iter().fold(0f64, |least, &x| least.min(x));
                let scale = (most - least) / 255.0;
                let zero = (-least / scale).round();
                let number = |x: f64| (x / scale + zero).round().clamp(0.0, 255.0);
                let nearest = |x: f64| (number(x) - zero) * scale;
                rotated(&row.into_iter().map(nearest).collect::<Vec<_>>())
            }
        }
    };
    x.chunks(k).flat_map(row).collect()
}

/// Sums of up to 1,600 products reach 20 in size, where a rounding is up to 1e-6; the errors of so
/// many add up to some 20 times that. Of int8, a number of x between two steps may become the other
/// one in f32, and a step is up to 1/50. A weight there is off by half a step at most, and by the
/// mean of 64 such errors after the rotation.
#[test]
fn a_linear_map_is_its_definition_and_the_same_to_the_bit_on_every_path() {
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
    let shapes = shapes.into_iter().filter(|(m, n, k)| m * n * k < size(usize::MAX, 3000));
    for ((m, n, k), format) in shapes.flat_map(|shape| FORMATS.map(|format| (shape, format))) {
        let (x, w, bias) = (numbers(m * k, 1), numbers(n * k, 2), numbers(n, 3));
        let pack = |isa, bias| PackedLinear::pack(isa, format, &w, n, k, bias);
        let packed = pack(Isa::SCALAR, Some(&bias));
        let (x_rounded, w_rounded) = (rounded(format, &x, k), packed.unpack());
        match format {
            Format::F32 => assert_eq!(w_rounded, w),
            Format::Bf16 => assert_close("bf16", &w_rounded, &rounded(format, &w, k), 0.0),
            Format::Int8 => {
                let w: Vec<f64> = w.iter().map(|&w| w.into()).collect();
                assert_close("int8", &w_rounded, &w, 0.03);
            }
        }
        let dot = |i: usize, j: usize| -> f64 {
            (0..k).map(|s| x_rounded[i * k + s] * f64::from(w_rounded[j * k + s])).sum()
        };
        let all = (0..m).flat_map(|i| (0..n).map(move |j| (i, j)));
        let expected: Vec<f64> = all.map(|(i, j)| dot(i, j) + f64::from(bias[j])).collect();
        let tolerance = if format == Format::Int8 { 0.02 } else { 3e-5 };
        let scalar = linear(Isa::SCALAR, &x, &[&packed], Activation::None);
        for isa in Isa::all() {
            let name = format!("{} {format:?} {m}×{n}×{k}", isa.name());
            let (packed, none) = (pack(isa, Some(&bias)), pack(isa, None));
            assert_eq!(packed.unpack(), w_rounded, "{name}");
            let got = linear(isa, &x, &[&packed], Activation::None);
            assert_close(&name, &got, &expected, tolerance);
            let order_of_its_own = isa == Isa::AMX && format != Format::Int8;
            assert!(got == scalar || order_of_its_own, "{name}");
            let twice = linear(isa, &x, &[&packed, &none], Activation::Relu);
            for (i, row) in twice.chunks(2 * n).enumerate() {
                let relu: Vec<f64> = expected[i * n..][..n].iter().map(|y| y.max(0.0)).collect();
                assert_close(&name, &row[..n], &relu, tolerance);
            }
        }
    }
}

/// However numbers of f32 are multiplied: the error is no larger than that of fused multiply-adds in
/// order, numbers may be small and large, and what is not finite stays so.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn products_of_f32_are_as_near_as_fused_ones_on_every_path() {
    let (m, n, k) = (33, 40, 1700);
    let (x, w) = (numbers(m * k, 1), numbers(n * k, 2));
    let products = |isa, x: &[f32], w: &[f32]| {
        let w = PackedLinear::pack(isa, Format::F32, w, n, k, None);
        linear(isa, x, &[&w], Activation::None)
    };
    let rms = |y: &[f32]| {
        let squares = y.iter().enumerate().map(|(at, &y)| {
            let (x, w) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
            let exact: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            (f64::from(y) - exact).powi(2)
        });
        (squares.sum::<f64>() / y.len() as f64).sqrt()
    };
    let of_scalar = rms(&products(Isa::SCALAR, &x, &w));
    for isa in Isa::all() {
        let (name, y) = (isa.name(), products(isa, &x, &w));
        assert!(rms(&y) <= of_scalar, "{name}: {} beside {of_scalar}", rms(&y));
        let times = |numbers: &[f32], power| -> Vec<f32> {
            numbers.iter().map(|x| x * 2f32.powi(power)).collect()
        };
        for (of_x, of_w) in [(-75, 60), (60, -75), (-60, 0), (0, 60), (100, -40)] {
            let got = products(isa, &times(&x, of_x), &times(&w, of_w));
            assert_eq!(got, times(&y, of_x + of_w), "{name}: 2^{of_x} and 2^{of_w}");
        }
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fff_ffff)] {
            for (of_x, at) in [(true, 5), (true, 1699), (false, 6), (false, 1031)] {
                let (mut x, mut w) = (x.clone(), w.clone());
                let spoilt = if of_x { &mut x } else { &mut w };
                spoilt[k + at] = odd;
                let got = products(isa, &x, &w);
                for (i, (got, y)) in got.into_iter().zip(&y).enumerate() {
                    let spoilt = if of_x { i / n == 1 } else { i % n == 1 };
                    assert!(if spoilt { !got.is_finite() } else { got == *y }, "{name}: {odd}");
                }
            }
        }
    }
}

/// Numbers that were f16 may be held in less, beside others that are not; it changes no bit.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn a_column_does_not_depend_on_how_exact_the_others_are() {
    let (m, n, k) = (35, 40, 1700);
    let (x, mut w) = (numbers(m * k, 1), numbers(n * k, 2));
    w.iter_mut().for_each(|w| *w = f32::from_bits(w.to_bits() & !0x1fff));
    let mut others = w.clone();
    others[(n - 1) * k..].copy_from_slice(&numbers(k, 3));
    for isa in Isa::all() {
        let [w, others] =
            [&w, &others].map(|w| PackedLinear::pack(isa, Format::F32, w, n, k, None));
        let [y, beside] = [&w, &others].map(|w| linear(isa, &x, &[w], Activation::None));
        let both = linear(isa, &x, &[&w, &others], Activation::None);
        for (i, both) in both.chunks(2 * n).enumerate() {
            let (y, beside) = (&y[i * n..][..n], &beside[i * n..][..n]);
            assert_eq!(both, [y, beside].concat(), "{}", isa.name());
            assert_eq!(y[..n - 1], beside[..n - 1], "{}", isa.name());
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_others_or_on_threads() {
    let (n, k) = (size(70, 3), size(1700, 20));
    let x = numbers(size(57, 5) * k, 1);
    for (isa, format) in Isa::all().into_iter().flat_map(|isa| FORMATS.map(|format| (isa, format)))
    {
        let w = PackedLinear::pack(isa, format, &numbers(n * k, 2), n, k, None);
        let all = linear(isa, &x, &[&w], Activation::Gelu);
        for (i, row) in x.chunks(k).enumerate() {
            assert_eq!(linear(isa, row, &[&w], Activation::Gelu), all[i * n..][..n]);
        }
        for threads in [1, 2, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(|| linear(isa, &x, &[&w], Activation::Gelu)), all);
        }
    }
}

/// A sum of no products is the bias, also where a map of no outputs came before.
#[test]
fn nothing_in_is_the_bias() {
    for (isa, format) in Isa::all().into_iter().flat_map(|isa| FORMATS.map(|format| (isa, format)))
    {
        let nothing = PackedLinear::pack(isa, format, &[], 0, 2, None);
        let bias = PackedLinear::pack(isa, format, &[], 3, 0, Some(&[1.0, 2.0, 3.0]));
        let each = [[&nothing], [&bias]];
        let maps = each.each_ref().map(|w| LinearMap { weights: w, activation: Activation::None });
        let y: Vec<f32> = chain(isa, &[5f32, 6.0, 7.0, 8.0], &maps);
        assert_eq!(y, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0], "{format:?} on {}", isa.name());
    }
}

#[test]
fn a_chain_is_one_map_after_another() {
    // Maps side by side whose widths end within a panel, or not, one word, and more of k than a block.
    let shapes = [(130, [50, 41], 40), (70, [64, 41], 5), (size(1601, 5), [33, 7], 3)];
    for (k, widths, n) in shapes.into_iter().skip(size(0, 2)) {
        for (isa, format) in
            Isa::all().into_iter().flat_map(|isa| FORMATS.map(|format| (isa, format)))
        {
            let first = widths.map(|out| {
                PackedLinear::pack(
                    isa,
                    format,
                    &numbers(out * k, 2),
                    out,
                    k,
                    Some(&numbers(out, 4)),
                )
            });
            let between = widths[0] + widths[1];
            let second =
                PackedLinear::pack(isa, format, &numbers(n * between, 3), n, between, None);
            let maps = [
                LinearMap { weights: &[&first[0], &first[1]], activation: Activation::Gelu },
                LinearMap { weights: &[&second], activation: Activation::None },
            ];
            for m in [1, 30, 450].into_iter().take(size(3, 1)) {
                let x = narrow(&numbers(m * k, 1));
                let linear =
                    |x: &[f32], map: &LinearMap| linear(isa, x, map.weights, map.activation);
                let expected = maps.iter().fold(wide(&x), |x, map| linear(&x, map));
                for threads in [1, 2, 3] {
                    let pool =
                        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let got: (Vec<f32>, Vec<u16>) =
                        pool.install(|| (chain(isa, &wide(&x), &maps), chain(isa, &x, &maps)));
                    assert!(
                        got == (expected.clone(), narrow(&expected)),
                        "{m} rows of {format:?} on {threads}, {}",
                        isa.name()
                    );
                }
            }
        }
    }
}

/// The activation of each number, through a map that leaves it as it is.
fn activated(isa: Isa, activation: Activation, x: &[f32]) -> Vec<f32> {
    linear(isa, x, &[&PackedLinear::pack(isa, Format::F32, &[1.0], 1, 1, None)], activation)
}

fn gelu(x: f64) -> f64 {
    0.5 * x * libm::erfc(-x / std::f64::consts::SQRT_2)
}

/// Over all of [−12, 12] in steps of 1/8192, and beyond.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn activations_are_their_definitions() {
    let mut x: Vec<f32> = (-98_304..=98_304).map(|i| i as f32 / 8192.0).collect();
    x.extend([-1e30, -100., -87.5, -20., 20., 87.5, 100., 1e30, 1e-30, -1e-30]);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let gelu_tanh = |x: f64| {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + inner.tanh())
    };
    let mish = |x: f64| x * x.exp().ln_1p().tanh();
    type Definition<'a> = (Activation, &'a dyn Fn(f64) -> f64, f64); // and the error allowed
    let definitions: [Definition; 7] = [
        (Activation::Gelu, &gelu, 1.5e-7),
        (Activation::GeluTanh, &gelu_tanh, 5e-7), // tanh's argument is itself rounded
        (Activation::Relu, &|x| x.max(0.0), 0.0),
        (Activation::Silu, &|x| x * sigmoid(x), 2.5e-7),
        (Activation::Tanh, &f64::tanh, 2.5e-7),
        (Activation::QuickGelu, &|x| x * sigmoid(1.702 * x), 5e-7),
        (Activation::Mish, &|x| if x > 100.0 { x } else { mish(x) }, 3.5e-7),
    ];
    for (activation, definition, tolerance) in definitions {
        for isa in Isa::all() {
            let got = activated(isa, activation, &x);
            let mut worst = (0.0, 0.0);
            for (&x, &got) in x.iter().zip(&got) {
                let expected = definition(f64::from(x));
                // relative where it exceeds 1
                let error = (f64::from(got) - expected).abs() / expected.abs().max(1.0);
                if error > worst.0 || error.is_nan() {
                    worst = (error, x);
                }
            }
            println!("{activation:?} on {}: error {:.1e} at {}", isa.name(), worst.0, worst.1);
            assert!(worst.0 <= tolerance, "{activation:?}, {}: {worst:?}", isa.name());
        }
    }
}

/// Beside factors of bf16: over all of them up to 100.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn gelu_of_rounded_products_is_near() {
    let bits = (0..0x42c8u32).flat_map(|bits| [bits << 16, bits << 16 | 1 << 31]);
    let mut x: Vec<f32> = bits.map(f32::from_bits).filter(|x| *x == 0.0 || x.is_normal()).collect();
    x.extend([1.0, -1.0].map(|x: f32| x * 2f32.powi(100)));
    for isa in Isa::all() {
        let one = PackedLinear::pack(isa, Format::Bf16, &[1.0], 1, 1, None);
        let got = linear(isa, &x, &[&one], Activation::Gelu);
        for (&x, &got) in x.iter().zip(&got) {
            let expected = gelu(f64::from(x));
            let error = (f64::from(got) - expected).abs();
            let allowed = if x < -3.0 { 1e-6 } else { 1.6e-4 * expected.abs() };
            assert!(error <= allowed, "{x} on {}: {got}, {expected}", isa.name());
        }
    }
}

#[test]
fn nan_stays_nan() {
    for isa in Isa::all() {
        for format in FORMATS {
            let one = PackedLinear::pack(isa, format, &[1.0], 1, 1, None);
            let got = linear(isa, &[1.0, f32::NAN], &[&one], Activation::Gelu);
            assert!(got[0] > 0.8 && got[1].is_nan(), "GELU in {format:?} on {}", isa.name());
        }
        for activation in [
            Activation::None,
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::Relu,
            Activation::Silu,
            Activation::Tanh,
            Activation::QuickGelu,
            Activation::Mish,
        ] {
            let got = activated(isa, activation, &[1.0, f32::NAN]);
            assert!(got[0] > 0.0 && got[1].is_nan(), "{activation:?} on {}: {got:?}", isa.name());
        }
        // Among the numbers of a row, as among those of a weight, in every format.
        for format in FORMATS {
            for not_finite in [f32::NAN, f32::INFINITY] {
                let rows = [[1.0, not_finite, 2.0], [0.0; 3], [1.0, 2.0, 3.0]].concat();
                let ones = PackedLinear::pack(isa, format, &[1.0; 3], 1, 3, None);
                let got = linear(isa, &rows, &[&ones], Activation::None);
                assert!(!got[0].is_finite(), "{format:?} on {}: {got:?}", isa.name());
                assert!(got[1] == 0.0 && (got[2] - 6.0).abs() < 0.02, "{got:?}");
                let odd = PackedLinear::pack(isa, format, &[1.0, not_finite, 1.0], 1, 3, None);
                let got = linear(isa, &rows[6..], &[&odd], Activation::None);
                assert!(!got[0].is_finite(), "{format:?} on {}: {got:?}", isa.name());
            }
        }
        // One head of width 1: the second of three keys is not finite, its value is.
        let (q, v) = ([1.0; 3], [1.0, 2.0, 3.0]);
        let run = |second: f32, visible: Option<&[u8]>| {
            let k = [0.0, second, 0.0];
            let strided = |data| Strided { data, strides: [3, 3, 1], dims: [1, 1, 3, 1] };
            let sequences = &[Sequence { b: 0, queries: 0..3, keys: 0..3 }];
            let (q, k, v) = (strided(&q), strided(&k), strided(&v));
            let (keep, bias, causal, scale) = (None, None, None, 1.0);
            let args = Attention { q, k, v, sequences, visible, keep, bias, causal, scale };
            attention(isa, args)
        };
        assert!(run(f32::NAN, None).iter().all(|x| x.is_nan()), "{}", isa.name());
        assert_eq!(run(f32::NAN, Some(&[1, 0, 1])), [2.0; 3], "{}", isa.name());
        // A score of −∞ weighs nothing beside others, and is no number alone.
        assert_eq!(run(f32::NEG_INFINITY, None), [2.0; 3], "{}", isa.name());
        let alone = run(f32::NEG_INFINITY, Some(&[0, 1, 0]));
        assert!(alone.iter().all(|x| x.is_nan()), "{}: {alone:?}", isa.name());
        assert_eq!(run(1.0, Some(&[0; 3])), [0.0; 3], "{}", isa.name());
    }
}

/// Relative, over all of [−87, 88] in steps of 1/2048; half an ulp is up to 6e-8. The other paths
/// do the same operations.
#[test]
#[cfg_attr(miri, ignore = "hours")]
fn exp_is_within_an_ulp() {
    let mut worst = (0.0f64, 0.0);
    for i in -178_176..=180_224 {
        let x = i as f32 / 2048.0;
        // SAFETY: one number at a time needs no instructions.
        let got = unsafe { math::exp::<f32>(x) };
        let expected = f64::from(x).exp();
        let error = (f64::from(got) - expected).abs() / expected;
        if error > worst.0 {
            worst = (error, x);
        }
    }
    println!("exp: relative error {:.2e} at {}", worst.0, worst.1);
    assert!(worst.0 <= f64::from(f32::EPSILON), "{worst:?}");
}

/// Every f16, as a table beside the same in f32.
#[test]
fn f16_is_widened_as_it_is() {
    let every = (0..=u16::MAX).step_by(size(1, 64)).cycle();
    let bits: Vec<u16> = every.take(19 * size(3450, 54)).collect();
    for isa in Isa::all() {
        let ids: Vec<u32> = (0..bits.len() as u32 / 19).collect();
        let ones = vec![0; ids.len()];
        let zeros = Lookup { table: Table::F32(&[0.0; 19]), ids: &ones };
        let embed = |table| {
            let words = Lookup { table, ids: &ids };
            embed_layer_norm(isa, [words, zeros, zeros], &[1.0; 19], &[0.0; 19], 1.0).unwrap()
        };
        let value = |bits: u16| {
            let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
            let size = match exponent {
                0 => fraction * 2f32.powi(-24),
                31 => {
                    if fraction == 0.0 {
                        f32::INFINITY
                    } else {
                        f32::NAN
                    }
                }
                _ => (1024.0 + fraction) * 2f32.powi(exponent - 25),
            };
            if bits < 0x8000 { size } else { -size }
        };
        let wide: Vec<f32> = bits.iter().map(|&bits| value(bits)).collect();
        let (half, wide) = (embed(Table::F16(&bits)), embed(Table::F32(&wide)));
        let same = |(x, y): (&f32, &f32)| x == y || x.is_nan() && y.is_nan();
        assert!(half.iter().zip(&wide).all(same), "{}", isa.name());
        assert!(half.iter().filter(|x| x.is_finite()).count() > bits.len() / 10 * 9);
    }
}

#[test]
fn a_mean_is_of_its_rows_alone() {
    for width in [1, 5, 16, 50] {
        let (x, offsets) = (numbers(11 * width, 1), [0, 1, 8, 11]);
        let mean = |w: &[usize], i: usize| {
            (w[0]..w[1]).map(|row| f64::from(x[row * width + i])).sum::<f64>()
                / (w[1] - w[0]) as f64
        };
        let expected: Vec<f64> =
            offsets.windows(2).flat_map(|w| (0..width).map(move |i| mean(w, i))).collect();
        for isa in Isa::all() {
            let got = mean_pool(isa, &x, width, &offsets);
            assert_close(&format!("{} of {width}", isa.name()), &got, &expected, 3e-7);
        }
    }
    assert_eq!(mean_pool(Isa::SCALAR, &[], 3, &[0]), [] as [f32; 0]);
}

#[test]
fn a_row_is_centred_and_scaled() {
    for width in [1, 3, 16, 17, 50, 384] {
        let rows = size(37, 5);
        let (x, y) = (numbers(rows * width, 1), numbers(rows * width, 2));
        let (weight, bias) = (numbers(width, 3), numbers(width, 4));
        for y in [None, Some(&y[..])] {
            let mut expected = vec![];
            for row in 0..rows {
                let at = |i: usize| row * width + i;
                let z: Vec<f64> =
                    (0..width).map(|i| f64::from(x[at(i)] + y.map_or(0.0, |y| y[at(i)]))).collect();
                let mean = z.iter().sum::<f64>() / width as f64;
                let variance = z.iter().map(|z| (z - mean).powi(2)).sum::<f64>() / width as f64;
                let scale = 1.0 / (variance + 1e-5).sqrt();
                expected
                    .extend((0..width).map(|i| {
                        (z[i] - mean) * scale * f64::from(weight[i]) + f64::from(bias[i])
                    }));
            }
            for isa in Isa::all() {
                let got = add_layer_norm(isa, &x, y, &weight, &bias, 1e-5);
                assert_close(&format!("{} of {width}", isa.name()), &got, &expected, 1e-6);
            }
        }
    }
}

#[test]
fn attention_is_its_definition_on_every_path() {
    check_attention(5, 3);
    check_attention(6, 2); // whole words of bf16
}

/// The keys are more than a block of them, the dims all different; tokens are `apart` by more than
/// they hold, as in a projection of q, k and v side by side.
fn check_attention(d: usize, apart: usize) {
    let [b, h, t, s, value_d] = [2, size(4, 1), size(37, 3), size(600, 34), size(19, 3)];
    let g = h.div_ceil(2);
    let strided = |n: usize, heads: usize, width: usize, seed| {
        let token = heads * width + apart;
        (numbers(b * n * token, seed), [n * token, width, token], [b, heads, n, width])
    };
    let (q, k, v) = (strided(t, h, d, 1), strided(s, g, d, 2), strided(s, g, value_d, 3));
    let of_keys: Vec<u8> = (0..b * s).map(|i| u8::from(i % 5 != 0)).collect();
    let zeros: Vec<u8> = (0..b * t * s).map(|i| u8::from(i / 7 % 3 != 0)).collect();
    let keep = Some(Broadcast { data: &zeros, strides: [t * s, 0, s, 1] });
    let mut added = numbers(h * s, 4);
    added.iter_mut().step_by(11).for_each(|bias| *bias = f32::NEG_INFINITY);
    let bias = Some(Broadcast { data: &added, strides: [0, s, 0, 1] });
    let whole: Vec<Sequence> = (0..b).map(|b| Sequence { b, queries: 0..t, keys: 0..s }).collect();
    let split: Vec<Sequence> = [(0, 0..t / 4, 0..s / 2), (0, t / 4..t, s / 2..s), (1, 0..t, 3..3)]
        .map(|(b, queries, keys)| Sequence { b, queries, keys })
        .into();
    let of_keys = Some(&of_keys[..]);
    for (sequences, visible, keep, bias, causal) in [
        (&whole, None, None, None, None),
        (&whole, of_keys, None, None, None),
        (&whole, None, None, None, Some(233)),
        (&whole, None, keep, None, None),
        (&whole, None, None, bias, None),
        (&split, None, None, None, None),
        (&split, of_keys, keep, bias, Some(2)),
        (&split, of_keys, keep, bias, Some(270)),
    ] {
        let mut expected = vec![0f64; b * t * h * value_d];
        for sequence in sequences {
            for (head, query) in
                (0..h).flat_map(|head| sequence.queries.clone().map(move |query| (head, query)))
            {
                let at = |x: &(Vec<f32>, [usize; 3], [usize; 4]), head, token, i| {
                    f64::from(x.0[sequence.b * x.1[0] + head * x.1[1] + token * x.1[2] + i])
                };
                let told = |s: [usize; 4], key| {
                    sequence.b * s[0] + head * s[1] + query * s[2] + key * s[3]
                };
                let added = |key| bias.map_or(0.0, |x| f64::from(x.data[told(x.strides, key)]));
                let visible = sequence.keys.clone().filter(|&key| {
                    let seen = query - sequence.queries.start;
                    visible.is_none_or(|visible| visible[sequence.b * s + key] == 1)
                        && keep.is_none_or(|keep| keep.data[told(keep.strides, key)] == 1)
                        && causal.is_none_or(|offset| key - sequence.keys.start <= seen + offset)
                });
                let weight = |key: usize| {
                    let dot: f64 = (0..d)
                        .map(|i| at(&q, head, query, i) * at(&k, head / (h / g), key, i))
                        .sum();
                    (dot * 0.7 + added(key)).exp()
                };
                let keys: Vec<(usize, f64)> = visible
                    .map(|key| (key, weight(key)))
                    .filter(|(_, weight)| *weight > 0.0) // a bias of −∞
                    .collect();
                let sum: f64 = keys.iter().map(|(_, weight)| weight).sum();
                for i in 0..value_d {
                    let place = ((sequence.b * t + query) * h + head) * value_d + i;
                    let terms =
                        keys.iter().map(|&(key, w)| w / sum * at(&v, head / (h / g), key, i));
                    expected[place] = terms.sum();
                }
            }
        }
        let name = |isa: Isa, format| format!("{} {format}, D = {d}, {causal:?}", isa.name());
        for isa in Isa::all() {
            let [q, k, v] = [&q, &k, &v].map(|x| Strided { data: &x.0, strides: x.1, dims: x.2 });
            let args = Attention { q, k, v, sequences, visible, keep, bias, causal, scale: 0.7 };
            assert_close(&name(isa, "f32"), &attention(isa, args), &expected, 1e-6);

            let data = [q, k, v].map(|x| narrow(x.data));
            let strided = |x: Strided<f32>, data| {
                let Strided { strides, dims, .. } = x;
                Strided { data, strides, dims }
            };
            let [q, k, v] = [strided(q, &data[0]), strided(k, &data[1]), strided(v, &data[2])];
            let args = Attention { q, k, v, sequences, visible, keep, bias, causal, scale: 0.7 };
            // Weights and values are off by 1/256 of up to 1, and scores of up to 1 too.
            assert_close(&name(isa, "bf16"), &wide(&attention(isa, args)), &expected, 1.2e-2);
        }
    }
}

#[test]
#[should_panic(expected = "each query once")]
fn overlapping_sequences_are_refused() {
    let x = numbers(12, 1);
    let x = Strided { data: &x, strides: [12, 2, 2], dims: [1, 1, 6, 2] };
    let sequence = |queries| Sequence { b: 0, queries, keys: 0..6 };
    let sequences = [sequence(0..4), sequence(3..6)];
    let (visible, keep, bias, causal) = (None, None, None, None);
    let (q, k, v, sequences, scale) = (x, x, x, &sequences[..], 1.0);
    let args = Attention { q, k, v, sequences, visible, keep, bias, causal, scale };
    attention(Isa::SCALAR, args);
}

/// Of up to 70 products, each rounded to 2⁻²⁴ of at most 1.
#[test]
fn cosines_are_their_definition_whatever_they_are_computed_with() {
    for isa in Isa::all() {
        for (n, count, width) in
            [(1, 1, 1), (9, 1, 70), (6, 5, 17), (4, 8, 32), (0, 2, 3), (3, 0, 3)]
        {
            let (rows, queries) = (numbers(n * width, 1), numbers(count * width, 2));
            let dot = |x: &[f32], y: &[f32]| -> f64 {
                x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
            };
            let expected: Vec<f64> = rows
                .chunks(width)
                .flat_map(|x| queries.chunks(width).map(move |q| (x, q)))
                .map(|(x, q)| dot(x, q) / (dot(x, x) * dot(q, q)).sqrt())
                .collect();
            let got = cosines(isa, &rows, &queries, width);
            assert_close(&format!("{isa:?}"), &got, &expected, 2e-6);
            for (i, row) in rows.chunks(width).enumerate() {
                for (j, query) in queries.chunks(width).enumerate() {
                    assert_eq!(cosines(isa, row, query, width), [got[i * count + j]]);
                }
            }
        }
        assert_eq!(cosines(isa, &[0.0; 3], &[1.0; 3], 3), [0.0]);
        assert!(cosines(isa, &[f32::NAN, 0.0], &[1.0, 0.0], 2)[0].is_nan());
    }
}
