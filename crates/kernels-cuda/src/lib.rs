//! CUDA kernels of the transformer block for candle's tensors.
//!
//! The kernels are in `cuda/*.cu`. The functions here check shapes and strides and launch the
//! kernels. All sums are in f32, and results are rounded when they are stored. `attention` in f16
//! and bf16 also rounds the softmax weights, since the tensor cores multiply 16-bit types.
//!
//! The build script compiles the kernels with nvcc to machine code for each architecture, and to PTX
//! for later ones. The script `scripts/cuda-check` runs the kernels on a CPU. With the
//! argument `tests`, it also runs the Rust code that calls the kernels.
//!
//! Without the feature `cuda`, the crate is empty.
#![cfg(feature = "cuda")]

mod graph;
mod linear;
mod module;

use std::{ops::Range, sync::Arc};

use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Result, Shape,
    backend::{BackendDevice, BackendStorage},
    bail, builder_arg,
    cuda_backend::{
        CudaDType, WrapErr,
        cudarc::driver::{
            CudaSlice, CudaView, DeviceRepr, LaunchConfig, PushKernelArg,
            result::{device::get_default_mem_pool, mem_pool::set_attribute},
            sys::{
                CUdevice_attribute_enum::{
                    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                },
                CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            },
        },
    },
};
pub use graph::Graph;
use half::{bf16, f16};
pub use linear::{linear, supports_linear};
use module::Module;

/// The module that the build script compiles from a file in `cuda/`.
macro_rules! module {
    ($name:literal) => {
        Module::new(include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")))
    };
}

static ATTENTION: Module = module!("attention");
static ATTENTION_BAND: Module = module!("attention_band");
static ATTENTION_BIAS: Module = module!("attention_bias");
static ATTENTION_RELATIVE: Module = module!("attention_relative");
static EPILOGUE: Module = module!("epilogue");
static NORM: Module = module!("norm");
static POOL: Module = module!("pool");
static ROTARY: Module = module!("rotary");

/// Queries per tile of [`attention`], as in `cuda/attention.cuh`.
const QUERIES: usize = 64;

/// Minimum number of thread blocks of two tiles. With fewer, blocks of one tile use more of the
/// GPU's multiprocessors: an H100 has 132, and runs two blocks of two tiles on each.
const MIN_PAIRS: usize = 256;

/// Maximum number of keys of [`attention`], whose indices are i32.
const MAX_TOKENS: usize = 1 << 29;

/// Threads per thread block, as in `cuda/attention.cuh`.
const THREADS: u32 = 128;

/// Maximum width of a head of [`attention`].
const MAX_HEAD: usize = 128;

/// Maximum row length of the layer norm kernels with one warp per row, as in `cuda/norm.cu`.
const MAX_ROW: usize = 1024;

/// A tensor on a GPU: its storage and its layout.
pub type TensorView<'a> = (&'a CudaStorage, &'a Layout);

/// An element type of the kernels, and its name in kernel names.
trait Element: CudaDType + DeviceRepr {
    const NAME: &'static str;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
}

impl Element for f16 {
    const NAME: &'static str = "f16";
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";
}

/// Calls `$function::<T>($arguments)` for the element type T of `$dtype`.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            dtype => bail!("CUDA kernels need f32, f16 or bf16, got {dtype:?}"),
        }
    };
}

/// Passes operands to a kernel: for each, the address of its elements, or the null pointer `$none` in
/// place of an operand that is `None`.
macro_rules! optional_arg {
    ($builder:ident, $none:ident, $($operand:expr),+) => {{
        $(match $operand {
            Some(operand) => $builder.arg(operand),
            None => $builder.arg(&$none),
        };)+
    }};
}

/// Whether the kernels support this GPU: they need compute capability 8.0 or higher.
pub fn supports_device(device: &CudaDevice) -> bool {
    check_device(device).is_ok()
}

/// Checks that the kernels support this GPU.
///
/// # Errors
/// candle's error if its compute capability is below 8.0, or if the driver reports an error.
pub fn check_device(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let attribute = |attribute| stream.context().attribute(attribute).w();
    let major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if major < 8 {
        bail!("the GPU has compute capability {major}.{minor}: expected 8.0 (Ampere) or later");
    }
    Ok(())
}

/// Makes CUDA keep freed memory for later allocations of this process. By default CUDA returns
/// freed memory to the system at each synchronisation, and the next batch allocates it again.
///
/// # Errors
/// candle's error if the driver reports one.
pub fn keep_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(()); // there is no memory pool
    }
    let mut threshold = u64::MAX;
    // SAFETY: the device is that of a live context, the pool belongs to the device, and the
    // attribute is a u64.
    unsafe {
        let pool = get_default_mem_pool(context.cu_device()).w()?;
        set_attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut threshold).cast()).w()
    }
}

/// Whether the kernels support this dtype and rows of `e` elements. The number must be even, since
/// the kernels read elements in pairs.
pub fn supports_even_rows(dtype: DType, e: usize) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16) && e > 0 && e.is_multiple_of(2)
}

/// Whether [`attention`] supports heads `(1, H, N, D)` of this dtype and layout: f32, f16 or bf16;
/// D is a multiple of 8 from 8 to 128 with stride 1, and every row starts at a multiple of 8
/// elements.
pub fn supports_heads(dtype: DType, layout: &Layout) -> bool {
    let (&[b, _, _, d], &[_, head_stride, token_stride, stride]) = (layout.dims(), layout.stride())
    else {
        return false;
    };
    let starts = [layout.start_offset(), head_stride, token_stride];
    let are_aligned = starts.iter().all(|n| n.is_multiple_of(8));
    let is_supported = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let has_width = d.is_multiple_of(8) && (8..=MAX_HEAD).contains(&d);
    let is_small = i32::try_from(token_stride).is_ok();
    b == 1 && has_width && stride == 1 && are_aligned && is_small && is_supported
}

