//! Products in 16 bits over torch's memory, on torch's threads.

use pyo3::prelude::*;

use crate::product::{HalfProduct, Stored};
use crate::python::errors::RequestError;
use crate::python::openmp::OpenMp;
use crate::python::tensors::Tensor;
use crate::rows::{Matrix, Rows};
use crate::workers::Alone;

/// The least number of products for which other threads are woken.
const WORTH_SHARING: usize = 1 << 17;

/// A bfloat16 or float16 weight `[cols, inner]`, as `nn.Linear` stores it, read in place; for products of a
/// few rows.
///
/// `workers` is the address of `GOMP_parallel` in the OpenMP library that torch uses, or 0.
#[pyclass(frozen, name = "HalfProduct", module = "dspark._core")]
pub struct PyHalfProduct {
    weight: Tensor,
    workers: Option<OpenMp>,
}

#[pymethods]
impl PyHalfProduct {
    #[new]
    fn new(weight: &Bound<'_, PyAny>, workers: usize) -> PyResult<Self> {
        let weight = Tensor::from_py(weight, "weight")?;
        let is_half = matches!(weight.rows(), Rows::Bf16(_) | Rows::F16(_));
        if !is_half || weight.len() == 0 || weight.rows().cols() == 0 {
            return Err(RequestError::new_err(
                "a product in 16 bits needs a bfloat16 or float16 weight that is not empty",
            ));
        }
        // SAFETY: the caller guarantees that it is `GOMP_parallel`.
        let workers = unsafe { OpenMp::at(workers) };
        Ok(PyHalfProduct { weight, workers })
    }

    /// `out = start + x W^T` over `rows` contiguous rows of the weight's dtype, by address; a `start` of 0
    /// means none.
    ///
    /// The caller guarantees that the addresses are those of live memory of `rows * inner`, `rows * cols` and
    /// `rows * cols` numbers, and that `out` overlaps neither of the others.
    fn run(&self, py: Python<'_>, x: usize, rows: usize, start: usize, out: usize) -> PyResult<()> {
        if rows == 0 {
            return Ok(());
        }
        let even = [x, start, out].iter().all(|address| address.is_multiple_of(align_of::<u16>()));
        if x == 0 || out == 0 || !even {
            return Err(RequestError::new_err("a product got an address that is null or not aligned"));
        }
        match self.weight.rows() {
            // SAFETY: not null and aligned as checked; the caller guarantees the rest.
            Rows::Bf16(weight) => unsafe { self.multiply(py, weight, x, rows, start, out) },
            // SAFETY: as above.
            Rows::F16(weight) => unsafe { self.multiply(py, weight, x, rows, start, out) },
            Rows::F32(_) | Rows::F64(_) => unreachable!("refused when the product was made"),
        }
        Ok(())
    }
}

impl PyHalfProduct {
    /// # Safety
    /// As the caller of `run` guarantees, with addresses of numbers of type `T`.
    unsafe fn multiply<T: Stored>(
        &self,
        py: Python<'_>,
        weight: Matrix<'_, T>,
        x: usize,
        rows: usize,
        start: usize,
        out: usize,
    ) {
        let (inputs, outputs) = (rows * weight.cols(), rows * weight.rows());
        // SAFETY: as the caller guarantees.
        let (x, start, out) = unsafe {
            (
                std::slice::from_raw_parts(x as *const T, inputs),
                (start != 0).then(|| std::slice::from_raw_parts(start as *const T, outputs)),
                std::slice::from_raw_parts_mut(out as *mut T, outputs),
            )
        };
        let product = HalfProduct::new(weight);
        match &self.workers {
            Some(workers) if outputs * weight.cols() >= WORTH_SHARING => {
                py.detach(|| product.run(x, start, out, workers));
            }
            _ => product.run(x, start, out, &Alone),
        }
    }
}
