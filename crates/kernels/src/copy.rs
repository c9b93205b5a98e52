//! Copies of tokens in place.

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