/// Queries of a ragged sequence, and the keys of the sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// The indices of the queries among those of all sequences.
    pub queries: Range<usize>,
    /// The indices of the keys among those of all sequences.
    pub keys: Range<usize>,
    /// The position of the first query, counted from the first key.
    pub first_query: usize,
}

/// The ragged sequences of a batch in the form that the [`attention`] kernel expects, on a GPU: for
/// each tile of up to 64 queries, the queries and the keys of its sequence as ranges, the tile's
/// first query, and the position of the sequence's first query.
#[derive(Clone, Debug)]
pub struct Tiles {
    tiles: Arc<CudaSlice<u32>>,
    device: CudaDevice,
    count: usize,
    queries: usize,
    keys: usize,
    /// The result of [`mostly_pairs`] for the sequences.
    mostly_pairs: bool,
}

impl Tiles {
    /// The tiles of ragged sequences, whose queries follow each other.
    ///
    /// # Errors
    /// candle's error if the queries do not start at 0, if those of a sequence do not start at the
    /// end of those before, if there are more than 2²⁹ queries, keys or positions, or if the driver
    /// reports an error.
    pub fn new(device: &CudaDevice, sequences: &[Sequence]) -> Result<Self> {
        let (mut queries, mut keys) = (0, 0);
        for (i, sequence) in sequences.iter().enumerate() {
            if sequence.queries.start != queries || sequence.queries.end < queries {
                let got = &sequence.queries;
                bail!("the queries of sequence {i} are {got:?}: expected a start at {queries}");
            }
            let end = sequence.queries.len().saturating_add(sequence.first_query);
            if end > MAX_TOKENS {
                bail!("the queries of sequence {i} end at {end}: expected at most {MAX_TOKENS}");
            }
            (queries, keys) = (sequence.queries.end, keys.max(sequence.keys.end));
        }
        if keys.max(queries) > MAX_TOKENS {
            bail!("{queries} queries and {keys} keys: expected at most {MAX_TOKENS}");
        }
        let tiles = tiles(sequences);
        let count = tiles.len() / TILE;
        let mostly_pairs = mostly_pairs(sequences, count);
        // Some drivers refuse an allocation of 0 bytes.
        let tiles = if tiles.is_empty() { vec![0] } else { tiles };
        let (tiles, device) = (Arc::new(device.clone_htod(&tiles)?), device.clone());
        Ok(Self { tiles, device, count, queries, keys, mostly_pairs })
    }

    /// Whether the tiles are on this device.
    pub fn are_on(&self, device: &CudaDevice) -> bool {
        self.device.same_device(device)
    }
}

/// Checks that the first offset is 0 and that no offset is smaller than its predecessor.
fn check_offsets(offsets: &[usize]) -> Result<()> {
    match offsets {
        [] => bail!("offsets is empty: expected at least one offset"),
        [0, ..] => {}
        [first, ..] => bail!("offsets[0] is {first}: expected 0"),
    }
    if let Some(i) = offsets.windows(2).position(|w| w[1] < w[0]) {
        bail!(
            "offsets[{}] is {}: expected at least {}, its predecessor",
            i + 1,
            offsets[i + 1],
            offsets[i]
        );
    }
    Ok(())
}

/// The number of values of a tile.
const TILE: usize = 6;

fn tiles(sequences: &[Sequence]) -> Vec<u32> {
    let tiles = sequences.iter().flat_map(|Sequence { queries, keys, first_query }| {
        let firsts = queries.clone().step_by(QUERIES);
        firsts.flat_map(move |first| {
            [queries.start, queries.end, first, *first_query, keys.start, keys.end]
        })
    });
    tiles.map(|n| n as u32).collect()
}

/// Whether at most `tiles / 4` thread blocks have only one tile if the tiles of each sequence are
/// divided into blocks of two. `tiles` is the number of tiles of all sequences.
fn mostly_pairs(sequences: &[Sequence], tiles: usize) -> bool {
    let blocks: usize = sequences.iter().map(|x| x.queries.len().div_ceil(2 * QUERIES)).sum();
    4 * (2 * blocks - tiles) <= tiles
}

/// Which keys of its sequence a query sees, and the biases of their scores. The distance of a key
/// is its position minus that of the query. The default shows all keys.
#[derive(Clone, Copy, Default)]
pub struct Positions<'a> {
    /// If set, a query sees only the keys at a distance of at least `-before`.
    pub before: Option<usize>,
    /// If set, a query sees only the keys at a distance of at most `after`.
    pub after: Option<usize>,
    /// `(H, 2·R + 1)` in f32, contiguous: column `R + d` is added to the scaled score of a key at
    /// the distance d. A bias of −∞ hides the key. No visible key is farther than R.
    pub bias: Option<TensorView<'a>>,
}

/// The relative position of each distance from −R to R, on a GPU, for [`Relative`].
#[derive(Clone, Debug)]
pub struct RelativeRows {
    rows: Arc<CudaSlice<u32>>,
    device: CudaDevice,
    max: u32,
}

impl RelativeRows {
    /// Copies 2·R + 1 numbers to a GPU.
    ///
    /// # Errors
    /// candle's error if the length is even or exceeds that of i32, or if the driver reports an
    /// error.
    pub fn new(device: &CudaDevice, rows: &[u32]) -> Result<Self> {
        let (Some(&max), true) = (rows.iter().max(), i32::try_from(rows.len()).is_ok()) else {
            bail!("{} relative positions: expected 1 to {}", rows.len(), i32::MAX);
        };
        if rows.len().is_multiple_of(2) {
            bail!("{} relative positions: expected an odd number", rows.len());
        }
        Ok(Self { rows: Arc::new(device.clone_htod(rows)?), device: device.clone(), max })
    }

