//! The attention of a pass over torch's memory, on torch's threads.

use half::bf16;
use pyo3::prelude::*;

use crate::attention::{Element, Heads, LANES, Layer, Pass, Reach, Segment};
use crate::python::errors::RequestError;
use crate::python::openmp::OpenMp;
use crate::workers::Alone;

/// The least work (key positions times queries) for which other threads are woken; below it, waking them
/// costs more.
const WORTH_SHARING: usize = 4096;

/// The attention of one pass: rows of several requests over their caches, a call per layer.
///
/// `dtype` is "float32" or "bfloat16". `segments` are (address of the cache, capacity, length, rows) of each
/// request in the order of its rows; a cache is contiguous, `[layers, 2 * key heads, capacity, head_dim]`.
/// `reaches` are the kinds of visibility that layers have: (causal, window or 0, anchored). `workers` is the
/// address of `GOMP_parallel` in the OpenMP library that torch uses, or 0, `threads` the number of its threads.
///
/// The caller guarantees that the addresses are valid as long as the object is used.
#[pyclass(frozen, name = "Attention", module = "dspark._core")]
pub struct PyAttention {
    pass: Kind,
    reaches: Vec<Reach>,
    workers: Option<OpenMp>,
}

enum Kind {
    Single(Pass<f32>),
    Half(Pass<bf16>),
}

#[pymethods]
impl PyAttention {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the arguments of one Python class")]
    fn new(
        dtype: &str,
        key_heads: usize,
        query_heads: usize,
        head_dim: usize,
        segments: Vec<(usize, usize, usize, usize)>,
        reaches: Vec<(bool, usize, bool)>,
        workers: usize,
        threads: usize,
    ) -> PyResult<Self> {
        let fits = segments.iter().all(|&(cache, capacity, length, rows)| {
            cache != 0 && cache.is_multiple_of(align_of::<f32>()) && length + rows <= capacity
        });
        let shaped = key_heads > 0 && query_heads.is_multiple_of(key_heads) && head_dim.is_multiple_of(LANES);
        if !fits || !shaped || head_dim == 0 {
            return Err(RequestError::new_err(format!(
                "attention got {query_heads} heads over {key_heads} of {head_dim} numbers and segments {segments:?}: \
                 expected a multiple of {LANES} numbers and segments within aligned caches"
            )));
        }
        let heads = Heads { keys: key_heads, groups: query_heads / key_heads, size: head_dim };
        let mut next = 0;
        let segments = segments
            .into_iter()
            .map(|(cache, capacity, length, rows)| {
                let first = next;
                next += rows;
                Segment { cache, capacity, length, rows, first }
            })
            .collect();
        // SAFETY: aligned and large enough as checked; the caller guarantees that it is the memory of caches.
        let pass = unsafe {
            match dtype {
                "float32" => Kind::Single(Pass::new(heads, segments, threads)),
                "bfloat16" => Kind::Half(Pass::new(heads, segments, threads)),
                _ => {
                    return Err(RequestError::new_err(format!(
                        "attention is for float32 and bfloat16, not {dtype}"
                    )));
                }
            }
        };
        let reaches = reaches
            .into_iter()
            .map(|(causal, window, anchored)| Reach {
                causal,
                window: (window > 0).then_some(window),
                anchored,
            })
            .collect();
        // SAFETY: the caller guarantees that it is `GOMP_parallel`.
        let workers = unsafe { OpenMp::at(workers) };
        Ok(PyAttention { pass, reaches, workers })
    }

    /// Runs layer `index` with visibility `reaches[reach]`: reads the rows `[rows, q + k + v heads,
    /// head_dim]` at `input`, `row_stride` numbers apart, appends keys and values to the caches and writes
    /// the result to `output`.
    fn layer(
        &self,
        py: Python<'_>,
        index: usize,
        reach: usize,
        input: usize,
        row_stride: usize,
        output: usize,
    ) -> PyResult<()> {
        let Some(&reach) = self.reaches.get(reach) else {
            return Err(RequestError::new_err(format!("attention has no kind of visibility {reach}")));
        };
        let layer = Layer { index, reach, input, row_stride, output };
        match &self.pass {
            Kind::Single(pass) => self.run(py, pass, &layer),
            Kind::Half(pass) => self.run(py, pass, &layer),
        }
        Ok(())
    }
}

impl PyAttention {
    fn run<T: Element>(&self, py: Python<'_>, pass: &Pass<T>, layer: &Layer) {
        if pass.work() < WORTH_SHARING {
            // SAFETY: the caller guarantees valid addresses, and writes to none of them meanwhile.
            return unsafe { pass.layer(layer, &Alone) };
        }
        py.detach(|| match &self.workers {
            // SAFETY: as above.
            Some(workers) => unsafe { pass.layer(layer, workers) },
            // SAFETY: as above.
            None => unsafe { pass.layer(layer, &Alone) },
        });
    }
}
