// top-k, top-p and min-p without a sort: the logits that stay are a prefix of the row in the order of falling logits
// and rising columns, so only one cut in that order has to be found. It is found digit by digit of the logits' bits,
// from a histogram of how many logits have a digit and what they weigh.
//
// Weights are added up exactly, as integers, so that any order gives the same result.
#pragma once
#include "weights.cuh"

namespace sampling {

constexpr int BINS = 2048;

// A set of a row's logits: their number, and the sum of their weights in units of 2^-44 and of 2^-88.
struct Mass {
  u64 high, low;
  u32 count;

  __device__ void add_all(const Mass& other) { high += other.high, low += other.low, count += other.count; }
  __device__ double weight() const { return (double)high * 0x1p-44 + (double)low * 0x1p-88; }
};

// The mass of one logit whose weight is at most 1: fewer than 2^20 of them can be added up. Exact for weights down to
// 2^-64, whose 24 bits end within the second word.
__device__ inline Mass mass_of(float weight) {
  const float scaled = weight * 0x1p44f;
  const u64 high = (u64)scaled;
  return {high, (u64)((scaled - (float)high) * 0x1p44f), 1};
}

// Adds to one of the block's 64-bit sums; any order gives the same result. Shared memory adds 32 bits at once, and the
// carry is known from the old low word.
__device__ inline void add_to(u64* sum, u64 value) {
  u32* words = reinterpret_cast<u32*>(sum);  // low word first
  const u32 low = (u32)value;
  u32 high = (u32)(value >> 32);
  if (low) {
    const u32 old = atomicAdd(&words[0], low);
    high += old + low < old;
  }
  if (high) atomicAdd(&words[1], high);
}

struct Histogram {
  u64 high[BINS], low[BINS];
  u32 count[BINS];
};

// How much of the top of a row stays: a logit stays while those ahead of it are fewer, or weigh less, than `part` of
// `whole`; a `whole` of 0 stands for all of the row.
struct Budget {
  bool counts;
  bool weighs;  // whether to weigh what stays; a budget that counts does it for the next budget
  double part, whole;

  __device__ double measure(const Mass& mass) const { return counts ? (double)mass.count : mass.weight(); }
};

// The state of the search for a row's cut, shared by the block.
struct Search {
  Histogram histogram;
  Mass ahead;       // logits above the digits found so far
  Mass border;      // logits that have them all
  double amount;    // the budget
  u32 prefix;       // the digits found so far
  int is_reached;   // whether the budget runs out at all
  u32 rank;         // how many logits of the border stay
  int index;
  double margin;
};

struct Knife {
  View row;
  const u64* tops;
  int tiles;
  float max, inverse_temperature;

  __device__ float weigh(float x) const { return exp_weight(mul(sub(x, max), inverse_temperature)); }

