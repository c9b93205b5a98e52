//! Compares results of a GPU in f32, f16 and bf16 with those of the CPU. The golden tests compare
//! the CPU with PyTorch. Without a working GPU the tests print a message and pass, unless
//! `MHA_EXPECT_GPU` is set.

use std::{
    collections::HashMap,
    fmt,
    ops::Deref,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use candle_core::{DType, Device, Device::Cpu, Tensor};
use candle_nn::{VarBuilder, VarMap};
use encoder::{
    BertConfig, CausalLm, Embedder, EncoderConfig, EncoderDecoder, EncoderForLogitScore,
    EncoderForMaskedLm, EncoderForSequenceClassification, EncoderModel, LoadOptions, ModelConfig,
    Precision, RaggedBatch,
};
use mha::{
    AttentionConfig, AttentionMask, AttentionOptions, ComputeType, Init, QueryKeyNorm, Rotary,
    SelfAttention, scaled_dot_product_attention as attend,
};
use ops::{Linear, RmsNorm};
use serde_json::{Value, json};

use crate::{
    golden_architectures::{Architecture, architectures},
    golden_decoders::decoders,
    support::{Golden, MINILM, golden, max_difference},
};

type Result<T = ()> = anyhow::Result<T>;

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::F16, Precision::Bf16];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn options(precision: Precision, device: &Device) -> LoadOptions {
    LoadOptions::default().with_precision(precision).with_device(device)
}

/// The GPU of a test. Tests share it, except one that measures its memory.
struct Gpu<G> {
    device: Device,
    _guard: G,
}

impl<G> Deref for Gpu<G> {
    type Target = Device;

    fn deref(&self) -> &Device {
        &self.device
    }
}

static USERS: RwLock<()> = RwLock::new(());

fn gpu() -> Option<Gpu<RwLockReadGuard<'static, ()>>> {
    let _guard = USERS.read().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu { device: device()?, _guard })
}

/// The GPU while no other test uses it.
fn gpu_alone() -> Option<Gpu<RwLockWriteGuard<'static, ()>>> {
    let _guard = USERS.write().unwrap_or_else(PoisonError::into_inner);
    Some(Gpu { device: device()?, _guard })
}

fn device() -> Option<Device> {
    let device = Device::new_cuda(0);
    if let Err(error) = &device {
        assert!(
            std::env::var_os("MHA_EXPECT_GPU").is_none(),
            "MHA_EXPECT_GPU is set, but no GPU works: {error}"
        );
        println!("skipped: no GPU works: {error}");
    }
    device.ok()
}

/// Compares a GPU's result with the CPU's result in f32. If the GPU computed in f32, the largest
/// difference must be at most 1e-4. In f16 and bf16, the cosine must be at least 0.9999 over all
/// elements and at least 0.9998 over each row of the last axis (0.9995 in bf16 if the rows have
/// fewer than 32 elements).
#[track_caller]
fn assert_same(what: &str, precision: impl fmt::Debug, got: &Tensor, expected: &Tensor) -> Result {
    let got = got.to_dtype(DType::F32)?.to_device(&Cpu)?;
    if format!("{precision:?}") == "F32" {
        let difference = max_difference(&got, expected)?;
        println!("{what} {precision:?}: largest difference {difference:.1e}");
        assert!(difference <= 1e-4, "{what} {precision:?}: {difference:e}");
        return Ok(());
    }
    assert_eq!(got.dims(), expected.dims(), "{what} {precision:?}");
    let width = expected.dims()[expected.rank() - 1];
    let rows = |x: &Tensor| x.reshape((x.elem_count() / width, width))?.to_vec2::<f32>();
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
    let (mut lowest, mut products) = (1f64, [0.0; 3]);
    for (x, y) in rows(&got)?.iter().zip(rows(expected)?) {
        assert!(x.iter().all(|x| x.is_finite()), "{what} {precision:?}: {x:?}");
        let (xx, xy, yy) = (dot(x, x), dot(x, &y), dot(&y, &y));
        if xx * yy == 0.0 {
            assert_eq!(xx, yy, "{what} {precision:?}: only one of two rows is zero")
        } else {
            lowest = lowest.min(xy / (xx * yy).sqrt())
        }
        products = [products[0] + xx, products[1] + xy, products[2] + yy];
    }
    let cosine = products[1] / (products[0] * products[2]).sqrt();
    println!("{what} {precision:?}: cosine {cosine:.6}, lowest cosine of a row {lowest:.6}");
    let is_bf16 = format!("{precision:?}").eq_ignore_ascii_case("bf16");
    let of_rows = if is_bf16 && width < 32 { 0.9995 } else { 0.9998 };
    assert!(cosine >= 0.9999 && lowest >= of_rows, "{what} {precision:?}: {cosine}, {lowest}");
    Ok(())
}

