//! A checkpoint's weights as a [`VarBuilder`] that records each request. Modules request tensors by
//! this crate's names. A missing or mismatched tensor is recorded and replaced by a placeholder, so
//! that a single pass finds every problem.

use std::{
    borrow::Cow,
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Shape, Tensor, safetensors::Load};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use ops::{f32_from_bf16, f32_from_f16};
use safetensors::{Dtype, tensor::TensorView};

use super::{
    names::{CheckpointTensor, Naming},
    report::{LoadReport, Mismatched, Missing},
    tensor_info::TensorInfo,
    weights::Weights,
};
use crate::{Error, Result};

/// A checkpoint while its models are being loaded.
pub(crate) struct Checkpoint {
    weights: Arc<Weights>,
    with_data: bool,
    record: Record,
}

/// The report of the tensors requested so far, and the first error from reading a tensor.
type Record = Arc<Mutex<(LoadReport, Option<Error>)>>;

impl Checkpoint {
    pub(crate) fn new(weights: Arc<Weights>) -> Self {
        Self { weights, with_data: true, record: Record::default() }
    }

    /// A checkpoint of which only headers are read. Models get placeholder tensors of the right
    /// shape, which take no memory.
    pub(crate) fn without_data(weights: Arc<Weights>) -> Self {
        Self { with_data: false, ..Self::new(weights) }
    }

    /// The tensors of one model of the checkpoint, converted to `dtype`.
    pub(crate) fn model(
        &self,
        naming: Naming,
        dtype: DType,
        device: &Device,
    ) -> VarBuilder<'static> {
        let (weights, record) = (self.weights.clone(), self.record.clone());
        let backend = Backend { weights, with_data: self.with_data, naming, record };
        VarBuilder::from_backend(Box::new(backend), dtype, device.clone())
    }

    /// Returns the first error from reading a tensor, if any, and clears it.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.record).1.take().map_or(Ok(()), Err)
    }

    /// Reports the tensors requested so far, and the tensors that no module requested.
    pub(crate) fn report(&self, models: &[Naming]) -> LoadReport {
        let mut report = lock(&self.record).0.clone();
        report.path = self.weights.path().to_string();
        report.prefix = models.first().map(|naming| naming.prefix.clone()).unwrap_or_default();

        for naming in models {
            let [words, transform, scores] = naming.word_and_head_names();
            // The language model head requests its matrix twice: first to compare it with the word
            // embeddings, then to use it. The matrix is used only once, so it is not tied.
            report.tied.retain(|name| *name != scores);
            let is_wrong = report.missing.iter().any(|missing| missing.tensor == scores)
                || report.mismatched.iter().any(|mismatched| mismatched.tensor == scores);
            if report.loaded.contains(&transform) && !report.loaded.contains(&scores) && !is_wrong {
                report.tied.push(words); // the head's matrix is the word embeddings
            }
        }
        let mismatched = report.mismatched.iter().map(|m| &m.tensor);
        let requested: BTreeSet<&String> =
            report.loaded.iter().chain(&report.tied).chain(mismatched).collect();
        let names = self.weights.names().into_iter().map(String::from);
        let mut rest: Vec<String> = names.filter(|name| !requested.contains(name)).collect();
        rest.sort();
        (report.ignored, report.unexpected) =
            rest.into_iter().partition(|name| models.iter().any(|naming| naming.ignores(name)));
        for missing in &mut report.missing {
            missing.nearest = nearest(&missing.tensor, &report.unexpected);
        }
        report
    }
}

fn lock(record: &Record) -> MutexGuard<'_, (LoadReport, Option<Error>)> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name in `names` that is most similar to `name`, if the similarity exceeds 0.8.
fn nearest(name: &str, names: &[String]) -> Option<String> {
    let similarities =
        names.iter().map(|other| (strsim::normalized_levenshtein(name, other), other));
    let (similarity, best) = similarities.max_by(|(a, _), (b, _)| a.total_cmp(b))?;
    (similarity > 0.8).then(|| best.clone())
}

/// The tensors of one model, as a [`VarBuilder`] backend.
struct Backend {
    weights: Arc<Weights>,
    with_data: bool,
    naming: Naming,
    record: Record,
}

