//! Compares the decoder architectures, and EuroBERT, with transformers, from the golden files that
//! tests/golden/decoders.py writes.
//!
//! Tolerance: 1e-5. Results in f32 of transformers differ from those in f64 by up to 9.5e-7 of the
//! largest value.

use std::{fs, path::PathBuf};

use candle_core::{DType, Tensor};
use encoder::{
    CausalLm, EmbedOptions, Embedder, EncoderForMaskedLm, EncoderForSequenceClassification,
    EncoderForTokenClassification, EncoderModel, LoadOptions, LoadReport, ModelConfig, ModelFiles,
    Prompt, RaggedBatch, TextTokenizer, Tokens,
};
use mha::AttentionMask;

use crate::support::{Golden, assert_close, golden};

type Result<T = ()> = anyhow::Result<T>;

/// An entry of `decoders.json`, from which `decoders.py` makes the golden models.
#[derive(serde::Deserialize)]
pub struct Decoder {
    /// The folder in `decoders`.
    #[serde(skip)]
    folder: String,
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
        assert_close(&format!("{} {key}", self.name), &got, &expected, 1e-5);
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