/// [`assert_same`] for the result of `run` on the GPU in each precision, and on the CPU in f32.
fn assert_same_as_on_cpu(
    what: &str,
    gpu: &Device,
    run: impl Fn(Precision, &Device) -> Result<Tensor>,
) -> Result {
    let expected = run(Precision::F32, &Cpu)?;
    for precision in PRECISIONS {
        assert_same(what, precision, &run(precision, gpu)?, &expected)?;
    }
    Ok(())
}

/// The batch has padding and a sequence of padding only.
#[test]
fn hidden_states_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let ids = Tensor::new(&[[7u32, 50, 100, 3, 9], [1, 2, 3, 4, 5], [8, 9, 0, 0, 0]], &Cpu)?;
    let padding = Tensor::new(&[[1u8, 1, 1, 1, 1], [0; 5], [1, 1, 0, 0, 0]], &Cpu)?;
    let run = |precision, device: &Device| -> Result<[Tensor; 2]> {
        let (model, _) = EncoderModel::from_dir(golden("bert_gelu"), &options(precision, device))?;
        let mask = AttentionMask::none().with_padding(&padding)?;
        let (ids, mask) = (ids.to_device(device)?, &mask);
        let (out, all) = model.forward_all(&ids, None, mask)?;
        let last = model.forward(&ids, None, mask)?.last_hidden_state;
        assert_eq!(out.last_hidden_state.dims(), last.dims());
        Ok([last, Tensor::cat(&all.hidden_states, 0)?])
    };
    let expected = run(Precision::F32, &Cpu)?;
    for precision in PRECISIONS {
        let got = run(precision, &gpu)?;
        assert_same("last hidden state", precision, &got[0], &expected[0])?;
        assert_same("all hidden states", precision, &got[1], &expected[1])?;
    }
    Ok(())
}

/// Sequences of 1 to 512 tokens, D = 32.
#[test]
fn ragged_sequences_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let mut batch = RaggedBatch::default();
    for length in [1, 512, 63, 64, 65, 2] {
        let ids: Vec<u32> = (0..length).map(|i| i * 7919 % 30_522).collect();
        batch.push(&ids, &vec![0; ids.len()])?;
    }
    assert_same_as_on_cpu("ragged", &gpu, |precision, device| {
        Ok(EncoderModel::from_dir(MINILM, &options(precision, device))?.0.forward_ragged(&batch)?)
    })
}

/// A small model with random weights.
struct RandomModel {
    config: EncoderConfig,
    weights: VarMap,
}

impl RandomModel {
    fn new(json: &str) -> Result<Self> {
        let config = ModelConfig::from_json(json.as_bytes(), "config.json")?.encoder;
        let weights = VarMap::new();
        let vb = Init::Bert { initializer_range: 0.05 }.var_builder(&weights, 1, DType::F32, &Cpu);
        EncoderModel::new(&config, false, vb)?;
        Ok(Self { config, weights })
    }

    /// A model with the architecture of a golden model, but with heads of width 24, which the
    /// attention kernel supports, and positions for 600 tokens.
    fn like(golden_model: &str) -> Result<Self> {
        let path = golden(&format!("{golden_model}/encoder/config.json"));
        let mut config: Value = serde_json::from_slice(&std::fs::read(path)?)?;
        let values = config.as_object_mut().expect("a config is an object");
        let heads = if values.contains_key("num_key_value_heads") { 4 } else { 2 };
        for (names, value) in [
            (&["num_attention_heads", "n_heads", "n_head"][..], json!(heads)),
            (&["num_key_value_heads"], json!(2)),
            (&["hidden_size", "dim", "n_embd", "pooler_hidden_size"], json!(24 * heads)),
            (&["head_dim"], json!(24)),
            (&["max_position_embeddings", "n_positions"], json!(600)),
        ] {
            for name in names {
                if let Some(old) = values.get_mut(*name).filter(|old| !old.is_null()) {
                    *old = value.clone();
                }
            }
        }
        Self::new(&config.to_string())
    }

