//! Any bytes as what PyTorch saved: as they are, and as the pickles of a file from before 1.6.
#![no_main]

use candle_core::Device;
use encoder::{BertModel, Inspection, ModelFiles, Precision};

/// The first three pickles of such a file.
const BEFORE: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";

fn load(weights: Vec<u8>) {
    let config = include_bytes!("../../golden/bert_gelu/config.json").to_vec();
    let files = [("config.json", config), ("pytorch_model.bin", weights)];
    let files = ModelFiles::memory("fuzz", files);
    Inspection::new(&files);
    let _ = BertModel::from_files(&files, Precision::F32, &Device::Cpu);
}

libfuzzer_sys::fuzz_target!(|bytes: Vec<u8>| {
    load([BEFORE, &bytes].concat());
    load(bytes);
});