    /// Whether the rows are on this device.
    pub fn are_on(&self, device: &CudaDevice) -> bool {
        self.device.same_device(device)
    }
}

/// The projected relative positions of disentangled attention: the raw score of query i and key j is
/// `qᵢ·kⱼ + qᵢ·keys[h, r] + kⱼ·queries[h, r]`, where the row r is `rows[R + d]`, and d is the distance
/// of the key from the query.
#[derive(Clone, Copy)]
pub struct Relative<'a> {
    /// `(H, rows, D)` of q's dtype, a layout that [`supports_relative`] accepts; `None` omits the
    /// term.
    pub keys: Option<TensorView<'a>>,
    /// As `keys`.
    pub queries: Option<TensorView<'a>>,
    /// The row of each distance. No visible key is farther than R.
    pub rows: &'a RelativeRows,
}

/// Whether [`attention`] supports relative keys or queries `(H, rows, D)` of this layout: stride 1
/// along D, and every row starts at a multiple of 8 elements.
pub fn supports_relative(layout: &Layout) -> bool {
    let &[head_stride, row_stride, stride] = layout.stride() else { return false };
    let starts = [layout.start_offset(), head_stride, row_stride];
    stride == 1 && starts.iter().all(|n| n.is_multiple_of(8)) && i32::try_from(row_stride).is_ok()
}

/// `softmax(q·kᵀ · scale + bias) · v` within each ragged sequence. A query that sees no key yields
/// zeros.
///
/// # Shapes
/// `q`: `(1, H, N, D)`; `k`, `v`: `(1, G, S, D)`, where G divides H; layouts that
/// [`supports_heads`] accepts; `tiles`: of N queries and S keys; returns `(1, N, H, D)`
/// # Errors
/// candle's error if dtypes, shapes, layouts or tiles do not fit, if both a bias and relative
/// positions are given, or if the driver reports an error.
pub fn attention(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    tiles: &Tiles,
    positions: Positions,
    relative: Option<Relative>,
    scale: f32,
) -> Result<(CudaStorage, Shape)> {
    by_dtype!(q.0.dtype(), attention_typed(q, k, v, tiles, positions, relative, scale))
}

fn attention_typed<T: Element>(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    tiles: &Tiles,
    positions: Positions,
    relative: Option<Relative>,
    scale: f32,
) -> Result<(CudaStorage, Shape)> {
    let dims = |(storage, layout): TensorView| match layout.dims() {
        &[1, heads, n, d] if supports_heads(storage.dtype(), layout) => Ok((heads, n, d)),
        _ => bail!(
            "the CUDA attention kernel needs f32, f16 or bf16 (1, H, N, D) with a D that is a \
             multiple of 8 up to {MAX_HEAD} and aligned rows, got {:?} {layout:?}",
            storage.dtype()
        ),
    };
    let (heads, n, d) = dims(q)?;
    let (groups, s, _) = dims(k)?;
    let fits = dims(k)? == (groups, s, d) && dims(v)? == (groups, s, d);
    if !fits || groups == 0 || !heads.is_multiple_of(groups) {
        bail!(
            "k and v do not match q: expected (1, G, S, D) with the D of q and a G that divides H, \
             got q {:?}, k {:?}, v {:?}",
            q.1.dims(),
            k.1.dims(),
            v.1.dims()
        );
    }
    let device = q.0.device.clone();
    if tiles.queries != n || tiles.keys > s {
        let Tiles { queries, keys, .. } = tiles;
        bail!("the tiles are for {queries} queries and {keys} keys: expected {n} and at most {s}");
    }
    if !tiles.are_on(&device) {
        bail!("the tiles are on another device: expected that of q");
    }
    let Positions { before, after, bias } = positions;
    let columns = match (bias.map(|(_, layout)| layout.dims()), relative) {
        (None, None) => 1,
        (Some(&[rows, columns]), None) if rows == heads && columns % 2 == 1 => columns,
        (None, Some(relative)) => {
            check_relative(&relative, [heads, d], &device)?;
            relative.rows.rows.len()
        }
        (Some(_), Some(_)) => bail!("a bias and relative positions: expected one of them"),
        (Some(got), None) => bail!("bias: expected (H, 2·R + 1) with H = {heads}, got {got:?}"),
    };
    let (Ok(columns), Ok(out_stride)) = (i32::try_from(columns), i32::try_from(heads * d)) else {
        bail!(
            "{columns} columns of biases and {heads} heads of width {d}: expected at most {} columns \
             and outputs",
            i32::MAX
        );
    };
    // No query and key are farther apart than this.
    let farthest = MAX_TOKENS as i32;
    let distance = |d: usize| d.min(MAX_TOKENS) as i32;
    let (first, last) =
        (before.map_or(-farthest, |before| -distance(before)), after.map_or(farthest, distance));
    let zero = columns / 2;
    let (name, module) = match (bias, relative, before.or(after)) {
        (Some(_), _, _) => ("attention_bias", &ATTENTION_BIAS),
        (None, Some(_), _) => ("attention_relative", &ATTENTION_RELATIVE),
        (None, None, Some(_)) => ("attention_band", &ATTENTION_BAND),
        (None, None, None) => ("attention", &ATTENTION),
    };
    let bias = bias.map(contiguous::<f32>).transpose()?;
    // SAFETY: the kernel writes every element: each query belongs to one thread block.
    let out = unsafe { device.alloc::<T>(n * out_stride as usize)? };
    if tiles.count > 0 {
        let is_f32 = q.0.dtype() == DType::F32;
        let width = d.next_multiple_of(32); // of the head in shared memory
        // Blocks of two tiles read the keys and values half as often; the result is the same.
        let in_pairs = !is_f32
            && relative.is_none()
            && width <= 64
            && tiles.mostly_pairs
            && tiles.count * heads / 2 >= MIN_PAIRS;
        let queries = if in_pairs { 2 * QUERIES } else { QUERIES };
        let name = format!("{name}_{}_{width}_{queries}", T::NAME);
        let kernel = module.kernel(&device, &name)?;
        let mut launch = grid(tiles.count, heads, THREADS);
        if relative.is_some() && !is_f32 {
            let bytes = relative_shared_bytes(width);
            kernel
                .function
                .set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)
                .w()?;
            launch.shared_mem_bytes = bytes;
        }
        let strides =
            |(_, layout): TensorView| (layout.stride()[1] as i64, layout.stride()[2] as i32);
        let (q_data, k_data, v_data) =
            (from_start::<T>(q)?, from_start::<T>(k)?, from_start::<T>(v)?);
        let mut builder = kernel.builder();
        builder.arg(&q_data).arg(&k_data).arg(&v_data).arg(&out).arg(&*tiles.tiles);
        let [(q_head, q_token), (k_head, k_token), (v_head, v_token)] = [q, k, v].map(strides);
        builder_arg!(builder, q_head, q_token, k_head, k_token, v_head, v_token);
        builder_arg!(builder, (heads / groups) as i32, d as i32, scale, first, last);
        let none = 0u64;
        let views = relative.map(|relative| [relative.keys, relative.queries]);
        let data = views.map(|views| views.map(|view| view.map(from_start::<T>)));
        let data = match data {
            None => None,
            Some([keys, queries]) => Some([keys.transpose()?, queries.transpose()?]),
        };
        match (&data, &bias) {
            (Some(data), _) => {
                let [keys, queries] = data;
                optional_arg!(builder, none, keys, queries);
            }
            (None, bias) => optional_arg!(builder, none, bias),
        }
        let strides_of_relative = |view: Option<TensorView>| match view {
            Some((_, layout)) => (layout.stride()[0] as i64, layout.stride()[1] as i32),
            None => (0, 0),
        };
        let strides = views.unwrap_or_default().map(strides_of_relative);
        if let Some(relative) = &relative {
            for (head, row) in &strides {
                builder.arg(head).arg(row);
            }
            builder.arg(&*relative.rows.rows);
        }
        builder_arg!(builder, columns, zero);
        // SAFETY: the arguments have the order and types of the kernel's parameters. The tiles end
        // at token n and key s, and `dims` has checked that q, k and v have these tokens and keys
        // with these strides. The bias has a row of `columns` elements for each head, and the kernel
        // clamps the column. Relative keys and queries have more rows than the largest of `rows`.
        unsafe { builder.launch(launch) }.w()?;
    }
    Ok((T::wrap_cuda_slice(out, device), (1, n, heads, d).into()))
}

