//! A device whose kernels can be launched.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::cuda::driver::{Driver, number};
use crate::cuda::units::unit_of;
use crate::cuda::{Architecture, Cache, CudaError, Nvrtc, Unit};

/// Dynamic shared memory that a block gets without asking, in bytes.
const FREE_SHARED: u32 = 48 * 1024;

/// Where the libraries are, and where compiled kernels are kept.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The driver, or a stand-in for it; the system searches for a bare name.
    pub driver: PathBuf,
    /// NVRTC: torch's own.
    pub nvrtc: PathBuf,
    /// The folder of compiled kernels; `None` keeps nothing.
    pub cache: Option<PathBuf>,
}

/// One GPU: driver, compiler, its primary context (which is torch's), and the kernels loaded so far.
pub struct Device {
    driver: Driver,
    nvrtc: Nvrtc,
    cache: Cache,
    ordinal: c_int,
    context: Handle,
    architecture: Architecture,
    name: String,
    multiprocessors: u32,
    most_shared: u32,
    functions: RwLock<HashMap<&'static str, Function>>,
    loading: Mutex<()>,
    /// Guards `allow_shared`; not `loading`, which is held while kernels are compiled.
    sharing: Mutex<()>,
}

/// An opaque handle of the driver's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Handle(*mut c_void);

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; a handle itself is never written.
unsafe impl Sync for Handle {}

/// A loaded kernel, and the dynamic shared memory that its blocks may have so far.
#[derive(Clone, Debug)]
struct Function(Handle, Arc<AtomicU32>);

