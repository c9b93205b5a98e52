//! Linear maps by cublasLt, which adds the bias before it stores the product, and can store f32
//! results of f16 and bf16 products.

use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
    ffi::c_void,
    sync::Arc,
};

use candle_core::{
    CudaDevice, CudaStorage, DType, Error, Layout, Result, Shape,
    backend::BackendStorage,
    bail,
    cuda_backend::{
        DeviceId, WrapErr,
        cudarc::{
            cublaslt::{
                result::{self as lt, CublasError},
                sys::{
                    cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS,
                    cublasLtHandle_t, cublasLtMatmulAlgo_t,
                    cublasLtMatmulDescAttributes_t::{
                        self, CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE,
                        CUBLASLT_MATMUL_DESC_TRANSA,
                    },
                    cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F},
                    cudaStream_t,
                },
            },
            driver::{CudaSlice, DevicePtr, DevicePtrMut},
        },
    },
};
use half::{bf16, f16};

use crate::{Element, TensorView, pairs};

/// The alignment in bytes that cublasLt assumes for tensors.
const ALIGNMENT: usize = 256;

/// Size of cublasLt's workspace in bytes: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Maximum number of devices with state per thread.
const MAX_DEVICES: usize = 8;

/// Maximum number of products whose algorithm is cached per device.
const MAX_ALGORITHMS: usize = 4096;

thread_local! {
    /// cublasLt's state for each device. It is per thread, since each thread has its own stream of
    /// a device.
    static STATES: RefCell<HashMap<DeviceId, CublasLt>> = RefCell::default();
}

/// Whether [`linear`] supports these tensors. They must be f16 or bf16, contiguous, aligned to
/// 256 bytes, and have rows of a multiple of 8 elements.
pub fn supports_linear(dtype: DType, x: &Layout, weight: &Layout) -> bool {
    let fits = |layout: &Layout| {
        layout.is_contiguous()
            && (layout.start_offset() * dtype.size_in_bytes()).is_multiple_of(ALIGNMENT)
            && layout.dims().last().is_some_and(|n| n.is_multiple_of(8)) // for the tensor cores
    };
    matches!(dtype, DType::F16 | DType::BF16) && fits(x) && fits(weight)
}

/// `x·Wᵀ`, or `x·Wᵀ + b`, with output in f32 or in the dtype of x.
///
/// # Shapes
/// `x`: `(.., in)`; `weight`: `(out, in)`, both accepted by [`supports_linear`]; `bias`: `(out,)`,
/// of dtype `to`, contiguous, with an even start offset; returns `(.., out)` of dtype `to`
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if cublasLt or the driver reports an
/// error.
pub fn linear(
    x: TensorView,
    weight: TensorView,
    bias: Option<TensorView>,
    to: DType,
) -> Result<(CudaStorage, Shape)> {
    match (x.0.dtype(), to) {
        (DType::F16, DType::F16) => linear_typed::<f16, f16>(x, weight, bias, to),
        (DType::F16, DType::F32) => linear_typed::<f16, f32>(x, weight, bias, to),
        (DType::BF16, DType::BF16) => linear_typed::<bf16, bf16>(x, weight, bias, to),
        (DType::BF16, DType::F32) => linear_typed::<bf16, f32>(x, weight, bias, to),
        (x, to) => bail!(
            "linear map: expected f16 or bf16 inputs, and an output in f32 or in the dtype of the \
             inputs; got {x:?} with output {to:?}"
        ),
    }
}

fn linear_typed<T: Element, Y: Element>(
    x: TensorView,
    weight: TensorView,
    bias: Option<TensorView>,
    to: DType,
) -> Result<(CudaStorage, Shape)> {
    let (from, (out, input)) = (x.0.dtype(), weight.1.shape().dims2()?);
    let mut dims = x.1.dims().to_vec();
    let bias_fits = |bias: TensorView| bias.1.dims() == [out];
    let fit = bias.is_none_or(bias_fits) && dims.last() == Some(&input);
    if !fit || !supports_linear(from, x.1, weight.1) {
        bail!(
            "linear map: expected contiguous x (.., in) and weight (out, in), aligned to \
             {ALIGNMENT} bytes, where in is a multiple of 8, and a bias (out,); got x {:?}, \
             weight {:?}, bias {:?}",
            x.1,
            weight.1,
            bias.map(|bias| bias.1.dims())
        );
    }
    let last = dims.len() - 1;
    dims[last] = out;
    let rows = dims[..last].iter().product::<usize>();
    let device = x.0.device.clone();
    // SAFETY: cublasLt writes every element.
    let mut y = unsafe { device.alloc::<Y>(rows * out)? };
    if rows > 0 {
        let stream = device.cuda_stream();
        let (x, weight) = (pairs::<T>(x)?, pairs::<T>(weight)?);
        let bias = bias.map(pairs::<Y>).transpose()?;
        // Each `device_ptr` returns a guard. Dropping the guard records an event after this use of
        // the tensor; other streams wait for this event.
        let bias = bias.as_ref().map(|bias| bias.device_ptr(&stream));
        let (x, weight, y) =
            (x.device_ptr(&stream), weight.device_ptr(&stream), y.device_ptr_mut(&stream));
        let product = Product { rows, input, out, from, to, bias: bias.is_some() };
        let bias = bias.as_ref().map_or(0, |bias| bias.0);
        STATES.with_borrow_mut(|states| {
            if states.len() == MAX_DEVICES && !states.contains_key(&device.id()) {
                states.clear(); // also drops the state of devices that no longer exist
            }
            let cublas_lt = match states.entry(device.id()) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(CublasLt::new(&device)?),
            };
            // SAFETY: as checked above, the tensors have the dtypes and shapes of `product`.
            unsafe { cublas_lt.run(&device, product, [x.0, weight.0, bias, y.0]) }
        })?;
    }
    Ok((Y::wrap_cuda_slice(y, device), dims.into()))
}