/// Checks that relative positions fit heads of queries `(H, N, D)` on this device.
fn check_relative(relative: &Relative, [heads, d]: [usize; 2], device: &CudaDevice) -> Result<()> {
    if !relative.rows.are_on(device) {
        bail!("the relative positions are on another device: expected that of q");
    }
    let least = relative.rows.max as usize + 1;
    for (_, layout) in [relative.keys, relative.queries].into_iter().flatten() {
        let fits = matches!(layout.dims(), &[h, r, w] if h == heads && r >= least && w == d);
        if !fits || !supports_relative(layout) {
            bail!(
                "relative positions: expected (H, R, D) with H = {heads}, D = {d}, R of at least \
                 {least} and aligned rows, got {layout:?}"
            );
        }
    }
    Ok(())
}

/// The size of `Shared` in `cuda/attention_relative.cu`: 32 keys and values and 2 · 96 relative
/// positions in rows that are padded by 8 elements of 16 bits; and for each of four warps, two 16 × 40
/// matrices of f32.
fn relative_shared_bytes(width: usize) -> u32 {
    (2 * (32 + 96) * (width + 8) * 2 + 4 * 2 * 16 * 40 * 4) as u32
}

/// `LayerNorm(x + y)`, or `LayerNorm(x)` without `y`.
///
/// # Shapes
/// `x`, `y`: `(.., E)`, contiguous, with an E that [`supports_even_rows`] accepts; `weight`,
/// `bias`: `(E,)`
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn add_layer_norm(
    x: TensorView,
    y: Option<TensorView>,
    weight: TensorView,
    bias: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    by_dtype!(x.0.dtype(), add_layer_norm_typed(x, y, weight, bias, eps))
}

