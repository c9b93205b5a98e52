//! Loads arbitrary bytes as a safetensors file. Each input is loaded twice: unchanged, and as a
//! header followed by zeros, where the first two bytes of the input give the number of zeros.
#![no_main]

use encoder::{EncoderModel, Inspection, LoadOptions, ModelFiles};

fn load(weights: Vec<u8>) {
    let config = include_bytes!("../../golden/bert_gelu/config.json").to_vec();
    let files = [("config.json", config), ("model.safetensors", weights)];
    let files = ModelFiles::memory("fuzz", files);
    Inspection::new(&files);
    let _ = EncoderModel::from_files(&files, &LoadOptions::default());
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Some((data_len, header)) = bytes.split_first_chunk() {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header);
        file.resize(file.len() + usize::from(u16::from_le_bytes(*data_len)), 0);
        load(file);
    }
    load(bytes.to_vec());
});