    fn on(&self, precision: Precision, device: &Device) -> Result<EncoderModel> {
        let (dtype, compute_type) = precision.on(device)?;
        let mut config = self.config.clone();
        config.compute_type = compute_type;
        let weights = self.weights.data().lock().unwrap();
        let weights = weights.iter().map(|(name, var)| {
            let weight = var.as_detached_tensor().to_dtype(dtype)?.to_device(device)?;
            Ok((name.clone(), weight))
        });
        let weights = weights.collect::<candle_core::Result<_>>()?;
        let vb = VarBuilder::from_tensors(weights, dtype, device);
        Ok(EncoderModel::new(&config, false, vb)?)
    }

    fn batch(&self, lengths: &[u32]) -> Result<RaggedBatch> {
        let (mut batch, words) = (RaggedBatch::default(), self.config.vocab_size as u32);
        for &length in lengths {
            let ids: Vec<u32> = (0..length).map(|i| (i + length) * 31 % words).collect();
            batch.push(&ids, &vec![0; ids.len()])?;
        }
        Ok(batch)
    }
}

/// The golden models of all architectures but BERT, without those that differ in the positions of
/// the rotary embedding only.
fn golden_models() -> Result<Vec<String>> {
    let encoders = architectures()?.into_iter().map(|a| format!("architectures/{}", a.folder));
    let decoders = decoders()?.into_iter().map(|decoder| decoder.folder);
    let differs = |folder: &String| !["yarn", "dynamic", "bf16"].iter().any(|s| folder.contains(s));
    let decoders = decoders.filter(differs).map(|folder| format!("decoders/{folder}"));
    Ok(encoders.chain(decoders).collect())
}

/// Small models with random weights and heads of width 64, as in most base models: BERT, a window
/// and rotary positions (ModernBERT), relative biases (MPNet), ALiBi (Jina) and disentangled
/// attention (DeBERTa).
#[test]
fn ragged_sequences_with_heads_of_64_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let sizes = r#""vocab_size": 99, "hidden_size": 128, "num_attention_heads": 2,
        "num_hidden_layers": 3, "intermediate_size": 256, "max_position_embeddings": 514"#;
    for (name, settings) in [
        ("BERT", r#""model_type": "bert""#),
        (
            "ModernBERT",
            r#""model_type": "modernbert", "local_attention": 32, "global_attn_every_n_layers": 2"#,
        ),
        ("MPNet", r#""model_type": "mpnet", "relative_attention_num_buckets": 32"#),
        (
            "Jina",
            r#""model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu""#,
        ),
        (
            "DeBERTa",
            r#""model_type": "deberta-v2", "relative_attention": true, "position_buckets": 64,
                "pos_att_type": ["p2c", "c2p"], "share_att_key": true,
                "norm_rel_ebd": "layer_norm", "position_biased_input": false,
                "type_vocab_size": 0"#,
        ),
    ] {
        let model = RandomModel::new(&format!("{{{settings}, {sizes}}}"))?;
        let batch = model.batch(&[1, 100, 64, 65, 200])?;
        assert_same_as_on_cpu(&format!("{name}, heads of 64"), &gpu, |precision, device| {
            Ok(model.on(precision, device)?.forward_ragged(&batch)?)
        })?;
    }
    Ok(())
}

/// Sequences shorter and longer than a tile of 64 queries in one batch. Windows are shorter than a
/// tile. bf16 is left out for Gemma: its residual stream grows with each layer, and the rounding of a
/// row with it.
#[test]
fn ragged_sequences_of_every_architecture_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    for name in golden_models()? {
        let model = RandomModel::like(&name)?;
        let batch = model.batch(&[1, 63, 64, 65, 127, 128, 129, 512])?;
        let expected = model.on(Precision::F32, &Cpu)?.forward_ragged(&batch)?;
        for precision in PRECISIONS {
            if name.contains("gemma") && precision == Precision::Bf16 {
                continue;
            }
            let got = model.on(precision, &gpu)?.forward_ragged(&batch)?;
            assert_same(&name, precision, &got, &expected)?;
        }
    }
    Ok(())
}

