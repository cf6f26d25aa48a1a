// Products of a warp's 16 queries with 16 keys, and of their weights with 16 values, by tensor cores.
#pragma once
#include "warp_matrix.cuh"

// Products of 16 queries with 16 keys: twice [16, 8], laid out like C in `warp_matrix.cuh`.
using Scores = float[2][4];

// What differs between 16-bit and 32-bit numbers. `add_values` takes a part of the columns, from piece `first` on.
template <class T>
struct Products;

template <class T>
struct HalfProducts {
  template <class Shape>
  __device__ static void add_values(float (*out)[4], const Scores& weights, const Pack<uint32_t, 4>* values,
                                    int first) {
    const int lane = lane_id();
    const uint32_t a[4] = {pair(weights[0][0], weights[0][1]), pair(weights[0][2], weights[0][3]),
                           pair(weights[1][0], weights[1][1]), pair(weights[1][2], weights[1][3])};
#pragma unroll
    for (int piece = 0; piece < Shape::pieces / Shape::parts; piece += 2) {
      uint32_t b[4];
      load_transposed(b, values + Shape::at(lane % 16, first + piece, lane / 16));
      Products<T>::add(out[piece], a, b[0], b[1]);
      Products<T>::add(out[piece + 1], a, b[2], b[3]);
    }
  }

  __device__ static uint32_t pair(float low, float high) {
    return uint32_t(narrow<T>(low).bits) | uint32_t(narrow<T>(high).bits) << 16;
  }
};

template <>
struct Products<bf16> : HalfProducts<bf16> {
  __device__ static void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    product_of_bf16(c, a, b0, b1);
  }
};

template <>
struct Products<f16> : HalfProducts<f16> {
  __device__ static void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    product_of_f16(c, a, b0, b1);
  }
};

// A float32 is the sum of two numbers of 11 bits and a rest below 2^-22, so that three products make up a product of
// two float32. Both numbers have their low 13 bits cleared, so that nothing depends on what the hardware does with
// these bits. Tensor cores truncate where a float32 addition rounds: each product may lose an ulp of what it is added
// to, always towards zero. Along a chunk of n keys that is at most 3 n / 8 * 2^-23 of the largest partial sum (2e-4 at
// 4096 keys), and 1e-5 of a score at heads of 256. Sums of fewer keys, added up by float32 additions, would lose less,
// but take more registers than there are: at 256 they spill.
template <>
struct Products<float> {
  __device__ static void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) high[i] = leading(a[i]), low[i] = rest(a[i]);
    product_of_tf32(c, low, leading(b0), leading(b1));
    product_of_tf32(c, high, rest(b0), rest(b1));
    product_of_tf32(c, high, leading(b0), leading(b1));
  }

  // On both sides, keys 2 t and 2 t + 1 take the places of t and t + 4, where the product needs the weights.
  template <class Shape>
  __device__ static void add_values(float (*out)[4], const Scores& weights, const Pack<uint32_t, 4>* values,
                                    int first) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* w = weights[half];
      const uint32_t a[4] = {__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]),
                             __float_as_uint(w[3])};
      const int key = 8 * half + 2 * t;
#pragma unroll
      for (int column = 0; column < Shape::pieces / Shape::parts / 2; ++column) {
        const int piece = first + 2 * column, one = Shape::at(key, piece, g / 4);
        const int other = Shape::at(key + 1, piece, g / 4);
        add(out[column], a, values[one].at[g % 4], values[other].at[g % 4]);
      }
    }
  }

  __device__ static uint32_t leading(uint32_t x) { return (x + 0x1000u) & 0xffffe000u; }
  __device__ static uint32_t rest(uint32_t x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(leading(x))) & 0xffffe000u;
  }
};
