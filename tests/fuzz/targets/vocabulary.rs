//! The input has three parts, separated by zero bytes: a `vocab.txt`, a text and a
//! `tokenizer_config.json`. The target encodes the text twice with the vocabulary: with this config
//! and with an empty one.
#![no_main]

use encoder::{BertConfig, ModelConfig, ModelFiles, TextTokenizer};

libfuzzer_sys::fuzz_target!(|bytes: Vec<u8>| {
    let mut parts = bytes.split(|&byte| byte == 0).map(<[u8]>::to_vec);
    let mut part = || parts.next().unwrap_or_default();
    let (words, text, settings) = (part(), part(), part());
    let text = String::from_utf8_lossy(&text);
    for settings in [settings, b"{}".to_vec()] {
        let files = [("vocab.txt", words.clone()), ("tokenizer_config.json", settings)];
        let files = ModelFiles::memory("fuzz", files);
        if let Ok(tokenizer) =
            TextTokenizer::from_files(&files, &ModelConfig::from(&BertConfig::bert_base()))
        {
            let tokens =
                tokenizer.encode(&[&text]).expect("a WordPiece tokenizer encodes every text");
            let _ = tokenizer.decode(&tokens[0].input_ids);
            let _ = tokenizer.encode_pairs(&[(&text, &text)]);
        }
    }
});
