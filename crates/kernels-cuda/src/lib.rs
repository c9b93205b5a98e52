//! CUDA kernels of the transformer block, on candle's storage: what `cuda/*.cu` computes, with shapes
//! and strides checked before a launch. All sums are in f32, and what is stored is rounded once.
//!
//! nvcc makes PTX of them when this crate is built, since candle's `cuda` feature needs nvcc anyway;
//! a driver compiles that for its GPU when a kernel is first used. `scripts/cuda-check` runs the same
//! sources on a CPU, and with `tests` all that is built on them.

mod graph;
mod linear;

use std::sync::Arc;

use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Result, Shape,
    backend::BackendStorage,
    bail, builder_arg,
    cuda_backend::{
        CudaDType, WrapErr,
        cudarc::driver::{
            CudaSlice, CudaView, DeviceRepr, LaunchConfig, PushKernelArg,
            result::{device::get_default_mem_pool, mem_pool::set_attribute},
            sys::{
                CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            },
        },
    },
};
pub use graph::Graph;
use half::{bf16, f16};
pub use linear::{linear, takes_linear};

const ATTENTION: (&str, &str) =
    ("mha attention", include_str!(concat!(env!("OUT_DIR"), "/attention.ptx")));
const EPILOGUE: (&str, &str) =
    ("mha epilogue", include_str!(concat!(env!("OUT_DIR"), "/epilogue.ptx")));
const NORM: (&str, &str) = ("mha norm", include_str!(concat!(env!("OUT_DIR"), "/norm.ptx")));
const POOL: (&str, &str) = ("mha pool", include_str!(concat!(env!("OUT_DIR"), "/pool.ptx")));

/// Queries that a block of [`attention`] has.
pub const QUERIES: usize = 64;

/// Threads of a block.
const THREADS: u32 = 128;

/// The longest row that the norms take.
const LONGEST_ROW: usize = 1024;

/// Storage, and what of it a tensor is.
pub type Part<'a> = (&'a CudaStorage, &'a Layout);

/// A dtype of the kernels.
trait Number: CudaDType + DeviceRepr {
    const NAME: &'static str;
}

impl Number for f32 {
    const NAME: &'static str = "f32";
}

impl Number for f16 {
    const NAME: &'static str = "f16";
}

impl Number for bf16 {
    const NAME: &'static str = "bf16";
}

/// `$function::<T>($arguments)` for a storage's dtype.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            dtype => bail!("kernels take f32, f16 and bf16, got {dtype:?}"),
        }
    };
}

/// Whether a GPU is of the generation that the kernels are compiled for, or of a later one.
pub fn works_on(device: &CudaDevice) -> bool {
    let stream = device.cuda_stream();
    let major = stream.context().attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    major.is_ok_and(|major| major >= 8)
}

/// Has memory that is freed kept for the next batch, as much as the largest takes, and for this
/// process alone. CUDA would otherwise give it back whenever a batch is done, and ask for it anew.
///
/// # Errors
/// What the driver says.
pub fn keep_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(()); // and so no pool
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device is that of a context that is there, the pool its own, and the attribute a u64.
    unsafe {
        let pool = get_default_mem_pool(context.cu_device()).w()?;
        set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut threshold).cast()).w()
    }
}

/// Whether the norms take rows of such a length, and whether rows are whole pairs.
pub fn takes_rows(dtype: DType, e: usize) -> bool {
    takes_pairs(dtype, e) && e <= LONGEST_ROW
}

/// Whether rows are of a dtype that the kernels know, and whole pairs.
pub fn takes_pairs(dtype: DType, e: usize) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && e > 0 && e.is_multiple_of(2)
}

/// Whether [`attention`] takes heads `(1, H, N, D)` that lie so.
pub fn takes_heads(dtype: DType, layout: &Layout) -> bool {
    let (&[b, _, _, d], &[_, of_head, of_token, of_number]) = (layout.dims(), layout.stride())
    else {
        return false;
    };
    let eights = [layout.start_offset(), of_head, of_token].iter().all(|n| n.is_multiple_of(8));
    let known = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    b == 1 && matches!(d, 32 | 64) && of_number == 1 && eights && known
}

