// The Markov chain of a block (rust/src/chain): each step biases the base logits by the token that the previous step
// drew, and draws from the law (distribution) that the request's parameters make of them. The law stays in device
// memory: it is the q of the acceptance rule. A step is a few launches; nothing of it goes through the host.
#pragma once
#include "law.cuh"

namespace sampling {

constexpr int MOST_RANK = 1024;
constexpr int LATENT_ROWS = 8;

// The row of a slot, and the token that was drawn before it.
struct Slot {
  int request, slot, row;
  u32 previous;
};

__device__ inline Slot slot_of(const SampleArgs& args, int request, int slot) {
  const Request& of = args.requests[request];
  const int back = PLANTED(STALE_TOKEN) ? 2 : 1;
  const u32 previous = slot < back ? of.anchor : args.ids[of.first_id + slot - back];
  return {request, slot, request * args.stride + slot, previous};
}

// Product of a row with a vector in 16 lanes, as in rust/src/linear.rs: sums run in lanes, unfused, and are then added
// up in pairs. `x(i)` is element i of the vector. Every lane of the row's half warp gets the product.
template <class T, class X>
__device__ float lane_dot(const T* row, int count, X x) {
  float sum = 0.0f;
#pragma unroll 8
  for (int i = threadIdx.x % 16; i < count; i += 16) sum = add(sum, mul(::widen(row[i]), x(i)));
#pragma unroll
  for (int distance = 8; distance > 0; distance /= 2) sum = add(sum, __shfl_xor_sync(kAllLanes, sum, distance));
  return sum;
}

template <class X>
__device__ float dot(const Matrix& matrix, long long row, X x) {
  const long long start = row * matrix.stride;
  if (matrix.dtype == F32) return lane_dot((const float*)matrix.data + start, matrix.columns, x);
  if (matrix.dtype == F16) return lane_dot((const f16*)matrix.data + start, matrix.columns, x);
  return lane_dot((const bf16*)matrix.data + start, matrix.columns, x);
}

__device__ inline float at(const Matrix& matrix, long long row, int column) {
  return widen((const void*)matrix.data, matrix.dtype, row * matrix.stride + column);
}

// Row of W1 for the token before a slot; row 0 if that token has none (then nothing is drawn).
__device__ inline int embedding(const SampleArgs& args, const Slot& slot) {
  return slot.previous < (u32)args.heads.w1.rows ? (int)slot.previous : 0;
}

// [h; e], or its hidden part alone if there is no Markov head.
struct Features {
  const Matrix& hidden;
  const Matrix& w1;
  int state, token;

