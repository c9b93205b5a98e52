//! Settings in `config.json`, and other configuration files.

use candle_core::{Device::Cpu, Tensor};
use encoder::{BertConfig, CausalLm, EncoderDecoder, EncoderModel, Labels, LoadOptions};
use mha::AttentionMask;
use serde_json::{Value, json};

use super::{CONFIG, Checkpoint, Outcome, Table, UNMODIFIED, compare};
use crate::support::max_difference;

pub(super) fn cases(t: &mut Table) {
    t.section("config.json");
    encoder_settings(t);
    decoder_settings(t);
    generation_settings(t);
    t.case("invalid JSON", |c| c.set_file(CONFIG, "{").check_encoder());
    activations(t);
    head_dims(t);
    labels(t);
}

fn encoder_settings(t: &mut Table) {
    t.case("only the eleven keys of the first BERT models", |c| {
        let known = [
            "attention_probs_dropout_prob",
            "hidden_act",
            "hidden_dropout_prob",
            "hidden_size",
            "initializer_range",
            "intermediate_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "type_vocab_size",
            "vocab_size",
        ];
        c.config.as_object_mut().unwrap().retain(|key, _| known.contains(&&key[..]));
        c.check_encoder()
    });
    for (case, key, value) in [
        ("torch_dtype float16", "torch_dtype", json!("float16")),
        ("dtype bfloat16", "dtype", json!("bfloat16")),
        ("layer_norm_eps null", "layer_norm_eps", Value::Null),
        ("hidden_act null", "hidden_act", Value::Null),
        ("type_vocab_size null", "type_vocab_size", Value::Null),
        ("layer_norm_eps as an integer", "layer_norm_eps", json!(0)),
        ("unknown key", "gradient_checkpointing", json!(true)),
        ("_num_labels 7 in an encoder", "_num_labels", json!(7)),
        ("label2id with string ids", "label2id", json!({"A": "0"})),
        ("pruned_heads empty", "pruned_heads", json!({})),
        ("pruned_heads in layer 2", "pruned_heads", json!({"2": [0, 3]})),
        ("unknown hidden_act", "hidden_act", json!("swiglu")),
        ("position_embedding_type relative_key", "position_embedding_type", json!("relative_key")),
        (
            "position_embedding_type relative_key_query",
            "position_embedding_type",
            json!("relative_key_query"),
        ),
        ("position_embedding_type alibi", "position_embedding_type", json!("alibi")),
        ("position_embedding_type rope", "position_embedding_type", json!("rope")),
        ("alibi_starting_size (MosaicML BERT)", "alibi_starting_size", json!(512)),
        ("feed_forward_type geglu (Jina v2)", "feed_forward_type", json!("geglu")),
        ("auto_map (custom code)", "auto_map", json!({"AutoModel": "jina--x.JinaBertModel"})),
        ("model_type xlnet", "model_type", json!("xlnet")),
        ("is_decoder true in an encoder", "is_decoder", json!(true)),
        ("hidden_size not divisible by num_attention_heads", "num_attention_heads", json!(5)),
        ("num_hidden_layers 0", "num_hidden_layers", json!(0)),
        ("negative vocab_size", "vocab_size", json!(-1)),
        ("fractional hidden_size", "hidden_size", json!(24.5)),
        ("huge vocab_size", "vocab_size", json!(1_000_000_000_000u64)),
        ("huge intermediate_size", "intermediate_size", json!(1_000_000_000_000u64)),
        ("huge max_position_embeddings", "max_position_embeddings", json!(1_000_000_000_000u64)),
        ("negative layer_norm_eps", "layer_norm_eps", json!(-1.0)),
    ] {
        t.case(case, |c| c.set_config(key, value).check_encoder());
    }
    t.case("missing hidden_size", |c| {
        c.config.as_object_mut().unwrap().remove("hidden_size");
        c.check_encoder()
    });
    for (case, key, value) in [
        ("is_causal true in an encoder", "is_causal", json!(true)),
        ("transformers_weights in an encoder", "transformers_weights", json!("other.safetensors")),
        (
            "configuration_files (one config per version)",
            "configuration_files",
            json!(["config.4.0.0.json"]),
        ),
    ] {
        t.case(case, |c| c.set_config(key, value).check_encoder());
    }
    t.case("adapter_config.json beside the weights", |c| {
        c.set_file("adapter_config.json", r#"{"peft_type": "LORA"}"#).check_encoder()
    });
}

fn decoder_settings(t: &mut Table) {
    for (case, key, value) in [
        ("is_causal false in a decoder", "is_causal", json!(false)),
        ("sliding_window in a decoder", "sliding_window", json!(2)),
    ] {
        t.case_from(Checkpoint::golden("bert_lm"), case, |c| {
            CausalLm::from_files(&c.set_config(key, value).files(), &LoadOptions::default())?;
            Ok("loaded".to_string())
        });
    }
    for (case, part, key, value) in [
        ("encoder.is_decoder true in an encoder-decoder", "encoder", "is_decoder", json!(true)),
        ("decoder.is_decoder false in an encoder-decoder", "decoder", "is_decoder", json!(false)),
        ("decoder.is_causal true in an encoder-decoder", "decoder", "is_causal", json!(true)),
    ] {
        t.case_from(Checkpoint::golden("bert2bert"), case, |c| {
            c.config[part][key] = value;
            EncoderDecoder::from_files(&c.files(), &LoadOptions::default())?;
            Ok("loaded".to_string())
        });
    }
    t.case_from(
        Checkpoint::golden("bert2bert"),
        "transformers_weights in an encoder-decoder",
        |c| {
            c.set_config("transformers_weights", json!("x.safetensors"));
            EncoderDecoder::from_files(&c.files(), &LoadOptions::default())?;
            Ok("loaded".to_string())
        },
    );
}

fn generation_settings(t: &mut Table) {
    for (case, ids) in [
        ("generation_config.json with two eos_token_id", r#"{"eos_token_id": [7, 9]}"#),
        ("generation_config.json with token ids", r#"{"bos_token_id": 7, "eos_token_id": [9]}"#),
        ("generation_config.json without token ids", "{}"),
    ] {
        t.case_from(Checkpoint::golden("bert2bert"), case, |c| {
            let files = c.set_file("generation_config.json", ids).files();
            let (model, _) = EncoderDecoder::from_files(&files, &LoadOptions::default())?;
            let config = model.config();
            Ok(format!("{:?} {:?}", config.decoder_start_token_id, config.eos_token_id))
        });
    }
    t.case_from(
        Checkpoint::golden("bert2bert"),
        "config.json with a list of one eos_token_id",
        |c| {
            c.set_config("eos_token_id", json!([9]));
            let (model, _) = EncoderDecoder::from_files(&c.files(), &LoadOptions::default())?;
            Ok(format!("{:?}", model.config().eos_token_id))
        },
    );
}

fn activations(t: &mut Table) {
    for activation in [
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_python",
        "gelu_pytorch_tanh",
        "relu",
        "silu",
        "swish",
        "tanh",
        "quick_gelu",
        "mish",
        "sigmoid",
    ] {
        t.case(&format!("hidden_act {activation}"), |c| {
            let json = c.set_config("hidden_act", json!(activation)).config.to_string();
            Ok(format!("{:?}", BertConfig::from_json(json.as_bytes(), CONFIG)?.hidden_act))
        });
    }
}

fn head_dims(t: &mut Table) {
    for (width, heads) in [(52, 2), (64, 2), (128, 2)] {
        t.case(&format!("head_dim {}", width / heads), |c| {
            *c = random_weights(width, heads);
            compare_with_forward_all(c)
        });
    }
}

fn labels(t: &mut Table) {
    let names = |json: Value| -> Outcome {
        let labels = Labels::from_json(json.to_string().as_bytes(), "m/config.json")?;
        Ok(labels.names().join(" "))
    };
    t.case("id2label out of order", |_| names(json!({"id2label": {"1": "b", "0": "a"}})));
    t.case("id2label with a gap", |_| names(json!({"id2label": {"2": "b", "0": "a"}})));
    t.case("num_labels 3", |_| names(json!({"num_labels": 3})));
    t.case("_num_labels 1", |_| names(json!({"_num_labels": 1})));
    t.case("neither id2label nor num_labels", |_| names(json!({})));
    t.case("huge num_labels", |_| names(json!({"num_labels": 10_000_000_000_u64})));
}

/// A checkpoint with `hidden_size` = `width` and weights from a linear congruential generator.
fn random_weights(width: usize, heads: usize) -> Checkpoint {
    let mut c = UNMODIFIED.clone();
    c.set_config("hidden_size", json!(width)).set_config("num_attention_heads", json!(heads));
    let mut state = 1u32;
    for (name, tensor) in &mut c.tensors {
        let dims: Vec<usize> =
            tensor.dims().iter().map(|&n| if n == 24 { width } else { n }).collect();
        let next_random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let n = dims.iter().product();
        let values: Vec<f32> = std::iter::repeat_with(next_random).take(n).collect();
        let x = Tensor::from_vec(values, dims, &Cpu).unwrap();
        *tensor = if name.ends_with("LayerNorm.weight") { (x + 1.0).unwrap() } else { x };
    }
    c
}

/// Compares the hidden states with those of `forward_all`, whose attention runs as candle
/// operations.
fn compare_with_forward_all(c: &Checkpoint) -> Outcome {
    let ids = [7u32, 50, 100, 1];
    let (model, _) = EncoderModel::from_files(&c.files(), &LoadOptions::default())?;
    let ids_tensor = Tensor::new(&ids, &Cpu)?.unsqueeze(0)?;
    let (out, _) = model.forward_all(&ids_tensor, None, &AttentionMask::none())?;
    let expected = out.last_hidden_state.squeeze(0)?; // (T, E)
    Ok(compare("forward_all", max_difference(&c.hidden_states(&ids)?, &expected)?))
}
