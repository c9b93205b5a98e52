//! Packed weights on disk: results have the same bits as without them, and damaged files are
//! replaced.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use candle_core::{Device::Cpu, Tensor};
use encoder::{
    Embedder, EncoderForSequenceClassification, EncoderModel, Inspection, LoadOptions, ModelFiles,
    PackedCache, Precision,
};
use mha::AttentionMask;

use crate::{
    cli::{ENVIRONMENT, stderr, stdout},
    support::{MINILM, golden},
};

type Result<T = ()> = anyhow::Result<T>;

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];

/// A cache for models of all sizes in a temporary folder, and the cache's warnings.
struct Cache {
    dir: tempfile::TempDir,
    cache: PackedCache,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Cache {
    fn new() -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
        let record = warnings.clone();
        let cache = PackedCache::new(dir.path())
            .with_min_bytes(0)
            .with_warnings(move |warning| record.lock().unwrap().push(warning.to_string()));
        Ok(Self { dir, cache, warnings })
    }

    /// The options to load a model with this cache.
    fn options(&self) -> LoadOptions {
        LoadOptions::default().with_cache(self.cache.clone())
    }

    /// The only file of the cache.
    fn file(&self) -> Result<PathBuf> {
        let files = self.cache.files()?;
        assert_eq!(files.len(), 1, "{files:?}");
        Ok(files[0].path.clone())
    }

    fn embed(&self) -> Result<Vec<Vec<f32>>> {
        embed(&self.options())
    }

    /// The warnings since the last call.
    fn warnings(&self) -> Vec<String> {
        std::mem::take(&mut *self.warnings.lock().unwrap())
    }
}

fn embed(options: &LoadOptions) -> Result<Vec<Vec<f32>>> {
    Ok(Embedder::from_dir(MINILM, options)?.embed(&["I love AI", "a"])?.to_vec2()?)
}

#[test]
fn packed_weights_on_disk_give_the_same_bits_in_every_precision() -> Result {
    let cache = Cache::new()?;
    for precision in PRECISIONS {
        let plain = embed(&LoadOptions::default().with_precision(precision))?;
        for _ in 0..2 {
            let options = cache.options().with_precision(precision);
            assert_eq!(embed(&options)?, plain, "{precision:?}");
        }
    }
    assert_eq!(cache.cache.files()?.len(), 3);
    assert!(cache.warnings().is_empty());
    Ok(())
}

#[test]
fn packed_weights_on_disk_give_the_same_bits_for_every_architecture() -> Result {
    let ids = Tensor::new(&[[2u32, 7, 5, 9, 3], [2, 8, 3, 4, 6]], &Cpu)?;
    let run = |folder: &Path, options: &LoadOptions| -> Result<Vec<f32>> {
        let (model, _) = EncoderModel::from_dir(folder, options)?;
        let output = model.forward(&ids, None, &AttentionMask::none())?;
        Ok(output.last_hidden_state.flatten_all()?.to_vec1()?)
    };
    let mut models = 0;
    for folder in fs::read_dir(golden("architectures"))? {
        let folder = folder?.path().join("encoder");
        if !folder.join("config.json").is_file() {
            continue;
        }
        models += 1;
        let cache = Cache::new()?;
        for precision in PRECISIONS {
            let plain = run(&folder, &LoadOptions::default().with_precision(precision))?;
            for _ in 0..2 {
                let options = cache.options().with_precision(precision);
                assert_eq!(run(&folder, &options)?, plain, "{folder:?}");
            }
        }
        assert!(cache.warnings().is_empty());
    }
    assert!(models >= 20, "{models} models");
    Ok(())
}

