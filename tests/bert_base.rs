//! BERT-base at full size, from a checkpoint with the LayerNorm names `gamma` and `beta`.

use encoder::{BertConfig, EncoderModel, LoadOptions};

use crate::random_tensors::random_tensors;

#[test]
fn bert_base_loads_with_tensorflow_names() -> anyhow::Result<()> {
    let config = BertConfig::bert_base();
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("model.safetensors");
    candle_core::safetensors::save(&random_tensors(&config)?, path)?;
    std::fs::write(dir.path().join("config.json"), serde_json::to_string(&config)?)?;

    let (_, report) = EncoderModel::from_dir(dir.path(), &LoadOptions::default())?;
    println!("{report}");
    assert_eq!((report.prefix.as_str(), report.loaded.len()), ("bert.", 197));
    assert_eq!(report.parameters, 108_891_648); // 109.5 M with the pooler
    Ok(())
}
