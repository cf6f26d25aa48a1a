//! What can go wrong between a kernel's source and its launch.

use thiserror::Error;

/// Why a kernel is not available or could not be run. Each is one sentence for a user.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum CudaError {
    /// A library is missing or cannot be loaded.
    #[error("{what} cannot be loaded from {path}: {reason}")]
    Missing {
        /// "the CUDA driver" or "NVRTC".
        what: &'static str,
        /// The path or name that was tried.
        path: String,
        /// The loader's words.
        reason: String,
    },
    /// A library is too old, or not the right one.
    #[error("{what} at {path} has no function {function}")]
    Lacks {
        /// "the CUDA driver" or "NVRTC".
        what: &'static str,
        /// The path or name that was tried.
        path: String,
        /// The name.
        function: &'static str,
    },
    /// A call of the driver or of NVRTC failed.
    #[error("{doing}: {function} returned {code}{said}")]
    Call {
        /// What was being done.
        doing: String,
        /// The function that failed.
        function: &'static str,
        /// Its code's name, or the number.
        code: String,
        /// The library's words, with a leading space and in brackets, or nothing.
        said: String,
    },
    /// NVRTC refused a source.
    #[error("kernels of {unit} do not compile for {architecture}: {log}")]
    Compile {
        /// The unit's name.
        unit: &'static str,
        /// As NVRTC spells it.
        architecture: String,
        /// What the compiler said, on one line.
        log: String,
    },
    /// The device, or what was asked of it, is not supported.
    #[error("{0}")]
    Unsuitable(String),
}
