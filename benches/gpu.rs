//! Benchmarks models with random weights on a GPU, and compares their results with the CPU in f32:
//! `cargo bench -p encodle-benches --features cuda --bench gpu`. benches/peers/gpu.py compares the
//! times with PyTorch's. The program needs no files, so that it can be copied to a machine with a
//! GPU. Arguments select cases `MODEL/DTYPE/CASE` that contain one of them, for example
//! `bert-base/f16/64x128`, `modernbert` or `/64x128`.
//!
//! The output is a line of JSON per case. A round copies the ids of ragged sequences to the GPU and
//! waits for all hidden states. `ms` is the time between two events on the GPU, `wall_ms` the
//! wall-clock time, and `graph` is true if a CUDA graph was replayed. `gemm_fraction` is the number
//! of operations per second of the matrix products of BERT-base, divided by that of one product of
//! large bf16 matrices. Further lines give the rate of that product and the lengths of the
//! sequences. Without arguments, they also give the memory of a batch of BERT-base without the
//! weights, and the time of attention alone: ours and, with the feature `flash-attn`,
//! candle-flash-attn's.

use std::{collections::HashMap, error::Error, time::Instant};

use candle_core::{
    DType, Device,
    Device::Cpu,
    Tensor,
    cuda_backend::cudarc::driver::{
        result::{device::get_default_mem_pool, mem_pool},
        sys::{
            CUevent_flags::CU_EVENT_DEFAULT, CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        },
    },
};
use candle_nn::{VarBuilder, VarMap};
use encoder::{EncoderConfig, EncoderModel, ModelConfig, Precision, RaggedBatch};
use mha::{AttentionMask, Init, scaled_dot_product_attention};
use rand::{Rng, SeedableRng, rngs::StdRng};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

const WARM_UPS: usize = 10;
const ROUNDS: usize = 30;

/// The seconds after which a case has no further rounds, if it had at least three.
const MAX_SECONDS: f64 = 3.0;

const ALL: &[&str] = &["f32", "f16", "bf16"];
const F16: &[&str] = &["f16"];
const HALF: &[&str] = &["f16", "bf16"];

/// The models: the name, the dtypes, and `config.json` without the sizes that [`config`] adds.
const MODELS: [(&str, &[&str], &str); 9] = [
    ("bert-base", ALL, r#""vocab_size": 30522, "type_vocab_size": 2"#),
    (
        "minilm",
        F16,
        r#""vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6,
            "intermediate_size": 1536"#,
    ),
    (
        "xlm-r-base",
        F16,
        r#""model_type": "xlm-roberta", "vocab_size": 250002, "type_vocab_size": 1,
            "max_position_embeddings": 514, "layer_norm_eps": 1e-5"#,
    ),
    (
        "modernbert-base",
        HALF,
        r#""model_type": "modernbert", "vocab_size": 50368, "num_hidden_layers": 22,
            "intermediate_size": 1152, "max_position_embeddings": 8192"#,
    ),
    (
        "mpnet-base",
        HALF,
        r#""model_type": "mpnet", "vocab_size": 30527, "max_position_embeddings": 514,
            "layer_norm_eps": 1e-5"#,
    ),
    (
        "jina-v2-base",
        HALF,
        r#""model_type": "bert", "vocab_size": 30528, "position_embedding_type": "alibi", "feed_forward_type": "geglu",
            "max_position_embeddings": 8192"#,
    ),
    (
        "gte-base",
        HALF,
        r#""model_type": "new", "vocab_size": 30528, "max_position_embeddings": 8192,
            "rope_theta": 500000, "type_vocab_size": 0"#,
    ),
    (
        "nomic-bert-base",
        HALF,
        r#""model_type": "nomic_bert", "vocab_size": 30528, "max_position_embeddings": 8192"#,
    ),
    (
        "deberta-v3-base",
        HALF,
        r#""model_type": "deberta-v2", "vocab_size": 128100, "relative_attention": true,
            "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": true,
            "pos_att_type": "p2c|c2p", "position_biased_input": false, "type_vocab_size": 0"#,
    ),
];

/// The config of a model of [`MODELS`].
fn config(settings: &str) -> Result<EncoderConfig> {
    let mut json: HashMap<String, serde_json::Value> = serde_json::from_str(
        r#"{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
            "intermediate_size": 3072, "max_position_embeddings": 512}"#,
    )?;
    json.extend(serde_json::from_str::<HashMap<_, _>>(&format!("{{{settings}}}"))?);
    Ok(ModelConfig::from_json(&serde_json::to_vec(&json)?, "config.json")?.encoder)
}

