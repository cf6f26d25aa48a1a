// The gated delta rule of a hybrid layer: what its two kernels share. The formulas are those of
// python/dspark/target/hybrid/delta.py: rows are computed from the kept state alone, which nothing writes until it is
// known how many rows stay; then the carry adds those.
#pragma once
#include "device.cuh"

namespace gated_delta {

constexpr int32_t kKeyParts = 4;   // parts of the key dimension that different threads take
constexpr int32_t kKeyChunk = 4;   // keys of a column that a thread has in flight at once
constexpr int32_t kMostTaps = 4;   // of the short convolution
constexpr int32_t kMostRows = 16;  // of a request in a pass
constexpr int32_t kQuadGap = 4;    // floats between rows in shared memory, so that quads meet all banks

// Each key head serves `groups` value heads that follow each other; taps: of the convolution.
struct Sizes {
  int32_t key_heads, groups, key_dim, value_dim, taps;
};

__device__ inline int32_t channels_of(const Sizes& sizes) {
  return sizes.key_heads * (2 * sizes.key_dim + sizes.groups * sizes.value_dim);
}

// What a block works on: one value head of one request's layer.
struct Head {
  int32_t key, value;
  bool first;  // of those that share a key head: its block writes what they share
};

__device__ inline Head head_of(const Sizes& sizes, int32_t value) {
  return {value / sizes.groups, value, value % sizes.groups == 0};
}

// The channels that a value head reads, in the order queries, keys, values: its own and those of its key head.
__device__ inline int32_t head_channels(const Sizes& sizes) { return 2 * sizes.key_dim + sizes.value_dim; }

__device__ inline int32_t channel_of(const Sizes& sizes, const Head& head, int32_t item) {
  const int32_t dim = sizes.key_dim, keys = sizes.key_heads * dim;
  if (item < dim) return head.key * dim + item;
  if (item < 2 * dim) return keys + head.key * dim + item - dim;
  return 2 * keys + head.value * sizes.value_dim + item - 2 * dim;
}

__device__ inline bool owns_channel(const Sizes& sizes, const Head& head, int32_t item) {
  return head.first || item >= 2 * sizes.key_dim;
}

// A state is `[layers, key heads, key_dim, groups, value_dim]`: `state_start` is where the matrix of a head starts,
// `state_row` the step from one of its keys to the next.
__device__ inline int64_t state_row(const Sizes& sizes) { return int64_t(sizes.groups) * sizes.value_dim; }

__device__ inline int64_t state_start(const Sizes& sizes, int32_t layer, const Head& head) {
  const int64_t key_head = int64_t(layer) * sizes.key_heads + head.key;
  return key_head * sizes.key_dim * state_row(sizes) + head.value % sizes.groups * sizes.value_dim;
}

// A thread takes two columns half a head apart (so that neighbours read neighbours) of one part of the keys.
struct Columns {
  int32_t first, second, part;
  bool has_first, has_second;
};

__device__ inline int32_t column_lanes(int32_t value_dim) { return ((value_dim + 1) / 2 + 31) / 32 * 32; }

__device__ inline Columns columns_of(int32_t thread, int32_t value_dim) {
  const int32_t half = (value_dim + 1) / 2, lanes = column_lanes(value_dim), lane = thread % lanes;
  return {lane, lane + half, thread / lanes, lane < half, lane < half && lane + half < value_dim};
}

}  // namespace gated_delta
