//! The tasks of the library, such as token classification: one class for all.

use std::sync::Arc;

use encoder::{Params, Pipeline, TaskVisitor, for_each_task};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};
use pythonize::{depythonize, pythonize};
use serde_json::{Map, Value};

use crate::{errors::error, model::load, pool::Pool, texts::Texts};

/// The number of texts that are tokenized and computed together.
const GROUP: usize = 64;

/// A model for a task.
#[pyclass(frozen, module = "encodle._encodle")]
pub struct Task {
    pipeline: Box<dyn AnyPipeline>,
    pool: Pool,
}

/// A [`Pipeline`] without its type.
trait AnyPipeline: Send + Sync {
    fn labels(&self) -> &[String];

    fn run(
        &self,
        py: Python<'_>,
        pool: &Pool,
        texts: Texts,
        params: Map<String, Value>,
    ) -> PyResult<Vec<Py<PyAny>>>;
}

impl<P: Pipeline> AnyPipeline for Arc<P> {
    fn labels(&self) -> &[String] {
        self.label_names()
    }

    fn run(
        &self,
        py: Python<'_>,
        pool: &Pool,
        texts: Texts,
        params: Map<String, Value>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let params = P::Params::from_values(params);
        let params = params.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let model = self.clone();
        let results = pool.run(py, None, move |watch| {
            let rows = texts
                .rows()
                .into_iter()
                .enumerate()
                .map(|(i, row)| row.map_err(|reason| error(format!("text {i}: {reason}"))));
            let rows = rows.collect::<PyResult<Vec<&str>>>()?;
            let mut results = Vec::with_capacity(rows.len());
            for group in rows.chunks(GROUP) {
                let tokenize = || model.tokenize_all(group, &params).into_iter().collect();
                let tokenized: Vec<_> = watch
                    .compute(tokenize)
                    .and_then(|all: encoder::Result<_>| all)
                    .map_err(error)?;
                let compute =
                    |batch: &[&_]| watch.compute(|| model.compute(batch, &params)).flatten();
                let computed = model.run_tokenized(group, tokenized, &params, compute);
                results.extend(computed.map_err(error)?);
            }
            Ok(results)
        })?;
        let results = results.iter().map(|result| Ok(pythonize(py, result)?.unbind()));
        results.collect()
    }
}

/// Loads the model of the task of this name.
struct Load<'a, 'py> {
    py: Python<'py>,
    task: &'a str,
    model: &'a str,
    precision: &'a str,
    threads: Option<usize>,
    loaded: Option<PyResult<Task>>,
}

impl TaskVisitor for Load<'_, '_> {
    fn visit<P: Pipeline>(&mut self) {
        if P::TASK == self.task {
            let loaded =
                load(self.py, self.model.to_string(), self.precision, self.threads, P::load);
            self.loaded =
                Some(loaded.map(|(model, pool)| Task { pipeline: Box::new(model), pool }));
        }
    }
}

#[pymethods]
impl Task {
    #[new]
    fn new(
        py: Python<'_>,
        task: &str,
        model: &str,
        precision: &str,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let mut load = Load { py, task, model, precision, threads, loaded: None };
        for_each_task(&mut load);
        let unknown = || Err(PyValueError::new_err(format!("task {task:?} is unknown")));
        load.loaded.unwrap_or_else(unknown)
    }

    #[getter]
    fn labels(&self) -> Vec<String> {
        self.pipeline.labels().to_vec()
    }

    /// The result of each text, as a dict.
    fn run(
        &self,
        py: Python<'_>,
        texts: &Bound<'_, PyAny>,
        params: &Bound<'_, PyDict>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        self.pipeline.run(py, &self.pool, Texts::from_python(texts)?, depythonize(params)?)
    }
}
