//! Loading: the peak of memory, and the word embeddings that stay in the file.

use std::{
    fs,
    io::{BufWriter, Write},
    path::Path,
};

use encoder::{Embedder, LoadOptions, ModelFiles, Precision};
use serde_json::{Map, Value, json};

use crate::support::{MINILM, copy_folder, golden};

type Result<T = ()> = anyhow::Result<T>;

/// A sentence-transformers folder with a decoder and its tokenizer.
const QWEN3: &str = "decoders/sentences/qwen3";

/// The sizes of the checkpoint that [`write_checkpoint`] writes.
#[cfg(target_os = "linux")]
mod sizes {
    pub const VOCABULARY: usize = 100_000;
    pub const HIDDEN: usize = 512;
    pub const INTERMEDIATE: usize = 2048;
    pub const LAYERS: usize = 4;
    /// Values of the linear maps: four of attention, without grouped heads, and three of the
    /// feed-forward network.
    pub const IN_MAPS: usize = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE);
}

/// Writes a copy of the golden folder [`QWEN3`] with another config and with random weights in
/// bf16.
#[cfg(target_os = "linux")]
fn write_checkpoint(dir: &Path) -> Result {
    use sizes::*;

    copy_folder(&golden(QWEN3), dir)?;
    let read = |file: &str| -> Result<Map<String, Value>> {
        Ok(serde_json::from_str(&fs::read_to_string(dir.join(file))?)?)
    };
    let mut config = read("config.json")?;
    config.remove("layer_types");
    for (key, value) in [
        ("vocab_size", VOCABULARY),
        ("hidden_size", HIDDEN),
        ("intermediate_size", INTERMEDIATE),
        ("num_hidden_layers", LAYERS),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 8),
        ("head_dim", HIDDEN / 8),
    ] {
        config.insert(key.to_string(), value.into());
    }
    fs::write(dir.join("config.json"), serde_json::to_vec(&config)?)?;
    let mut pooling = read("1_Pooling/config.json")?;
    pooling.insert("word_embedding_dimension".to_string(), HIDDEN.into());
    fs::write(dir.join("1_Pooling/config.json"), serde_json::to_vec(&pooling)?)?;

    let mut tensors = vec![
        ("embed_tokens.weight".to_string(), vec![VOCABULARY, HIDDEN]),
        ("norm.weight".to_string(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_norm", vec![HIDDEN / 8]),
            ("self_attn.k_norm", vec![HIDDEN / 8]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.v_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.up_proj", vec![INTERMEDIATE, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INTERMEDIATE]),
        ] {
            tensors.push((format!("layers.{layer}.{name}.weight"), shape));
        }
    }
    let (mut header, mut start) = (Map::new(), 0);
    for (name, shape) in &tensors {
        let end = start + 2 * shape.iter().product::<usize>();
        let tensor = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), tensor);
        start = end;
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = BufWriter::new(fs::File::create(dir.join("model.safetensors"))?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut state = 1u32;
    for _ in 0..start / 2 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // a random sign and significand, an absolute value from 2⁻⁷ to 2⁻⁶
        let bits = 0x3c00 | (state >> 16) as u16 & 0x807f;
        file.write_all(&bits.to_le_bytes())?;
    }
    Ok(file.flush()?)
}

/// The peak is that of a tiny model, the packed maps, and one of them while it is converted. A copy
/// of the word embeddings in bf16 would add 102 MB.
#[test]
#[cfg(target_os = "linux")]
fn the_peak_of_memory_is_the_packed_layers() -> Result {
    let dir = tempfile::tempdir()?;
    write_checkpoint(dir.path())?;
    let peak = |dir: &Path, precision: &str| -> Result<u64> {
        let model = dir.to_str().unwrap();
        let arguments = ["embed", "--model", model, "--dtype", precision, "a text"];
        let (peak, code) = crate::cli::peak_memory(&arguments)?;
        assert_eq!(code, Some(0));
        Ok(peak)
    };
    for (precision, bytes) in [("int8", 1), ("bf16", 2), ("f32", 4)] {
        let (tiny, peak) = (peak(&golden(QWEN3), precision)?, peak(dir.path(), precision)?);
        let packed = (bytes * sizes::IN_MAPS) as u64;
        let expected = tiny + packed * 11 / 10 + (24 << 20);
        let mib = [tiny, packed, peak].map(|bytes| bytes >> 20);
        assert!(peak < expected, "{precision}: tiny, packed, peak: {mib:?} MiB");
    }
    Ok(())
}

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

fn embed(files: &ModelFiles, precision: Precision) -> Result<Vec<Vec<f32>>> {
    let options = LoadOptions::default().with_precision(precision);
    Ok(Embedder::from_files(files, &options)?.embed(&["I love AI", "a"])?.to_vec2()?)
}

/// The bytes of a safetensors file whose header has one more space.
fn with_longer_header(file: &Path) -> Result<Vec<u8>> {
    let mut bytes = fs::read(file)?;
    let len = u64::from_le_bytes(bytes[..8].try_into()?);
    bytes.splice(..8, (len + 1).to_le_bytes());
    bytes.insert(8 + len as usize, b' ');
    Ok(bytes)
}

#[test]
fn tensors_at_odd_offsets_give_the_same_vectors() -> Result {
    for model in [MINILM.into(), golden(QWEN3)] {
        let dir = tempfile::tempdir()?;
        copy_folder(&model, dir.path())?;
        let weights = dir.path().join("model.safetensors");
        let even = fs::read(&weights)?;
        fs::write(&weights, with_longer_header(&weights)?)?;
        let odd = ModelFiles::dir(dir.path())?;
        for precision in PRECISIONS {
            assert_eq!(embed(&odd, precision)?, embed(&ModelFiles::dir(&model)?, precision)?);
        }
        // In memory, an offset is odd in one of the two files.
        for content in [fs::read(&weights)?, even] {
            let files = ["config.json", "tokenizer.json", "modules.json", "1_Pooling/config.json"];
            let files = files.map(|file| (file, fs::read(dir.path().join(file)).unwrap()));
            let files = files.into_iter().chain([("model.safetensors", content)]);
            let files = ModelFiles::memory("in memory", files);
            assert_eq!(embed(&files, Precision::F32)?, embed(&odd, Precision::F32)?);
        }
    }
    Ok(())
}

#[test]
fn a_model_keeps_the_word_embeddings_of_a_file_that_was_replaced_or_deleted() -> Result {
    let dir = tempfile::tempdir()?;
    copy_folder(Path::new(MINILM), dir.path())?;
    let embedder = Embedder::from_dir(dir.path(), &LoadOptions::default())?;
    let embed = |text: &str| -> Result<Vec<Vec<f32>>> { Ok(embedder.embed(&[text])?.to_vec2()?) };
    let expected = Embedder::from_dir(MINILM, &LoadOptions::default())?;
    let expected =
        |text: &str| -> Result<Vec<Vec<f32>>> { Ok(expected.embed(&[text])?.to_vec2()?) };

    let (weights, other) = (dir.path().join("model.safetensors"), dir.path().join("other"));
    fs::write(&other, vec![0; fs::metadata(&weights)?.len() as usize])?;
    fs::rename(&other, &weights)?;
    assert_eq!(embed("I love AI")?, expected("I love AI")?);
    fs::remove_file(&weights)?;
    assert_eq!(embed("a stitch in time")?, expected("a stitch in time")?);
    Ok(())
}
