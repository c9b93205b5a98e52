//! Linear maps by cublasLt, which adds the bias to what it still has in registers, and stores f32 as
//! readily as the 16 bits that it multiplies.

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

use crate::{Number, Part, pairs};

/// What cublasLt takes a tensor's first byte to be a multiple of.
const ALIGNMENT: usize = 256;

/// What cublasLt may use beside, in bytes: as NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

/// How many devices a thread remembers.
const DEVICES: usize = 8;

/// How many shapes' best kernels are kept.
const SHAPES: usize = 4096;

thread_local! {
    /// For each device, since a device's stream is another in each thread.
    static OF_DEVICES: RefCell<HashMap<DeviceId, CublasLt>> = RefCell::default();
}

/// Whether [`linear`] takes tensors that lie so: of 16 bits, since cublasLt multiplies f32 as TF32.
pub fn takes_linear(dtype: DType, x: &Layout, weight: &Layout) -> bool {
    let fits = |layout: &Layout| {
        layout.is_contiguous()
            && (layout.start_offset() * dtype.size_in_bytes()).is_multiple_of(ALIGNMENT)
            && layout.dims().last().is_some_and(|n| n.is_multiple_of(8)) // for the tensor cores
    };
    matches!(dtype, DType::F16 | DType::BF16) && fits(x) && fits(weight)
}

/// `x·Wᵀ`, or `x·Wᵀ + b`, in f32 or in the dtype of x.
///
/// # Shapes
/// `x`: `(.., in)`; `weight`: `(out, in)`, both as [`takes_linear`] wants them; `bias`: `(out,)`, of
/// dtype `to`, contiguous; returns `(.., out)`
/// # Errors
/// What does not fit; what cublasLt and the driver say.
pub fn linear(
    x: Part,
    weight: Part,
    bias: Option<Part>,
    to: DType,
) -> Result<(CudaStorage, Shape)> {
    match (x.0.dtype(), to) {
        (DType::F16, DType::F16) => linear_of::<f16, f16>(x, weight, bias, to),
        (DType::F16, DType::F32) => linear_of::<f16, f32>(x, weight, bias, to),
        (DType::BF16, DType::BF16) => linear_of::<bf16, bf16>(x, weight, bias, to),
        (DType::BF16, DType::F32) => linear_of::<bf16, f32>(x, weight, bias, to),
        (x, to) => bail!("cublasLt's linear maps are of f16 and bf16, got {x:?} to {to:?}"),
    }
}

fn linear_of<T: Number, Y: Number>(
    x: Part,
    weight: Part,
    bias: Option<Part>,
    to: DType,
) -> Result<(CudaStorage, Shape)> {
    let (of, (out, input)) = (x.0.dtype(), weight.1.shape().dims2()?);
    let mut dims = x.1.dims().to_vec();
    let one = |bias: Part| bias.1.dims() == [out];
    let fit = bias.is_none_or(one) && dims.last() == Some(&input);
    if !fit || !takes_linear(of, x.1, weight.1) {
        bail!("a linear map of {:?} of {dims:?}", weight.1.dims());
    }
    let width = dims.len() - 1;
    dims[width] = out;
    let rows = dims[..width].iter().product::<usize>();
    let device = x.0.device.clone();
    // SAFETY: written by the product, all of it.
    let mut y = unsafe { device.alloc::<Y>(rows * out)? };
    if rows > 0 {
        let stream = device.cuda_stream();
        let (x, weight) = (pairs::<T>(x)?, pairs::<T>(weight)?);
        let bias = bias.map(pairs::<Y>).transpose()?;
        // Each is synchronised when its second half is dropped.
        let bias = bias.as_ref().map(|bias| bias.device_ptr(&stream));
        let (x, weight, y) =
            (x.device_ptr(&stream), weight.device_ptr(&stream), y.device_ptr_mut(&stream));
        let product = Product { rows, input, out, of, to, bias: bias.is_some() };
        let bias = bias.as_ref().map_or(0, |bias| bias.0);
        OF_DEVICES.with_borrow_mut(|of_devices| {
            if of_devices.len() == DEVICES && !of_devices.contains_key(&device.id()) {
                of_devices.clear(); // of those that are gone, too
            }
            let cublas_lt = match of_devices.entry(device.id()) {
                Entry::Occupied(there) => there.into_mut(),
                Entry::Vacant(free) => free.insert(CublasLt::new(&device)?),
            };
            // SAFETY: numbers of the product's dtypes, as many as its shape tells, as checked above.
            unsafe { cublas_lt.run(&device, product, [x.0, weight.0, bias, y.0]) }
        })?;
    }
    Ok((Y::wrap_cuda_slice(y, device), dims.into()))
}

/// What this thread's products on a device work with, if there were any.
pub(crate) fn workspace(device: &CudaDevice) -> Option<Arc<CudaSlice<u8>>> {
    OF_DEVICES.with_borrow(|of_devices| Some(of_devices.get(&device.id())?.workspace.clone()))
}

