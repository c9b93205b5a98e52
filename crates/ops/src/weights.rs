//! The source of the weights that a module is built from.

use std::{
    fmt::Debug,
    io::{self, Write},
    sync::Arc,
};

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, VarBuilder};
use mha_kernels::SharedBytes;

use crate::{Error, NotLoaded, Result, widen::write_f32};

/// The tensors that a module is built from: those of a [`VarBuilder`], or of a [`WeightSource`].
///
/// A source may have names and shapes only. A module built from such tensors knows their names; if
/// it is computed, the result is [`Error::NotLoaded`].
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu};
/// use candle_nn::VarBuilder;
/// use ops::Weights;
///
/// let weights = Weights::from(VarBuilder::zeros(DType::F32, &Cpu));
/// assert_eq!(weights.pp("layer").get((2, 3), "weight")??.dims(), [2, 3]);
/// # Ok::<(), ops::Error>(())
/// ```
#[derive(Clone)]
pub struct Weights<'a> {
    source: Arc<dyn WeightSource + 'a>,
    /// The names of the enclosing modules, separated by dots.
    path: String,
    /// Whether tensors are requested with their values.
    with_data: bool,
}

/// The provider of the tensors of [`Weights`].
pub trait WeightSource: Send + Sync {
    /// The dtype of the tensors.
    fn dtype(&self) -> DType;

    /// The device of the tensors.
    fn device(&self) -> &Device;

    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// A tensor; `None` if its values are not loaded. `init` is the distribution of a new tensor,
    /// for sources that create tensors.
    ///
    /// # Errors
    /// An error if the source does not have the tensor, or has it in another shape, unless the
    /// source records this to report it later.
    fn get(&self, name: &str, shape: Shape, init: Init) -> candle_core::Result<Option<Tensor>>;

    /// The rows `ids` of a tensor; `None` if its values are not loaded. `shape` is that of the whole
    /// tensor, and `ids` are below its number of rows.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    fn rows(&self, name: &str, shape: Shape, ids: &[u32]) -> candle_core::Result<Option<Tensor>> {
        let Some(tensor) = self.get(name, shape, Init::Const(0.))? else { return Ok(None) };
        Ok(Some(tensor.index_select(&Tensor::new(ids, tensor.device())?, 0)?))
    }

    /// The values of a tensor where the source has them, in the dtype in which it has them; `None`
    /// if it cannot share them, so that [`Self::get`] has to be called. A source with files maps
    /// the values into memory.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    fn shared(&self, _name: &str, _shape: &Shape) -> candle_core::Result<Option<SharedTensor>> {
        Ok(None)
    }

    /// A tensor of which parts are read, in the dtype in which the source has it; `None` if the
    /// source has no such form, so that [`Self::get`] has to be called.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    fn reader(
        &self,
        _name: &str,
        _shape: &Shape,
    ) -> candle_core::Result<Option<Box<dyn ReadTensor>>> {
        Ok(None)
    }

    /// Checks the name and the shape of a tensor whose values are in an array of [`Self::stored`].
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    fn check(&self, _name: &str, _shape: Shape) -> candle_core::Result<()> {
        Ok(())
    }

    /// An array that [`Self::keep`] got when the module was built before. The name is the name of
    /// the module, a dot and the name of the array, such as `encoder.layer.0.output.panels`.
    fn stored(&self, _name: &str) -> Option<SharedBytes> {
        None
    }

    /// Gets an array of a module that was built from tensors.
    fn keep(&self, _name: String, _array: Arc<dyn PackedArray>) {}
}

impl WeightSource for VarBuilder<'_> {
    fn dtype(&self) -> DType {
        VarBuilder::dtype(self)
    }

    fn device(&self) -> &Device {
        VarBuilder::device(self)
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_tensor(name)
    }

    fn get(&self, name: &str, shape: Shape, init: Init) -> candle_core::Result<Option<Tensor>> {
        self.get_with_hints(shape, name, init).map(Some)
    }
}

impl<'a> From<VarBuilder<'a>> for Weights<'a> {
    fn from(vb: VarBuilder<'a>) -> Self {
        Self::new(vb)
    }
}

