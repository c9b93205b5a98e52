//! Tensor names and dtypes, load reports and inspection.

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{CausalLm, EncoderDecoder, EncoderForMaskedLm, Inspection, LoadOptions, ModelFiles};
use serde_json::json;

use super::{CONFIG, Checkpoint, Outcome, QUERY_WEIGHT, Table};

pub(super) fn names_and_dtypes(t: &mut Table) {
    t.section("tensor names and dtypes");
    for prefix in ["", "bert.", "model.", "encoder.", "0.auto_model.", "module.bert."] {
        t.case(&format!("prefix {prefix:?}"), |c| {
            c.rename_tensors(|name| format!("{prefix}{name}")).check_encoder()
        });
    }
    t.case("two prefixes in one file", |c| {
        c.set_zeros("bert.embeddings.LayerNorm.bias", &[24]).check_encoder()
    });
    let gamma_and_beta = |name: &str| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        name.replace("LayerNorm.bias", "LayerNorm.beta")
    };
    t.case("LayerNorm.gamma and LayerNorm.beta", |c| {
        c.rename_tensors(gamma_and_beta).check_encoder()
    });
    t.case("gamma outside a LayerNorm", |c| {
        c.rename_tensors(|n| n.replace("2.output.dense.weight", "2.output.dense.gamma"))
            .check_encoder()
    });
    t.case("gamma in one LayerNorm, weight in the others", |c| {
        c.rename_tensors(|n| n.replace("embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"))
            .check_encoder()
    });
    t.case("buffer embeddings.position_ids", |c| {
        c.set_zeros("embeddings.position_ids", &[1, 19]).check_encoder()
    });
    t.case("buffer embeddings.token_type_ids", |c| {
        c.set_zeros("embeddings.token_type_ids", &[1, 19]).check_encoder()
    });
    t.case("no pooler", |c| {
        c.tensors.retain(|name, _| !name.starts_with("pooler"));
        c.check_encoder()
    });
    t.case("task-head tensors, loaded as an encoder", |c| {
        c.set_zeros("cls.predictions.bias", &[101]).set_zeros("classifier.weight", &[2, 24]);
        c.set_zeros("qa_outputs.bias", &[2]).check_encoder()
    });
    t.case("dtype f64, rounded to f32", |c| {
        // The f64 values differ from the f32 values by less than half an ulp of f32, so they round
        // to the f32 values.
        let below = |x: &Tensor| x.to_dtype(DType::F64)? * (1.0 - 2f64.powi(-26));
        c.tensors.values_mut().for_each(|x| *x = below(x).unwrap());
        c.check_encoder()
    });
    for dtype in [DType::F16, DType::BF16] {
        t.case(&format!("dtypes {} and f32", dtype.as_str()), |c| {
            // The pooler does not affect the compared hidden states.
            let ones = Tensor::ones(24, DType::F32, &Cpu)?;
            c.tensors.insert("pooler.dense.bias".into(), ones.to_dtype(dtype)?);
            c.check_encoder()
        });
    }
}

pub(super) fn reports(t: &mut Table) {
    t.section("load report");
    t.case("missing tensor, and one with a similar name", |c| {
        c.rename_tensors(|name| name.replace("2.attention.self.query.w", "2.attention.self.qury.w"))
            .check_encoder()
    });
    t.case("missing tensor", |c| {
        c.tensors.remove("encoder.layer.1.intermediate.dense.weight");
        c.check_encoder()
    });
    t.case("tensor with the wrong shape", |c| c.set_zeros(QUERY_WEIGHT, &[24, 23]).check_encoder());
    t.case("tensor of integers", |c| {
        let ids = Tensor::zeros((19, 24), DType::I64, &Cpu)?;
        c.tensors.insert("embeddings.position_embeddings.weight".into(), ids);
        c.check_encoder()
    });
    t.case("unexpected tensor", |c| {
        c.set_zeros("encoder.layer.0.extra.weight", &[1]).check_encoder()
    });
    t.case("one layer more than num_hidden_layers", |c| {
        c.set_config("num_hidden_layers", json!(2)).check_encoder().map_err(without_details)
    });
    t.case("one layer fewer than num_hidden_layers", |c| {
        c.set_config("num_hidden_layers", json!(4)).check_encoder().map_err(without_details)
    });
    t.head_case("masked_lm", "tied tensors, and the keys of the report's JSON", |c| {
        let (_, report) = EncoderForMaskedLm::from_files(&c.files(), &LoadOptions::default())?;
        let json = serde_json::to_value(report)?;
        let keys: Vec<String> = json.as_object().unwrap().keys().cloned().collect();
        Ok(format!("{} of {}", json["tied"], keys.join(" ")))
    });
}

/// The number of problems in a load error, without the list of them.
fn without_details(error: anyhow::Error) -> anyhow::Error {
    let text = error.to_string();
    anyhow::Error::msg(text.split(": ").next().unwrap_or_default().to_string())
}

pub(super) fn inspections(t: &mut Table) {
    t.section("inspection");
    t.case("an encoder", |c| inspect(c));
    t.case("a sentence-transformers folder", |c| inspect(c.add_pooling()));
    t.head_case("token", "a token classifier", |c| inspect(c));
    t.head_case("score", "a cross-encoder with modules.json", |c| {
        let modules = json!([{"type": "sentence_transformers.models.Transformer", "path": ""}]);
        inspect(c.set_file("modules.json", modules.to_string()))
    });
    for (case, folder) in [("a decoder", "bert_lm"), ("an encoder-decoder", "bert2bert")] {
        t.case_from(Checkpoint::golden(folder), case, |c| inspect(c));
    }
    t.case("an encoder with position_embedding_type rope", |c| {
        inspect(c.set_config("position_embedding_type", json!("rope")))
    });
    t.case("no config.json", |c| inspect(c.remove_file(CONFIG)));
    t.case("an encoder with a missing tensor", |c| {
        c.tensors.remove(QUERY_WEIGHT);
        inspect(c)
    });
    t.case_from(Checkpoint::golden("bert_lm"), "a decoder, loaded", |c| {
        let (model, report) = CausalLm::from_files(&c.files(), &LoadOptions::default())?;
        Ok(format!(
            "{} tensors, {} layers",
            report.loaded.len(),
            model.config().encoder.num_hidden_layers
        ))
    });
    t.case_from(Checkpoint::golden("bert2bert"), "an encoder-decoder, loaded", |c| {
        let (_, report) = EncoderDecoder::from_files(&c.files(), &LoadOptions::default())?;
        Ok(format!("{} tensors", report.loaded.len()))
    });
}

pub(super) fn inspect(checkpoint: &Checkpoint) -> Outcome {
    inspect_files(&checkpoint.files())
}

pub(super) fn inspect_files(files: &ModelFiles) -> Outcome {
    let found = Inspection::new(files);
    let mut outcome =
        format!("{} as {:?}", found.architecture.as_deref().unwrap_or("unknown"), found.runs_as);
    if !found.heads.is_empty() {
        outcome += &format!(", heads {:?}", found.heads);
    }
    for problem in &found.problems {
        outcome += &format!("; {problem}");
    }
    Ok(outcome)
}
