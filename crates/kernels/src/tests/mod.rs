//! Tests of whole kernels on every ISA of this machine.

mod activation;
mod attention;
mod linear;
mod same_bits;