/// Where packed sequences begin and end, on a GPU: for each block of [`attention`] the first token of
/// its sequence, the sequence's end, and the first of its queries.
#[derive(Clone, Debug)]
pub struct Tiles {
    tiles: Arc<CudaSlice<u32>>,
    blocks: usize,
    tokens: usize,
}

impl Tiles {
    /// Of sequences that begin at `offsets`, the last of which is the number of tokens.
    ///
    /// # Errors
    /// Offsets that do not rise from 0; what the driver says.
    pub fn new(device: &CudaDevice, offsets: &[usize]) -> Result<Self> {
        if offsets.first() != Some(&0) || !offsets.is_sorted() {
            bail!("offsets of sequences do not rise from 0: {offsets:?}");
        }
        let tiles = tiles(offsets);
        let (blocks, tokens) = (tiles.len() / 3, offsets[offsets.len() - 1]);
        // An allocation of nothing is an error of some drivers.
        let tiles = if tiles.is_empty() { vec![0] } else { tiles };
        Ok(Self { tiles: Arc::new(device.clone_htod(&tiles)?), blocks, tokens })
    }
}

fn tiles(offsets: &[usize]) -> Vec<u32> {
    let sequences = offsets.windows(2).map(|w| (w[0], w[1]));
    let tiles = sequences.flat_map(|(begin, end)| {
        (begin..end).step_by(QUERIES).flat_map(move |query| [begin, end, query])
    });
    tiles.map(|n| n as u32).collect()
}

/// `softmax(q·kᵀ · scale) · v` of packed sequences, each attending to itself.
///
/// # Shapes
/// `q`: `(1, H, N, D)`; `k`, `v`: `(1, G, N, D)`, G a divisor of H, each as [`takes_heads`] wants it;
/// `tiles` of N tokens; returns `(1, N, H, D)`
/// # Errors
/// What does not fit; what the driver says.
pub fn attention(
    q: Part,
    k: Part,
    v: Part,
    tiles: &Tiles,
    scale: f32,
) -> Result<(CudaStorage, Shape)> {
    by_dtype!(q.0.dtype(), attention_of(q, k, v, tiles, scale))
}

fn attention_of<T: Number>(
    q: Part,
    k: Part,
    v: Part,
    tiles: &Tiles,
    scale: f32,
) -> Result<(CudaStorage, Shape)> {
    let dims = |(storage, layout): Part| match layout.dims() {
        &[1, heads, n, d] if takes_heads(storage.dtype(), layout) => Ok((heads, n, d)),
        dims => bail!("attention takes (1, H, N, 32 or 64) by eights, got {dims:?}"),
    };
    let (heads, n, d) = dims(q)?;
    let (groups, _, _) = dims(k)?;
    if dims(k)? != (groups, n, d) || dims(v)? != (groups, n, d) || heads % groups.max(1) != 0 {
        bail!("attention's k and v do not fit its q: {:?} {:?} {:?}", dims(q)?, dims(k)?, dims(v)?);
    }
    let device = q.0.device.clone();
    if tiles.tokens != n {
        bail!("attention of {n} tokens in sequences of {} tokens", tiles.tokens);
    }
    let blocks = tiles.blocks;
    // SAFETY: written by the kernel, every token of every sequence by the block that has it.
    let out = unsafe { device.alloc::<T>(n * heads * d)? };
    if blocks > 0 {
        let kernel = device.get_or_load_custom_func(
            &format!("attention_{}_{d}", T::NAME),
            ATTENTION.0,
            ATTENTION.1,
        )?;
        let strides = |(_, layout): Part| [layout.stride()[1] as i64, layout.stride()[2] as i64];
        let (q_numbers, k_numbers, v_numbers) =
            (from_start::<T>(q)?, from_start::<T>(k)?, from_start::<T>(v)?);
        let mut builder = kernel.builder();
        builder.arg(&q_numbers).arg(&k_numbers).arg(&v_numbers).arg(&out).arg(&*tiles.tiles);
        let [q_head, q_token] = strides(q);
        let [k_head, k_token] = strides(k);
        let [v_head, v_token] = strides(v);
        builder_arg!(builder, q_head, q_token, k_head, k_token, v_head, v_token);
        builder_arg!(builder, (heads / groups) as i32, scale);
        // SAFETY: the kernel's arguments in their order and types; tiles are of offsets up to n, and
        // q, k and v have n tokens where their strides say, as `dims` has checked.
        unsafe { builder.launch(grid(blocks, heads, THREADS)) }.w()?;
    }
    Ok((T::wrap_cuda_slice(out, device), (1, n, heads, d).into()))
}

