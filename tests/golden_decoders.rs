//! Compares the decoder architectures, and EuroBERT, with transformers, from the golden files that
//! tests/golden/decoders.py writes.
//!
//! Tolerance: 1e-5, or 2e-6 of the largest value, which is up to 17. Results in f32 of transformers
//! differ from those in f64 by up to 9.5e-7 of the largest value. The scalar kernels round products
//! before they add them: twice the tolerance.

use std::{fs, path::PathBuf};

use candle_core::{DType, Device::Cpu, Tensor};
use encoder::{
    CausalLm, EmbedOptions, Embedder, EncoderForLogitScore, EncoderForMaskedLm,
    EncoderForSequenceClassification, EncoderForTokenClassification, EncoderModel, Inspection,
    LoadOptions, LoadReport, ModelConfig, ModelFiles, Pipeline, Precision, Prompt, RaggedBatch,
    Reranker, TextClassifier, TextTokenizer, Tokens,
};
use mha::AttentionMask;

use crate::support::{Golden, assert_close, golden};

type Result<T = ()> = anyhow::Result<T>;

/// An entry of `decoders.json`, from which `decoders.py` makes the golden models.
#[derive(serde::Deserialize)]
pub struct Decoder {
    /// The folder in `decoders`.
    #[serde(skip)]
    pub folder: String,
    pub architecture: String,
    heads: Vec<String>,
}

pub fn decoders() -> Result<Vec<Decoder>> {
    let table: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&fs::read(golden("decoders.json"))?)?;
    let entries = table.into_iter().map(|(folder, entry)| {
        let entry: Decoder = serde_json::from_value(entry)?;
        Ok(Decoder { folder, ..entry })
    });
    entries.collect()
}

/// A model with its inputs and expected outputs.
struct Case {
    name: String,
    golden: Golden,
    mask: AttentionMask,
}

impl Case {
    fn open(decoder: &str, kind: &str) -> Result<Self> {
        let name = format!("decoders/{decoder}/{kind}");
        let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
        let mask = AttentionMask::none().with_padding(golden.get("attention_mask"))?;
        Ok(Self { name, golden, mask })
    }

    fn load<M>(
        &self,
        from_dir: impl Fn(PathBuf, &LoadOptions) -> encoder::Result<(M, LoadReport)>,
    ) -> Result<M> {
        let (model, report) = from_dir(golden(&self.name), &LoadOptions::default())?;
        assert!(report.is_complete() && report.ignored.is_empty(), "{}: {report:?}", self.name);
        Ok(model)
    }

    fn ids(&self) -> &Tensor {
        self.golden.get("input_ids")
    }

    /// The ids without padding.
    fn sequences(&self) -> Result<Vec<Vec<u32>>> {
        let ids = self.ids().to_dtype(DType::U32)?.to_vec2::<u32>()?;
        let lengths = self.golden.get("attention_mask").to_dtype(DType::F32)?.sum(1)?;
        let lengths = lengths.to_vec1::<f32>()?.into_iter();
        Ok(ids.iter().zip(lengths).map(|(ids, length)| ids[..length as usize].to_vec()).collect())
    }

    /// Compares `got` `(B, T, ..)` with the golden tensor `key`, except at padding.
    fn check_visible(&self, key: &str, got: &Tensor) -> Result {
        let visible = self.golden.get("attention_mask").to_dtype(DType::F32)?.unsqueeze(2)?;
        let [got, expected] =
            [got, self.golden.get(key)].map(|x| x.broadcast_mul(&visible).unwrap());
        let largest = f64::from(expected.abs()?.max_all()?.to_scalar::<f32>()?);
        let tolerance = (2e-6 * largest).max(1e-5);
        assert_close(&format!("{} {key}", self.name), &got, &expected, tolerance);
        Ok(())
    }
}

fn ragged(sequences: &[Vec<u32>]) -> Result<RaggedBatch> {
    let mut batch = RaggedBatch::default();
    for ids in sequences {
        batch.push(ids, &vec![0; ids.len()])?;
    }
    Ok(batch)
}