fn main() -> Result {
    let configs =
        MODELS.map(|(name, _, settings)| config(settings).map_err(|e| format!("{name}: {e}")));
    let configs = configs.into_iter().collect::<std::result::Result<Vec<_>, _>>()?;
    let device = match Device::new_cuda(0) {
        Ok(device) => device,
        Err(error) => {
            println!("{{\"skipped\": \"no working GPU\"}}");
            eprintln!("{error}");
            return Ok(());
        }
    };
    ops::keep_freed_memory(&device)?; // as the model loaders do
    let rate = gemm(&device)?;
    println!("{{\"gemm_bf16_tflops\": {:.1}}}", rate / 1e12);
    let cases = [
        ("1x32", vec![32; 1]),
        ("4x128", vec![128; 4]),
        ("8x128", vec![128; 8]),
        ("16x128", vec![128; 16]),
        ("64x128", vec![128; 64]),
        ("32x512", vec![512; 32]),
        ("4x8192", vec![8192; 4]),
        ("mixed", mixed(1024)),
    ];
    let lengths: Vec<String> =
        cases.iter().map(|(case, lengths)| format!("\"{case}\": {lengths:?}")).collect();
    println!("{{\"lengths\": {{{}}}}}", lengths.join(", "));
    let only: Vec<String> = std::env::args().skip(1).filter(|x| x != "--bench").collect();
    let selects = |case: &str| only.is_empty() || only.iter().any(|only| case.contains(only));
    let mut failures = vec![];
    for ((name, dtypes, _), config) in MODELS.into_iter().zip(configs) {
        let mut weights_and_model = None;
        for dtype in dtypes {
            let selected: Vec<_> = cases
                .iter()
                .filter(|(case, _)| selects(&format!("{name}/{dtype}/{case}")))
                .filter(|(_, lengths)| lengths.iter().all(|&n| n <= config.max_tokens()))
                .collect();
            if selected.is_empty() {
                continue;
            }
            if weights_and_model.is_none() {
                let weights = weights(&config)?;
                let exact = model(&config, &weights, Precision::F32, &Cpu)?;
                weights_and_model = Some((weights, exact));
            }
            let (weights, exact) = weights_and_model.as_ref().expect("set above");
            let with_memory = name == "bert-base" && only.is_empty();
            let run = || -> Result {
                let precision = match *dtype {
                    "f32" => Precision::F32,
                    "f16" => Precision::F16,
                    _ => Precision::Bf16,
                };
                let model = model(&config, weights, precision, &device)?;
                for (case, lengths) in &selected {
                    time(&device, &model, [name, *dtype, *case], lengths, rate)?;
                }
                if with_memory {
                    let batch = batch(&[512; 64])?;
                    let bytes = memory(&device, || Ok(model.forward_ragged(&batch)?))?;
                    println!(
                        "{{\"dtype\": \"{dtype}\", \"memory_of\": \"64x512\", \
                         \"gigabytes\": {:.2}}}",
                        bytes as f64 / 1e9
                    );
                }
                check(dtype, &model, exact)
            };
            if let Err(error) = run() {
                failures.push(format!("{name}: {error}"));
            }
        }
    }
    for (case, lengths) in cases.iter().filter(|(case, _)| matches!(*case, "64x128" | "32x512")) {
        if only.is_empty() {
            attention(&device, case, lengths)?;
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("; ").into()) }
}

/// Prints the time of a case. `rate` is the number of operations per second of a large product.
fn time(
    device: &Device,
    model: &EncoderModel,
    [name, dtype, case]: [&str; 3],
    lengths: &[usize],
    rate: f64,
) -> Result {
    let batch = batch(lengths)?;
    let graphs = model.cuda_graphs();
    let [seconds, wall] = median(device, || Ok(model.forward_ragged(&batch)?))?;
    let gemm_fraction = match name {
        "bert-base" => format!("{:.3}", operations(model.config(), lengths) / seconds / rate),
        _ => "null".to_string(),
    };
    println!(
        "{{\"model\": \"{name}\", \"dtype\": \"{dtype}\", \"case\": \"{case}\", \"tokens\": {}, \
         \"graph\": {}, \"ms\": {:.3}, \"wall_ms\": {:.3}, \"tokens_per_second\": {:.0}, \
         \"gemm_fraction\": {gemm_fraction}}}",
        batch.tokens(),
        model.cuda_graphs() > graphs,
        seconds * 1e3,
        wall * 1e3,
        batch.tokens() as f64 / seconds,
    );
    Ok(())
}

