//! Parses arbitrary bytes as `config.json` of several models, as the pooling's config and as
//! `modules.json`.
#![no_main]

use encoder::{
    BertConfig, EncoderDecoderConfig, Inspection, Labels, ModelConfig, ModelFiles, Pooling,
};

libfuzzer_sys::fuzz_target!(|json: Vec<u8>| {
    let _ = BertConfig::from_json(&json, "config.json");
    let _ = ModelConfig::from_json(&json, "config.json");
    let _ = EncoderDecoderConfig::from_json(&json, "config.json");
    let _ = Labels::from_json(&json, "config.json");
    let _ = Pooling::from_json(&json, "config.json");
    let weights = include_bytes!("../../golden/bert_gelu/model.safetensors").to_vec();
    let files =
        [("config.json", json.clone()), ("modules.json", json), ("model.safetensors", weights)];
    Inspection::new(&ModelFiles::memory("fuzz", files));
});
