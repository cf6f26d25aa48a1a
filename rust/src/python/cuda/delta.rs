//! The gated delta rule for `dspark.target.hybrid.kernel`.

use pyo3::prelude::*;

use crate::cuda::delta::{self, Activation, CarryArgs, RowsArgs, Sizes};
use crate::cuda::{CudaError, Device};

/// Key heads, value heads of each, key_dim, value_dim, taps.
pub type PySizes = (i32, i32, i32, i32, i32);

/// Requests, the most rows of one, all rows; addresses of the requests' table, and of what rows leave for a commit:
/// convolution inputs, unit keys, log decays, updates, each of all layers.
pub type Batch = (usize, usize, usize, u64, u64, u64, u64, u64);

/// Addresses of taps, rate, time bias, weight of the heads' norm or 0; what is added to squared lengths.
pub type Weights = (u64, u64, u64, u64, f32, f32);

/// Why the kernels do not serve a model, or nothing.
pub fn refusal(dtype: &str, sizes: PySizes) -> Option<String> {
    Activation::named(dtype).err().or_else(|| sized(sizes).check().err())
}

/// The rows of one layer.
#[expect(clippy::too_many_arguments, reason = "a call from Python: groups that are made once, and what changes")]
pub fn rows(
    device: &Device,
    stream: u64,
    dtype: &str,
    sizes: PySizes,
    batch: Batch,
    weights: Weights,
    layer: usize,
    mixed: u64,
    out: u64,
) -> Result<(), CudaError> {
    let activation = Activation::named(dtype).map_err(CudaError::Unsuitable)?;
    let sizes = sized(sizes);
    sizes.check().map_err(CudaError::Unsuitable)?;
    let (requests, most, rows, table, inputs, keys, log_decays, updates) = batch;
    let (taps, rate, time_bias, head_weight, unit_eps, head_eps) = weights;
    let before = (layer * rows) as u64;
    let args = RowsArgs {
        requests: table,
        mixed,
        taps,
        rate,
        time_bias,
        head_weight,
        out,
        inputs: inputs + before * sizes.channels() * activation.bytes(),
        keys: keys + before * sizes.keys() * 4,
        log_decays: log_decays + before * u64::from(sizes.value_heads()) * 4,
        updates: updates + before * sizes.values() * 4,
        unit_eps,
        head_eps,
        sizes,
        layer: layer as i32,
    };
    delta::rows(device, stream, activation, (requests, most), &args)
}

/// The commit of one request's first rows, in all layers.
#[expect(clippy::too_many_arguments, reason = "as above")]
pub fn carry(
    device: &Device,
    stream: u64,
    dtype: &str,
    sizes: PySizes,
    batch: Batch,
    layers: usize,
    first: usize,
    count: usize,
    conv: u64,
    state: u64,
) -> Result<(), CudaError> {
    let activation = Activation::named(dtype).map_err(CudaError::Unsuitable)?;
    let (_, _, rows, _, inputs, keys, log_decays, updates) = batch;
    if first + count > rows {
        return Err(CudaError::Unsuitable(format!("rows {first} to {} of {rows} to keep", first + count)));
    }
    let args = CarryArgs {
        state,
        conv,
        inputs,
        keys,
        log_decays,
        updates,
        rows: rows as i64,
        first: first as i64,
        sizes: sized(sizes),
        count: count as i32,
    };
    delta::carry(device, stream, activation, layers, &args)
}

fn sized((key_heads, groups, key_dim, value_dim, taps): PySizes) -> Sizes {
    Sizes { key_heads, groups, key_dim, value_dim, taps }
}