fn add_layer_norm_typed<T: Element>(
    x: TensorView,
    y: Option<TensorView>,
    weight: TensorView,
    bias: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    let device = x.0.device.clone();
    let (n, e) = (x.1.shape().elem_count(), weight.1.shape().elem_count());
    let other = y.map_or(n, |(_, layout)| layout.shape().elem_count());
    if !supports_even_rows(x.0.dtype(), e)
        || x.1.dims().last() != Some(&e)
        || other != n
        || bias.1.dims() != [e]
    {
        bail!(
            "layer norm: expected f32, f16 or bf16 rows of an even length, weight and bias of this \
             length, and y with as many elements as x; got {:?}, x {:?}, y {:?}, weight {:?}, bias \
             {:?}",
            x.0.dtype(),
            x.1.dims(),
            y.map(|(_, layout)| layout.dims()),
            weight.1.dims(),
            bias.1.dims()
        );
    }
    let (x, y) = (pairs::<T>(x)?, y.map(pairs::<T>).transpose()?);
    let (weight, bias) = (pairs::<T>(weight)?, pairs::<T>(bias)?);
    // SAFETY: the kernel writes every row.
    let out = unsafe { device.alloc::<T>(n)? };
    if n > 0 {
        let name = format!("add_layer_norm_{}{}", wide_row(e), T::NAME);
        let kernel = NORM.kernel(&device, &name)?;
        let mut builder = kernel.builder();
        builder.arg(&x);
        let none = 0u64;
        optional_arg!(builder, none, &y);
        builder.arg(&weight).arg(&bias).arg(&out);
        builder_arg!(builder, (n / e) as i32, e as i32, eps);
        // SAFETY: the arguments have the order and types of the kernel's parameters. As checked
        // above, x, y and out have n / e rows of e elements, weight and bias e elements.
        unsafe { builder.launch(norm_rows(n / e, e)) }.w()?;
    }
    Ok(T::wrap_cuda_slice(out, device))
}

/// `RMSNorm(x + y)`, or `RMSNorm(x)` without `y`: `x / √(mean(x²) + ε) · weight`.
///
/// # Shapes
/// `x`, `y`: `(.., E)`, contiguous, with an E that [`supports_even_rows`] accepts; `weight`: `(E,)`,
/// f32
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn add_rms_norm(
    x: TensorView,
    y: Option<TensorView>,
    weight: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    by_dtype!(x.0.dtype(), add_rms_norm_typed(x, y, weight, eps))
}

fn add_rms_norm_typed<T: Element>(
    x: TensorView,
    y: Option<TensorView>,
    weight: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    let device = x.0.device.clone();
    let (n, e) = (x.1.shape().elem_count(), weight.1.shape().elem_count());
    let other = y.map_or(n, |(_, layout)| layout.shape().elem_count());
    let is_supported = supports_even_rows(x.0.dtype(), e);
    if !is_supported || x.1.dims().last() != Some(&e) || other != n {
        bail!(
            "RMS norm: expected f32, f16 or bf16 rows of an even length, a weight of this length, \
             and y with as many elements as x; got {:?}, x {:?}, y {:?}, weight {:?}",
            x.0.dtype(),
            x.1.dims(),
            y.map(|(_, layout)| layout.dims()),
            weight.1.dims()
        );
    }
    let (x, y) = (pairs::<T>(x)?, y.map(pairs::<T>).transpose()?);
    let weight = pairs::<f32>(weight)?;
    // SAFETY: the kernel writes every row.
    let out = unsafe { device.alloc::<T>(n)? };
    if n > 0 {
        let name = format!("add_rms_norm_{}", T::NAME);
        let kernel = NORM.kernel(&device, &name)?;
        let mut builder = kernel.builder();
        builder.arg(&x);
        let none = 0u64;
        optional_arg!(builder, none, &y);
        builder.arg(&weight).arg(&out);
        builder_arg!(builder, e as i32, eps);
        // SAFETY: the arguments have the order and types of the kernel's parameters. As checked
        // above, x, y and out have n / e rows of e elements, and the weight has e elements.
        unsafe { builder.launch(grid(n / e, 1, THREADS)) }.w()?;
    }
    Ok(T::wrap_cuda_slice(out, device))
}

/// `LayerNorm(words[i] + types[j] + positions[k])` for each token's ids; without `types` or
/// `positions`, the sum of the others.
///
/// # Shapes
/// ids: `(N,)` of u32; tables: `(rows, E)`, contiguous, with an E that [`supports_even_rows`] accepts;
/// `weight`, `bias`: `(E,)`; returns `(N, E)`. If an id of a token is out of range for its table, the
/// token's row is NaN.
/// # Arguments
/// `lookups`: the ids and the table of words, then up to two others
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn embed_layer_norm(
    lookups: &[(TensorView, TensorView)],
    weight: TensorView,
    bias: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    by_dtype!(weight.0.dtype(), embed_layer_norm_typed(lookups, weight, bias, eps))
}

fn embed_layer_norm_typed<T: Element>(
    lookups: &[(TensorView, TensorView)],
    weight: TensorView,
    bias: TensorView,
    eps: f32,
) -> Result<CudaStorage> {
    let device = weight.0.device.clone();
    let e = weight.1.shape().elem_count();
    let n = lookups.first().map_or(0, |((_, ids), _)| ids.shape().elem_count());
    let fits = |((_, ids), (_, table)): &(TensorView, TensorView)| {
        ids.shape().elem_count() == n && table.dims().get(1..) == Some(&[e])
    };
    if !supports_even_rows(weight.0.dtype(), e)
        || !(1..=3).contains(&lookups.len())
        || !lookups.iter().all(fits)
        || bias.1.dims() != [e]
    {
        bail!(
            "embeddings: expected one to three id lists of equal length, each with a table of f32, \
             f16 or bf16 whose row length is that of weight and bias, and even; got ids {:?}, {:?} \
             tables {:?}, weight of length {e}, bias {:?}",
            lookups.iter().map(|((_, ids), _)| ids.dims()).collect::<Vec<_>>(),
            weight.0.dtype(),
            lookups.iter().map(|(_, (_, table))| table.dims()).collect::<Vec<_>>(),
            bias.1.dims()
        );
    }
    let ids = lookups.iter().map(|(ids, _)| contiguous::<u32>(*ids)).collect::<Result<Vec<_>>>()?;
    let tables = lookups.iter().map(|(_, table)| pairs::<T>(*table)).collect::<Result<Vec<_>>>()?;
    let (weight, bias) = (pairs::<T>(weight)?, pairs::<T>(bias)?);
    // SAFETY: the kernel writes every row.
    let out = unsafe { device.alloc::<T>(n * e)? };
    if n > 0 {
        let name = format!("embed_layer_norm_{}{}", wide_row(e), T::NAME);
        let kernel = NORM.kernel(&device, &name)?;
        let mut builder = kernel.builder();
        let none = 0u64;
        for i in 0..3 {
            optional_arg!(builder, none, ids.get(i));
        }
        for i in 0..3 {
            optional_arg!(builder, none, tables.get(i));
        }
        builder.arg(&weight).arg(&bias).arg(&out);
        let table_rows =
            |i: usize| lookups.get(i).map_or(0, |(_, (_, table))| table.dims()[0] as u32);
        builder_arg!(builder, n as i32, e as i32, eps, table_rows(0), table_rows(1), table_rows(2));
        // SAFETY: the arguments have the order and types of the kernel's parameters. There are n
        // ids for each table, and the kernel checks each id against the table's number of rows.
        unsafe { builder.launch(norm_rows(n, e)) }.w()?;
    }
    Ok(T::wrap_cuda_slice(out, device))
}