/// `LayerNorm(x + y)`, or of x alone.
///
/// # Shapes
/// `x`, `y`: `(.., E)`, contiguous, E as [`takes_rows`] wants it; `weight`, `bias`: `(E,)`
/// # Errors
/// What does not fit; what the driver says.
pub fn add_layer_norm(
    x: Part,
    y: Option<Part>,
    weight: Part,
    bias: Part,
    eps: f32,
) -> Result<CudaStorage> {
    by_dtype!(x.0.dtype(), add_layer_norm_of(x, y, weight, bias, eps))
}

fn add_layer_norm_of<T: Number>(
    x: Part,
    y: Option<Part>,
    weight: Part,
    bias: Part,
    eps: f32,
) -> Result<CudaStorage> {
    let device = x.0.device.clone();
    let (n, e) = (x.1.shape().elem_count(), weight.1.shape().elem_count());
    let other = y.map_or(n, |(_, layout)| layout.shape().elem_count());
    if !takes_rows(x.0.dtype(), e) || !n.is_multiple_of(e) || other != n || bias.1.dims() != [e] {
        bail!("layer norm of {:?} by {:?} and {:?}", x.1.dims(), weight.1.dims(), bias.1.dims());
    }
    let (x, y) = (pairs::<T>(x)?, y.map(pairs::<T>).transpose()?);
    let (weight, bias) = (pairs::<T>(weight)?, pairs::<T>(bias)?);
    // SAFETY: written by the kernel, every row by a warp.
    let out = unsafe { device.alloc::<T>(n)? };
    if n > 0 {
        let name = format!("add_layer_norm_{}", T::NAME);
        let kernel = device.get_or_load_custom_func(&name, NORM.0, NORM.1)?;
        let mut builder = kernel.builder();
        builder.arg(&x);
        let none = 0u64;
        match &y {
            Some(y) => builder.arg(y),
            None => builder.arg(&none),
        };
        builder.arg(&weight).arg(&bias).arg(&out);
        builder_arg!(builder, (n / e) as i32, e as i32, eps);
        // SAFETY: the kernel's arguments in their order and types; n / e rows of e in x, y and out,
        // and e numbers in weight and bias, as checked above.
        unsafe { builder.launch(rows(n / e)) }.w()?;
    }
    Ok(T::wrap_cuda_slice(out, device))
}

/// `LayerNorm(words[i] + types[j] + positions[k])` for each token's three ids.
///
/// # Shapes
/// `ids`: three times N of u32, of which one beyond its table's rows gives NaN; `tables`: three times `(rows, E)`,
/// contiguous, E as [`takes_rows`] wants it; `weight`, `bias`: `(E,)`; returns `(N, E)`
/// # Errors
/// What does not fit; what the driver says.
pub fn embed_layer_norm(
    ids: [Part; 3],
    tables: [Part; 3],
    weight: Part,
    bias: Part,
    eps: f32,
) -> Result<CudaStorage> {
    by_dtype!(tables[0].0.dtype(), embed_layer_norm_of(ids, tables, weight, bias, eps))
}

