//! Sums of embeddings with layer normalisation: `LayerNorm(Σ table[ids])`.

use std::{
    io::{self, Write},
    sync::Arc,
};

use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Module, Shape, Storage, Tensor};
use candle_nn::Init;
use half::{
    bf16, f16,
    slice::HalfFloatSliceExt,
    vec::{HalfBitsVecExt, HalfFloatVecExt},
};
use mha_kernels::{EmbeddingTable, IdOutOfRange, Lookup, SharedBytes, embed_layer_norm};
#[cfg(feature = "cuda")]
use mha_kernels_cuda as cuda_kernels;
use rayon::prelude::*;

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    Loaded, PackedArray, ReadTensor, Result, SharedTensor, Weights, cpu,
    layer_norm::{CpuLayerNorm, LayerNorm},
};

/// The names under which a table is stored: one for f32 and f16, which differ in size, and one for
/// bf16.
const TABLE: &str = "table";
const BF16_TABLE: &str = "table_bf16";

/// An embedding table, `(rows, E)`.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device::Cpu, Tensor};
/// use ops::{Table, embed};
///
/// let table = Table::from(Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?);
/// let ids = Tensor::new(&[[1u32, 0, 1]], &Cpu)?;
/// let x = embed(&[(&table, &ids)], None, DType::F32)?;
/// assert_eq!(x.to_vec3::<f32>()?, [[[3., 4.], [1., 2.], [3., 4.]]]);
/// # Ok::<(), ops::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Table(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Tensor(Tensor),
    /// Values in shared memory, such as a mapped file.
    Shared {
        values: SharedTensor,
        shape: [usize; 2],
    },
}

impl From<Tensor> for Table {
    fn from(table: Tensor) -> Self {
        Self(Kind::Tensor(table))
    }
}

