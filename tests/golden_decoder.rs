//! Compares decoders and encoder-decoders with transformers' `BertLMHeadModel` and
//! `EncoderDecoderModel`.
//!
//! The tolerance of hidden states in the other tests is 1e-5. Logits reach a magnitude of 6 and are
//! computed by one more matrix product, so their tolerance is 2e-5.

use std::collections::HashMap;

use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use encoder::{
    BertConfig, CausalLm, DecoderMemory, EncoderDecoder, EncoderDecoderConfig, GenerateConfig,
    LoadOptions, Strategy,
};

use crate::support::{Golden, assert_close, golden, temp_dir};

type Result<T = ()> = anyhow::Result<T>;

const TOLERANCE: f64 = 2e-5;

fn decoder(name: &str) -> Result<(CausalLm, Golden, Option<DecoderMemory>)> {
    let (decoder, report) = CausalLm::from_dir(golden(name), &LoadOptions::default())?;
    println!("{report}");
    let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
    let memory = match golden.find("memory") {
        None => None,
        Some(memory) => Some(decoder.memory(memory, golden.find("memory_mask"))?),
    };
    Ok((decoder, golden, memory))
}

#[test]
fn decoder_logits_equal_transformers_in_one_pass_and_in_steps() -> Result {
    for name in ["bert_lm", "bert_lm_cross"] {
        let (decoder, golden, memory) = decoder(name)?;
        let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
        let visible = mask.to_dtype(DType::F32)?.unsqueeze(2)?; // padding is not compared
        let expected = golden.get("logits").broadcast_mul(&visible)?;

        let whole = decoder.forward(ids, Some(mask), memory.as_ref())?;
        assert_close(name, &whole.broadcast_mul(&visible)?, &expected, TOLERANCE);

        for steps in [&[1; 9][..], &[4, 1, 4], &[9]] {
            let mut cache = decoder.cache(9);
            let mut logits = vec![];
            for &step in steps {
                let padding = mask.narrow(1, 0, cache.len() + step)?;
                let new = ids.narrow(1, cache.len(), step)?;
                logits.push(decoder.step(&new, Some(&padding), memory.as_ref(), &mut cache)?);
            }
            let logits = Tensor::cat(&logits, 1)?.broadcast_mul(&visible)?;
            assert_close(&format!("{name} in {steps:?}"), &logits, &expected, TOLERANCE);
        }
    }
    Ok(())
}

/// Weights are at most 1, so their tolerance is 1e-6. In WebAssembly, which rounds products and sums
/// separately, they differ by 1.1e-6. Rows of padding are not compared.
#[test]
fn decoder_attention_weights_equal_transformers() -> Result {
    let tolerance = if cfg!(target_family = "wasm") { 2e-6 } else { 1e-6 };
    for name in ["bert_lm", "bert_lm_cross"] {
        let (decoder, golden, memory) = decoder(name)?;
        let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
        let (logits, found) = decoder.forward_with_attentions(ids, Some(mask), memory.as_ref())?;
        let whole = decoder.forward(ids, Some(mask), memory.as_ref())?;
        assert_close("logits", &logits, &whole, TOLERANCE);
        let expected = Golden::open(&format!("{name}/attentions.safetensors"))?;
        let visible = mask.to_dtype(DType::F32)?.reshape((1, 3, 1, 9, 1))?;
        for (kind, layers) in [("causal", found.causal), ("cross", found.cross)] {
            let Some(expected) = expected.find(kind) else {
                assert!(layers.is_empty());
                continue;
            };
            let got = Tensor::stack(&layers, 0)?.broadcast_mul(&visible)?;
            let expected = expected.broadcast_mul(&visible)?;
            assert_close(&format!("{name}, {kind}"), &got, &expected, tolerance);
        }
    }
    Ok(())
}