/// The memory of a batch, besides the weights, grows with the number of tokens, not with its square.
#[test]
fn memory_of_every_architecture_grows_with_the_tokens() -> Result {
    use candle_core::cuda_backend::cudarc::driver::{
        result::{device::get_default_mem_pool, mem_pool},
        sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
    };

    let Some(gpu) = gpu_alone() else { return Ok(()) };
    let Device::Cuda(device) = &*gpu else { unreachable!("`gpu` opens a GPU") };
    let stream = device.cuda_stream();
    for name in golden_models()? {
        let random = RandomModel::like(&name)?;
        let model = random.on(Precision::F16, &gpu)?;
        let peak = |sequences: usize| -> Result<u64> {
            let batch = random.batch(&vec![128; sequences])?;
            let (mut bytes, mut before) = (0u64, 0u64);
            // SAFETY: the device is that of a live context, the pool belongs to the device, and the
            // attribute is a u64. Writing 0 resets the peak to the memory in use now.
            unsafe {
                let pool = get_default_mem_pool(stream.context().cu_device())?;
                let attribute = CU_MEMPOOL_ATTR_USED_MEM_HIGH;
                mem_pool::set_attribute(pool, attribute, (&raw mut before).cast())?;
                mem_pool::get_attribute(pool, attribute, (&raw mut before).cast())?;
                model.forward_ragged(&batch)?;
                gpu.synchronize()?;
                mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast())?;
            }
            Ok(bytes - before)
        };
        peak(4)?; // what a model stores at its first batch
        let [four, eight, sixteen] = [peak(4)?, peak(8)?, peak(16)?];
        println!("{name}: {four}, {eight} and {sixteen} bytes for 4, 8 and 16 sequences");
        // If the growth is linear, the second difference is twice the first; if quadratic, four times.
        let (first, second) = (eight - four, sixteen - eight);
        assert!(second * 10 <= first * 21, "{name}: {four}, {eight}, {sixteen} bytes");
    }
    Ok(())
}

/// All architectures except BERT, from the tiny checkpoints that the golden tests compare with
/// transformers: a padded batch, its attention weights, ragged sequences and two task heads. The
/// attention heads of these checkpoints have widths that the attention kernel does not support.
#[test]
fn every_architecture_matches_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    for Architecture { folder: architecture, .. } in architectures()? {
        let folder = |kind: &str| golden(&format!("architectures/{architecture}/{kind}"));
        let inputs =
            Golden::open(&format!("architectures/{architecture}/encoder/expected.safetensors"))?;
        let (ids, types) = (inputs.get("input_ids"), inputs.get("token_type_ids"));
        let mask = AttentionMask::none().with_padding(inputs.get("attention_mask"))?;
        // The ragged sequences have different lengths: sequence i is row i without its first i
        // tokens.
        let mut batch = RaggedBatch::default();
        let rows = |x: &Tensor| x.to_dtype(DType::U32)?.to_vec2::<u32>();
        for (start, (ids, types)) in rows(ids)?.iter().zip(rows(types)?).enumerate() {
            batch.push(&ids[start..], &types[start..])?;
        }
        let run = |precision, device: &Device| -> Result<Vec<(&str, Tensor)>> {
            let (ids, types) = (ids.to_device(device)?, types.to_device(device)?);
            let (model, _) =
                EncoderModel::from_dir(folder("encoder"), &options(precision, device))?;
            let (_, all) = model.forward_all(&ids, Some(&types), &mask)?;
            let padded = model.forward(&ids, Some(&types), &mask)?.last_hidden_state;
            let (masked, _) =
                EncoderForMaskedLm::from_dir(folder("masked_lm"), &options(precision, device))?;
            let (sequence, _) = EncoderForSequenceClassification::from_dir(
                folder("sequence"),
                &options(precision, device),
            )?;
            Ok(vec![
                ("hidden states", Tensor::cat(&all.hidden_states, 0)?),
                ("attention weights", Tensor::cat(&all.attentions, 0)?),
                ("last hidden state", padded),
                ("ragged", model.forward_ragged(&batch)?),
                ("masked tokens", masked.forward(&ids, Some(&types), &mask)?),
                ("labels", sequence.forward(&ids, Some(&types), &mask)?),
            ])
        };
        let expected = run(Precision::F32, &Cpu)?;
        for precision in PRECISIONS {
            for ((part, got), (_, expected)) in run(precision, &gpu)?.iter().zip(&expected) {
                assert_same(&format!("{architecture}, {part}"), precision, got, expected)?;
            }
        }
    }
    Ok(())
}

