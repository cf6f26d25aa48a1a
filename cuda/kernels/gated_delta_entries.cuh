// Entries by the dtype of activations: the rows of a pass in one layer, by the most rows that a request has, and
// the commit of those that stay, in all layers.
#pragma once
#include "delta_carry.cuh"
#include "delta_rows.cuh"

namespace gated_delta {
constexpr int kMostThreads = 288;  // heads of 128 values: 64 lanes per part of the keys, and a warp for scores
}

#define GATED_DELTA_ROWS(name, T, Rows) \
  KERNEL(name##_r##Rows, gated_delta::RowsArgs, gated_delta::kMostThreads) { \
    gated_delta::run_rows<T, Rows>(args); \
  }

#define GATED_DELTA(dtype, T) \
  GATED_DELTA_ROWS(delta_rows_##dtype, T, 4) \
  GATED_DELTA_ROWS(delta_rows_##dtype, T, 8) \
  GATED_DELTA_ROWS(delta_rows_##dtype, T, 16) \
  KERNEL(delta_carry_##dtype, gated_delta::CarryArgs, gated_delta::kMostThreads) { \
    gated_delta::run_carry<T>(args); \
  }