#[test]
fn a_missing_or_an_unexpected_memory_is_an_error() -> Result {
    let (decoder, golden, memory) = decoder("bert_lm_cross")?;
    let (alone, _, _) = self::decoder("bert_lm")?;
    let ids = golden.get("input_ids");
    assert_eq!(
        decoder.forward(ids, None, None).unwrap_err().to_string(),
        "decoder has cross-attention: expected a memory of the encoder's output, got none"
    );
    assert_eq!(
        alone.forward(ids, None, memory.as_ref()).unwrap_err().to_string(),
        "decoder has no cross-attention: expected no memory, got one"
    );
    Ok(())
}

#[test]
fn a_truncated_copied_or_reordered_cache_continues_correctly() -> Result {
    let (decoder, golden, _) = decoder("bert_lm")?;
    let ids = golden.get("input_ids");
    let mut cache = decoder.cache(9);
    let whole = decoder.step(ids, None, None, &mut cache)?;
    assert_eq!(
        decoder.step(&ids.narrow(1, 0, 1)?, None, None, &mut cache).unwrap_err().to_string(),
        "cache is full: expected at most 9 tokens, got 9 in the cache and 1 new; \
         reset the cache, or give it a larger capacity"
    );
    cache.truncate(5);
    let copy = cache.clone();
    for mut cache in [cache, copy] {
        let rest = decoder.step(&ids.narrow(1, 5, 4)?, None, None, &mut cache)?;
        assert_close("after truncation", &rest, &whole.narrow(1, 5, 4)?, TOLERANCE);
        // The next step gives the same logits as for sequences that always had this order.
        cache.truncate(8);
        cache.reorder(&[2, 0, 0])?;
        let order = Tensor::new(&[2u32, 0, 0], &Cpu)?;
        let last = decoder.step(
            &ids.narrow(1, 8, 1)?.contiguous()?.index_select(&order, 0)?,
            None,
            None,
            &mut cache,
        )?;
        let expected = whole.narrow(1, 8, 1)?.contiguous()?.index_select(&order, 0)?;
        assert_close("after a reordering", &last, &expected, TOLERANCE);
        cache.reset();
        assert!(cache.is_empty());
        let again = decoder.step(&ids.narrow(1, 0, 4)?, None, None, &mut cache)?;
        assert_close("after a reset", &again, &whole.narrow(1, 0, 4)?, TOLERANCE);
    }
    Ok(())
}

/// The token ids of each row up to its end token 2, which is included.
fn sequences(tensor: &Tensor) -> Result<Vec<Vec<u32>>> {
    let rows: Vec<Vec<i64>> = tensor.to_vec2()?;
    let until_end = |row: Vec<i64>| {
        let end = row.iter().position(|&token| token == 2).map_or(row.len(), |end| end + 1);
        row[..end].iter().map(|&token| token as u32).collect()
    };
    Ok(rows.into_iter().map(until_end).collect())
}

#[test]
fn encoder_decoder_logits_and_generation_equal_transformers() -> Result {
    let (model, report) = EncoderDecoder::from_dir(golden("bert2bert"), &LoadOptions::default())?;
    println!("{report}");
    let golden = Golden::open("bert2bert/expected.safetensors")?;
    let (ids, mask) = (golden.get("input_ids"), Some(golden.get("mask")));
    let logits = model.forward(ids, mask, golden.get("decoder_input_ids"))?;
    assert_close("logits", &logits, golden.get("logits"), TOLERANCE);

    let beam =
        |length_penalty| Strategy::Beam { num_beams: 3, length_penalty, early_stopping: false };
    for (name, strategy) in
        [("greedy", Strategy::Greedy), ("beam", beam(1.0)), ("beam_short", beam(-2.0))]
    {
        let config = GenerateConfig::greedy(12).with_strategy(strategy);
        let written = model.generate(ids, mask, &config)?;
        assert_eq!(written, sequences(golden.get(name))?, "{name}");
    }
    Ok(())
}

