//! Functions of a C library that is loaded at run time.

use std::path::Path;

use crate::cuda::CudaError;

/// A table of C functions with the library that keeps them alive: `table! { Name, "what it is"; f(types) -> type; ... }`.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident, $what:literal; $($function:ident($($argument:ty),*) -> $result:ty;)*) => {
        $(#[$doc])*
        #[expect(non_snake_case, reason = "the functions have the names of the library")]
        pub struct $name {
            $(pub $function: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: libloading::Library,
        }

        impl $name {
            /// Loads the library at `path`; the system searches for a bare name.
            pub fn open(path: &std::path::Path) -> Result<Self, $crate::cuda::CudaError> {
                let library = $crate::cuda::library::load($what, path)?;
                Ok($name {
                    // SAFETY: the types are those of the library's header; the pointers live as long as `_library`.
                    $($function: unsafe {
                        *library.get(stringify!($function)).map_err(|_| $crate::cuda::CudaError::Lacks {
                            what: $what,
                            path: path.display().to_string(),
                            function: stringify!($function),
                        })?
                    },)*
                    _library: library,
                })
            }
        }
    };
}
pub(super) use table;

/// Loads the library at `path`.
pub fn load(what: &'static str, path: &Path) -> Result<libloading::Library, CudaError> {
    // SAFETY: these libraries' initialisers require nothing; which path is loaded is the user's own choice.
    unsafe { libloading::Library::new(path) }.map_err(|error| CudaError::Missing {
        what,
        path: path.display().to_string(),
        reason: error.to_string(),
    })
}