impl Device {
    /// Opens the GPU of this number, with the context that torch uses.
    ///
    /// Refuses devices older than compute capability 8.0, and those of a major version that NVRTC does not know.
    pub fn open(paths: &Paths, ordinal: u32) -> Result<Self, CudaError> {
        let driver = Driver::open(&paths.driver)?;
        let ordinal = c_int::try_from(ordinal)
            .map_err(|_| CudaError::Unsuitable(format!("there is no device {ordinal}")))?;
        let mut device = 0;
        // SAFETY: one number is written.
        let code = unsafe { (driver.functions.cuDeviceGet)(&raw mut device, ordinal) };
        driver.check(format!("opening device {ordinal}"), "cuDeviceGet", code)?;
        let attribute = |number| attribute(&driver, device, number);
        let capability = attribute(number::CAPABILITY_MAJOR)? * 10 + attribute(number::CAPABILITY_MINOR)?;
        let (multiprocessors, most_shared) =
            (attribute(number::MULTIPROCESSORS)?, attribute(number::MOST_SHARED)?);
        let name = name_of(&driver, device)?;
        if capability < Architecture::OLDEST {
            return Err(CudaError::Unsuitable(format!(
                "{name} has compute capability {}.{}, but the kernels need at least {}.{}",
                capability / 10,
                capability % 10,
                Architecture::OLDEST / 10,
                Architecture::OLDEST % 10
            )));
        }
        let nvrtc = Nvrtc::open(&paths.nvrtc)?;
        let architecture = nvrtc.architecture(capability)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: one handle is written; `Drop` gives the context back.
        let code = unsafe { (driver.functions.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        driver.check(format!("opening device {ordinal}"), "cuDevicePrimaryCtxRetain", code)?;
        Ok(Device {
            driver,
            nvrtc,
            cache: Cache::new(paths.cache.clone()),
            ordinal: device,
            context: Handle(context),
            architecture,
            name,
            multiprocessors,
            most_shared,
            functions: RwLock::default(),
            loading: Mutex::default(),
            sharing: Mutex::default(),
        })
    }

    /// What the kernels are compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The device's own name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A lower bound of the blocks that run at once, for choosing how to split work.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The compiler's version.
    pub fn nvrtc_version(&self) -> String {
        self.nvrtc.version()
    }

    /// Compiles (or finds in the cache) and loads what these entries need, so that no launch has to do it.
    pub fn prepare(&self, entries: &[&str]) -> Result<(), CudaError> {
        entries.iter().try_for_each(|entry| self.function(entry).map(drop))
    }

    /// Launches a kernel on `stream` (the driver's handle, 0 is the default stream) and returns at once.
    ///
    /// `args` is the one parameter of the kernel, laid out as in its source. `shared` is the dynamic shared memory of a
    /// block, in bytes. The unit is compiled and loaded if it was not yet.
    ///
    /// The caller vouches that the addresses in `args` are what the kernel reads and writes, on this device.
    pub fn launch<A: Copy>(
        &self,
        entry: &str,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        stream: u64,
        args: &A,
    ) -> Result<(), CudaError> {
        let function = self.function(entry)?;
        if shared > self.most_shared {
            return Err(CudaError::Unsuitable(format!(
                "kernel {entry} needs {shared} bytes of shared memory, but a block on {} has only {}",
                self.name, self.most_shared
            )));
        }
        let mut bytes = size_of::<A>();
        let mut options: [*mut c_void; 5] = [
            number::BUFFER_POINTER as *mut c_void,
            std::ptr::from_ref(args).cast_mut().cast(),
            number::BUFFER_SIZE as *mut c_void,
            (&raw mut bytes).cast(),
            std::ptr::null_mut(),
        ];
        let _entered = self.enter()?;
        self.allow_shared(entry, &function, shared)?;
        // SAFETY: the function belongs to the context that is current; the options end with a null and name a buffer and
        // its size, which the driver copies before it returns; what the kernel does with it is what the caller vouches for.
        let code = unsafe {
            (self.driver.functions.cuLaunchKernel)(
                function.0.0,
                grid[0],
                grid[1],
                grid[2],
                block,
                1,
                1,
                shared,
                stream as *mut c_void,
                std::ptr::null_mut(),
                options.as_mut_ptr(),
            )
        };
        self.driver.check(format!("launching kernel {entry}"), "cuLaunchKernel", code)
    }

    fn function(&self, entry: &str) -> Result<Function, CudaError> {
        if let Some(found) = self.loaded(entry) {
            return Ok(found);
        }
        let (unit, entry) =
            unit_of(entry).ok_or_else(|| CudaError::Unsuitable(format!("there is no kernel {entry}")))?;
        let _one_at_a_time = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if self.loaded(entry).is_none() {
            self.load(unit)?;
        }
        self.loaded(entry).ok_or_else(|| CudaError::Unsuitable(format!("kernel {entry} was not loaded")))
    }

    fn loaded(&self, entry: &str) -> Option<Function> {
        self.functions.read().unwrap_or_else(PoisonError::into_inner).get(entry).cloned()
    }

    /// Loads a unit's cubin and lists its functions.
    fn load(&self, unit: &Unit) -> Result<(), CudaError> {
        let (compiled, _) = self.cache.obtain(&self.nvrtc, unit, self.architecture)?;
        let _entered = self.enter()?;
        let doing = || format!("loading the kernels of {}", unit.name);
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole cubin, which the driver copies; one handle is written.
        let code = unsafe {
            (self.driver.functions.cuModuleLoadData)(&raw mut module, compiled.cubin.as_ptr().cast())
        };
        self.driver.check(doing(), "cuModuleLoadData", code)?;
        let each = unit.entries.iter().map(|entry| Ok((*entry, self.function_of(entry, module)?)));
        match each.collect::<Result<Vec<_>, CudaError>>() {
            Ok(found) => {
                self.functions.write().unwrap_or_else(PoisonError::into_inner).extend(found);
                Ok(())
            }
            Err(error) => {
                // SAFETY: the module was loaded above, and nothing of it is kept.
                unsafe { (self.driver.functions.cuModuleUnload)(module) };
                Err(error)
            }
        }
    }

    fn function_of(&self, entry: &str, module: *mut c_void) -> Result<Function, CudaError> {
        let name = CString::new(entry).unwrap_or_default();
        let mut function = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero, one handle is written.
        let code =
            unsafe { (self.driver.functions.cuModuleGetFunction)(&raw mut function, module, name.as_ptr()) };
        self.driver.check(format!("loading kernel {entry}"), "cuModuleGetFunction", code)?;
        Ok(Function(Handle(function), Arc::new(AtomicU32::new(FREE_SHARED))))
    }

    /// Asks for more dynamic shared memory than a block gets by default, once for each larger size.
    ///
    /// Asks only for what a launch needs: a block's limit also covers its static memory and the driver's
    /// share.
    fn allow_shared(&self, entry: &str, function: &Function, bytes: u32) -> Result<(), CudaError> {
        let Function(handle, allowed) = function;
        if bytes <= allowed.load(Ordering::Acquire) {
            return Ok(());
        }
        // Setting the attribute can lower it: of two launches at once, the smaller size must not remain.
        let _one_at_a_time = self.sharing.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= allowed.load(Ordering::Acquire) {
            return Ok(());
        }
        let asked = c_int::try_from(bytes).unwrap_or(c_int::MAX);
        // SAFETY: no pointers but the handle.
        let code = unsafe {
            (self.driver.functions.cuFuncSetAttribute)(handle.0, number::MOST_DYNAMIC_SHARED, asked)
        };
        self.driver.check(format!("giving kernel {entry} shared memory"), "cuFuncSetAttribute", code)?;
        allowed.store(bytes, Ordering::Release);
        Ok(())
    }

    /// Makes the device's context current on this thread until the result is dropped.
    ///
    /// On threads where torch has worked it already is, and then this is one cheap call.
    fn enter(&self) -> Result<Option<Entered<'_>>, CudaError> {
        let mut current = std::ptr::null_mut();
        let functions = &self.driver.functions;
        // SAFETY: one handle is written.
        let code = unsafe { (functions.cuCtxGetCurrent)(&raw mut current) };
        self.driver.check("entering the device's context", "cuCtxGetCurrent", code)?;
        if current == self.context.0 {
            return Ok(None);
        }
        // SAFETY: the context is retained as long as `self`.
        let code = unsafe { (functions.cuCtxPushCurrent_v2)(self.context.0) };
        self.driver.check("entering the device's context", "cuCtxPushCurrent_v2", code)?;
        Ok(Some(Entered(self)))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Modules stay with the context, which is torch's: unloading them would wait for kernels that still run.
        // SAFETY: the context was retained once by `open`.
        unsafe { (self.driver.functions.cuDevicePrimaryCtxRelease_v2)(self.ordinal) };
    }
}

/// Keeps the context current until it is dropped.
struct Entered<'a>(&'a Device);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: one handle is written. What was pushed is there to be popped.
        unsafe { (self.0.driver.functions.cuCtxPopCurrent_v2)(&raw mut context) };
    }
}

fn attribute(driver: &Driver, device: c_int, attribute: c_int) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: one number is written.
    let code = unsafe { (driver.functions.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
    driver.check("asking what the device can do", "cuDeviceGetAttribute", code)?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn name_of(driver: &Driver, device: c_int) -> Result<String, CudaError> {
    let mut name = [0_u8; 128];
    // SAFETY: no more than that many bytes are written, with a zero at the end.
    let code =
        unsafe { (driver.functions.cuDeviceGetName)(name.as_mut_ptr().cast(), name.len() as c_int, device) };
    driver.check("asking for the device's name", "cuDeviceGetName", code)?;
    Ok(String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned())
}
