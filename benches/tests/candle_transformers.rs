//! Compares BERT models of this project with those of candle-transformers, on random weights.

#[path = "../../tests/random_tensors.rs"]
mod random_tensors;
#[allow(dead_code)] // this test uses `assert_close` only
#[path = "../../tests/support.rs"]
mod support;

use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert as peer;
use encoder::{BertConfig, EncoderModel, LoadOptions};
use mha::AttentionMask;

use crate::{random_tensors::random_tensors, support::assert_close};

/// Compares the hidden states of three sequences, two of which are padded.
fn compare(name: &str, config: &BertConfig) -> anyhow::Result<()> {
    let tensors = random_tensors(config)?;
    let dir = tempfile::tempdir()?;
    candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
    std::fs::write(dir.path().join("config.json"), serde_json::to_string(config)?)?;
    let (model, _) = EncoderModel::from_dir(dir.path(), &LoadOptions::default())?;

    let peer_config = peer::Config {
        vocab_size: config.vocab_size,
        hidden_size: config.hidden_size,
        num_hidden_layers: config.num_hidden_layers,
        num_attention_heads: config.num_attention_heads,
        intermediate_size: config.intermediate_size,
        ..Default::default() // BERT-base
    };
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
    let peer = peer::BertModel::load(vb, &peer_config)?;

    let (b, t) = (3, 37);
    let id = |i: usize, modulo: u32| (i as u32).wrapping_mul(2_654_435_761) % modulo;
    let ids: Vec<u32> = (0..b * t).map(|i| id(i, config.vocab_size as u32)).collect();
    let types: Vec<u32> = (0..b * t).map(|i| id(i, 2)).collect();
    let ids = Tensor::from_vec(ids, (b, t), &Cpu)?;
    let types = Tensor::from_vec(types, (b, t), &Cpu)?;
    let positions = Tensor::arange(0u32, t as u32, &Cpu)?.unsqueeze(0)?;
    let lens = Tensor::new(&[37u32, 1, 20], &Cpu)?;
    let padding = positions.broadcast_lt(&lens.unsqueeze(1)?)?; // (B, T)

    let mask = AttentionMask::none().with_valid_lens(&lens)?;
    let got = model.forward(&ids, Some(&types), &mask)?;
    assert!(got.pooler_output.is_none());
    let expected = peer.forward(&ids, &types, Some(&padding.to_dtype(DType::U32)?))?; // (B, T, E)
    let visible = padding.to_dtype(DType::F32)?.unsqueeze(2)?; // (B, T, 1)
    assert_close(name, &got.last_hidden_state, &expected.broadcast_mul(&visible)?, 1e-5);
    Ok(())
}

#[test]
fn bert_base_equals_candle_transformers() -> anyhow::Result<()> {
    compare("BERT-base", &BertConfig::bert_base())
}
