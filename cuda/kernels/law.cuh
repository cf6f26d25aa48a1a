// The laws (distributions) of rows, one launch per step: the largest logit, what stays, its weight or the race's end.
#pragma once
#include "cut.cuh"
#include "edits.cuh"

namespace sampling {

constexpr int HIGHEST_INDEX = 0x7fffffff;

// The row of this block of threads.
__device__ inline int row_of(const SampleArgs& args, int n) { return n * args.stride + args.offset; }

// Copies a tile of a row as f32; returns the number of its columns.
__device__ inline int load_tile(float* tile, const View& row, int base) {
  const int count = row.columns - base < TILE ? row.columns - base : TILE;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) tile[i] = widen(row.data, row.dtype, base + i);
  __syncthreads();
  return count;
}

// Writes a tile to the row's copy.
__device__ inline void store_tile(const float* tile, int base, int count, const Row& row, const SampleArgs& args) {
  float* out = args.changed + (long long)row.changed * row.columns + base;
  for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = tile[i];
}

// Grid (tiles, rows): bias and penalties, then the largest logit of each tile.
__device__ inline void scan(const SampleArgs& args) {
  SHARED(tile, float[TILE]);
  SHARED(stage, u64[33]);
  const int r = row_of(args, blockIdx.y), base = blockIdx.x * TILE;
  const Row& row = args.rows[r];
  const int count = load_tile(tile, {(const void*)row.logits, row.dtype, row.columns}, base);
  u32 bad = 0;
  if (row.edited) {
    bad = edit_tile(tile, base, count, row, args, nullptr, nullptr);
    store_tile(tile, base, count, row, args);
  }
  note_top(tile, base, count, bad, (long long)r * args.tiles + blockIdx.x, args, stage);
}

// Grid (rows): the largest logit of the row, and how far down logits stay.
__device__ inline void cut(const SampleArgs& args) {
  SHARED(search, Search);
  SHARED(stage, u64[33]);
  const int r = row_of(args, blockIdx.x);
  const Row& row = args.rows[r];
  const Request& request = args.requests[row.request];
  const u64* tops = args.tops + (long long)r * args.tiles;
  u64 top = 0;
  u32 bad = 0;
  for (int tile = threadIdx.x; tile < args.tiles; tile += blockDim.x) {
    top = larger(top, tops[tile]);
    bad |= args.bads[(long long)r * args.tiles + tile];
  }
  top = block_max(top, stage);
  const u32 nan = block_max(bad & NOT_A_NUMBER, stage), inf = block_max(bad & PLUS_INFINITY, stage);
  const u32 top_key = (u32)(top >> 32);
  Law law = {0.0, 0.0, of_order(top_key), 0, HIGHEST_INDEX, (int)~(u32)top, nan | inf, 0};
  if (top_key < LOWEST_KEY) law.bad |= NO_CANDIDATE;

  const bool draws = request.kind == DRAWN && law.bad == 0;
  const Knife knife = {view(row, args.changed), tops, args.tiles, law.max, request.inverse_temperature};
  const bool by_count = draws && request.top_k > 0 && request.top_k < (u32)row.columns, by_share = draws && request.top_p < 1.0;
  // top-p takes its share of what top-k kept: a prefix of the row in the same order.
  double whole = 0.0;
  u32 rank = 0;
  for (int share = 0; share < 2; ++share) {
    if (!(share ? by_share : by_count)) continue;
    const double part = share ? request.top_p : (double)request.top_k;
    descend(knife, {!share, by_share, part, share ? whole : 1.0}, search);
    const bool is_reached = search.is_reached;
    if (is_reached) {
      rank = law.cut_key == search.prefix && rank < search.rank ? rank : search.rank;
      law.cut_key = search.prefix;
      law.cut_index = HIGHEST_INDEX;
      law.close = search.margin < CLOSE;
      whole = search.ahead.weight() + (double)rank * (double)knife.weigh(of_order(search.prefix));
    }
    if (is_reached && rank < search.border.count && !PLANTED(TIES_BY_RANK_ONLY)) {
      find_tie(knife, rank, search);
      law.cut_index = search.index;
    }
    __syncthreads();
  }
  if (draws) law.floor = request.min_p;
  if (threadIdx.x == 0) args.laws[r] = law;
}