#[test]
fn beam_search_accepts_padding_that_is_a_view() -> Result {
    let (model, _) = EncoderDecoder::from_dir(golden("bert2bert"), &LoadOptions::default())?;
    let golden = Golden::open("bert2bert/expected.safetensors")?;
    let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
    let view = Tensor::cat(&[mask, mask], 1)?.narrow(1, 0, mask.dim(1)?)?;
    assert!(!view.is_contiguous());
    let strategy = Strategy::Beam { num_beams: 3, length_penalty: 1.0, early_stopping: false };
    let config = GenerateConfig::greedy(12).with_strategy(strategy);
    assert_eq!(model.generate(ids, Some(&view), &config)?, sequences(golden.get("beam"))?);
    Ok(())
}

#[test]
fn generated_tokens_are_streamed_until_the_callback_stops() -> Result {
    let (model, _) = EncoderDecoder::from_dir(golden("bert2bert"), &LoadOptions::default())?;
    let golden = Golden::open("bert2bert/expected.safetensors")?;
    let memory = model.memory(golden.get("input_ids"), Some(golden.get("mask")))?;
    let config = GenerateConfig::greedy(12).with_eos_token_id(Some(2));
    let mut streamed = vec![vec![1]; 4];
    let written =
        model.decoder().generate_with(&streamed.clone(), Some(&memory), &config, |i, token| {
            streamed[i].push(token);
            std::ops::ControlFlow::Continue(())
        })?;
    assert_eq!(written, streamed);

    let mut count = 0;
    let stopped =
        model.decoder().generate_with(&vec![vec![1]; 4], Some(&memory), &config, |_, _| {
            count += 1;
            if count == 3 {
                std::ops::ControlFlow::Break(())
            } else {
                std::ops::ControlFlow::Continue(())
            }
        })?;
    assert_eq!(stopped.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 2, 1]);
    Ok(())
}

/// The searches of a batch end after different numbers of steps.
#[test]
fn a_beam_search_does_not_depend_on_its_batch() -> Result {
    let (model, _) = EncoderDecoder::from_dir(golden("bert2bert"), &LoadOptions::default())?;
    let golden = Golden::open("bert2bert/expected.safetensors")?;
    let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
    let strategy = Strategy::Beam { num_beams: 3, length_penalty: -2.0, early_stopping: false };
    let config = GenerateConfig::greedy(12).with_strategy(strategy);
    let together = model.generate(ids, Some(mask), &config)?;
    for (i, expected) in together.iter().enumerate() {
        let alone = model.generate(&ids.narrow(0, i, 1)?, Some(&mask.narrow(0, i, 1)?), &config)?;
        assert_eq!(&alone[0], expected);
    }

    let memory = model.memory(ids, Some(mask))?;
    let config = config.with_eos_token_id(Some(2));
    for prompts in [2, 8] {
        let generated = model.decoder().generate(&vec![vec![1]; prompts], Some(&memory), &config);
        let error = generated.unwrap_err().to_string();
        let expected = format!("expected {prompts} sequences, one for each prompt");
        assert!(error.contains(&expected), "{error}");
    }

    // The beams of 258 sequences are several batches.
    let many = model.decoder().generate(
        &vec![vec![1]; 258],
        Some(&memory.reorder(&(0..258).map(|i| i % 4).collect::<Vec<_>>())?),
        &config,
    )?;
    assert!(many.iter().enumerate().all(|(i, sequence)| *sequence == together[i % 4]));

    // The sequences whose search has not finished are their prompts.
    let prompt = vec![1];
    let mut ended = None;
    let stopped =
        model.decoder().generate_with(&vec![vec![1]; 4], Some(&memory), &config, |i, _| {
            ended = Some(i);
            std::ops::ControlFlow::Break(())
        })?;
    for (i, (got, whole)) in stopped.iter().zip(&together).enumerate() {
        assert_eq!(got, if ended == Some(i) { whole } else { &prompt }, "{i}");
    }
    Ok(())
}

