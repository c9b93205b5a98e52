//! Compares models with transformers and sentence-transformers, from the golden files that
//! tests/golden/generate.py writes.
//!
//! Tolerances: hidden states after layer normalisation have values of about 1 and pass through a
//! few hundred f32 sums: 1e-5. Normalised embeddings have values of about 0.05: 1e-6.

use candle_core::{DType, Device::Cpu, IndexOp, Module, Tensor, safetensors};
use encoder::{Activation, Embedder, EncoderModel, LoadOptions};
use mha::AttentionMask;

use crate::support::{Golden, MINILM, assert_close, golden as golden_path};

type Result<T = ()> = anyhow::Result<T>;

/// The tolerance is relative for values above 1: outputs reach 20.
#[test]
fn activations_equal_transformers() -> Result {
    let golden = Golden::open("activations.safetensors")?;
    let names = golden.tensors().into_keys().filter(|name| name != "x");
    let names: Vec<String> = names.collect();
    assert_eq!(names.len(), 12);
    for name in names {
        let activation = Activation::try_from(name.clone()).map_err(anyhow::Error::msg)?;
        let got = activation.forward(golden.get("x"))?;
        let scale = golden.get(&name).abs()?.maximum(1f32)?;
        let expected = (golden.get(&name) / &scale)?;
        assert_close(&name, &(got / scale)?, &expected, 1e-6);
    }
    Ok(())
}

/// The checkpoint `bert_relu` has the prefix `bert.` and the old names gamma and beta. Both batches
/// have padding before and after the tokens.
#[test]
fn tiny_bert_equals_transformers() -> Result {
    for name in ["bert_gelu", "bert_relu"] {
        let (model, report) = EncoderModel::from_dir(golden_path(name), &LoadOptions::default())?;
        println!("{report}");
        let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
        let (input_ids, types) = (golden.get("input_ids"), golden.get("token_type_ids"));
        let mask = AttentionMask::none().with_padding(golden.get("mask"))?;
        let (out, all) = model.forward_all(input_ids, Some(types), &mask)?;

        // Hidden states of padding are zero here; transformers computes values for them.
        let visible = golden.get("mask").to_dtype(DType::F32)?; // (B, T)
        let tokens = visible.unsqueeze(2)?;
        assert_eq!(all.hidden_states.len(), 4);
        for (i, hidden) in all.hidden_states.iter().enumerate() {
            let expected = golden.get(&format!("hidden_states.{i}")).broadcast_mul(&tokens)?;
            assert_close(&format!("{name} hidden_states.{i}"), hidden, &expected, 1e-5);
        }
        assert_eq!(all.attentions.len(), 3);
        for (i, weights) in all.attentions.iter().enumerate() {
            let expected = golden.get(&format!("attentions.{i}"));
            assert_close(&format!("{name} attentions.{i}"), weights, expected, 1e-5);
        }
        let plain = model.forward(input_ids, Some(types), &mask)?;
        let expected = golden.get("hidden_states.3").broadcast_mul(&tokens)?;
        assert_close("ragged", &plain.last_hidden_state, &expected, 1e-5);

        // The pooler of transformers reads column 0, even if it is padding. The pooler here reads
        // the first token: column 4 and 3 in the last two sequences.
        let weights = safetensors::load(golden_path(&format!("{name}/model.safetensors")), &Cpu)?;
        let weight = |end: &str| weights.iter().find(|(name, _)| name.ends_with(end)).unwrap().1;
        let (w, b) = (weight("pooler.dense.weight"), weight("pooler.dense.bias"));
        let pooled = |row: usize, column: usize| -> candle_core::Result<Tensor> {
            let first = golden.get("hidden_states.3").i((row..row + 1, column))?;
            first.matmul(&w.t()?)?.broadcast_add(b)?.tanh()
        };
        let first_three = golden.get("pooler_output").narrow(0, 0, 3)?;
        let expected = Tensor::cat(&[first_three, pooled(3, 4)?, pooled(4, 3)?], 0)?;
        for got in [out.pooler_output, plain.pooler_output] {
            assert_close("pooler_output", &got.expect("a pooler"), &expected, 1e-5);
        }
    }
    Ok(())
}