// Grid (tiles, rows): the sum of each tile's weights.
__device__ inline void weigh(const SampleArgs& args) {
  SHARED(weights, float[TILE]);
  SHARED(lanes, double[16]);
  const int r = row_of(args, blockIdx.y), base = blockIdx.x * TILE;
  const Row& row = args.rows[r];
  const Request& request = args.requests[row.request];
  const Law law = args.laws[r];
  const View logits = view(row, args.changed);
  const int count = row.columns - base < TILE ? row.columns - base : TILE;
  const bool counts = request.kind == DRAWN && law.bad == 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    weights[i] = counts ? weight(widen(logits.data, logits.dtype, base + i), base + i, law, request.inverse_temperature) : 0.0f;
  __syncthreads();
  const double sum = tile_sum(weights, count, lanes);
  if (threadIdx.x == 0) args.sums[(long long)r * args.tiles + blockIdx.x] = sum;
}

__device__ __forceinline__ void enter(Race& race, double score, u32 token) {
  const bool leads = score > race.best || (score == race.best && token < race.token);
  const double other = leads ? race.best : score;
  if (other > race.second) race.second = other;
  if (leads) race.best = score, race.token = token;
}

// The race of two sets of tokens; they may have their best one in common.
__device__ __forceinline__ void join(Race& race, const Race& other) {
  if (other.token == race.token) {
    if (other.second > race.second) race.second = other.second;
    return;
  }
  enter(race, other.best, other.token);
  if (other.second > race.second) race.second = other.second;
}

__device__ inline Race none() { return {-1e300, -1e300, kAllLanes, 0}; }

// Grid (tiles, rows): the largest log weight + Gumbel noise. With u the uniform number behind a token's noise, -ln u is
// at least 1 - u, and that is at least the complement of u's leading bits: the token is skipped if the complement is
// more than its weight times the best race so far (rust/src/law/gumbel.rs).
__device__ inline void race(const SampleArgs& args) {
  SHARED(stage, Race[32]);
  const int r = row_of(args, blockIdx.y), base = blockIdx.x * TILE, lane = threadIdx.x % 32;
  const Row& row = args.rows[r];
  const Request& request = args.requests[row.request];
  const Law law = args.laws[r];
  const View logits = view(row, args.changed);
  const u32* tokens = args.heads.tokens;
  const Noise noise = {request.seed, request.sample, request.position};
  const int end = row.columns - base < TILE ? row.columns : base + TILE;
  const auto score = [&](float x, const Bits& bits, u32 token) {
    const double gumbel = standard_gumbel(bits.of(token));
    return add((double)log_weight(x, law, request.inverse_temperature), gumbel);
  };
  Race best = none();
  if (request.kind == DRAWN && law.bad == 0) {
    // The most probable token makes a strong first leader.
    const u32 first = tokens ? tokens[law.first] : law.first;
    const float x = widen(logits.data, logits.dtype, law.first);
    const double leader = score(x, noise.gumbel_bits(row.before, first >> 1), first);
    float limit = expf(-(float)leader) * 1.001f * 0x1p32f;
    for (int i = base + threadIdx.x; i < end; i += blockDim.x) {
      const float x = widen(logits.data, logits.dtype, i);
      const float w = weight(x, i, law, request.inverse_temperature);
      const u32 token = tokens ? tokens[i] : i;
      if (!(w > 0.0f)) continue;
      const Bits bits = noise.gumbel_bits(row.before, token >> 1);
      const u32 bound = ~(u32)(bits.of(token) >> 32);
      if ((float)bound <= limit * w) enter(best, score(x, bits, token), token);
    }
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const Race other = {__shfl_xor_sync(kAllLanes, best.best, distance), __shfl_xor_sync(kAllLanes, best.second, distance),
                        __shfl_xor_sync(kAllLanes, best.token, distance), 0};
    join(best, other);
  }
  if (lane == 0) stage[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < (int)(blockDim.x / 32); ++warp) join(best, stage[warp]);
    args.races[(long long)r * args.tiles + blockIdx.x] = best;
  }
}

// The end of a row's race, by one warp: every lane gets it.
__device__ inline Race end_of_race(const SampleArgs& args, int r) {
  Race best = none();
  for (int tile = threadIdx.x % 32; tile < args.tiles; tile += 32) join(best, args.races[(long long)r * args.tiles + tile]);
  for (int distance = 16; distance > 0; distance /= 2) {
    const Race other = {__shfl_xor_sync(kAllLanes, best.best, distance), __shfl_xor_sync(kAllLanes, best.second, distance),
                        __shfl_xor_sync(kAllLanes, best.token, distance), 0};
    join(best, other);
  }
  return best;
}

// Writes the weights of a tile's columns as f64.
__device__ inline void fill_weights(const View& logits, const Law& law, float inverse_temperature, int base, int count,
                                    double* weights) {
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    weights[i] = weight(widen(logits.data, logits.dtype, base + i), base + i, law, inverse_temperature);
}

}  // namespace sampling