/// The batches have the same lengths and different ids.
#[test]
fn a_replayed_graph_gives_the_same_bits_as_a_model_without_graphs() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    for precision in PRECISIONS {
        let load =
            || EncoderModel::from_dir(MINILM, &options(precision, &gpu)).map(|(model, _)| model);
        let (model, mut graphs) = (load()?, 0);
        let capture_fails = std::env::var_os("GPU_FAILS_AT").is_some(); // see scripts/cuda-check
        // Batches of more than 256 tokens are not captured.
        for (lengths, captured) in [(&[8][..], 1), (&[3, 9, 1], 1), (&[200, 57], 0)] {
            for round in 0..2 + captured as u32 {
                let mut batch = RaggedBatch::default();
                for &length in lengths {
                    let ids: Vec<u32> = (0..length).map(|i| (i + round) * 7919 % 30_522).collect();
                    batch.push(&ids, &vec![round % 2; ids.len()])?;
                }
                let values = |x: Tensor| x.to_dtype(DType::F32)?.to_device(&Cpu)?.to_vec2::<f32>();
                let without_graphs = load()?; // a new model has not seen these lengths
                assert!(
                    values(model.forward_ragged(&batch)?)?
                        == values(without_graphs.forward_ragged(&batch)?)?,
                    "{precision:?} {lengths:?}, round {round}"
                );
                assert_eq!(without_graphs.cuda_graphs(), 0);
                let new = if round > 0 && !capture_fails { captured } else { 0 };
                assert_eq!(model.cuda_graphs(), graphs + new);
            }
            graphs = model.cuda_graphs();
        }
    }
    Ok(())
}

/// A CUDA graph has no gradients.
#[test]
fn a_model_that_autograd_tracks_is_not_captured() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let config = BertConfig::new(9, 768, 1, 12, 3072);
    let vars = VarMap::new();
    let vb = Init::Bert { initializer_range: 0.02 }.var_builder(&vars, 1, DType::F32, &gpu);
    let model = EncoderModel::new(&config.encoder_config(), false, vb)?;
    let mut batch = RaggedBatch::default();
    batch.push(&[1, 2, 3], &[0; 3])?;
    for _ in 0..3 {
        assert!(model.forward_ragged(&batch)?.track_op());
    }
    assert_eq!(model.cuda_graphs(), 0);
    Ok(())
}

/// The attention kernels with heads of several widths, with grouped heads, and with causal masks, windows and
/// biases; q, k and v are views of one tensor. In f16 and bf16, a thread block computes two tiles
/// of 64 queries of the long batch.
#[test]
fn attention_of_ragged_sequences_matches_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let short = vec![0, 1, 64, 64, 129, 200];
    let mut long: Vec<usize> = (0..=17).map(|i| 128 * i).collect();
    long.push(128 * 17 + 70);
    for (offsets, d, heads, groups) in [
        (&short, 8, 2, 2),
        (&short, 32, 4, 4),
        (&short, 64, 4, 4),
        (&short, 64, 4, 2),
        (&short, 80, 2, 1),
        (&short, 128, 2, 2),
        (&long, 32, 16, 16),
        (&long, 64, 16, 4),
    ] {
        let tokens = offsets[offsets.len() - 1];
        let qkv = Tensor::randn(0f32, 1., (1, tokens, heads + 2 * groups, d), &Cpu)?;
        let table = Tensor::randn(0f32, 1., (heads, 2 * 140 + 1), &Cpu)?;
        let factors = Tensor::rand(0f32, 1., heads, &Cpu)?;
        let whole = AttentionMask::none().with_sequences(offsets)?;
        let biased = whole.clone().with_distance_bias(&table)?;
        let masks = [
            ("no other part", whole.clone()),
            ("causal window", whole.clone().with_causal(3).with_window(70)),
            ("bias, causal", biased.clone().with_causal(2)),
            ("causal", whole.clone().with_causal(0)),
            ("window", whole.clone().with_window(20)),
            ("few visible keys", whole.clone().with_causal(60).with_window(9)),
            ("bias", biased.clone()),
            ("bias, window, head mask", biased.with_window(5).with_head_mask(&factors)?),
        ];
        let is_long = tokens > 1000; // slow in the emulator of scripts/cuda-check
        // The first and the last tokens of sequences, and others.
        let some: Vec<usize> = (0..tokens).filter(|i| [0, 1, 64, 65].contains(&(i % 75))).collect();
        for (name, mask) in masks.into_iter().take(if is_long { 3 } else { 8 }) {
            let run = |qkv: Tensor, some: Option<&[usize]>| -> Result<Tensor> {
                let all = qkv.transpose(1, 2)?; // (1, H + 2G, N, D)
                let part = |start, n| all.narrow(1, start, n);
                let (q, k) = (part(0, heads)?, part(heads, groups)?);
                let v = part(heads + groups, groups)?;
                let Some(some) = some else {
                    return Ok(attend(&q, &k, &v, &mask, None)?.contiguous()?);
                };
                let index = Tensor::from_iter(some.iter().map(|&i| i as u32), q.device())?;
                let (q, mask) =
                    (q.contiguous()?.index_select(&index, 2)?, mask.for_queries_of(some)?);
                Ok(attend(&q, &k, &v, &mask, None)?.contiguous()?)
            };
            let tokens_of = if is_long { &[None][..] } else { &[None, Some(&some[..])] };
            for (dtype, &some) in
                DTYPES.into_iter().flat_map(|dtype| tokens_of.iter().map(move |some| (dtype, some)))
            {
                let rounded = qkv.to_dtype(dtype)?;
                let expected = run(rounded.to_dtype(DType::F32)?, some)?;
                let got = run(rounded.to_device(&gpu)?, some)?;
                let of = some.map_or(tokens, <[usize]>::len);
                let what = format!("{of} of {tokens} tokens, heads of {d}, {name}");
                assert_same(&what, dtype, &got, &expected)?;
            }
        }
    }
    Ok(())
}

