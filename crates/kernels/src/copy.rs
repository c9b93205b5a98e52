//! Copies of parts of equal blocks.

use crate::parallel::parallel_chunks;

/// Copies the first `len` elements of blocks: those of block `i` of `to` become those of block
/// `index[i]` of `from`. The other elements of `to` keep their values. `from` and `to` are pairs of
/// the elements and the length of a block.
///
/// # Examples
/// ```
/// let mut to = [0; 6];
/// mha_kernels::copy_blocks((&[1, 2, 3, 4], 2), (&mut to, 3), &[1, 0], 2);
/// assert_eq!(to, [3, 4, 0, 1, 2, 0]);
/// ```
///
/// # Panics
/// If `len` exceeds the length of a block, if `index` does not have the number of blocks of `to`, or
/// if `from` lacks a block.
pub fn copy_blocks<T: Copy + Send + Sync>(
    (from, from_block): (&[T], usize),
    (to, to_block): (&mut [T], usize),
    index: &[usize],
    len: usize,
) {
    assert!(len <= from_block.min(to_block), "len {len} exceeds the length of a block");
    assert_eq!(to.len(), index.len() * to_block, "index: expected an element per block of `to`");
    let blocks = from.len() / from_block.max(1);
    assert!(index.iter().all(|&block| block < blocks), "index: expected blocks below {blocks}");
    if len > 0 {
        parallel_chunks(to, to_block, |i, to| {
            to[..len].copy_from_slice(&from[index[i] * from_block..][..len]);
        });
    }
}