fn embed_layer_norm_of<T: Number>(
    ids: [Part; 3],
    tables: [Part; 3],
    weight: Part,
    bias: Part,
    eps: f32,
) -> Result<CudaStorage> {
    let device = tables[0].0.device.clone();
    let e = weight.1.shape().elem_count();
    let n = ids[0].1.shape().elem_count();
    let same = ids.iter().all(|(_, layout)| layout.shape().elem_count() == n);
    let wide = tables.iter().all(|(_, layout)| layout.dims().get(1..) == Some(&[e]));
    if !takes_rows(tables[0].0.dtype(), e) || !same || !wide || bias.1.dims() != [e] {
        bail!("embeddings of other shapes: {n} ids, rows of {e}");
    }
    let table_rows = tables.map(|(_, layout)| layout.dims()[0] as u32);
    let [words, types, positions] = tables.map(pairs::<T>);
    let (words, types, positions) = (words?, types?, positions?);
    let [word_ids, type_ids, position_ids] = ids.map(contiguous::<u32>);
    let (word_ids, type_ids, position_ids) = (word_ids?, type_ids?, position_ids?);
    let (weight, bias) = (pairs::<T>(weight)?, pairs::<T>(bias)?);
    // SAFETY: written by the kernel, every row by a warp.
    let out = unsafe { device.alloc::<T>(n * e)? };
    if n > 0 {
        let name = format!("embed_layer_norm_{}", T::NAME);
        let kernel = device.get_or_load_custom_func(&name, NORM.0, NORM.1)?;
        let mut builder = kernel.builder();
        builder.arg(&word_ids).arg(&type_ids).arg(&position_ids);
        builder.arg(&words).arg(&types).arg(&positions);
        builder.arg(&weight).arg(&bias).arg(&out);
        builder_arg!(builder, n as i32, e as i32, eps);
        let [n_words, n_types, n_positions] = table_rows;
        builder_arg!(builder, n_words, n_types, n_positions);
        // SAFETY: the kernel's arguments in their order and types; n ids of each kind, tables of as
        // many rows of e as it is told, beyond which it reads nothing.
        unsafe { builder.launch(rows(n)) }.w()?;
    }
    Ok(T::wrap_cuda_slice(out, device))
}

/// `activation(y + bias)` in place.
///
/// # Shapes
/// `y`: `(.., E)`, contiguous, E even; `bias`: `(E,)`
/// # Units
/// `activation`: 0 none, 1 GELU by erf, 2 GELU by tanh, 3 ReLU, 4 SiLU, 5 tanh, 6 quick GELU, 7 Mish
/// # Errors
/// What does not fit; what the driver says.
pub fn epilogue(
    y: &mut CudaStorage,
    layout: &Layout,
    bias: Option<Part>,
    activation: i32,
) -> Result<()> {
    by_dtype!(y.dtype(), epilogue_of(y, layout, bias, activation))
}

fn epilogue_of<T: Number>(
    y: &mut CudaStorage,
    layout: &Layout,
    bias: Option<Part>,
    activation: i32,
) -> Result<()> {
    let device = y.device.clone();
    let e = layout.dims().last().copied().unwrap_or(0);
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("kernels take contiguous tensors, got {layout:?}");
    };
    if !takes_pairs(y.dtype(), e) || bias.is_some_and(|(_, bias)| bias.dims() != [e]) {
        bail!("an epilogue of rows of {e} that its bias does not fit");
    }
    if start == end {
        return Ok(());
    }
    let bias = bias.map(pairs::<T>).transpose()?;
    let kernel =
        device.get_or_load_custom_func(&format!("epilogue_{}", T::NAME), EPILOGUE.0, EPILOGUE.1)?;
    let pairs = (end - start) / 2;
    let mut numbers = y.as_cuda_slice_mut::<T>()?.slice_mut(start..end);
    let mut builder = kernel.builder();
    builder.arg(&mut numbers);
    let none = 0u64;
    match &bias {
        Some(bias) => builder.arg(bias),
        None => builder.arg(&none),
    };
    builder_arg!(builder, pairs as i64, e as i32, activation);
    let blocks = pairs.div_ceil(THREADS as usize);
    // SAFETY: the kernel's arguments in their order and types; `pairs` pairs in y, e numbers in bias.
    unsafe { builder.launch(grid(blocks, 1, THREADS)) }.w()?;
    Ok(())
}

