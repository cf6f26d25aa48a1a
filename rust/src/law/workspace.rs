//! Buffers that outlive a row, so that a round allocates nothing the size of a vocabulary.

use super::real::Real;
use super::{Form, Law};

/// Spare buffers. One per request or thread; laws built with it may be given back to it.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) singles: Vec<Vec<f32>>,
    pub(super) doubles: Vec<Vec<f64>>,
    pub(super) ids: Vec<Vec<u32>>,
}

impl Workspace {
    /// An empty `f32` buffer, with the capacity of an earlier one where there was one.
    pub fn take_singles(&mut self) -> Vec<f32> {
        Real::take(self)
    }

    /// An empty `f64` buffer, with the capacity of an earlier one where there was one.
    pub fn take_doubles(&mut self) -> Vec<f64> {
        Real::take(self)
    }

    /// An empty buffer of token ids, with the capacity of an earlier one where there was one.
    pub fn take_ids(&mut self) -> Vec<u32> {
        let mut ids = self.ids.pop().unwrap_or_default();
        ids.clear();
        ids
    }

    /// Takes back the buffers of a law.
    pub fn recycle(&mut self, law: Law<'_>) {
        match law.0 {
            Form::Point(_) => {}
            Form::F32(soft) => soft.recycle(self),
            Form::F64(soft) => soft.recycle(self),
        }
    }
}