/// A head mask of ones has no effect on the result, although the padding is then not left out.
#[test]
fn ragged_and_padded_batches_treat_padding_alike() -> Result {
    let (model, _) = EncoderModel::from_dir(golden_path("bert_gelu"), &LoadOptions::default())?;
    let ids = Tensor::new(&[[0u32, 5, 6, 7]], &Cpu)?;
    let padding = AttentionMask::none().with_padding(&Tensor::new(&[[0u8, 1, 1, 1]], &Cpu)?)?;
    let heads = padding.clone().with_head_mask(&Tensor::ones(4, DType::F32, &Cpu)?)?;
    let expected = model.forward(&ids, None, &padding)?;
    let got = model.forward(&ids, None, &heads)?;
    assert_close("hidden", &got.last_hidden_state, &expected.last_hidden_state, 1e-5);
    assert_close("pooled", &got.pooler_output.unwrap(), &expected.pooler_output.unwrap(), 1e-5);
    Ok(())
}

/// The padding of a batch with a causal mask is not left out. The tokens of a prefix do not attend
/// to later tokens.
#[test]
fn a_causal_mask_hides_later_tokens_in_a_model() -> Result {
    let (model, _) = EncoderModel::from_dir(golden_path("bert_gelu"), &LoadOptions::default())?;
    let ids = Tensor::new(&[[5u32, 6, 7, 8, 9]], &Cpu)?;
    let run =
        |ids: &Tensor| Ok(model.forward(ids, None, &AttentionMask::causal(0))?.last_hidden_state);
    let (whole, prefix): (Result<Tensor>, Result<Tensor>) = (run(&ids), run(&ids.narrow(1, 0, 3)?));
    assert_close("prefix", &whole?.narrow(1, 0, 3)?, &prefix?, 1e-5);
    Ok(())
}

/// Compares stage by stage: the first stage that fails locates the error.
#[test]
fn sentences_equal_sentence_transformers() -> Result {
    let expected = Golden::open("sentences.safetensors")?;
    let texts = std::fs::read_to_string(golden_path("sentences.txt"))?;
    let texts: Vec<&str> = texts.lines().collect();
    let embedder = Embedder::from_dir(MINILM, &LoadOptions::default())?;

    let tokens = embedder.tokenizer().encode(&texts)?;
    for (i, tokens) in tokens.iter().enumerate() {
        let ids = expected.get(&format!("input_ids.{i}")).to_vec1::<i64>()?;
        let got: Vec<i64> = tokens.input_ids.iter().map(|&id| id.into()).collect();
        assert_eq!(got, ids, "token ids of {:?}", texts[i]);
    }
    for (i, tokens) in tokens.iter().enumerate().take(3) {
        let ids = Tensor::new(&tokens.input_ids[..], &Cpu)?.unsqueeze(0)?;
        let (out, all) = embedder.encoder()?.forward_all(&ids, None, &AttentionMask::none())?;
        for (stage, got) in [
            ("embeddings", &all.hidden_states[0]),
            ("layer_0_attention", &all.attentions[0]),
            ("layer_0_output", &all.hidden_states[1]),
            ("last_layer", &out.last_hidden_state),
        ] {
            let stage = format!("{stage}.{i}");
            assert_close(&stage, got, expected.get(&stage), 1e-5);
        }
    }
    let pooled = embedder.embed(&texts)?;
    assert_close("ten sentences, normalised", &pooled, expected.get("pooled"), 1e-6);
    Ok(())
}

#[test]
fn edge_case_texts_equal_sentence_transformers() -> Result {
    let expected = Golden::open("sentences.safetensors")?;
    let texts = std::fs::read_to_string(golden_path("edge_cases.json"))?;
    let texts: Vec<String> = serde_json::from_str(&texts)?;
    let embedder = Embedder::from_dir(MINILM, &LoadOptions::default())?;
    let got = embedder.embed(&texts)?;
    for (i, text) in texts.iter().enumerate() {
        let start: String = text.chars().take(40).collect();
        let expected = expected.get("edge_cases").get(i)?;
        assert_close(&format!("{start:?}"), &got.get(i)?, &expected, 1e-6);
    }
    assert_eq!(embedder.embed::<&str>(&[])?.dims(), [0, 384]);
    Ok(())
}
