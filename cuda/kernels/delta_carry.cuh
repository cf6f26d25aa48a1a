// Adds the first `count` rows of a pass to one request's states, in place, all layers in one launch: S becomes
// c S + sum over rows of (c / c_r) k_r u_r^T, with one read and one write of the state; the convolution keeps its last
// inputs. One block per value head and layer.
#pragma once
#include "gated_delta.cuh"

namespace gated_delta {

struct CarryArgs {
  float* state;             // [layers, key heads, key_dim, groups, value_dim]
  float* conv;              // [layers, taps - 1, channels]
  const void* inputs;       // [layers, rows, channels], as `run_rows` left them; likewise the next three
  const float* keys;        // [layers, rows, key heads, key_dim]
  const float* log_decays;  // [layers, rows, value heads]
  const float* updates;     // [layers, rows, values]
  int64_t rows, first;      // of the whole pass; where the request's begin
  Sizes sizes;
  int32_t count;            // 1..kMostRows
};

constexpr int32_t kCarryStride = kMostRows + kQuadGap;

// Keeps the last inputs that the convolution has seen, a channel per thread.
template <class T>
__device__ inline void carry_inputs(const CarryArgs& args, const Head& head, int32_t layer) {
  const Sizes& sizes = args.sizes;
  const int32_t channels = channels_of(sizes), past = sizes.taps - 1;
  float* conv = args.conv + int64_t(layer) * past * channels;
  const T* inputs = static_cast<const T*>(args.inputs) + (layer * args.rows + args.first) * channels;
  for (int32_t item = threadIdx.x; item < head_channels(sizes); item += blockDim.x) {
    if (!owns_channel(sizes, head, item)) continue;
    const int64_t channel = channel_of(sizes, head, item);
    float last[kMostTaps - 1];
#pragma unroll
    for (int j = 0; j < kMostTaps - 1; ++j) {
      const int64_t at = args.count + j;
      if (j < past)
        last[j] = at < past ? conv[at * channels + channel] : widen(inputs[(at - past) * channels + channel]);
    }
#pragma unroll
    for (int j = 0; j < kMostTaps - 1; ++j)
      if (j < past) conv[int64_t(j) * channels + channel] = last[j];
  }
}

template <class T>
__device__ inline void run_carry(const CarryArgs& args) {
  DYNAMIC_SHARED(float, memory);
  const Sizes& sizes = args.sizes;
  const int32_t layer = blockIdx.y, thread = threadIdx.x, value_heads = sizes.key_heads * sizes.groups;
  const Head head = head_of(sizes, int32_t(blockIdx.x));
  const int64_t first = layer * args.rows + args.first;
  float* units = memory;                                  // [key_dim, kCarryStride]: weighted keys
  float* weights = units + sizes.key_dim * kCarryStride;  // [kMostRows]: decay of what a row wrote
  float* decay = weights + kMostRows;                     // [1]: decay of the state

  if (thread <= args.count) {  // thread r sums the rows behind row r, the last thread all of them
    const int32_t from = thread < args.count ? thread + 1 : 0;
    float sum = 0.0f;
    const float* logs = args.log_decays + first * value_heads + head.value;
    for (int32_t r = from; r < args.count; ++r) sum += logs[r * value_heads];
    (thread < args.count ? weights[thread] : *decay) = expf(sum);
  }
  carry_inputs<T>(args, head, layer);
  const Columns own = columns_of(thread, sizes.value_dim);
  const int64_t values = int64_t(value_heads) * sizes.value_dim;
  const float* updates = args.updates + first * values + head.value * sizes.value_dim;
  float a[kMostRows], b[kMostRows];
#pragma unroll
  for (int r = 0; r < kMostRows; ++r) {
    a[r] = r < args.count && own.has_first ? updates[r * values + own.first] : 0.0f;
    b[r] = r < args.count && own.has_second ? updates[r * values + own.second] : 0.0f;
  }
  __syncthreads();
  const float* keys = args.keys + (first * sizes.key_heads + head.key) * sizes.key_dim;
  const int64_t key_row = int64_t(sizes.key_heads) * sizes.key_dim;
  for (int32_t item = thread; item < sizes.key_dim * kMostRows; item += blockDim.x) {
    const int32_t r = item / sizes.key_dim, j = item % sizes.key_dim;
    units[j * kCarryStride + r] = r < args.count ? keys[r * key_row + j] * weights[r] : 0.0f;
  }
  __syncthreads();
  float* state = args.state + state_start(sizes, layer, head);
  for (int32_t start = own.part * kKeyChunk; start < sizes.key_dim; start += kKeyParts * kKeyChunk) {
    float x[kKeyChunk], y[kKeyChunk];
#pragma unroll
    for (int i = 0; i < kKeyChunk; ++i) {
      const float* row = state + (start + i) * state_row(sizes);
      const bool has = start + i < sizes.key_dim;
      x[i] = has && own.has_first ? row[own.first] : 0.0f;
      y[i] = has && own.has_second ? row[own.second] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kKeyChunk; ++i) {
      if (start + i >= sizes.key_dim) continue;
      float u = x[i] * *decay, w = y[i] * *decay;
#pragma unroll
      for (int r = 0; r < kMostRows; r += 4) {
        if (r >= args.count) continue;
        const Pack<float, 4> four = load_pack<4>(units + (start + i) * kCarryStride + r);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          u += four.at[k] * a[r + k];
          w += four.at[k] * b[r + k];
        }
      }
      float* row = state + (start + i) * state_row(sizes);
      if (own.has_first) row[own.first] = u;
      if (own.has_second) row[own.second] = w;
    }
  }
}

}  // namespace gated_delta
