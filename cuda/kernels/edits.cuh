// Bias, penalties and the mask of stop tokens over one tile of a row, in the order and arithmetic of
// rust/src/law/transform.rs.
#pragma once
#include "weights.cuh"

namespace sampling {

// How often `token` was drafted before this row's token.
__device__ inline u32 drafted_before(const SampleArgs& args, const Request& request, int before, u32 token) {
  u32 count = 0;
  for (int k = 0; k < before; ++k) count += args.ids[request.first_id + k] == token;
  return count;
}

// The request's first edit whose token is not below `token`.
__device__ inline int first_edit(const SampleArgs& args, const Request& request, u32 token) {
  int low = request.first_edit, high = request.first_edit + request.edits;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (args.edits[middle].token < token) low = middle + 1;
    else high = middle;
  }
  return low;
}

__device__ inline float penalised(float x, const Request& request, u32 in_output) {
  if (request.repetition != 1.0f) x = x < 0.0f ? mul(x, request.repetition) : quotient(x, request.repetition);
  if (in_output > 0) x = sub(sub(x, mul((float)in_output, request.frequency)), request.presence);
  return x;
}

// Changes the tile's logits, columns `base` and up, in place. Returns the bits of bad logits that the mask would hide.
__device__ inline u32 edit_tile(float* tile, int base, int count, const Row& row, const SampleArgs& args,
                                const u32* tokens, const int* column) {
  const Request& request = args.requests[row.request];
  const u32 lowest = tokens ? tokens[base] : base, highest = tokens ? tokens[base + count - 1] : base + count - 1;
  const int end = first_edit(args, request, highest + 1);
  u32 bad = 0;
  for (int i = first_edit(args, request, lowest) + threadIdx.x; i < end; i += blockDim.x) {
    const Edit edit = args.edits[i];
    const int at = (column ? column[edit.token] : (int)edit.token) - base;
    if (at < 0 || at >= count) continue;
    float x = tile[at];
    if (edit.flags & STOP && request.generated + row.before < request.min_tokens) {
      if (x != x) bad |= NOT_A_NUMBER;
      else if (x == INFINITY) bad |= PLUS_INFINITY;
      else x = -INFINITY;
    }
    if (edit.flags & BIASED) x = add(x, edit.bias);
    if (request.penalises) {
      const u32 drafted = drafted_before(args, request, row.before, edit.token);
      if (edit.flags & SEEN || drafted > 0) x = penalised(x, request, edit.in_output + drafted);
    }
    tile[at] = x;
  }
  // Drafted tokens that no edit covers: nothing before the block had them.
  if (request.penalises) {
    for (int k = threadIdx.x; k < row.before; k += blockDim.x) {
      const u32 token = args.ids[request.first_id + k];
      if (token < lowest || token > highest || drafted_before(args, request, k, token) > 0) continue;
      const int known = first_edit(args, request, token);
      if (known < request.first_edit + request.edits && args.edits[known].token == token) continue;
      const int at = (column ? column[token] : (int)token) - base;
      if (at >= 0 && at < count)
        tile[at] = penalised(tile[at], request, drafted_before(args, request, row.before, token));
    }
  }
  __syncthreads();
  return bad;
}

// Writes the largest logit of a tile, and what is wrong with it, to the row's arrays. `stage`: 33 numbers of the block.
__device__ inline void note_top(const float* tile, int base, int count, u32 bad, long long at, const SampleArgs& args,
                                u64* stage) {
  u64 top = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const float x = tile[i];
    if (x != x) bad |= NOT_A_NUMBER;
    else top = larger(top, ((u64)order(x) << 32) | (u32)~(base + i));
    if (x == INFINITY) bad |= PLUS_INFINITY;
  }
  top = block_max(top, stage);
  const u32 nan = block_max(bad & NOT_A_NUMBER, stage), inf = block_max(bad & PLUS_INFINITY, stage);
  if (threadIdx.x == 0) {
    args.tops[at] = top;
    args.bads[at] = nan | inf;
  }
}

}  // namespace sampling
