//! Against transformers' `BertLMHeadModel` and `EncoderDecoderModel`.
//!
//! Logits reach 6 in size, after one product more than hidden states, whose bound is 1e-5: 2e-5.

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{BertDecoder, DecoderMemory, EncoderDecoder, GenerateConfig, Strategy};

use crate::support::{Golden, assert_close, golden};

type Result<T = ()> = anyhow::Result<T>;

const TOLERANCE: f64 = 2e-5;

fn decoder(name: &str) -> Result<(BertDecoder, Golden, Option<DecoderMemory>)> {
    let (decoder, report) = BertDecoder::from_dir(golden(name), DType::F32, &Cpu)?;
    println!("{report}");
    let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
    let memory = match golden.find("memory") {
        None => None,
        Some(memory) => Some(decoder.memory(memory, golden.find("memory_mask"))?),
    };
    Ok((decoder, golden, memory))
}

#[test]
fn a_decoder_equals_transformers_whole_and_step_by_step() -> Result {
    for name in ["bert_lm", "bert_lm_cross"] {
        let (decoder, golden, memory) = decoder(name)?;
        let (ids, mask) = (golden.get("input_ids"), golden.get("mask"));
        let visible = mask.to_dtype(DType::F32)?.unsqueeze(2)?; // of padding's logits nobody asks
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

#[test]
fn a_memory_is_neither_forgotten_nor_imposed() -> Result {
    let (decoder, golden, memory) = decoder("bert_lm_cross")?;
    let (alone, _, _) = self::decoder("bert_lm")?;
    let ids = golden.get("input_ids");
    assert_eq!(
        decoder.forward(ids, None, None).unwrap_err().to_string(),
        "decoder attends to a memory: expected the encoder's output, got none"
    );
    assert_eq!(
        alone.forward(ids, None, memory.as_ref()).unwrap_err().to_string(),
        "decoder has no cross-attention: expected no memory, got one"
    );
    Ok(())
}

#[test]
fn a_cache_can_be_cut_and_copied() -> Result {
    let (decoder, golden, _) = decoder("bert_lm")?;
    let ids = golden.get("input_ids");
    let mut cache = decoder.cache(9);
    let whole = decoder.step(ids, None, None, &mut cache)?;
    assert_eq!(
        decoder.step(&ids.narrow(1, 0, 1)?, None, None, &mut cache).unwrap_err().to_string(),
        "cache is full: expected at most 9 tokens, got 9 and 1 more; \
         reset it, or give it a larger capacity"
    );
    cache.truncate(5)?;
    let copy = cache.clone();
    for mut cache in [cache, copy] {
        let rest = decoder.step(&ids.narrow(1, 5, 4)?, None, None, &mut cache)?;
        assert_close("after a cut", &rest, &whole.narrow(1, 5, 4)?, TOLERANCE);
        // The beams change places: what follows is as if they had been so all along.
        cache.truncate(8)?;
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
    }
    Ok(())
}

/// Up to and with the end of the text.
fn sequences(tensor: &Tensor) -> Result<Vec<Vec<u32>>> {
    let rows: Vec<Vec<i64>> = tensor.to_vec2()?;
    let until_end = |row: Vec<i64>| {
        let end = row.iter().position(|&token| token == 2).map_or(row.len(), |end| end + 1);
        row[..end].iter().map(|&token| token as u32).collect()
    };
    Ok(rows.into_iter().map(until_end).collect())
}

#[test]
fn an_encoder_decoder_equals_transformers() -> Result {
    let (model, report) = EncoderDecoder::from_dir(golden("bert2bert"), DType::F32, &Cpu)?;
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
        let config = GenerateConfig { strategy, ..GenerateConfig::greedy(12) };
        let written = model.generate(ids, mask, &config)?;
        assert_eq!(written, sequences(golden.get(name))?, "{name}");
    }
    Ok(())
}

#[test]
fn tokens_stream_as_they_are_chosen() -> Result {
    let (model, _) = EncoderDecoder::from_dir(golden("bert2bert"), DType::F32, &Cpu)?;
    let golden = Golden::open("bert2bert/expected.safetensors")?;
    let memory = model.memory(golden.get("input_ids"), Some(golden.get("mask")))?;
    let config = GenerateConfig { eos_token_id: Some(2), ..GenerateConfig::greedy(12) };
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