#[test]
fn hidden_states_of_decoders_equal_transformers() -> Result {
    for Decoder { folder, architecture, .. } in decoders()? {
        let case = Case::open(&folder, "encoder")?;
        let json = fs::read(golden(&case.name).join("config.json"))?;
        assert_eq!(ModelConfig::from_json(&json, "config.json")?.architecture(), architecture);
        let model = case.load(EncoderModel::from_dir)?;
        let (_, all) = model.forward_all(case.ids(), None, &case.mask)?;
        let layers = model.config().num_hidden_layers;
        assert_eq!(all.hidden_states.len(), layers + 1);
        for (i, hidden) in all.hidden_states.iter().enumerate() {
            case.check_visible(&format!("hidden_states.{i}"), hidden)?;
        }
        // Without the padding.
        let batch = model.forward(case.ids(), None, &case.mask)?;
        case.check_visible(&format!("hidden_states.{layers}"), &batch.last_hidden_state)?;
    }
    Ok(())
}

/// The hidden states of a sequence are the same bits whatever batch it is in.
#[test]
fn hidden_states_of_decoders_do_not_depend_on_the_batch() -> Result {
    for Decoder { folder, .. } in decoders()? {
        let case = Case::open(&folder, "encoder")?;
        let model = case.load(EncoderModel::from_dir)?;
        let hidden = |sequences: &[Vec<u32>]| -> Result<Vec<f32>> {
            Ok(model.forward_ragged(&ragged(sequences)?)?.flatten_all()?.to_vec1()?)
        };
        let mut sequences = case.sequences()?;
        let mut alone = sequences
            .iter()
            .map(|sequence| hidden(std::slice::from_ref(sequence)))
            .collect::<Result<Vec<_>>>()?;
        assert_eq!(hidden(&sequences)?, alone.concat(), "{folder}");
        sequences.reverse();
        alone.reverse();
        assert_eq!(hidden(&sequences)?, alone.concat(), "{folder}");
    }
    Ok(())
}

/// Tokens with which several sequences begin are computed once. The results are the same bits: in one
/// batch, after it, when the keys and values of the common tokens are kept, and before it.
#[test]
fn a_common_beginning_does_not_change_the_results() -> Result {
    let ids = |start: u32, length: u32| (start..start + length).map(|i| 3 + 7 * i % 31);
    let with = |common: u32, start, length| ids(0, common).chain(ids(start, length)).collect();
    let mut sequences: Vec<Vec<u32>> =
        [(5, 9), (1, 1), (8, 12), (8, 11)].map(|(start, length)| with(28, start, length)).into();
    sequences.extend([with(17, 30, 3), with(28, 0, 0), ids(9, 12).collect()]);
    for Decoder { folder, heads, .. } in decoders()? {
        if !heads.iter().any(|head| head == "causal_lm") {
            continue;
        }
        let folder = golden(&format!("decoders/{folder}/causal_lm"));
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let options = LoadOptions::default().with_precision(precision);
            let (model, _) = EncoderForLogitScore::from_dir(&folder, 5, Some(9), &options)?;
            let scores = |sequences: &[Vec<u32>]| -> Result<Vec<f32>> {
                Ok(model.forward_ragged(&ragged(sequences)?)?.flatten_all()?.to_vec1()?)
            };
            let alone = || sequences.iter().map(|x| scores(std::slice::from_ref(x)));
            let expected = alone().collect::<Result<Vec<_>>>()?.concat();
            assert_eq!(scores(&sequences)?, expected, "{} {precision}", folder.display());
            assert_eq!(alone().collect::<Result<Vec<_>>>()?.concat(), expected, "kept");
            let reversed: Vec<_> = sequences.iter().rev().cloned().collect();
            let got: Vec<f32> = scores(&reversed)?.into_iter().rev().collect();
            assert_eq!(got, expected, "reversed");
        }
    }
    Ok(())
}

