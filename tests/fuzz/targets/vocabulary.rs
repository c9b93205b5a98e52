//! The input has four parts, separated by zero bytes: a vocabulary, the merges of a BPE vocabulary,
//! a text and a `tokenizer_config.json`. The target encodes the text with the vocabulary as
//! `vocab.txt`, as `vocab.json` and as `tokenizer.json` of several models, each with this config and
//! with an empty one.
#![no_main]

use std::sync::Once;

use encoder::{ModelConfig, ModelFiles, TextTokenizer};

const BERT: &[u8] = include_bytes!("../../golden/bert_gelu/config.json");
const ROBERTA: &[u8] = include_bytes!("../../golden/architectures/roberta/encoder/config.json");
const XLM_ROBERTA: &[u8] =
    include_bytes!("../../golden/architectures/xlm_roberta/encoder/config.json");
const MODERNBERT: &[u8] =
    include_bytes!("../../golden/architectures/modernbert/encoder/config.json");

/// The file with the vocabulary, the model's config, and whether the tokenizer encodes every text.
const CASES: [(&str, &[u8], bool); 6] = [
    ("vocab.txt", BERT, true),
    ("vocab.json", ROBERTA, true),
    ("tokenizer.json", BERT, true),
    ("tokenizer.json", ROBERTA, true),
    ("tokenizer.json", XLM_ROBERTA, false),
    ("tokenizer.json", MODERNBERT, false),
];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // The hook of libFuzzer ends the process, also for the panics of the crate `tokenizers` that
    // `encoder` returns as errors. Other panics still reach libFuzzer.
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));

    let mut parts = bytes.split(|&byte| byte == 0).map(<[u8]>::to_vec);
    let mut part = || parts.next().unwrap_or_default();
    let (vocabulary, merges, text, settings) = (part(), part(), part(), part());
    let text = String::from_utf8_lossy(&text);
    for settings in [settings, b"{}".to_vec()] {
        for (file, config, encodes_every_text) in CASES {
            let config = ModelConfig::from_json(config, "config.json").expect("a golden config");
            let files = [
                (file, vocabulary.clone()),
                ("merges.txt", merges.clone()),
                ("tokenizer_config.json", settings.clone()),
            ];
            let files = ModelFiles::memory("fuzz", files);
            let Ok(tokenizer) = TextTokenizer::from_files(&files, &config) else { continue };
            let _ = tokenizer.encode_pairs(&[(&text, &text)]);
            match tokenizer.encode(&[&text]) {
                Ok(tokens) => drop(tokenizer.decode(&tokens[0].input_ids)),
                Err(error) => {
                    assert!(!encodes_every_text, "{file} of {}: {error}", config.architecture())
                }
            }
        }
    }
});
