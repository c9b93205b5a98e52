//! `softmax(q·kᵀ · scale + bias) · v`, block by block, so that no `(T, S)` matrix is stored unless the
//! softmax weights are asked for.
//!
//! The keys and values of a block are packed into panels like weights, so that both products run on
//! the microkernels of [`gemm`](crate::gemm). The softmax is computed online: the running maximum
//! and sum are carried from block to block (Milakov and Gimelshein 2018,
//! <https://arxiv.org/abs/1805.02867>; FlashAttention, Dao et al. 2022,
//! <https://arxiv.org/abs/2205.14135>). Blocks are counted from the first key of each sequence, so
//! the result of a query does not depend on the rest of the batch.

mod args;
mod head;
mod pack;
mod relative;
mod softmax;

use std::mem::MaybeUninit;

pub use args::{
    Attention, Broadcast, DistanceBias, RelativePositions, Sequence, Strided, StridedMut,
};
use head::{Head, HeadTask, Scratch, ScratchSizes};

use crate::{
    buffer::{SharedPtr, zeros},
    compute_type::ComputeType,
    gemm::Element,
    isa::Isa,
    parallel::parallel_for,
};

/// Maximum number of queries per task. All threads then end at about the same time, and with
/// relative positions, the product of each query and each row of the relative keys takes at most
/// 1 MiB of f32 for 512 rows.
const MAX_QUERIES: usize = 512;

/// Scaled dot-product attention, `softmax(q·kᵀ · scale + bias) · v`, in f32.
///
/// A query whose keys are all masked yields zeros. A query whose visible scores are all −∞ yields
/// NaN.
///
/// If `visible` masks a key, its row of `v` may contain NaN or infinity. All other rows of `v` must
/// be finite if `causal`, `window`, `keep`, `bias` or `distance_bias` masks keys, because a weight
/// of 0 times NaN or infinity is NaN.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`; `v`: `(B, G, S, V)`; returns `(B, T, H, V)`.
///
/// # Examples
/// ```
/// use mha_kernels::{Attention, Isa, Sequence, Strided, attention_f32};
///
/// // Two tokens of one head of width 1. Equal scores average the values.
/// let strided = |data| Strided { data, strides: [2, 2, 1], dims: [1, 1, 2, 1] };
/// let sequences = &[Sequence { b: 0, queries: 0..2, keys: 0..2, first_query: 0 }];
/// let qkv = [strided(&[1., 2.]), strided(&[0., 0.]), strided(&[4., 8.])];
/// let args = Attention { causal: true, ..Attention::new(qkv, sequences, 1.0) };
/// assert_eq!(attention_f32(Isa::get()?, args), [4., 6.]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// If the dims do not fit together or reach beyond the data, if a range exceeds B, T or S, if
/// `visible`, `key_sources`, `distance_bias` or `relative` has the wrong size, if a key source is not
/// below B, if a distance exceeds the radius of `distance_bias` or `relative`, or if a query is not
/// in exactly one sequence.
pub fn attention_f32(isa: Isa, args: Attention<f32>) -> Vec<f32> {
    attention(isa, args)
}

/// The softmax weights of some heads, `softmax(q·kᵀ · scale + bias)`, by which [`attention_f32`]
/// multiplies the values. Weights of hidden keys, and of keys of other sequences, are 0; if the query
/// yields NaN in [`attention_f32`], those of hidden keys may be NaN too. The values are not used.
///
/// # Shapes
/// `q`: `(B, H, T, D)`; `k`: `(B, G, S, D)`; returns `(B, heads, T, S)`.
///
/// # Examples
/// ```
/// use mha_kernels::{Attention, Isa, Sequence, Strided, attention_weights_f32};
///
/// let strided = |data| Strided { data, strides: [2, 2, 1], dims: [1, 1, 2, 1] };
/// let sequences = &[Sequence { b: 0, queries: 0..2, keys: 0..2, first_query: 0 }];
/// let qkv = [strided(&[1., 2.]), strided(&[0., 0.]), strided(&[4., 8.])];
/// let args = Attention { causal: true, ..Attention::new(qkv, sequences, 1.0) };
/// assert_eq!(attention_weights_f32(Isa::get()?, args, &[0]), [1., 0., 0.5, 0.5]);
/// # Ok::<(), mha_kernels::IsaError>(())
/// ```
///
/// # Panics
/// In the cases that [`attention_f32`] lists, and if a head is not below H.
pub fn attention_weights_f32(isa: Isa, mut args: Attention<f32>, heads: &[usize]) -> Vec<f32> {
    let ([b, h, t, _], s) = (args.q.dims, args.k.dims[2]);
    assert!(heads.iter().all(|head| *head < h), "heads: expected heads below {h}, got {heads:?}");
    args.v.dims[3] = 0;
    let len = [heads.len(), t, s].into_iter().try_fold(b, usize::checked_mul);
    let mut weights = zeros(len.expect("the number of weights fits into usize"));
    let shared = SharedPtr::new(weights.as_mut_ptr());
    attend(isa, args, heads, SharedPtr::new(std::ptr::dangling_mut()), Some(shared));
    weights
}

