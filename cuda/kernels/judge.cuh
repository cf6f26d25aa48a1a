// The verdict on a drafted block: rust/src/accept/rejection.rs and coupled.rs, with one block of threads per request.
#pragma once
#include "law.cuh"

namespace sampling {

__device__ inline double probability(const View& logits, const Law& law, const Request& request, int index) {
  if (index < 0 || index >= logits.columns) return 0.0;
  const float w = weight(widen(logits.data, logits.dtype, index), index, law, request.inverse_temperature);
  return mul((double)w, 1.0 / law.total);
}

// The probability with which the draft of slot `k` offered `token`.
__device__ inline double offered(const SampleArgs& args, const Request& request, int k, u32 token) {
  const int r = request.first_draft + k;
  const int index = args.heads.column ? (token < (u32)args.heads.vocabulary ? args.heads.column[token] : -1) : (int)token;
  const double q = probability(view(args.draft_rows[r], args.draft_changed), args.draft_laws[r], request, index);
  if (!PLANTED(ROUNDED_DRAFT_LAW)) return q;
  return (double)__uint_as_float((__float_as_uint((float)q) + 0x8000u) & 0xffff0000u);
}

// Grid (requests): how many drafted tokens stay, and the token after them, or -1 if it is still to be drawn.
__device__ inline void decide(const SampleArgs& args) {
  SHARED(stage, double[8][256]);
  SHARED(token_of, int[64]);
  SHARED(close_of, u32[64]);
  const Request& request = args.requests[blockIdx.x];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = request.drafted + 1;
  const bool tests = args.rule == REJECTION && request.kind == DRAWN && !PLANTED(TARGET_ARGMAX);
  // Laws made of draft logits lack their totals, like the target's.
  const int made = !tests ? 0 : args.draft_first < 0 ? rows : rows + request.drafted;
  for (int i = warp; i < made; i += blockDim.x / 32) {
    const int r = i < rows ? request.first_row + i : args.draft_first + request.first_draft + i - rows;
    const double total = ordered_sum(args.sums + (long long)r * args.tiles, args.tiles, stage[warp]);
    if (lane == 0) args.laws[r].total = total;
  }
  __syncthreads();
  // The outcome of each row: its token, or whether the drafted one stays (0 or 1).
  for (int k = warp; k < rows; k += blockDim.x / 32) {
    const int r = request.first_row + k;
    const Law& law = args.laws[r];
    if (law.bad != 0) continue;
    int token = law.first;
    u32 close = 0;
    if (tests) {
      token = 0;
      if (k < request.drafted) {
        const u32 x = args.ids[request.first_id + k];
        const double p = probability(view(args.rows[r], args.changed), law, request, (int)x);
        const double q = offered(args, request, k, x);
        const Noise noise = {request.seed, request.sample, request.position};
        const double ratio = p > 0.0 ? p / q : 0.0, u = noise.uniform(k, ACCEPT), margin = u - ratio;
        token = u < ratio;
        close = margin < CLOSE && -margin < CLOSE;
      }
    } else if (request.kind == DRAWN && !PLANTED(TARGET_ARGMAX)) {
      const Race race = end_of_race(args, r);
      token = (int)race.token;
      close = race.best - race.second < CLOSE;
    }
    if (lane == 0) token_of[k] = token, close_of[k] = close | law.close;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    Verdict verdict = {0, -1, 0, 0};
    for (;; ++verdict.accepted) {
      const int k = verdict.accepted;
      verdict.bad = args.laws[request.first_row + k].bad;
      if (verdict.bad) break;
      if (args.rule == REJECTION && k < request.drafted && args.draft_rows) {
        const Law& draft = args.draft_laws[request.first_draft + k];
        verdict.bad = draft.bad ? draft.bad | OF_DRAFT : 0;
        if (verdict.bad) break;
        verdict.close |= draft.close;
      }
      verdict.close |= close_of[k];
      if (!tests) verdict.token = token_of[k];
      if (k == request.drafted) break;
      if (tests ? token_of[k] == 0 : (u32)token_of[k] != args.ids[request.first_id + k]) break;
    }
    args.verdicts[blockIdx.x] = verdict;
  }
}

// Whether a request's token is drawn from the residual: what the target wants and the draft did not offer.
__device__ inline bool is_residual(const Verdict& verdict, const Request& request) {
  if (verdict.token >= 0 || verdict.bad) return false;
  return verdict.accepted < request.drafted || (PLANTED(EMPTY_CUT_REJECTS) && request.drafted == 0);
}

// max(p - q, 0) of the columns of a tile.
__device__ inline void fill_residual(const SampleArgs& args, const Request& request, int k, int base, int count,
                                     double* out) {
  const int r = request.first_row + k, d = request.first_draft + k;
  const Law p = args.laws[r], q = args.draft_laws[d];
  const View target = view(args.rows[r], args.changed), draft = view(args.draft_rows[d], args.draft_changed);
  const double p_scale = 1.0 / p.total, q_scale = 1.0 / q.total;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int index = base + i;
    const float w = weight(widen(target.data, target.dtype, index), index, p, request.inverse_temperature);
    const int other = args.heads.column ? (index < args.heads.vocabulary ? args.heads.column[index] : -1) : index;
    double offer = 0.0;
    if (other >= 0 && other < draft.columns)
      offer = mul((double)weight(widen(draft.data, draft.dtype, other), other, q, request.inverse_temperature), q_scale);
    const double rest = sub(mul((double)w, p_scale), offer);
    out[i] = rest > 0.0 ? rest : 0.0;
  }
}

