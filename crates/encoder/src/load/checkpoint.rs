//! A checkpoint's weights as a [`WeightSource`] that records each request. Modules request tensors
//! by this crate's names. A missing or mismatched tensor is recorded and not loaded, so that a
//! single pass finds every problem.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{DType, Device, Shape, Tensor, safetensors::Load};
use candle_nn::Init;
use ops::{
    PackedArray, ReadTensor, SharedBytes, SharedTensor, WeightSource, Weights, f32_from_bf16,
    f32_from_f16,
};
use safetensors::{Dtype, tensor::TensorView};

use super::{
    names::{CheckpointTensor, Naming},
    packed_cache::OpenCache,
    report::{LoadReport, Mismatched, Missing},
    tensor_info::TensorInfo,
    weights::WeightFiles,
};
use crate::{Error, Result};

/// A checkpoint while its models are being loaded.
pub(crate) struct Checkpoint {
    weights: Arc<WeightFiles>,
    with_data: bool,
    cache: Option<Arc<OpenCache>>,
    record: Record,
}

/// The report of the tensors requested so far, and the first error from reading a tensor.
type Record = Arc<Mutex<(LoadReport, Option<Error>)>>;

impl Checkpoint {
    /// `cache` has the packed weights of the checkpoint.
    pub(crate) fn new(weights: Arc<WeightFiles>, cache: Option<Arc<OpenCache>>) -> Self {
        Self { weights, with_data: true, cache, record: Record::default() }
    }

    /// A checkpoint of which only headers are read. No tensor of its models is loaded.
    pub(crate) fn without_data(weights: Arc<WeightFiles>) -> Self {
        Self { with_data: false, ..Self::new(weights, None) }
    }

    /// The tensors of one model of the checkpoint, converted to `dtype`.
    pub(crate) fn model(&self, naming: Naming, dtype: DType, device: &Device) -> Weights<'static> {
        Weights::new(Source {
            weights: self.weights.clone(),
            with_data: self.with_data,
            cache: self.cache.clone(),
            naming,
            record: self.record.clone(),
            dtype,
            device: device.clone(),
        })
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
            let has_matrix = report.loaded.contains(&scores) || report.tied.contains(&words);
            if report.loaded.contains(&transform) && !has_matrix && !is_wrong {
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

/// The tensors of one model.
struct Source {
    weights: Arc<WeightFiles>,
    with_data: bool,
    cache: Option<Arc<OpenCache>>,
    naming: Naming,
    record: Record,
    dtype: DType,
    device: Device,
}

/// A tensor of a checkpoint that fits a request.
struct Found<'a> {
    tensor: String,
    info: &'a TensorInfo,
    /// As in [`CheckpointTensor`].
    part: Option<(usize, usize)>,
}

impl Source {
    /// Looks up a tensor by its checkpoint name, or else by its alias. Returns the name found.
    fn find(&self, tensor: &str) -> Option<(String, &TensorInfo)> {
        let own = self.weights.info(tensor).map(|info| (tensor.to_string(), info));
        own.or_else(|| {
            let alias = self.naming.alias(tensor)?;
            let info = self.weights.info(&alias)?;
            Some((alias, info))
        })
    }

    /// Records the request of a tensor; `None` if the tensor is missing or mismatched.
    fn request(&self, name: &str, shape: &Shape) -> Option<Found<'_>> {
        let CheckpointTensor { tensor, part, keys } = self.naming.find(name);
        let record = &mut lock(&self.record).0;
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
            return None;
        };
        let readable = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F64].contains(&info.dtype);
        let dtype = format!("{:?}", info.dtype).to_lowercase();
        if info.shape != expected || !readable {
            let got = info.shape.clone();
            let mismatched = Mismatched { tensor, expected, sizes, got, dtype };
            if !record.mismatched.contains(&mismatched) {
                record.mismatched.push(mismatched);
            }
            return None;
        }
        let is_loaded = record.loaded.contains(&tensor);
        if !is_loaded || part.is_some() {
            record.parameters += shape.elem_count();
        }
        match (is_loaded, part) {
            (false, _) => record.loaded.push(tensor.clone()),
            (true, None) => record.tied.push(tensor.clone()),
            (true, Some(_)) => {} // another part of the same tensor
        }
        if !record.dtypes.contains(&dtype) {
            record.dtypes.push(dtype);
        }
        Some(Found { tensor, info, part })
    }

    /// [`Self::request`] of a tensor on the CPU that has a [`TensorInfo::raw_dtype`], with this
    /// dtype. Requests of other tensors are not recorded.
    fn request_raw(&self, name: &str, shape: &Shape) -> Option<(Found<'_>, DType)> {
        let (_, info) = self.find(&self.naming.find(name).tensor)?;
        let dtype = info.raw_dtype().filter(|_| self.with_data && self.device.is_cpu())?;
        Some((self.request(name, shape)?, dtype))
    }

    /// The result of reading a tensor; `None` for an error that [`Checkpoint::check`] returns.
    fn recorded<T>(&self, read: Result<Option<T>>) -> candle_core::Result<Option<T>> {
        match read {
            Ok(tensor) => Ok(tensor),
            Err(Error::Candle(error)) => Err(error),
            Err(error) => {
                lock(&self.record).1.get_or_insert(error);
                Ok(None)
            }
        }
    }

    /// Reads the values of a tensor.
    fn read(&self, Found { tensor, info, part }: Found, shape: Shape) -> Result<Tensor> {
        let (dtype, device) = (self.dtype, &self.device);
        if (info.dtype, dtype, device.is_cpu()) == (Dtype::F32, DType::F32, true)
            && info.strides.is_none()
        {
            let values = self.weights.f32_values(&tensor, info, part)?;
            return Ok(Tensor::from_vec(values, shape, device)?);
        }
        let data = self.weights.data(&tensor, info)?;
        let data = match part {
            None => &data[..],
            Some((index, parts)) => &data[index * data.len() / parts..][..data.len() / parts],
        };
        Ok(match (info.dtype, dtype, device) {
            (Dtype::F16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(f32_from_f16(data.as_chunks().0), shape, device)?
            }
            (Dtype::BF16, DType::F32, Device::Cpu) => {
                Tensor::from_vec(f32_from_bf16(data.as_chunks().0), shape, device)?
            }
            _ => TensorView::new(info.dtype, shape.dims().to_vec(), data)
                .map_err(candle_core::Error::wrap)?
                .load(device)?
                .to_dtype(dtype)?,
        })
    }
}