/// Times attention with BERT-base's heads in f16, and with the feature `flash-attn` also
/// candle-flash-attn; fails if their outputs differ by more than 4e-3.
fn attention(device: &Device, case: &str, lengths: &[usize]) -> Result {
    let (h, e) = (12, 768);
    let batch = batch(lengths)?;
    let dims = (batch.tokens(), h, e / h);
    let random = || Tensor::randn(0f32, 1., dims, device)?.to_dtype(DType::F16);
    let (q, k, v) = (random()?, random()?, random()?);
    let heads = |x: &Tensor| x.transpose(0, 1)?.unsqueeze(0); // (1, H, N, D)
    let mask = AttentionMask::none().with_sequences(batch.offsets())?;
    let ours = || -> Result<Tensor> {
        let (q, k, v) = (heads(&q)?, heads(&k)?, heads(&v)?);
        Ok(scaled_dot_product_attention(&q, &k, &v, &mask, None)?)
    };
    let print = |system: &str, [seconds, _]: [f64; 2]| {
        let ms = seconds * 1e3;
        println!("{{\"attention\": \"{case}\", \"system\": \"{system}\", \"ms\": {ms:.3}}}");
    };
    print("ours", median(device, ours)?);
    #[cfg(feature = "flash-attn")]
    {
        let ends: Vec<u32> = batch.offsets().iter().map(|&end| end as u32).collect();
        let (ends, longest) =
            (Tensor::new(ends, device)?, lengths.iter().copied().max().unwrap_or(0));
        let scale = 1.0 / ((e / h) as f32).sqrt();
        let theirs = || -> Result<Tensor> {
            let (q, k, v, max) = (&q, &k, &v, longest);
            Ok(candle_flash_attn::flash_attn_varlen(q, k, v, &ends, &ends, max, max, scale, false)?)
        };
        let difference = (heads(&theirs()?)? - ours()?)?.to_dtype(DType::F32)?.abs()?;
        let is_finite = is_finite(&difference)?;
        let difference = difference.max_all()?.to_scalar::<f32>()?;
        if !is_finite || difference > 4e-3 {
            return Err(format!("candle-flash-attn differs by {difference} in {case}").into());
        }
        print("candle-flash-attn", median(device, theirs)?);
    }
    Ok(())
}

/// Initial weights.
fn weights(config: &EncoderConfig) -> Result<HashMap<String, Tensor>> {
    let vars = VarMap::new();
    let vb = Init::Bert { initializer_range: 0.02 }.var_builder(&vars, 1, DType::F32, &Cpu);
    EncoderModel::new(config, false, vb)?;
    let vars = vars.data().lock().map_err(|error| error.to_string())?;
    Ok(vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect())
}

fn model(
    config: &EncoderConfig,
    weights: &HashMap<String, Tensor>,
    precision: Precision,
    device: &Device,
) -> Result<EncoderModel> {
    let (dtype, compute_type) = precision.on(device)?;
    let mut config = config.clone();
    config.compute_type = compute_type;
    let weights =
        weights.iter().map(|(name, x)| Ok((name.clone(), x.to_dtype(dtype)?.to_device(device)?)));
    let weights = weights.collect::<candle_core::Result<_>>()?;
    Ok(EncoderModel::new(&config, false, VarBuilder::from_tensors(weights, dtype, device))?)
}

fn batch(lengths: &[usize]) -> Result<RaggedBatch> {
    let mut random = StdRng::seed_from_u64(20260);
    let mut batch = RaggedBatch::default();
    for &length in lengths {
        let ids: Vec<u32> = (0..length).map(|_| random.random_range(0..30_522)).collect();
        batch.push(&ids, &vec![0; length])?;
    }
    Ok(batch)
}

/// `n` log-normal lengths from 6 to 128 with mean 27.
fn mixed(n: usize) -> Vec<usize> {
    let mut random = StdRng::seed_from_u64(20261);
    let mut normal = || {
        let (u, v): (f64, f64) = (random.random_range(1e-9..1.0), random.random());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    };
    (0..n).map(|_| ((3.12 + 0.65 * normal()).exp() as usize).clamp(6, 128)).collect()
}

