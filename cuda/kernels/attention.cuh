// Attention of the newest rows of many requests over their cached keys and values, which are read once for all rows of a
// request and all query heads of a key head.
//
// A block takes a chunk of one request's keys and one key head. Its queries, (row, head of the group), stand in tiles of
// 16 as a tensor core wants them; a warp has one query tile and 16 keys of each tile of keys. Tiles of keys and values come
// through a ring in shared memory, a few ahead. Where a request's keys are split, its chunks leave states behind that
// `merge_chunks` unites in a launch of its own: blocks cannot wait for each other.
#pragma once
#include "async_copy.cuh"
#include "online_softmax.cuh"
#include "reach.cuh"
#include "warp_matrix.cuh"

// One request of a pass. Position t of key head h of layer l lies at cache + l * layer_stride + h * head_stride +
// place(t) * head size elements, where place(t) goes through the page table; value heads follow the key heads.
struct Segment {
  int64_t cache;                       // address
  int64_t layer_stride, head_stride;   // elements
  int64_t pages;                       // address of int32 page numbers; 0: positions are places
  int64_t length, rows;                // positions cached, new rows behind them
  int64_t first;                       // the first of these in the pass
};

// Keys start .. stop - 1 of a segment: what a block does for each key head. `slot`: where its states go; -1: the chunk is
// all that the rows see, and the outcome goes to `out`.
struct Chunk {
  int64_t segment, start, stop, slot;
};

// The slots first .. first + count - 1 of a segment's chunks.
struct Split {
  int64_t segment, first, count;
};

struct AttendArgs {
  const void* heads;       // [rows, query + key + value heads, head size]: queries scaled, both rotated
  void* out;               // [rows, query heads, head size]
  float* sums;             // [slots, key heads, queries, head size]: weighted sums of values
  Softmax* states;         // [slots, key heads, queries]
  const Segment* segments;
  const Chunk* chunks;     // one for each block in x
  const Split* splits;     // of the merge: one for each block in x
  int64_t row_stride;      // of heads, elements
  int32_t layer;
  int32_t key_heads, groups;  // groups: query heads of a key head
  int32_t queries;            // of a key head: the most that a segment has
  int32_t page_shift;         // positions of a page, a power of two
  Reach reach;
};

constexpr int kTile = 16;   // queries that a warp has, and keys that it takes at a time
constexpr int kStages = 4;  // of the ring

// Heads are cut into pieces of 16 bytes.
template <class T, int SIZE>
struct Shape {
  static constexpr int pieces = SIZE * sizeof(T) / 16;
  static constexpr int per_piece = 16 / sizeof(T);
  static constexpr int parts = pieces > 32 ? 1 : 2;  // warps that share a query tile; each takes its own keys
  static constexpr int most_tiles = pieces > 32 ? 2 : 4;
  static constexpr int keys = kTile * parts;  // of a tile of the ring
  static constexpr int threads = kLanes * parts * most_tiles;
  static constexpr int stage = keys * pieces;  // pieces of a stage

  // Where piece `piece + more` of a row lies, `more` being 0 or 1 and `piece` even. Eight rows of one column of pieces lie
  // in different banks.
  __device__ static int at(int row, int piece, int more) {
    constexpr int turn = pieces < 8 ? pieces - 1 : 7;
    return row * pieces + (piece & ~turn) + (((piece & turn) | more) ^ (row & turn));
  }
};

using Piece = Pack<uint32_t, 4>;

// Products with 16 keys: scores, [16 queries, 8 keys] twice.
using Scores = float[2][4];

// What differs between numbers of 16 and of 32 bits.
template <class T>
struct Products;

