// Merges the states that the chunks of split requests left into the requests' results.
#pragma once
#include "attention_args.cuh"

// Blocks: splits, rows (the most of a segment), query heads in fours: a warp for each head.
template <class T, int SIZE>
__device__ inline void merge_chunks(const AttendArgs& args) {
  constexpr int width = SIZE >= 4 * kLanes ? 4 : SIZE > kLanes ? SIZE / kLanes : 1;  // columns of a pack
  constexpr int packs = SIZE > width * kLanes ? SIZE / (width * kLanes) : 1;
  const Split& split = args.splits[blockIdx.x];
  const Segment& segment = args.segments[split.segment];
  const int row = static_cast<int>(blockIdx.y), query_heads = args.key_heads * args.groups;
  const int query_head = static_cast<int>(blockIdx.z * blockDim.x / kLanes) + warp_id();
  const int column = lane_id() * width;
  if (row >= segment.rows || query_head >= query_heads || column >= SIZE) return;  // no barrier follows
  const int64_t query = row * args.groups + query_head % args.groups;
  const int64_t stride = static_cast<int64_t>(args.key_heads) * args.queries;
  int64_t place = (split.first * args.key_heads + query_head / args.groups) * args.queries + query;
  Softmax whole = Softmax::of_none();
  float sums[packs][width] = {};
  for (int64_t slot = 0; slot < split.count; ++slot, place += stride) {
    const Softmax state = args.states[place];
    const Softmax both = merged(whole, state);
    const float before = both.weight(whole.max), now = both.weight(state.max);
#pragma unroll
    for (int p = 0; p < packs; ++p) {
      const auto pack = load_pack<width>(args.sums + place * SIZE + column + p * width * kLanes);
#pragma unroll
      for (int i = 0; i < width; ++i) sums[p][i] = sums[p][i] * before + pack.at[i] * now;
    }
    whole = both;
  }
  T* const out = static_cast<T*>(args.out) + ((segment.first + row) * query_heads + query_head) * SIZE + column;
#pragma unroll
  for (int p = 0; p < packs; ++p) {
    Pack<T, width> pack;
#pragma unroll
    for (int i = 0; i < width; ++i) pack.at[i] = narrow<T>(sums[p][i] / whole.sum);
    store_pack(out + p * width * kLanes, pack);
  }
}
