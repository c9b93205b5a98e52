//! Compares every architecture but BERT with transformers, from the golden files that
//! tests/golden/architectures.py writes.
//!
//! Tolerances: hidden states have values of about 1 (in ModernBERT up to 10, before the final
//! normalisation) and pass through a few hundred f32 sums: 1e-5. Attention weights are at most 1:
//! 1e-6.

use std::{fs, path::PathBuf};

use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use encoder::{
    Activation, Aggregation, EmbedOptions, Embedder, EncoderForMaskedLm,
    EncoderForQuestionAnswering, EncoderForSequenceClassification, EncoderForTokenClassification,
    EncoderModel, Inspection, LoadOptions, LoadReport, MaskFiller, ModelConfig, ModelFiles,
    Positions, Precision, Prompt, RaggedBatch, TextClassifier, TextTokenizer, TokenClassifier,
};
use mha::AttentionMask;

use crate::support::{Golden, assert_close, golden, temp_dir};

type Result<T = ()> = anyhow::Result<T>;

/// An entry of `architectures.json`, from which `architectures.py` makes the golden models.
#[derive(serde::Deserialize)]
pub struct Architecture {
    /// The folder in `architectures`.
    #[serde(skip)]
    pub folder: String,
    #[serde(rename = "architecture")]
    pub name: String,
    /// Whether transformers has a head of this architecture that answers questions.
    answers: bool,
}

pub fn architectures() -> Result<Vec<Architecture>> {
    let table = fs::read(golden("architectures.json"))?;
    let table: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(&table)?;
    let entries = table.into_iter().map(|(folder, entry)| {
        let entry: Architecture = serde_json::from_value(entry)?;
        Ok(Architecture { folder, ..entry })
    });
    entries.collect()
}

/// A model of an architecture, with its inputs and expected outputs.
struct Case {
    folder: PathBuf,
    name: String,
    golden: Golden,
    mask: AttentionMask,
}

impl Case {
    fn open(architecture: &str, kind: &str) -> Result<Self> {
        let name = format!("architectures/{architecture}/{kind}");
        let golden = Golden::open(&format!("{name}/expected.safetensors"))?;
        let mask = AttentionMask::none().with_padding(golden.get("attention_mask"))?;
        Ok(Self { folder: crate::support::golden(&name), name, golden, mask })
    }

    fn load<M>(
        &self,
        from_dir: impl Fn(PathBuf, &LoadOptions) -> encoder::Result<(M, LoadReport)>,
    ) -> Result<M> {
        let (model, report) = from_dir(self.folder.clone(), &LoadOptions::default())?;
        assert!(report.is_complete() && report.ignored.is_empty(), "{}: {report:?}", self.name);
        Ok(model)
    }

    fn inputs(&self) -> (&Tensor, Option<&Tensor>, &AttentionMask) {
        let types = self.golden.get("token_type_ids");
        (self.golden.get("input_ids"), Some(types), &self.mask)
    }

    /// `x`, `(B, T)` or `(B, T, ..)`, with zeros at padding.
    fn visible(&self, x: &Tensor) -> Result<Tensor> {
        let mut visible = self.golden.get("attention_mask").to_dtype(DType::F32)?; // (B, T)
        while visible.rank() < x.rank() {
            visible = visible.unsqueeze(visible.rank())?;
        }
        Ok(x.broadcast_mul(&visible)?)
    }

    /// Compares the sequences that do not start with padding: 0, 1 and 3. transformers pools column
    /// 0 even if it is padding.
    fn check_without_padding_at_the_start(
        &self,
        key: &str,
        got: &Tensor,
        expected: &Tensor,
    ) -> Result {
        let rows = Tensor::new(&[0u32, 1, 3], &Cpu)?;
        let [got, expected] = [got.index_select(&rows, 0)?, expected.index_select(&rows, 0)?];
        assert_close(&format!("{} {key}", self.name), &got, &expected, 1e-5);
        Ok(())
    }

    fn check_visible(&self, key: &str, got: &Tensor) -> Result {
        let expected = self.visible(self.golden.get(key))?;
        assert_close(&format!("{} {key}", self.name), &self.visible(got)?, &expected, 1e-5);
        Ok(())
    }
}

