// From logits to weights and sums, operation by operation as rust/src/law/kernels.rs and linear.rs do it: nothing is
// fused that is not fused there, and sums have the same lanes, so the results are the same to the last bit.
#pragma once
#include "rows.cuh"

namespace sampling {

__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double sub(double a, double b) { return __dsub_rn(a, b); }
__device__ inline double mul(double a, double b) { return __dmul_rn(a, b); }

// exp(s) for s <= 0; exactly 1 at 0, and 0 below -87 (where exp has no normal f32) and for NaN.
__device__ inline float exp_weight(float s) {
  const float ROUND = 12582912.0f + 127.0f;  // rounds to an integer, whose low bits are the exponent field of 2^n
  const float biased = fused(s, 1.44269504f, ROUND);
  const float n = sub(biased, ROUND);
  const float r = fused(n, 1.9046543e-9f, fused(n, -0.693147181f, s));
  const float r2 = mul(r, r);
  const float low = fused(r, 1.6666665e-1f, 0.5f);
  const float middle = fused(r, 8.333452e-3f, 4.1665796e-2f);
  const float high = fused(r, 1.9875691e-4f, 1.3981999e-3f);
  const float p = fused(r2, fused(r2, high, middle), low);
  const float y = add(fused(r2, p, r), 1.0f);
  const float scale = __uint_as_float(__float_as_uint(biased) << 23);
  return s >= -87.0f ? mul(y, scale) : 0.0f;
}

// (x - max) / temperature.
__device__ inline float log_weight(float x, const Law& law, float inverse_temperature) {
  return mul(sub(x, law.max), inverse_temperature);
}

// The weight of a column's logit; 0 if truncation drops it.
__device__ inline float weight(float x, int index, const Law& law, float inverse_temperature) {
  const u32 key = order(x);
  if (key < law.cut_key || (key == law.cut_key && index > law.cut_index)) return 0.0f;
  const float w = exp_weight(log_weight(x, law, inverse_temperature));
  return (double)w >= law.floor ? w : 0.0f;
}

// Sum of a tile in 16 lanes, as the core adds it up. Called by every thread; the first gives the sum.
template <class T>
__device__ double tile_sum(const T* values, int count, double* lanes) {
  for (int lane = threadIdx.x; lane < 16; lane += blockDim.x) {
    double sum = 0.0;
    for (int i = lane; i < count; i += 16) sum = add(sum, (double)values[i]);
    lanes[lane] = sum;
  }
  __syncthreads();
  double sum = lanes[0];
  for (int lane = 1; lane < 16; ++lane) sum = add(sum, lanes[lane]);
  return sum;
}

// Sum of a row's tiles from left to right, by one warp: every lane gets it. `stage` holds 256 numbers of this warp.
__device__ inline double ordered_sum(const double* sums, int count, double* stage) {
  const int lane = threadIdx.x % 32;
  double sum = 0.0;
  for (int start = 0; start < count; start += 256) {
    const int n = count - start < 256 ? count - start : 256;
    for (int i = lane; i < n; i += 32) stage[i] = sums[start + i];
    __syncwarp();
    for (int i = 0; i < n; ++i) sum = add(sum, stage[i]);
    __syncwarp();
  }
  return sum;
}

// Where a level falls among weights: its distance from the border on its left, and that from the nearer border.
struct Found {
  int index;
  double left, margin;
};

// The first of `count` weights at which their running sum exceeds `level`; past the end, the last above zero. Called by
// one warp: each lane adds up a run of them, then the lane in which the level falls walks along its run.
__device__ inline Found find(double level, const double* weights, int count) {
  const int lane = threadIdx.x % 32, run = (count + 31) / 32;
  const int start = lane * run < count ? lane * run : count;
  const int end = start + run < count ? start + run : count;
  double mine = 0.0;
  for (int i = start; i < end; ++i) mine = add(mine, weights[i]);
  double before = 0.0, ahead = 0.0;
  int chosen = 0;
  bool is_open = true;
  for (int other = 0; other < 32; ++other) {
    const double sum = __shfl_sync(kAllLanes, mine, other);
    if (is_open && sum > 0.0) {
      chosen = other, ahead = before;
      is_open = !(level < add(before, sum));
    }
    before = add(before, sum);
  }
  Found found = {0, 0.0, 0.0};
  if (lane == chosen) {
    double left = sub(level, ahead);
    for (int i = start; i < end; ++i) {
      const double w = weights[i];
      if (!(w > 0.0)) continue;
      const double below = left < 0.0 ? 0.0 : left, above = sub(w, left);
      found = {i, left, below < above ? below : above};
      if (left < w) break;
      left = sub(left, w);
    }
  }
  found.index = __shfl_sync(kAllLanes, found.index, chosen);
  found.left = __shfl_sync(kAllLanes, found.left, chosen);
  found.margin = __shfl_sync(kAllLanes, found.margin, chosen);
  return found;
}

// The same over a whole row, first among the sums of its tiles, then in the tile, whose weights `fill(base, count)`
// writes to `weights`. Called by the whole block; every thread gets the column.
template <class Fill>
__device__ Found find_in_row(double level, const double* sums, int tiles, int columns, double* weights, Found* shared,
                             Fill fill) {
  Found found = {0, level, 0.0};
  int base = 0, count = tiles;
  for (const double* run = sums;; run = weights) {
    if (threadIdx.x < 32) {
      const Found inner = find(found.left, run, count);
      if (threadIdx.x == 0) *shared = {base + inner.index, inner.left, inner.margin};
    }
    __syncthreads();
    found = *shared;
    if (run == weights) return found;
    base = found.index * TILE, count = columns - base < TILE ? columns - base : TILE;
    fill(base, count);
    __syncthreads();
  }
}

__device__ inline u64 larger(u64 a, u64 b) { return a > b ? a : b; }

// The largest of the block's numbers, for every thread. `stage` holds one number per warp.
__device__ inline u64 block_max(u64 value, u64* stage) {
  for (int distance = 16; distance > 0; distance /= 2)
    value = larger(value, __shfl_xor_sync(kAllLanes, value, distance));
  if (threadIdx.x % 32 == 0) stage[threadIdx.x / 32] = value;
  __syncthreads();
  u64 largest = stage[0];
  for (int warp = 1; warp < (int)(blockDim.x / 32); ++warp) largest = larger(largest, stage[warp]);
  __syncthreads();
  return largest;
}

}  // namespace sampling
