//! Kernels at the sizes of BERT-base, and the CPU's peak rate:
//! `cargo bench -p encodle-benches --bench kernels`.
//!
//! An item of a matrix product or of attention is one operation (a multiply-add is two), so Gitem/s
//! is GFLOP/s. Each bench checks some elements of its result before it measures.

use std::fmt;

use candle_core::cpu::erf::erf_f64;
use divan::{
    Bencher, black_box,
    counter::{BytesCount, ItemsCount},
};
use half::{bf16, f16};
use mha_kernels::{
    Activation, Attention, ComputeType, EmbeddingTable, Isa, Lookup, PackedLinear, RowNorm,
    Sequence, Strided, add_norm, attention_bf16, attention_f32, embed_layer_norm, linear,
    mean_pool, peak,
};
use ops::{MaxSim, VectorSlice};

const COMPUTE_TYPES: [ComputeType; 3] = [ComputeType::F32, ComputeType::Bf16, ComputeType::Int8];
const WIDTH: usize = 768;
const HEADS: usize = 12;
const ROWS: usize = 1024;
const EPS: f32 = 1e-12;

fn main() {
    println!("{} on {} threads", isa().name(), rayon::current_num_threads());
    for compute_type in COMPUTE_TYPES {
        let best = (0..5).map(|_| peak(isa(), compute_type)).fold(0.0, f64::max);
        println!("peak in {compute_type:?}: {:.1} GFLOP/s", best / 1e9);
    }
    divan::main();
}

fn isa() -> Isa {
    Isa::get().expect("MHA_ISA names an instruction set of this machine")
}

/// Pseudo-random values in −1..1.
fn random(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

#[track_caller]
fn assert_close(got: f32, expected: f64, tolerance: f64) {
    assert!((f64::from(got) - expected).abs() <= tolerance, "got {got}, expected {expected}");
}

/// One element of the layer normalisation of a row, with weight 1 and bias 0.
fn normalised(row: &[f64], column: usize) -> f64 {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / row.len() as f64;
    (row[column] - mean) / variance.sqrt()
}

/// A product of an input `(m, k)` and a weight `(n, k)`.
#[derive(Clone, Copy)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    activation: Activation,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { m, n, k, activation } = self;
        write!(f, "{m}×{n}×{k}, {activation:?}")
    }
}

const fn shape(m: usize, n: usize, k: usize, activation: Activation) -> Shape {
    Shape { m, n, k, activation }
}

const SHAPES: [Shape; 4] = [
    shape(28, 768, 3072, Activation::None),
    shape(128, 2304, 768, Activation::None),
    shape(1024, 3072, 768, Activation::Gelu),
    shape(1024, 768, 3072, Activation::None),
];

/// Benches a matrix product.
///
/// Tolerances: a sum in f32 reaches 60, where one rounding error is up to 2e-6, and several such
/// errors add up. `unpack` returns the weights as they are multiplied, so the error of bf16 and
/// int8 is that of x: in bf16 up to 2⁻⁹, as |x| < 1; in int8 up to half a step of 4/255, as a
/// rotated row spans about 4. For a sum of k products, 2⁻⁹·√k is four standard deviations of the
/// error in bf16, and 2⁻⁶·√k is six in int8. The sums themselves have a standard deviation of √k/3.
fn product(bencher: Bencher, compute_type: ComputeType, Shape { m, n, k, activation }: Shape) {
    let (x, w) = (random(m * k, 1), random(n * k, 2));
    let w = PackedLinear::pack(isa(), compute_type, &w, n, k, None);
    let y = linear(isa(), &x, &[&w], activation);
    assert_eq!(y.len(), m * n);
    let activated = |x: f64| match activation {
        Activation::None => x,
        Activation::Gelu => x * 0.5 * (1.0 + erf_f64(x / 2f64.sqrt())),
        other => panic!("no reference for {other:?}"),
    };
    let tolerance = match compute_type {
        ComputeType::F32 => 5e-5,
        ComputeType::Bf16 => 2f64.powi(-9) * (k as f64).sqrt(),
        ComputeType::Int8 => 2f64.powi(-6) * (k as f64).sqrt(),
    };
    let unpacked = w.unpack();
    for (i, j) in [(0, 0), (m / 2, n / 3), (m - 1, n - 1)] {
        let (x, w) = (&x[i * k..][..k], &unpacked[j * k..][..k]);
        let dot: f64 = x.iter().zip(w).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
        assert_close(y[i * n + j], activated(dot), tolerance);
    }
    let operations = ItemsCount::new(2 * m * n * k);
    bencher.counter(operations).bench(|| linear(isa(), black_box(&x), &[&w], activation));
}

