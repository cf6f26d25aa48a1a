// Outputs and updates of a pass's rows in one layer, from states that stay unchanged. One block per value head and
// request: the head's state is read once, for the queries and keys of all rows; then follow a triangular system per
// column, the head's norm and its gate.
#pragma once
#include "delta_inputs.cuh"

namespace gated_delta {

// Adds up units[j][row] column[j] over a part of the keys j, for two columns and all rows of `units`.
template <int Rows>
__device__ inline void multiply(const float* units, const float* first, const float* second, int64_t stride,
                                int32_t key_dim, int32_t part, float (&a)[2 * Rows], float (&b)[2 * Rows]) {
  for (int32_t start = part * kKeyChunk; start < key_dim; start += kKeyParts * kKeyChunk) {
    float x[kKeyChunk], y[kKeyChunk];
#pragma unroll
    for (int i = 0; i < kKeyChunk; ++i) {
      const int64_t at = int64_t(start + i) * stride;
      x[i] = start + i < key_dim ? first[at] : 0.0f;
      y[i] = start + i < key_dim ? second[at] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kKeyChunk; ++i) {
      if (start + i >= key_dim) continue;
      const float* unit = units + (start + i) * Shared<Rows>::kStride;
#pragma unroll
      for (int row = 0; row < 2 * Rows; row += 4) {
        const Pack<float, 4> four = load_pack<4>(unit + row);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          a[row + k] += four.at[k] * x[i];
          b[row + k] += four.at[k] * y[i];
        }
      }
    }
  }
}

// Fills `read`, one part of the keys after the other, so that sums are always the same. The scores of rows with each
// other are the same product, with the keys as columns behind the state's: the last warp takes those.
template <class T, int Rows>
__device__ inline void read_state(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  static_assert(Rows / 2 <= kLanes / kKeyParts, "the last warp has two rows for each lane of a part");
  const Sizes& sizes = args.sizes;
  const int32_t readers = kKeyParts * column_lanes(sizes.value_dim);
  float a[2 * Rows] = {}, b[2 * Rows] = {};
  Columns own;
  if (int32_t(threadIdx.x) < readers) {
    own = columns_of(threadIdx.x, sizes.value_dim);
    const float* first = block.state + (own.has_first ? own.first : 0);
    const float* second = block.state + (own.has_second ? own.second : 0);
    multiply<Rows>(shared.units, first, second, state_row(sizes), sizes.key_dim, own.part, a, b);
  } else {
    const int32_t lane = threadIdx.x - readers, pair = lane % (kLanes / kKeyParts);
    const bool has = pair < Rows / 2;
    const float* keys = shared.units + (has ? pair : 0);
    const int32_t column = sizes.value_dim + pair;
    own = {column, column + Rows / 2, lane / (kLanes / kKeyParts), has, has};
    multiply<Rows>(shared.units, keys, keys + Rows / 2, shared.kStride, sizes.key_dim, own.part, a, b);
  }
  for (int32_t part = 0; part < kKeyParts; ++part) {
    if (own.part == part) {
#pragma unroll
      for (int row = 0; row < 2 * Rows; ++row) {
        float* sums = shared.read + row * shared.wide;
        if (own.has_first) sums[own.first] = a[row] + (part ? sums[own.first] : 0.0f);
        if (own.has_second) sums[own.second] = b[row] + (part ? sums[own.second] : 0.0f);
      }
    }
    __syncthreads();
  }
}

// Turns scores of rows t and s into the factors of the system and of the outputs: times c_t / c_s, for keys also times
// the strength; 0 for later rows.
template <int Rows>
__device__ inline void decay_scores(Shared<Rows>& shared, int32_t value_dim) {
  for (int32_t item = threadIdx.x; item < Rows * Rows; item += blockDim.x) {
    const int32_t t = item / Rows, s = item % Rows;
    float* keys = shared.read + t * shared.wide + value_dim + s;
    float* queries = keys + Rows * shared.wide;
    const float between = s <= t ? expf(shared.sums[t] - shared.sums[s]) : 0.0f;
    *keys = s < t ? *keys * between * shared.betas[t] : 0.0f;
    *queries = s <= t ? *queries * between : 0.0f;
  }
}

// u_t = b_t (v_t - c_t S^T k_t) - sum over s < t of keys[t][s] u_s and o_t = c_t S^T q_t + sum over s <= t of
// queries[t][s] u_s, a column per thread; outputs replace the queries' part of `read`.
template <class T, int Rows>
__device__ inline void solve(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  const int32_t value_dim = args.sizes.value_dim, column = threadIdx.x;
  if (column >= value_dim) return;
  const int64_t values = int64_t(block.value_heads) * value_dim;
  float* kept = args.updates + block.first * values + block.head.value * value_dim + column;
  float updates[Rows];
#pragma unroll
  for (int t = 0; t < Rows; ++t) {
    float* keys = shared.read + t * shared.wide;
    float* queries = keys + Rows * shared.wide;
    const float decay = shared.decays[t];
    float update = shared.betas[t] * (shared.values[t * value_dim + column] - decay * keys[column]);
    float out = decay * queries[column];
#pragma unroll
    for (int s = 0; s < t; ++s) {
      update -= keys[value_dim + s] * updates[s];
      out += queries[value_dim + s] * updates[s];
    }
    updates[t] = update;
    queries[column] = out + queries[value_dim + t] * update;
    if (t < block.rows) kept[t * values] = update;
  }
}

// Norm of the head's outputs and its gate silu(z), a row per warp.
template <class T, int Rows>
__device__ inline void finish(const RowsArgs& args, const Block<T>& block, Shared<Rows>& shared) {
  const int32_t value_dim = args.sizes.value_dim, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int64_t values = int64_t(block.value_heads) * value_dim, start = block.head.value * value_dim;
  for (int32_t row = threadIdx.x / 32; row < block.rows; row += warps) {
    const float* outputs = shared.read + (Rows + row) * shared.wide;
    float sum = 0.0f;
    for (int32_t c = lane; c < value_dim; c += 32) sum += outputs[c] * outputs[c];
    const float scale = 1.0f / sqrtf(warp_sum(sum) + args.head_eps);
    const T* gate = block.mixed + row * block.width + block.channels + start;
    T* out = static_cast<T*>(args.out) + (block.first + row) * values + start;
    for (int32_t c = lane; c < value_dim; c += 32) {
      const float weight = args.head_weight ? args.head_weight[start + c] : 1.0f;
      out[c] = narrow<T>(outputs[c] * scale * weight * silu(widen(gate[c])));
    }
  }
}

template <class T, int Rows>
__device__ inline void run_rows(const RowsArgs& args) {
  DYNAMIC_SHARED(float, memory);
  Shared<Rows> shared(memory, args.sizes);
  const Block<T> block(args);
  if (block.rows == 0) return;  // the whole block
  prefetch_state(block.state, args.sizes);
  convolve<T, Rows>(args, block, shared);
  gates<T, Rows>(args, block, shared);
  __syncthreads();
  normalise<T, Rows>(args, block, shared);
  __syncthreads();
  read_state<T, Rows>(args, block, shared);
  decay_scores<Rows>(shared, args.sizes.value_dim);
  __syncthreads();
  solve<T, Rows>(args, block, shared);
  __syncthreads();
  finish<T, Rows>(args, block, shared);
}

}  // namespace gated_delta
