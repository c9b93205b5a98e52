//! Compares BERT models with [`encoder::reference`], on golden, published and random weights.
//!
//! Tolerance: hidden states after layer normalisation have values of about 1 and pass through a few
//! hundred f32 sums: 1e-5.

use std::{collections::HashMap, path::Path};

use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use encoder::{BertConfig, EncoderModel, LoadOptions, reference};
use mha::AttentionMask;

use crate::{
    random_tensors::random_tensors,
    support::{Golden, MINILM, assert_close, golden},
};

type Result<T = ()> = anyhow::Result<T>;

/// The tensors and the config of a folder, in f32 and with the names that the reference has.
fn checkpoint(dir: &Path) -> Result<(HashMap<String, Tensor>, BertConfig)> {
    let tensors = safetensors::load(dir.join("model.safetensors"), &Cpu)?;
    let rename = |name: String| {
        let name = name.trim_start_matches("bert.");
        name.replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias")
    };
    let tensors =
        tensors.into_iter().map(|(name, tensor)| Ok((rename(name), tensor.to_dtype(DType::F32)?)));
    let config = serde_json::from_slice(&std::fs::read(dir.join("config.json"))?)?;
    Ok((tensors.collect::<Result<_>>()?, config))
}

/// Compares the embeddings and the output of every layer, batched and ragged.
fn compare(dir: &Path, ids: &Tensor, types: &Tensor, padding: &Tensor) -> Result {
    let (tensors, config) = checkpoint(dir)?;
    let expected = reference::bert(&tensors, &config, ids, types, padding)?;
    let visible = padding.to_dtype(DType::F32)?.unsqueeze(2)?; // (B, T, 1)
    let expected: Vec<Tensor> =
        expected.iter().map(|x| x.broadcast_mul(&visible)).collect::<candle_core::Result<_>>()?;

    let (model, _) = EncoderModel::from_dir(dir, &LoadOptions::default())?;
    let mask = AttentionMask::none().with_padding(padding)?;
    let (_, all) = model.forward_all(ids, Some(types), &mask)?;
    assert_eq!(all.hidden_states.len(), expected.len());
    let name = dir.file_name().unwrap_or_default().display();
    for (i, (got, expected)) in all.hidden_states.iter().zip(&expected).enumerate() {
        assert_close(&format!("{name} hidden_states.{i}"), got, expected, 1e-5);
    }
    let ragged = model.forward(ids, Some(types), &mask)?;
    assert_close(
        &format!("{name} ragged"),
        &ragged.last_hidden_state,
        expected.last().unwrap(),
        1e-5,
    );
    Ok(())
}

/// Ids, types and padding `(3, t)`: a whole sequence, one of a single token, and one of half the
/// length.
fn batch(t: usize, vocab_size: usize) -> Result<[Tensor; 3]> {
    let id = |i: usize, modulo: u32| (i as u32).wrapping_mul(2_654_435_761) % modulo;
    let ids = Tensor::from_iter((0..3 * t).map(|i| id(i, vocab_size as u32)), &Cpu)?;
    let types = Tensor::from_iter((0..3 * t).map(|i| id(i, 2)), &Cpu)?;
    let lens = [t, 1, t / 2];
    let padding = (0..3 * t).map(|i| u8::from(i % t < lens[i / t]));
    let shaped = [ids, types, Tensor::from_iter(padding, &Cpu)?].map(|x| x.reshape((3, t)));
    let [ids, types, padding] = shaped;
    Ok([ids?, types?, padding?])
}

#[test]
fn golden_models_equal_the_reference() -> Result {
    for name in ["bert_gelu", "bert_relu"] {
        let inputs = Golden::open(&format!("{name}/expected.safetensors"))?;
        let [ids, types, mask] = ["input_ids", "token_type_ids", "mask"].map(|n| inputs.get(n));
        compare(&golden(name), ids, types, mask)?;
    }
    Ok(())
}

/// The reference needs nothing of this project's loader, so this also checks the golden files.
#[test]
fn the_reference_equals_transformers() -> Result {
    for name in ["bert_gelu", "bert_relu"] {
        let (tensors, config) = checkpoint(&golden(name))?;
        let expected = Golden::open(&format!("{name}/expected.safetensors"))?;
        let [ids, types, mask] = ["input_ids", "token_type_ids", "mask"].map(|n| expected.get(n));
        let hidden = reference::bert(&tensors, &config, ids, types, mask)?;
        for (i, hidden) in hidden.iter().enumerate() {
            let stage = format!("hidden_states.{i}");
            assert_close(&format!("{name} reference {stage}"), hidden, expected.get(&stage), 1e-5);
        }
    }
    Ok(())
}

#[test]
fn minilm_equals_the_reference() -> Result {
    let [ids, types, padding] = batch(41, 30522)?;
    compare(Path::new(MINILM), &ids, &types, &padding)
}

#[test]
fn models_with_heads_of_26_32_and_64_equal_the_reference() -> Result {
    for head_dim in [26, 32, 64] {
        let mut config = BertConfig::bert_base();
        config.vocab_size = 101;
        config.hidden_size = 2 * head_dim;
        config.num_attention_heads = 2;
        config.num_hidden_layers = 3;
        config.intermediate_size = 77;
        let dir = tempfile::tempdir()?;
        safetensors::save(&random_tensors(&config)?, dir.path().join("model.safetensors"))?;
        std::fs::write(dir.path().join("config.json"), serde_json::to_string(&config)?)?;
        let [ids, types, padding] = batch(37, config.vocab_size)?;
        compare(dir.path(), &ids, &types, &padding)?;
    }
    Ok(())
}