/// [`attention_f32`] for bf16, as bits. The softmax weights are rounded to bf16 too; sums are in
/// f32.
///
/// # Panics
/// In the cases that [`attention_f32`] lists.
pub fn attention_bf16(isa: Isa, args: Attention<u16>) -> Vec<u16> {
    attention(isa, args)
}

fn attention<T: Element>(isa: Isa, args: Attention<T>) -> Vec<T> {
    let ([b, h, t, _], value_d) = (args.q.dims, args.v.dims[3]);
    let len = [t, h, value_d].into_iter().try_fold(b, usize::checked_mul);
    let len = len.expect("the number of values of the output fits into usize");
    let mut out = Vec::with_capacity(len);
    let spare: &mut [MaybeUninit<T>] = out.spare_capacity_mut();
    let shared = SharedPtr::new(spare.as_mut_ptr().cast::<T>());
    attend(isa, args, &(0..h).collect::<Vec<_>>(), shared, None);
    // SAFETY: every query is in a sequence, so every element has been written.
    unsafe { out.set_len(len) };
    out
}

/// Writes the output of `heads` to `out`, and their weights to `weights` if it is given.
fn attend<T: Element>(
    isa: Isa,
    mut args: Attention<T>,
    heads: &[usize],
    out: SharedPtr<T>,
    weights: Option<SharedPtr<f32>>,
) {
    debug_assert!(weights.is_none() || T::COMPUTE_TYPE == ComputeType::F32);
    args.check();
    for x in [&mut args.q, &mut args.k, &mut args.v] {
        if x.dims.contains(&0) {
            x.strides = [0; 3]; // `check` does not check the strides of a tensor without elements
        }
    }
    // Attention has too few products to pay for splitting its operands into BF16x3 terms, or for
    // interleaving them.
    let products = isa.products(T::COMPUTE_TYPE);
    let has_special_layout = products.is_bf16x3 || products.has_lane_pairs;
    let isa = if has_special_layout { isa.without_tiles() } else { isa };
    let max_mr = isa.products(T::COMPUTE_TYPE).max_mr;
    let tasks = tasks(args.sequences, heads, max_mr);
    let sizes = ScratchSizes::new(&args, &tasks, max_mr);
    // If there are many tasks, they run in groups. The tasks of a group share scratch memory.
    let group_len = (tasks.len() / (16 * rayon::current_num_threads())).max(1);
    parallel_for(tasks.len().div_ceil(group_len), |group| {
        let mut scratch = Scratch::new::<T>(&sizes);
        for i in (group * group_len..tasks.len()).take(group_len) {
            let (task, next, scratch) = (&tasks[i], tasks.get(i + 1), &mut scratch);
            let head = Head { attention: &args, task, next, scratch, out, weights };
            isa.run_products(T::COMPUTE_TYPE, head);
        }
    });
}

/// One task per sequence and head. The queries of a sequence are divided among several tasks if
/// there are otherwise too few tasks to occupy all threads, or if the sequence has more than
/// [`MAX_QUERIES`].
fn tasks<'a>(sequences: &'a [Sequence], heads: &[usize], max_mr: usize) -> Vec<HeadTask<'a>> {
    let min_tasks = 4 * rayon::current_num_threads();
    let parts = min_tasks.div_ceil((sequences.len() * heads.len()).max(1));
    sequences
        .iter()
        .flat_map(|sequence| {
            let part_len = sequence.queries.len().div_ceil(parts).max(4 * max_mr).min(MAX_QUERIES);
            let starts = sequence.queries.clone().step_by(part_len);
            starts.flat_map(move |start| {
                let queries = start..sequence.queries.end.min(start + part_len);
                heads.iter().enumerate().map(move |(i, &head)| HeadTask {
                    sequence,
                    head,
                    weights_index: i + sequence.b * heads.len(),
                    queries: queries.clone(),
                })
            })
        })
        .collect()
}