impl Table {
    /// Loads `weight` from `weights`.
    ///
    /// If the source has the values in memory or in a file ([`crate::WeightSource::shared`]), they
    /// stay there, in their dtype; [`embed`] reads the rows that it looks up. Otherwise, if
    /// [`mha_kernels::Isa::kernels_enabled`] is true, an f32 table on a CPU that autograd does not
    /// track is stored as f16 or bf16 if that is lossless. Neither changes the result of [`embed`].
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if `weights` lack the tensor or have it in another shape;
    /// [`crate::Error::NotLoaded`] if its values are not loaded.
    pub fn load<'a>(rows: usize, width: usize, weights: impl Into<Weights<'a>>) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        weights.into().module(
            |array| {
                let stored = |bytes, dtypes| Self::stored(bytes, dtypes, [rows, width]);
                let table = array(TABLE).and_then(|bytes| stored(bytes, &[DType::F32, DType::F16]));
                table.or_else(|| stored(array(BF16_TABLE)?, &[DType::BF16]))
            },
            |weights| match weights.shared((rows, width), "weight")? {
                Some(values) => Ok(Self(Kind::Shared { values, shape: [rows, width] })),
                None => compact(weights.get_with_hints((rows, width), "weight", init)??),
            },
            Self::arrays,
        )
    }

    /// The matrix `name` of `weights` as a table that is not stored with packed weights.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if `weights` lack the tensor or have it in another shape.
    pub fn get(shape: (usize, usize), name: &str, weights: &Weights) -> Result<Loaded<Self>> {
        Ok(match weights.shared(shape, name)? {
            Some(values) => Ok(Self(Kind::Shared { values, shape: shape.into() })),
            None => weights.get(shape, name)?.map(Self::from),
        })
    }

    /// A table in shared memory, in the first of `dtypes` whose size is that of the bytes.
    fn stored(bytes: SharedBytes, dtypes: &[DType], shape: [usize; 2]) -> Option<Self> {
        let len = bytes.as_slice().len();
        let fits = |dtype: &&DType| shape[0] * shape[1] * dtype.size_in_bytes() == len;
        let values = SharedTensor::new(bytes, *dtypes.iter().find(fits)?)?;
        Some(Self(Kind::Shared { values, shape }))
    }

    /// The table as an array to store, if it is a contiguous f32, f16 or bf16 tensor on the CPU that
    /// has elements and is not tracked by autograd.
    fn arrays(&self) -> Vec<(&'static str, Arc<dyn PackedArray>)> {
        match &self.0 {
            Kind::Tensor(table) if table.elem_count() > 0 => {
                let name = match self.kernel_dtype() {
                    Some(DType::F32 | DType::F16) => TABLE,
                    Some(DType::BF16) => BF16_TABLE,
                    _ => return vec![],
                };
                vec![(name, Arc::new(StoredTable(table.clone())))]
            }
            _ => vec![],
        }
    }

    /// E; `None` if the tensor is not a matrix.
    fn width(&self) -> Option<usize> {
        self.dims().ok().map(|(_rows, width)| width)
    }

    /// The table as a tensor of `dtype`.
    ///
    /// # Shapes
    /// returns `(rows, E)`
    /// # Errors
    /// [`crate::Error::Candle`] if the tensor cannot be created.
    pub fn tensor(&self, dtype: DType) -> Result<Tensor> {
        match &self.0 {
            Kind::Tensor(table) => Ok(table.to_dtype(dtype)?),
            Kind::Shared { values, shape } => {
                let bytes = values.bytes().as_slice();
                let table = Tensor::from_raw_buffer(bytes, values.dtype(), shape, &Device::Cpu);
                Ok(table?.to_dtype(dtype)?)
            }
        }
    }

    /// The values, if they are in shared memory.
    pub(crate) fn shared(&self) -> Option<&SharedTensor> {
        match &self.0 {
            Kind::Tensor(_) => None,
            Kind::Shared { values, .. } => Some(values),
        }
    }

    /// The shape `(rows, E)`.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the table is not a matrix.
    pub(crate) fn dims(&self) -> Result<(usize, usize)> {
        match &self.0 {
            Kind::Tensor(table) => Ok(table.dims2()?),
            Kind::Shared { shape: [rows, width], .. } => Ok((*rows, *width)),
        }
    }

    /// Whether `other` has the same shape and the same values; false if one is NaN. A part of the
    /// rows of tables in shared memory is converted at a time.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if the tables are on two devices or not matrices.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device::Cpu, Tensor};
    /// use ops::Table;
    ///
    /// let table = |x: f32| -> ops::Result<Table> { Ok(Tensor::new(&[[1.], [x]], &Cpu)?.into()) };
    /// assert!(table(2.)?.has_values_of(&table(2.)?)?);
    /// assert!(!table(2.)?.has_values_of(&table(3.)?)?);
    /// # Ok::<(), ops::Error>(())
    /// ```
    pub fn has_values_of(&self, other: &Self) -> Result<bool> {
        const ROWS: usize = 4096;
        let (rows, width) = self.dims()?;
        if other.dims()? != (rows, width) {
            return Ok(false);
        }
        for first in (0..rows).step_by(ROWS) {
            let n = ROWS.min(rows - first);
            let [a, b] = [self, other].map(|table| table.f32_rows(first, n, width));
            if a?.ne(&b?)?.max_all()?.to_scalar::<u8>()? > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// `n` rows from `first` on, in f32.
    fn f32_rows(&self, first: usize, n: usize, width: usize) -> Result<Tensor> {
        match &self.0 {
            Kind::Tensor(table) => Ok(table.narrow(0, first, n)?.to_dtype(DType::F32)?),
            Kind::Shared { values, .. } => {
                let mut rows = vec![0.0; n * width];
                let values: &dyn ReadTensor = values;
                values.read_f32(&mut vec![], first * width, &mut rows);
                Ok(Tensor::from_vec(rows, (n, width), &Device::Cpu)?)
            }
        }
    }

    /// The rows of `ids` in `dtype`, `(.., T)` to `(.., T, E)`.
    fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        match &self.0 {
            Kind::Tensor(table) => {
                let (rows, width) = table.dims2()?;
                // Check the ids here, because candle returns a row of zeros for the id u32::MAX.
                if table.device().is_cpu() && ids.elem_count() > 0 {
                    let id = ids.flatten_all()?.max(0)?.to_scalar::<u32>()?;
                    if id as usize >= rows {
                        return Err(candle_core::Error::wrap(IdOutOfRange { id, rows }).into());
                    }
                }
                let rows = candle_nn::Embedding::new(table.contiguous()?, width).forward(ids)?;
                Ok(rows.to_dtype(dtype)?)
            }
            Kind::Shared { values, shape: [rows, width] } => {
                let (bytes, stored) = (values.bytes(), values.dtype());
                let row_size = width * stored.size_in_bytes();
                let mut gathered = Vec::with_capacity(ids.elem_count() * row_size);
                for id in ids.flatten_all()?.to_vec1::<u32>()? {
                    let row = bytes.as_slice().chunks_exact(row_size.max(1)).nth(id as usize);
                    let row = row.ok_or(IdOutOfRange { id, rows: *rows });
                    gathered.extend_from_slice(row.map_err(candle_core::Error::wrap)?);
                }
                let shape = [ids.dims(), &[*width]].concat();
                let gathered = Tensor::from_raw_buffer(&gathered, stored, &shape, &Device::Cpu)?;
                Ok(gathered.to_dtype(dtype)?)
            }
        }
    }

    /// The dtype of the table; `None` if the kernel cannot read the table: it is not on the CPU, or
    /// not contiguous, or autograd tracks it.
    fn kernel_dtype(&self) -> Option<DType> {
        match &self.0 {
            Kind::Tensor(table)
                if table.device().is_cpu() && table.is_contiguous() && !table.track_op() =>
            {
                Some(table.dtype())
            }
            Kind::Tensor(_) => None,
            Kind::Shared { values, .. } => Some(values.dtype()),
        }
    }
}

