//! Rayon's threads, which do not survive a fork.

use std::sync::OnceLock;

/// Whether rayon's pool belongs to this process: work handed to a pool from before a fork would wait for
/// ever. Code that hands work over has to ask first, because the first process to ask is the one that makes
/// the pool.
pub(crate) fn are_ours() -> bool {
    static FIRST: OnceLock<u32> = OnceLock::new();
    *FIRST.get_or_init(std::process::id) == std::process::id()
}
