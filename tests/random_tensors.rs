//! A random checkpoint. The comparison with candle-transformers in benches/tests/ uses it too.

use std::collections::HashMap;

use candle_core::{Device::Cpu, Tensor};
use encoder::BertConfig;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The tensors of an encoder of these sizes, with a standard deviation of 0.02 and a fixed seed.
/// The names have the prefix `bert.`, and those of LayerNorm end in `gamma` and `beta`, as in
/// TensorFlow.
pub fn random_tensors(config: &BertConfig) -> candle_core::Result<HashMap<String, Tensor>> {
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
