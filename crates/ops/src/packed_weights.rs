//! Weights in the layout of the CPU kernels, for storage. A model can be loaded from stored weights
//! without reading and packing the weights of its checkpoint.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt::Debug,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
};

use candle_nn::VarBuilder;
use mha_kernels::SharedBytes;

use crate::Result;

/// The arrays of packed linear maps and embedding tables, by the names of their modules in a
/// [`VarBuilder`].
///
/// Within [`Self::scope`], [`Linear::load`](crate::Linear::load) and
/// [`Table::load`](crate::Table::load) use the [`stored`](Self::stored()) arrays of a module if
/// these exist and fit. Otherwise they pack the module's tensors, and [`Self::packed()`] returns the
/// arrays. In both cases they request the tensors from the [`VarBuilder`], so that its backend can
/// check names and shapes; if [`skips_data`] is true, the backend may return placeholders.
#[derive(Debug, Default)]
pub struct PackedWeights {
    stored: BTreeMap<String, SharedBytes>,
    packed: Mutex<BTreeMap<String, Arc<dyn PackedArray>>>,
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
    /// Packed weights with these arrays. The name of an array is the name of its module, a dot and
    /// the name of its part, such as `encoder.layer.0.output.panels`.
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
    pub fn packed(&self) -> BTreeMap<String, Arc<dyn PackedArray>> {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
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

/// Loads a module. If the current scope has the arrays from which `from_stored` builds the module,
/// `load` only requests the tensors, so that their names and shapes are checked. Otherwise the
/// module is the result of `load`, and its `arrays` are remembered.
pub(crate) fn load<M>(
    vb: &VarBuilder,
    from_stored: impl FnOnce(&dyn Fn(&str) -> Option<SharedBytes>) -> Option<M>,
    load: impl FnOnce() -> Result<M>,
    arrays: impl FnOnce(&M) -> Vec<(&'static str, Arc<dyn PackedArray>)>,
) -> Result<M> {
    let Some(current) = current(vb) else { return load() };
    let name = |part: &str| format!("{}.{part}", vb.prefix());
    if let Some(module) = from_stored(&|part| current.stored.get(&name(part)).cloned()) {
        without_data(load)?;
        return Ok(module);
    }
    let module = load()?;
    let arrays = arrays(&module).into_iter().map(|(part, array)| (name(part), array));
    current.packed.lock().unwrap_or_else(PoisonError::into_inner).extend(arrays);
    Ok(module)
}