/// The mean over the tokens of each packed sequence, in f32.
///
/// # Shapes
/// `hidden`: `(N, E)`, contiguous, E even; `offsets`: B + 1, which rise from 0 to N; returns `(B, E)`
/// # Errors
/// What does not fit; what the driver says.
pub fn mean_pool(hidden: Part, offsets: &[usize]) -> Result<(CudaStorage, Shape)> {
    by_dtype!(hidden.0.dtype(), mean_pool_of(hidden, offsets))
}

fn mean_pool_of<T: Number>(hidden: Part, offsets: &[usize]) -> Result<(CudaStorage, Shape)> {
    let device: CudaDevice = hidden.0.device.clone();
    let (n, e) = hidden.1.shape().dims2()?;
    let b = offsets.len().saturating_sub(1);
    let rise = offsets.first() == Some(&0) && offsets.is_sorted() && offsets.last() == Some(&n);
    if !takes_pairs(hidden.0.dtype(), e) || !rise {
        bail!("pooling of {n} rows of {e} in sequences at {offsets:?}");
    }
    let hidden = pairs::<T>(hidden)?;
    let offsets: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
    let offsets = device.clone_htod(&offsets)?;
    // SAFETY: written by the kernel, every pair of columns of a sequence by a thread.
    let out = unsafe { device.alloc::<f32>(b * e)? };
    if b > 0 {
        let name = format!("mean_pool_{}", T::NAME);
        let kernel = device.get_or_load_custom_func(&name, POOL.0, POOL.1)?;
        let mut builder = kernel.builder();
        builder.arg(&hidden).arg(&offsets).arg(&out);
        builder_arg!(builder, e as i32);
        let parts = (e / 2).div_ceil(THREADS as usize);
        // SAFETY: the kernel's arguments in their order and types; offsets rise to n.
        unsafe { builder.launch(grid(b, parts, THREADS)) }.w()?;
    }
    Ok((f32::wrap_cuda_slice(out, device), (b, e).into()))
}

/// `x / max(√Σx², 1e-12)` of each row.
///
/// # Shapes
/// `x`: `(B, E)`, f32, contiguous; returns the same
/// # Errors
/// What does not fit; what the driver says.
pub fn l2_normalize(x: Part) -> Result<(CudaStorage, Shape)> {
    let device = x.0.device.clone();
    let (b, e) = x.1.shape().dims2()?;
    let x = contiguous::<f32>(x)?;
    // SAFETY: written by the kernel, every row by a warp.
    let out = unsafe { device.alloc::<f32>(b * e)? };
    if b * e > 0 {
        let kernel = device.get_or_load_custom_func("l2_normalize", POOL.0, POOL.1)?;
        let mut builder = kernel.builder();
        builder.arg(&x).arg(&out);
        builder_arg!(builder, b as i32, e as i32);
        // SAFETY: the kernel's arguments in their order and types; b rows of e in x and out.
        unsafe { builder.launch(rows(b)) }.w()?;
    }
    Ok((f32::wrap_cuda_slice(out, device), (b, e).into()))
}

/// A tensor's numbers and whatever of the storage follows.
fn from_start<T: CudaDType>((storage, layout): Part<'_>) -> Result<CudaView<'_, T>> {
    Ok(T::as_cuda_slice(storage)?.slice(layout.start_offset()..))
}

/// A tensor's numbers, one after another.
fn contiguous<T: CudaDType>((storage, layout): Part<'_>) -> Result<CudaView<'_, T>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(T::as_cuda_slice(storage)?.slice(start..end)),
        None => bail!("kernels take contiguous tensors, got {layout:?}"),
    }
}

/// [`contiguous`], of which the kernels read two at a time.
fn pairs<T: CudaDType>((storage, layout): Part<'_>) -> Result<CudaView<'_, T>> {
    if !layout.start_offset().is_multiple_of(2) {
        bail!("kernels take pairs, got {layout:?}");
    }
    contiguous((storage, layout))
}

fn grid(x: usize, y: usize, threads: u32) -> LaunchConfig {
    let (grid_dim, block_dim) = ((x as u32, y as u32, 1), (threads, 1, 1));
    LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 }
}

/// A warp a row.
fn rows(n: usize) -> LaunchConfig {
    grid(n.div_ceil(THREADS as usize / 32), 1, THREADS)
}