#[test]
fn hidden_states_and_attentions_equal_transformers() -> Result {
    for Architecture { folder, name, .. } in architectures()? {
        let case = Case::open(&folder, "encoder")?;
        let json = fs::read(case.folder.join("config.json"))?;
        assert_eq!(ModelConfig::from_json(&json, "config.json")?.architecture(), name);
        let model = case.load(EncoderModel::from_dir)?;
        let (ids, types, mask) = case.inputs();
        let (_, all) = model.forward_all(ids, types, mask)?;
        let layers = model.config().num_hidden_layers;
        assert_eq!((all.attentions.len(), all.hidden_states.len()), (layers, layers + 1));
        for (i, hidden) in all.hidden_states.iter().enumerate() {
            case.check_visible(&format!("hidden_states.{i}"), hidden)?;
        }
        for (i, weights) in all.attentions.iter().enumerate() {
            // The rows of padding are not compared: if the window of a padding token has no visible
            // key, transformers still computes weights for it.
            let key = format!("attentions.{i}");
            let queries = |x: &Tensor| -> Result<Tensor> {
                Ok(case.visible(&x.transpose(1, 2)?)?.transpose(1, 2)?)
            };
            let [got, expected] = [queries(weights)?, queries(case.golden.get(&key))?];
            assert_close(&format!("{} {key}", case.name), &got, &expected, 1e-6);
        }
        let batch = model.forward(ids, types, mask)?;
        case.check_visible(&format!("hidden_states.{layers}"), &batch.last_hidden_state)?;
        // If a model uses distances, padding is left out only if no mask has a gap. Sequence 0 has
        // no padding, so that a batch of only this sequence has none.
        let first = |x: &Tensor| x.narrow(0, 0, 1);
        let types = types.map(first).transpose()?;
        let alone = model.forward(&first(ids)?, types.as_ref(), &AttentionMask::none())?;
        let expected = first(case.golden.get(&format!("hidden_states.{layers}")))?;
        assert_close(&format!("{} ragged", case.name), &alone.last_hidden_state, &expected, 1e-5);
        if let Some(expected) = case.golden.find("pooler_output") {
            case.check_without_padding_at_the_start(
                "pooler_output",
                &batch.pooler_output.unwrap(),
                expected,
            )?;
        }
        let too_long = Tensor::full(5u32, (1, 200), &Cpu)?;
        let error = model.forward(&too_long, None, &AttentionMask::none()).unwrap_err();
        let max = model.config().max_tokens();
        assert_eq!(
            error.to_string(),
            format!("a sequence has 200 tokens: expected at most {max}; truncate it"),
        );
    }
    Ok(())
}

#[test]
fn logits_of_every_head_equal_transformers() -> Result {
    for Architecture { folder, answers, .. } in architectures()? {
        let case = Case::open(&folder, "masked_lm")?;
        let (ids, types, mask) = case.inputs();
        let logits = case.load(EncoderForMaskedLm::from_dir)?.forward(ids, types, mask)?;
        case.check_visible("logits", &logits)?;

        let case = Case::open(&folder, "sequence")?;
        let (ids, types, mask) = case.inputs();
        let model = case.load(EncoderForSequenceClassification::from_dir)?;
        let logits = model.forward(ids, types, mask)?;
        case.check_without_padding_at_the_start("logits", &logits, case.golden.get("logits"))?;

        let case = Case::open(&folder, "token")?;
        let (ids, types, mask) = case.inputs();
        let logits =
            case.load(EncoderForTokenClassification::from_dir)?.forward(ids, types, mask)?;
        case.check_visible("logits", &logits)?;

        if !answers {
            continue;
        }
        let case = Case::open(&folder, "answer")?;
        let (ids, types, mask) = case.inputs();
        let scores = case.load(EncoderForQuestionAnswering::from_dir)?.forward(ids, types, mask)?;
        case.check_visible("start_logits", &scores.start)?;
        case.check_visible("end_logits", &scores.end)?;
    }
    Ok(())
}

#[test]
fn buckets_of_distances_equal_transformers() -> Result {
    let golden = Golden::open("architectures/relative_buckets.safetensors")?;
    let expected = golden.get("buckets").to_vec1::<i32>()?;
    for (distance, expected) in (-300..=300).zip(expected) {
        let got = mha::relative_position_bucket(distance, 32, 128);
        assert_eq!(got, expected as usize, "distance {distance}");
    }
    let expected = golden.get("positions").to_vec1::<i32>()?;
    for (distance, expected) in (-600..=600).zip(expected) {
        let got = mha::log_relative_position(distance, 256, 512);
        assert_eq!(got, expected as isize, "distance {distance}");
    }
    Ok(())
}

/// The tokenizer of these files, with the keys of `more` added to tokenizer_config.json. Two keys
/// are exceptions: the value of `special_tokens_map.json` becomes a file of this name, and
/// `model_type` in the value of `config.json` selects the golden config (by default RoBERTa's).
fn tokenizer(name: &str, files: &[&str], more: &str) -> Result<TextTokenizer> {
    let folder = golden("architectures/tokenizers").join(name);
    let read = |file: &str| fs::read(folder.join(file));
    let mut settings: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&read("tokenizer_config.json")?)?;
    settings.extend(serde_json::from_str::<serde_json::Map<_, _>>(more)?);
    const SPECIAL: &str = "special_tokens_map.json";
    let special = settings.remove(SPECIAL).map(|map| (SPECIAL, map.to_string().into_bytes()));
    let model = match settings.remove("config.json") {
        Some(config) => config["model_type"].as_str().expect("a string").to_string(),
        None => "roberta".to_string(),
    };
    let settings = serde_json::Value::Object(settings);
    let mut contents = vec![("tokenizer_config.json", settings.to_string().into_bytes())];
    contents.extend(special);
    for file in files {
        contents.push((file, read(file)?));
    }
    // The model's sizes do not matter, except that the model must take at least as many
    // tokens as the tokenizer, 64.
    let config = config_with(
        &format!("{model}/encoder"),
        &[("max_position_embeddings", serde_json::json!(512))],
    )?;
    Ok(TextTokenizer::from_files(&ModelFiles::memory(name, contents), &config)?)
}

