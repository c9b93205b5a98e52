//! Tokenizer files and their settings.

use encoder::{EmbedOptions, LongTexts, ModelConfig, TextTokenizer};
use serde_json::json;

use super::{CONFIG, Table, VOCAB};
use crate::support::golden;

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SENTENCE_CONFIG: &str = "sentence_bert_config.json";

/// The text that most cases tokenize: upper case, an accent and Chinese characters.
const TEXT: &str = "A CAFÉ 東京";

pub(super) fn cases(t: &mut Table) {
    t.section("tokenizers");
    tokenizer_json(t);
    vocab_txt(t);
    added_tokens(t);
    sentence_config(t);
    special_tokens(t);
    tokenizer_classes(t);
    unusual_files(t);
    long_texts(t);
}

/// A cased `tokenizer.json` of [`VOCAB`] that truncates to 1 token (too few for the special tokens)
/// and pads to 12.
fn cased_tokenizer_json() -> String {
    let vocabulary: serde_json::Map<_, _> =
        VOCAB.lines().zip(0..).map(|(word, id)| (word.to_string(), json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": {
            "direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 2
        },
        "padding": {
            "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"
        },
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": false, "lowercase": false
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": null,
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocabulary
        }
    })
    .to_string()
}

fn tokenizer_json(t: &mut Table) {
    let cased = cased_tokenizer_json();
    t.case("tokenizer.json with padding and truncation", |c| {
        c.set_file("tokenizer.json", &cased[..]).token_ids("a b c abc")
    });
    // As in transformers 5.23, BertTokenizer's settings and their defaults override the normalizer
    // of tokenizer.json; PreTrainedTokenizerFast has no such settings.
    for (case, settings) in [
        ("cased tokenizer.json, no tokenizer_class", "{}"),
        ("cased tokenizer.json, BertTokenizer", r#"{"tokenizer_class": "BertTokenizer"}"#),
        ("cased tokenizer.json, do_lower_case false", r#"{"do_lower_case": false}"#),
        (
            "cased tokenizer.json, PreTrainedTokenizerFast",
            r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#,
        ),
    ] {
        t.case(case, |c| {
            c.set_file("tokenizer.json", &cased[..]).set_file(TOKENIZER_CONFIG, settings);
            c.token_ids("A CAFÉ café")
        });
    }
}

fn vocab_txt(t: &mut Table) {
    for (case, settings) in [
        ("vocab.txt", "{}"),
        ("do_lower_case false", r#"{"do_lower_case": false}"#),
        (
            "strip_accents null, do_lower_case true",
            r#"{"strip_accents": null, "do_lower_case": true}"#,
        ),
        ("strip_accents false", r#"{"strip_accents": false}"#),
        (
            "strip_accents true, do_lower_case false",
            r#"{"strip_accents": true, "do_lower_case": false}"#,
        ),
        ("tokenize_chinese_chars false", r#"{"tokenize_chinese_chars": false}"#),
        ("model_max_length 4", r#"{"model_max_length": 4}"#),
        ("model_max_length 1e30", r#"{"model_max_length": 1e30}"#),
        ("model_max_length 2", r#"{"model_max_length": 2}"#),
    ] {
        t.case(case, |c| {
            c.set_file("vocab.txt", VOCAB).set_file(TOKENIZER_CONFIG, settings).token_ids(TEXT)
        });
    }
}

/// Added tokens and other settings, with a vocabulary of 16 tokens (ids 0 to 15).
fn added_tokens(t: &mut Table) {
    let settings = TOKENIZER_CONFIG;
    for (case, file, json) in [
        ("added_tokens.json", "added_tokens.json", r#"{"caf": 17, "東京": 16}"#),
        ("added_tokens.json with a non-consecutive id", "added_tokens.json", r#"{"東京": 20}"#),
        ("additional_special_tokens", settings, r#"{"additional_special_tokens": ["東京"]}"#),
        (
            "extra_special_tokens as a list",
            settings,
            r#"{"extra_special_tokens": [{"content": "CAF", "lstrip": true}]}"#,
        ),
        ("extra_special_tokens as a map", settings, r#"{"extra_special_tokens": {"x": "東京"}}"#),
        ("extra_special_tokens as a number", settings, r#"{"extra_special_tokens": 7}"#),
        ("custom special token city_token", settings, r#"{"city_token": "東京"}"#),
        (
            "added_tokens_decoder",
            settings,
            r#"{"added_tokens_decoder": {"16": {"content": "東京", "normalized": false}}}"#,
        ),
        (
            "added_tokens_decoder with an id in use",
            settings,
            r#"{"added_tokens_decoder": {"9": {"content": "東京"}}}"#,
        ),
        ("truncation_side left", settings, r#"{"truncation_side": "left", "model_max_length": 4}"#),
        ("unknown truncation_side", settings, r#"{"truncation_side": "middle"}"#),
        ("max_len 4", settings, r#"{"max_len": 4}"#),
        ("init_inputs", settings, r#"{"init_inputs": ["x"]}"#),
        (
            "fast_tokenizer_files",
            settings,
            r#"{"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]}"#,
        ),
    ] {
        t.case(case, |c| c.set_file("vocab.txt", VOCAB).set_file(file, json).token_ids(TEXT));
    }
}

fn sentence_config(t: &mut Table) {
    for (case, json) in [
        (
            "processor_kwargs override tokenizer_config.json",
            r#"{"processor_kwargs": {"do_lower_case": false, "model_max_length": 5}}"#,
        ),
        (
            "processing_kwargs",
            r#"{"max_seq_length": 9,
                "processing_kwargs": {"text": {"max_length": 4, "truncation": true}}}"#,
        ),
    ] {
        t.case(case, |c| c.set_file(SENTENCE_CONFIG, json).embedder_token_ids(TEXT));
    }
    t.case("max_seq_length ignored without an Embedder", |c| {
        c.set_file("vocab.txt", VOCAB)
            .set_file(SENTENCE_CONFIG, r#"{"max_seq_length": 4}"#)
            .token_ids(TEXT)
    });
}

fn special_tokens(t: &mut Table) {
    for (case, map) in [
        ("special_tokens_map.json: extra list merged", r#"{"extra_special_tokens": ["東京"]}"#),
        (
            "special_tokens_map.json: additional list ignored",
            r#"{"additional_special_tokens": ["東京"]}"#,
        ),
    ] {
        t.case(case, |c| {
            c.set_file(TOKENIZER_CONFIG, r#"{"extra_special_tokens": ["CAF"]}"#);
            c.set_file("vocab.txt", VOCAB).set_file("special_tokens_map.json", map).token_ids(TEXT)
        });
    }
    t.case("empty list overrides special_tokens_map.json", |c| {
        c.set_file(TOKENIZER_CONFIG, r#"{"additional_special_tokens": []}"#);
        c.set_file("special_tokens_map.json", r#"{"additional_special_tokens": ["東京"]}"#);
        c.set_file("vocab.txt", VOCAB).token_ids(TEXT)
    });
    t.case("special_tokens_map.json: list merged with a map", |c| {
        c.set_file(TOKENIZER_CONFIG, r#"{"extra_special_tokens": {"a": "CAF"}}"#);
        c.set_file("special_tokens_map.json", r#"{"additional_special_tokens": ["東京"]}"#);
        c.set_file("vocab.txt", VOCAB).token_ids(TEXT)
    });
    t.case("special_tokens_map.json: cls, sep, unk and mask", |c| {
        let map = r#"{"cls_token": "<s>", "sep_token": {"content": "</s>", "lstrip": false},
            "unk_token": "<unk>", "mask_token": "<mask>"}"#;
        let vocab = VOCAB.replace("[CLS]", "<s>").replace("[SEP]", "</s>");
        let vocab = vocab.replace("[UNK]", "<unk>").replace("[MASK]", "<mask>");
        c.set_file("vocab.txt", vocab)
            .set_file("special_tokens_map.json", map)
            .token_ids("x a <mask>")
    });
    t.case("special tokens in the text", |c| c.set_file("vocab.txt", VOCAB).token_ids("a [SEP] b"));
    t.case("split_special_tokens", |c| {
        c.set_file(TOKENIZER_CONFIG, r#"{"split_special_tokens": true}"#);
        c.set_file("vocab.txt", VOCAB).token_ids("a [SEP] b")
    });
}

fn tokenizer_classes(t: &mut Table) {
    let cased = cased_tokenizer_json();
    t.case("truncation direction in tokenizer.json", |c| {
        let mut json: serde_json::Value = serde_json::from_str(&cased)?;
        assert_eq!(json["truncation"]["direction"], "Right");
        json["truncation"]["direction"] = "Left".into();
        c.set_file("tokenizer.json", json.to_string())
            .set_file(TOKENIZER_CONFIG, r#"{"model_max_length": 4}"#)
            .token_ids(TEXT)
    });
    t.case("tokenizer_class FunnelTokenizer", |c| {
        c.set_file("tokenizer.json", &cased[..])
            .set_file(TOKENIZER_CONFIG, r#"{"tokenizer_class": "FunnelTokenizer"}"#);
        c.token_ids("A CAFÉ café")
    });
    t.case("tokenizer_class in config.json", |c| {
        c.set_config("tokenizer_class", json!("PreTrainedTokenizerFast"));
        c.set_file("tokenizer.json", &cased[..]).token_ids("A CAFÉ café")
    });
    for (case, settings) in [
        ("token_type_ids of a pair", r#"{}"#),
        (
            "model_input_names without token_type_ids",
            r#"{"model_input_names": ["input_ids", "attention_mask"]}"#,
        ),
        ("token_type_ids of DistilBertTokenizer", r#"{"tokenizer_class": "DistilBertTokenizer"}"#),
    ] {
        t.case(case, |c| {
            c.set_file(TOKENIZER_CONFIG, settings);
            let config = ModelConfig::from_json(&c.contents()[CONFIG], "m/config.json")?;
            let files = c.set_file("vocab.txt", VOCAB).files();
            let pairs = TextTokenizer::from_files(&files, &config)?.encode_pairs(&[("a", "b")])?;
            Ok(format!("{:?}", pairs[0].token_type_ids))
        });
    }
}

fn unusual_files(t: &mut Table) {
    t.case("vocab.txt with CRLF line endings", |c| {
        c.set_file("vocab.txt", VOCAB.replace('\n', "\r\n")).token_ids(TEXT)
    });
    t.case("tokenizer_class BertJapaneseTokenizer", |c| {
        let settings = r#"{"tokenizer_class": "BertJapaneseTokenizer"}"#;
        c.set_file("vocab.txt", VOCAB).set_file(TOKENIZER_CONFIG, settings).token_ids(TEXT)
    });
    t.case("CamembertTokenizer by default", |c| {
        c.set_config("model_type", json!("camembert")).set_config("pad_token_id", json!(1));
        c.set_file("vocab.txt", VOCAB).token_ids(TEXT)
    });
    let model =
        std::fs::read(golden("architectures/tokenizers/xlm_roberta_model/sentencepiece.bpe.model"));
    let model = model.expect("a golden file");
    // A piece "a" with score 0, and the trainer's model_type 2 (BPE).
    let bpe = *b"\x0a\x08\x0a\x01a\x15\0\0\0\0\x12\x02\x18\x02";
    for (case, file, contents) in [
        ("sentencepiece.bpe.model", "sentencepiece.bpe.model", &model[..]),
        ("sentencepiece.bpe.model that is truncated", "sentencepiece.bpe.model", &model[..999]),
        ("sentencepiece.bpe.model that is empty", "sentencepiece.bpe.model", b""),
        ("sentencepiece.bpe.model with BPE", "sentencepiece.bpe.model", &bpe),
        ("spm.model for XLM-R", "spm.model", &model[..]),
    ] {
        t.case(case, |c| {
            c.set_file(TOKENIZER_CONFIG, r#"{"tokenizer_class": "XLMRobertaTokenizer"}"#);
            c.set_file("vocab.txt", VOCAB).set_file(file, contents).token_ids("Let's go.")
        });
    }
    t.case("vocab.txt without [SEP]", |c| {
        c.set_file("vocab.txt", "[UNK]\n[CLS]\na").token_ids("a")
    });
    t.case("vocab.txt that is not UTF-8", |c| {
        c.set_file("vocab.txt", *b"[UNK]\n\xff").token_ids("a")
    });
    t.case("no tokenizer file", |c| c.token_ids("a"));
    t.case("tokenizer.json without a model", |c| c.set_file("tokenizer.json", "{}").token_ids("a"));
}

fn long_texts(t: &mut Table) {
    let long = "a ".repeat(30);
    for (case, long_texts) in [
        ("text beyond the maximum length: truncated", LongTexts::Truncate),
        ("text beyond the maximum length: refused", LongTexts::Refuse),
        ("text beyond the maximum length: windows", LongTexts::Windows),
    ] {
        t.case(case, |c| {
            let options = EmbedOptions::new().with_long_texts(long_texts);
            let got = c.add_pooling().embedder()?.embed_with(&["b", &long], options)?;
            let truncated = got
                .truncated
                .iter()
                .map(|x| format!("text {}: {} of {} tokens", x.text, x.kept, x.tokens));
            Ok(format!("{:?} {}", got.vectors.dims(), truncated.collect::<Vec<_>>().join(", ")))
        });
    }
}