template <class T>
struct HalfProducts {
  template <class Shape>
  __device__ static void add_values(float (*out)[4], const Scores& weights, const Piece* values) {
    const int lane = lane_id();
    const uint32_t a[4] = {pair(weights[0][0], weights[0][1]), pair(weights[0][2], weights[0][3]),
                           pair(weights[1][0], weights[1][1]), pair(weights[1][2], weights[1][3])};
#pragma unroll
    for (int piece = 0; piece < Shape::pieces; piece += 2) {
      uint32_t b[4];
      load_transposed(b, values + Shape::at(lane % 16, piece, lane / 16));
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

// A float32 is two numbers of 11 bits and a rest below 2^-22: three products make a product of it.
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

  // Keys 2 t and 2 t + 1 stand for t and t + 4 on both sides, so that weights are where the product wants them.
  template <class Shape>
  __device__ static void add_values(float (*out)[4], const Scores& weights, const Piece* values) {
    const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* w = weights[half];
      const uint32_t a[4] = {__float_as_uint(w[0]), __float_as_uint(w[2]), __float_as_uint(w[1]),
                             __float_as_uint(w[3])};
      const int key = 8 * half + 2 * t;
#pragma unroll
      for (int column = 0; column < Shape::pieces / 2; ++column) {
        const int one = Shape::at(key, 2 * column, g / 4), other = Shape::at(key + 1, 2 * column, g / 4);
        add(out[column], a, values[one].at[g % 4], values[other].at[g % 4]);
      }
    }
  }

  __device__ static uint32_t leading(uint32_t x) { return (x + 0x1000u) & 0xffffe000u; }
  __device__ static uint32_t rest(uint32_t x) {
    return __float_as_uint(__uint_as_float(x) - __uint_as_float(leading(x)));
  }
};

// Keys and values of one head of a segment: cached ones, then those of the pass. `which`: 0 for keys, 1 for values.
template <class T, int SIZE>
struct Source {
  const AttendArgs& args;
  const Segment& segment;
  T* cache;
  const T* fresh;
  const int32_t* pages;
  int32_t length;

  __device__ Source(const AttendArgs& args, const Segment& segment, int head) : args(args), segment(segment) {
    cache = reinterpret_cast<T*>(segment.cache) + args.layer * segment.layer_stride + head * segment.head_stride;
    fresh = static_cast<const T*>(args.heads) + segment.first * args.row_stride +
            (args.key_heads * args.groups + head) * SIZE;
    pages = reinterpret_cast<const int32_t*>(segment.pages);
    length = static_cast<int32_t>(segment.length);
  }

  __device__ T* cached(int position, int which) const {
    int64_t place = position;
    if (pages != nullptr) {
      const int page = position >> args.page_shift;
      place = (static_cast<int64_t>(pages[page]) << args.page_shift) + (position - (page << args.page_shift));
    }
    return cache + which * args.key_heads * segment.head_stride + place * SIZE;
  }

  __device__ const T* given(int position, int which) const {
    return fresh + which * args.key_heads * SIZE + (position - length) * args.row_stride;
  }

  __device__ const T* at(int position, int which) const {
    return position < length ? cached(position, which) : given(position, which);
  }
};

template <class T, int SIZE>
struct Attend {
  using S = Shape<T, SIZE>;

  const AttendArgs& args;
  const Segment& segment;
  const Chunk& chunk;
  int rows, length, queries, head, first_query, query_tiles, query_tile, part;
  Piece* memory;  // shared: queries, then the ring

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
    // The oldest step is there, and the stage of the one before it is free.
    auto next = [&](int step) {
      await_copies<kStages - 2>();
      __syncthreads();
      fetch(step + kStages - 1);
      return ring + step % kStages * S::stage + part * kTile * S::pieces;
    };

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
    float sums[SIZE / 8][4] = {};
    for (int step = 0; step < steps; step += 2) {
      Scores scores = {};
      const Piece* tile = next(step);
      if (busy) score(scores, tile);
      tile = next(step + 1);
      if (busy) {
        const int first = start + step / 2 * S::keys + part * kTile;
        if (first < common.start || first + kTile > common.stop) hide(scores, seen, first);
        weigh(scores, states, sums);
        Products<T>::template add_values<S>(sums, scores, tile);
      }
    }
    for (Softmax& state : states) state.sum = warp_sum<4>(state.sum);
    await_copies<0>();
    unite_parts(states, sums);
    if (busy && part == 0) chunk.slot < 0 ? finish(states, sums) : leave(states, sums);
  }

  // The new keys and values of the chunk go behind the cached ones, where nobody reads in this launch.
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