/// Rows of 8,192 elements need several groups of elements per thread.
#[test]
fn rms_norms_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    for width in [64, 1026, 8192] {
        let [x, y] = [(); 2].map(|()| Tensor::randn(0f32, 1., (3, 5, width), &Cpu).unwrap());
        let weight = Tensor::randn(0f32, 0.5, width, &Cpu)?;
        for unit_offset in [false, true] {
            let run = |dtype, device: &Device| -> Result<Tensor> {
                let on_device = |x: &Tensor| x.to_dtype(dtype)?.to_device(device);
                let tensors = [("weight".to_string(), on_device(&weight)?)].into();
                let vb = VarBuilder::from_tensors(tensors, dtype, device);
                let norm = RmsNorm::new(width, 1e-6, unit_offset, vb)?;
                let (x, y) = (on_device(&x)?, on_device(&y)?);
                let (sum, normalised) = norm.forward_residual(&x, &y)?;
                let alone = norm.forward_sum(&x, &Tensor::zeros_like(&y)?)?;
                Ok(Tensor::stack(&[alone, norm.forward_sum(&x, &y)?, sum, normalised], 0)?)
            };
            let expected = run(DType::F32, &Cpu)?;
            for dtype in DTYPES {
                let what = format!("RMS norm of {width}, unit offset {unit_offset}");
                assert_same(&what, dtype, &run(dtype, &gpu)?, &expected)?;
            }
        }
    }
    Ok(())
}

/// The norm of queries and keys in the kernel of the rotation, and without a rotation; of ragged
/// sequences, and of a batch that the kernel does not support.
#[test]
fn normalised_queries_and_keys_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let norm = QueryKeyNorm { eps: 1e-6, unit_offset: true };
    let config = AttentionConfig::new(128, 4).with_key_value_heads(2).with_scale(0.1);
    let config = config.with_query_key_norm(norm);
    let vars = VarMap::new();
    SelfAttention::new(&config, Init::Xavier.var_builder(&vars, 1, DType::F32, &Cpu))?;
    let vars = vars.data().lock().unwrap();
    let weights = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
    let mut tensors = weights.collect::<HashMap<_, _>>();
    for name in ["query_norm.weight", "key_norm.weight"] {
        tensors.insert(name.to_string(), Tensor::randn(0f32, 0.3, 32, &Cpu)?);
    }
    let ragged = AttentionMask::none().with_sequences(&[0, 3, 70])?;
    for (b, mask) in [(1, ragged), (2, AttentionMask::none())] {
        let x = Tensor::randn(0f32, 1., (b, 70, 128), &Cpu)?;
        for rotates in [true, false] {
            let run = |dtype, device: &Device| -> Result<Tensor> {
                let on_device = |x: &Tensor| x.to_dtype(dtype)?.to_device(device);
                let tensors = tensors.iter().map(|(name, x)| Ok((name.clone(), on_device(x)?)));
                let tensors = tensors.collect::<candle_core::Result<_>>()?;
                let vb = VarBuilder::from_tensors(tensors, dtype, device);
                let attention = SelfAttention::new(&config, vb)?;
                let rotation = Rotary::new(100.0, 32, 70, device)?.of_mask(&mask, b, 70)?;
                let options = match rotates {
                    true => AttentionOptions::new().with_transform(&rotation),
                    false => AttentionOptions::new(),
                };
                Ok(attention.forward_with(&on_device(&x)?, &mask, options)?.0)
            };
            let expected = run(DType::F32, &Cpu)?;
            for dtype in DTYPES {
                let what = format!("normalised heads, B = {b}, rotation {rotates}");
                assert_same(&what, dtype, &run(dtype, &gpu)?, &expected)?;
            }
        }
    }
    Ok(())
}

