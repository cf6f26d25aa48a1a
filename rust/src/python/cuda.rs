//! The CUDA kernels over torch's memory.

pub mod attention;
pub mod delta;

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cuda::{Architecture, Cache, CudaError, Device, Nvrtc, Paths, units};
use crate::python::errors::KernelError;

/// The kernels of one device, by address: `dspark.kernels.choose` makes them.
///
/// `driver` and `nvrtc` are paths of libraries, `cache` a folder for compiled kernels or `None`, `device` the
/// GPU's number. Raises `KernelError`. Launches return at once and run on the stream that they are given.
#[pyclass(frozen, name = "Kernels", module = "dspark._core")]
pub struct PyKernels(Device);

impl PyKernels {
    /// The device that kernels are launched on.
    pub fn device(&self) -> &Device {
        &self.0
    }
}

#[pymethods]
impl PyKernels {
    #[new]
    #[pyo3(signature = (driver, nvrtc, cache, device))]
    fn new(
        py: Python<'_>,
        driver: PathBuf,
        nvrtc: PathBuf,
        cache: Option<PathBuf>,
        device: u32,
    ) -> PyResult<Self> {
        let paths = Paths { driver, nvrtc, cache };
        Ok(PyKernels(py.detach(|| Device::open(&paths, device))?))
    }

    /// The architecture that they are compiled for, such as "sm_90a".
    #[getter]
    fn architecture(&self) -> String {
        self.0.architecture().to_string()
    }

    /// The device's own name.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// The compiler's version, such as "13.2".
    #[getter]
    fn nvrtc(&self) -> String {
        self.0.nvrtc_version()
    }

    /// Compiles and loads what these entries need, so that no launch has to.
    fn prepare(&self, py: Python<'_>, entries: Vec<String>) -> PyResult<()> {
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        Ok(py.detach(|| self.0.prepare(&entries))?)
    }

    /// Writes start, start + 1, .. to `blocks * 64` int64 numbers at `out`.
    fn probe(&self, out: usize, blocks: u32, start: i64, stream: u64) -> PyResult<()> {
        #[derive(Clone, Copy)]
        #[repr(C)]
        struct Args {
            out: usize,
            start: i64,
        }
        Ok(self.0.launch("probe", [blocks, 1, 1], 64, 0, stream, &Args { out, start })?)
    }
}

/// The units of kernels and the entries in each.
#[pyfunction]
pub fn kernel_units() -> Vec<(&'static str, Vec<&'static str>)> {
    units::UNITS.iter().map(|unit| (unit.name, unit.entries.to_vec())).collect()
}

/// The architecture that kernels are compiled for on a device of this compute capability: "sm_89" for 89,
/// that is 8.9.
#[pyfunction]
pub fn kernel_architecture(capability: u32) -> String {
    Architecture::of_device(capability).to_string()
}

/// Compiles a unit for an architecture such as "sm_90a", or finds it in `cache`; needs no device.
///
/// Returns whether it was in the cache, and for each entry: name, registers of a thread, spilled bytes, bytes
/// of stack, bytes of static shared memory. Raises `KernelError`.
#[pyfunction]
#[pyo3(signature = (nvrtc, cache, unit, architecture))]
pub fn compile_kernels<'py>(
    py: Python<'py>,
    nvrtc: PathBuf,
    cache: Option<PathBuf>,
    unit: &str,
    architecture: &str,
) -> PyResult<(bool, Vec<Bound<'py, PyDict>>)> {
    let unit = units::unit(unit)
        .ok_or_else(|| KernelError::new_err(format!("there is no unit of kernels called {unit:?}")))?;
    let architecture: Architecture = architecture.parse()?;
    let (compiled, kept) = py.detach(|| -> Result<_, CudaError> {
        Cache::new(cache).obtain(&Nvrtc::open(&nvrtc)?, unit, architecture)
    })?;
    let entries = compiled.resources.iter().map(|used| {
        let entry = PyDict::new(py);
        entry.set_item("entry", &used.entry)?;
        entry.set_item("registers", used.registers)?;
        entry.set_item("spills", used.spills)?;
        entry.set_item("stack", used.stack)?;
        entry.set_item("shared", used.shared)?;
        Ok(entry)
    });
    Ok((kept, entries.collect::<PyResult<_>>()?))
}