/// Computes `activation(y + bias)` in place, or `activation(y + bias) · (factor + factor_bias)`.
///
/// # Shapes
/// `y`, `factor`: `(.., E)`, contiguous, E even; `bias`, `factor_bias`: `(E,)`
/// # Arguments
/// `activation`: 0 none, 1 GELU (erf), 2 GELU (tanh), 3 ReLU, 4 SiLU, 5 tanh, 6 quick GELU, 7 Mish,
/// 8 sigmoid; `factor`: the factor and its bias
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn epilogue(
    y: &mut CudaStorage,
    layout: &Layout,
    bias: Option<TensorView>,
    factor: Option<(TensorView, Option<TensorView>)>,
    activation: i32,
) -> Result<()> {
    by_dtype!(y.dtype(), epilogue_typed(y, layout, bias, factor, activation))
}

fn epilogue_typed<T: Element>(
    y: &mut CudaStorage,
    layout: &Layout,
    bias: Option<TensorView>,
    factor: Option<(TensorView, Option<TensorView>)>,
    activation: i32,
) -> Result<()> {
    let device = y.device.clone();
    let e = layout.dims().last().copied().unwrap_or(0);
    let Some((start, end)) = layout.contiguous_offsets() else {
        bail!("CUDA kernels need contiguous tensors, got {layout:?}");
    };
    let biases = [bias, factor.and_then(|(_, bias)| bias)];
    if !supports_even_rows(y.dtype(), e)
        || !start.is_multiple_of(2)
        || biases.into_iter().flatten().any(|(_, bias)| bias.dims() != [e])
        || factor.is_some_and(|((_, factor), _)| factor.dims() != layout.dims())
    {
        bail!(
            "epilogue: expected f32, f16 or bf16 rows of an even length from an even offset, biases \
             of this length, and a factor of the same shape, got {:?} {:?} from offset {start}, \
             biases {:?} and factor {:?}",
            y.dtype(),
            layout.dims(),
            biases.map(|bias| bias.map(|(_, bias)| bias.dims())),
            factor.map(|((_, factor), _)| factor.dims())
        );
    }
    if start == end {
        return Ok(());
    }
    let [bias, factor_bias] = biases.map(|bias| bias.map(pairs::<T>));
    let (bias, factor_bias) = (bias.transpose()?, factor_bias.transpose()?);
    let factor = factor.map(|(factor, _)| pairs::<T>(factor)).transpose()?;
    let kernel = EPILOGUE.kernel(&device, &format!("epilogue_{}", T::NAME))?;
    let y = y.as_cuda_slice_mut::<T>()?;
    let rows_per_launch = u32::MAX as usize / e; // the kernel counts elements in u32
    for from in (start..end).step_by(rows_per_launch * e) {
        let to = end.min(from + rows_per_launch * e);
        let mut rows = y.slice_mut(from..to);
        let factor = factor.as_ref().map(|factor| factor.slice(from - start..to - start));
        let mut builder = kernel.builder();
        builder.arg(&mut rows);
        let none = 0u64;
        optional_arg!(builder, none, &bias, &factor, &factor_bias);
        builder_arg!(builder, (to - from) as u32, e as u32, activation);
        // Eight elements per thread; the kernel accepts any number of threads.
        let blocks = (to - from).div_ceil(8 * THREADS as usize);
        // SAFETY: the arguments have the order and types of the kernel's parameters. `rows` and the
        // factor have to - from elements in rows of e, the biases e elements.
        unsafe { builder.launch(grid(blocks, 1, THREADS)) }.w()?;
    }
    Ok(())
}

/// Whether [`rotate`] and [`normalise_heads`] support heads `(1, H, N, D)` of this dtype and layout: f32, f16 or bf16; D
/// is a multiple of 4 with stride 1, and every row starts at an even offset.
pub fn supports_rotary(dtype: DType, layout: &Layout) -> bool {
    let (&[b, _, _, d], &[_, head_stride, token_stride, stride]) = (layout.dims(), layout.stride())
    else {
        return false;
    };
    let starts = [layout.start_offset(), head_stride, token_stride];
    let is_supported = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let is_small = layout.shape().elem_count() <= u32::MAX as usize;
    let are_even = starts.iter().all(|n| n.is_multiple_of(2));
    b == 1 && d.is_multiple_of(4) && stride == 1 && are_even && is_supported && is_small
}

