//! The gated delta rule of a model's linear layers by kernel.

use pyo3::prelude::*;

use super::PyKernels;
use crate::cuda::CudaError;
use crate::cuda::delta::{self, Activation, CarryArgs, RowsArgs, Sizes};

/// Number of requests, of rows of the largest, and of all rows; addresses of the requests' table `[requests,
/// 4]` (state, convolution state, first row, rows) and of what the rows of all layers leave for a commit: the
/// convolution's inputs, unit keys, log decays, updates.
type Batch = (usize, usize, usize, u64, u64, u64, u64, u64);

/// Addresses of taps, rate, time bias, and weight of the heads' norm or 0; what is added to the squared
/// lengths of keys and of outputs.
type Weights = (u64, u64, u64, u64, f32, f32);

/// The gated delta rule of a model's linear layers by kernel; addresses are those of
/// `dspark.target.hybrid.kernel`.
///
/// `dtype` is that of activations. Raises `KernelError` for what the kernels do not support. The caller
/// guarantees that the addresses are valid as long as launches run.
#[pyclass(frozen, name = "KernelDelta", module = "dspark._core")]
pub struct PyKernelDelta {
    kernels: Py<PyKernels>,
    activation: Activation,
    sizes: Sizes,
}

#[pymethods]
impl PyKernelDelta {
    #[new]
    fn new(
        kernels: Py<PyKernels>,
        dtype: &str,
        key_heads: i32,
        groups: i32,
        key_dim: i32,
        value_dim: i32,
        taps: i32,
    ) -> PyResult<Self> {
        let activation = Activation::named(dtype).map_err(CudaError::Unsuitable)?;
        let sizes = Sizes { key_heads, groups, key_dim, value_dim, taps };
        sizes.check().map_err(CudaError::Unsuitable)?;
        Ok(PyKernelDelta { kernels, activation, sizes })
    }

    /// The most rows of a request that a pass may have.
    #[classattr]
    const MOST_ROWS: usize = delta::MOST_ROWS;

    /// The kernels that passes and commits launch.
    #[getter]
    fn entries(&self) -> Vec<String> {
        self.activation.entries()
    }

    /// Runs linear layer `layer` from `[rows, channels + values + 2 value heads]` at `mixed` to `[rows,
    /// values]` at `out`.
    fn rows(
        &self,
        batch: Batch,
        weights: Weights,
        layer: usize,
        mixed: u64,
        out: u64,
        stream: u64,
    ) -> PyResult<()> {
        let (requests, most, rows, table, inputs, keys, log_decays, updates) = batch;
        let (taps, rate, time_bias, head_weight, unit_eps, head_eps) = weights;
        let (sizes, before) = (self.sizes, (layer * rows) as u64);
        let args = RowsArgs {
            requests: table,
            mixed,
            taps,
            rate,
            time_bias,
            head_weight,
            out,
            inputs: inputs + before * sizes.channels() * self.activation.bytes(),
            keys: keys + before * sizes.keys() * 4,
            log_decays: log_decays + before * u64::from(sizes.value_heads()) * 4,
            updates: updates + before * sizes.values() * 4,
            unit_eps,
            head_eps,
            sizes,
            layer: layer as i32,
        };
        let device = self.kernels.get().device();
        Ok(delta::rows(device, stream, self.activation, (requests, most), &args)?)
    }

    /// Advances one request's states at `conv` and `state` by rows `first` to `first + count` of a pass, in
    /// `layers` linear layers.
    #[expect(clippy::too_many_arguments, reason = "Python's signature")]
    fn carry(
        &self,
        batch: Batch,
        layers: usize,
        first: usize,
        count: usize,
        conv: u64,
        state: u64,
        stream: u64,
    ) -> PyResult<()> {
        let (_, _, rows, _, inputs, keys, log_decays, updates) = batch;
        if first + count > rows {
            let what = format!("rows {first} to {} to keep, and the pass had {rows}", first + count);
            return Err(CudaError::Unsuitable(what).into());
        }
        let args = CarryArgs {
            state,
            conv,
            inputs,
            keys,
            log_decays,
            updates,
            rows: rows as i64,
            first: first as i64,
            sizes: self.sizes,
            count: count as i32,
        };
        Ok(delta::carry(self.kernels.get().device(), stream, self.activation, layers, &args)?)
    }
}
