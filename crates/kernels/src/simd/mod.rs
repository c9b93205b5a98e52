//! SIMD vectors and the products of packed lanes. Each kernel is written once, generic over
//! [`Vector`] and, if it multiplies matrices, over [`Microkernel`], and compiled for every
//! instruction set.
//!
//! A vector has 16 lanes: one register of AVX-512, two of AVX2, four of NEON. The scalar reference
//! is the same source with 16 numbers. All run the same operations in the same order, with these
//! exceptions: AVX2 requires a coarser quantisation of int8 weights
//! ([`Vector::ADDS_INT8_PAIRS_IN_I16`]), products of bf16 have the order of the instructions, and
//! AMX computes f32 as [`bf16x3`].
//!
//! An instruction set is a file with an implementation of `InstructionSet`, and a line in the list
//! of `level.rs`.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod bf16x3;
mod dot;
mod instruction_set;
mod level;
mod microkernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod prefetch;
mod scalar;
mod vector;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;

#[cfg(test)]
pub(crate) use dot::Bf16;
pub(crate) use dot::Dot;
pub(crate) use instruction_set::{ProductKernel, SimdKernel};
pub(crate) use level::{Level, Products};
pub(crate) use microkernel::{MAX_NR, Microkernel, RegisterTile, Tile, split_evenly};
pub(crate) use prefetch::{prefetch_l2, prefetch_rows};
pub(crate) use scalar::{ScalarVector, bf16_bits};
pub(crate) use vector::{LANES, Vector};
