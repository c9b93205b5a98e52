//! Weights in the layout of the CPU kernels, for storage. A model can be loaded from stored weights
//! without reading and packing the weights of its checkpoint.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_nn::VarBuilder;
use mha_kernels::{Isa, PackedArrays, PackedLinear, SharedBytes};

use crate::{
    ComputeType, Result,
    embed::Table,
    linear::{Linear, Packed},
};

/// The arrays of packed linear maps and embedding tables, by the names of their modules in a
/// [`VarBuilder`].
///
/// Within [`Self::scope`], [`Linear::load`] and [`Table::load`] use the [`stored`](Self::stored())
/// arrays of a module if these exist and fit. Otherwise they pack the module's tensors, and
/// [`Self::packed()`] returns the arrays. In both cases they request the tensors from the
/// [`VarBuilder`], so that its backend can check names and shapes; if [`skips_data`] is true, the
/// backend may return placeholders.
#[derive(Debug, Default)]
pub struct PackedWeights {
    stored: BTreeMap<String, SharedBytes>,
    packed: Mutex<Vec<PackedArray>>,
}

/// An array of a module that was packed within [`PackedWeights::scope`].
#[derive(Clone, Debug)]
pub struct PackedArray {
    /// The name of the module and of the array, such as `encoder.layer.0.output.panels`.
    pub name: String,
    data: Data,
}

#[derive(Clone, Debug)]
enum Data {
    Linear(Arc<Packed>, Part),
    Table(Table),
}

/// An array of a linear map.
#[derive(Clone, Copy, Debug)]
enum Part {
    Panels,
    Bias,
    Scales,
    ColumnSums,
}

impl Part {
    const ALL: [Self; 4] = [Self::Panels, Self::Bias, Self::Scales, Self::ColumnSums];

    fn name(self) -> &'static str {
        match self {
            Self::Panels => "panels",
            Self::Bias => "bias",
            Self::Scales => "scales",
            Self::ColumnSums => "column_sums",
        }
    }

    fn of(self, weights: &PackedLinear) -> Option<&[f32]> {
        let arrays = weights.arrays();
        match self {
            Self::Panels => Some(arrays.panels),
            Self::Bias => arrays.bias,
            Self::Scales => arrays.scales,
            Self::ColumnSums => arrays.column_sums,
        }
    }
}

impl PackedArray {
    /// Calls `f` with the bytes of the array, in the machine's byte order.
    ///
    /// # Errors
    /// [`crate::Error::Candle`] if a table is not a contiguous tensor on the CPU.
    pub fn with_bytes<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match &self.data {
            Data::Linear(packed, part) => {
                Ok(f(bytemuck::cast_slice(part.of(&packed.weights).unwrap_or_default())))
            }
            Data::Table(table) => table.with_bytes(f),
        }
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Arc<PackedWeights>>> = const { RefCell::new(None) };
    static SKIPS_DATA: Cell<bool> = const { Cell::new(false) };
}

/// Whether the current request of a tensor needs its name and shape only, because its values are in
/// the [`PackedWeights`] of the current [`PackedWeights::scope`].
pub fn skips_data() -> bool {
    SKIPS_DATA.get()
}

/// Restores the thread's state when it is dropped, also after a panic.
struct Restore(Option<Arc<PackedWeights>>, bool);

impl Restore {
    /// Sets the thread's state.
    fn new(current: Option<Arc<PackedWeights>>, skips_data: bool) -> Self {
        Self(CURRENT.replace(current), SKIPS_DATA.replace(skips_data))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
        SKIPS_DATA.set(self.1);
    }
}

impl PackedWeights {
    /// Packed weights with the arrays `stored`, whose keys are the names of [`PackedArray::name`].
    pub fn new(stored: BTreeMap<String, SharedBytes>) -> Self {
        Self { stored, packed: Mutex::default() }
    }

    /// Calls `load`, which builds a model on this thread with these weights.
    pub fn scope<R>(self: &Arc<Self>, load: impl FnOnce() -> R) -> R {
        let _restore = Restore::new(Some(self.clone()), false);
        load()
    }

