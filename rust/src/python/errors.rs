//! The exceptions of `dspark.errors`, and which failure becomes which.

use pyo3::import_exception;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cuda::CudaError;
use crate::engine::Failure;

import_exception!(dspark.errors, CapacityError);
import_exception!(dspark.errors, ConfigError);
import_exception!(dspark.errors, DSparkError);
import_exception!(dspark.errors, KernelError);
import_exception!(dspark.errors, NumericsError);
import_exception!(dspark.errors, QueueFullError);
import_exception!(dspark.errors, RequestError);

/// The exception that reports `failure`.
pub fn to_py(failure: &Failure) -> PyErr {
    match failure {
        Failure::Numerics(message) => NumericsError::new_err(message.clone()),
        Failure::Capacity(message) => CapacityError::new_err(message.clone()),
        Failure::QueueFull(message) => QueueFullError::new_err(message.clone()),
        Failure::Runner(message) => DSparkError::new_err(message.clone()),
    }
}

impl From<CudaError> for PyErr {
    fn from(error: CudaError) -> PyErr {
        KernelError::new_err(error.to_string())
    }
}

/// Logs an exception that no caller can catch, with its traceback.
pub fn log(py: Python<'_>, message: &str, error: PyErr) {
    let write = || -> PyResult<()> {
        let options = PyDict::new(py);
        options.set_item("exc_info", error.into_value(py))?;
        let logger = py.import("logging")?.call_method1("getLogger", ("dspark",))?;
        logger.call_method("error", (message,), Some(&options))?;
        Ok(())
    };
    // A logger that fails must not hide the failure that it was to report.
    let _ = write();
}
