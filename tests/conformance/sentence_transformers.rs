//! sentence-transformers folders: pooling, modules, prompts and settings.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device::Cpu, IndexOp, Tensor};
use encoder::{
    EmbedOptions, Embedder, LoadOptions, MaskFiller, ModelFiles, Pooling, PoolingMode, Prompt,
};
use serde_json::json;

use super::{CONFIG, Checkpoint, Outcome, Table, VOCAB, WEIGHTS, compare};
use crate::support::max_difference;

const POOLING_CONFIG: &str = "1_Pooling/config.json";
const MODEL_CONFIG: &str = "config_sentence_transformers.json";

pub(super) fn cases(t: &mut Table) {
    t.section("sentence-transformers");
    pooling(t);
    normalize_and_dense(t);
    prompts(t);
    settings(t);
    folders(t);
    modules(t);
}

fn pooling(t: &mut Table) {
    let weights = |h: &Tensor| Tensor::arange(1f32, h.dim(0)? as f32 + 1.0, &Cpu)?.unsqueeze(1);
    // Each mode's formula for hidden states h: (T, E) with T = 4.
    type PoolFn<'a> = dyn Fn(&Tensor) -> candle_core::Result<Tensor> + 'a;
    let formulas: [(&str, &PoolFn); 6] = [
        ("cls", &|h| h.i(0)),
        ("max", &|h| h.max(0)),
        ("mean", &|h| h.mean(0)),
        ("mean_sqrt_len_tokens", &|h| h.sum(0)? / (h.dim(0)? as f64).sqrt()),
        ("weightedmean", &|h| h.broadcast_mul(&weights(h)?)?.sum(0)? / 10.0),
        ("lasttoken", &|h| h.i(3)),
    ];
    let flags = |name: &str| {
        let flag = match name {
            "cls" | "lasttoken" => format!("pooling_mode_{}", name.replace("cls", "cls_token")),
            "max" | "mean" | "weightedmean" => format!("pooling_mode_{name}_tokens"),
            _ => format!("pooling_mode_{name}"),
        };
        json!({"word_embedding_dimension": 24, "pooling_mode_mean_tokens": name == "mean", flag: true})
    };
    for (name, expected) in formulas {
        t.case(&format!("pooling {name}"), |c| {
            let json = flags(name).to_string();
            c.add_pooling().set_file(POOLING_CONFIG, json).check_embedding(expected)
        });
    }
    t.case("pooling cls and max, concatenated", |c| {
        let json = r#"{"pooling_mode": ["cls", "max"]}"#;
        let both = |h: &Tensor| Tensor::cat(&[h.i(0)?, h.max(0)?], 0);
        c.add_pooling().set_file(POOLING_CONFIG, json).check_embedding(both)
    });
    t.case("unknown pooling_mode", |c| {
        c.add_pooling().set_file(POOLING_CONFIG, r#"{"pooling_mode": "median"}"#);
        c.check_embedding(|h| h.i(0))
    });
    t.case("include_prompt false", |c| {
        let json = r#"{"pooling_mode": "mean", "include_prompt": false}"#;
        let prompts = r#"{"prompts": {"p": "a "}, "default_prompt_name": "p"}"#;
        c.add_pooling().set_file(POOLING_CONFIG, json);
        c.set_file(MODEL_CONFIG, prompts);
        let expected = c.hidden_states(&[2, 5, 6, 3])?.i(2..)?.mean(0)?; // b and [SEP]
        let got = c.embedder()?.embed(&["b"])?.squeeze(0)?;
        Ok(compare("the formula", max_difference(&got, &expected)?))
    });
}

fn normalize_and_dense(t: &mut Table) {
    t.case("Normalize", |c| {
        c.add_pooling().add_module("Normalize", "2_Normalize").check_embedding(|h| {
            let mean = h.mean(0)?;
            mean.broadcast_div(&mean.sqr()?.sum_all()?.sqrt()?)
        })
    });
    t.case("FlexibleQuantizer of pplx-embed", |c| {
        c.add_pooling().add_module_of("st_quantize.FlexibleQuantizer", "");
        c.check_embedding(|h| (h.mean(0)?.tanh()? * 127.0)?.round())
    });
    let dense = |c: &mut Checkpoint, config: &str| {
        let weight = Tensor::ones((2, 24), DType::F32, &Cpu).unwrap();
        let bias = Tensor::new(&[0.5f32, -0.5], &Cpu).unwrap();
        let tensors = HashMap::from([("linear.weight", weight), ("linear.bias", bias)]);
        c.add_pooling().add_module("Dense", "2_Dense").set_file("2_Dense/config.json", config);
        c.set_file("2_Dense/model.safetensors", safetensors::serialize(&tensors, None).unwrap());
    };
    let sum =
        |h: &Tensor| h.mean(0)?.sum_keepdim(0)?.broadcast_add(&Tensor::new(&[0.5f32, -0.5], &Cpu)?);
    t.case("Dense without activation_function: tanh", |c| {
        dense(c, r#"{"in_features": 24, "out_features": 2, "bias": true}"#);
        c.check_embedding(|h| sum(h)?.tanh())
    });
    for (case, config) in [
        (
            "Dense with activation_function Identity",
            r#"{"in_features": 24, "out_features": 2, "activation_function": "torch.nn.modules.linear.Identity"}"#,
        ),
        (
            "Dense with an unknown activation_function",
            r#"{"in_features": 24, "out_features": 2, "activation_function": "mine.F"}"#,
        ),
        (
            "Dense with activation_function null",
            r#"{"in_features": 24, "out_features": 2, "activation_function": null}"#,
        ),
        ("Dense with bias null", r#"{"in_features": 24, "out_features": 2, "bias": null}"#),
        ("Dense with the wrong in_features", r#"{"in_features": 25, "out_features": 2}"#),
        (
            "Dense without residual.weight",
            r#"{"in_features": 24, "out_features": 2, "use_residual": true}"#,
        ),
        (
            "Dense applied to the token embeddings",
            r#"{"in_features": 24, "out_features": 2, "module_input_name": "token_embeddings"}"#,
        ),
    ] {
        t.case(case, |c| {
            dense(c, config);
            c.check_embedding(sum)
        });
    }
}

fn prompts(t: &mut Table) {
    let prompts = r#"{"prompts": {"query": "a ", "document": ""}, "default_prompt_name": null}"#;
    let prompted = |c: &mut Checkpoint, prompt: Prompt| -> Outcome {
        c.add_pooling().set_file(MODEL_CONFIG, prompts);
        let options = EmbedOptions::new().with_prompt(prompt);
        let got = c.embedder()?.embed_with(&["b"], options)?.vectors.squeeze(0)?;
        let same = |ids: &[u32]| -> anyhow::Result<bool> {
            Ok(max_difference(&got, &c.hidden_states(ids)?.mean(0)?)? < 1e-5)
        };
        Ok(match (same(&[2, 5, 6, 3])?, same(&[2, 6, 3])?) {
            (true, false) => "with the prompt",
            (false, true) => "without the prompt",
            _ => "neither",
        }
        .to_string())
    };
    t.case("prompt of encode_query", |c| prompted(c, Prompt::Query));
    t.case("prompt of encode_document", |c| prompted(c, Prompt::Document));
    t.case("--prompt-name query", |c| prompted(c, Prompt::Named("query")));
    t.case("unknown --prompt-name", |c| prompted(c, Prompt::Named("topic")));
}

fn settings(t: &mut Table) {
    t.case("truncated to 3 dimensions, then normalised", |c| {
        c.add_pooling().add_module("Normalize", "");
        let embedder = c.embedder()?;
        let first = embedder.embed(&["a b"])?.i(0)?.narrow(0, 0, 3)?;
        let expected = first.broadcast_div(&first.sqr()?.sum_all()?.sqrt()?)?;
        let got = embedder.with_dimension(3)?.embed(&["a b"])?;
        let same = max_difference(&got.i(0)?, &expected)? < 1e-6;
        Ok(if same { "the first 3 values, of length 1" } else { "other values" }.to_string())
    });
    for (case, file, json) in [
        (
            "unknown default_prompt_name",
            MODEL_CONFIG,
            r#"{"prompts": {"query": "q "}, "default_prompt_name": "topic"}"#,
        ),
        ("negative max_seq_length", "sentence_bert_config.json", r#"{"max_seq_length": -1}"#),
        ("max_seq_length 2", "sentence_bert_config.json", r#"{"max_seq_length": 2}"#),
        (
            "a module with custom code",
            "modules.json",
            r#"[{"type": "custom_st.Transformer", "path": ""}, {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#,
        ),
        ("modules.json with invalid JSON", "modules.json", "["),
    ] {
        t.case(case, |c| c.add_pooling().set_file(file, json).check_embedding(|h| h.i(0)));
    }
    t.case("truncate_dim larger than the embedding", |c| {
        c.add_pooling().set_file(MODEL_CONFIG, r#"{"truncate_dim": 25}"#);
        c.check_embedding(|h| h.mean(0))
    });
    for file in
        ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json"]
    {
        t.case(&format!("max_seq_length in {file}"), |c| {
            c.set_file(file, r#"{"max_seq_length": 4, "do_lower_case": false}"#);
            c.embedder_token_ids("a b c")
        });
    }
}

fn folders(t: &mut Table) {
    t.case("no modules.json", |c| c.set_file("vocab.txt", VOCAB).check_embedding(|h| h.mean(0)));
    t.case("no modules.json, pooling chosen by the caller", |c| {
        c.set_file("vocab.txt", VOCAB);
        let pooling = Pooling::new(&[PoolingMode::Cls])?;
        let embedder = Embedder::from_transformer(&c.files(), pooling, &LoadOptions::default())?;
        let got = embedder.embed(&["a b"])?.squeeze(0)?;
        let expected = c.hidden_states(&[2, 5, 6, 3])?.i(0)?;
        Ok(compare("the formula", max_difference(&got, &expected)?))
    });
    t.case("Transformer module in a subfolder", |c| {
        let moved = |name: &str| ["vocab.txt", CONFIG, WEIGHTS].contains(&name);
        let path = |name: String| if moved(&name) { format!("0_BERT/{name}") } else { name };
        let contents = c.add_pooling().contents();
        let mut files: BTreeMap<_, _> =
            contents.into_iter().map(|(name, bytes)| (path(name), bytes)).collect();
        let modules = String::from_utf8(files["modules.json"].clone())?;
        let modules = modules.replacen("\"path\":\"\"", "\"path\":\"0_BERT\"", 1);
        files.insert("modules.json".into(), modules.into_bytes());
        let files = ModelFiles::memory("m", files);
        let got = Embedder::from_files(&files, &LoadOptions::default())?.embed(&["a b"])?;
        Ok(compare(
            "the formula",
            max_difference(&got.squeeze(0)?, &c.hidden_states(&[2, 5, 6, 3])?.mean(0)?)?,
        ))
    });
    t.case("Pooling config without an enabled mode: mean", |c| {
        c.add_pooling().set_file(POOLING_CONFIG, r#"{"pooling_mode_cls_token": false}"#);
        c.check_embedding(|h| h.mean(0))
    });
    t.case("unknown pooling_mode_* flag", |c| {
        c.add_pooling().set_file(POOLING_CONFIG, r#"{"pooling_mode_median": true}"#);
        c.check_embedding(|h| h.mean(0))
    });
    t.case("model_type SparseEncoder", |c| {
        c.add_pooling().set_file(MODEL_CONFIG, r#"{"model_type": "SparseEncoder"}"#);
        c.check_embedding(|h| h.mean(0))
    });
    t.case("model_type CrossEncoder, caller chooses pooling", |c| {
        c.add_pooling().set_file(
            MODEL_CONFIG,
            r#"{"model_type": "CrossEncoder", "prompts": {"q": "c "}, "default_prompt_name": "q"}"#,
        );
        let embedder = Embedder::from_transformer(
            &c.files(),
            PoolingMode::Mean.into(),
            &LoadOptions::default(),
        )?;
        let got = embedder.embed(&["a b"])?.squeeze(0)?;
        Ok(compare("the formula", max_difference(&got, &c.hidden_states(&[2, 5, 6, 3])?.mean(0)?)?))
    });
    t.head_case("masked_lm", "fill-mask with an unsupported modules.json", |c| {
        let modules = json!([{"type": "pylate.models.Splade", "path": ""}]);
        c.set_file("modules.json", modules.to_string());
        let filled =
            MaskFiller::from_files(&c.files(), &LoadOptions::default())?.fill("[MASK]", 1)?;
        Ok(format!("{} filled", filled.len()))
    });
}

fn modules(t: &mut Table) {
    t.case("Transformer module without Pooling", |c| {
        let modules = json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]);
        c.add_pooling().set_file("modules.json", modules.to_string()).check_embedding(|h| h.mean(0))
    });
    t.case("unsupported module LSTM", |c| {
        c.add_pooling().add_module("LSTM", "2").check_embedding(|h| h.i(0))
    });
    for path in ["../x", "/etc", "1_Pooling/../.."] {
        t.case(&format!("module path {path}"), |c| {
            c.add_pooling().add_module("Dense", path).check_embedding(|h| h.i(0))
        });
    }
    // The Pooling's folder, which has the config of CLS pooling. Other folders have other configs.
    for path in ["1_Pooling", "./1_Pooling", "1_Pooling//", "", ".", "2_Dense", "3"] {
        t.case(&format!("Pooling with path {path:?}"), |c| {
            set_modules(c, json!({"path": path})).check_embedding(|h| h.i(0))
        });
    }
    for (name, entry) in [
        ("Pooling without path", json!({})),
        ("Pooling with path null", json!({"path": null})),
        ("Pooling with the name of the Transformer", json!({"path": "1_Pooling", "name": "0"})),
    ] {
        t.case(name, |c| set_modules(c, entry).check_embedding(|h| h.i(0)));
    }
    for (name, config) in [
        ("Pooling config {}", json!({})),
        ("Pooling config with pooling_mode null", json!({"pooling_mode": null})),
        ("Pooling config with the dimension only", json!({"word_embedding_dimension": 24})),
    ] {
        t.case(name, |c| {
            c.add_pooling().set_file(POOLING_CONFIG, config.to_string());
            c.check_embedding(|h| h.mean(0))
        });
    }
}

/// A Transformer and a Pooling with CLS pooling in `1_Pooling`; `entry` has further keys of the
/// Pooling's entry in `modules.json`. The folder `2_Dense` has the config of a Dense.
fn set_modules(c: &mut Checkpoint, mut entry: serde_json::Value) -> &mut Checkpoint {
    entry["type"] = json!("sentence_transformers.models.Pooling");
    let transformer =
        json!({"type": "sentence_transformers.models.Transformer", "path": "", "name": "0"});
    c.add_pooling().set_file("modules.json", json!([transformer, entry]).to_string());
    c.set_file(POOLING_CONFIG, r#"{"pooling_mode": "cls"}"#);
    c.set_file("2_Dense/config.json", r#"{"in_features": 24, "out_features": 2}"#)
}