/// A contiguous f32, f16 or bf16 table on the CPU.
#[derive(Debug)]
struct StoredTable(Tensor);

impl PackedArray for StoredTable {
    fn size(&self) -> usize {
        self.0.elem_count() * self.0.dtype().size_in_bytes()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        let (storage, layout) = self.0.storage_and_layout();
        out.write_all(match read(&storage, layout).map_err(io::Error::other)? {
            EmbeddingTable::F16(values) | EmbeddingTable::Bf16(values) => {
                bytemuck::cast_slice(values)
            }
            EmbeddingTable::F32(values) => bytemuck::cast_slice(values),
        })
    }
}

/// Looks up `ids` in each table, adds the rows, and applies `norm` if there is one.
///
/// With three tables and a norm, as in BERT, a CPU kernel that supports the tensors computes all of
/// this in one pass over memory; with one to three tables and a norm, a CUDA kernel.
///
/// # Shapes
/// each table `(rows, E)`; ids `(.., T)` of u32, the same shape for each table; returns
/// `(.., T, E)` of `dtype`
/// # Errors
/// [`crate::Error::Candle`] if an id is out of range, if the shapes do not match, or if `lookups`
/// is empty. On a GPU, a token with an id out of range may get a row of NaN instead.
/// # Examples
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use ops::Table;
///
/// let words = Table::from(Tensor::new(&[[1f32, 2.], [3., 4.]], &Cpu)?);
/// let positions = Table::from(Tensor::new(&[[10f32, 20.], [30., 40.]], &Cpu)?);
/// let (ids, position_ids) = (Tensor::new(&[1u32, 1], &Cpu)?, Tensor::new(&[0u32, 1], &Cpu)?);
/// let lookups = [(&words, &ids), (&positions, &position_ids)];
/// let x = ops::embed(&lookups, None, candle_core::DType::F32)?;
/// assert_eq!(x.to_vec2::<f32>()?, [[13., 24.], [33., 44.]]);
/// # Ok::<(), ops::Error>(())
/// ```
pub fn embed(
    lookups: &[(&Table, &Tensor)],
    norm: Option<&LayerNorm>,
    dtype: DType,
) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if let Some(norm) = norm
        && let Some(hidden) = by_cuda_kernel(lookups, norm, dtype)?
    {
        return Ok(hidden);
    }
    if let ([a, b, c], Some(norm)) = (lookups, norm)
        && let Some(hidden) = by_kernel([*a, *b, *c], norm, dtype)?
    {
        return Ok(hidden);
    }
    let mut sum: Option<Tensor> = None;
    for (table, ids) in lookups {
        let rows = table.rows(ids, dtype)?; // (.., T, E)
        sum = Some(match sum {
            None => rows,
            Some(sum) => (sum + rows)?,
        });
    }
    let sum = sum.ok_or_else(|| {
        candle_core::Error::msg("lookups is empty: expected at least one table").bt()
    })?;
    match norm {
        Some(norm) => Ok(norm.forward(&sum)?),
        None => Ok(sum),
    }
}