#[test]
fn different_widths_and_early_stopping_equal_transformers() -> Result {
    let (model, report) =
        EncoderDecoder::from_dir(golden("bert2bert_wide"), &LoadOptions::default())?;
    println!("{report}");
    let golden = Golden::open("bert2bert_wide/expected.safetensors")?;
    let ids = golden.get("input_ids");
    let logits = model.forward(ids, None, golden.get("decoder_input_ids"))?;
    assert_close("logits", &logits, golden.get("logits"), TOLERANCE);
    let beam = |num_beams| {
        let strategy = Strategy::Beam { num_beams, length_penalty: 0.5, early_stopping: true };
        model.generate(ids, None, &GenerateConfig::greedy(12).with_strategy(strategy))
    };
    assert_eq!(beam(4)?, sequences(golden.get("beam_early"))?);
    assert_eq!(beam(40)?.len(), 3, "more beams than the 29 candidate tokens of the first step");
    Ok(())
}

/// A copy of a model folder, with `config` and `tensors` applied to its config and its tensors.
fn changed(
    folder: &str,
    config: impl Fn(&mut serde_json::Value),
    tensors: impl Fn(&mut HashMap<String, Tensor>) -> Result,
) -> Result<tempfile::TempDir> {
    let dir = temp_dir()?;
    let json = std::fs::read(golden(folder).join("config.json"))?;
    let mut json: serde_json::Value = serde_json::from_slice(&json)?;
    config(&mut json);
    std::fs::write(dir.path().join("config.json"), json.to_string())?;
    let mut all = safetensors::load(golden(folder).join("model.safetensors"), &Cpu)?;
    tensors(&mut all)?;
    safetensors::save(&all, dir.path().join("model.safetensors"))?;
    Ok(dir)
}

#[test]
fn variants_of_decoder_checkpoints_give_the_same_logits() -> Result {
    let (_, golden, memory) = decoder("bert_lm_cross")?;
    let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
    let logits = |dir: &tempfile::TempDir| -> Result<Tensor> {
        let (decoder, report) = CausalLm::from_dir(dir.path(), &LoadOptions::default())?;
        println!("{report}");
        Ok(decoder.forward(ids, Some(mask), memory.as_ref())?)
    };
    let same = |_: &mut HashMap<String, Tensor>| Ok(());
    let expected = logits(&changed("bert_lm_cross", |_| (), same)?)?;

    // The checkpoint has cross-attention, but the config lacks add_cross_attention.
    let silent = |json: &mut serde_json::Value| {
        json.as_object_mut().unwrap().remove("add_cross_attention");
    };
    assert_close("inferred", &logits(&changed("bert_lm_cross", silent, same)?)?, &expected, 0.0);

    // The checkpoint also has a pooler and a next-sentence head.
    let of_encoder = |tensors: &mut HashMap<String, Tensor>| {
        for name in ["bert.pooler.dense.weight", "cls.seq_relationship.weight"] {
            tensors.insert(name.into(), Tensor::zeros((24, 24), DType::F32, &Cpu)?);
        }
        Ok(())
    };
    let got = logits(&changed("bert_lm_cross", |_| (), of_encoder)?)?;
    assert_close("with a pooler", &got, &expected, 0.0);

    // An output projection in the checkpoint is used even if the config ties it to the embeddings.
    let untied = |tensors: &mut HashMap<String, Tensor>| {
        let words = tensors["bert.embeddings.word_embeddings.weight"].clone();
        tensors.insert("cls.predictions.decoder.weight".into(), (words * 2.0)?);
        let bias = tensors["cls.predictions.bias"].zeros_like()?;
        tensors.insert("cls.predictions.bias".into(), bias);
        Ok(())
    };
    let no_bias = |tensors: &mut HashMap<String, Tensor>| {
        let bias = tensors["cls.predictions.bias"].zeros_like()?;
        tensors.insert("cls.predictions.bias".into(), bias);
        Ok(())
    };
    let twice = (logits(&changed("bert_lm_cross", |_| (), no_bias)?)? * 2.0)?;
    let got = logits(&changed("bert_lm_cross", |_| (), untied)?)?;
    assert_close("untied output projection", &got, &twice, TOLERANCE);

    // A tensor that the model does not use is an error.
    let unused = |tensors: &mut HashMap<String, Tensor>| {
        tensors.insert("cls.predictions.extra".into(), Tensor::zeros(3, DType::F32, &Cpu)?);
        Ok(())
    };
    let error = logits(&changed("bert_lm_cross", |_| (), unused)?).unwrap_err().to_string();
    assert!(error.contains("\"cls.predictions.extra\""), "{error}");
    Ok(())
}