/// Floating-point operations of the matrix products of BERT.
fn operations(config: &EncoderConfig, lengths: &[usize]) -> f64 {
    let (e, f) = (config.hidden_size, config.intermediate_size);
    let of_sequence = |&t: &usize| 2 * t * (4 * e * e + 2 * e * f) + 4 * t * t * e;
    (config.num_hidden_layers * lengths.iter().map(of_sequence).sum::<usize>()) as f64
}

/// The median time of a call in seconds: between two events on the GPU, and by the wall clock.
fn median(device: &Device, mut call: impl FnMut() -> Result<Tensor>) -> Result<[f64; 2]> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let mut times = [vec![], vec![]];
    let begin = Instant::now();
    for round in 0..WARM_UPS + ROUNDS {
        let is_slow = begin.elapsed().as_secs_f64() > MAX_SECONDS;
        if is_slow && times[0].len() >= 3 {
            break;
        }
        device.synchronize()?;
        let start = Instant::now();
        let from = stream.record_event(Some(CU_EVENT_DEFAULT))?;
        call()?;
        let to = stream.record_event(Some(CU_EVENT_DEFAULT))?;
        device.synchronize()?;
        if round >= WARM_UPS || is_slow {
            times[1].push(start.elapsed().as_secs_f64());
            times[0].push(f64::from(from.elapsed_ms(&to)?) / 1e3);
        }
    }
    Ok(times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }))
}

/// Peak memory of a call in bytes, without the memory in use before it.
fn memory(device: &Device, call: impl FnOnce() -> Result<Tensor>) -> Result<u64> {
    device.synchronize()?;
    let stream = device.as_cuda_device()?.cuda_stream();
    let highest = || -> Result<u64> {
        let mut bytes = 0u64;
        // SAFETY: the device is that of a live context, the pool belongs to the device, and the
        // attribute is a u64.
        unsafe {
            let pool = get_default_mem_pool(stream.context().cu_device())?;
            mem_pool::get_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut bytes).cast())?;
        }
        Ok(bytes)
    };
    let mut zero = 0u64;
    // SAFETY: as above. Writing 0 resets the peak to the memory in use now.
    unsafe {
        let pool = get_default_mem_pool(stream.context().cu_device())?;
        mem_pool::set_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, (&raw mut zero).cast())?;
    }
    let before = highest()?;
    call()?;
    device.synchronize()?;
    Ok(highest()? - before)
}

/// Fails if a hidden state is NaN or infinite, if it differs from the CPU's by more than 1e-4 in
/// f32, or if a token's cosine is below 0.9999 in f16 or bf16.
fn check(name: &str, model: &EncoderModel, exact: &EncoderModel) -> Result {
    let batch = batch(&[1, 63, 64, 65, 512, 7])?;
    let got = model.forward_ragged(&batch)?.to_dtype(DType::F32)?.to_device(&Cpu)?;
    let expected = exact.forward_ragged(&batch)?; // (N, E)
    if !is_finite(&got)? {
        return Err(format!("{name}: hidden states are NaN or infinite").into());
    }
    let difference = (&got - &expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
    let dot = |x: &Tensor, y: &Tensor| (x * y)?.sum(1);
    let norms = (dot(&got, &got)? * dot(&expected, &expected)?)?.sqrt()?;
    let cosine = (dot(&got, &expected)? / norms)?.min(0)?.to_scalar::<f32>()?;
    eprintln!("{name}: largest difference {difference:.1e}, lowest cosine {cosine:.6}");
    let close = if name == "f32" { difference <= 1e-4 } else { cosine >= 0.9999 };
    if close { Ok(()) } else { Err(format!("{name} differs from the CPU").into()) }
}

/// Whether no value is NaN or infinite. `Tensor::max_all` and `Tensor::min` skip NaN;
/// `Tensor::sum_all` does not, and 0 · x is NaN for an infinite x.
fn is_finite(x: &Tensor) -> Result<bool> {
    Ok((x * 0.)?.sum_all()?.to_scalar::<f32>()? == 0.0)
}

/// The rate of a product of large bf16 matrices, in operations per second.
fn gemm(device: &Device) -> Result<f64> {
    const N: usize = 8192;
    let x = Tensor::randn(0f32, 1., (N, N), device)?.to_dtype(DType::BF16)?;
    let [seconds, _] = median(device, || Ok(x.matmul(&x)?))?;
    Ok(2.0 * (N as f64).powi(3) / seconds)
}