/// A tensor in row-major order, in f32, f16 or bf16, of which parts are read.
pub trait ReadTensor: Send + Sync {
    /// The dtype of the values.
    fn dtype(&self) -> DType;

    /// Fills `out` with the bytes from `start` on, in the machine's byte order. False if they
    /// cannot be read; the source of the tensor reports why.
    fn read(&self, start: usize, out: &mut [u8]) -> bool;
}

impl dyn ReadTensor + '_ {
    /// Writes the f32 values of the elements from `start` on to `out`. The conversion is exact.
    /// `buffer` is overwritten. False if the elements cannot be read, as in [`ReadTensor::read`].
    pub(crate) fn read_f32(&self, buffer: &mut Vec<u16>, start: usize, out: &mut [f32]) -> bool {
        let dtype = self.dtype();
        let start = start * dtype.size_in_bytes();
        if dtype == DType::F32 {
            return self.read(start, bytemuck::cast_slice_mut(out));
        }
        buffer.resize(out.len(), 0);
        if !self.read(start, bytemuck::cast_slice_mut(buffer)) {
            return false;
        }
        write_f32(dtype, buffer, out);
        true
    }
}

/// The values of a tensor in shared memory, in row-major order, in f32, f16 or bf16.
#[derive(Clone, Debug)]
pub struct SharedTensor {
    bytes: SharedBytes,
    dtype: DType,
}

impl SharedTensor {
    /// The values in `bytes`, in the machine's byte order; `None` if `dtype` is not f32, f16 or
    /// bf16, or if the bytes do not start at a multiple of the size of a value.
    pub fn new(bytes: SharedBytes, dtype: DType) -> Option<Self> {
        let is_float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        (is_float && bytes.is_aligned_to(dtype.size_in_bytes())).then_some(Self { bytes, dtype })
    }

    pub(crate) fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Number of values.
    fn elem_count(&self) -> usize {
        self.bytes.as_slice().len() / self.dtype.size_in_bytes()
    }
}

impl ReadTensor for SharedTensor {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn read(&self, start: usize, out: &mut [u8]) -> bool {
        out.copy_from_slice(&self.bytes.as_slice()[start..][..out.len()]);
        true
    }
}

/// The values of an array, which a module keeps in the form in which they are stored.
pub trait PackedArray: Debug + Send + Sync {
    /// Number of bytes.
    fn size(&self) -> usize;

    /// Writes the bytes, in the machine's byte order.
    ///
    /// # Errors
    /// The errors of `out`.
    fn write_to(&self, out: &mut dyn Write) -> io::Result<()>;
}

impl PackedArray for SharedBytes {
    fn size(&self) -> usize {
        self.as_slice().len()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(self.as_slice())
    }
}

/// A part of a module, or the name of a tensor that the part lacks.
pub type Loaded<T> = std::result::Result<T, NotLoaded>;

/// Separates [`Error::NotLoaded`] from other errors.
///
/// # Errors
/// The other errors.
pub fn loaded<T>(result: Result<T>) -> Result<Loaded<T>> {
    match result {
        Ok(part) => Ok(Ok(part)),
        Err(Error::NotLoaded(tensor)) => Ok(Err(tensor)),
        Err(error) => Err(error),
    }
}

impl<'a> Weights<'a> {
    /// The tensors of a source.
    pub fn new(source: impl WeightSource + 'a) -> Self {
        Self { source: Arc::new(source), path: String::new(), with_data: true }
    }

    /// The weights of the submodule `name`.
    pub fn pp(&self, name: impl ToString) -> Self {
        Self { path: self.name(&name.to_string()), ..self.clone() }
    }

    /// The dtype of the tensors.
    pub fn dtype(&self) -> DType {
        self.source.dtype()
    }

    /// The device of the tensors.
    pub fn device(&self) -> &Device {
        self.source.device()
    }

    /// Whether the module has a tensor of this name.
    pub fn contains_tensor(&self, name: &str) -> bool {
        self.source.contains(&self.name(name))
    }

