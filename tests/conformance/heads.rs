//! Task heads and the pipelines that use them.

use candle_core::{Device::Cpu, Tensor};
use encoder::{
    Aggregation, EncoderForMaskedLm, EncoderForNextSentencePrediction, EncoderForQuestionAnswering,
    EncoderForSequenceClassification, EncoderForTokenClassification, Labels, LoadOptions,
    MaskFiller, Pipeline, Prompt, QuestionAnswerer, RaggedBatch, TextClassifier, TokenClassifier,
    Tokens,
};
use mha::AttentionMask;
use serde_json::{Value, json};

use super::{CONFIG, Checkpoint, LogitsFn, Outcome, Table, first_value};
use crate::support::max_difference;

pub(super) fn cases(t: &mut Table) {
    t.section("task heads");
    logits(t);
    masked_lm_layouts(t);
    text_classifier(t);
    cross_encoder(t);
    edge_cases(t);
    token_classifier(t);
    question_answerer(t);
}

fn logits(t: &mut Table) {
    let heads: [(&str, &str, LogitsFn); 6] = [
        (
            "masked_lm",
            "masked LM, decoder tied to the word embeddings",
            |files, ids, types, mask| {
                let (model, _) = EncoderForMaskedLm::from_files(files, &LoadOptions::default())?;
                Ok(model.forward(ids, Some(types), mask)?)
            },
        ),
        ("next_sentence", "next-sentence prediction", |files, ids, types, mask| {
            let (model, _) =
                EncoderForNextSentencePrediction::from_files(files, &LoadOptions::default())?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("sequence", "sequence classification", |files, ids, types, mask| {
            let (model, _) =
                EncoderForSequenceClassification::from_files(files, &LoadOptions::default())?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("score", "sequence classification, one label", |files, ids, types, mask| {
            let (model, _) =
                EncoderForSequenceClassification::from_files(files, &LoadOptions::default())?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("token", "token classification", |files, ids, types, mask| {
            let (model, _) =
                EncoderForTokenClassification::from_files(files, &LoadOptions::default())?;
            Ok(model.forward(ids, Some(types), mask)?)
        }),
        ("answer", "question answering", |files, ids, types, mask| {
            let (model, _) =
                EncoderForQuestionAnswering::from_files(files, &LoadOptions::default())?;
            Ok(model.forward(ids, Some(types), mask)?.start)
        }),
    ];
    for (folder, case, logits) in heads {
        t.head_case(folder, case, |c| c.check_logits(&format!("heads/{folder}"), logits));
    }
}

fn masked_lm_layouts(t: &mut Table) {
    let run = |c: &Checkpoint| -> anyhow::Result<_> {
        let (model, report) = EncoderForMaskedLm::from_files(&c.files(), &LoadOptions::default())?;
        let ids = Tensor::new(&[[2u32, 5, 3]], &Cpu)?;
        Ok((model.forward(&ids, None, &AttentionMask::none())?, report.tied.len()))
    };
    let (unmodified, _) = run(&Checkpoint::golden("heads/masked_lm")).unwrap();
    // Reports whether the logits equal those of the unmodified checkpoint or are 0 (a decoder of
    // zeros), and the number of tied tensors.
    let load = |c: &Checkpoint| -> Outcome {
        let (logits, tied) = run(c)?;
        let scores = if max_difference(&logits, &unmodified)? == 0.0 {
            "scores of the unmodified checkpoint"
        } else if max_difference(&logits, &logits.zeros_like()?)? == 0.0 {
            "scores of 0"
        } else {
            "other scores"
        };
        Ok(format!("{scores}, {tied} tied"))
    };
    let embeddings = "bert.embeddings.word_embeddings.weight";
    t.head_case("masked_lm", "masked LM without decoder.weight", |c| {
        c.tensors.remove("cls.predictions.decoder.weight");
        load(c)
    });
    t.head_case("masked_lm", "masked LM with an untied decoder", |c| {
        let shape = c.tensors[embeddings].dims().to_vec();
        c.set_config("tie_word_embeddings", json!(false));
        c.set_zeros("cls.predictions.decoder.weight", &shape);
        c.set_zeros("cls.predictions.bias", &shape[..1]);
        c.tensors.remove("cls.predictions.decoder.bias");
        load(c)
    });
    t.head_case("masked_lm", "masked LM with a copy of the word embeddings", |c| {
        let copy = c.tensors[embeddings].clone();
        c.tensors.insert("cls.predictions.decoder.weight".into(), copy);
        load(c)
    });
    t.head_case("masked_lm", "masked LM with the bias in decoder.bias only", |c| {
        let bias = c.tensors.remove("cls.predictions.bias").unwrap();
        c.tensors.insert("cls.predictions.decoder.bias".into(), bias);
        load(c)
    });
}

fn text_classifier(t: &mut Table) {
    t.head_case("answer", "a checkpoint without the requested head", |c| {
        let (model, _) =
            EncoderForTokenClassification::from_files(&c.files(), &LoadOptions::default())?;
        Ok(model.labels().names().join(" "))
    });
    t.head_case("sequence", "tagging with a sequence classifier", |c| {
        let model = TokenClassifier::from_files(&c.files(), &LoadOptions::default())?;
        Ok(model.labels().names().join(" "))
    });
    t.head_case("token", "classifying with a token classifier", |c| {
        let model = TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        Ok(model.labels().names().join(" "))
    });
    t.head_case("answer", "answering with another class in architectures", |c| {
        c.set_config("architectures", json!(["BertForSequenceClassification"]));
        let model = QuestionAnswerer::from_files(&c.files(), &LoadOptions::default())?;
        Ok(model.tokenizer().max_seq_length().to_string())
    });
    t.head_case("score", "reranking scores between 0 and 1", |c| {
        let model = TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        let scores = model.rerank("bad cab", &["a cab", "yz"])?;
        Ok(format!("{}", scores.iter().all(|score| (0.0..1.0).contains(score))))
    });
    t.head_case("sequence", "reranking with several labels", |c| {
        let model = TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        Ok(format!("{:?}", model.rerank("a", &["b"])?))
    });
    let kind_of_scores = |c: &Checkpoint| -> Outcome {
        let model = TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        let scores = &model.classify(&["a cab"])?[0];
        let in_unit_range = scores.iter().all(|score| (0.0..1.0).contains(score));
        let sum = (scores.iter().sum::<f32>() * 1e4).round() / 1e4;
        Ok(match (sum == 1.0, in_unit_range) {
            (true, _) => "probabilities with sum 1",
            (false, true) => "one probability per label",
            (false, false) => "raw logits",
        }
        .to_string())
    };
    let problems =
        ["single_label_classification", "multi_label_classification", "regression", "ranking"];
    for problem in problems {
        t.head_case("sequence", &format!("problem_type {problem}"), |c| {
            kind_of_scores(c.set_config("problem_type", json!(problem)))
        });
    }
}

fn cross_encoder(t: &mut Table) {
    // Counts the tokens that the default prompt and the prompt "topic" add, and reports whether the
    // default prompt changes the score.
    let added_tokens = |c: &mut Checkpoint, settings: Value| -> Outcome {
        let modules = json!([{
            "type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""
        }]);
        c.set_file("modules.json", modules.to_string())
            .set_file("config_sentence_transformers.json", settings.to_string());
        let model = TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        let without = model.tokenize_pairs("bad cab", &["a"], Prompt::None)?;
        let with = model.tokenize_pairs("bad cab", &["a"], Prompt::Default)?;
        let named = model.tokenize_pairs("bad cab", &["a"], Prompt::Named("topic"));
        let added = |tokens: &[Tokens]| tokens[0].input_ids.len() - without[0].input_ids.len();
        let changes = model.rerank("bad cab", &["a"])? != model.rank_tokens(&without)?;
        let named = named
            .map_or_else(|e| e.to_string(), |x| format!("{} with the prompt \"topic\"", added(&x)));
        Ok(format!(
            "{} more tokens, {named}; the prompt changes the score: {changes}",
            added(&with)
        ))
    };
    t.head_case("score", "default prompt of a cross-encoder", |c| {
        let settings = json!({
            "model_type": "CrossEncoder", "prompts": {"topic": "a b c ", "web": "a "},
            "default_prompt_name": "web"
        });
        added_tokens(c, settings)
    });
    t.head_case("score", "prompts of a model that is not a cross-encoder", |c| {
        added_tokens(c, json!({"prompts": {"web": "a "}, "default_prompt_name": "web"}))
    });
    t.head_case("score", "cross-encoder with a Dense module", |c| {
        let modules = json!([{"type": "sentence_transformers.base.modules.transformer.Transformer",
            "path": ""}, {"type": "sentence_transformers.base.modules.Dense", "path": "1_Dense"}]);
        c.set_file("modules.json", modules.to_string());
        c.set_file("config_sentence_transformers.json", r#"{"model_type": "CrossEncoder"}"#);
        TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        Ok("loaded".to_string())
    });
}

fn edge_cases(t: &mut Table) {
    t.head_case("sequence", "an empty sequence in a ragged batch", |c| {
        let (model, _) =
            EncoderForSequenceClassification::from_files(&c.files(), &LoadOptions::default())?;
        let mut batch = RaggedBatch::default();
        for ids in [&[1u32][..], &[], &[2]] {
            batch.push(ids, &vec![0; ids.len()])?;
        }
        Ok(format!("{:?}", model.forward_ragged(&batch)?.dims()))
    });
    for (case, text) in [
        (
            "one of two masks beyond the maximum length",
            "a [MASK] ".to_string() + &"b ".repeat(40) + "[MASK]",
        ),
        ("the only mask beyond the maximum length", "b ".repeat(40) + "[MASK]"),
    ] {
        t.head_case("masked_lm", case, |c| {
            let filled =
                MaskFiller::from_files(&c.files(), &LoadOptions::default())?.fill(&text, 1)?;
            Ok(format!("{} filled", filled.len()))
        });
    }
    t.head_case("score", "sentence_transformers with a numeric value", |c| {
        c.set_config("sentence_transformers", json!({"activation_fn": null, "version": 4}));
        TextClassifier::from_files(&c.files(), &LoadOptions::default())?;
        Ok("loaded".to_string())
    });
    t.head_case("sequence", "num_labels 3 with two entries in id2label", |c| {
        c.set_config("id2label", json!({"0": "x", "1": "y"})).set_config("num_labels", json!(3));
        let labels = Labels::from_json(c.config.to_string().as_bytes(), CONFIG)?;
        Ok(labels.names().join(" "))
    });
    t.head_case("masked_lm", "predictions.bias and decoder.bias", |c| {
        let ids = Tensor::new(&[[7u32, 5]], &Cpu)?;
        let score = |c: &Checkpoint| -> anyhow::Result<f32> {
            let (model, _) = EncoderForMaskedLm::from_files(&c.files(), &LoadOptions::default())?;
            Ok(first_value(&model.forward(&ids, None, &AttentionMask::none())?)?)
        };
        let before = score(c)?;
        let bias = c.tensors["cls.predictions.bias"].clone();
        c.tensors.insert("cls.predictions.decoder.bias".to_string(), (bias + 1.0)?);
        Ok(format!("{:.3} higher, from decoder.bias", score(c)? - before))
    });
    t.head_case("masked_lm", "a text without a mask", |c| {
        Ok(format!(
            "{:?}",
            MaskFiller::from_files(&c.files(), &LoadOptions::default())?.fill("a", 1)?
        ))
    });
}

fn token_classifier(t: &mut Table) {
    for aggregation in [
        Aggregation::None,
        Aggregation::Simple,
        Aggregation::First,
        Aggregation::Average,
        Aggregation::Max,
    ] {
        t.head_case("tagger", &format!("aggregation {aggregation:?}"), |c| {
            let model = TokenClassifier::from_files(&c.files(), &LoadOptions::default())?;
            let entities = model.classify("Café bead, Abba (cab) ébb faced", aggregation)?;
            let entities = entities
                .iter()
                .map(|e| format!("{}:{}-{}", e.label, e.span.range.start, e.span.range.end));
            Ok(entities.collect::<Vec<_>>().join(" "))
        });
    }
}

fn question_answerer(t: &mut Table) {
    t.head_case("answer", "a question longer than the maximum length", |c| {
        let model = QuestionAnswerer::from_files(&c.files(), &LoadOptions::default())?;
        Ok(format!("{:?}", model.answer(&"a ".repeat(500), "b", 1)?))
    });
    t.head_case("answer", "the two best answers", |c| {
        let model = QuestionAnswerer::from_files(&c.files(), &LoadOptions::default())?;
        let text = "A café fed, a cab: bead";
        let output = model.answer("bad?", text, 2)?;
        let parts: Vec<&str> = output.answers.iter().map(|a| &text[a.range.clone()]).collect();
        Ok(format!("{parts:?}"))
    });
}
