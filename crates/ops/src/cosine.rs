//! Cosine similarity of vectors and queries, `x·q / (‖x‖·‖q‖)`.

use mha_kernels::Isa;

use crate::Result;

/// The CPU kernel for cosine similarities.
///
/// # Examples
/// ```
/// let kernel = ops::CosineKernel::new()?;
/// let cosines = kernel.cosines(&[3., 4., 0., 2.], &[1., 0.], 2); // two vectors, one query
/// assert_eq!(cosines, [0.6, 0.]);
/// # Ok::<(), ops::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct CosineKernel {
    isa: Isa,
}

impl CosineKernel {
    /// The kernel for this machine's instructions.
    ///
    /// # Errors
    /// [`crate::Error::Isa`] if `MHA_ISA` names instructions that this machine lacks.
    pub fn new() -> Result<Self> {
        Ok(Self { isa: Isa::get()? })
    }

    /// The cosine of each vector with each query: NaN if either holds NaN or ∞, 0 if either is
    /// zero.
    ///
    /// # Shapes
    /// `vectors`: `(N, E)`; `queries`: `(Q, E)`; returns `(N, Q)`; all row-major, E = `width`
    /// # Panics
    /// If a length is not a multiple of `width`, or `width` is 0.
    pub fn cosines(&self, vectors: &[f32], queries: &[f32], width: usize) -> Vec<f32> {
        mha_kernels::cosine_similarities(self.isa, vectors, queries, width)
    }
}
