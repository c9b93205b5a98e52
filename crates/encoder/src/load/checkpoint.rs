//! A safetensors file as a [`VarBuilder`] that keeps a record: modules ask in their own names,
//! and one that asks in vain goes on, so that a single pass finds all that is wrong.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{DType, Device, Shape, Tensor, safetensors::Load};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use safetensors::{Dtype, SafeTensors};

use super::{
    names::Naming,
    report::{LoadReport, Mismatched, Missing},
};
use crate::Result;

/// A safetensors file under load.
pub(crate) struct Checkpoint<'a> {
    tensors: &'a SafeTensors<'a>,
    path: String,
    naming: Naming,
    record: Arc<Mutex<LoadReport>>,
}

impl<'a> Checkpoint<'a> {
    /// # Errors
    /// [`crate::Error::TwoPrefixes`] if it holds two models; `path` is what errors call it.
    pub(crate) fn new(tensors: &'a SafeTensors<'a>, path: String) -> Result<Self> {
        Ok(Self {
            naming: Naming::detect(&tensors.names(), &path)?,
            record: Arc::default(),
            tensors,
            path,
        })
    }

    /// Whether it has the tensor that a module would ask for as `name`.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.tensor(&self.naming.spell(name).0).is_ok()
    }

    /// What modules ask; `dtype` is what they get.
    pub(crate) fn var_builder(&self, dtype: DType, device: &Device) -> VarBuilder<'a> {
        let backend =
            Recording { tensors: self.tensors, naming: self.naming, record: self.record.clone() };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }

    /// What was asked for so far, and what of the file nobody asked for.
    pub(crate) fn report(&self) -> LoadReport {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let mut report = record.clone();
        report.path = self.path.clone();
        report.prefix = self.naming.prefix.to_string();

        let mismatched = report.mismatched.iter().map(|m| &m.tensor);
        let asked: BTreeSet<&String> = report.loaded.iter().chain(mismatched).collect();
        let names = self.tensors.names().into_iter().map(String::from);
        let mut rest: Vec<String> = names.filter(|name| !asked.contains(name)).collect();
        rest.sort();
        (report.ignored, report.unexpected) =
            rest.into_iter().partition(|name| self.naming.ignores(name));
        for missing in &mut report.missing {
            missing.nearest = nearest(&missing.tensor, &report.unexpected);
        }
        report
    }
}

/// The name most like `name`, if any is alike.
fn nearest(name: &str, names: &[String]) -> Option<String> {
    let likeness = |other: &&String| strsim::normalized_levenshtein(name, other);
    let best = names.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > 0.8).then(|| best.clone())
}

struct Recording<'a> {
    tensors: &'a SafeTensors<'a>,
    naming: Naming,
    record: Arc<Mutex<LoadReport>>,
}

impl SimpleBackend for Recording<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let (tensor, keys) = self.naming.spell(name);
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        // What stands in for a tensor that is not there has a shape, but takes no memory.
        let stand_in = || Tensor::zeros((), dtype, device)?.broadcast_as(shape.clone());
        let (expected, why) = (shape.dims().to_vec(), sizes(keys, shape.dims()));
        let Ok(view) = self.tensors.tensor(&tensor) else {
            let nearest = None;
            record.missing.push(Missing { tensor, expected, why, nearest });
            return stand_in();
        };
        let readable = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64].contains(&view.dtype());
        let file_dtype = format!("{:?}", view.dtype()).to_lowercase();
        if view.shape() != shape.dims() || !readable {
            let (got, dtype) = (view.shape().to_vec(), file_dtype);
            record.mismatched.push(Mismatched { tensor, expected, why, got, dtype });
            return stand_in();
        }
        if !record.dtypes.contains(&file_dtype) {
            record.dtypes.push(file_dtype);
        }
        record.parameters += shape.elem_count();
        record.loaded.push(tensor);
        view.load(device)?.to_dtype(dtype)
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        match self.tensors.tensor(&self.naming.spell(name).0) {
            Ok(view) => self.get(view.shape().into(), name, Init::Const(0.), dtype, device),
            Err(_) => self.get(0.into(), name, Init::Const(0.), dtype, device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.tensor(&self.naming.spell(name).0).is_ok()
    }
}

/// ` (vocab_size = 30522, hidden_size = 768)`, each key once; a bias has only the first.
fn sizes(keys: &[&str], dims: &[usize]) -> String {
    let mut sizes: Vec<String> = vec![];
    for (key, dim) in keys.iter().zip(dims) {
        let size = format!("{key} = {dim}");
        if !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    match sizes.is_empty() {
        true => String::new(),
        false => format!(" ({})", sizes.join(", ")),
    }
}
