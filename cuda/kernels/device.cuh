// What every kernel builds on: integers, 16-bit floats, shared memory, warp helpers, and KERNEL, which makes an entry.
//
// The same files are compiled by NVRTC, which has no headers, and by a host compiler against cuda/emulate. To suit
// both, shared memory comes from SHARED or DYNAMIC_SHARED and entries from KERNEL; shuffles name all lanes; no thread
// returns before the last barrier; inline PTX is under __CUDA_ARCH__ beside a scalar version of the same signature.
#pragma once

#ifdef __CUDACC_RTC__

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#define INFINITY __int_as_float(0x7f800000)

template <class T>
struct Same {
  using type = T;
};

// KERNEL(name, Args, threads) { body } : an entry with one struct by value, `args`, and at most this many threads.
#define KERNEL(name, Args, ...) \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Args args)

// SHARED(name, type) : a variable of the block, `SHARED(part, float[4][64]);`. Uninitialised.
#define SHARED(name, ...) __shared__ typename Same<__VA_ARGS__>::type name

// DYNAMIC_SHARED(type, name) : the shared memory whose size the launch gives, as `type* name`. Aligned to 16 bytes.
#define DYNAMIC_SHARED(type, name)                             \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared)

#else
#include "../emulate/emulate.h"
#endif

// ---- 16-bit floats, as they lie in memory; arithmetic is float32 ----------------------------------------------------

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

__device__ inline float widen(f16 x) {
#ifdef __CUDA_ARCH__
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
#else
  return emulate::from_half(x.bits);
#endif
}

// Rounds to nearest, ties to even: narrow<bf16>(x).
template <class T>
__device__ T narrow(float x);

template <>
__device__ inline float narrow<float>(float x) {
  return x;
}

template <>
__device__ inline bf16 narrow<bf16>(float x) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  return {emulate::to_bfloat(x)};
#endif
}

template <>
__device__ inline f16 narrow<f16>(float x) {
#ifdef __CUDA_ARCH__
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return {bits};
#else
  return {emulate::to_half(x)};
#endif
}

// ---- Several elements at once: one load or store of up to 16 bytes, aligned to its own size -------------------------

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <int N, class T>
__device__ inline Pack<T, N> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <int N, class T>
__device__ inline void store_pack(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// ---- Warps ---------------------------------------------------------------------------------------------------------

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kLanes; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kLanes; }

// Sum over each group of `Width` neighbouring lanes (a power of two), the same bits in every lane of it.
template <int Width = kLanes, class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

template <int Width = kLanes, class T>
__device__ inline T warp_max(T x) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}
