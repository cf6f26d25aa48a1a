//! Independent tasks, and who runs them.

/// Runs tasks 0 .. n, each once, in any order, on any threads; returns when all are done.
///
/// # Safety
/// No task runs twice: tasks write to memory that is theirs alone.
pub unsafe trait Workers {
    /// Runs all tasks.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// The calling thread alone.
pub struct Alone;

// SAFETY: one thread counts.
unsafe impl Workers for Alone {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}