/// With a prompt, an embedder keeps the keys and values of the prompt's tokens.
#[test]
fn embeddings_of_decoders_do_not_depend_on_the_texts_beside_them() -> Result {
    let texts: Vec<String> =
        serde_json::from_slice(&fs::read(golden("decoders/sentences/texts.json"))?)?;
    for name in ["qwen3", "mistral"] {
        let folder = golden(&format!("decoders/sentences/{name}"));
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let options = LoadOptions::default().with_precision(precision);
            let load = || Embedder::from_dir(&folder, &options);
            let (together, alone) = (load()?, load()?);
            let prompt = Prompt::Text("Find a text of the same topic: ");
            let options = EmbedOptions::new().with_prompt(prompt);
            let vectors = |model: &Embedder, texts: &[String]| -> Result<Vec<Vec<f32>>> {
                Ok(model.embed_with(texts, options)?.vectors.to_vec2()?)
            };
            let expected = vectors(&together, &texts)?;
            for (text, expected) in texts.iter().zip(expected) {
                let got = vectors(&alone, std::slice::from_ref(text))?;
                assert_eq!(got, [expected], "{name} {precision} {text:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn logits_of_the_heads_of_decoders_equal_transformers() -> Result {
    for Decoder { folder, heads, .. } in decoders()? {
        for head in heads {
            let case = Case::open(&folder, &head)?;
            match head.as_str() {
                "masked_lm" => {
                    let model = case.load(EncoderForMaskedLm::from_dir)?;
                    case.check_visible("logits", &model.forward(case.ids(), None, &case.mask)?)?;
                }
                "token" => {
                    let model = case.load(EncoderForTokenClassification::from_dir)?;
                    case.check_visible("logits", &model.forward(case.ids(), None, &case.mask)?)?;
                }
                head if head.starts_with("sequence") => {
                    let model = case.load(EncoderForSequenceClassification::from_dir)?;
                    let logits = model.forward(case.ids(), None, &case.mask)?;
                    assert_close(&case.name, &logits, case.golden.get("logits"), 1e-5);
                    let logits = model.forward_ragged(&ragged(&case.sequences()?)?)?;
                    assert_close(&case.name, &logits, case.golden.get("logits"), 1e-5);
                }
                "causal_lm" => {
                    let model = case.load(CausalLm::from_dir)?;
                    case.check_visible("logits", &model.forward(case.ids(), None, None)?)?;
                    // In steps, with the keys and values of earlier tokens in a cache.
                    for steps in [&[1; 23][..], &[9, 1, 13]] {
                        let mut cache = model.cache(23);
                        let mut logits = vec![];
                        for &step in steps {
                            let ids = case.ids().narrow(1, cache.len(), step)?;
                            logits.push(model.step(&ids, None, None, &mut cache)?);
                        }
                        case.check_visible("logits", &Tensor::cat(&logits, 1)?)?;
                    }
                }
                other => panic!("{other}"),
            }
        }
    }
    Ok(())
}

#[test]
fn embeddings_of_decoders_equal_sentence_transformers() -> Result {
    let texts: Vec<String> =
        serde_json::from_slice(&fs::read(golden("decoders/sentences/texts.json"))?)?;
    for (name, query) in [
        ("qwen3", Some(Prompt::Query)),
        ("gemma", Some(Prompt::Query)),
        ("eurobert", None),
        ("llama", Some(Prompt::Query)),
        ("mistral", Some(Prompt::Named("web_search_query"))),
    ] {
        let folder = format!("decoders/sentences/{name}");
        let expected = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let embedder = Embedder::from_dir(golden(&folder), &LoadOptions::default())?;
        let document = query.and(Some(Prompt::Document));
        for (key, prompt) in [("plain", None), ("query", query), ("document", document)] {
            let options = EmbedOptions::new();
            let options = match prompt {
                Some(prompt) => options.with_prompt(prompt),
                None => options,
            };
            let got = embedder.embed_with(&texts, options)?.vectors;
            // EuroBERT's embeddings are not normalised: values up to 2.
            let tolerance = if name == "eurobert" { 2e-6 } else { 1e-6 };
            assert_close(&format!("{folder} {key}"), &got, expected.get(key), tolerance);
        }
    }
    Ok(())
}

#[test]
fn token_ids_of_decoders_equal_transformers() -> Result {
    let read = |name: &str| -> Result<Vec<String>> {
        Ok(serde_json::from_slice(&fs::read(golden(name))?)?)
    };
    let mut texts = read("nasty_texts.json")?;
    texts.extend(read("decoders/tokenizers/texts.json")?);
    assert!(texts.len() > 500);
    let pairs: Vec<(&str, &str)> =
        (60..160).map(|i| (texts[i].as_str(), texts[i + 7].as_str())).collect();
    for (name, case, key, value) in [
        ("qwen", "default", "", ""),
        ("qwen", "qwen3", "model_type", "\"qwen3\""),
        ("qwen3", "default", "", ""),
        ("qwen3", "add_eos", "add_eos_token", "true"),
        ("llama3", "default", "", ""),
        ("llama3", "class", "tokenizer_class", "\"LlamaTokenizer\""),
        ("eurobert", "default", "", ""),
        ("gemma", "default", "", ""),
        ("gemma", "no_eos", "add_eos_token", "false"),
        ("mistral", "default", "", ""),
        ("mistral", "llama", "model_type", "\"llama\""),
        ("metaspace", "default", "", ""),
        ("metaspace", "no_prefix", "add_prefix_space", "false"),
    ] {
        let folder = golden("decoders/tokenizers").join(name);
        let json = |file: &str| -> Result<serde_json::Value> {
            Ok(serde_json::from_slice(&fs::read(folder.join(file))?)?)
        };
        let [mut settings, mut config] = [json("tokenizer_config.json")?, json("config.json")?];
        match key {
            "" => {}
            "model_type" => config[key] = serde_json::from_str(value)?,
            key => settings[key] = serde_json::from_str(value)?,
        }
        let files = ModelFiles::memory(
            name,
            [
                ("tokenizer.json", fs::read(folder.join("tokenizer.json"))?),
                ("tokenizer_config.json", settings.to_string().into_bytes()),
                ("config.json", config.to_string().into_bytes()),
            ],
        );
        // The sizes do not matter, except that the model must take the 64 tokens of the texts.
        for key in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"] {
            config[key] = 1.into();
        }
        for (key, value) in
            [("num_attention_heads", 1), ("head_dim", 2), ("max_position_embeddings", 64)]
        {
            config[key] = value.into();
        }
        config["sliding_window"] = 1.into();
        let config = ModelConfig::from_json(config.to_string().as_bytes(), "config.json")?;
        let tokenizer = TextTokenizer::from_files(&files, &config)?;
        let expected = Golden::open(&format!("decoders/tokenizers/{name}/expected.safetensors"))?;
        let lengths = expected.get(&format!("{case}.texts.lengths")).to_vec1::<i32>()?;
        let start = texts.len() - lengths.len();
        let check = |kind: &str, tokens: Vec<Tokens>| -> Result {
            let lengths = expected.get(&format!("{case}.{kind}.lengths")).to_vec1::<i32>()?;
            let ids = expected.get(&format!("{case}.{kind}.ids")).to_vec1::<i32>()?;
            assert_eq!(tokens.len(), lengths.len());
            let mut rest = &ids[..];
            for (i, (tokens, length)) in tokens.iter().zip(lengths).enumerate() {
                let (expected, next) = rest.split_at(length as usize);
                let got: Vec<i32> = tokens.input_ids.iter().map(|&id| id as i32).collect();
                let text = &texts[if kind == "texts" { start } else { 60 } + i];
                assert_eq!(got, expected, "{name} {case} {kind} {i}: {text:?}");
                rest = next;
            }
            Ok(())
        };
        check("texts", tokenizer.encode(&texts[start..])?)?;
        if expected.find(&format!("{case}.pairs.ids")).is_some() {
            check("pairs", tokenizer.encode_pairs(&pairs)?)?;
        }
    }
    Ok(())
}

/// The folders of cross-encoders that are causal language models. Tolerance of logits and scores:
/// 1e-5.
const RERANKERS: [&str; 5] =
    ["qwen3", "true_only", "no_template", "sequence", "sequence_no_template"];

/// The pairs of `rerank/pairs.json`.
fn pairs() -> Result<Vec<(String, String)>> {
    Ok(serde_json::from_slice(&fs::read(golden("decoders/rerank/pairs.json"))?)?)
}

/// The files of a reranker without the modules of sentence-transformers.
fn bare(folder: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let of_modules =
        ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"];
    let mut files = vec![];
    for entry in fs::read_dir(golden(folder))? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap();
        if entry.path().is_file() && !of_modules.contains(&&name[..]) {
            files.push((name, fs::read(entry.path())?));
        }
    }
    Ok(files)
}

#[test]
fn scores_of_causal_rerankers_equal_sentence_transformers() -> Result {
    let pairs = pairs()?;
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(a, b)| (&a[..], &b[..])).collect();
    let text: String = serde_json::from_slice(&fs::read(golden("decoders/rerank/prompt.json"))?)?;
    for name in RERANKERS {
        let folder = format!("decoders/rerank/{name}");
        let expected = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let model = TextClassifier::from_dir(golden(&folder), &LoadOptions::default())?;
        let tensor = |scores: Vec<f32>| Tensor::new(scores, &Cpu).unwrap();
        for (key, prompt) in [("scores", Prompt::Default), ("prompt", Prompt::Text(&text))] {
            let tokens = model.tokenize_text_pairs(&pairs, prompt)?;
            let lengths = expected.get(&format!("{key}.lengths")).to_vec1::<i32>()?;
            let ids = expected.get(&format!("{key}.ids")).to_vec1::<i32>()?;
            let mut rest = &ids[..];
            assert_eq!(tokens.len(), lengths.len());
            for (i, (tokens, length)) in tokens.iter().zip(lengths).enumerate() {
                let (expected, next) = rest.split_at(length as usize);
                let got: Vec<i32> = tokens.input_ids.iter().map(|&id| id as i32).collect();
                assert_eq!(got, expected, "{name} {key} {i}");
                rest = next;
            }
            assert!(tokens[7].truncated > 0 && tokens[0].truncated == 0, "{name} {key}");
            let logits = tensor(model.logits(&tokens)?.concat());
            let key = if key == "scores" { "logits" } else { key };
            assert_close(&format!("{name} {key}"), &logits, expected.get(key), 1e-5);
            if key == "logits" {
                let scores = tensor(model.rank_tokens(&tokens)?);
                assert_close(&format!("{name} scores"), &scores, expected.get("scores"), 1e-5);
                let ranked = model.rerank(pairs[0].0, &[pairs[0].1, pairs[1].1])?;
                assert_eq!(ranked, scores.to_vec1::<f32>()?[..2], "{name}");
            }
        }
        let model = TextClassifier::from_files(
            &ModelFiles::memory(name, bare(&folder)?),
            &LoadOptions::default(),
        )?;
        let tokens = model.tokenize_text_pairs(&pairs, Prompt::Default)?;
        let scores = tensor(model.rank_tokens(&tokens)?);
        assert_close(&format!("{name} bare"), &scores, expected.get("bare"), 1e-5);
    }
    Ok(())
}