/// Encoder and decoder have the same weights. One checkpoint stores them twice, once for each of
/// the two; the other stores them once and sets `tie_encoder_decoder`.
#[test]
fn a_tied_encoder_decoder_equals_one_with_equal_weights() -> Result {
    let mut size = BertConfig::new(20, 8, 2, 2, 12);
    size.max_position_embeddings = 9;
    let config = EncoderDecoderConfig::new(size.clone(), size, 1, 2);
    let vars = candle_nn::VarMap::new();
    let init = mha::Init::Bert { initializer_range: 0.4 };
    let vb = init.var_builder(&vars, 7, DType::F32, &Cpu);
    EncoderDecoder::new(&config, vb.pp("encoder"), vb.pp("decoder"))?;
    let all = vars.data().lock().unwrap().clone();
    let mut tensors: HashMap<String, Tensor> =
        all.into_iter().map(|(name, var)| (name, var.as_detached_tensor())).collect();
    for (name, tensor) in tensors.clone() {
        if let Some(below) = name.strip_prefix("encoder.") {
            tensors.insert(format!("decoder.{below}"), tensor);
        }
    }
    let (twice, once) = (temp_dir()?, temp_dir()?);
    EncoderDecoder::save(twice.path(), &config, &tensors)?;
    // Tensors that do not fit the config are refused, and nothing is written.
    let unwritten = twice.path().join("unwritten");
    EncoderDecoder::save(&unwritten, &config, &HashMap::new()).unwrap_err();
    assert!(!unwritten.exists());
    let mut more = tensors.clone();
    more.extend((0..9).map(|i| (format!("x{i}"), tensors.values().next().unwrap().clone())));
    let error = EncoderDecoder::save(&unwritten, &config, &more).unwrap_err().to_string();
    assert!(error.starts_with("tensor \"x0\" has no known prefix"), "{error}");
    let own = |name: &String| name.contains("cross_attention") || name.contains("lm_head");
    tensors.retain(|name, _| name.starts_with("encoder.") || own(name));
    let mut config = config;
    config.tie_encoder_decoder = true;
    EncoderDecoder::save(once.path(), &config, &tensors)?;

    let ids = Tensor::new(&[[3u32, 4, 5]], &Cpu)?;
    let logits = [twice, once].map(|dir| -> Result<(Tensor, usize)> {
        let (model, report) = EncoderDecoder::from_dir(dir.path(), &LoadOptions::default())?;
        Ok((model.forward(&ids, None, &ids)?, report.tied.len()))
    });
    // In the first, only the output projection is tied, to the word embeddings.
    let [Ok((twice, 1)), Ok((once, tied))] = logits else { panic!("{logits:?}") };
    assert!(tied > 20);
    assert_close("tied", &once, &twice, 0.0);
    Ok(())
}

#[test]
fn a_cache_or_a_memory_of_another_decoder_is_an_error() -> Result {
    let (decoder, golden, memory) = decoder("bert_lm_cross")?;
    let mut other = decoder.config().clone();
    other.encoder.num_hidden_layers = 1;
    let init = mha::Init::Bert { initializer_range: 0.1 };
    let vb = init.var_builder(&candle_nn::VarMap::new(), 1, DType::F32, &Cpu);
    let other = CausalLm::new(&other, vb)?;
    let ids = golden.get("input_ids");
    assert_eq!(
        decoder.step(ids, None, memory.as_ref(), &mut other.cache(9)).unwrap_err().to_string(),
        "cache belongs to another decoder: expected layers = 2, got 1"
    );
    assert_eq!(
        other.forward(ids, None, memory.as_ref()).unwrap_err().to_string(),
        "memory belongs to another decoder: expected layers = 1, got 2"
    );
    Ok(())
}