/// What tells which of cublasLt's kernels is the best.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Product {
    rows: usize,
    input: usize,
    out: usize,
    of: DType,
    to: DType,
    bias: bool,
}

struct CublasLt {
    handle: cublasLtHandle_t,
    workspace: Arc<CudaSlice<u8>>,
    best: HashMap<Product, cublasLtMatmulAlgo_t>,
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: it is of `create_handle`, and nobody else's.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

impl CublasLt {
    fn new(device: &CudaDevice) -> Result<Self> {
        // SAFETY: only cublasLt reads it, and only what it has written.
        let workspace = Arc::new(unsafe { device.alloc(WORKSPACE)? });
        let handle = lt::create_handle().map_err(Error::wrap)?;
        Ok(Self { handle, workspace, best: HashMap::new() })
    }

    /// # Safety
    /// `pointers`, to x, weight, bias if there is one, and y, are of this device, and of the product's
    /// dtypes and sizes.
    unsafe fn run(
        &mut self,
        device: &CudaDevice,
        product: Product,
        pointers: [u64; 4],
    ) -> Result<()> {
        let stream = device.cuda_stream();
        stream.context().bind_to_thread().w()?;
        let (workspace, _in_use) = self.workspace.device_ptr(&stream);
        // SAFETY: the caller's word; the workspace is as long as it is told, and used in this stream.
        let done = unsafe {
            run(
                self.handle,
                &mut self.best,
                product,
                pointers,
                workspace,
                stream.cu_stream().cast(),
            )
        };
        done.map_err(Error::wrap)
    }
}

/// # Safety
/// As [`CublasLt::run`]'s; [`WORKSPACE`] bytes at `workspace` that nothing else uses in this stream.
unsafe fn run(
    handle: cublasLtHandle_t,
    best: &mut HashMap<Product, cublasLtMatmulAlgo_t>,
    product: Product,
    [x, weight, bias, y]: [u64; 4],
    workspace: u64,
    stream: cudaStream_t,
) -> std::result::Result<(), CublasError> {
    let Product { rows, input, out, of, to, bias: biased } = product;
    // Column by column, as cublasLt reads: y is (out, rows), x (in, rows), and W transposed.
    let layout = |dtype, rows: usize, columns: usize| {
        let kind = match dtype {
            DType::F16 => CUDA_R_16F,
            DType::BF16 => CUDA_R_16BF,
            _ => CUDA_R_32F,
        };
        lt::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
            .map(|layout| Owned(layout, lt::destroy_matrix_layout))
    };
    let (of_weight, of_x, of_y) =
        (layout(of, input, out)?, layout(of, input, rows)?, layout(to, out, rows)?);
    let how =
        Owned(lt::create_matmul_desc(CUBLAS_COMPUTE_32F, CUDA_R_32F)?, lt::destroy_matmul_desc);
    let set = |attribute: cublasLtMatmulDescAttributes_t, value: &dyn AsRef<[u8]>| {
        let bytes = value.as_ref();
        // SAFETY: as many bytes as it is told, of the attribute's type.
        unsafe {
            lt::set_matmul_desc_attribute(how.0, attribute, bytes.as_ptr().cast(), bytes.len())
        }
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, &1i32.to_ne_bytes())?;
    if biased {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, &(CUBLASLT_EPILOGUE_BIAS as u32).to_ne_bytes())?;
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.to_ne_bytes())?;
    }
    // SAFETY: all of these are there until the end of this function; the caller's word for the rest.
    unsafe {
        let algorithm = match best.get(&product) {
            Some(algorithm) => *algorithm,
            None => {
                let most = WORKSPACE;
                let wish = Owned(lt::create_matmul_pref()?, lt::destroy_matmul_pref);
                lt::set_matmul_pref_attribute(
                    wish.0,
                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const most).cast(),
                    size_of_val(&most),
                )?;
                let found = lt::get_matmul_algo_heuristic(
                    handle,
                    how.0,
                    of_weight.0,
                    of_x.0,
                    of_y.0,
                    of_y.0,
                    wish.0,
                )?;
                if best.len() == SHAPES {
                    best.clear();
                }
                best.insert(product, found.algo);
                found.algo
            }
        };
        let (alpha, beta) = (1f32, 0f32);
        lt::matmul(
            handle,
            how.0,
            (&raw const alpha).cast(),
            (&raw const beta).cast(),
            weight as *const c_void,
            of_weight.0,
            x as *const c_void,
            of_x.0,
            y as *const c_void,
            of_y.0,
            y as *mut c_void,
            of_y.0,
            &raw const algorithm,
            workspace as *mut c_void,
            WORKSPACE,
            stream,
        )
    }
}

/// What is destroyed when it is dropped.
struct Owned<H: Copy>(H, unsafe fn(H) -> std::result::Result<(), CublasError>);

impl<H: Copy> Drop for Owned<H> {
    fn drop(&mut self) {
        // SAFETY: it was created just before, and is nobody else's.
        let _ = unsafe { (self.1)(self.0) };
    }
}
