//! Loads arbitrary bytes as a PyTorch file. Each input is loaded twice: unchanged, and appended to
//! the first three pickles of a file from before PyTorch 1.6.
#![no_main]

use encoder::{EncoderModel, Inspection, LoadOptions, ModelFiles};

/// Magic number, protocol version and system: the first three pickles of a file from before PyTorch
/// 1.6.
const HEADER: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}.";

fn load(weights: Vec<u8>) {
    let config = include_bytes!("../../golden/bert_gelu/config.json").to_vec();
    let files = [("config.json", config), ("pytorch_model.bin", weights)];
    let files = ModelFiles::memory("fuzz", files);
    Inspection::new(&files);
    let _ = EncoderModel::from_files(&files, &LoadOptions::default());
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    load([HEADER, bytes].concat());
    load(bytes.to_vec());
});