    /// Calls `load`, which builds a model on this thread, without the weights of an outer
    /// [`Self::scope`]. This is needed because a thread of rayon that waits while it loads one
    /// model may run a task that loads another model.
    pub fn without_scope<R>(load: impl FnOnce() -> R) -> R {
        let _restore = Restore::new(None, false);
        load()
    }

    /// The arrays given to [`Self::new`].
    pub fn stored(&self) -> &BTreeMap<String, SharedBytes> {
        &self.stored
    }

    /// The arrays of the modules that were packed within [`Self::scope`].
    pub fn packed(&self) -> Vec<PackedArray> {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn remember(&self, arrays: impl IntoIterator<Item = PackedArray>) {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).extend(arrays);
    }

    fn linear(&self, name: &str, shape: LinearShape) -> Option<PackedLinear> {
        let LinearShape { compute_type, out, input, .. } = shape;
        let array = |part: Part| self.stored.get(&format!("{name}.{}", part.name())).cloned();
        let arrays = PackedArrays {
            panels: array(Part::Panels)?,
            bias: array(Part::Bias),
            scales: array(Part::Scales),
            column_sums: array(Part::ColumnSums),
        };
        let isa = Isa::get().ok()?;
        let has_bias = arrays.bias.is_some();
        PackedLinear::from_arrays(isa, compute_type, out, input, arrays)
            .filter(|_| has_bias == shape.has_bias)
    }
}

/// The properties of a linear map, which stored arrays must match.
#[derive(Clone, Copy)]
pub(crate) struct LinearShape {
    pub(crate) compute_type: ComputeType,
    pub(crate) out: usize,
    pub(crate) input: usize,
    pub(crate) has_bias: bool,
}

/// The weights of the current scope, if `vb` has f32 weights on a CPU; only these are packed.
fn current(vb: &VarBuilder) -> Option<Arc<PackedWeights>> {
    let is_packed = vb.device().is_cpu() && vb.dtype() == candle_core::DType::F32;
    CURRENT.with_borrow(|current| current.clone().filter(|_| is_packed))
}

/// Calls `request`, which requests tensors from a [`VarBuilder`]. Only their names and shapes are
/// needed, so [`skips_data`] is true during the call.
fn without_data<R>(request: impl FnOnce() -> R) -> R {
    let _restore = Restore::new(CURRENT.with_borrow(Clone::clone), true);
    request()
}

/// Loads a linear map. If the current scope has its arrays, the map is built from them, and `load`
/// only requests the tensors, so that their names and shapes are checked. Otherwise the map is the
/// result of `load`, and its arrays are remembered.
pub(crate) fn load_linear(
    vb: &VarBuilder,
    shape: LinearShape,
    load: impl FnOnce() -> Result<Linear>,
) -> Result<Linear> {
    let Some(current) = current(vb) else { return load() };
    let name = vb.prefix();
    if let Some(weights) = current.linear(&name, shape) {
        without_data(load)?;
        return Ok(Linear::from(Packed::from(weights)));
    }
    let linear = load()?;
    if let Some(packed) = linear.packed() {
        let parts = Part::ALL.into_iter().filter(|part| part.of(&packed.weights).is_some());
        current.remember(parts.map(|part| PackedArray {
            name: format!("{name}.{}", part.name()),
            data: Data::Linear(packed.clone(), part),
        }));
    }
    Ok(linear)
}

/// Loads an embedding table, like [`load_linear`].
pub(crate) fn load_table(
    vb: &VarBuilder,
    shape: [usize; 2],
    load: impl FnOnce() -> Result<Table>,
) -> Result<Table> {
    let Some(current) = current(vb) else { return load() };
    let name = format!("{}.table", vb.prefix());
    let stored = current.stored.get(&name).cloned();
    if let Some(table) = stored.and_then(|bytes| Table::shared(bytes, shape)) {
        without_data(load)?;
        return Ok(table);
    }
    let table = load()?;
    if table.is_storable() {
        current.remember([PackedArray { name, data: Data::Table(table.clone()) }]);
    }
    Ok(table)
}
