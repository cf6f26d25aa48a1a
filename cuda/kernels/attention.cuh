// Attention of the newest rows of many requests over their cached keys and values, which are read once for all rows of
// a request and all query heads of a key head.
//
// A block takes a chunk of one request's keys and one key head. Its queries, (row, head of the group), form tiles of
// 16, as tensor cores need them. Two warps share a query tile: each scores 16 keys of a tile, both weigh all of them,
// and each sums up half of the values' columns, so that the sums fit into registers. Tiles of keys and values come
// through a ring in shared memory, a few ahead. If a request's keys are split, its chunks leave states that
// `merge_chunks` merges in a launch of its own, because blocks cannot wait for each other.
#pragma once
#include "async_copy.cuh"
#include "attention_args.cuh"
#include "attention_merge.cuh"
#include "attention_products.cuh"

constexpr int kTile = 16;   // queries of a warp, and keys of a tile that it scores
constexpr int kStages = 4;  // of the ring

// Heads are cut into pieces of 16 bytes.
template <class T, int SIZE>
struct Shape {
  static constexpr int pieces = SIZE * sizeof(T) / 16;
  static constexpr int per_piece = 16 / sizeof(T);
  static constexpr int parts = pieces > 32 || pieces < 4 ? 1 : 2;  // warps that share a query tile
  static constexpr int most_tiles = pieces > 32 ? 2 : pieces > 16 ? 3 : 4;
  static constexpr int columns = SIZE / parts;  // of the values that a warp sums up
  static constexpr int keys = kTile * parts;  // of a tile of the ring
  static constexpr int threads = kLanes * parts * most_tiles;
  static constexpr int stage = keys * pieces;  // pieces of a stage

  // Where piece `piece + more` of a row is stored; `more` is 0 or 1, and `piece` is even. Eight rows of one column of
  // pieces are in different banks.
  __device__ static int at(int row, int piece, int more) {
    constexpr int turn = pieces < 8 ? pieces - 1 : 7;
    return row * pieces + (piece & ~turn) + (((piece & turn) | more) ^ (row & turn));
  }
};

using Piece = Pack<uint32_t, 4>;

template <class T, int SIZE>
struct Attend {
  using S = Shape<T, SIZE>;
  using Sums = float[S::columns / 8][4];

  const AttendArgs& args;
  const Segment& segment;
  const Chunk& chunk;
  int rows, length, queries, head, first_query, query_tiles, query_tile, part;
  Piece* memory;  // shared: queries, the ring, and scores that warps exchange

  __device__ Attend(const AttendArgs& args, Piece* memory)
      : args(args), segment(args.segments[args.chunks[blockIdx.x].segment]), chunk(args.chunks[blockIdx.x]),
        memory(memory) {
    rows = static_cast<int>(segment.rows);
    length = static_cast<int>(segment.length);
    queries = rows * args.groups;
    head = static_cast<int>(blockIdx.y);
    query_tiles = static_cast<int>(blockDim.x) / (kLanes * S::parts);
    query_tile = warp_id() / S::parts;
    part = warp_id() % S::parts;
    first_query = (static_cast<int>(blockIdx.z) * query_tiles + query_tile) * kTile;
  }

  // The row and the query head of a query.
  __device__ int row_of(int query) const { return query / args.groups; }
  __device__ int head_of(int query) const { return head * args.groups + query % args.groups; }

