//! A checkpoint's weights as a [`VarBuilder`] that keeps a record: modules ask in their own names,
//! and one that asks in vain goes on, so that a single pass finds all that is wrong.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Shape, Tensor, safetensors::Load};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use half::{bf16, f16, slice::HalfFloatSliceExt};
use rayon::prelude::*;
use safetensors::{Dtype, tensor::TensorView};

use super::{
    names::Naming,
    report::{LoadReport, Mismatched, Missing},
    tensor_info::TensorInfo,
    weights::Weights,
};
use crate::{Error, Result};

/// The models of a checkpoint under load.
pub(crate) struct Checkpoint {
    weights: Arc<Weights>,
    with_data: bool,
    record: Record,
}

/// What models asked for, and the first tensor that could not be read.
type Record = Arc<Mutex<(LoadReport, Option<Error>)>>;

impl Checkpoint {
    pub(crate) fn new(weights: Arc<Weights>) -> Self {
        Self { weights, with_data: true, record: Record::default() }
    }

    /// Of headers alone: what models get is of the right shape, and takes no memory.
    pub(crate) fn without_data(weights: Arc<Weights>) -> Self {
        Self { with_data: false, ..Self::new(weights) }
    }

    /// One of its models: what modules ask; `dtype` is what they get.
    pub(crate) fn model(
        &self,
        naming: Naming,
        dtype: DType,
        device: &Device,
    ) -> VarBuilder<'static> {
        let (weights, record) = (self.weights.clone(), self.record.clone());
        let backend = Model { weights, with_data: self.with_data, naming, record };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }

    /// # Errors
    /// Why a tensor that is there could not be read.
    pub(crate) fn check(&self) -> Result<()> {
        locked(&self.record).1.take().map_or(Ok(()), Err)
    }

    /// What was asked for so far, and what of the file nobody asked for.
    pub(crate) fn report(&self, models: &[Naming]) -> LoadReport {
        let mut report = locked(&self.record).0.clone();
        report.path = self.weights.path().to_string();
        report.prefix = models.first().map(|naming| naming.prefix).unwrap_or_default().to_string();

        for naming in models {
            let [words, transform, scores] = naming.words_and_scores();
            if report.loaded.contains(&transform) && !report.loaded.contains(&scores) {
                report.tied.push(words); // whose numbers are the scores' matrix too
            }
        }
        let mismatched = report.mismatched.iter().map(|m| &m.tensor);
        let asked: BTreeSet<&String> =
            report.loaded.iter().chain(&report.tied).chain(mismatched).collect();
        let names = self.weights.names().into_iter().map(String::from);
        let mut rest: Vec<String> = names.filter(|name| !asked.contains(name)).collect();
        rest.sort();
        (report.ignored, report.unexpected) =
            rest.into_iter().partition(|name| models.iter().any(|naming| naming.ignores(name)));
        for missing in &mut report.missing {
            missing.nearest = nearest(&missing.tensor, &report.unexpected);
        }
        report
    }
}

fn locked(record: &Record) -> MutexGuard<'_, (LoadReport, Option<Error>)> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name most like `name`, if any is alike.
fn nearest(name: &str, names: &[String]) -> Option<String> {
    let likeness = |other: &&String| strsim::normalized_levenshtein(name, other);
    let best = names.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) > 0.8).then(|| best.clone())
}

struct Model {
    weights: Arc<Weights>,
    with_data: bool,
    naming: Naming,
    record: Record,
}

impl Model {
    /// A tensor under the name it should have, or else under another that it may have.
    fn find(&self, spelled: &str) -> Option<(String, &TensorInfo)> {
        let own = self.weights.info(spelled).map(|info| (spelled.to_string(), info));
        own.or_else(|| {
            let alias = self.naming.alias(spelled)?;
            let info = self.weights.info(&alias)?;
            Some((alias, info))
        })
    }
}

impl SimpleBackend for Model {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let (tensor, keys) = self.naming.spell(name);
        let mut locked = locked(&self.record);
        let (record, failure) = &mut *locked;
        // What stands in for a tensor that is not there has a shape, but takes no memory.
        let stand_in = || Tensor::zeros((), dtype, device)?.broadcast_as(shape.clone());
        let (expected, why) = (shape.dims().to_vec(), sizes(keys, shape.dims()));
        let Some((tensor, info)) = self.find(&tensor) else {
            let nearest = None;
            record.missing.push(Missing { tensor, expected, why, nearest });
            return stand_in();
        };
        let readable = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64].contains(&info.dtype);
        let file_dtype = format!("{:?}", info.dtype).to_lowercase();
        if info.shape != shape.dims() || !readable {
            let (got, dtype) = (info.shape.clone(), file_dtype);
            record.mismatched.push(Mismatched { tensor, expected, why, got, dtype });
            return stand_in();
        }
        let data = match self.with_data.then(|| self.weights.data(&tensor, info)).transpose() {
            Ok(data) => data,
            Err(error) => {
                failure.get_or_insert(error);
                None
            }
        };
        if record.loaded.contains(&tensor) {
            record.tied.push(tensor);
        } else {
            record.parameters += shape.elem_count();
            record.loaded.push(tensor);
        }
        if !record.dtypes.contains(&file_dtype) {
            record.dtypes.push(file_dtype);
        }
        let Some(data) = data else { return stand_in() };
        match (info.dtype, dtype, device) {
            (Dtype::F16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(widened::<f16>(&data), shape, device)
            }
            (Dtype::BF16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(widened::<bf16>(&data), shape, device)
            }
            _ => TensorView::new(info.dtype, info.shape.clone(), &data)
                .map_err(candle_core::Error::wrap)?
                .load(device)?
                .to_dtype(dtype),
        }
    }

    fn get_unchecked(
        &self,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let shape = match self.find(&self.naming.spell(name).0) {
            Some((_, info)) => info.shape.as_slice().into(),
            None => 0.into(),
        };
        self.get(shape, name, Init::Const(0.), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.find(&self.naming.spell(name).0).is_some()
    }
}

/// Numbers of 16 bits as f32, on all threads and without a copy between: most of a start is this.
fn widened<T: Copy + Default>(bytes: &[u8]) -> Vec<f32>
where
    [T]: HalfFloatSliceExt,
{
    const AT_A_TIME: usize = 4096;
    let mut wide = mha::ops::zeros::<f32>(bytes.len() / 2);
    let parts = wide.par_chunks_mut(AT_A_TIME).zip(bytes.par_chunks(2 * AT_A_TIME));
    parts.for_each(|(wide, bytes)| {
        let mut numbers = [T::default(); AT_A_TIME]; // the file's may not be aligned
        let bits = numbers.reinterpret_cast_mut().iter_mut();
        bits.zip(bytes.as_chunks().0).for_each(|(to, &from)| *to = u16::from_le_bytes(from));
        numbers[..wide.len()].convert_to_f32_slice(wide);
    });
    wide
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
