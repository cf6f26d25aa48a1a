//! The structs that host and kernels share, as `cuda/kernels/rows.cuh` has them. Addresses are the device's.

use crate::rows::DType;

/// Number of logits that one block of threads processes.
pub(super) const TILE: usize = 1024;

/// A struct without padding that is written to a table byte by byte.
///
/// # Safety
/// Every byte of a value is initialised: fields leave no gaps.
pub(super) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ident = $size:literal),*) => {$(
        // SAFETY: the assertion below finds gaps: the sizes are the sums of the fields'.
        unsafe impl Plain for $name {}
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

/// One row of logits.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub logits: u64,
    pub dtype: i32,
    pub columns: i32,
    /// Index of its request.
    pub request: i32,
    /// Number of drafted tokens of the block that come before this row's token.
    pub before: i32,
    /// Index of its copy, biased and penalised; -1 if nothing changes it.
    pub changed: i32,
    /// Whether the request's edits may change it.
    pub edited: i32,
}

/// A token that bias, penalties or the mask of stop tokens may change.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    pub token: u32,
    pub in_output: u32,
    pub flags: u32,
    pub bias: f32,
}

impl Edit {
    pub const SEEN: u32 = 1;
    pub const STOP: u32 = 2;
    pub const BIASED: u32 = 4;
}

/// What a request asks for, and which rows are its own.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub top_p: f64,
    pub min_p: f64,
    pub seed: u64,
    pub inverse_temperature: f32,
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
    pub top_k: u32,
    pub sample: u32,
    pub position: u32,
    pub anchor: u32,
    /// 0 at temperature 0.
    pub kind: i32,
    pub generated: i32,
    pub min_tokens: i32,
    pub penalises: i32,
    pub drafted: i32,
    pub first_row: i32,
    pub first_id: i32,
    pub first_draft: i32,
    pub first_edit: i32,
    pub edits: i32,
}

/// A request's outcome.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawVerdict {
    pub accepted: i32,
    pub token: i32,
    pub bad: u32,
    pub close: u32,
}

/// Size of the device's `Law`, which the host never reads.
pub(super) const LAW_BYTES: usize = 40;
/// Size of the device's `Race`.
pub(super) const RACE_BYTES: usize = 24;

/// A tensor of the heads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Matrix {
    pub data: u64,
    pub dtype: i32,
    pub rows: i32,
    pub columns: i32,
    pub stride: i32,
}

/// The heads of a draft.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heads {
    pub w1: Matrix,
    pub w2: Matrix,
    pub latent: Matrix,
    pub latent_bias: Matrix,
    pub confidence: Matrix,
    pub hidden: Matrix,
    pub tokens: u64,
    pub column: u64,
    pub kind: i32,
    pub lead: i32,
    pub with_markov: i32,
    pub vocabulary: i32,
}

/// The parameters of every sampling kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleArgs {
    pub(super) rows: u64,
    pub(super) requests: u64,
    pub(super) edits: u64,
    pub(super) ids: u64,
    pub(super) changed: u64,
    pub(super) laws: u64,
    pub(super) tops: u64,
    pub(super) bads: u64,
    pub(super) sums: u64,
    pub(super) races: u64,
    pub(super) residuals: u64,
    pub(super) verdicts: u64,
    pub(super) draft_rows: u64,
    pub(super) draft_changed: u64,
    pub(super) draft_laws: u64,
    pub(super) latents: u64,
    pub(super) states: u64,
    pub(super) dots: u64,
    pub(super) draft_bads: u64,
    pub(super) heads: Heads,
    pub(super) tiles: i32,
    pub(super) columns: i32,
    pub(super) requests_count: i32,
    pub(super) rule: i32,
    pub(super) stride: i32,
    pub(super) offset: i32,
    pub(super) draft_first: i32,
    pub(super) unused: i32,
}

plain!(
    u32 = 4,
    Row = 32,
    Edit = 16,
    Request = 96,
    RawVerdict = 16,
    Matrix = 24,
    Heads = 176,
    SampleArgs = 360
);

impl SampleArgs {
    /// The bytes that a launch passes.
    pub fn bytes(&self) -> &[u8] {
        bytes_of(std::slice::from_ref(self))
    }
}

/// The bytes of some values.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `T` has no uninitialised bytes, and the slice lives as long as what it is made of.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The kernels' number for an element type; none for the type that they do not read.
pub(super) fn code(dtype: DType) -> Option<i32> {
    match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::Bf16 => Some(2),
        DType::F64 => None,
    }
}
