//! The CUDA kernels on a device: compiled by NVRTC on the user's machine, kept on disk, launched through the driver.
//!
//! The driver and NVRTC are libraries that are found at run time, so that one wheel serves machines with and
//! without a GPU. [`units`] lists the embedded sources; a [`Device`] loads the kernels that it is asked for.

mod architecture;
pub mod attention;
mod cache;
pub mod delta;
mod device;
mod driver;
mod error;
mod library;
mod nvrtc;
mod resources;
pub mod sampling;
pub mod units;

pub use architecture::Architecture;
pub use cache::Cache;
pub use device::{Device, Paths};
pub use error::CudaError;
pub use nvrtc::{Compiled, Nvrtc};
pub use resources::Resources;
pub use units::Unit;
