//! Copies of tokens and of sequences in place.

use std::ops::Range;

use crate::{
    attention::{Strided, StridedMut},
    buffer::SharedPtr,
    parallel::parallel_for,
};

/// Copies `from` to `to`, which has the same dims.
///
/// # Examples
/// ```
/// use mha_kernels::{Strided, StridedMut, copy_tokens};
///
/// // A token of two heads is appended to the heads of a cache with room for two tokens.
/// let mut cache = [1, 0, 3, 0];
/// let new = Strided { data: &[2, 4], strides: [2, 1, 2], dims: [1, 2, 1, 1] };
/// copy_tokens(new, StridedMut { data: &mut cache[1..], strides: [4, 2, 1], dims: new.dims });
/// assert_eq!(cache, [1, 2, 3, 4]);
/// ```
///
/// # Panics
/// If the dims differ, if a tensor reaches beyond its data, or if elements of `to` could overlap.
pub fn copy_tokens<T: Copy + Send + Sync>(from: Strided<T>, to: StridedMut<T>) {
    from.check("from");
    to.check();
    assert_eq!(from.dims, to.dims, "from: expected the dims of the tensor that is written");
    let ([b, h, t, d], strides) = (to.dims, to.strides);
    let data = SharedPtr::new(to.data.as_mut_ptr());
    parallel_for(if h * t * d == 0 { 0 } else { b }, |b| {
        for (h, t) in (0..h).flat_map(|h| (0..t).map(move |t| (h, t))) {
            let start: usize = [b, h, t].iter().zip(strides).map(|(i, stride)| i * stride).sum();
            // SAFETY: both rows are within the data, and no other row of `to` has these elements, as
            // checked.
            unsafe { from.at(b, h, t).copy_to_nonoverlapping(data.get().add(start), d) };
        }
    });
}

/// Reorders the sequences of `x` `(B, G, block)` in place: elements `sources[i].1` of each of the G
/// blocks of sequence `i` become those of sequence `sources[i].0` before the call. The other
/// elements keep their values, and so do the sequences beyond the length of `sources`.
///
/// # Examples
/// ```
/// // Sequences 0 and 1 are exchanged from the second element on.
/// let mut x = [1, 2, 3, 1, 4, 5];
/// mha_kernels::reorder_sequences(&mut x, [1, 3], &[(1, 1..3), (0, 1..3)]);
/// assert_eq!(x, [1, 4, 5, 1, 2, 3]);
/// ```
///
/// # Panics
/// If a sequence does not exist, or a range exceeds the block.
pub fn reorder_sequences<T: Copy + Send + Sync>(
    x: &mut [T],
    [groups, block]: [usize; 2],
    sources: &[(usize, Range<usize>)],
) {
    let sequences = x.len().checked_div(groups * block).unwrap_or(0);
    let exists = |&(from, ref range): &(usize, Range<usize>)| {
        from < sequences && range.start <= range.end && range.end <= block
    };
    assert!(
        sources.len() <= sequences && sources.iter().all(exists),
        "sources: expected sequences below {sequences} and ranges within 0..{block}"
    );
    let moved = sources.iter().enumerate().filter(|(to, (from, _))| to != from);
    let moved: Vec<(usize, &(usize, Range<usize>))> = moved.collect();
    let len = moved.iter().map(|(_, (_, range))| range.len()).sum();
    let x = SharedPtr::new(x.as_mut_ptr());
    parallel_for(groups, |group| {
        let at = |sequence: usize, range: &Range<usize>| {
            // SAFETY: the sequence and the range exist, as checked.
            unsafe { x.get().add((sequence * groups + group) * block + range.start) }
        };
        let mut before = Vec::with_capacity(len);
        for (_, (from, range)) in &moved {
            // SAFETY: as for `at`; no other task accesses the blocks of this group.
            before.extend_from_slice(unsafe {
                std::slice::from_raw_parts(at(*from, range), range.len())
            });
        }
        let mut rest = &before[..];
        for (to, (_, range)) in &moved {
            let (values, others) = rest.split_at(range.len());
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts_mut(at(*to, range), range.len()) }
                .copy_from_slice(values);
            rest = others;
        }
    });
}
