// Counter-based noise, the same numbers as rust/src/noise to the last bit of every uniform (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011). A number is a function of the seed and of what it is for.
#pragma once
#include "planted.cuh"

namespace sampling {

using u32 = unsigned int;
using u64 = unsigned long long;

// What a number is used for: streams of different purposes never overlap.
enum Purpose : u32 { DRAFT = 0, ACCEPT = 1, RESAMPLE = 2, GUMBEL = 3 };

__device__ inline u64 wide(u32 high, u32 low) { return ((u64)high << 32) | low; }

// A block of random bits: two numbers of 64 bits.
struct Bits {
  u64 even, odd;

  __device__ u64 of(u32 token) const { return token & 1 ? odd : even; }
};

// Philox4x32-10: the random bits that belong to a counter under a key.
__device__ inline Bits philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 seed) {
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    const u32 n0 = (u32)(b >> 32) ^ c1 ^ k0, n2 = (u32)(a >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = (u32)b, c2 = n2, c3 = (u32)a;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {wide(c0, c1), wide(c2, c3)};
}

// The noise of one round of one request, counted by the absolute position of its anchor.
struct Noise {
  u64 seed;
  u32 sample, anchor;

  // Absolute position of the token of a slot.
  __device__ u32 position(u32 slot) const { return anchor + 1u + slot; }

  // A number in [0, 1) with 53 bits.
  __device__ double uniform(u32 slot, Purpose purpose) const {
    const bool by_position = PLANTED(POSITION_KEYS);
    const Bits bits = philox(by_position ? position(slot) : anchor, by_position ? 0 : slot, purpose, sample, seed);
    return (double)(bits.even >> 11) * 0x1p-53;
  }

  // The bits behind the Gumbel noise of tokens 2 pair and 2 pair + 1.
  __device__ Bits gumbel_bits(u32 slot, u32 pair) const { return philox(position(slot), pair, GUMBEL, sample, seed); }

  __device__ double resample(u32 slot) const {
    return uniform(slot, PLANTED(SHARED_STREAM) ? DRAFT : PLANTED(REUSED_UNIFORM) ? ACCEPT : RESAMPLE);
  }
};

// Standard Gumbel noise of 64 random bits, of which the 52 leading ones count: -ln(-ln u), u = (k + 1/2) 2^-52.
__device__ inline double standard_gumbel(u64 bits) {
  const double u = ((double)(bits >> 12) + 0.5) * 0x1p-52;
  return -log(-log(u));
}

}  // namespace sampling
