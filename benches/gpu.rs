//! BERT-base at random on a GPU: checked against the CPU's f32, then timed. Everything is made on the
//! spot, so that the program alone can be taken to a machine with a GPU:
//! `cargo bench --features cuda --bench gpu`; benches/peers/gpu.py runs it beside PyTorch.
//!
//! A line of JSON for each case: sequences are packed, ids are sent and all of the hidden states
//! waited for in every round.

use std::{collections::HashMap, error::Error, time::Instant};

use candle_core::{DType, Device, Device::Cpu, Tensor};
use candle_nn::{VarBuilder, VarMap};
use encoder::{BertConfig, BertModel, PackedBatch, Precision};
use mha::Init;
use rand::{Rng, SeedableRng, rngs::StdRng};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const WARM_UPS: usize = 10;
const ROUNDS: usize = 30;

fn main() -> Result {
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) => {
            println!("{{\"skipped\": \"no GPU that works\"}}");
            eprintln!("{error}");
            return Ok(());
        }
    };
    let weights = weights()?;
    let exact = model(&weights, Precision::F32, &Cpu)?;
    println!("{{\"gemm_bf16_tflops\": {:.1}}}", gemm(&device)?);
    for (name, precision) in
        [("f32", Precision::F32), ("f16", Precision::F16), ("bf16", Precision::Bf16)]
    {
        let model = model(&weights, precision, &device)?;
        check(name, &model, &exact)?;
        for (case, lengths) in [
            ("1x32", vec![32; 1]),
            ("64x128", vec![128; 64]),
            ("32x512", vec![512; 32]),
            ("mixed", mixed(1024)),
        ] {
            let batch = batch(&lengths)?;
            let seconds = median(|| wait(&model.forward_packed(&batch)?))?;
            println!(
                "{{\"dtype\": \"{name}\", \"case\": \"{case}\", \"tokens\": {}, \"ms\": {:.3}, \
                 \"tokens_per_second\": {:.0}}}",
                batch.tokens(),
                seconds * 1e3,
                batch.tokens() as f64 / seconds
            );
        }
    }
    Ok(())
}

/// BERT-base's, as they are before training.
fn weights() -> Result<HashMap<String, Tensor>> {
    let vars = VarMap::new();
    let vb = Init::Bert { initializer_range: 0.02 }.var_builder(&vars, 1, DType::F32, &Cpu);
    BertModel::new(&BertConfig::bert_base(), false, vb)?;
    let vars = vars.data().lock().map_err(|error| error.to_string())?;
    Ok(vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect())
}

fn model(
    weights: &HashMap<String, Tensor>,
    precision: Precision,
    device: &Device,
) -> Result<BertModel> {
    let (dtype, format) = precision.on(device)?;
    let config = BertConfig { format, ..BertConfig::bert_base() };
    let weights =
        weights.iter().map(|(name, x)| Ok((name.clone(), x.to_dtype(dtype)?.to_device(device)?)));
    let weights = weights.collect::<candle_core::Result<_>>()?;
    Ok(BertModel::new(&config, false, VarBuilder::from_tensors(weights, dtype, device))?)
}

fn batch(lengths: &[usize]) -> Result<PackedBatch> {
    let mut random = StdRng::seed_from_u64(20260);
    let mut batch = PackedBatch::default();
    for &length in lengths {
        let ids: Vec<u32> = (0..length).map(|_| random.random_range(0..30_522)).collect();
        batch.push(&ids, &vec![0; length])?;
    }
    Ok(batch)
}

/// Lengths from 6 to 128, log-normal, 28 in the mean.
fn mixed(n: usize) -> Vec<usize> {
    let mut random = StdRng::seed_from_u64(20261);
    let mut normal = || {
        let (u, v): (f64, f64) = (random.random_range(1e-9..1.0), random.random());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    (0..n).map(|_| ((3.12 + 0.65 * normal()).exp() as usize).clamp(6, 128)).collect()
}

/// Waits until a tensor is there.
fn wait(x: &Tensor) -> Result {
    x.device().synchronize()?;
    Ok(())
}

/// Seconds of a call, the median of many.
fn median(mut call: impl FnMut() -> Result) -> Result<f64> {
    for _ in 0..WARM_UPS {
        call()?;
    }
    let mut times = vec![];
    for _ in 0..ROUNDS {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Fails unless the hidden states are the CPU's: to 1e-4 in f32, to a cosine of 0.9999 otherwise.
fn check(name: &str, model: &BertModel, exact: &BertModel) -> Result {
    let batch = batch(&[1, 63, 64, 65, 512, 7])?;
    let got = model.forward_packed(&batch)?.to_dtype(DType::F32)?.to_device(&Cpu)?;
    let expected = exact.forward_packed(&batch)?; // (N, E)
    let difference = (&got - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    let dot = |x: &Tensor, y: &Tensor| (x * y)?.sum(1);
    let lengths = (dot(&got, &got)? * dot(&expected, &expected)?)?.sqrt()?;
    let cosine = (dot(&got, &expected)? / lengths)?.min(0)?.to_scalar::<f32>()?;
    eprintln!("{name}: largest difference {difference:.1e}, lowest cosine {cosine:.6}");
    let close = if name == "f32" { difference <= 1e-4 } else { cosine >= 0.9999 };
    if close { Ok(()) } else { Err(format!("{name} differs from the CPU").into()) }
}

/// What the GPU multiplies at most, in 10¹² operations a second.
fn gemm(device: &Device) -> Result<f64> {
    const N: usize = 8192;
    let x = Tensor::randn(0f32, 1., (N, N), device)?.to_dtype(DType::BF16)?;
    let seconds = median(|| wait(&x.matmul(&x)?))?;
    Ok(2.0 * (N as f64).powi(3) / seconds / 1e12)
}
