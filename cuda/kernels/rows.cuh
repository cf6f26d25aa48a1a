// What the sampling kernels read and write: rows of logits, what requests ask of them, and the laws made of them.
// rust/src/cuda/sampling/layout.rs has the same structs.
#pragma once
#include "philox.cuh"

namespace sampling {

// Logits that one block of threads processes; sums are kept for each. BLOCK of rust/src/law/cdf.rs.
constexpr int TILE = 1024;

enum DType : int { F32 = 0, F16 = 1, BF16 = 2 };
enum Kind : int { GREEDY = 0, DRAWN = 1 };
enum Rule : int { REJECTION = 0, COUPLED = 1 };

// Why nothing can be drawn from a row; bits.
enum Bad : u32 { NOT_A_NUMBER = 1, PLUS_INFINITY = 2, NO_CANDIDATE = 4, NO_EMBEDDING = 8, OF_DRAFT = 256 };

// Decisions whose margin, as a probability (a score under `coupled`), is below this may differ from the core's:
// sums are added up in another order, and logarithms come from another library.
constexpr double CLOSE = 0x1p-40;

struct Row {
  u64 logits;   // address of the first
  int dtype;
  int columns;
  int request;
  int before;   // drafted tokens of the block that come before this row's token
  int changed;  // index of its f32 copy, biased and penalised; -1: the logits are as they are
  int edited;   // whether the request's edits may change it
};

// A token whose logit bias, penalties or the mask of stop tokens may change; ascending by token.
struct Edit {
  u32 token;
  u32 in_output;
  u32 flags;
  float bias;
};
enum EditFlag : u32 { SEEN = 1, STOP = 2, BIASED = 4 };

struct Request {
  double top_p, min_p;
  u64 seed;
  float inverse_temperature, repetition, presence, frequency;
  u32 top_k, sample, position, anchor;
  int kind;
  int generated, min_tokens;
  int penalises;
  int drafted;
  int first_row;  // of a chain: the request's place in the pass
  int first_id, first_draft;
  int first_edit, edits;
};

// What can be drawn from a row: logit x has the weight exp((x - max) / temperature). The logits that stay are those
// above the cut's key, and those at it up to the cut's index; of these, the ones whose weight reaches the floor.
struct Law {
  double total;
  double floor;
  float max;
  u32 cut_key;
  int cut_index;
  int first;  // column of the first largest logit
  u32 bad;
  u32 close;
};

// The race of a tile's tokens: the best score, its token, and the second best.
struct Race {
  double best, second;
  u32 token, unused;
};

struct Verdict {
  int accepted;
  int token;
  u32 bad;
  u32 close;
};

struct Matrix {
  u64 data;
  int dtype, rows, columns, stride;
};

// The heads of a draft. `tokens[column]` and `column[token]` (-1: none) of a reduced vocabulary, else null.
struct Heads {
  Matrix w1, w2;
  Matrix latent, latent_bias;  // gate or joint projection
  Matrix confidence;
  Matrix hidden;               // states of this pass
  const u32* tokens;
  const int* column;
  int kind;                    // of MarkovKind
  int lead;                    // rows of hidden states before that of the first slot
  int with_markov;
  int vocabulary;              // entries of `column`
};
enum MarkovKind : int { NO_MARKOV = 0, VANILLA = 1, GATED = 2, RNN = 3 };

// The parameters of every sampling kernel. Arrays by row have `tiles` entries a row.
struct SampleArgs {
  const Row* rows;
  const Request* requests;
  const Edit* edits;
  u32* ids;           // drafted tokens
  float* changed;     // [_, columns]: rows after bias and penalties
  Law* laws;
  u64* tops;          // [rows, tiles]: key and column of the largest logit
  u32* bads;          // [rows, tiles]
  double* sums;       // [rows, tiles]: weights
  Race* races;        // [rows, tiles]
  double* residuals;  // [requests, tiles]
  Verdict* verdicts;  // [requests]
  // The laws that drafted tokens were drawn from.
  const Row* draft_rows;
  const float* draft_changed;
  const Law* draft_laws;
  // The chain.
  float* latents;     // [requests, rank]: what W2 projects
  float* states;      // [2, requests, rank] of an RNN head: read one, write the other
  float* dots;        // [rows]: products of the confidence head
  u32* draft_bads;    // [rows]
  Heads heads;
  int tiles, columns;
  int requests_count;
  int rule;
  int stride, offset;  // row of blockIdx.y = n is n * stride + offset
  int draft_first;     // the draft's first row among the target's, if its laws are made here; else -1
  int unused;
};

// As in layout.rs, which asserts the same sizes.
static_assert(sizeof(Row) == 32 && sizeof(Edit) == 16 && sizeof(Request) == 96 && sizeof(Verdict) == 16);
static_assert(sizeof(Law) == 40 && sizeof(Race) == 24 && sizeof(Matrix) == 24 && sizeof(Heads) == 176);
static_assert(sizeof(SampleArgs) == 360);

// A row as it is read: after bias and penalties, where there are any.
struct View {
  const void* data;
  int dtype, columns;
};

__device__ inline View view(const Row& row, const float* changed) {
  if (row.changed >= 0) return {changed + (long long)row.changed * row.columns, F32, row.columns};
  return {(const void*)row.logits, row.dtype, row.columns};
}

__device__ inline float widen(const void* data, int dtype, long long i) {
  if (dtype == F32) return static_cast<const float*>(data)[i];
  const uint16_t stored = static_cast<const uint16_t*>(data)[i];
  return dtype == F16 ? ::widen(f16{stored}) : ::widen(bf16{stored});
}

// A number that grows with the logit; the two zeros are equal. Not for NaN.
__device__ inline u32 order(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ inline float of_order(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// The key of the lowest finite number: nothing but minus infinity is below it.
constexpr u32 LOWEST_KEY = 0x00800000u;
}  // namespace sampling