/// The files of the folder `rerank/qwen3`, with other contents for some. A file without content is
/// absent.
fn changed(changes: &[(&str, &str)]) -> Result<ModelFiles> {
    let folder = "decoders/rerank/qwen3";
    let mut files = bare(folder)?;
    for name in [
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_LogitScore/config.json",
    ] {
        files.push((name.to_string(), fs::read(golden(folder).join(name))?));
    }
    for (name, content) in changes {
        files.retain(|(file, _)| file != name);
        if !content.is_empty() {
            files.push((name.to_string(), content.as_bytes().to_vec()));
        }
    }
    Ok(ModelFiles::memory("m", files))
}

#[test]
fn wrong_files_of_causal_rerankers_are_errors_that_name_the_cause() -> Result {
    let read = |file: &str| -> Result<String> {
        Ok(fs::read_to_string(golden("decoders/rerank/qwen3").join(file))?)
    };
    let modules = read("modules.json")?;
    let dense = r#"{"idx": 2, "name": "2", "path": "2_Dense",
        "type": "sentence_transformers.base.modules.dense.Dense"}]"#;
    let with_dense = modules.replace("\n]", &format!(",{dense}"));
    let sentence = read("sentence_bert_config.json")?;
    let without_task = sentence.replace("transformer_task", "task");
    let kwargs = |kwargs: &str| {
        sentence.replacen(
            '{',
            &format!(r#"{{"processing_kwargs": {{"chat_template": {kwargs}}},"#),
            1,
        )
    };
    let config = read("config.json")?;
    let bidirectional = config.replacen('{', r#"{"is_causal": false,"#, 1);
    // The vocabulary without the token yes.
    let mut tokenizer: serde_json::Value = serde_json::from_str(&read("tokenizer.json")?)?;
    let model = &mut tokenizer["model"];
    let vocabulary = model["vocab"].as_object_mut().unwrap();
    let yes = vocabulary.remove("yes").unwrap();
    vocabulary.insert("qqq".to_string(), yes);
    model["merges"].as_array_mut().unwrap().retain(|merge| {
        let parts: Vec<&str> = merge.as_array().unwrap().iter().flat_map(|x| x.as_str()).collect();
        parts.concat() != "yes" && !parts.contains(&"yes")
    });
    let without_yes = tokenizer.to_string();
    let (score, template) = ("1_LogitScore/config.json", "chat_template.jinja");
    for (changes, expected) in [
        (
            vec![(score, r#"{"true_token_id": 605, "false_token_id": 1}"#)],
            "m/1_LogitScore/config.json: true_token_id 605 is not supported: expected an id below \
             the vocab_size",
        ),
        (
            vec![(score, r#"{"true_token_id": 1, "false_token_id": 700}"#)],
            "m/1_LogitScore/config.json: false_token_id 700 is not supported",
        ),
        (vec![(score, r#"{"true_token_id": 1, "bias": 0}"#)], "unknown field `bias`"),
        (vec![(score, r#"{"false_token_id": 1}"#)], "missing field `true_token_id`"),
        (
            vec![(score, r#"{"true_token_id": 1, "module_input_name": "scores"}"#)],
            "module_input_name scores is not supported: expected causal_logits",
        ),
        (vec![(score, "")], "m/1_LogitScore/config.json"),
        (
            vec![("modules.json", &with_dense)],
            "modules Transformer, LogitScore, Dense is not supported: expected a Transformer alone",
        ),
        (
            vec![("sentence_bert_config.json", &without_task)],
            "m/sentence_bert_config.json: transformer_task (absent) is not supported: expected \
             text-generation",
        ),
        (
            vec![("sentence_bert_config.json", "")],
            "m/sentence_bert_config.json: transformer_task (absent) is not supported",
        ),
        (
            vec![("sentence_bert_config.json", &kwargs(r#"{"tools": []}"#))],
            "processing_kwargs tools: [] is not supported",
        ),
        (
            vec![("config.json", &bidirectional)],
            "m/config.json: is_causal false is not supported: expected true, for a causal language model",
        ),
        (
            vec![(template, "")],
            "m/sentence_bert_config.json: chat_template is not supported: the model has no chat \
             template",
        ),
        (
            vec![(template, "{{ messages[0].content }}")],
            "m/chat_template.jinja: chat_template is not supported: it does not render the message \
             with the role document",
        ),
        (
            vec![("modules.json", ""), ("tokenizer.json", &without_yes)],
            "m/config.json: architectures Qwen3ForCausalLM is not supported: expected a sequence \
             classifier, or the tokens yes and no",
        ),
    ] {
        let files = changed(&changes)?;
        let error = TextClassifier::from_files(&files, &LoadOptions::default());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{changes:?}: {error}");
        let found = Inspection::new(&files);
        assert!(!found.runs_as.contains(&"EncoderForLogitScore"), "{changes:?}: {found}");
    }
    // Variables for the template.
    let pair = "{{ start }}{{ messages[0].content }} {{ messages[1].content }}";
    let files = changed(&[
        ("sentence_bert_config.json", &kwargs(r#"{"start": "yes"}"#)),
        (template, pair),
    ])?;
    let model = TextClassifier::from_files(&files, &LoadOptions::default())?;
    let tokens = model.tokenize_text_pairs(&[("no", "no")], Prompt::None)?;
    let plain = model.tokenizer().encode(&["yesno no"])?;
    assert_eq!(tokens[0].input_ids, plain[0].input_ids);
    Ok(())
}

#[test]
fn a_causal_reranker_scores_pairs_only() -> Result {
    let model = TextClassifier::from_dir(golden("decoders/rerank/qwen3"), &LoadOptions::default())?;
    let error = model.classify(&["a cab"]).unwrap_err().to_string();
    assert!(error.starts_with("text \"a cab\" is not a pair: expected a query"), "{error}");
    Ok(())
}

/// The types that can run a reranker, with and without the files of sentence-transformers.
#[test]
fn causal_rerankers_are_inspected() -> Result {
    for name in RERANKERS {
        let folder = format!("decoders/rerank/{name}");
        let (head, types) = match name.starts_with("sequence") {
            true => ("EncoderForSequenceClassification", vec!["EncoderModel"]),
            false => ("EncoderForLogitScore", vec!["EncoderModel", "CausalLm"]),
        };
        let types = [types, vec![head]].concat();
        let found = Inspection::new(&ModelFiles::dir(golden(&folder))?);
        assert_eq!(found.runs_as, types, "{name}: {:?}", found.problems);
        let modules = if head == "EncoderForLogitScore" { vec!["LogitScore"] } else { vec![] };
        assert_eq!(found.modules, modules);
        assert!(found.runs(), "{name}: {:?}", found.problems);
        let found = Inspection::new(&ModelFiles::memory(name, bare(&folder)?));
        assert_eq!(found.runs_as, types, "{name}: {:?}", found.problems);
        let reranker =
            Reranker::from_files(&ModelFiles::dir(golden(&folder))?, &LoadOptions::default())?;
        let ranking = reranker.rank("I love AI", &["no", "yes no ".repeat(120).as_str()], None)?;
        assert_eq!((ranking.scores.len(), ranking.max_seq_length), (2, 160));
        assert_eq!(ranking.truncated.len(), 1, "{name}");
    }
    Ok(())
}