/// This thread's cublasLt workspace on `device`, if the thread has computed a product on `device`.
pub(crate) fn workspace(device: &CudaDevice) -> Option<Arc<CudaSlice<u8>>> {
    STATES.with_borrow(|states| Some(states.get(&device.id())?.workspace.clone()))
}

/// The sizes and dtypes of a product, which determine the algorithm that cublasLt recommends.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Product {
    rows: usize,
    input: usize,
    out: usize,
    from: DType,
    to: DType,
    bias: bool,
}

struct CublasLt {
    handle: cublasLtHandle_t,
    workspace: Arc<CudaSlice<u8>>,
    algorithms: HashMap<Product, cublasLtMatmulAlgo_t>,
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: `create_handle` returned the handle, and only this struct owns it.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

impl CublasLt {
    fn new(device: &CudaDevice) -> Result<Self> {
        // SAFETY: only cublasLt uses the workspace, and it reads only bytes that it has written.
        let workspace = Arc::new(unsafe { device.alloc(WORKSPACE)? });
        let handle = lt::create_handle().map_err(Error::wrap)?;
        Ok(Self { handle, workspace, algorithms: HashMap::new() })
    }

    /// # Safety
    /// `pointers` are those of x, weight, bias (unused if `product.bias` is false) and y. They must
    /// point to memory of this device with the dtypes and sizes of `product`.
    unsafe fn run(
        &mut self,
        device: &CudaDevice,
        product: Product,
        pointers: [u64; 4],
    ) -> Result<()> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let (workspace, _in_use) = self.workspace.device_ptr(&stream);
        // SAFETY: the caller guarantees the pointers. The workspace has `WORKSPACE` bytes and is
        // used in this thread's stream only.
        let result = unsafe {
            run(
                self.handle,
                &mut self.algorithms,
                product,
                pointers,
                workspace,
                stream.cu_stream().cast(),
            )
        };
        result.map_err(Error::wrap)
    }
}

/// # Safety
/// The conditions of [`CublasLt::run`]. `workspace` must point to [`WORKSPACE`] bytes that are used
/// in `stream` only.
unsafe fn run(
    handle: cublasLtHandle_t,
    algorithms: &mut HashMap<Product, cublasLtMatmulAlgo_t>,
    product: Product,
    [x, weight, bias, y]: [u64; 4],
    workspace: u64,
    stream: cudaStream_t,
) -> std::result::Result<(), CublasError> {
    let Product { rows, input, out, from, to, bias: has_bias } = product;
    // cublasLt's matrices are column-major: y is (out, rows), x is (in, rows), and W is transposed.
    let layout = |dtype, rows: usize, columns: usize| {
        let kind = match dtype {
            DType::F16 => CUDA_R_16F,
            DType::BF16 => CUDA_R_16BF,
            _ => CUDA_R_32F,
        };
        lt::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
            .map(|layout| Owned(layout, lt::destroy_matrix_layout))
    };
    let (weight_layout, x_layout, y_layout) =
        (layout(from, input, out)?, layout(from, input, rows)?, layout(to, out, rows)?);
    let description =
        Owned(lt::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F)?, lt::destroy_matmul_desc);
    let set = |attribute: cublasLtMatmulDescAttributes_t, value: &dyn AsRef<[u8]>| {
        let bytes = value.as_ref();
        // SAFETY: the pointer and the length are those of `bytes`, a value of the attribute's type.
        unsafe {
            lt::set_matmul_desc_attribute(
                description.0,
                attribute,
                bytes.as_ptr().cast(),
                bytes.len(),
            )
        }
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, &1i32.to_ne_bytes())?;
    if has_bias {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, &(CUBLASLT_EPILOGUE_BIAS as u32).to_ne_bytes())?;
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.to_ne_bytes())?;
    }
    // SAFETY: the descriptors live until the end of this function. The caller guarantees the
    // pointers.
    unsafe {
        let algorithm = match algorithms.get(&product) {
            Some(algorithm) => *algorithm,
            None => {
                let max_workspace = WORKSPACE;
                let preference = Owned(lt::create_matmul_pref()?, lt::destroy_matmul_pref);
                lt::set_matmul_pref_attribute(
                    preference.0,
                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const max_workspace).cast(),
                    size_of_val(&max_workspace),
                )?;
                let found = lt::get_matmul_algo_heuristic(
                    handle,
                    description.0,
                    weight_layout.0,
                    x_layout.0,
                    y_layout.0,
                    y_layout.0,
                    preference.0,
                )?;
                if algorithms.len() == MAX_ALGORITHMS {
                    algorithms.clear();
                }
                algorithms.insert(product, found.algo);
                found.algo
            }
        };
        let (alpha, beta) = (1f32, 0f32);
        lt::matmul(
            handle,
            description.0,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            weight as *const c_void,
            weight_layout.0,
            x as *const c_void,
            x_layout.0,
            y as *const c_void,
            y_layout.0,
            y as *mut c_void,
            y_layout.0,
            &raw const algorithm,
            workspace as *mut c_void,
            WORKSPACE,
            stream,
        )
    }
}

/// A cublasLt object with the function that destroys it, which is called on drop.
struct Owned<H: Copy>(H, unsafe fn(H) -> std::result::Result<(), CublasError>);

impl<H: Copy> Drop for Owned<H> {
    fn drop(&mut self) {
        // SAFETY: the object was created by the caller, and only this struct owns it.
        let _ = unsafe { (self.1)(self.0) };
    }
}