#[test]
fn token_ids_of_nasty_texts_and_pairs_equal_transformers() -> Result {
    const JSON: &[&str] = &["tokenizer.json"];
    const PREFIX_SPACE: [(&str, &str); 2] =
        [("default", "{}"), ("prefix_space", r#"{"add_prefix_space": true}"#)];
    const XLM_ROBERTA: [(&str, &str); 4] = [
        ("default", "{}"),
        ("no_prefix_space", r#"{"add_prefix_space": false}"#),
        ("strips", r#"{"sep_token": {"content": "</s>", "lstrip": true, "special": true}}"#),
        (
            "names",
            r#"{"extra_special_tokens": {"image_token": "ab"},
                "special_tokens_map.json": {"extra_special_tokens": ["the"]}}"#,
        ),
    ];
    const NO_PREFIX_SPACE: [(&str, &str); 2] =
        [("default", "{}"), ("no_prefix_space", r#"{"add_prefix_space": false}"#)];
    const CASED: [(&str, &str); 2] =
        [("default", "{}"), ("cased", r#"{"do_lower_case": false, "keep_accents": true}"#)];
    const PUNCTUATION: [(&str, &str); 2] =
        [("default", "{}"), ("punctuation", r#"{"do_lower_case": true, "split_by_punct": true}"#)];
    const EXTRA: [(&str, &str); 3] = [
        ("default", "{}"),
        ("extra", r#"{"additional_special_tokens": ["ab", "<unk>NOTUSED"]}"#),
        (
            "map",
            r#"{"special_tokens_map.json": {"additional_special_tokens": ["ab", "<unk>NOTUSED"]}}"#,
        ),
    ];
    const SYMBOLS: [(&str, &str); 4] = [
        ("default", "{}"),
        ("no_symbols", r#"{"additional_special_tokens": [], "keep_accents": true}"#),
        ("null", r#"{"extra_special_tokens": null}"#),
        ("map", r#"{"special_tokens_map.json": {"additional_special_tokens": []}}"#),
    ];
    const WORD_PIECES: [(&str, &str); 3] = [
        ("default", "{}"),
        ("cased", r#"{"do_lower_case": false}"#),
        (
            "modernbert",
            r#"{"tokenizer_class": "BertTokenizerFast", "do_lower_case": false,
                "config.json": {"model_type": "modernbert"}}"#,
        ),
    ];
    let texts = fs::read(golden("architectures/tokenizers/texts.json"))?;
    let texts: Vec<String> = serde_json::from_slice(&texts)?;
    assert!(texts.len() > 500);
    for (name, files, cases) in [
        ("byte_bpe", JSON, &PREFIX_SPACE[..]),
        ("byte_bpe", &["vocab.json", "merges.txt"], &PREFIX_SPACE),
        ("unigram", JSON, &NO_PREFIX_SPACE),
        ("albert_unigram", JSON, &CASED),
        ("mpnet_word_pieces", JSON, &WORD_PIECES),
        ("deberta_unigram", JSON, &PUNCTUATION),
        ("camembert_unigram", JSON, &NO_PREFIX_SPACE),
        ("xlm_roberta_model", &["sentencepiece.bpe.model"], &XLM_ROBERTA),
        ("camembert_model", &["sentencepiece.bpe.model"], &EXTRA),
        ("albert_model", &["spiece.model"], &SYMBOLS),
        ("deberta_model", &["spm.model", "added_tokens.json"], &PUNCTUATION),
    ] {
        let folder = format!("architectures/tokenizers/{name}");
        let expected = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let pairs: Vec<_> = texts.iter().zip(&texts[7..]).collect();
        for (case, settings) in cases {
            let tokenizer = tokenizer(name, files, settings)?;
            for (kind, tokens) in
                [("texts", tokenizer.encode(&texts)?), ("pairs", tokenizer.encode_pairs(&pairs)?)]
            {
                let lengths = expected.get(&format!("{case}.{kind}.lengths")).to_vec1::<i32>()?;
                let ids = expected.get(&format!("{case}.{kind}.ids")).to_vec1::<i32>()?;
                assert_eq!(tokens.len(), lengths.len());
                let mut rest = &ids[..];
                for (i, (tokens, length)) in tokens.iter().zip(lengths).enumerate() {
                    let (expected, next) = rest.split_at(length as usize);
                    let got: Vec<i32> = tokens.input_ids.iter().map(|&id| id as i32).collect();
                    assert_eq!(got, expected, "{name} {case} {kind} {i}: {:?}", texts[i]);
                    let has_types = name.starts_with("deberta") && kind == "pairs";
                    let expected = u32::from(has_types);
                    assert_eq!(tokens.token_type_ids.iter().max(), Some(&expected), "{name}");
                    rest = next;
                }
            }
        }
    }
    Ok(())
}

/// transformers excludes white space, ASCII or other, from the beginning of a token's offsets.
#[test]
fn the_ranges_of_byte_level_tokens_exclude_white_space() -> Result {
    let folder = golden("architectures/pipelines/tagger");
    let mut json: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.join("tokenizer.json"))?)?;
    let model = &mut json["model"];
    model["vocab"]["\u{120}t"] = serde_json::json!(400);
    model["merges"].as_array_mut().expect("a list").push(serde_json::json!(["\u{120}", "t"]));
    assert_eq!(json["added_tokens"][4]["content"], "<mask>");
    json["added_tokens"][4]["lstrip"] = serde_json::json!(true);
    let dir = temp_dir()?;
    for file in fs::read_dir(&folder)? {
        let file = file?;
        fs::copy(file.path(), dir.path().join(file.file_name()))?;
    }
    fs::write(dir.path().join("tokenizer.json"), json.to_string())?;
    let config = ModelConfig::from_json(&fs::read(folder.join("config.json"))?, "config.json")?;
    let tokenizer = TextTokenizer::from_files(&ModelFiles::dir(dir.path())?, &config)?;
    for (text, expected) in [
        ("to the ta", &[0..1, 1..2, 3..4, 4..5, 5..6, 7..8, 8..9][..]),
        ("a \u{3000}<mask> tb", &[0..1, 5..11, 12..13, 13..14]),
    ] {
        for with_special_tokens in [false, true] {
            let pieces = tokenizer.pieces(text, with_special_tokens)?.into_iter();
            let ranges: Vec<_> = pieces.filter_map(|piece| piece.range).collect();
            assert_eq!(ranges, expected, "{text:?} {with_special_tokens}");
        }
    }
    let tagger = TokenClassifier::from_dir(dir.path(), &LoadOptions::default())?;
    let entities = tagger.classify("a \u{3000}<mask> b", Aggregation::None)?;
    assert!(entities.iter().any(|entity| entity.span.range == (5..11)), "{entities:?}");
    Ok(())
}

/// transformers has the same offsets.
#[test]
fn the_range_of_camemberts_mask_token_includes_the_spaces_before_it() -> Result {
    let camembert = tokenizer("camembert_model", &["sentencepiece.bpe.model"], "{}")?;
    let pieces = camembert.pieces("a  <mask>", false)?;
    assert_eq!(pieces.last().map(|piece| piece.range.clone()), Some(Some(1..9)));
    Ok(())
}

/// transformers has the same special tokens.
#[test]
fn debertas_mask_token_is_special() -> Result {
    let deberta = tokenizer("deberta_model", &["spm.model", "added_tokens.json"], "{}")?;
    let ids = deberta.encode(&["a [MASK]"])?.remove(0).input_ids;
    assert_eq!(deberta.decode(&ids)?.trim(), "a");
    let split = r#"{"split_special_tokens": true}"#;
    let split = tokenizer("deberta_model", &["spm.model", "added_tokens.json"], split)?;
    assert!(split.encode(&["a [MASK]"])?[0].input_ids.len() > ids.len());
    Ok(())
}

/// Without the post-processor of `tokenizer.json`, the rules of the class apply: [CLS] and [SEP]
/// surround the texts, even if `bos_token` and `eos_token` name other tokens, and the second text
/// has type 1.
#[test]
fn the_template_of_albert_equals_that_of_its_tokenizer_json() -> Result {
    let settings = r#"{"bos_token": "[MASK]", "eos_token": "[PAD]",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}"#;
    let path = golden("architectures/tokenizers/albert_unigram/tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(path)?)?;
    let mut encoded = vec![];
    for without in [false, true] {
        if without {
            json["post_processor"] = serde_json::Value::Null;
        }
        let contents = [
            ("tokenizer.json", json.to_string().into_bytes()),
            ("tokenizer_config.json", settings.into()),
        ];
        let contents = contents.map(|(name, bytes)| (name.to_string(), bytes));
        let config = config_with("albert/encoder", &[])?;
        let files = ModelFiles::memory("albert", contents);
        let tokenizer = TextTokenizer::from_files(&files, &config)?;
        let mut tokens = tokenizer.encode(&["a text"])?;
        tokens.extend(tokenizer.encode_pairs(&[("a text", "of two")])?);
        assert_eq!(tokens[1].token_type_ids.last(), Some(&1));
        encoded.push(format!("{tokens:?}"));
    }
    assert_eq!(encoded[0], encoded[1]);
    Ok(())
}

/// Without a `tokenizer.json`, transformers lets `add_bos_token` and `add_eos_token` choose the
/// tokens around a text. It ignores these keys if there is a `tokenizer.json`.
#[test]
fn add_bos_token_and_add_eos_token_set_the_template_of_albert() -> Result {
    let text = ["▁", "the", "▁", "c", "at"];
    for (settings, first, last) in [
        ("{}", Some("[CLS]"), Some("[SEP]")),
        (r#"{"add_bos_token": true}"#, Some("[CLS]"), None),
        (r#"{"add_eos_token": true}"#, None, Some("[SEP]")),
        (r#"{"add_bos_token": false}"#, None, None),
        (r#"{"add_eos_token": null}"#, None, None),
        (r#"{"add_bos_token": true, "bos_token": "▁the"}"#, Some("▁the"), None),
        (r#"{"add_bos_token": true, "bos_token": null}"#, None, None),
    ] {
        let tokenizer = tokenizer("albert_model", &["spiece.model"], settings)?;
        let pieces = tokenizer.pieces("the cat", true)?;
        let got: Vec<&str> = pieces.iter().map(|piece| &piece.token[..]).collect();
        let expected: Vec<&str> = first.into_iter().chain(text).chain(last).collect();
        assert_eq!(got, expected, "{settings}");
    }
    // In a pair, each text has its own tokens.
    let both = r#"{"add_bos_token": true, "add_eos_token": true}"#;
    let tokenizer = tokenizer("albert_model", &["spiece.model"], both)?;
    let [a, b] = ["the", "cat"].map(|text| tokenizer.encode(&[text]));
    let expected = [a?.remove(0).input_ids, b?.remove(0).input_ids].concat();
    assert_eq!(tokenizer.encode_pairs(&[("the", "cat")])?[0].input_ids, expected);
    Ok(())
}

/// transformers defines these classes as aliases of `RobertaTokenizer`.
#[test]
fn aliases_of_robertas_tokenizer_have_its_rules() -> Result {
    const FILES: [&[&str]; 2] = [&["tokenizer.json"], &["vocab.json", "merges.txt"]];
    let ids = |class: &str, files: &[&str]| -> Result<Vec<u32>> {
        let settings = serde_json::json!({"tokenizer_class": class, "add_prefix_space": true});
        let tokenizer = tokenizer("byte_bpe", files, &settings.to_string())?;
        Ok(tokenizer.encode(&["the cat"])?.remove(0).input_ids)
    };
    for files in FILES {
        let expected = ids("RobertaTokenizer", files)?;
        for class in ["BartTokenizer", "LEDTokenizer", "LongformerTokenizerFast", "MvpTokenizer"] {
            assert_eq!(ids(class, files)?, expected, "{class} {files:?}");
        }
    }
    Ok(())
}

/// The config of a golden model, with more keys.
fn config_with(model: &str, more: &[(&str, serde_json::Value)]) -> Result<ModelConfig> {
    let path = golden("architectures").join(model).join("config.json");
    let mut keys: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&fs::read(path)?)?;
    keys.extend(more.iter().map(|(key, value)| (key.to_string(), value.clone())));
    let json = serde_json::Value::Object(keys).to_string();
    Ok(ModelConfig::from_json(json.as_bytes(), "config.json")?)
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    use serde_json::json;

    let rope = |kind: &str| json!({"rope_type": kind, "factor": 2.0, "rope_theta": 1000.0});
    for (model, key, value, named, expected) in [
        ("nomic_bert/encoder", "num_experts", json!(8), "num_experts 8", "0"),
        ("nomic_bert/encoder", "moe_every_n_layers", json!(2), "moe_every_n_layers 2", "0"),
        ("nomic_bert/encoder", "prenorm", json!(true), "prenorm true", "false"),
        ("nomic_bert/encoder", "qkv_proj_bias", json!(true), "qkv_proj_bias true", "false"),
        ("nomic_bert/encoder", "rotary_emb_fraction", json!(0.5), "rotary_emb_fraction 0.5", "1"),
        ("nomic_bert/encoder", "rotary_head_dim", json!(true), "rotary_head_dim true", "false"),
        ("nomic_bert/encoder", "norm_mlp", json!(true), "norm_mlp true", "false"),
        // The published code has the default 0.
        ("nomic_bert/encoder", "rotary_emb_fraction", json!(null), "rotary_emb_fraction null", "1"),
        (
            "gte/encoder",
            "rope_scaling",
            json!({"type": "ntk", "factor": 0.5}),
            "factor 0.5",
            "at least 1 for the type ntk",
        ),
        (
            "nomic_bert/encoder",
            "activation_function",
            json!("gelu"),
            "activation_function \"gelu\"",
            "\"swiglu\"",
        ),
        ("nomic_bert/masked_lm", "head_dim", json!(6), "head_dim 6", "hidden_size /"),
        (
            "nomic_bert/masked_lm",
            "rotary_scaling_factor",
            json!(2.0),
            "rotary_scaling_factor 2",
            "null together with rope_parameters",
        ),
        (
            "nomic_bert/masked_lm",
            "rope_parameters",
            rope("longrope"),
            "rope_type longrope",
            "default, ",
        ),
        ("nomic_bert/masked_lm", "rope_parameters", json!({"type": "ntk"}), "factor null", "a n"),
        ("gte/encoder", "logn_attention_scale", json!(true), "logn_attention_scale true", "false"),
        ("gte/encoder", "layer_norm_type", json!("rms_norm"), "layer_norm_type \"rms", "\"layer"),
        ("gte/encoder", "pack_qkv", json!(false), "pack_qkv false", "true"),
        (
            "gte/encoder",
            "position_embedding_type",
            json!("absolute"),
            "position_embedding_type \"absolute\"",
            "\"rope\"",
        ),
        (
            "gte/encoder",
            "rope_scaling",
            json!({"type": "ntk", "factor": 8.0, "mixed_b": 0.75}),
            "mixed_b 0.75",
            "null",
        ),
        ("gte/sequence", "partial_rotary_factor", json!(0.5), "partial_rotary_factor 0.5", "1"),
        ("gte/sequence", "auto_map", json!({"AutoModel": "x--y.Z"}), "auto_map \"x--y.Z\"", "a m"),
        ("jina_bert/encoder", "feed_forward_type", json!("mlp"), "feed_forward_type mlp", "orig"),
        (
            "jina_bert/encoder",
            "auto_map",
            json!({"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}),
            "auto_map \"jinaai/jina-bert-v2-qk-post-norm",
            "a model without normalised queries and keys",
        ),
        // Without ALiBi, the config is read as BERT's, which has no gated feed-forward networks.
        (
            "jina_bert/encoder",
            "position_embedding_type",
            json!("absolute"),
            "feed_forward_type geglu",
            "\"original\"",
        ),
        (
            "gte/encoder",
            "max_position_embeddings",
            json!(1 << 30),
            "max_position_embeddings 1073741824",
            "at most 2^20 positions",
        ),
        ("jina_bert/encoder", "alibi_starting_size", json!(512), "alibi_starting_size 512", "the"),
    ] {
        let error = config_with(model, &[(key, value)]).unwrap_err().to_string();
        let refusal = format!("is not supported: expected {expected}");
        assert!(
            error.contains(&format!(": {named}")) && error.contains(&refusal),
            "{model}: {error}"
        );
    }
}

#[test]
fn rotary_positions_need_heads_of_even_width_and_small_tables() {
    use serde_json::json;
    let error = |settings: &[(&str, serde_json::Value)]| {
        config_with("modernbert/encoder", settings).unwrap_err().to_string()
    };
    let odd = error(&[("num_attention_heads", json!(4))]);
    assert!(odd.contains("head width 5 is odd"), "{odd}");
    let sizes = [
        ("hidden_size", json!(1024)),
        ("num_attention_heads", json!(1)),
        ("max_position_embeddings", json!(1 << 20)),
    ];
    let large = error(&sizes);
    let got = "1048576 positions × 512 frequencies × 2 different rope_theta";
    assert!(large.contains(got) && large.contains("at most 2^26 angles"), "{large}");
}

/// The defaults of the published code, which differ from those of transformers.
#[test]
fn keys_that_a_published_config_lacks_have_the_defaults_of_its_code() -> Result {
    use serde_json::json;
    let thetas = |config: &ModelConfig| match &config.encoder.positions {
        Positions::Rotary(layers) => layers.iter().map(|layer| layer.theta).collect::<Vec<_>>(),
        positions => panic!("{positions:?}"),
    };
    let absent = ["rotary_emb_base", "layer_norm_epsilon"].map(|key| (key, json!(null)));
    let nomic = config_with("nomic_bert/encoder", &absent)?;
    assert_eq!((thetas(&nomic), nomic.encoder.norm.eps), (vec![10_000.0; 3], 1e-5));
    let zeros = [("n_positions", json!(0)), ("type_vocab_size", json!(0))];
    let nomic = config_with("nomic_bert/encoder", &zeros)?.encoder;
    assert_eq!((nomic.max_tokens(), nomic.embeddings.type_vocab_size), (2048, None));
    let converted = config_with("nomic_bert/masked_lm", &[("rope_parameters", json!(null))])?;
    assert_eq!(thetas(&converted), [1000.0]);

    let settings = [("rope_theta", json!(null)), ("hidden_act", json!("relu"))];
    let gte = config_with("gte/encoder", &settings)?;
    assert_eq!((thetas(&gte), gte.heads.lm_activation), (vec![10_000.0; 3], Activation::Relu));
    let settings = [("rope_parameters", json!(null)), ("hidden_act", json!("relu"))];
    let converted = config_with("gte/masked_lm", &settings)?;
    assert_eq!(
        (thetas(&converted), converted.heads.lm_activation),
        (vec![160_000.0], Activation::Gelu)
    );
    Ok(())
}

/// In the published code of NomicBERT, `mlp_fc1_bias` also decides whether the language model head
/// has biases.
#[test]
fn the_language_model_head_of_a_published_nomic_bert_may_lack_its_biases() -> Result {
    const BIASES: [&str; 2] = ["cls.predictions.bias", "cls.predictions.transform.dense.bias"];
    let folder = golden("architectures/nomic_bert/masked_lm");
    let tensors = safetensors::load(folder.join("model.safetensors"), &Cpu)?;
    let save = |settings: serde_json::Value, keep_bias: bool| -> Result<tempfile::TempDir> {
        let dir = temp_dir()?;
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
        config["mlp_fc1_bias"] = settings;
        fs::write(dir.path().join("config.json"), config.to_string())?;
        let mut tensors = tensors.clone();
        for name in BIASES {
            let bias = tensors.remove(name).expect("the model has this bias");
            if keep_bias {
                tensors.insert(name.to_string(), bias.zeros_like()?);
            }
        }
        safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
        Ok(dir)
    };
    let logits = |dir: &tempfile::TempDir| -> Result<Tensor> {
        let (model, _) = EncoderForMaskedLm::from_dir(dir.path(), &LoadOptions::default())?;
        let ids = Tensor::new(&[[1u32, 2, 3, 4, 5]], &Cpu)?;
        Ok(model.forward(&ids, None, &AttentionMask::none())?)
    };
    let zeros = logits(&save(serde_json::json!(null), true)?)?;
    let without = logits(&save(serde_json::json!(false), false)?)?;
    assert_close("logits", &without, &zeros, 0.0);
    let error = logits(&save(serde_json::json!(null), false)?).unwrap_err().to_string();
    assert!(BIASES.iter().all(|name| error.contains(name)), "{error}");
    Ok(())
}

/// The older and the current keys of the same encoder.
#[test]
fn both_forms_of_a_config_describe_the_same_encoder() -> Result {
    // The encoders have three layers, and the encoders of the masked language models have one.
    let encoder = |model: &str, more: &[_]| -> Result<_> {
        let mut config = config_with(model, more)?.encoder;
        config.num_hidden_layers = 1;
        if let Positions::Rotary(layers) = &mut config.positions {
            layers.truncate(1);
        }
        Ok(config)
    };
    assert_eq!(encoder("nomic_bert/encoder", &[])?, encoder("nomic_bert/masked_lm", &[])?);
    // Without a key for the maximum length, it is four times the training length, here 10, as for
    // the published NomicBERT: 8,192 and 2,048.
    let current = encoder("nomic_bert_ntk/masked_lm", &[])?;
    assert_eq!(current.max_tokens(), 40);
    let n_positions = ("n_positions", serde_json::json!(32));
    assert_eq!(
        encoder("nomic_bert_ntk/encoder", &[])?,
        encoder("nomic_bert_ntk/masked_lm", &[n_positions])?
    );
    // NTK scaling has another form in transformers, with the same frequencies.
    let [older, current] = ["gte/encoder", "gte/masked_lm"].map(|model| encoder(model, &[]));
    let frequencies = |config: encoder::EncoderConfig| match config.positions {
        Positions::Rotary(layers) => layers[0].scaling.frequencies(layers[0].theta, 10, 1),
        positions => panic!("{positions:?}"),
    };
    for (older, current) in frequencies(older?).into_iter().zip(frequencies(current?)) {
        assert!((older / current - 1.0).abs() < 1e-6, "{older} {current}"); // roundings in f32
    }
    Ok(())
}

/// In f32, bf16 and int8, a sequence has the same hidden states alone and in any batch.
#[test]
fn hidden_states_do_not_depend_on_the_batch() -> Result {
    for Architecture { folder: name, .. } in architectures()? {
        let folder = golden(&format!("architectures/{name}/encoder"));
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let (model, _) =
                EncoderModel::from_dir(&folder, &LoadOptions::default().with_precision(precision))?;
            let ids =
                |length: usize| (0..length as u32).map(|i| 4 + i * 7 % 43).collect::<Vec<_>>();
            let hidden = |lengths: &[usize]| -> Result<Vec<Vec<f32>>> {
                let mut batch = RaggedBatch::default();
                for &length in lengths {
                    batch.push(&ids(length), &vec![0; length])?;
                }
                Ok(model.forward_ragged(&batch)?.to_vec2()?)
            };
            let batch = hidden(&[9, 1, 15, 4])?;
            let mut start = 0;
            for length in [9, 1, 15, 4] {
                let alone = hidden(&[length])?;
                let name = format!("{name} {precision:?}, {length} tokens");
                assert!(alone.iter().flatten().all(|x| x.is_finite()), "{name}");
                assert_eq!(batch[start..start + length], alone, "{name}");
                start += length;
            }
        }
    }
    Ok(())
}

/// Folders of sentence-transformers with a tokenizer, a pooling and prompts. The architecture is
/// detected from the files. One of the texts is truncated.
#[test]
fn sentence_embeddings_equal_sentence_transformers() -> Result {
    let texts = fs::read(golden("nasty_texts.json"))?;
    let mut texts: Vec<String> = serde_json::from_slice(&texts)?;
    texts.truncate(40);
    texts.extend(["a <pad> b <mask>".to_string(), "word ".repeat(200)]);
    let folders = fs::read_dir(golden("architectures/sentences"))?;
    let folders: Vec<String> = folders
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    assert!(folders.len() >= 7, "{folders:?}");
    for architecture in folders {
        let folder = format!("architectures/sentences/{architecture}");
        let expected = Golden::open(&format!("{folder}/expected.safetensors"))?;
        let embedder = Embedder::from_dir(golden(&folder), &LoadOptions::default())?;
        let embeddings = embedder.embed(&texts)?;
        assert_close(&folder, &embeddings, expected.get("embeddings"), 1e-6);
        let options = EmbedOptions::new().with_prompt(Prompt::Query);
        let queries = embedder.embed_with(&texts, options)?.vectors;
        assert_close(&format!("{folder} queries"), &queries, expected.get("queries"), 1e-6);
        let found = Inspection::new(&ModelFiles::dir(golden(&folder))?);
        assert_eq!(found.runs_as, ["EncoderModel", "Embedder"], "{:?}", found.problems);
    }
    Ok(())
}

/// In ModernBERT's checkpoints, the tensors of several heads have the same names.
#[test]
fn inspect_finds_the_head_of_modernbert() -> Result {
    for (name, head, class) in [
        ("masked_lm", "masked language model", "EncoderForMaskedLm"),
        ("sequence", "classification", "EncoderForSequenceClassification"),
        ("token", "classification", "EncoderForTokenClassification"),
        ("answer", "question answering", "EncoderForQuestionAnswering"),
    ] {
        let folder = golden(&format!("architectures/modernbert/{name}"));
        let found = Inspection::new(&ModelFiles::dir(&folder)?);
        assert_eq!(found.runs_as, ["EncoderModel", class], "{name}: {:?}", found.problems);
        assert_eq!(found.heads, [head], "{name}");
        assert!(found.problems.is_empty(), "{name}: {:?}", found.problems);
        // Without the name of the class, both classifiers fit a classifier's tensors.
        let dir = temp_dir()?;
        fs::copy(folder.join("model.safetensors"), dir.path().join("model.safetensors"))?;
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(folder.join("config.json"))?)?;
        config.as_object_mut().expect("an object").remove("architectures");
        fs::write(dir.path().join("config.json"), config.to_string())?;
        let found = Inspection::new(&ModelFiles::dir(dir.path())?);
        assert!(found.runs_as.contains(&class), "{name}: {:?}", found.runs_as);
        assert!(found.heads.contains(&head), "{name}: {:?}", found.heads);
        assert!(found.problems.is_empty(), "{name}: {:?}", found.problems);
    }
    Ok(())
}

/// Pipelines of RoBERTa. Its tokens do not mark the continuation of a word, so that the
/// aggregations by word (first, average, max) split words at spaces, as in transformers.
#[test]
fn pipelines_of_roberta_equal_transformers() -> Result {
    let folder = golden("architectures/pipelines");
    let expected = Golden::open("architectures/pipelines/expected.safetensors")?;
    let tagger = TokenClassifier::from_dir(folder.join("tagger"), &LoadOptions::default())?;
    crate::golden_heads::check_entities(&tagger, &expected)?;

    let filler = MaskFiller::from_dir(folder.join("masked_lm"), &LoadOptions::default())?;
    let masks = filler.fill("a <mask> cab <mask> bad", 5)?;
    let tokens = masks.iter().map(|mask| mask.iter().map(|c| i64::from(c.token_id)).collect());
    let tokens: Vec<Vec<i64>> = tokens.collect();
    assert_eq!(tokens, expected.get("fill.tokens").to_vec2::<i64>()?);
    let scores = masks.iter().map(|mask| mask.iter().map(|c| c.score).collect());
    let scores = Tensor::new(scores.collect::<Vec<Vec<f32>>>(), &Cpu)?;
    assert_close("fill", &scores, expected.get("fill.scores"), 2e-6);

    let texts = fs::read(golden("nasty_texts.json"))?;
    let texts: Vec<String> = serde_json::from_slice(&texts)?;
    let ranker = TextClassifier::from_dir(folder.join("score"), &LoadOptions::default())?;
    let scores = Tensor::new(ranker.rerank("bad cab", &texts[..30])?, &Cpu)?;
    assert_close("rerank", &scores, expected.get("rerank"), 1e-6);
    Ok(())
}