fn by_kernel(
    lookups: [(&Table, &Tensor); 3],
    norm: &LayerNorm,
    dtype: DType,
) -> Result<Option<Tensor>> {
    let (tables, ids) = (lookups.map(|(table, _)| table), lookups.map(|(_, ids)| ids));
    let fit = |(table, ids): &(&Table, &Tensor)| {
        table.width() == norm.width() && ids.dims() == lookups[0].1.dims()
    };
    if !lookups.iter().all(fit) {
        return Ok(None); // candle's operations return the error
    }
    let dtypes = tables.map(Table::kernel_dtype);
    let is_readable = |dtype: &_| matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16));
    let are_readable = dtypes.iter().all(is_readable);
    if !are_readable || !dtypes.contains(&Some(DType::F32)) || dtype != DType::F32 {
        return Ok(None);
    }
    let Some(norm) = norm.cpu_kernel(&[]) else { return Ok(None) };
    let op = CpuEmbed { tables: tables.map(Table::clone), norm: norm.clone() };
    let [a, b, c] = ids.map(Tensor::contiguous);
    Ok(Some(a?.apply_op3_no_bwd(&b?, &c?, &op)?))
}

/// Converts a contiguous table to f16 or bf16 if [`cpu::prefers_kernel`] is true for it and the
/// conversion is lossless; otherwise returns the table unchanged.
fn compact(table: Tensor) -> Result<Table> {
    if !cpu::prefers_kernel(&[&table]) || !table.is_contiguous() {
        return Ok(table.into());
    }
    let (shape, device) = (table.shape(), table.device());
    let zeros: Vec<u16> = mha_kernels::zeros(table.elem_count());
    let mut halves: Vec<f16> = HalfBitsVecExt::reinterpret_into(zeros);
    if cpu::with_slice(&table, |values| narrow_exactly(values, &mut halves))? {
        return Ok(Tensor::from_vec(halves, shape, device)?.into());
    }
    let bits = HalfFloatVecExt::reinterpret_into(halves);
    let mut halves: Vec<bf16> = HalfBitsVecExt::reinterpret_into(bits);
    if cpu::with_slice(&table, |values| narrow_exactly(values, &mut halves))? {
        return Ok(Tensor::from_vec(halves, shape, device)?.into());
    }
    Ok(table.into())
}