  __device__ float operator()(int i) const {
    return i < hidden.columns ? at(hidden, state, i) : at(w1, token, i - hidden.columns);
  }
};

__device__ inline Features features(const SampleArgs& args, const Slot& slot) {
  const Heads& heads = args.heads;
  const int state = args.requests[slot.request].first_row * (args.stride + heads.lead) + heads.lead + slot.slot;
  return {heads.hidden, heads.w1, state, embedding(args, slot)};
}

__device__ inline double sigmoid(double x) {
  const double e = exp(x >= 0.0 ? -x : x);
  return x >= 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

// Grid (requests, rank / 8): the latent that a gated or RNN head makes of the token before the slot, half a warp for
// each of 8 elements. `args.offset` is the slot; -1 is the anchor's own, over which the state of some RNN heads goes.
__device__ inline void latent(const SampleArgs& args) {
  const Heads& heads = args.heads;
  const Slot slot = slot_of(args, blockIdx.x, args.offset);
  const Features x = features(args, slot);
  const int rank = heads.w1.columns, parity = args.offset & 1;
  const long long states = (long long)args.requests_count * rank, mine = (long long)blockIdx.x * rank;
  const bool starts = args.offset == -heads.lead;
  const float* before = args.states + (parity ? 0 : states) + mine;
  float* after = args.states + (parity ? states : 0) + mine;
  float* out = args.latents + mine;
  // [s; e; h]
  const auto input = [&](int j) {
    if (j < rank) return starts ? 0.0f : before[j];
    return j < 2 * rank ? at(heads.w1, x.token, j - rank) : at(heads.hidden, x.state, j - 2 * rank);
  };
  for (int half = threadIdx.x / 16; half < LATENT_ROWS; half += blockDim.x / 16) {
    const int i = blockIdx.y * LATENT_ROWS + half;
    const int row = i < rank ? i : 0;  // lanes without an element of their own join in the shuffles
    const bool writes = i < rank && threadIdx.x % 16 == 0;
    const auto projected = [&](int r, bool joint) {
      const float product = joint ? dot(heads.latent, r, input) : dot(heads.latent, r, x);
      return (double)add(at(heads.latent_bias, 0, r), product);
    };
    if (heads.kind == GATED) {
      const double gate = sigmoid(projected(row, false));
      if (writes) out[i] = (float)(gate * (double)at(heads.w1, x.token, i));
    } else {
      const double gate = sigmoid(projected(row, true)), candidate = tanh(projected(rank + row, true));
      const double output = tanh(projected(2 * rank + row, true));
      if (writes) after[i] = (float)add(mul(gate, (double)input(i)), mul(1.0 - gate, candidate));
      if (writes) out[i] = (float)output;
    }
  }
}

// Grid (requests, tiles): biased logits of the slot `args.offset`, after the request's own bias and penalties. Requests
// are the first dimension, so that blocks that run together read the same part of W2.
__device__ inline void bend(const SampleArgs& args) {
  SHARED(tile, float[TILE]);
  SHARED(latent, float[MOST_RANK]);
  SHARED(stage, u64[33]);
  const Heads& heads = args.heads;
  const Slot slot = slot_of(args, blockIdx.x, args.offset);
  const Row& row = args.rows[slot.row];
  const int base = blockIdx.y * TILE, rank = heads.kind == NO_MARKOV ? 0 : heads.w1.columns;
  const int token = embedding(args, slot);
  for (int i = threadIdx.x; i < rank; i += blockDim.x)
    latent[i] = heads.kind == VANILLA ? at(heads.w1, token, i) : args.latents[(long long)blockIdx.x * rank + i];
  const int count = load_tile(tile, {(const void*)row.logits, row.dtype, row.columns}, base);
  const int halves = blockDim.x / 16, half = threadIdx.x / 16;
  for (int start = 0; rank > 0 && start < count; start += halves) {
    const int i = start + half;
    const float bias = dot(heads.w2, i < count ? base + i : base, [&](int j) { return latent[j]; });
    if (i < count && threadIdx.x % 16 == 0) tile[i] = add(tile[i], bias);
  }
  __syncthreads();
  u32 bad = 0;
  if (row.edited) bad = edit_tile(tile, base, count, row, args, heads.tokens, heads.column);
  store_tile(tile, base, count, row, args);
  note_top(tile, base, count, bad, (long long)slot.row * args.tiles + blockIdx.y, args, stage);
}

// Grid (requests): draws the token of the slot `args.offset`.
__device__ inline void draw(const SampleArgs& args) {
  SHARED(weights, double[TILE]);
  SHARED(stage, double[256]);
  SHARED(total, double);
  SHARED(found, Found);
  const Slot slot = slot_of(args, blockIdx.x, args.offset);
  const Request& request = args.requests[blockIdx.x];
  const Row& row = args.rows[slot.row];
  const Law law = args.laws[slot.row];
  const u32* tokens = args.heads.tokens;
  const Noise noise = {request.seed, request.sample, request.position};
  int column = law.first;
  u32 token = 0, close = law.close;
  const bool draws = request.kind == DRAWN && law.bad == 0, by_weight = draws && args.rule == REJECTION;
  if (by_weight) {
    const double* sums = args.sums + (long long)slot.row * args.tiles;
    if (threadIdx.x < 32) {
      const double sum = ordered_sum(sums, args.tiles, stage);
      if (threadIdx.x == 0) total = sum;
    }
    __syncthreads();
    const View logits = view(row, args.changed);
    const auto fill = [&](int base, int count) {
      fill_weights(logits, law, request.inverse_temperature, base, count, weights);
    };
    const double u = noise.uniform(slot.slot, DRAFT);
    const Found where = find_in_row(mul(u, total), sums, args.tiles, row.columns, weights, &found, fill);
    column = where.index;
    close |= where.margin < CLOSE * total;
  }
  if (law.bad == 0) token = tokens ? tokens[column] : column;
  if (draws && !by_weight && threadIdx.x < 32) {
    const Race race = end_of_race(args, slot.row);
    token = race.token;
    close |= race.best - race.second < CLOSE;
  }
  if (threadIdx.x == 0) {
    if (by_weight) args.laws[slot.row].total = total;
    args.laws[slot.row].close = close;
    const bool is_known = args.heads.kind == NO_MARKOV || slot.previous < (u32)args.heads.w1.rows;
    args.draft_bads[slot.row] = law.bad | (is_known ? 0u : (u32)NO_EMBEDDING);
    args.ids[request.first_id + slot.slot] = token;
  }
}

// Grid (slots, requests), 32 threads: what the confidence head makes of each slot, before its bias.
__device__ inline void confide(const SampleArgs& args) {
  const Slot slot = slot_of(args, blockIdx.y, blockIdx.x);
  const float product = dot(args.heads.confidence, 0, features(args, slot));
  if (threadIdx.x == 0) args.dots[slot.row] = product;
}

}  // namespace sampling
