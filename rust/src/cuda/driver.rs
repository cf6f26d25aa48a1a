//! The CUDA driver's functions that a launcher needs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use crate::cuda::CudaError;
use crate::cuda::library::table;

table! {
    /// The functions, as cuda.h has them; the endings `_v2` are those that its macros add.
    Functions, "the CUDA driver";
    cuInit(c_uint) -> c_int;
    cuDeviceGet(*mut c_int, c_int) -> c_int;
    cuDeviceGetName(*mut c_char, c_int, c_int) -> c_int;
    cuDeviceGetAttribute(*mut c_int, c_int, c_int) -> c_int;
    cuDevicePrimaryCtxRetain(*mut *mut c_void, c_int) -> c_int;
    cuDevicePrimaryCtxRelease_v2(c_int) -> c_int;
    cuCtxGetCurrent(*mut *mut c_void) -> c_int;
    cuCtxPushCurrent_v2(*mut c_void) -> c_int;
    cuCtxPopCurrent_v2(*mut *mut c_void) -> c_int;
    cuModuleLoadData(*mut *mut c_void, *const c_void) -> c_int;
    cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char) -> c_int;
    cuModuleUnload(*mut c_void) -> c_int;
    cuFuncSetAttribute(*mut c_void, c_int, c_int) -> c_int;
    cuLaunchKernel(*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_int;
    cuGetErrorName(c_int, *mut *const c_char) -> c_int;
    cuGetErrorString(c_int, *mut *const c_char) -> c_int;
}

/// Numbers of attributes and of launch options, from cuda.h.
pub mod number {
    use std::ffi::c_int;

    /// CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    pub const MULTIPROCESSORS: c_int = 16;
    /// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    pub const CAPABILITY_MAJOR: c_int = 75;
    /// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    pub const CAPABILITY_MINOR: c_int = 76;
    /// CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    pub const MOST_SHARED: c_int = 97;
    /// CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    pub const MOST_DYNAMIC_SHARED: c_int = 8;
    /// CU_LAUNCH_PARAM_BUFFER_POINTER
    pub const BUFFER_POINTER: usize = 1;
    /// CU_LAUNCH_PARAM_BUFFER_SIZE
    pub const BUFFER_SIZE: usize = 2;
}

/// The driver.
pub struct Driver {
    /// For calls that have no method here.
    pub functions: Functions,
}

impl Driver {
    /// Loads the driver and initialises it.
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        let this = Driver { functions: Functions::open(path)? };
        // SAFETY: no pointers.
        this.check("starting CUDA", "cuInit", unsafe { (this.functions.cuInit)(0) })?;
        Ok(this)
    }

    /// Returns an error unless `code` is success; `doing` says what was being done.
    pub fn check(
        &self,
        doing: impl Into<String>,
        function: &'static str,
        code: c_int,
    ) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let name = self.words(self.functions.cuGetErrorName, code);
        let said = self.words(self.functions.cuGetErrorString, code);
        Err(CudaError::Call {
            doing: doing.into(),
            function,
            code: name.unwrap_or_else(|| format!("error {code}")),
            said: said.map(|said| format!(" ({said})")).unwrap_or_default(),
        })
    }

    fn words(
        &self,
        function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        code: c_int,
    ) -> Option<String> {
        let mut words = std::ptr::null();
        // SAFETY: the driver writes the address of a string of its own, or nothing if it does not know the code.
        unsafe {
            let found = function(code, &raw mut words) == 0 && !words.is_null();
            found.then(|| CStr::from_ptr(words).to_string_lossy().into_owned())
        }
    }
}
