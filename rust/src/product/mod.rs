//! Products of a few rows with a frozen weight, where torch has no good operation.

mod half;
mod small;

pub use half::{HalfProduct, Stored};
pub use small::SmallProduct;
