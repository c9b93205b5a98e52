//! Texts to attention weights.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use encoder::{AttentionKind, TextAttention};
use numpy::{IntoPyArray, PyArray4, PyReadonlyArray4, ndarray::Array4};
use pyo3::{exceptions::PyValueError, prelude::*};

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
        let from_files = encoder::AttentionReader::from_files;
        let (reader, pool) = model::load(py, model, precision, threads, from_files)?;
        Ok(Self { reader, pool })
    }

    fn attentions<'py>(
        &self,
        py: Python<'py>,
        text: String,
        second: Option<String>,
    ) -> PyResult<Vec<Attention<'py>>> {
        let reader = self.reader.clone();
        let attentions = self.pool.run(py, None, move |watch| {
            let all = watch.compute(|| reader.read(&text, second.as_deref())).map_err(error)?;
            let all = all.map_err(error)?.into_iter();
            let arrays = all.map(|attention| {
                let shape = attention.weights.dims4()?;
                let values = attention.weights.flatten_all()?.to_vec1::<f32>()?;
                let weights = Array4::from_shape_vec(shape, values).expect("L · H · T · S weights");
                Ok((attention, weights))
            });
            arrays.collect::<candle_core::Result<Vec<_>>>().map_err(error)
        })?;
        let attentions = attentions.into_iter().map(|(attention, weights)| {
            let TextAttention { kind, queries, keys, .. } = attention;
            let truncated = match kind {
                AttentionKind::Cross => attention.queries_truncated + attention.keys_truncated,
                _ => attention.queries_truncated,
            };
            (kind.to_string(), queries, keys, weights.into_pyarray(py), truncated)
        });
        Ok(attentions.collect())
    }
}

/// The picture of attention weights as SVG, or as an HTML page.
#[pyfunction]
#[expect(clippy::too_many_arguments)]
pub fn attention_picture(
    py: Python<'_>,
    queries: Vec<String>,
    keys: Vec<String>,
    weights: PyReadonlyArray4<'_, f32>,
    title: String,
    layer: Option<usize>,
    head: &str,
    html: bool,
) -> PyResult<String> {
    let weights = weights.as_array();
    let shape = weights.dim();
    if (shape.2, shape.3) != (queries.len(), keys.len()) {
        return Err(PyValueError::new_err(format!(
            "weights have the shape {shape:?}: expected (layers, heads, {}, {}), with a row per \
             query token and a column per key token",
            queries.len(),
            keys.len()
        )));
    }
    let head = head.parse().map_err(|expected| {
        PyValueError::new_err(format!("head {head:?} is unknown: {expected}"))
    })?;
    let values: Vec<f32> = weights.iter().copied().collect();
    py.detach(|| {
        let weights = Tensor::from_vec(values, shape, &Device::Cpu).map_err(error)?;
        // The picture does not depend on the kind.
        let kind = AttentionKind::Encoder;
        let attention =
            TextAttention { kind, queries, keys, weights, queries_truncated: 0, keys_truncated: 0 };
        let chosen = picture::choose(&attention, layer, head).map_err(error)?;
        let svg = picture::document(&title, &attention, &chosen).map_err(error)?;
        Ok(if html { picture::html_page(&title, &svg) } else { svg })
    })
}