#[test]
fn a_file_is_written_once_and_extended_by_the_weights_of_a_head() -> Result {
    let (cache, folder) = (Cache::new()?, golden("heads/sequence"));
    let load = || EncoderModel::from_dir(&folder, &cache.options());
    load()?;
    let written = fs::read(cache.file()?)?;
    let time = fs::metadata(cache.file()?)?.modified()?;
    load()?;
    assert_eq!(fs::metadata(cache.file()?)?.modified()?, time);

    let logits = |options: &LoadOptions| -> Result<Vec<Vec<f32>>> {
        let (model, report) = EncoderForSequenceClassification::from_dir(&folder, options)?;
        assert!(report.loaded.iter().any(|name| name == "classifier.weight"));
        let ids = Tensor::new(&[[2u32, 7, 5]], &Cpu)?;
        Ok(model.forward(&ids, None, &AttentionMask::none())?.to_vec2()?)
    };
    let plain = logits(&LoadOptions::default())?;
    assert_eq!(logits(&cache.options())?, plain);
    assert!(fs::read(cache.file()?)?.len() > written.len());
    assert_eq!(logits(&cache.options())?, plain);
    Ok(())
}

#[test]
fn damaged_truncated_and_foreign_files_are_reported_and_replaced() -> Result {
    let cache = Cache::new()?;
    let expected = cache.embed()?;
    let path = cache.file()?;
    let valid = fs::read(&path)?;
    let flip = |at: usize| {
        let mut bytes = valid.clone();
        bytes[at] ^= 1;
        bytes
    };
    const VERSION: &[u8] = br#""version":""#;
    let version = valid.windows(VERSION.len()).position(|bytes| bytes == VERSION).unwrap();
    let mut foreign = valid.clone();
    foreign[version + VERSION.len()] = b'0'; // the version is a number of one digit
    let checksum = "the file's checksum does not match its content";
    let cases = [
        (flip(valid.len() / 2), checksum),
        (flip(valid.len() - 1), checksum),
        (flip(0), "not a safetensors file"),
        (valid[..valid.len() - 100].to_vec(), "not a safetensors file"),
        (valid[..5].to_vec(), "not a safetensors file"),
        (vec![], ""), // the message is the operating system's
        (foreign, "written for other weights or another layout"),
        (fs::read(Path::new(MINILM).join("model.safetensors"))?, "no metadata of packed weights"),
    ];
    for (bytes, why) in cases {
        // Replace the file: a mapped file must not change.
        let other = cache.dir.path().join("other");
        fs::write(&other, &bytes)?;
        fs::rename(&other, &path)?;
        assert_eq!(cache.embed()?, expected);
        let warnings = cache.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].contains("are packed again") && warnings[0].contains(why),
            "{warnings:?}"
        );
        assert_eq!(fs::read(&path)?, valid);
    }
    Ok(())
}

#[test]
fn a_changed_checkpoint_or_config_has_a_file_of_its_own() -> Result {
    let (cache, model) = (Cache::new()?, tempfile::tempdir()?);
    let source = golden("architectures/mpnet/encoder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(source.join(file), model.path().join(file))?;
    }
    let load = || EncoderModel::from_dir(model.path(), &cache.options());
    load()?;
    assert_eq!(cache.cache.files()?.len(), 1);

    let weights = model.path().join("model.safetensors");
    let mut bytes = fs::read(&weights)?;
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes)?;
    load()?;
    assert_eq!(cache.cache.files()?.len(), 2);

    let config = model.path().join("config.json");
    fs::write(&config, fs::read_to_string(&config)? + "\n")?;
    load()?;
    assert_eq!(cache.cache.files()?.len(), 3);
    Ok(())
}

