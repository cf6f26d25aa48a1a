//! Tensors and arrays of Python, read in place.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use crate::cuda::sampling::DeviceRows;
use crate::engine::{PassRows, RunnerError};
use crate::python::errors::RequestError;
use crate::rows::{DType, Rows};

/// A 1-D or 2-D torch tensor or numpy array, kept alive while its memory is read. One that lies on another
/// device must be fetched before its rows can be read here.
pub struct Tensor {
    owner: Py<PyAny>,
    /// The copy of a tensor that lies elsewhere, once it was fetched.
    host: Option<Box<Tensor>>,
    is_host: bool,
    address: usize,
    dtype: DType,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl Tensor {
    /// A CPU tensor, after checking what can be checked here: device, element type, shape and strides.
    pub fn from_py(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let tensor = Self::anywhere(object, name)?;
        if tensor.is_host {
            Ok(tensor)
        } else {
            Err(RequestError::new_err(format!("{name}: expected a CPU tensor")))
        }
    }

    /// The same for a tensor on any device.
    pub fn anywhere(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        if let Ok(interface) = object.getattr("__array_interface__") {
            return Self::from_numpy(object, interface.cast::<PyDict>()?, name);
        }
        Self::from_torch(object, name)
    }

    /// Copies a tensor of another device to this one's memory.
    pub fn fetch(&mut self, py: Python<'_>) -> PyResult<()> {
        if !self.is_host && self.host.is_none() {
            let copy = self.owner.bind(py).call_method0("cpu")?;
            self.host = Some(Box::new(Self::from_py(&copy, "rows")?));
        }
        Ok(())
    }

    /// Where the rows lie, for kernels of their device.
    pub fn device_rows(&self) -> DeviceRows {
        DeviceRows {
            address: self.address as u64,
            dtype: self.dtype,
            rows: self.rows,
            columns: self.cols,
            stride: self.row_stride,
        }
    }

    /// The Python object.
    pub fn owner(&self) -> &Py<PyAny> {
        &self.owner
    }

    /// The rows, in place.
    ///
    /// # Panics
    /// If they lie on another device and were not fetched.
    pub fn rows(&self) -> Rows<'_> {
        if let Some(host) = &self.host {
            return host.rows();
        }
        assert!(self.is_host, "rows of another device are read before they were fetched");
        // SAFETY: the address, shape and strides are those that the owner gave for its own memory, the owner
        // is alive as long as `self`, and whoever hands a tensor to the core does not write to it until the
        // call ends.
        unsafe {
            Rows::from_raw_parts(self.address as *const u8, self.dtype, self.rows, self.cols, self.row_stride)
        }
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    fn from_torch(object: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let py = object.py();
        let wrong = |what: String| RequestError::new_err(format!("{name}: {what}"));
        let dtype = object.getattr("dtype").map_err(|_| {
            PyTypeError::new_err(format!(
                "{name} must be a torch CPU tensor or a numpy array, not {}",
                object.get_type()
            ))
        })?;
        let dtype = torch_dtypes(py)?
            .iter()
            .find(|(known, _)| known.bind(py).is(&dtype))
            .map(|(_, dtype)| *dtype)
            .ok_or_else(|| wrong(format!("expected float64, float32, float16 or bfloat16, found {dtype}")))?;
        let is_host = object.getattr("is_cpu")?.is_truthy()?;
        let shape: Vec<usize> = object.getattr("shape")?.extract()?;
        let strides: Vec<usize> = object.call_method0("stride")?.extract()?;
        let address: usize = object.call_method0("data_ptr")?.extract()?;
        Ok(Tensor { is_host, ..Self::checked(object, name, address, dtype, &shape, &strides)? })
    }

    fn from_numpy(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, name: &str) -> PyResult<Self> {
        let wrong = |what: String| RequestError::new_err(format!("{name}: {what}"));
        let item = |key: &str| {
            interface.get_item(key)?.ok_or_else(|| wrong(format!("no {key} in its array interface")))
        };
        let kind: String = item("typestr")?.extract()?;
        let (dtype, size) = match kind.as_str() {
            "<f8" => (DType::F64, 8),
            "<f4" => (DType::F32, 4),
            "<f2" => (DType::F16, 2),
            other => return Err(wrong(format!("expected float64, float32 or float16, found {other}"))),
        };
        let (address, _read_only): (usize, bool) = item("data")?.extract()?;
        let shape: Vec<usize> = item("shape")?.extract()?;
        let strides: Option<Vec<isize>> = interface.get_item("strides")?.and_then(|s| s.extract().ok());
        let strides = match strides {
            Some(bytes) if bytes.iter().any(|&s| s < 0 || !(s as usize).is_multiple_of(size)) => {
                return Err(wrong(format!("strides {bytes:?} cannot be read in place")));
            }
            Some(bytes) => bytes.iter().map(|&s| s as usize / size).collect(),
            None => vec![shape.last().copied().unwrap_or(1), 1][2 - shape.len().min(2)..].to_vec(),
        };
        Self::checked(object, name, address, dtype, &shape, &strides)
    }

    fn checked(
        object: &Bound<'_, PyAny>,
        name: &str,
        address: usize,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
    ) -> PyResult<Self> {
        let (rows, cols, row_stride, col_stride) = match (shape, strides) {
            (&[cols], &[stride]) => (1, cols, cols, stride),
            (&[rows, cols], &[row, col]) => (rows, cols, row, col),
            _ => {
                return Err(RequestError::new_err(format!(
                    "{name}: expected one or two dimensions, found shape {shape:?}"
                )));
            }
        };
        if cols > 1 && col_stride != 1 {
            return Err(RequestError::new_err(format!("{name}: the last dimension must be contiguous")));
        }
        if rows > 1 && row_stride < cols {
            return Err(RequestError::new_err(format!(
                "{name}: rows overlap (row stride {row_stride}, {cols} columns)"
            )));
        }
        if rows * cols > 0 && (address == 0 || !address.is_multiple_of(dtype.size())) {
            return Err(RequestError::new_err(format!("{name}: its memory is null or not aligned")));
        }
        let owner = object.clone().unbind();
        Ok(Tensor { owner, host: None, is_host: true, address, dtype, rows, cols, row_stride })
    }
}

impl PassRows for Tensor {
    fn rows(&self) -> Rows<'_> {
        Tensor::rows(self)
    }

    fn fetch(&mut self) -> Result<(), RunnerError> {
        let fetched = Python::attach(|py| Tensor::fetch(self, py));
        fetched.map_err(|error| RunnerError(format!("rows could not be copied to the host: {error}")))
    }

    fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }
}

/// Torch's dtype objects, which are singletons.
fn torch_dtypes(py: Python<'_>) -> PyResult<&[(Py<PyAny>, DType); 4]> {
    static DTYPES: PyOnceLock<[(Py<PyAny>, DType); 4]> = PyOnceLock::new();
    DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let get = |name: &str| Ok::<_, PyErr>(torch.getattr(name)?.unbind());
        Ok([
            (get("float32")?, DType::F32),
            (get("bfloat16")?, DType::Bf16),
            (get("float16")?, DType::F16),
            (get("float64")?, DType::F64),
        ])
    })
}
