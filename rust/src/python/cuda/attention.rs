//! The attention of a pass by kernel.

use pyo3::prelude::*;

use super::PyKernels;
use crate::attention::{Heads, Reach};
use crate::cuda::attention::{Element, Layer, Pass, Request};
use crate::python::errors::KernelError;

/// The attention of one pass by kernel: rows of several requests over their caches, a call per layer.
///
/// `dtype` is "float32", "float16" or "bfloat16". `segments` are (address of the cache, numbers from layer to
/// layer and from head to head, length, rows) of each request in the order of its rows: a cache is `[layers,
/// 2 * key heads, positions, head_dim]`. `reaches` are the kinds of visibility that layers have: (causal,
/// window or 0, anchored).
///
/// The caller guarantees that the addresses are valid as long as launches run.
#[pyclass(frozen, name = "KernelAttention", module = "dspark._core")]
pub struct PyKernelAttention {
    kernels: Py<PyKernels>,
    pass: Pass,
}

#[pymethods]
impl PyKernelAttention {
    #[new]
    fn new(
        kernels: Py<PyKernels>,
        dtype: &str,
        key_heads: usize,
        query_heads: usize,
        head_dim: usize,
        segments: Vec<(u64, usize, usize, usize, usize)>,
        reaches: Vec<(bool, usize, bool)>,
    ) -> PyResult<Self> {
        let element = match dtype {
            "float32" => Element::Single,
            "float16" => Element::Half,
            "bfloat16" => Element::Brain,
            _ => return Err(KernelError::new_err(format!("there is no attention kernel for {dtype}"))),
        };
        if key_heads == 0 || !query_heads.is_multiple_of(key_heads) {
            return Err(KernelError::new_err(format!(
                "attention got {query_heads} query heads for {key_heads} key heads: expected a multiple"
            )));
        }
        let heads = Heads { keys: key_heads, groups: query_heads / key_heads, size: head_dim };
        let requests: Vec<Request> = segments
            .into_iter()
            .map(|(cache, layer_stride, head_stride, length, rows)| Request {
                cache,
                layer_stride,
                head_stride,
                pages: 0,
                length,
                rows,
            })
            .collect();
        let reaches: Vec<Reach> = reaches
            .into_iter()
            .map(|(causal, window, anchored)| Reach {
                causal,
                window: (window > 0).then_some(window),
                anchored,
            })
            .collect();
        let multiprocessors = kernels.get().device().multiprocessors() as usize;
        let pass = Pass::new(element, heads, 1, &requests, &reaches, multiprocessors)?;
        Ok(PyKernelAttention { kernels, pass })
    }

    /// What the kernel reads: int64 numbers, to be copied to the device once for all layers.
    #[getter]
    fn table(&self) -> Vec<i64> {
        self.pass.table().to_vec()
    }

    /// Float32 numbers that the kernel needs room for.
    #[getter]
    fn workspace(&self) -> usize {
        self.pass.workspace()
    }

    /// Runs layer `index` with visibility `reaches[reach]`: reads the rows `[rows, q + k + v heads,
    /// head_dim]` at `input`, `row_stride` numbers apart, appends keys and values to the caches and writes
    /// the result to `output`. `table` and `workspace` are where these lie on the device. Runs on `stream`,
    /// the driver's handle.
    #[expect(clippy::too_many_arguments, reason = "Python's signature")]
    fn layer(
        &self,
        index: usize,
        reach: usize,
        input: u64,
        row_stride: usize,
        output: u64,
        table: u64,
        workspace: u64,
        stream: u64,
    ) -> PyResult<()> {
        let layer = Layer { index, reach, input, row_stride, output, table, workspace };
        Ok(self.pass.layer(self.kernels.get().device(), stream, &layer)?)
    }
}