/// A NaN reaches the queries that see its key or its value, and no others.
#[test]
fn hidden_keys_that_are_not_finite_do_not_reach_the_output() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let [q, k, v] = [(); 3].map(|()| Tensor::randn(0f32, 1., (1, 2, 150, 64), &Cpu).unwrap());
    let nan = Tensor::full(f32::NAN, (1, 2, 1, 64), &Cpu)?;
    let with_nan = |x: &Tensor, at: usize| {
        Tensor::cat(&[&x.narrow(2, 0, at)?, &nan, &x.narrow(2, at + 1, 149 - at)?], 2)
    };
    let masks = [AttentionMask::causal(0), AttentionMask::none().with_window(9)];
    for (mask, sees) in masks.into_iter().zip([[70, 149], [61, 79]]) {
        let mask = mask.with_sequences(&[0, 150])?;
        for (k, v) in [(with_nan(&k, 70)?, v.clone()), (k.clone(), with_nan(&v, 70)?)] {
            for dtype in DTYPES {
                let on_gpu = |x: &Tensor| x.to_dtype(dtype)?.to_device(&gpu);
                let out = attend(&on_gpu(&q)?, &on_gpu(&k)?, &on_gpu(&v)?, &mask, None)?;
                let sums = out.to_dtype(DType::F32)?.to_device(&Cpu)?.sum((0, 1, 3))?;
                for (query, sum) in sums.to_vec1::<f32>()?.into_iter().enumerate() {
                    let expected = (sees[0]..=sees[1]).contains(&query);
                    assert_eq!(sum.is_nan(), expected, "{dtype:?}, query {query}: {sum}");
                }
            }
        }
    }
    Ok(())
}

/// The kernel processes 64 keys at a time in f16 and bf16, and 32 in f32. All scores of the first
/// 64 keys are −∞; the running maximum must nevertheless stay finite.
#[test]
fn leading_keys_with_scores_of_minus_infinity_have_weight_zero() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let mask = AttentionMask::none().with_sequences(&[0, 100])?;
    let q = Tensor::full(-1f32, (1, 2, 100, 32), &Cpu)?;
    let infinite = Tensor::full(f32::INFINITY, (1, 2, 64, 32), &Cpu)?;
    let k = Tensor::cat(&[&infinite, &Tensor::randn(0f32, 1., (1, 2, 36, 32), &Cpu)?], 2)?;
    let v = Tensor::randn(0f32, 1., (1, 2, 100, 32), &Cpu)?;
    let expected = attend(&q, &k, &v, &mask, None)?.contiguous()?;
    assert!(expected.sqr()?.sum_all()?.to_scalar::<f32>()?.is_finite());
    for dtype in DTYPES {
        let on_gpu = |x: &Tensor| x.to_dtype(dtype)?.to_device(&gpu);
        let got = attend(&on_gpu(&q)?, &on_gpu(&k)?, &on_gpu(&v)?, &mask, None)?;
        assert_same("infinite keys", dtype, &got, &expected)?;
    }
    Ok(())
}

#[test]
fn embeddings_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let texts = std::fs::read_to_string(golden("sentences.txt"))?;
    let texts: Vec<&str> = texts.lines().chain([""]).collect();
    assert_same_as_on_cpu("embeddings", &gpu, |precision, device| {
        Ok(Embedder::from_dir(MINILM, &options(precision, device))?.embed(&texts)?)
    })
}

/// The emulator of scripts/cuda-check refuses an allocation of 0 bytes.
#[test]
fn no_texts_have_no_embeddings() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let embedder = Embedder::from_dir(MINILM, &LoadOptions::default().with_device(&gpu))?;
    assert_eq!(embedder.embed::<&str>(&[])?.dims(), [0, 384]);
    let (model, _) = EncoderModel::from_dir(MINILM, &LoadOptions::default().with_device(&gpu))?;
    let hidden = model.forward_ragged(&RaggedBatch::default())?;
    assert_eq!(hidden.to_vec2::<f32>()?, Vec::<Vec<f32>>::new());
    assert_eq!(hidden.dims(), [0, 384]);
    Ok(())
}

