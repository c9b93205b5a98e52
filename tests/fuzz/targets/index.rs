//! Loads two shards, each with half of the tensors, and arbitrary bytes as their index.
#![no_main]

use std::{collections::BTreeMap, sync::LazyLock};

use encoder::{EncoderModel, Inspection, LoadOptions, ModelFiles};
use safetensors::{SafeTensors, tensor::TensorView};

/// Two shards of the golden model: the tensors with even and with odd indices in the order of their
/// names.
static SHARDS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let whole = include_bytes!("../../golden/bert_gelu/model.safetensors");
    let tensors = SafeTensors::deserialize(whole).expect("a valid file").tensors();
    let tensors: BTreeMap<String, TensorView> = tensors.into_iter().collect();
    [0, 1].map(|remainder| {
        let shard = tensors.iter().enumerate().filter(|(i, _)| i % 2 == remainder);
        safetensors::serialize(shard.map(|(_, tensor)| tensor), None).expect("a valid shard")
    })
});

libfuzzer_sys::fuzz_target!(|json: &[u8]| {
    let [a, b] = SHARDS.clone();
    let config = include_bytes!("../../golden/bert_gelu/config.json").to_vec();
    let files = [
        ("config.json", config),
        ("model.safetensors.index.json", json.to_vec()),
        ("a.safetensors", a),
        ("b.safetensors", b),
    ];
    let files = ModelFiles::memory("fuzz", files);
    Inspection::new(&files);
    let _ = EncoderModel::from_files(&files, &LoadOptions::default());
});