#[divan::bench(args = SHAPES)]
fn linear_f32(bencher: Bencher, shape: Shape) {
    product(bencher, ComputeType::F32, shape);
}

#[divan::bench(args = SHAPES)]
fn linear_bf16(bencher: Bencher, shape: Shape) {
    product(bencher, ComputeType::Bf16, shape);
}

#[divan::bench(args = SHAPES)]
fn linear_int8(bencher: Bencher, shape: Shape) {
    product(bencher, ComputeType::Int8, shape);
}

/// The number of sequences, and the tokens of each.
const RAGGED: [(usize, usize); 3] = [(64, 28), (8, 128), (1, 512)];

/// The conversions and the entry point of an element type.
struct Element<T> {
    from_f32: fn(f32) -> T,
    to_f32: fn(T) -> f32,
    attention: fn(Isa, Attention<T>) -> Vec<T>,
}

/// Benches attention of ragged sequences. q, k and v are columns of one `(N, 3·E)` matrix, the
/// output of one matrix product.
fn ragged_attention<T: Copy + Sync>(
    bencher: Bencher,
    element: Element<T>,
    (sequences, tokens): (usize, usize),
    tolerance: f64,
) {
    let Element { from_f32, to_f32, attention } = element;
    let (n, d) = (sequences * tokens, WIDTH / HEADS);
    let qkv: Vec<T> = random(n * 3 * WIDTH, 1).into_iter().map(from_f32).collect();
    let [q, k, v] = [0, 1, 2].map(|i| {
        let strides = [n * 3 * WIDTH, d, 3 * WIDTH];
        Strided { data: &qkv[i * WIDTH..], strides, dims: [1, HEADS, n, d] }
    });
    let sequence = |i: usize| {
        let tokens = i * tokens..(i + 1) * tokens;
        Sequence { b: 0, queries: tokens.clone(), keys: tokens, first_query: 0 }
    };
    let sequences: Vec<Sequence> = (0..sequences).map(sequence).collect();
    let scale = 1.0 / (d as f32).sqrt();
    let args = Attention::new([q, k, v], &sequences, scale);

    let (head, t, column) = (HEADS - 1, n - 1, 5);
    let row = |x: Strided<T>, t| -> Vec<f64> {
        x.data[t * 3 * WIDTH + head * d..][..d].iter().map(|&x| to_f32(x).into()).collect()
    };
    let (mut sum, mut weighted_value) = (0.0, 0.0);
    for s in n - tokens..n {
        let score: f64 = row(q, t).iter().zip(row(k, s)).map(|(q, k)| q * k).sum();
        let weight = (score * f64::from(scale)).exp();
        sum += weight;
        weighted_value += weight * row(v, s)[column];
    }
    let out = attention(isa(), args);
    let got = to_f32(out[t * WIDTH + head * d + column]);
    assert_close(got, weighted_value / sum, tolerance);

    let operations = ItemsCount::new(4 * n * tokens * WIDTH);
    bencher.counter(operations).bench(|| attention(isa(), black_box(args)));
}

#[divan::bench(name = "attention_f32", args = RAGGED)]
fn ragged_attention_f32(bencher: Bencher, lengths: (usize, usize)) {
    let element = Element { from_f32: |x| x, to_f32: |x| x, attention: attention_f32 };
    ragged_attention(bencher, element, lengths, 1e-6);
}

/// Tolerance: the softmax weights and the output are rounded to bf16, with relative errors of up to
/// 2⁻⁹.
#[divan::bench(name = "attention_bf16", args = RAGGED)]
fn ragged_attention_bf16(bencher: Bencher, lengths: (usize, usize)) {
    let element = Element {
        from_f32: |x| bf16::from_f32(x).to_bits(),
        to_f32: |x| bf16::from_bits(x).to_f32(),
        attention: attention_bf16,
    };
    ragged_attention(bencher, element, lengths, 5e-3);
}

#[divan::bench(name = "add_layer_norm")]
fn residual_layer_norm(bencher: Bencher) {
    let (x, y) = (random(ROWS * WIDTH, 1), random(ROWS * WIDTH, 2));
    let (weight, bias) = (vec![1.0; WIDTH], vec![0.0; WIDTH]);
    let norm = RowNorm::Layer { weight: &weight, bias: &bias, eps: EPS };
    let run = || add_norm(isa(), black_box(&x), Some(&y), norm);

    let last = (ROWS - 1) * WIDTH;
    let row = x[last..].iter().zip(&y[last..]).map(|(&x, &y)| f64::from(x) + f64::from(y));
    assert_close(run()[last + 7], normalised(&row.collect::<Vec<_>>(), 7), 1e-5);

    bencher.counter(BytesCount::of_many::<f32>(3 * ROWS * WIDTH)).bench(run);
}

