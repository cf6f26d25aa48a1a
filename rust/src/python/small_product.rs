//! Small products over torch's memory.

use pyo3::prelude::*;

use crate::product::SmallProduct;
use crate::python::errors::RequestError;
use crate::python::tensors::Tensor;
use crate::rows::Row;

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
    /// The caller guarantees that the addresses are those of live float32 memory of `rows * inner`, `rows *
    /// cols` and `rows * cols` numbers, and that `out` overlaps neither of the others.
    fn run(&self, x: usize, rows: usize, start: usize, out: usize) -> PyResult<()> {
        let (inputs, outputs) = (rows * self.0.inner(), rows * self.0.cols());
        if x == 0
            || out == 0
            || [x, start, out].iter().any(|address| !address.is_multiple_of(align_of::<f32>()))
        {
            return Err(RequestError::new_err("a small product got an address that is null or not aligned"));
        }
        // SAFETY: not null and aligned as checked; the caller guarantees the rest.
        let (x, start, out) = unsafe {
            (
                std::slice::from_raw_parts(x as *const f32, inputs),
                (start != 0).then(|| std::slice::from_raw_parts(start as *const f32, outputs)),
                std::slice::from_raw_parts_mut(out as *mut f32, outputs),
            )
        };
        self.0.run(x, start, out);
        Ok(())
    }
}
