// The inputs of the gated delta rule, made from a pass's rows in one layer: convolution, unit queries and keys, gates.
#pragma once
#include "gated_delta.cuh"

namespace gated_delta {

struct RowsArgs {
  const int64_t* requests;   // [requests, 4]: addresses of state and convolution state, first row, rows (<= Rows)
  const void* mixed;         // [rows, channels + values + 2 value heads]: inputs, gate z, then b, then a
  const float* taps;         // [taps, channels]
  const float* rate;         // [value heads]: -exp(A_log)
  const float* time_bias;    // [value heads]
  const float* head_weight;  // [values], or null if folded into the output product
  void* out;                 // [rows, values]
  void* inputs;              // [rows, channels]; this and the next three are what `run_carry` needs
  float* keys;               // [rows, key heads, key_dim]
  float* log_decays;         // [rows, value heads]
  float* updates;            // [rows, values]
  float unit_eps, head_eps;  // added to the squared lengths of queries and keys, and of outputs
  Sizes sizes;
  int32_t layer;
};

// Shared memory, in floats.
template <int Rows>
struct Shared {
  static constexpr int32_t kStride = 2 * Rows + kQuadGap;
  float* units;   // [key_dim, kStride]: keys of all rows, then queries
  float* values;  // [Rows, value_dim]
  float* read;    // [2 Rows, value_dim + Rows]: keys, then queries, times the state, and times the keys
  float* logs;    // [Rows]: log decays
  float* sums;    // [Rows]: these added up from the first row on
  float* decays;  // [Rows]: exp of the sums
  float* betas;   // [Rows]: strengths
  int32_t wide;

  __device__ Shared(float* start, const Sizes& sizes) {
    wide = sizes.value_dim + Rows;
    units = start;
    values = units + sizes.key_dim * kStride;
    read = values + Rows * sizes.value_dim;
    logs = read + 2 * Rows * wide;
    sums = logs + Rows;
    decays = sums + Rows;
    betas = decays + Rows;
  }
};

// What a block needs to know of its request and head.
template <class T>
struct Block {
  Head head;
  const float *state, *conv;
  int64_t first, width;
  int32_t rows, channels, value_heads;
  const T* mixed;  // of the request's first row

  __device__ Block(const RowsArgs& args) {
    const Sizes& sizes = args.sizes;
    const int64_t* request = args.requests + 4 * int64_t(blockIdx.y);
    head = head_of(sizes, int32_t(blockIdx.x));
    channels = channels_of(sizes);
    value_heads = sizes.key_heads * sizes.groups;
    state = reinterpret_cast<const float*>(request[0]) + state_start(sizes, args.layer, head);
    conv = reinterpret_cast<const float*>(request[1]) + int64_t(args.layer) * (sizes.taps - 1) * channels;
    first = request[2];
    rows = int32_t(request[3]);
    width = channels + int64_t(value_heads) * (sizes.value_dim + 2);
    mixed = static_cast<const T*>(args.mixed) + first * width;
  }
};

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

// Fetches 128 bytes into the L2 cache.
__device__ inline void prefetch([[maybe_unused]] const float* line) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// Fetches the state while the convolution is computed.
__device__ inline void prefetch_state(const float* state, const Sizes& sizes) {
  const int32_t lines = (sizes.value_dim + kLanes - 1) / kLanes;
  for (int32_t item = threadIdx.x; item < sizes.key_dim * lines; item += blockDim.x)
    prefetch(state + item / lines * state_row(sizes) + item % lines * kLanes);
}

// Causal depthwise convolution and silu of the head's channels, a channel per thread; absent rows become 0.
// Fewer taps than kMostTaps have zeros before them.
template <class T, int Rows>
__device__ inline void convolve(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  const Sizes& sizes = args.sizes;
  const int32_t missing = kMostTaps - sizes.taps;
  for (int32_t item = threadIdx.x; item < head_channels(sizes); item += blockDim.x) {
    const int32_t channel = channel_of(sizes, block.head, item);
    float window[kMostTaps - 1 + Rows], taps[kMostTaps], out[Rows];
#pragma unroll
    for (int t = 0; t < kMostTaps; ++t) {
      const int64_t at = int64_t(t - missing) * block.channels + channel;
      taps[t] = t < missing ? 0.0f : args.taps[at];
      if (t < kMostTaps - 1) window[t] = t < missing ? 0.0f : block.conv[at];
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r)
      window[kMostTaps - 1 + r] = r < block.rows ? widen(block.mixed[r * block.width + channel]) : 0.0f;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int t = 0; t < kMostTaps; ++t) sum += taps[t] * window[r + t];
      out[r] = r < block.rows ? silu(sum) : 0.0f;
    }
    if (owns_channel(sizes, block.head, item)) {
      T* inputs = static_cast<T*>(args.inputs) + block.first * block.channels + channel;
#pragma unroll
      for (int r = 0; r < Rows; ++r)
        if (r < block.rows) inputs[int64_t(r) * block.channels] = narrow<T>(window[kMostTaps - 1 + r]);
    }
    if (item < 2 * sizes.key_dim) {  // keys lie before queries
      const int32_t row = item % sizes.key_dim * shared.kStride + (item < sizes.key_dim ? Rows : 0);
#pragma unroll
      for (int r = 0; r < Rows; r += 4)
        store_pack(shared.units + row + r, Pack<float, 4>{out[r], out[r + 1], out[r + 2], out[r + 3]});
    } else {
      float* values = shared.values + item - 2 * sizes.key_dim;
#pragma unroll
      for (int r = 0; r < Rows; ++r) values[r * sizes.value_dim] = out[r];
    }
  }
}