/// Rotates heads in place: the values i and i + D/2 of token t as a pair, with `cos[t, i]` and
/// `sin[t, i]`.
///
/// # Shapes
/// `x`: `(1, H, N, D)`, with a layout that [`supports_rotary`] accepts and without overlaps; `cos`,
/// `sin`: N · D/2 elements, f32, contiguous
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn rotate(
    x: &mut CudaStorage,
    layout: &Layout,
    cos: TensorView,
    sin: TensorView,
) -> Result<()> {
    by_dtype!(x.dtype(), rotate_typed(x, layout, cos, sin))
}

fn rotate_typed<T: Element>(
    x: &mut CudaStorage,
    layout: &Layout,
    cos: TensorView,
    sin: TensorView,
) -> Result<()> {
    let device = x.device.clone();
    let pairs = layout.dims()[2..].iter().product::<usize>() / 2;
    let sizes = [cos, sin].map(|(_, layout)| layout.shape().elem_count());
    if !supports_rotary(x.dtype(), layout) || sizes != [pairs, pairs] {
        bail!(
            "rotary: expected f32, f16 or bf16 (1, H, N, D) with a D that is a multiple of 4 and \
             rows at even offsets, and N · D/2 cosines and sines; got {:?} {layout:?} and {sizes:?}",
            x.dtype()
        );
    }
    let [_, heads, tokens, d] = [0, 1, 2, 3].map(|axis| layout.dims()[axis]);
    let (head_stride, token_stride) = (layout.stride()[1] as i64, layout.stride()[2] as i64);
    let (cos, sin) = (contiguous::<f32>(cos)?, contiguous::<f32>(sin)?);
    let count = heads * tokens * d / 2;
    if count == 0 {
        return Ok(());
    }
    let kernel = ROTARY.kernel(&device, &format!("rotate_{}", T::NAME))?;
    let mut x = x.as_cuda_slice_mut::<T>()?.slice_mut(layout.start_offset()..);
    let mut builder = kernel.builder();
    builder.arg(&mut x).arg(&cos).arg(&sin);
    builder_arg!(builder, head_stride, token_stride);
    builder_arg!(builder, heads as u32, tokens as u32, (d / 2) as u32);
    // Eight pairs per thread; the kernel accepts any number of threads.
    let blocks = count.div_ceil(8 * THREADS as usize);
    // SAFETY: the arguments have the order and types of the kernel's parameters. The layout lies
    // within the storage, and cos and sin have `tokens` rows of d / 2 elements.
    unsafe { builder.launch(grid(blocks, 1, THREADS)) }.w()?;
    Ok(())
}

/// The RMS normalisations of heads of queries and keys.
#[derive(Clone, Copy)]
pub struct HeadNorms<'a> {
    /// The number of heads of queries, which are before the heads of keys.
    pub query_heads: usize,
    /// The weight of queries, `(D,)`, f32.
    pub query: TensorView<'a>,
    /// The weight of keys, `(D,)`, f32.
    pub key: TensorView<'a>,
    /// ε, which is added to the mean square.
    pub eps: f32,
}

/// Normalises heads in place, `x / √(mean(x²) + ε) · weight`, and rotates them as [`rotate`] does if
/// cosines and sines are given.
///
/// # Shapes
/// `x`: `(1, H, N, D)`, with a layout that [`supports_rotary`] accepts and without overlaps;
/// `tables`: N · D/2 cosines and sines, f32, contiguous
/// # Errors
/// candle's error if dtypes, shapes or layouts do not fit, or if the driver reports an error.
pub fn normalise_heads(
    x: &mut CudaStorage,
    layout: &Layout,
    norms: HeadNorms,
    tables: Option<[TensorView; 2]>,
) -> Result<()> {
    by_dtype!(x.dtype(), normalise_heads_typed(x, layout, norms, tables))
}

fn normalise_heads_typed<T: Element>(
    x: &mut CudaStorage,
    layout: &Layout,
    norms: HeadNorms,
    tables: Option<[TensorView; 2]>,
) -> Result<()> {
    let device = x.device.clone();
    let HeadNorms { query_heads, query, key, eps } = norms;
    let weights = [query, key].map(|(_, layout)| layout.shape().elem_count());
    if !supports_rotary(x.dtype(), layout) || weights != [layout.dims()[3]; 2] {
        bail!(
            "norm of heads: expected f32, f16 or bf16 (1, H, N, D) with a D that is a multiple of 4 \
             and rows at even offsets, and weights of D elements; got {:?} {layout:?} and \
             {weights:?}",
            x.dtype()
        );
    }
    let [_, heads, tokens, d] = [0, 1, 2, 3].map(|axis| layout.dims()[axis]);
    let sizes = tables.map(|tables| tables.map(|(_, layout)| layout.shape().elem_count()));
    let angles = tokens * d / 2;
    if sizes.is_some_and(|sizes| sizes != [angles, angles]) {
        bail!("norm of heads: expected {angles} cosines and sines, got {sizes:?}");
    }
    let (head_stride, token_stride) = (layout.stride()[1] as i64, layout.stride()[2] as i64);
    let (query, key) = (pairs::<f32>(query)?, pairs::<f32>(key)?);
    let tables = match tables {
        None => None,
        Some([cos, sin]) => Some((pairs::<f32>(cos)?, pairs::<f32>(sin)?)),
    };
    let count = heads * tokens;
    if count == 0 {
        return Ok(());
    }
    let name = format!("normalise_heads_{}", T::NAME);
    let kernel = ROTARY.kernel(&device, &name)?;
    let mut x = x.as_cuda_slice_mut::<T>()?.slice_mut(layout.start_offset()..);
    let mut builder = kernel.builder();
    builder.arg(&mut x).arg(&query).arg(&key);
    let none = 0u64;
    match &tables {
        Some((cos, sin)) => builder.arg(cos).arg(sin),
        None => builder.arg(&none).arg(&none),
    };
    builder_arg!(builder, head_stride, token_stride, query_heads as u32);
    builder_arg!(builder, heads as u32, tokens as u32, (d / 2) as u32, eps);
    // SAFETY: the arguments have the order and types of the kernel's parameters. The layout lies
    // within the storage, the weights have d elements, and cos and sin have `tokens` rows of d / 2
    // elements. There is one warp for each row.
    unsafe { builder.launch(rows(count)) }.w()?;
    Ok(())
}

