//! `dspark._core`: the decisions, for Python.

mod attention;
mod cuda;
mod decide;
mod detokenizer;
mod device_heads;
mod engine;
mod errors;
mod openmp;
mod params;
mod product;
mod runner;
mod sampler;
mod sampling;
mod schedule;
mod stats;
mod tensors;
mod ticket;

use pyo3::prelude::*;

/// The compiled part of dspark.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::attention::PyAttention;
    #[pymodule_export]
    use super::cuda::attention::PyKernelAttention;
    #[pymodule_export]
    use super::cuda::delta::PyKernelDelta;
    #[pymodule_export]
    use super::cuda::{PyKernels, compile_kernels, kernel_architecture, kernel_units};
    #[pymodule_export]
    use super::decide::{PyNoise, PyUniforms};
    #[pymodule_export]
    use super::decide::{accept_batch, draft_chain, step_logits};
    #[pymodule_export]
    use super::engine::PyEngine;
    #[pymodule_export]
    use super::product::{PyHalfProduct, PySmallProduct};
    #[pymodule_export]
    use super::sampling::{PyChain, PyVerify};
    #[pymodule_export]
    use super::schedule::{PyCalibration, PyCostTable, plan_lengths, threshold_prefix};
    #[pymodule_export]
    use super::ticket::Ticket;

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