  __device__ void run() {
    if (blockIdx.z == 0) keep_fresh();
    const Source<T, SIZE> source(args, segment, head);
    const int start = static_cast<int>(chunk.start), stop = static_cast<int>(chunk.stop);
    const int steps = 2 * ((stop - start + S::keys - 1) / S::keys);
    Piece* const ring = memory + query_tiles * kTile * S::pieces;

    // Step 2 i brings tile i of the keys, step 2 i + 1 that of the values.
    auto fetch = [&](int step) {
      if (step < steps) {
        Piece* const stage = ring + step % kStages * S::stage;
        const int first = start + step / 2 * S::keys;
        for (int i = threadIdx.x; i < S::stage; i += blockDim.x) {
          const int row = i / S::pieces, piece = i % S::pieces, position = first + row;
          const bool wanted = position < stop;
          const T* from = wanted ? source.at(position, step % 2) + piece * S::per_piece : source.fresh;
          copy_async(stage + S::at(row, piece, 0), from, wanted);
        }
      }
      end_copies();
    };
    // Waits until the oldest step has arrived; then the stage of the step before it is free for the next fetch.
    auto next = [&](int step) {
      await_copies<kStages - 2>();
      __syncthreads();
      fetch(step + kStages - 1);
      return ring + step % kStages * S::stage;
    };

    // Scores exchanged within this query tile: [parts, 8 numbers of a lane, lanes].
    float* const exchange =
        reinterpret_cast<float*>(ring + kStages * S::stage) + query_tile * S::parts * 8 * kLanes + lane_id();

    fetch_queries();
    for (int step = 0; step < kStages - 1; ++step) fetch(step);

    const bool busy = first_query < queries;
    Span seen[2];
    for (int i = 0; i < 2; ++i) {
      const int query = min(first_query + lane_id() / 4 + 8 * i, queries - 1);
      seen[i] = args.reach.of(row_of(query), rows, length).within({start, stop});
    }
    const Span common = args.reach.common(rows, length).within({start, stop});

    Softmax states[2] = {Softmax::of_none(), Softmax::of_none()};
    Sums sums = {};
    for (int step = 0; step < steps; step += 2) {
      Scores scores[S::parts] = {};
      const Piece* tile = next(step);
      if (busy) {
        const int first = start + step / 2 * S::keys + part * kTile;
        score(scores[0], tile + part * kTile * S::pieces);
        if (first < common.start || first + kTile > common.stop) hide(scores[0], seen, first);
        if constexpr (S::parts > 1) show(scores[0], exchange);
      }
      tile = next(step + 1);
      if (busy) {
        if constexpr (S::parts > 1) look(scores, exchange);
        weigh(scores, states, sums);
#pragma unroll
        for (int p = 0; p < S::parts; ++p) add_values(sums, scores[p], tile + p * kTile * S::pieces);
      }
    }
    await_copies<0>();
    for (Softmax& state : states) state.sum = warp_sum<4>(state.sum);
    if (busy) chunk.slot < 0 ? finish(states, sums) : leave(states, sums);
  }

  // Writes the chunk's new keys and values behind the cached ones, where nothing reads in this launch.
  __device__ void keep_fresh() const {
    const Source<T, SIZE> source(args, segment, head);
    const int from = max(static_cast<int>(chunk.start), length), fresh = static_cast<int>(chunk.stop) - from;
    for (int i = threadIdx.x; i < 2 * fresh * S::pieces; i += blockDim.x) {
      const int item = i / S::pieces, piece = i % S::pieces, position = from + item / 2;
      const T* const given = source.given(position, item % 2) + piece * S::per_piece;
      store_pack(source.cached(position, item % 2) + piece * S::per_piece, load_pack<S::per_piece>(given));
    }
  }

  __device__ void fetch_queries() const {
    const int before = static_cast<int>(blockIdx.z) * query_tiles * kTile;
    const T* const heads = static_cast<const T*>(args.heads) + segment.first * args.row_stride;
    for (int i = threadIdx.x; i < query_tiles * kTile * S::pieces; i += blockDim.x) {
      const int row = i / S::pieces, piece = i % S::pieces, query = before + row;
      const bool wanted = query < queries;
      const T* from = heads;
      if (wanted) from += row_of(query) * args.row_stride + head_of(query) * SIZE + piece * S::per_piece;
      copy_async(memory + S::at(row, piece, 0), from, wanted);
    }
  }

  __device__ void score(Scores& scores, const Piece* keys) const {
    const Piece* const mine = memory + query_tile * kTile * S::pieces;
    const int lane = lane_id();
#pragma unroll
    for (int piece = 0; piece < S::pieces; piece += 2) {
      uint32_t a[4], b[4];
      load_matrices(a, mine + S::at(lane % 16, piece, lane / 16));
      load_matrices(b, keys + S::at(lane % 8 + lane / 16 * 8, piece, lane / 8 % 2));
      Products<T>::add(scores[0], a, b[0], b[1]);
      Products<T>::add(scores[1], a, b[2], b[3]);
    }
  }