/// Converts `values` to a 16-bit type. Returns false if that changes a value.
fn narrow_exactly<T: Send>(values: &[f32], halves: &mut [T]) -> bool
where
    [T]: HalfFloatSliceExt,
{
    let is_exact = |(halves, values): (&mut [T], &[f32])| {
        halves.convert_from_f32_slice(values);
        let mut widened = vec![0.0; values.len()];
        halves.convert_to_f32_slice(&mut widened);
        widened.iter().zip(values).fold(true, |exact, (a, b)| exact & (a == b))
    };
    let chunks = halves.par_chunks_mut(4096).zip(values.par_chunks(4096));
    chunks.all(is_exact)
}

struct CpuEmbed {
    tables: [Table; 3],
    norm: CpuLayerNorm,
}

impl CustomOp3 for CpuEmbed {
    fn name(&self) -> &'static str {
        "embeddings"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_layout: &Layout,
        b: &CpuStorage,
        b_layout: &Layout,
        c: &CpuStorage,
        c_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let ids = [
            cpu::contiguous::<u32>(a, a_layout)?,
            cpu::contiguous(b, b_layout)?,
            cpu::contiguous(c, c_layout)?,
        ];
        /// The values of a table. `G` is the guard of a tensor's storage, from which the lookups
        /// borrow.
        enum Values<'a, G> {
            Tensor(G, &'a Layout),
            Shared(&'a SharedTensor),
        }
        let values = self.tables.each_ref().map(|table| match &table.0 {
            Kind::Tensor(table) => {
                let (storage, layout) = table.storage_and_layout();
                Values::Tensor(storage, layout)
            }
            Kind::Shared { values, .. } => Values::Shared(values),
        });
        let mut lookups = Vec::with_capacity(3);
        for (values, ids) in values.iter().zip(ids) {
            let table = match values {
                Values::Tensor(storage, layout) => read(storage, layout)?,
                Values::Shared(raw) => match (raw.bytes(), raw.dtype()) {
                    (bytes, DType::F16) => EmbeddingTable::F16(bytes.as_u16()),
                    (bytes, DType::BF16) => EmbeddingTable::Bf16(bytes.as_u16()),
                    (bytes, _) => EmbeddingTable::F32(bytes.as_f32()),
                },
            };
            lookups.push(Lookup { table, ids });
        }
        let lookups = [lookups[0], lookups[1], lookups[2]];
        let CpuLayerNorm { weight, bias, eps, isa } = &self.norm;
        let out = embed_layer_norm(*isa, lookups, weight, bias, *eps);
        let out = out.map_err(candle_core::Error::wrap)?;
        let shape = [a_layout.dims(), &[weight.len()]].concat();
        Ok((CpuStorage::F32(out), shape.into()))
    }
}

fn read<'a>(storage: &'a Storage, layout: &Layout) -> candle_core::Result<EmbeddingTable<'a>> {
    Ok(match storage {
        Storage::Cpu(storage @ CpuStorage::F16(_)) => {
            EmbeddingTable::F16(cpu::contiguous::<f16>(storage, layout)?.reinterpret_cast())
        }
        Storage::Cpu(storage @ CpuStorage::BF16(_)) => {
            EmbeddingTable::Bf16(cpu::contiguous::<bf16>(storage, layout)?.reinterpret_cast())
        }
        Storage::Cpu(storage) => EmbeddingTable::F32(cpu::contiguous(storage, layout)?),
        _ => candle_core::bail!("an embedding table is not on the CPU"),
    })
}