// Grid (tiles, requests): the residual's mass by tiles, where something was rejected.
__device__ inline void residual(const SampleArgs& args) {
  SHARED(rest, double[TILE]);
  SHARED(lanes, double[16]);
  const Request& request = args.requests[blockIdx.y];
  const Verdict verdict = args.verdicts[blockIdx.y];
  const int base = blockIdx.x * TILE, count = args.columns - base < TILE ? args.columns - base : TILE;
  if (is_residual(verdict, request)) fill_residual(args, request, verdict.accepted, base, count, rest);
  __syncthreads();
  const double sum = tile_sum(rest, is_residual(verdict, request) ? count : 0, lanes);
  if (threadIdx.x == 0) args.residuals[(long long)blockIdx.y * args.tiles + blockIdx.x] = sum;
}

// Grid (requests): the corrected or bonus token.
__device__ inline void finish(const SampleArgs& args) {
  SHARED(weights, double[TILE]);
  SHARED(stage, double[256]);
  SHARED(masses, double);
  SHARED(shared, Found);
  const Request& request = args.requests[blockIdx.x];
  const Verdict verdict = args.verdicts[blockIdx.x];
  if (verdict.token >= 0 || verdict.bad) return;
  const int k = verdict.accepted, r = request.first_row + k;
  const Law law = args.laws[r];
  const Noise noise = {request.seed, request.sample, request.position};
  const double u = noise.resample(k);
  const double* sums = args.residuals + (long long)blockIdx.x * args.tiles;
  double mass = 0.0;
  if (is_residual(verdict, request)) {
    if (threadIdx.x < 32) {
      const double sum = ordered_sum(sums, args.tiles, stage);
      if (threadIdx.x == 0) masses = sum;
    }
    __syncthreads();
    mass = masses;
  }
  // No mass means a bonus token, or a residual that is empty.
  const bool wants = mass > 0.0;
  const View logits = view(args.rows[r], args.changed);
  const auto fill = [&](int base, int count) {
    if (wants) fill_residual(args, request, k, base, count, weights);
    else fill_weights(logits, law, request.inverse_temperature, base, count, weights);
  };
  const double whole = wants ? mass : law.total;
  if (!wants) sums = args.sums + (long long)r * args.tiles;
  Found found = find_in_row(mul(u, whole), sums, args.tiles, args.columns, weights, &shared, fill);
  if (!wants) found.margin /= whole;
  if (threadIdx.x == 0)
    args.verdicts[blockIdx.x] = {verdict.accepted, found.index, 0, verdict.close | (u32)(found.margin < CLOSE)};
}

}  // namespace sampling
