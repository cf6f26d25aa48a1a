//! Views of logits in memory that belongs to others.
//!
//! Logits are read in place, row by row, in the precision they came in. Nothing here copies.

use half::{bf16, f16};

/// One row of logits.
#[derive(Clone, Copy, Debug)]
pub enum Row<'a> {
    /// Double precision, kept through every transform.
    F64(&'a [f64]),
    /// Single precision.
    F32(&'a [f32]),
    /// IEEE half precision: becomes `f32` when read.
    F16(&'a [f16]),
    /// bfloat16: becomes `f32` when read.
    Bf16(&'a [bf16]),
}

impl Row<'_> {
    /// Number of logits in the row.
    pub fn len(&self) -> usize {
        match self {
            Row::F64(x) => x.len(),
            Row::F32(x) => x.len(),
            Row::F16(x) => x.len(),
            Row::Bf16(x) => x.len(),
        }
    }

    /// Whether the row has no logits at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The logit of one token, widened. Panics past the end, as indexing does.
    pub fn get(&self, token: usize) -> f64 {
        match self {
            Row::F64(x) => x[token],
            Row::F32(x) => f64::from(x[token]),
            Row::F16(x) => f64::from(x[token]),
            Row::Bf16(x) => f64::from(x[token]),
        }
    }
}

/// The element types that logits come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    /// 64-bit float.
    F64,
    /// 32-bit float.
    F32,
    /// IEEE 16-bit float.
    F16,
    /// bfloat16.
    Bf16,
}

impl DType {
    /// Bytes of one element; also its alignment.
    pub fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
        }
    }
}

/// A matrix of rows `stride` elements apart, each of them contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A view of `rows` rows of `cols` elements, row `i` starting at `i * stride`.
    #[cfg(test)]
    pub(crate) fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(extent(rows, cols, stride) <= data.len(), "a matrix that is longer than its memory");
        Self { data, rows, cols, stride }
    }

    /// A view of contiguous memory, `cols` elements per row. An incomplete last row is not part of the view.
    pub fn contiguous(data: &'a [T], cols: usize) -> Self {
        let rows = data.len().checked_div(cols).unwrap_or(0);
        Self { data, rows, cols, stride: cols }
    }

    /// Row `i`. Panics past the end.
    pub fn row(&self, i: usize) -> &'a [T] {
        assert!(i < self.rows, "row {i} of a matrix of {} rows", self.rows);
        &self.data[i * self.stride..][..self.cols]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows `start..end` as a view of their own. Panics if the range does not lie within the rows.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.rows,
            "rows {range:?} of a matrix of {} rows",
            self.rows
        );
        let rows = range.len();
        let start = if rows == 0 { 0 } else { range.start * self.stride };
        Self { data: &self.data[start..], rows, ..*self }
    }
}

/// Elements from the first of the first row to the last of the last, gaps between rows included.
fn extent(rows: usize, cols: usize, stride: usize) -> usize {
    match rows {
        0 => 0,
        _ => (rows - 1).saturating_mul(stride).saturating_add(cols),
    }
}

/// Rows of logits of any of the four element types. Copying the view does not copy the logits.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// Double precision.
    F64(Matrix<'a, f64>),
    /// Single precision.
    F32(Matrix<'a, f32>),
    /// IEEE half precision.
    F16(Matrix<'a, f16>),
    /// bfloat16.
    Bf16(Matrix<'a, bf16>),
}

/// Evaluates `$body` with `$m` bound to the matrix, whatever its element type.
macro_rules! each {
    ($rows:expr, $m:ident => $body:expr) => {
        match $rows {
            Rows::F64($m) => $body,
            Rows::F32($m) => $body,
            Rows::F16($m) => $body,
            Rows::Bf16($m) => $body,
        }
    };
}

impl<'a> Rows<'a> {
    /// Row `i`. Panics past the end.
    pub fn row(&self, i: usize) -> Row<'a> {
        match self {
            Rows::F64(m) => Row::F64(m.row(i)),
            Rows::F32(m) => Row::F32(m.row(i)),
            Rows::F16(m) => Row::F16(m.row(i)),
            Rows::Bf16(m) => Row::Bf16(m.row(i)),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        each!(self, m => m.rows())
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        each!(self, m => m.cols())
    }

    /// Rows `start..end` as a view of their own. Panics if the range does not lie within the rows.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Rows<'a> {
        match self {
            Rows::F64(m) => Rows::F64(m.slice(range)),
            Rows::F32(m) => Rows::F32(m.slice(range)),
            Rows::F16(m) => Rows::F16(m.slice(range)),
            Rows::Bf16(m) => Rows::Bf16(m.slice(range)),
        }
    }

    /// A view of a foreign tensor: `rows` rows of `cols` elements, `row_stride` elements apart.
    ///
    /// # Safety
    /// For the whole of `'a`, the caller warrants that
    /// * `ptr` is aligned for the element type, and unless the matrix is empty it is not null and
    ///   `(rows - 1) * row_stride + cols` elements from it on lie in one live, initialised allocation
    ///   (the gaps between rows included), whose size in bytes does not exceed `isize::MAX`;
    /// * nobody writes to these elements.
    pub unsafe fn from_raw_parts(
        ptr: *const u8,
        dtype: DType,
        rows: usize,
        cols: usize,
        row_stride: usize,
    ) -> Rows<'a> {
        /// The same for one element type.
        ///
        /// # Safety
        /// As for `Rows::from_raw_parts`.
        unsafe fn view<'a, T>(ptr: *const u8, rows: usize, cols: usize, stride: usize) -> Matrix<'a, T> {
            let len = extent(rows, cols, stride);
            let data = if len == 0 {
                &[]
            } else {
                // SAFETY: the caller warrants alignment, liveness, initialisation and size of exactly
                // `len` elements from `ptr`, and that nobody writes to them during `'a`.
                unsafe { std::slice::from_raw_parts(ptr.cast::<T>(), len) }
            };
            Matrix { data, rows, cols, stride }
        }
        // SAFETY: the contract of this function is that of `view`.
        unsafe {
            match dtype {
                DType::F64 => Rows::F64(view(ptr, rows, cols, row_stride)),
                DType::F32 => Rows::F32(view(ptr, rows, cols, row_stride)),
                DType::F16 => Rows::F16(view(ptr, rows, cols, row_stride)),
                DType::Bf16 => Rows::Bf16(view(ptr, rows, cols, row_stride)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_rows_skip_the_gaps() {
        let data: Vec<f32> = (0..11).map(|i| i as f32).collect();
        let matrix = Matrix::strided(&data, 3, 3, 4);
        assert_eq!(matrix.row(2), &[8.0, 9.0, 10.0]);
        assert_eq!(matrix.slice(1..3).row(0), &[4.0, 5.0, 6.0]);
        assert_eq!(matrix.slice(3..3).rows(), 0);
    }

    #[test]
    fn raw_parts_see_the_same_rows() {
        let data = [1.0f64, 2.0, 3.0, 4.0];
        // SAFETY: four initialised doubles that outlive the view and that nobody writes.
        let rows = unsafe { Rows::from_raw_parts(data.as_ptr().cast(), DType::F64, 2, 2, 2) };
        assert_eq!((rows.rows(), rows.cols(), rows.row(1).get(0)), (2, 2, 3.0));
        // SAFETY: an empty view reads nothing.
        let none = unsafe { Rows::from_raw_parts(std::ptr::null(), DType::Bf16, 0, 5, 5) };
        assert_eq!(none.rows(), 0);
    }
}
