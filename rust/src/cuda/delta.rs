//! The gated delta rule of a hybrid layer: arguments, limits and grids of `cuda/kernels/gated_delta_*.cu`.

use crate::cuda::{CudaError, Device};

/// The most rows of a request that the kernels take in one pass.
pub const MOST_ROWS: usize = 16;
const MOST_DIM: i32 = 128;
const MOST_TAPS: i32 = 4;
const KEY_PARTS: u32 = 4;
const QUAD_GAP: u32 = 4;
/// The most blocks along a grid's y.
const MOST_BLOCKS: u32 = 65_535;

/// Sizes of a model's linear layers. Each key head serves `groups` value heads; `taps` are those of the convolution.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Key heads.
    pub key_heads: i32,
    /// Value heads of each key head.
    pub groups: i32,
    /// Numbers in a query or key.
    pub key_dim: i32,
    /// Numbers in a value.
    pub value_dim: i32,
    /// Taps of the short convolution.
    pub taps: i32,
}

impl Sizes {
    /// Checks that the kernels take these sizes.
    ///
    /// # Errors
    /// A sentence that names what they do not take.
    pub fn check(&self) -> Result<(), String> {
        let ranges = [
            ("key heads", self.key_heads, 1 << 16),
            ("value heads per key head", self.groups, 1 << 10),
            ("numbers in a key", self.key_dim, MOST_DIM),
            ("numbers in a value", self.value_dim, MOST_DIM),
            ("taps of the convolution", self.taps, MOST_TAPS),
        ];
        match ranges.iter().find(|(_, found, most)| !(1..=*most).contains(found)) {
            None => Ok(()),
            Some((name, found, most)) => {
                Err(format!("{found} {name}, but the kernels of the gated delta rule take 1 to {most}"))
            }
        }
    }

    /// Value heads in total.
    pub fn value_heads(&self) -> u32 {
        self.key_heads.unsigned_abs() * self.groups.unsigned_abs()
    }

    /// Numbers in a row of keys.
    pub fn keys(&self) -> u64 {
        u64::from(self.key_heads.unsigned_abs()) * u64::from(self.key_dim.unsigned_abs())
    }

    /// Numbers in a row of values.
    pub fn values(&self) -> u64 {
        u64::from(self.value_heads()) * u64::from(self.value_dim.unsigned_abs())
    }

    /// Channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> u64 {
        2 * self.keys() + self.values()
    }

    /// Threads that read a state: each has two columns and one part of the keys.
    fn readers(&self) -> u32 {
        KEY_PARTS * self.value_dim.unsigned_abs().div_ceil(2).next_multiple_of(32)
    }

    /// Bytes of shared memory with room for `rows` rows: see `Shared` in `delta_inputs.cuh`.
    fn rows_shared(&self, rows: u32) -> u32 {
        let (key_dim, value_dim) = (self.key_dim.unsigned_abs(), self.value_dim.unsigned_abs());
        let units = key_dim * (2 * rows + QUAD_GAP);
        4 * (units + rows * value_dim + 2 * rows * (value_dim + rows) + 4 * rows)
    }

    /// Bytes of shared memory of the commit.
    fn carry_shared(&self) -> u32 {
        let rows = MOST_ROWS as u32;
        4 * (self.key_dim.unsigned_abs() * (rows + QUAD_GAP) + rows + 1)
    }
}

/// Arguments of `delta_rows_*`; addresses are the device's. The kernel's `RowsArgs` gives the shapes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RowsArgs {
    /// `[requests, 4]` of i64: addresses of state and convolution state, first row, rows.
    pub requests: u64,
    /// The packed product of all rows.
    pub mixed: u64,
    /// Taps of the convolution, float32.
    pub taps: u64,
    /// -exp(A_log).
    pub rate: u64,
    /// Added to a before its softplus.
    pub time_bias: u64,
    /// Weight of the heads' norm, or 0.
    pub head_weight: u64,
    /// The layer's result, before the output product.
    pub out: u64,
    /// The convolution's inputs. This and the next three are what a commit needs.
    pub inputs: u64,
    /// Unit keys, float32.
    pub keys: u64,
    /// Log decays, float32.
    pub log_decays: u64,
    /// Updates, float32.
    pub updates: u64,
    /// Added to the squared length of queries and keys.
    pub unit_eps: f32,
    /// Added to the squared length of a head's outputs.
    pub head_eps: f32,
    /// Sizes of the model's linear layers.
    pub sizes: Sizes,
    /// Index of the linear layer.
    pub layer: i32,
}

/// Arguments of `delta_carry_*`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CarryArgs {
    /// The request's states of all layers, float32.
    pub state: u64,
    /// The request's convolution states of all layers, float32.
    pub conv: u64,
    /// The convolution's inputs of all layers and rows, as `delta_rows_*` left them; likewise the next three.
    pub inputs: u64,
    /// Unit keys.
    pub keys: u64,
    /// Log decays of each row.
    pub log_decays: u64,
    /// Updates of each row.
    pub updates: u64,
    /// Rows of the whole pass.
    pub rows: i64,
    /// Index of the request's first row.
    pub first: i64,
    /// Sizes of the model's linear layers.
    pub sizes: Sizes,
    /// Number of rows that stay.
    pub count: i32,
}