/// One to three lookups and the norm by the CUDA kernel; `None` if it does not support the tensors.
#[cfg(feature = "cuda")]
fn by_cuda_kernel(
    lookups: &[(&Table, &Tensor)],
    norm: &LayerNorm,
    dtype: DType,
) -> Result<Option<Tensor>> {
    let tensor = |(table, _): &(&Table, _)| match &table.0 {
        Kind::Tensor(table) => Some(table.clone()),
        Kind::Shared { .. } => None,
    };
    let Some(tables) = lookups.iter().map(tensor).collect::<Option<Vec<_>>>() else {
        return Ok(None);
    };
    let fits = |(table, ids): &(&Table, &Tensor)| {
        table.width() == norm.width() && ids.dims() == lookups[0].1.dims() && ids.device().is_cuda()
    };
    let all: Vec<&Tensor> = tables.iter().collect();
    if !(1..=3).contains(&all.len())
        || !lookups.iter().all(fits)
        || dtype != all[0].dtype()
        || !norm.cuda_kernel_supports(&all[..1])
        || !cuda::supports(&all)
    {
        return Ok(None);
    }
    let ids = lookups.iter().map(|(_, ids)| ids.contiguous());
    let ids = ids.collect::<candle_core::Result<Vec<_>>>()?;
    let e = all[0].dim(1)?;
    let hidden = cuda::apply1("embeddings", &ids[0], |first| {
        let out = norm.with_cuda_parameters(|weight, bias, eps| {
            cuda::with_all(&[&ids[1..], &tables[..]].concat(), &mut |views| {
                let (ids, tables) = views.split_at(tables.len() - 1);
                let ids = std::iter::once(first).chain(ids.iter().copied());
                let lookups: Vec<_> = ids.zip(tables.iter().copied()).collect();
                cuda_kernels::embed_layer_norm(&lookups, weight, bias, eps)
            })
        });
        Ok((out?, [first.1.dims(), &[e]].concat().into()))
    });
    Ok(Some(hidden?))
}

#[cfg(test)]
mod tests {
    use candle_core::Device::Cpu;
    use candle_nn::VarBuilder;

    use super::*;

    #[test]
    fn widths_shapes_and_dtypes_that_do_not_fit_are_errors() -> Result<()> {
        let table = Table::from(Tensor::arange(0f32, 6., &Cpu)?.reshape((3, 2))?);
        let norm = |width| LayerNorm::new(width, 0.0, true, VarBuilder::zeros(DType::F32, &Cpu));
        let ids = |shape: &[usize]| Tensor::zeros(shape, DType::U32, &Cpu);
        let one = ids(&[1])?;
        let same = [(&table, &one); 3];
        assert_eq!(embed(&same, Some(&norm(2)?), DType::F32)?.dims(), [1, 2]);
        for width in [1, 3, 4] {
            assert!(embed(&same, Some(&norm(width)?), DType::F32).is_err(), "{width}");
        }
        assert!(embed(&same, Some(&norm(2)?), DType::F16).is_err());
        let (a, b, c) = (ids(&[2, 3])?, ids(&[3, 2])?, ids(&[6])?);
        let lookups = [(&table, &a), (&table, &b), (&table, &c)];
        assert!(embed(&lookups, Some(&norm(2)?), DType::F32).is_err());
        Ok(())
    }

    #[test]
    fn columns_of_a_wider_table_are_accepted() -> Result<()> {
        let wide = Tensor::arange(0f32, 12., &Cpu)?.reshape((3, 4))?.narrow(1, 1, 2)?;
        let norm = LayerNorm::new(2, 0.0, true, VarBuilder::zeros(DType::F32, &Cpu))?;
        let ids = Tensor::new(&[2u32, 0], &Cpu)?;
        let rows = |table: Tensor| -> Result<Vec<Vec<f32>>> {
            let table = Table::from(table);
            Ok(embed(&[(&table, &ids); 3], Some(&norm), DType::F32)?.to_vec2()?)
        };
        assert_eq!(rows(wide.clone())?, rows(wide.contiguous()?)?);
        Ok(())
    }

    #[test]
    fn ids_out_of_range_are_errors() -> Result<()> {
        let table = Table::from(Tensor::arange(0f32, 6., &Cpu)?.reshape((3, 2))?);
        for id in [3, u32::MAX] {
            let error = embed(&[(&table, &Tensor::new(&[0, id], &Cpu)?)], None, DType::F32);
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("id {id}")) && error.contains("below 3"), "{error}");
        }
        Ok(())
    }
}
