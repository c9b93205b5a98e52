//! Parses arbitrary bytes as `config.json` of several models, as the pooling's config and as
//! `modules.json`.
#![no_main]

use encoder::{
    BertConfig, EncoderDecoderConfig, Inspection, Labels, ModelConfig, ModelFiles, Pooling,
};

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    let _ = BertConfig::from_json(json, "config.json");
    let _ = ModelConfig::from_json(json, "config.json");
    let _ = EncoderDecoderConfig::from_json(json, "config.json");
    let _ = Labels::from_json(json, "config.json");
    let _ = Pooling::from_json(json, "config.json");
    let weights = include_bytes!("../../golden/bert_gelu/model.safetensors").to_vec();
    let files = [
        ("config.json", json.to_vec()),
        ("modules.json", json.to_vec()),
        ("model.safetensors", weights),
    ];
    Inspection::new(&ModelFiles::memory("fuzz", files));
});