/// A thread of rayon that waits while it loads a model may run a task that loads another model.
#[test]
fn models_loaded_and_inspected_on_one_pool_do_not_see_each_other() -> Result {
    let plain = embed(&LoadOptions::default())?;
    let expected = Inspection::new(&ModelFiles::dir(MINILM)?).to_string();
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        let cache = Cache::new()?;
        let failed = Mutex::new(vec![]);
        pool.scope(|scope| {
            for i in 0..12 {
                let (cache, failed, plain, expected) = (&cache, &failed, &plain, &expected);
                scope.spawn(move |_| {
                    let is_same = match i % 3 {
                        0 => embed(&LoadOptions::default()).is_ok_and(|got| got == *plain),
                        1 => embed(&cache.options()).is_ok_and(|got| got == *plain),
                        _ => ModelFiles::dir(MINILM)
                            .is_ok_and(|files| Inspection::new(&files).to_string() == *expected),
                    };
                    if !is_same {
                        failed.lock().unwrap().push(i);
                    }
                });
            }
        });
        assert_eq!(failed.into_inner().unwrap(), [0; 0], "{threads} threads");
        assert_eq!(cache.cache.files()?.len(), 1);
    }
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_written_is_a_warning() -> Result {
    let file = tempfile::NamedTempFile::new()?;
    let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
    let record = warnings.clone();
    let cache = PackedCache::new(file.path().join("folder"))
        .with_warnings(move |warning| record.lock().unwrap().push(warning.to_string()));
    assert_eq!(embed(&LoadOptions::default().with_cache(cache))?, embed(&LoadOptions::default())?);
    let warnings = warnings.lock().unwrap();
    assert!(warnings.iter().any(|w| w.contains("cannot be written to")), "{warnings:?}");
    Ok(())
}

/// Runs `encodle` with a cache in `dir`.
fn encodle(dir: &Path, arguments: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("encodle");
    command.envs(ENVIRONMENT).env("ENCODLE_PACKED_CACHE", dir).args(arguments).assert()
}

#[test]
fn the_command_keeps_lists_and_removes_packed_weights() -> Result {
    let dir = tempfile::tempdir()?;
    let embed = |options: &[&str]| {
        let arguments = [&["embed", "--format", "jsonl", "a text"], options].concat();
        stdout(encodle(dir.path(), &arguments).success())
    };
    let plain = embed(&["--no-cache"]);
    let list = || stdout(encodle(dir.path(), &["cache"]).success());
    assert!(list().contains(": 0 files, 0.0 MB"), "{}", list());
    assert_eq!([embed(&[]), embed(&[])], [plain.clone(), plain.clone()]);
    assert!(list().contains(": 1 file,") && list().contains("all-MiniLM-L6-v2"), "{}", list());

    let files: serde_json::Value = serde_json::from_str(&stdout(
        encodle(dir.path(), &["cache", "--format", "json"]).success(),
    ))?;
    let path = files[0]["path"].as_str().unwrap();
    let mut bytes = fs::read(path)?;
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes)?;
    let warning = stderr(encodle(dir.path(), &["embed", "--format", "jsonl", "a text"]).success());
    assert!(warning.contains("the file's checksum does not match its content"), "{warning}");
    assert_eq!(embed(&[]), plain);

    let error = stderr(encodle(dir.path(), &["cache", "--remove", "other"]).failure());
    assert!(error.contains("other is not a file of the cache"), "{error}");
    // Other spellings of a path name the same file, which is removed once.
    let (folder, name) = path.rsplit_once('/').unwrap();
    let arguments = ["cache", "--remove", path, &format!("{folder}/./{name}"), name];
    assert_eq!(stdout(encodle(dir.path(), &arguments).success()).lines().count(), 1);
    assert!(list().contains(": 0 files"), "{}", list());
    embed(&["--dtype", "int8"]);
    assert!(
        stdout(encodle(dir.path(), &["cache", "--clear"]).success()).contains("1 file removed")
    );
    assert!(!dir.path().exists());

    // A folder with other files keeps them.
    fs::create_dir(dir.path())?;
    let other = dir.path().join("notes.safetensors");
    fs::write(&other, "mine")?;
    embed(&[]);
    assert!(list().contains(": 1 file,"), "{}", list());
    stdout(encodle(dir.path(), &["cache", "--clear"]).success());
    assert_eq!(fs::read_to_string(other)?, "mine");
    Ok(())
}
