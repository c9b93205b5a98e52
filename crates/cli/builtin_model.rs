//! The built-in model.

use encoder::ModelFiles;

macro_rules! files {
    ($($file:literal),* $(,)?) => {
        [$(($file, &include_bytes!(concat!("../../weights/all-MiniLM-L6-v2/", $file))[..])),*]
    };
}

/// The files of all-MiniLM-L6-v2; see weights/README.md.
pub fn files() -> ModelFiles {
    let files = files![
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    ModelFiles::memory("all-MiniLM-L6-v2", files)
}
