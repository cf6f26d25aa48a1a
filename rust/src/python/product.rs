//! Products of a few rows over torch's memory.

use pyo3::prelude::*;

use crate::number::Number;
use crate::product::{HalfProduct, SmallProduct, Stored};
use crate::python::errors::RequestError;
use crate::python::openmp::OpenMp;
use crate::python::tensors::Tensor;
use crate::rows::{Matrix, Row, Rows};
use crate::workers::Alone;

/// The least number of products for which other threads are woken.
const WORTH_SHARING: usize = 1 << 17;

/// A small float32 weight `[cols, inner]`, as `nn.Linear` stores it, packed for products of a few rows.
#[pyclass(frozen, name = "SmallProduct", module = "dspark._core")]
pub struct PySmallProduct(SmallProduct);

#[pymethods]
impl PySmallProduct {
    #[new]
    fn new(weight: &Bound<'_, PyAny>) -> PyResult<Self> {
        let weight = Tensor::from_py(weight, "weight")?;
        let mut packed = Vec::new();
        let mut inner = 0;
        for j in 0..weight.len() {
            let Row::F32(row) = weight.rows().row(j) else {
                return Err(RequestError::new_err("a small product is for float32 weights"));
            };
            inner = row.len();
            packed.extend_from_slice(row);
        }
        if inner == 0 {
            return Err(RequestError::new_err("a small product needs a weight that is not empty"));
        }
        Ok(PySmallProduct(SmallProduct::pack(&packed, inner)))
    }

    /// `out = start + x W^T` over `rows` contiguous float32 rows, by address; a `start` of 0 means none.
    ///
    /// The caller guarantees what [`Given::slices`] asks for.
    fn run(&self, x: usize, rows: usize, start: usize, out: usize) -> PyResult<()> {
        let given = Given { x, rows, start, out };
        // SAFETY: the caller guarantees it.
        let (x, start, out) = unsafe { given.slices::<f32>(self.0.inner(), self.0.cols())? };
        self.0.run(x, start, out);
        Ok(())
    }
}

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
    /// The caller guarantees what [`Given::slices`] asks for.
    fn run(&self, py: Python<'_>, x: usize, rows: usize, start: usize, out: usize) -> PyResult<()> {
        let given = Given { x, rows, start, out };
        match self.weight.rows() {
            // SAFETY: the caller guarantees it.
            Rows::Bf16(weight) => unsafe { self.multiply(py, weight, &given) },
            // SAFETY: the caller guarantees it.
            Rows::F16(weight) => unsafe { self.multiply(py, weight, &given) },
            Rows::F32(_) | Rows::F64(_) => unreachable!("refused when the product was made"),
        }
    }
}

impl PyHalfProduct {
    /// # Safety
    /// As [`Given::slices`] says.
    unsafe fn multiply<T: Stored>(
        &self,
        py: Python<'_>,
        weight: Matrix<'_, T>,
        given: &Given,
    ) -> PyResult<()> {
        // SAFETY: as the caller guarantees.
        let (x, start, out) = unsafe { given.slices(weight.cols(), weight.rows())? };
        let product = HalfProduct::new(weight);
        match &self.workers {
            Some(workers) if out.len() * weight.cols() >= WORTH_SHARING => {
                py.detach(|| product.run(x, start, out, workers));
            }
            _ => product.run(x, start, out, &Alone),
        }
        Ok(())
    }
}

/// Contiguous rows, by address; a `start` of 0 means none.
struct Given {
    x: usize,
    rows: usize,
    start: usize,
    out: usize,
}

/// What a product reads, what it starts from, and what it writes.
type Slices<'a, T> = (&'a [T], Option<&'a [T]>, &'a mut [T]);

impl Given {
    /// The memory of a product `[cols, inner]`, for as long as the caller says.
    ///
    /// # Safety
    /// The addresses are those of live memory of `rows * inner`, `rows * cols` and `rows * cols` numbers of
    /// type `T`, and `out` overlaps neither of the others.
    ///
    /// # Errors
    /// An address is null or not aligned, and there are rows.
    unsafe fn slices<'a, T: Number>(&self, inner: usize, cols: usize) -> PyResult<Slices<'a, T>> {
        let &Given { x, rows, start, out } = self;
        if rows == 0 {
            return Ok((&[], None, &mut []));
        }
        if x == 0 || out == 0 || [x, start, out].iter().any(|at| !at.is_multiple_of(align_of::<T>())) {
            return Err(RequestError::new_err("a product got an address that is null or not aligned"));
        }
        // SAFETY: not null and aligned as checked; the caller guarantees the rest.
        unsafe {
            Ok((
                std::slice::from_raw_parts(x as *const T, rows * inner),
                (start != 0).then(|| std::slice::from_raw_parts(start as *const T, rows * cols)),
                std::slice::from_raw_parts_mut(out as *mut T, rows * cols),
            ))
        }
    }
}