#[divan::bench(name = "add_rms_norm")]
fn residual_rms_norm(bencher: Bencher) {
    let (x, y) = (random(ROWS * WIDTH, 1), random(ROWS * WIDTH, 2));
    let norm = RowNorm::Rms { weight: &[1.0; WIDTH], eps: EPS };
    let run = || add_norm(isa(), black_box(&x), Some(&y), norm);

    let last = (ROWS - 1) * WIDTH;
    let row = x[last..].iter().zip(&y[last..]).map(|(&x, &y)| f64::from(x) + f64::from(y));
    let row: Vec<f64> = row.collect();
    let mean_square = row.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64;
    assert_close(run()[last + 7], row[7] / (mean_square + f64::from(EPS)).sqrt(), 1e-5);

    bencher.counter(BytesCount::of_many::<f32>(3 * ROWS * WIDTH)).bench(run);
}

#[divan::bench(name = "embed_layer_norm")]
fn embedding(bencher: Bencher) {
    let tables = [30_522, 2, 512].map(|rows| (rows, random(rows * WIDTH, rows as u32)));
    let ids = tables
        .each_ref()
        .map(|(rows, _)| -> Vec<u32> { (0..ROWS).map(|i| (i * 7919 % rows) as u32).collect() });
    let lookups =
        [0, 1, 2].map(|i| Lookup { table: EmbeddingTable::F32(&tables[i].1), ids: &ids[i] });
    let (weight, bias) = (vec![1.0; WIDTH], vec![0.0; WIDTH]);
    let run = || embed_layer_norm(isa(), black_box(lookups), &weight, &bias, EPS);

    let row = |column| -> f64 {
        let last = tables.iter().zip(&ids).map(|((_, table), ids)| (table, ids[ROWS - 1]));
        last.map(|(table, id)| f64::from(table[id as usize * WIDTH + column])).sum()
    };
    let row: Vec<f64> = (0..WIDTH).map(row).collect();
    let out = run().expect("the ids are within their tables");
    assert_close(out[(ROWS - 1) * WIDTH + 7], normalised(&row, 7), 1e-5);

    bencher.counter(BytesCount::of_many::<f32>(4 * ROWS * WIDTH)).bench(run);
}

#[divan::bench(name = "mean_pool")]
fn pooling(bencher: Bencher) {
    let x = random(ROWS * WIDTH, 1);
    let offsets: Vec<usize> = (0..=ROWS).step_by(32).collect();
    let run = || mean_pool(isa(), black_box(&x), WIDTH, &offsets);

    let column = x[(ROWS - 32) * WIDTH..].iter().skip(7).step_by(WIDTH);
    let mean = column.map(|&x| f64::from(x)).sum::<f64>() / 32.0;
    assert_close(run()[(ROWS / 32 - 1) * WIDTH + 7], mean, 1e-6);

    bencher.counter(BytesCount::of_slice(&x[..])).bench(run);
}

/// MaxSim of a query of 32 vectors and documents of 60 vectors each, of 128 values in f16.
#[divan::bench(name = "max_sim", args = [10_000])]
fn bench_max_sim(bencher: Bencher, documents: usize) {
    const QUERY: usize = 32;
    const VECTORS: usize = 60;
    const WIDTH: usize = 128;
    let query = random(QUERY * WIDTH, 1);
    let values = random(documents * VECTORS * WIDTH, 2);
    let values: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
    let offsets: Vec<usize> = (0..=documents).map(|i| i * VECTORS).collect();
    let max_sim = MaxSim::new(&query, WIDTH).expect("an instruction set of this machine");
    let scores = max_sim.scores(VectorSlice::F16(&values), &offsets);
    let dot = |q: &[f32], d: &[f16]| -> f64 {
        q.iter().zip(d).map(|(q, d)| f64::from(*q) * d.to_f64()).sum()
    };
    let maximum =
        |q| values[..VECTORS * WIDTH].chunks(WIDTH).map(|d| dot(q, d)).fold(-1e9, f64::max);
    assert_close(scores[0], query.chunks(WIDTH).map(maximum).sum(), 1e-3);
    let operations = 2 * QUERY * documents * VECTORS * WIDTH;
    let bencher = bencher.counter(ItemsCount::new(operations));
    let bencher = bencher.counter(BytesCount::new(values.len() * 2));
    bencher.bench(|| max_sim.scores(VectorSlice::F16(black_box(&values)), &offsets));
}
