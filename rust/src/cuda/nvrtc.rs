//! NVRTC: from a unit's source to a cubin for one architecture.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use crate::cuda::library::table;
use crate::cuda::resources::read_log;
use crate::cuda::units::HEADERS;
use crate::cuda::{Architecture, CudaError, Resources, Unit};

table! {
    /// NVRTC's functions, as nvrtc.h has them.
    Functions, "NVRTC";
    nvrtcVersion(*mut c_int, *mut c_int) -> c_int;
    nvrtcGetNumSupportedArchs(*mut c_int) -> c_int;
    nvrtcGetSupportedArchs(*mut c_int) -> c_int;
    nvrtcGetErrorString(c_int) -> *const c_char;
    nvrtcCreateProgram(*mut *mut c_void, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    nvrtcDestroyProgram(*mut *mut c_void) -> c_int;
    nvrtcCompileProgram(*mut c_void, c_int, *const *const c_char) -> c_int;
    nvrtcGetCUBINSize(*mut c_void, *mut usize) -> c_int;
    nvrtcGetCUBIN(*mut c_void, *mut c_char) -> c_int;
    nvrtcGetProgramLogSize(*mut c_void, *mut usize) -> c_int;
    nvrtcGetProgramLog(*mut c_void, *mut c_char) -> c_int;
}

/// The flags of every compilation, apart from the architecture. `-v` makes the log name what an entry uses.
pub const FLAGS: &[&str] = &["--std=c++17", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills"];

/// A unit compiled for one architecture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// What the driver loads.
    pub cubin: Vec<u8>,
    /// Resources of each entry, in the order of their names.
    pub resources: Vec<Resources>,
}

/// The compiler.
pub struct Nvrtc {
    functions: Functions,
    version: (c_int, c_int),
    supported: Vec<c_int>,
}

impl Nvrtc {
    /// Loads NVRTC and asks for its version and the architectures that it supports.
    pub fn open(path: &Path) -> Result<Self, CudaError> {
        let functions = Functions::open(path)?;
        let (mut major, mut minor, mut count) = (0, 0, 0);
        let mut this = Nvrtc { functions, version: (0, 0), supported: Vec::new() };
        // SAFETY: each call writes one number, or as many as were counted, to where there is room for them.
        unsafe {
            this.check("nvrtcVersion", (this.functions.nvrtcVersion)(&raw mut major, &raw mut minor))?;
            let code = (this.functions.nvrtcGetNumSupportedArchs)(&raw mut count);
            this.check("nvrtcGetNumSupportedArchs", code)?;
            let mut supported = vec![0; usize::try_from(count).unwrap_or(0)];
            let code = (this.functions.nvrtcGetSupportedArchs)(supported.as_mut_ptr());
            this.check("nvrtcGetSupportedArchs", code)?;
            (this.version, this.supported) = ((major, minor), supported);
        }
        Ok(this)
    }

    /// The version as CUDA writes it: "13.2".
    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The architecture to compile for on a device of this compute capability. The device may be newer than
    /// this NVRTC, but its major version may not.
    pub fn architecture(&self, capability: u32) -> Result<Architecture, CudaError> {
        let known = self.supported.iter().filter_map(|&known| u32::try_from(known).ok());
        Architecture::nearest(capability, known)
            .ok_or_else(|| self.unknown(Architecture::of_device(capability)))
    }

    fn unknown(&self, architecture: Architecture) -> CudaError {
        CudaError::Unsuitable(format!("NVRTC {} does not support {architecture}", self.version()))
    }

    /// Refuses an architecture that this NVRTC does not know.
    pub fn require(&self, architecture: Architecture) -> Result<(), CudaError> {
        if self.supported.iter().any(|&known| u32::try_from(known) == Ok(architecture.capability)) {
            return Ok(());
        }
        Err(self.unknown(architecture))
    }

    /// Compiles a unit.
    pub fn compile(&self, unit: &Unit, architecture: Architecture) -> Result<Compiled, CudaError> {
        self.require(architecture)?;
        let program = self.program(unit)?;
        let flags = FLAGS.iter().map(|flag| (*flag).to_string());
        let flags: Vec<CString> =
            flags.chain([format!("--gpu-architecture={architecture}")]).map(text).collect();
        let addresses: Vec<_> = flags.iter().map(|flag| flag.as_ptr()).collect();
        // SAFETY: `program` is one that NVRTC made; `addresses` are as many strings, which outlive the call.
        let code = unsafe {
            (self.functions.nvrtcCompileProgram)(program.handle, addresses.len() as c_int, addresses.as_ptr())
        };
        let log = program.log()?;
        if code != 0 {
            let log = log.split_whitespace().collect::<Vec<_>>().join(" ");
            let log = if log.is_empty() { self.words(code) } else { log };
            return Err(CudaError::Compile { unit: unit.name, architecture: architecture.to_string(), log });
        }
        let cubin = program.cubin()?;
        let mut resources = read_log(&log);
        resources.sort_by(|a, b| a.entry.cmp(&b.entry));
        Ok(Compiled { cubin, resources })
    }

    fn program(&self, unit: &Unit) -> Result<Program<'_>, CudaError> {
        let (source, name) = (text(unit.source), text(format!("{}.cu", unit.name)));
        let texts: Vec<CString> = HEADERS.iter().map(|header| text(header.1)).collect();
        let names: Vec<CString> = HEADERS.iter().map(|header| text(header.0)).collect();
        let texts: Vec<_> = texts.iter().map(|one| one.as_ptr()).collect::<Vec<_>>();
        let names: Vec<_> = names.iter().map(|one| one.as_ptr()).collect::<Vec<_>>();
        let mut handle = std::ptr::null_mut();
        // SAFETY: all strings end with a zero and outlive the call, which copies them; the counts are theirs.
        let code = unsafe {
            (self.functions.nvrtcCreateProgram)(
                &raw mut handle,
                source.as_ptr(),
                name.as_ptr(),
                texts.len() as c_int,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", code)?;
        Ok(Program { nvrtc: self, handle })
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        Err(CudaError::Call {
            doing: "compiling kernels".to_string(),
            function,
            code: self.words(code),
            said: String::new(),
        })
    }

    fn words(&self, code: c_int) -> String {
        // SAFETY: NVRTC answers with a string of its own, which is never freed.
        unsafe {
            let words = (self.functions.nvrtcGetErrorString)(code);
            if words.is_null() {
                code.to_string()
            } else {
                CStr::from_ptr(words).to_string_lossy().into_owned()
            }
        }
    }
}

/// A program of NVRTC, destroyed on drop.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: *mut c_void,
}

impl Program<'_> {
    fn log(&self) -> Result<String, CudaError> {
        let functions = &self.nvrtc.functions;
        let bytes = self.read(
            ("nvrtcGetProgramLogSize", functions.nvrtcGetProgramLogSize),
            ("nvrtcGetProgramLog", functions.nvrtcGetProgramLog),
        )?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_string())
    }

    fn cubin(&self) -> Result<Vec<u8>, CudaError> {
        let functions = &self.nvrtc.functions;
        self.read(
            ("nvrtcGetCUBINSize", functions.nvrtcGetCUBINSize),
            ("nvrtcGetCUBIN", functions.nvrtcGetCUBIN),
        )
    }

    fn read(
        &self,
        size: (&'static str, unsafe extern "C" fn(*mut c_void, *mut usize) -> c_int),
        content: (&'static str, unsafe extern "C" fn(*mut c_void, *mut c_char) -> c_int),
    ) -> Result<Vec<u8>, CudaError> {
        let mut bytes = 0;
        // SAFETY: the handle is that of a program; one number is written.
        self.nvrtc.check(size.0, unsafe { (size.1)(self.handle, &raw mut bytes) })?;
        let mut found = vec![0_u8; bytes];
        // SAFETY: as many bytes are written as were announced.
        self.nvrtc.check(content.0, unsafe { (content.1)(self.handle, found.as_mut_ptr().cast()) })?;
        Ok(found)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is NVRTC's and is not used afterwards. A failure leaves nothing to do.
        unsafe { (self.nvrtc.functions.nvrtcDestroyProgram)(&raw mut self.handle) };
    }
}

/// A C string of one of the crate's own texts, which contain no zero byte.
fn text(words: impl Into<String>) -> CString {
    CString::new(words.into().replace('\0', "")).unwrap_or_default()
}