/// The element type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// float32
    Single,
    /// float16
    Half,
    /// bfloat16
    Brain,
}

impl Activation {
    /// Bytes of one number.
    pub fn bytes(self) -> u64 {
        if self == Activation::Single { 4 } else { 2 }
    }

    fn suffix(self) -> &'static str {
        match self {
            Activation::Single => "f32",
            Activation::Half => "f16",
            Activation::Brain => "bf16",
        }
    }

    /// Names of the kernels over such activations.
    pub fn entries(self) -> Vec<String> {
        let suffix = self.suffix();
        let rows = [4, 8, 16].map(|rows| format!("delta_rows_{suffix}_r{rows}"));
        rows.into_iter().chain([format!("delta_carry_{suffix}")]).collect()
    }

    /// Finds the type by torch's name.
    ///
    /// # Errors
    /// A sentence for a dtype that the kernels do not take.
    pub fn named(name: &str) -> Result<Self, String> {
        match name {
            "float32" => Ok(Activation::Single),
            "float16" => Ok(Activation::Half),
            "bfloat16" => Ok(Activation::Brain),
            _ => Err(format!("{name} activations, but the kernels take float32, float16 and bfloat16")),
        }
    }
}

/// Computes the rows of one layer for `requests` requests of at most `most` rows each; states do not change.
///
/// # Errors
/// Sizes or counts that the kernels do not take, and whatever the driver refuses.
pub fn rows(
    device: &Device,
    stream: u64,
    activation: Activation,
    (requests, most): (usize, usize),
    args: &RowsArgs,
) -> Result<(), CudaError> {
    let sizes = &args.sizes;
    sizes.check().map_err(CudaError::Unsuitable)?;
    let requests = blocks("requests", requests)?;
    let rows = match most {
        1..=4 => 4,
        5..=8 => 8,
        9..=MOST_ROWS => 16,
        _ => return Err(count("rows of a request in a pass", most)),
    };
    let entry = format!("delta_rows_{}_r{rows}", activation.suffix());
    let grid = [sizes.value_heads(), requests, 1];
    let shared = sizes.rows_shared(rows);
    device.launch(&entry, grid, sizes.readers() + 32, shared, stream, args)
}

/// Adds the first rows of a pass to the states of one request, in place, in all `layers` linear layers.
///
/// # Errors
/// As for `rows`.
pub fn carry(
    device: &Device,
    stream: u64,
    activation: Activation,
    layers: usize,
    args: &CarryArgs,
) -> Result<(), CudaError> {
    let sizes = &args.sizes;
    sizes.check().map_err(CudaError::Unsuitable)?;
    if !(1..=MOST_ROWS as i32).contains(&args.count) {
        return Err(count("rows to keep", args.count));
    }
    let layers = blocks("linear layers", layers)?;
    let entry = format!("delta_carry_{}", activation.suffix());
    let grid = [sizes.value_heads(), layers, 1];
    device.launch(&entry, grid, sizes.readers(), sizes.carry_shared(), stream, args)
}

fn blocks(what: &str, found: usize) -> Result<u32, CudaError> {
    match u32::try_from(found) {
        Ok(number @ 1..=MOST_BLOCKS) => Ok(number),
        _ => Err(CudaError::Unsuitable(format!("{found} {what}, but a launch takes 1 to {MOST_BLOCKS}"))),
    }
}

fn count(what: &str, found: impl std::fmt::Display) -> CudaError {
    CudaError::Unsuitable(format!("{found} {what}, but the kernels take 1 to {MOST_ROWS}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGSHIP: Sizes = Sizes { key_heads: 16, groups: 3, key_dim: 128, value_dim: 128, taps: 4 };

    /// More than 48 KiB would need an attribute of the function.
    #[test]
    fn the_largest_heads_fit_into_plain_shared_memory() {
        assert_eq!(FLAGSHIP.check(), Ok(()));
        assert_eq!(FLAGSHIP.readers() + 32, 288);
        for rows in [4, 8, 16] {
            assert!(FLAGSHIP.rows_shared(rows) <= 48 << 10);
        }
        assert!(FLAGSHIP.carry_shared() <= 48 << 10);
    }

    #[test]
    fn what_is_not_served_is_named() {
        let wide = Sizes { value_dim: 256, ..FLAGSHIP };
        let expected = "256 numbers in a value, but the kernels of the gated delta rule take 1 to 128";
        assert_eq!(wide.check().unwrap_err(), expected);
        assert!(Sizes { taps: 5, ..FLAGSHIP }.check().unwrap_err().starts_with("5 taps"));
        assert!(Sizes { key_heads: 0, ..FLAGSHIP }.check().is_err());
        assert!(Activation::named("float64").unwrap_err().starts_with("float64"));
        assert_eq!(Activation::named("bfloat16"), Ok(Activation::Brain));
    }
}