/// The mean over the tokens of each ragged sequence, in f32. An empty sequence yields NaN.
///
/// # Shapes
/// `hidden`: `(N, E)`, contiguous, E even; `offsets`: the first token of each of B sequences, then
/// N; returns `(B, E)`
/// # Errors
/// candle's error if dtypes, shapes, layouts or offsets do not fit, or if the driver reports an
/// error.
pub fn mean_pool(hidden: TensorView, offsets: &[usize]) -> Result<(CudaStorage, Shape)> {
    by_dtype!(hidden.0.dtype(), mean_pool_typed(hidden, offsets))
}

fn mean_pool_typed<T: Element>(
    hidden: TensorView,
    offsets: &[usize],
) -> Result<(CudaStorage, Shape)> {
    let device: CudaDevice = hidden.0.device.clone();
    let (n, e) = hidden.1.shape().dims2()?;
    check_offsets(offsets)?;
    let b = offsets.len() - 1;
    if offsets[b] != n {
        bail!("offsets[{b}] is {}: expected {n}, the number of tokens", offsets[b]);
    }
    if !supports_even_rows(hidden.0.dtype(), e) {
        bail!(
            "mean pool: expected f32, f16 or bf16 rows of an even length, got {:?} rows of {e}",
            hidden.0.dtype()
        );
    }
    let hidden = pairs::<T>(hidden)?;
    let offsets: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
    let offsets = device.clone_htod(&offsets)?;
    // SAFETY: the kernel writes every element.
    let out = unsafe { device.alloc::<f32>(b * e)? };
    if b > 0 {
        let name = format!("mean_pool_{}", T::NAME);
        let kernel = POOL.kernel(&device, &name)?;
        let mut builder = kernel.builder();
        builder.arg(&hidden).arg(&offsets).arg(&out);
        builder_arg!(builder, e as i32);
        let parts = (e / 2).div_ceil(THREADS as usize);
        // SAFETY: the arguments have the order and types of the kernel's parameters. The offsets
        // rise from 0 to n.
        unsafe { builder.launch(grid(b, parts, THREADS)) }.w()?;
    }
    Ok((f32::wrap_cuda_slice(out, device), (b, e).into()))
}

/// Divides each row by its Euclidean norm: `x / max(√Σx², 1e-12)`.
///
/// # Shapes
/// `x`: `(B, E)`, f32, contiguous; returns the same shape
/// # Errors
/// candle's error if dtype, shape or layout do not fit, or if the driver reports an error.
pub fn l2_normalize(x: TensorView) -> Result<(CudaStorage, Shape)> {
    let device = x.0.device.clone();
    let (b, e) = x.1.shape().dims2()?;
    let x = contiguous::<f32>(x)?;
    // SAFETY: the kernel writes every row.
    let out = unsafe { device.alloc::<f32>(b * e)? };
    if b * e > 0 {
        let kernel = POOL.kernel(&device, "l2_normalize")?;
        let mut builder = kernel.builder();
        builder.arg(&x).arg(&out);
        builder_arg!(builder, b as i32, e as i32);
        // SAFETY: the arguments have the order and types of the kernel's parameters. x and out have
        // b rows of e elements.
        unsafe { builder.launch(rows(b)) }.w()?;
    }
    Ok((f32::wrap_cuda_slice(out, device), (b, e).into()))
}

/// The storage from a tensor's first element on.
fn from_start<T: CudaDType>((storage, layout): TensorView<'_>) -> Result<CudaView<'_, T>> {
    Ok(T::as_cuda_slice(storage)?.slice(layout.start_offset()..))
}

/// The elements of a contiguous tensor.
fn contiguous<T: CudaDType>((storage, layout): TensorView<'_>) -> Result<CudaView<'_, T>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(T::as_cuda_slice(storage)?.slice(start..end)),
        None => bail!("CUDA kernels need contiguous tensors, got {layout:?}"),
    }
}

/// [`contiguous`] for kernels that read elements in pairs: the tensor must start at an even offset.
fn pairs<T: CudaDType>((storage, layout): TensorView<'_>) -> Result<CudaView<'_, T>> {
    if !layout.start_offset().is_multiple_of(2) {
        bail!("CUDA kernels need tensors that start at an even offset, got {layout:?}");
    }
    contiguous((storage, layout))
}

fn grid(x: usize, y: usize, threads: u32) -> LaunchConfig {
    let (grid_dim, block_dim) = ((x as u32, y as u32, 1), (threads, 1, 1));
    LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 }
}

/// The launch configuration for one warp per row.
fn rows(n: usize) -> LaunchConfig {
    grid(n.div_ceil(THREADS as usize / 32), 1, THREADS)
}

/// The part of a layer norm kernel's name for rows of `e` elements.
fn wide_row(e: usize) -> &'static str {
    if e > MAX_ROW { "wide_" } else { "" }
}

/// The launch configuration of a layer norm kernel for `n` rows of `e` elements.
fn norm_rows(n: usize, e: usize) -> LaunchConfig {
    if e > MAX_ROW { grid(n, 1, THREADS) } else { rows(n) }
}