    /// A tensor of the module.
    ///
    /// # Errors
    /// [`Error::Candle`] if the source does not have the tensor, or has it in another shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str) -> Result<Loaded<Tensor>> {
        self.get_with_hints(shape, name, Init::Const(0.))
    }

    /// [`Self::get`] for a tensor that the source may create with the distribution `init`.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    pub fn get_with_hints(
        &self,
        shape: impl Into<Shape>,
        name: &str,
        init: Init,
    ) -> Result<Loaded<Tensor>> {
        let (tensor, shape) = (self.name(name), shape.into());
        let found = if self.with_data {
            self.source.get(&tensor, shape, init)?
        } else {
            self.source.check(&tensor, shape)?;
            None
        };
        Ok(found.ok_or(NotLoaded { tensor }))
    }

    /// A tensor as [`WeightSource::shared`] returns it.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    pub(crate) fn shared(
        &self,
        shape: impl Into<Shape>,
        name: &str,
    ) -> Result<Option<SharedTensor>> {
        if !self.with_data {
            return Ok(None);
        }
        let (tensor, shape) = (self.name(name), shape.into());
        let shared = self.source.shared(&tensor, &shape)?;
        Ok(shared.filter(|shared| shared.elem_count() == shape.elem_count()))
    }

    /// A tensor as [`WeightSource::reader`] returns it.
    ///
    /// # Errors
    /// The errors of [`Self::get`].
    pub(crate) fn reader(
        &self,
        shape: impl Into<Shape>,
        name: &str,
    ) -> Result<Option<Box<dyn ReadTensor>>> {
        if !self.with_data {
            return Ok(None);
        }
        Ok(self.source.reader(&self.name(name), &shape.into())?)
    }

    /// The rows `ids` of a tensor of this shape. A source with files reads only these rows.
    ///
    /// # Errors
    /// The errors of [`Self::get`]; [`Error::Candle`] for an id that is not below the number of
    /// rows.
    ///
    /// # Examples
    /// ```
    /// use std::collections::HashMap;
    ///
    /// use candle_core::{DType, Device::Cpu, Tensor};
    /// use candle_nn::VarBuilder;
    /// use ops::Weights;
    ///
    /// let table = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Cpu)?;
    /// let tensors = HashMap::from([("table".to_string(), table)]);
    /// let weights = Weights::from(VarBuilder::from_tensors(tensors, DType::F32, &Cpu));
    /// let rows = weights.rows((3, 2), "table", &[2, 0])??;
    /// assert_eq!(rows.to_vec2::<f32>()?, [[5., 6.], [1., 2.]]);
    /// assert!(weights.rows((3, 2), "table", &[3]).is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rows(&self, shape: impl Into<Shape>, name: &str, ids: &[u32]) -> Result<Loaded<Tensor>> {
        let (tensor, shape) = (self.name(name), shape.into());
        let rows = shape.dims().first().copied().unwrap_or_default();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= rows) {
            let message = format!("tensor {tensor:?} has no row {id}: expected ids below {rows}");
            return Err(candle_core::Error::Msg(message).into());
        }
        Ok(self.source.rows(&tensor, shape, ids)?.ok_or(NotLoaded { tensor }))
    }

    /// Builds a module. If the source has the arrays from which `from_stored` builds it, `load`
    /// only checks the names and shapes of the tensors. Otherwise the module is the result of
    /// `load`, and the source gets its `arrays`.
    pub(crate) fn module<M>(
        &self,
        from_stored: impl FnOnce(&dyn Fn(&str) -> Option<SharedBytes>) -> Option<M>,
        load: impl FnOnce(&Self) -> Result<M>,
        arrays: impl FnOnce(&M) -> Vec<(&'static str, Arc<dyn PackedArray>)>,
    ) -> Result<M> {
        if let Some(module) = from_stored(&|array| self.source.stored(&self.name(array))) {
            loaded(load(&Self { with_data: false, ..self.clone() }))?.ok();
            return Ok(module);
        }
        let module = load(self)?;
        for (name, array) in arrays(&module) {
            self.source.keep(self.name(name), array);
        }
        Ok(module)
    }

    /// The name of a tensor, an array or a submodule of the module.
    pub(crate) fn name(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}
