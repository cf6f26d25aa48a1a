//! Rayon's threads, which a fork leaves behind.

use std::sync::OnceLock;

/// Whether rayon's pool is this process's own, or nobody's yet: handing work to one of before a fork would wait for ever. Whoever
/// hands work over asks first, for the first to ask makes it.
pub(crate) fn are_ours() -> bool {
    static FIRST: OnceLock<u32> = OnceLock::new();
    *FIRST.get_or_init(std::process::id) == std::process::id()
}