  // Takes what a row does not see out of the scores of 16 keys from position `first` on.
  __device__ static void hide(Scores& scores, const Span (&seen)[2], int first) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = first + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
      if (!seen[i / 2 % 2].has(key)) scores[i / 4][i % 4] = -INFINITY;
    }
  }

  // Turns scores into weights and brings what was summed before to their scale.
  __device__ static void weigh(Scores& scores, Softmax (&states)[2], float (&sums)[SIZE / 8][4]) {
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float largest = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) largest = fmaxf(largest, scores[k / 2][2 * i + k % 2]);
      factors[i] = states[i].raise(warp_max<4>(largest));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& score = scores[k / 2][2 * i + k % 2];
        score = states[i].weight(score);
        sum += score;
      }
      states[i].sum += sum;
    }
    if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < SIZE / 8 * 4; ++n) sums[n / 4][n % 4] *= factors[n % 4 / 2];
    }
  }

  // The warps that share a query tile put together what they have; the first of them has it then.
  __device__ void unite_parts(Softmax (&states)[2], float (&sums)[SIZE / 8][4]) const {
    if constexpr (S::parts == 1) return;
    constexpr int kept = SIZE / 2 + 4;  // of a lane
    constexpr int room = kTile * S::pieces * (S::most_tiles + kStages * S::parts) * sizeof(Piece);
    static_assert(S::most_tiles * kept * kLanes * sizeof(float) <= room);
    float* const shared = reinterpret_cast<float*>(memory) + query_tile * kept * kLanes + lane_id();
    __syncthreads();
    if (part == 1) {
      for (int i = 0; i < 2; ++i) {
        shared[2 * i * kLanes] = states[i].max;
        shared[(2 * i + 1) * kLanes] = states[i].sum;
      }
#pragma unroll
      for (int n = 0; n < SIZE / 2; ++n) shared[(n + 4) * kLanes] = sums[n / 4][n % 4];
    }
    __syncthreads();
    if (part == 0) {
      float mine[2], other[2];
      for (int i = 0; i < 2; ++i) {
        const Softmax theirs = {shared[2 * i * kLanes], shared[(2 * i + 1) * kLanes]};
        const Softmax both = merged(states[i], theirs);
        mine[i] = both.weight(states[i].max), other[i] = both.weight(theirs.max);
        states[i] = both;
      }
#pragma unroll
      for (int n = 0; n < SIZE / 2; ++n) {
        float& sum = sums[n / 4][n % 4];
        sum = sum * mine[n % 4 / 2] + shared[(n + 4) * kLanes] * other[n % 4 / 2];
      }
    }
  }

  __device__ void finish(const Softmax (&states)[2], const float (&sums)[SIZE / 8][4]) const {
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + lane_id() / 4 + 8 * i;
      if (query >= queries) continue;
      const float factor = 1.0f / states[i].sum;
      const int64_t row = segment.first + row_of(query);
      T* const out = static_cast<T*>(args.out) + (row * args.key_heads * args.groups + head_of(query)) * SIZE;
#pragma unroll
      for (int n = 0; n < SIZE / 8; ++n) {
        const Pack<T, 2> pair = {narrow<T>(sums[n][2 * i] * factor), narrow<T>(sums[n][2 * i + 1] * factor)};
        store_pack(out + 8 * n + lane_id() % 4 * 2, pair);
      }
    }
  }

  __device__ void leave(const Softmax (&states)[2], const float (&sums)[SIZE / 8][4]) const {
    for (int i = 0; i < 2; ++i) {
      const int query = first_query + lane_id() / 4 + 8 * i;
      if (query >= queries) continue;
      const int64_t place = (chunk.slot * args.key_heads + head) * args.queries + query;
      if (lane_id() % 4 == 0) args.states[place] = states[i];
#pragma unroll
      for (int n = 0; n < SIZE / 8; ++n) {
        const Pack<float, 2> pair = {sums[n][2 * i], sums[n][2 * i + 1]};
        store_pack(args.sums + place * SIZE + 8 * n + lane_id() % 4 * 2, pair);
      }
    }
  }
};

// Blocks: chunks, key heads, groups of query tiles. Threads: 32 `parts` for each query tile. Shared memory: 16 rows for
// each query tile, and the ring.
template <class T, int SIZE>
__device__ inline void attend(const AttendArgs& args) {
  DYNAMIC_SHARED(Piece, memory);
  Attend<T, SIZE>(args, memory).run();
}

// Blocks: splits, rows (the most of a segment), query heads by four: a warp for each.
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

#define ATTENTION(type, size)                                                                   \
  KERNEL(attend_##type##_d##size, AttendArgs, (Shape<attention_##type, size>::threads)) {       \
    attend<attention_##type, size>(args);                                                       \
  }                                                                                             \
  KERNEL(merge_##type##_d##size, AttendArgs, 128) { merge_chunks<attention_##type, size>(args); }

using attention_f32 = float;
using attention_f16 = f16;
using attention_bf16 = bf16;
