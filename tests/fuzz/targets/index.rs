//! Loads two shards with arbitrary bytes as their index.
#![no_main]

use candle_core::Device;
use encoder::{EncoderModel, Inspection, ModelFiles, Precision};

libfuzzer_sys::fuzz_target!(|json: Vec<u8>| {
    let shard = include_bytes!("../../golden/bert_gelu/model.safetensors").to_vec();
    let config = include_bytes!("../../golden/bert_gelu/config.json").to_vec();
    let files = [
        ("config.json", config),
        ("model.safetensors.index.json", json),
        ("a.safetensors", shard.clone()),
        ("b.safetensors", shard),
    ];
    let files = ModelFiles::memory("fuzz", files);
    Inspection::new(&files);
    let _ = EncoderModel::from_files(&files, Precision::F32, &Device::Cpu);
});
