//! Texts to attention weights.

use std::sync::Arc;

use candle_core::Device;
use numpy::{IntoPyArray, PyArray4, ndarray::Array4};
use pyo3::prelude::*;

use crate::{errors::error, model, pool::Pool};

/// The kind of attention, the query tokens, the key tokens, the weights `(L, H, T, S)`, and the
/// number of tokens that truncation removed.
type Attention<'py> = (String, Vec<String>, Vec<String>, Bound<'py, PyArray4<f32>>, usize);

#[pyclass(frozen, module = "encodle._encodle")]
pub struct AttentionReader {
    reader: Arc<encoder::AttentionReader>,
    pool: Pool,
}

#[pymethods]
impl AttentionReader {
    #[new]
    fn new(
        py: Python<'_>,
        model: String,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let (precision, pool) = (model::precision(precision)?, Pool::new(threads)?);
        let reader = pool.run(py, None, move |_| {
            let files = model::open(&model)?;
            encoder::AttentionReader::from_files(&files, precision, &Device::Cpu).map_err(error)
        })?;
        Ok(Self { reader: Arc::new(reader), pool })
    }

    fn attentions<'py>(
        &self,
        py: Python<'py>,
        text: String,
        second: Option<String>,
    ) -> PyResult<Vec<Attention<'py>>> {
        let reader = self.reader.clone();
        let attentions = self.pool.run(py, None, move |_| {
            let all = reader.read(&text, second.as_deref()).map_err(error)?.into_iter();
            let arrays = all.map(|attention| {
                let shape = attention.weights.dims4()?;
                let values = attention.weights.flatten_all()?.to_vec1::<f32>()?;
                let weights = Array4::from_shape_vec(shape, values).expect("L · H · T · S weights");
                Ok((attention, weights))
            });
            arrays.collect::<candle_core::Result<Vec<_>>>().map_err(error)
        })?;
        let attentions = attentions.into_iter().map(|(attention, weights)| {
            let encoder::TextAttention { kind, queries, keys, truncated, .. } = attention;
            (kind.to_string(), queries, keys, weights.into_pyarray(py), truncated)
        });
        Ok(attentions.collect())
    }
}