/// A tensor, or a part of one, of which parts are read.
struct Reader {
    weights: Arc<WeightFiles>,
    record: Record,
    tensor: String,
    /// The offset in the file.
    start: u64,
    dtype: DType,
}

impl ReadTensor for Reader {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn read(&self, start: usize, out: &mut [u8]) -> bool {
        match self.weights.read_at(&self.tensor, self.start + start as u64, out) {
            Ok(()) => true,
            Err(error) => {
                lock(&self.record).1.get_or_insert(error);
                false
            }
        }
    }
}

impl WeightSource for Source {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn contains(&self, name: &str) -> bool {
        self.find(&self.naming.find(name).tensor).is_some()
    }

    fn get(&self, name: &str, shape: Shape, _init: Init) -> candle_core::Result<Option<Tensor>> {
        let Some(found) = self.request(name, &shape).filter(|_| self.with_data) else {
            return Ok(None);
        };
        self.recorded(self.read(found, shape).map(Some))
    }

    fn rows(&self, name: &str, shape: Shape, ids: &[u32]) -> candle_core::Result<Option<Tensor>> {
        let Some(found) = self.request(name, &shape).filter(|_| self.with_data) else {
            return Ok(None);
        };
        // A row is a part of a part of the stored tensor.
        let (index, parts) = found.part.unwrap_or((0, 1));
        let mut of_row = shape.dims().to_vec();
        let rows = std::mem::replace(&mut of_row[0], 1);
        let read = ids.iter().map(|&id| {
            let part = Some((index * rows + id as usize, parts * rows));
            let Found { tensor, info, .. } = &found;
            self.read(Found { tensor: tensor.clone(), info, part }, of_row.clone().into())
        });
        let read = read.collect::<Result<Vec<_>>>();
        self.recorded(read.and_then(|rows| Ok(Some(Tensor::cat(&rows, 0)?))))
    }

    fn shared(&self, name: &str, shape: &Shape) -> candle_core::Result<Option<SharedTensor>> {
        let Some((Found { tensor, info, part }, dtype)) = self.request_raw(name, shape) else {
            return Ok(None);
        };
        let bytes = self.weights.shared(&tensor, info, part);
        self.recorded(bytes.map(|bytes| SharedTensor::new(bytes, dtype)))
    }

    fn reader(
        &self,
        name: &str,
        shape: &Shape,
    ) -> candle_core::Result<Option<Box<dyn ReadTensor>>> {
        let Some((Found { tensor, info, part }, dtype)) = self.request_raw(name, shape) else {
            return Ok(None);
        };
        let (weights, record) = (self.weights.clone(), self.record.clone());
        let (start, _len) = info.range_of(part);
        Ok(Some(Box::new(Reader { weights, record, tensor, start, dtype })))
    }

    fn check(&self, name: &str, shape: Shape) -> candle_core::Result<()> {
        self.request(name, &shape);
        Ok(())
    }

    fn stored(&self, name: &str) -> Option<SharedBytes> {
        self.cache.as_ref()?.stored(name)
    }

    fn keep(&self, name: String, array: Arc<dyn PackedArray>) {
        if let Some(cache) = &self.cache {
            cache.keep(name, array);
        }
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
