//! torch's own threads, for work between its operations.
//!
//! After an operation torch's OpenMP workers spin for a while, ready for the next one. A second pool of
//! threads would have to fight them for the cores; these take the work at once.

use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::workers::Workers;

type Parallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// GNU OpenMP's entry point for a parallel region (part of its stable interface; LLVM's library has it too).
pub struct OpenMp(Parallel);

impl OpenMp {
    /// The function at `address`; `None` for 0.
    ///
    /// # Safety
    /// A non-zero address is that of `GOMP_parallel` in a library that stays loaded.
    pub unsafe fn at(address: usize) -> Option<Self> {
        // SAFETY: as the caller guarantees; a function pointer has the size of an address.
        (address != 0).then(|| OpenMp(unsafe { std::mem::transmute::<usize, Parallel>(address) }))
    }
}

/// What the threads of a region share.
struct Region<'a> {
    next: AtomicUsize,
    tasks: usize,
    task: &'a (dyn Fn(usize) + Sync),
    panicked: AtomicBool,
}

// SAFETY: the counter gives every number once.
unsafe impl Workers for OpenMp {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let region = Region { next: AtomicUsize::new(0), tasks, task, panicked: AtomicBool::new(false) };
        // SAFETY: the region outlives the call, which returns when every thread has left `take`. 0 threads
        // means as many as torch uses on this thread, 0 flags none.
        unsafe { (self.0)(take, (&raw const region).cast_mut().cast(), 0, 0) };
        assert!(!region.panicked.into_inner(), "a task of a parallel region panicked");
    }
}

/// A thread's part of a region: takes tasks until none is left. A panic must not leave through C.
extern "C" fn take(region: *mut c_void) {
    // SAFETY: `run` passes its region, which it only reads meanwhile.
    let region = unsafe { &*region.cast::<Region<'_>>() };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        loop {
            let task = region.next.fetch_add(1, Ordering::Relaxed);
            if task >= region.tasks {
                return;
            }
            (region.task)(task);
        }
    }));
    if outcome.is_err() {
        region.panicked.store(true, Ordering::Relaxed);
    }
}