  // Calls `visit(x, key)` for the logits whose key agrees with `prefix` in the bits of `mask`; a warp takes a tile.
  template <class Visit>
  __device__ void each(u32 mask, u32 prefix, Visit visit) const {
    const int lane = threadIdx.x % 32;
    const u32 least = prefix > LOWEST_KEY ? prefix : LOWEST_KEY;
    for (int tile = threadIdx.x / 32; tile < tiles; tile += blockDim.x / 32) {
      if ((u32)(tops[tile] >> 32) < least) continue;
      const int end = (tile + 1) * TILE < row.columns ? (tile + 1) * TILE : row.columns;
#pragma unroll 4
      for (int i = tile * TILE + lane; i < end; i += 32) {
        const float x = widen(row.data, row.dtype, i);
        const u32 key = order(x);
        if (key >= LOWEST_KEY && (key & mask) == prefix) visit(x, key);
      }
    }
  }
};

// Finds, from the top, the bin in which the budget runs out. Called by the first warp.
__device__ inline void find_bin(Search& search, const Budget& budget, int bins, int shift) {
  const int lane = threadIdx.x, run = bins / 32;
  const Histogram& histogram = search.histogram;
  const auto bin = [&](int i) {
    const int at = bins - 1 - i;
    return Mass{histogram.high[at], histogram.low[at], histogram.count[at]};
  };
  Mass mine = {0, 0, 0};
  for (int i = lane * run; i < (lane + 1) * run; ++i) mine.add_all(bin(i));
  if (shift == 21) {
    Mass total = mine;
    for (int distance = 16; distance > 0; distance /= 2)
      total.add_all({__shfl_xor_sync(kAllLanes, total.high, distance), __shfl_xor_sync(kAllLanes, total.low, distance),
                     __shfl_xor_sync(kAllLanes, total.count, distance)});
    if (lane == 0) search.amount = budget.part * (budget.whole > 0.0 ? budget.whole : budget.measure(total));
  }
  __syncwarp();
  const double amount = search.amount;
  Mass before = {0, 0, 0}, ahead = search.ahead, running = search.ahead;
  int chosen = -1;
  bool is_reached = false;
  __syncwarp();  // every lane has read what the chosen one will write
  for (int other = 0; other < 32; ++other) {
    const Mass theirs = {__shfl_sync(kAllLanes, mine.high, other), __shfl_sync(kAllLanes, mine.low, other),
                         __shfl_sync(kAllLanes, mine.count, other)};
    if (!is_reached && theirs.count > 0) chosen = other, before = running;
    running.add_all(theirs);
    is_reached = is_reached || budget.measure(running) >= amount;
  }
  if (lane == 0 && chosen < 0) search.is_reached = 0;
  if (lane == chosen) {
    int last = -1;
    for (int i = lane * run; i < (lane + 1) * run; ++i) {
      const Mass here = bin(i);
      if (here.count == 0) continue;
      last = i, ahead = before;
      before.add_all(here);
      if (budget.measure(before) >= amount) break;
    }
    search.is_reached = is_reached;
    search.border = bin(last);
    search.ahead = ahead;
    search.prefix |= (u32)(bins - 1 - last) << shift;
  }
}

// Cuts the row where the budget runs out: the cut's key is search.prefix, and search.rank of the logits at it stay. The
// whole row stays if search.is_reached is false.
__device__ inline void descend(const Knife& knife, const Budget& budget, Search& search) {
  const bool is_first = threadIdx.x == 0;
  if (is_first) search.ahead = Mass{0, 0, 0}, search.prefix = 0, search.is_reached = 1;
  u32 mask = 0;
  for (int level = 0; level < 3; ++level) {
    const int shift = level == 0 ? 21 : level == 1 ? 10 : 0, bins = level == 2 ? 1024 : BINS;
    for (int i = threadIdx.x; i < bins; i += blockDim.x)
      search.histogram.high[i] = search.histogram.low[i] = 0, search.histogram.count[i] = 0;
    __syncthreads();
    if (search.is_reached) {
      knife.each(mask, search.prefix, [&](float x, u32 key) {
        const int bin = (int)(key >> shift) & (bins - 1);
        atomicAdd(&search.histogram.count[bin], 1u);
        if (!budget.weighs) return;
        const Mass mass = mass_of(knife.weigh(x));
        add_to(&search.histogram.high[bin], mass.high);
        add_to(&search.histogram.low[bin], mass.low);
      });
    }
    __syncthreads();
    if (threadIdx.x < 32 && search.is_reached) find_bin(search, budget, bins, shift);
    __syncthreads();
    mask |= (u32)(bins - 1) << shift;
  }
  if (is_first && search.is_reached) {
    const double ahead = budget.measure(search.ahead), left = search.amount - ahead;
    const double one = budget.counts ? 1.0 : (double)knife.weigh(of_order(search.prefix));
    double rank = one > 0.0 ? ceil(left / one) : (double)search.border.count;
    if (!(rank >= 1.0)) rank = 1.0;
    if (rank > (double)search.border.count) rank = (double)search.border.count;
    search.rank = (u32)rank;
    const double above = rank * one - left, below = left - (rank - 1.0) * one;
    search.margin = budget.counts ? 1.0 : (above < below ? above : below) / search.amount;
  }
  __syncthreads();
}

// Finds the column of the rank-th logit at the cut, from the left, as search.index.
__device__ inline void find_tie(const Knife& knife, u32 rank, Search& search) {
  const int lane = threadIdx.x % 32;
  u32* counts = search.histogram.count;
  for (int tile = threadIdx.x / 32; tile < knife.tiles; tile += blockDim.x / 32) {
    const int end = (tile + 1) * TILE < knife.row.columns ? (tile + 1) * TILE : knife.row.columns;
    u32 count = 0;
    if ((u32)(knife.tops[tile] >> 32) >= search.prefix)
      for (int i = tile * TILE + lane; i < end; i += 32)
        count += order(widen(knife.row.data, knife.row.dtype, i)) == search.prefix;
    for (int distance = 16; distance > 0; distance /= 2) count += __shfl_xor_sync(kAllLanes, count, distance);
    if (lane == 0) counts[tile] = count;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    u32 left = rank;
    int tile = 0, found = -1;
    while (tile + 1 < knife.tiles && left > counts[tile]) left -= counts[tile++];
    for (int start = 0; start < TILE && found < 0; start += 32) {
      const int i = tile * TILE + start + lane;
      const bool is_tie = i < knife.row.columns && order(widen(knife.row.data, knife.row.dtype, i)) == search.prefix;
      const u32 ties = __ballot_sync(kAllLanes, is_tie), count = __popc(ties);
      if (left > count) {
        left -= count;
        continue;
      }
      const bool is_last = is_tie && __popc(ties & ((2u << lane) - 1u)) == (int)left;
      found = tile * TILE + start + __ffs(__ballot_sync(kAllLanes, is_last)) - 1;
    }
    if (lane == 0) search.index = found;
  }
  __syncthreads();
}

}  // namespace sampling
