//! Kernels that run where the tensors are.

pub mod sampling;