// Strengths sigmoid(b) and log decays -exp(A_log) softplus(a + dt_bias), a row per thread.
template <class T, int Rows>
__device__ inline void gates(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  const int32_t row = threadIdx.x, value = block.head.value;
  if (row >= Rows) return;
  float log_decay = 0.0f, beta = 0.0f;
  if (row < block.rows) {
    const T* strengths = block.mixed + (row + 1) * block.width - 2 * block.value_heads;
    const float x = widen(strengths[block.value_heads + value]) + args.time_bias[value];
    log_decay = args.rate[value] * (x > 20.0f ? x : log1pf(expf(x)));
    beta = 1.0f / (1.0f + expf(-widen(strengths[value])));
    args.log_decays[(block.first + row) * block.value_heads + value] = log_decay;
  }
  shared.logs[row] = log_decay;
  shared.betas[row] = beta;
}

// Scales queries and keys to length 1, a row per warp, and adds up the decays. The query's scale key_dim^-1/2 is part
// of the norm of the outputs.
template <class T, int Rows>
__device__ inline void normalise(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  const Sizes& sizes = args.sizes;
  const int32_t lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int32_t row = threadIdx.x / 32; row < 2 * Rows; row += warps) {
    if (row % Rows >= block.rows) continue;
    float sum = 0.0f;
    for (int32_t j = lane; j < sizes.key_dim; j += 32) {
      const float x = shared.units[j * shared.kStride + row];
      sum += x * x;
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum) + args.unit_eps);
    const bool keep = block.head.first && row < Rows;
    float* keys = args.keys + ((block.first + row) * sizes.key_heads + block.head.key) * sizes.key_dim;
    for (int32_t j = lane; j < sizes.key_dim; j += 32) {
      const float x = shared.units[j * shared.kStride + row] * scale;
      shared.units[j * shared.kStride + row] = x;
      if (keep) keys[j] = x;
    }
  }
  if (threadIdx.x < Rows) {
    float sum = 0.0f;
    for (int32_t r = 0; r <= int32_t(threadIdx.x); ++r) sum += shared.logs[r];
    shared.sums[threadIdx.x] = sum;
    shared.decays[threadIdx.x] = expf(sum);
  }
}

}  // namespace gated_delta
