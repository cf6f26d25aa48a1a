// CUDA's keywords and built-in functions, as far as the kernels here use them.
#pragma once

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

#define threadIdx (::emulate::current->index)
#define blockIdx (::emulate::block.index)
#define blockDim (::emulate::block.size)
#define gridDim (::emulate::block.grid)

#define KERNEL(name, Args, ...)                                                        \
  extern "C" void name(const Args args);                                               \
  static const ::emulate::Registered name##_registered(                                \
      #name, {sizeof(Args), ::emulate::first(__VA_ARGS__), [](const void* bytes) {     \
                Args args;                                                             \
                std::memcpy(&args, bytes, sizeof args);                                \
                name(args);                                                            \
              }});                                                                     \
  extern "C" void name(const Args args)

#define SHARED(name, ...) static auto& name = ::emulate::shared_variable<__VA_ARGS__>()

#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(::emulate::block.shared)

// The caller's place in the source, as default arguments.
#define EMULATE_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- Meetings --------------------------------------------------------------------------------------------------------

inline void __syncthreads(EMULATE_HERE) { emulate::meet(emulate::block.threads, EMULATE_SITE("__syncthreads")); }

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__syncwarp"));
  emulate::meet(emulate::warp(), EMULATE_SITE("__syncwarp"));
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__ballot_sync"));
  return emulate::ballot(predicate, EMULATE_SITE("__ballot_sync"));
}

inline int __any_sync(unsigned mask, int predicate, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__any_sync"));
  return emulate::ballot(predicate, EMULATE_SITE("__any_sync")) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__all_sync"));
  return emulate::ballot(predicate, EMULATE_SITE("__all_sync")) == 0xffffffffu;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__shfl_sync"));
  const unsigned lane = threadIdx.x % 32, start = lane & ~(width - 1u);
  return emulate::exchange(value, start + (source & (width - 1u)), EMULATE_SITE("__shfl_sync"));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__shfl_xor_sync"));
  const unsigned lane = threadIdx.x % 32, end = (lane & ~(width - 1u)) + width, source = lane ^ with;
  return emulate::exchange(value, source < end ? source : lane, EMULATE_SITE("__shfl_xor_sync"));
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__shfl_down_sync"));
  const unsigned lane = threadIdx.x % 32, end = (lane & ~(width - 1u)) + width;
  return emulate::exchange(value, lane + delta < end ? lane + delta : lane, EMULATE_SITE("__shfl_down_sync"));
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATE_HERE) {
  emulate::check_mask(mask, EMULATE_SITE("__shfl_up_sync"));
  const unsigned lane = threadIdx.x % 32, place = lane & (width - 1u);
  return emulate::exchange(value, place >= delta ? lane - delta : lane, EMULATE_SITE("__shfl_up_sync"));
}

// ---- Memory ----------------------------------------------------------------------------------------------------------

namespace emulate {
// Replaces *at by change(*at) atomically, without ordering anything else; returns the old value.
template <class T, class Change>
T change(T* at, Change change) {
  std::atomic_ref<T> cell(*at);
  T old = cell.load(std::memory_order_relaxed);
  while (!cell.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
  }
  return old;
}
}  // namespace emulate

template <class T>
T atomicAdd(T* at, std::type_identity_t<T> value) {
  return emulate::change(at, [=](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> value) {
  return emulate::change(at, [=](T old) { return old < value ? value : old; });
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> value) {
  return emulate::change(at, [=](T old) { return value < old ? value : old; });
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> value) {
  return emulate::change(at, [=](T old) { return old | value; });
}

// ---- Numbers -----------------------------------------------------------------------------------------------------------

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmin(a, b);
  return static_cast<std::common_type_t<A, B>>(b) < static_cast<std::common_type_t<A, B>>(a) ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return std::fmax(a, b);
  return static_cast<std::common_type_t<A, B>>(a) < static_cast<std::common_type_t<A, B>>(b) ? b : a;
}

// Each rounded on its own, whatever a compiler may fuse (the host's is told not to).
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