#[test]
fn decoders_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let ids = Tensor::new(&[[3u32, 4, 5, 6]], &Cpu)?;
    let run = |precision, device: &Device| -> Result<[Tensor; 2]> {
        let ids = ids.to_device(device)?;
        let (decoder, _) = CausalLm::from_dir(golden("bert_lm"), &options(precision, device))?;
        let (both, _) = EncoderDecoder::from_dir(golden("bert2bert"), &options(precision, device))?;
        let alone = decoder.forward(&ids, None, None)?;
        Ok([alone, both.forward(&ids, None, &ids)?])
    };
    let expected = run(Precision::F32, &Cpu)?;
    for precision in PRECISIONS {
        let got = run(precision, &gpu)?;
        assert_same("decoder", precision, &got[0], &expected[0])?;
        assert_same("encoder-decoder", precision, &got[1], &expected[1])?;
    }
    Ok(())
}

/// The tokens with which sequences begin are computed once, also in layers with a window.
#[test]
fn sequences_with_a_common_beginning_match_the_cpu() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let mut batch = RaggedBatch::default();
    for (first, length) in [(5, 9), (1, 1), (8, 12), (2, 6), (9, 11)] {
        let ids: Vec<u32> = (0..28).chain(first..first + length).map(|i| 3 + 7 * i % 31).collect();
        batch.push(&ids, &vec![0; ids.len()])?;
    }
    for name in ["qwen3", "qwen3_window", "gemma3", "llama"] {
        let folder = golden(&format!("decoders/{name}/causal_lm"));
        let scores = |precision, device: &Device| -> Result<Tensor> {
            let options = options(precision, device);
            let (model, _) = EncoderForLogitScore::from_dir(&folder, 5, Some(9), &options)?;
            Ok(model.forward_ragged(&batch)?.t()?.contiguous()?) // (1, B)
        };
        let expected = scores(Precision::F32, &Cpu)?;
        for precision in PRECISIONS {
            assert_same(name, precision, &scores(precision, &gpu)?, &expected)?;
        }
    }
    Ok(())
}

/// The result 257 is not representable in bf16. Widths 3 and 8 take different code paths.
#[test]
fn products_of_bf16_are_returned_in_f32() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let x = Tensor::new(&[[256f32, 1., 0., 0., 0., 0., 0., 0.]], &gpu)?;
    for out in [3, 8] {
        let weight = Tensor::ones((out, 8), DType::F32, &gpu)?;
        for (bias, expected) in [(None, 257.0), (Some(Tensor::full(0.5f32, out, &gpu)?), 257.5)] {
            let y = Linear::new(ComputeType::Bf16, weight.clone(), bias)?.forward(&x)?;
            assert_eq!(y.to_vec2::<f32>()?, [vec![expected; out]]);
        }
    }
    Ok(())
}

/// A hidden NaN key does not affect the output, and the output of a query with no visible key is
/// zero, with lengths alone and with `keep` or a bias.
#[test]
fn lengths_hide_nan_keys_and_give_zeros_without_visible_keys() -> Result {
    let Some(gpu) = gpu() else { return Ok(()) };
    let random = |dims: [usize; 4]| Tensor::randn(0f32, 1., &dims, &Cpu);
    let (q, k) = (random([2, 3, 5, 32])?, random([2, 3, 7, 32])?);
    let nan = Tensor::full(f32::NAN, (2, 3, 2, 32), &Cpu)?;
    // The last two keys are hidden from all queries.
    let k = Tensor::cat(&[&k.narrow(2, 0, 5)?, &nan], 2)?;
    let lens = AttentionMask::none().with_valid_lens(&Tensor::new(&[5u32, 0], &Cpu)?)?;
    let keep = Tensor::rand(0f32, 1., (2, 1, 5, 7), &Cpu)?.ge(0.5)?;
    let bias = Tensor::randn(0f32, 1., (3, 5, 7), &Cpu)?;
    for (name, mask) in [
        ("lengths", lens.clone()),
        ("keep", lens.clone().with_keep(&keep)?),
        ("bias", lens.with_bias(&bias)?),
    ] {
        let expected = attend(&q, &k, &k, &mask, None)?;
        for dtype in DTYPES {
            let on_gpu = |x: &Tensor| x.to_dtype(dtype)?.to_device(&gpu);
            let got = attend(&on_gpu(&q)?, &on_gpu(&k)?, &on_gpu(&k)?, &mask, None)?;
            assert_same(name, dtype, &got, &expected.contiguous()?)?;
        }
    }
    Ok(())
}