impl Backend {
    /// Looks up a tensor by its checkpoint name, or else by its alias. Returns the name found.
    fn find(&self, tensor: &str) -> Option<(String, &TensorInfo)> {
        let own = self.weights.info(tensor).map(|info| (tensor.to_string(), info));
        own.or_else(|| {
            let alias = self.naming.alias(tensor)?;
            let info = self.weights.info(&alias)?;
            Some((alias, info))
        })
    }
}

/// The data of a tensor.
enum Data<'a> {
    /// The values of the part that is requested.
    F32(Vec<f32>),
    /// The bytes of the whole tensor.
    Bytes(Cow<'a, [u8]>),
}

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _init: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let CheckpointTensor { tensor, part, keys } = self.naming.find(name);
        let mut guard = lock(&self.record);
        let (record, failure) = &mut *guard;
        // All elements share one zero, so that the placeholder takes no memory.
        let placeholder = || Tensor::zeros((), dtype, device)?.broadcast_as(shape.clone());
        let sizes = sizes_of_dims(keys, shape.dims());
        let mut expected = shape.dims().to_vec(); // of the stored tensor
        if let (Some((_, parts)), Some(first)) = (part, expected.first_mut()) {
            *first *= parts;
        }
        let Some((tensor, info)) = self.find(&tensor) else {
            let missing = Missing { tensor, expected, sizes, nearest: None };
            // Several modules may request the same tensor, or parts of it.
            if !record.missing.contains(&missing) {
                record.missing.push(missing);
            }
            return placeholder();
        };
        let readable = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64].contains(&info.dtype);
        let file_dtype = format!("{:?}", info.dtype).to_lowercase();
        if info.shape != expected || !readable {
            let (got, dtype) = (info.shape.clone(), file_dtype);
            let mismatched = Mismatched { tensor, expected, sizes, got, dtype };
            if !record.mismatched.contains(&mismatched) {
                record.mismatched.push(mismatched);
            }
            return placeholder();
        }
        let needs_data = self.with_data && !ops::skips_data();
        let is_f32 = matches!(
            (info.dtype, dtype, device, &info.strides),
            (Dtype::F32, DType::F32, Device::Cpu, None)
        );
        let read = || match is_f32 {
            true => self.weights.f32_values(&tensor, info, part).map(Data::F32),
            false => self.weights.data(&tensor, info).map(Data::Bytes),
        };
        let data = match needs_data.then(read).transpose() {
            Ok(data) => data,
            Err(error) => {
                failure.get_or_insert(error);
                None
            }
        };
        let is_loaded = record.loaded.contains(&tensor);
        if !is_loaded || part.is_some() {
            record.parameters += shape.elem_count();
        }
        match (is_loaded, part) {
            (false, _) => record.loaded.push(tensor),
            (true, None) => record.tied.push(tensor),
            (true, Some(_)) => {} // another part of the same tensor
        }
        if !record.dtypes.contains(&file_dtype) {
            record.dtypes.push(file_dtype);
        }
        let data = match data {
            None => return placeholder(),
            Some(Data::F32(values)) => return Tensor::from_vec(values, shape, device),
            Some(Data::Bytes(bytes)) => bytes,
        };
        let data = match part {
            None => &data[..],
            Some((index, parts)) => &data[index * data.len() / parts..][..data.len() / parts],
        };
        match (info.dtype, dtype, device) {
            (Dtype::F16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(f32_from_f16(data.as_chunks().0), shape, device)
            }
            (Dtype::BF16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(f32_from_bf16(data.as_chunks().0), shape, device)
            }
            _ => TensorView::new(info.dtype, shape.dims().to_vec(), data)
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
        let shape = match self.find(&self.naming.find(name).tensor) {
            Some((_, info)) => info.shape.as_slice().into(),
            None => 0.into(),
        };
        self.get(shape, name, Init::Const(0.), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.find(&self.naming.find(name).tensor).is_some()
    }
}

/// The config keys or other sizes that determine a shape, with their values and without duplicates,
/// such as `vocab_size = 30522`. For a bias, only the first key applies.
fn sizes_of_dims(keys: &[&str], dims: &[usize]) -> Vec<String> {
    let mut sizes: Vec<String> = vec![];
    for (key, dim) in keys.iter().zip(dims) {
        let size = format!("{key} = {dim}");
        if !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    sizes
}

/// Whether a tensor is a placeholder of a tensor that is not loaded. All elements of a placeholder
/// share one zero: a placeholder has a stride of 0 and takes no memory.
pub(crate) fn is_placeholder(tensor: &Tensor) -> bool {
    tensor.stride().contains(&0)
}
