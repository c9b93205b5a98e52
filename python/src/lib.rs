//! The native part of the Python package `encodle`. The classes of the package wrap the classes of
//! this module, and set the defaults of arguments.
#![deny(unsafe_code)] // with one exception: the C interface of Arrow

mod attention;
mod corpora;
mod cross_encoder;
mod embedder;
mod embedding;
mod errors;
mod model;
mod multi_vector_embedder;
mod pool;
mod sparse_embedder;
mod task;
mod texts;

#[pyo3::pymodule]
mod _encodle {
    use pyo3::prelude::*;

    /// The crate `numpy` imports NumPy's C API with the first array, and panics if it cannot. An
    /// import is not possible while the interpreter shuts down, when `__del__` of an object may
    /// call a model.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        numpy::PyArray1::<f32>::zeros(module.py(), 0, false);
        Ok(())
    }

    #[pymodule_export]
    use crate::{
        attention::{AttentionReader, attention_picture},
        corpora::embed_file,
        cross_encoder::CrossEncoder,
        embedder::Embedder,
        errors::EncodleError,
        model::{embedding_kind, is_missing_offline},
        multi_vector_embedder::MultiVectorEmbedder,
        sparse_embedder::SparseEmbedder,
        task::Task,
    };

    #[pymodule_export]
    #[expect(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