  // Hides, in the scores of 16 keys from position `first` on, those that a row does not see.
  __device__ static void hide(Scores& scores, const Span (&seen)[2], int first) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = first + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
      if (!seen[i / 2 % 2].has(key)) scores[i / 4][i % 4] = -INFINITY;
    }
  }

  // The warps of a query tile exchange their scores; the barrier between `show` and `look` is that of the ring.
  __device__ void show(const Scores& scores, float* exchange) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) exchange[(part * 8 + i) * kLanes] = scores[i / 4][i % 4];
  }

  __device__ static void look(Scores (&scores)[S::parts], const float* exchange) {
#pragma unroll
    for (int i = 0; i < 8 * S::parts; ++i) scores[i / 8][i / 4 % 2][i % 4] = exchange[i * kLanes];
  }

  // Turns scores into weights and rescales the earlier sums.
  __device__ static void weigh(Scores (&scores)[S::parts], Softmax (&states)[2], Sums& sums) {
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int k = 0; k < 4 * S::parts; ++k) largest = fmaxf(largest, scores[k / 4][k / 2 % 2][2 * i + k % 2]);
      factors[i] = states[i].raise(warp_max<4>(largest));
#pragma unroll
      for (int k = 0; k < 4 * S::parts; ++k) {
        float& score = scores[k / 4][k / 2 % 2][2 * i + k % 2];
        score = states[i].weight(score);
        sum += score;
      }
      states[i].sum += sum;
    }
    if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < S::columns / 8 * 4; ++n) sums[n / 4][n % 4] *= factors[n % 4 / 2];
    }
  }

  __device__ void add_values(Sums& sums, const Scores& weights, const Piece* values) const {
    Products<T>::template add_values<S>(sums, weights, values, part * S::pieces / S::parts);
  }

  // The first column that this lane writes.
  __device__ int column() const { return part * S::columns + lane_id() % 4 * 2; }

  __device__ void finish(const Softmax (&states)[2], const Sums& sums) const {
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + lane_id() / 4 + 8 * i;
      if (query >= queries) continue;
      const float factor = 1.0f / states[i].sum;
      const int64_t row = segment.first + row_of(query);
      T* const out = static_cast<T*>(args.out) + (row * args.key_heads * args.groups + head_of(query)) * SIZE + column();
#pragma unroll
      for (int n = 0; n < S::columns / 8; ++n) {
        const Pack<T, 2> pair = {narrow<T>(sums[n][2 * i] * factor), narrow<T>(sums[n][2 * i + 1] * factor)};
        store_pack(out + 8 * n, pair);
      }
    }
  }

  __device__ void leave(const Softmax (&states)[2], const Sums& sums) const {
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + lane_id() / 4 + 8 * i;
      if (query >= queries) continue;
      const int64_t place = (chunk.slot * args.key_heads + head) * args.queries + query;
      if (part == 0 && lane_id() % 4 == 0) args.states[place] = states[i];
#pragma unroll
      for (int n = 0; n < S::columns / 8; ++n) {
        const Pack<float, 2> pair = {sums[n][2 * i], sums[n][2 * i + 1]};
        store_pack(args.sums + place * SIZE + column() + 8 * n, pair);
      }
    }
  }
};

// Blocks: chunks, key heads, groups of query tiles. Threads: 32 `parts` for each query tile. Shared memory: 16 rows for
// each query tile, the ring, and 1 KiB for each warp where there are two for a query tile.
template <class T, int SIZE>
__device__ inline void attend(const AttendArgs& args) {
  DYNAMIC_SHARED(Piece, memory);
  Attend<T, SIZE>(args, memory).run();
}

#define ATTENTION(type, size)                                                                   \
  KERNEL(attend_##type##_d##size, AttendArgs, (Shape<attention_##type, size>::threads)) {       \
    attend<attention_##type, size>(args);                                                       \
  }                                                                                             \
  KERNEL(merge_##type##_d##size, AttendArgs, 128) { merge_chunks<attention_##type, size>(args); }

using attention_f32 = float;
using attention_f16 = f16;
using attention_bf16 = bf16;
