//! Opens models, and converts arguments from Python that select a value by name, such as
//! `precision`.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
};

use encoder::{Choice, EmbeddingKind, Hub, LoadOptions, ModelFiles, PackedCache};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    errors::{error, log_warning},
    pool::Pool,
};

/// A model: a folder, a weights file, or `org/name[@revision]` on the hub; alone, or with settings
/// of the hub that replace those of the environment.
#[derive(FromPyObject)]
pub enum Source {
    Model(String),
    /// The model, the cache, the token (`""` for none), and whether to use only the cache.
    WithHub(String, Option<PathBuf>, Option<String>, bool),
}

impl From<String> for Source {
    fn from(model: String) -> Self {
        Self::Model(model)
    }
}

impl Source {
    fn hub(&self) -> encoder::Result<Hub> {
        let mut hub = hub()?;
        if let Self::WithHub(_, cache, token, offline) = self {
            hub = match cache {
                Some(cache) => hub.with_cache(cache),
                None => hub,
            };
            hub = match token.as_deref() {
                Some("") => hub.without_token(),
                Some(token) => hub.with_token(token),
                None => hub,
            };
            if *offline {
                hub = hub.offline(true);
            }
        }
        Ok(hub)
    }
}

/// The files of a model.
pub fn open(source: &Source) -> PyResult<ModelFiles> {
    let (Source::Model(model) | Source::WithHub(model, ..)) = source;
    let path = Path::new(model);
    let files = if path.is_dir() {
        ModelFiles::dir(path)
    } else if path.is_file() {
        ModelFiles::file(path)
    } else {
        source.hub().and_then(|hub| hub.model(model))
    };
    files.map_err(error)
}

/// The hub that the environment variables describe. As in sentence-transformers,
/// `SENTENCE_TRANSFORMERS_HOME` is the folder of its cache.
fn hub() -> encoder::Result<Hub> {
    let hub = Hub::from_env()?;
    let cache = env::var_os("SENTENCE_TRANSFORMERS_HOME").filter(|cache| !cache.is_empty());
    Ok(match cache {
        Some(cache) => hub.with_cache(cache),
        None => hub,
    })
}

/// Whether a model of the hub cannot be opened because of the offline mode: the cache lacks it.
#[pyfunction]
pub fn is_missing_offline(source: Source) -> PyResult<bool> {
    let (Source::Model(model) | Source::WithHub(model, ..)) = &source;
    let hub = source.hub().map_err(error)?;
    if !hub.is_offline() {
        return Ok(false);
    }
    let config = hub.model(model).and_then(|files| files.need("config.json", "a model").map(drop));
    Ok(matches!(config, Err(encoder::Error::Hub(encoder::HubError::Offline { .. }))))
}

/// The name of the [`EmbeddingKind`] that the files of a model name.
#[pyfunction]
pub fn embedding_kind(source: Source) -> PyResult<&'static str> {
    Ok(EmbeddingKind::from_files(&open(&source)?).map_err(error)?.name())
}

/// Loads a pipeline on a pool.
pub fn load<M: Send + 'static>(
    py: Python<'_>,
    source: impl Into<Source>,
    precision: &str,
    threads: Option<usize>,
    from_files: fn(&ModelFiles, &LoadOptions) -> encoder::Result<M>,
) -> PyResult<(Arc<M>, Pool)> {
    let (source, options, pool) = (source.into(), options(precision)?, Pool::new(py, threads)?);
    let loaded = pool.run(py, None, move |watch| {
        let part = || from_files(&open(&source)?, &options).map_err(error);
        watch.compute(part).map_err(error)?
    })?;
    Ok((Arc::new(loaded), pool))
}

/// The value of an argument whose name is `got`.
pub fn named<T: Choice>(argument: &str, got: &str) -> PyResult<T> {
    T::from_name(got).map_err(|_| {
        let names: Vec<String> = T::ALL.iter().map(|value| format!("{:?}", value.name())).collect();
        let expected = names.join(", ");
        PyValueError::new_err(format!("{argument} {got:?} is unknown: expected one of {expected}"))
    })
}

/// How to load a model whose argument `precision` is `precision`: on the CPU, with the packed
/// weights in the folder of [`PackedCache::from_env`], if there is one.
pub fn options(precision: &str) -> PyResult<LoadOptions> {
    let cache = PackedCache::from_env().map(|cache| cache.with_warnings(log_warning));
    let precision = named("precision", precision)?;
    Ok(LoadOptions::default().with_precision(precision).with_cache(cache))
}
