//! BERT-base at full size against candle-transformers, from a checkpoint with the LayerNorm names
//! `gamma` and `beta`.

use std::collections::HashMap;

use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::bert as peer;
use encoder::{BertConfig, BertModel, Precision};
use mha::AttentionMask;
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::support::assert_close;

/// Seeded random tensors of BERT-base with a standard deviation of 0.02. The names have the prefix
/// `bert.` and the LayerNorm names of TensorFlow.
fn weights(config: &BertConfig) -> candle_core::Result<HashMap<String, Tensor>> {
    let (e, f) = (config.hidden_size, config.intermediate_size);
    let mut rng = StdRng::seed_from_u64(20260);
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize], mean: f32| {
        let n: usize = shape.iter().product();
        // uniform distribution
        let values = (0..n).map(|_| mean + (rng.random::<f32>() - 0.5) * 0.04 * 3f32.sqrt());
        let tensor = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &Cpu)?;
        tensors.insert(format!("bert.{name}"), tensor);
        candle_core::Result::Ok(())
    };
    for (name, rows) in [
        ("word", config.vocab_size),
        ("position", config.max_position_embeddings),
        ("token_type", config.type_vocab_size),
    ] {
        add(format!("embeddings.{name}_embeddings.weight"), &[rows, e], 0.)?;
    }
    let layers = (0..config.num_hidden_layers).map(|i| format!("encoder.layer.{i}."));
    for layer in layers.clone() {
        for (name, out, into) in [
            ("attention.self.query", e, e),
            ("attention.self.key", e, e),
            ("attention.self.value", e, e),
            ("attention.output.dense", e, e),
            ("intermediate.dense", f, e),
            ("output.dense", e, f),
        ] {
            add(format!("{layer}{name}.weight"), &[out, into], 0.)?;
            add(format!("{layer}{name}.bias"), &[out], 0.)?;
        }
    }
    let norms =
        layers.flat_map(|layer| [format!("{layer}attention.output."), format!("{layer}output.")]);
    for prefix in norms.chain(["embeddings.".to_string()]) {
        add(format!("{prefix}LayerNorm.gamma"), &[e], 1.)?;
        add(format!("{prefix}LayerNorm.beta"), &[e], 0.)?;
    }
    Ok(tensors)
}

#[test]
fn bert_base_equals_candle_transformers() -> anyhow::Result<()> {
    let config = BertConfig::bert_base();
    let weights = weights(&config)?;
    let dir = tempfile::tempdir()?;
    candle_core::safetensors::save(&weights, dir.path().join("model.safetensors"))?;
    std::fs::write(dir.path().join("config.json"), serde_json::to_string(&config)?)?;

    let (model, report) = BertModel::from_dir(dir.path(), Precision::F32, &Cpu)?;
    println!("{report}");
    assert_eq!((report.prefix.as_str(), report.loaded.len()), ("bert.", 197));
    assert_eq!(report.parameters, 108_891_648); // 109.5 M with the pooler

    let vb = VarBuilder::from_tensors(weights, DType::F32, &Cpu);
    let theirs = peer::BertModel::load(vb, &peer::Config::default())?;

    let (b, t) = (3, 37);
    let id = |i: usize, modulo: u32| (i as u32).wrapping_mul(2_654_435_761) % modulo;
    let input_ids: Vec<u32> = (0..b * t).map(|i| id(i, 30_522)).collect();
    let types: Vec<u32> = (0..b * t).map(|i| id(i, 2)).collect();
    let input_ids = Tensor::from_vec(input_ids, (b, t), &Cpu)?;
    let types = Tensor::from_vec(types, (b, t), &Cpu)?;
    let positions = Tensor::arange(0u32, t as u32, &Cpu)?.unsqueeze(0)?;
    let lens = Tensor::new(&[37u32, 1, 20], &Cpu)?;
    let padding = positions.broadcast_lt(&lens.unsqueeze(1)?)?; // (B, T)

    let mask = AttentionMask::none().with_valid_lens(&lens)?;
    let ours = model.forward(&input_ids, Some(&types), &mask)?;
    let theirs = theirs.forward(&input_ids, &types, Some(&padding.to_dtype(DType::U32)?))?;
    let visible = padding.to_dtype(DType::F32)?.unsqueeze(2)?;
    let theirs = theirs.broadcast_mul(&visible)?;
    assert!(ours.pooler_output.is_none());
    assert_close("BERT-base", &ours.last_hidden_state, &theirs, 1e-5);
    Ok(())
}
