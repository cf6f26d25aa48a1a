// The running softmax of one query: with it, attention takes one pass over the keys, in any order and in any parts.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f;

// exp(x), by the only exponential that the hardware has.
__device__ inline float exponential(float x) { return exp2f(x * LOG2_E); }

// The largest score so far and the sum of exp(score - largest). States of disjoint sets of keys merge into that of
// their union, in any order. `max` skips a score that is NaN, but `sum` keeps it.
struct Softmax {
  float max, sum;

  __device__ static Softmax of_none() { return {-INFINITY, 0.0f}; }

  // What weights are relative to; 0 where nothing has been seen yet, since exp(-inf - (-inf)) would be NaN.
  __device__ float reference() const { return max == -INFINITY ? 0.0f : max; }

  __device__ float weight(float score) const { return exponential(score - reference()); }

  // Raises the largest score to at least `score`; returns the factor that brings earlier weights to the new scale.
  __device__ float raise(float score) {
    const float before = max;
    max = fmaxf(max, score);
    const float factor = exponential(before - reference());
    sum *= factor;
    return factor;
  }
};

__device__ inline Softmax merged(Softmax one, Softmax other) {
  one.raise(other.max);
  other.raise(one.max);
  return {one.max, one.sum + other.sum};
}
