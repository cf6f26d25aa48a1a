// Small kernels with known outcomes, some of them wrong on purpose, for the tests of the emulation itself.
#include "device.cuh"

struct ZooArgs {
  const void* in;
  void* out;
  int64_t mode;
};

// out[i] = number of the thread at the other end of the block.
KERNEL(reverse_block, ZooArgs, 128) {
  SHARED(seen, int32_t[128]);
  const int thread = static_cast<int>(threadIdx.x);
  seen[thread] = thread;
#ifndef DROP_BARRIER
  __syncthreads();
#endif
  static_cast<int32_t*>(args.out)[thread] = seen[static_cast<int>(blockDim.x) - 1 - thread];
}

// mode 0: two barriers of which each half of the block meets another; 1: a thread leaves early; 2: lanes of a warp part
// before a shuffle; 3: a shuffle that names half of the lanes; 4: half of the block waits at a barrier, the other half at
// a shuffle of which a lane never comes.
KERNEL(wrong_meeting, ZooArgs, 128) {
  const int thread = static_cast<int>(threadIdx.x);
  int value = thread;
  if (args.mode == 0) {
    if (thread < 64) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  }
  if (args.mode == 1 && thread == 5) return;
  if (args.mode == 2) {
    if (thread % 2 == 0) {
      value = __shfl_xor_sync(kAllLanes, value, 1);
    } else {
      __syncwarp();
    }
  }
  if (args.mode == 3) value = __shfl_xor_sync(0xffffu, value, 1);
  if (args.mode == 4 && thread >= 64 && thread != 70) value = __shfl_xor_sync(kAllLanes, value, 1);
  __syncthreads();
  static_cast<int32_t*>(args.out)[thread] = value;
}

// What nobody wrote: out = {static, dynamic} as float, of two blocks, which both write 1 before they leave.
KERNEL(unwritten, ZooArgs, 32) {
  SHARED(fixed, float[32]);
  DYNAMIC_SHARED(float, dynamic);
  float* const out = static_cast<float*>(args.out) + 64 * blockIdx.x;
  out[threadIdx.x] = fixed[threadIdx.x];
  out[32 + threadIdx.x] = dynamic[threadIdx.x];
  fixed[threadIdx.x] = dynamic[threadIdx.x] = 1.0f;
}

// mode 0: in bounds; 1: one element behind the output; 2: one behind static, 3: one behind dynamic shared memory;
// 4: four elements at once, at an address that is not aligned to them; 5: a sum of integers that overflows.
KERNEL(bounds, ZooArgs, 32) {
  SHARED(fixed, int32_t[32]);
  DYNAMIC_SHARED(int32_t, dynamic);
  int32_t* const out = static_cast<int32_t*>(args.out);
  const int thread = static_cast<int>(threadIdx.x), next = thread + 1;
  fixed[thread] = dynamic[thread] = thread;
  __syncthreads();
  int32_t* const reached = args.mode == 1 ? out : args.mode == 2 ? &fixed[0] : dynamic;
  if (args.mode >= 1 && args.mode <= 3) reached[next] = 7;
  if (args.mode == 4 && thread == 1) fixed[0] = load_pack<4>(&fixed[thread]).at[0];
  if (args.mode == 5) fixed[thread] = 0x7fffffff + thread;
  __syncthreads();
  out[thread] = fixed[thread] + (args.mode == 5 ? 0 : dynamic[thread]);
}

// Rows of 32 results, one for each operation.
KERNEL(lanes, ZooArgs, 64) {
  const int lane = lane_id();
  const int64_t value = 100 * warp_id() + lane;
  int64_t* out = static_cast<int64_t*>(args.out) + threadIdx.x;
  const int64_t results[] = {
      __shfl_sync(kAllLanes, value, 3),
      __shfl_sync(kAllLanes, value, 3, 8),
      __shfl_xor_sync(kAllLanes, value, 5),
      __shfl_xor_sync(kAllLanes, value, 16, 8),
      __shfl_down_sync(kAllLanes, value, 4),
      __shfl_down_sync(kAllLanes, value, 4, 8),
      __shfl_up_sync(kAllLanes, value, 4),
      __shfl_up_sync(kAllLanes, value, 4, 8),
      static_cast<int64_t>(__ballot_sync(kAllLanes, lane % 3 == 0)),
      __any_sync(kAllLanes, value == 103),
      __all_sync(kAllLanes, value < 100),
      warp_sum(value),
      warp_sum<8>(value),
      warp_max(value),
      warp_max<4>(-value),
  };
  for (int64_t result : results) {
    *out = result;
    out += blockDim.x;
  }
}

// out = {sum, largest, smallest, bits, float sum} of 128 threads in each of three blocks.
KERNEL(atomics, ZooArgs, 128) {
  int32_t* const out = static_cast<int32_t*>(args.out);
  const int32_t number = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  SHARED(sum, int32_t);
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, number);
  atomicMax(&out[1], number);
  atomicMin(&out[2], number);
  atomicOr(&out[3], 1 << (number % 31));
  atomicAdd(reinterpret_cast<float*>(out) + 4, 0.5f);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&out[0], sum);
}

// in: float32; out: bf16, f16 of it, then both widened again, each as many numbers as there are threads.
KERNEL(conversions, ZooArgs, 256) {
  const int64_t count = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const float x = static_cast<const float*>(args.in)[i];
  uint16_t* const halves = static_cast<uint16_t*>(args.out);
  float* const wide = reinterpret_cast<float*>(halves + 2 * count);
  const bf16 b = narrow<bf16>(x);
  const f16 h = narrow<f16>(x);
  halves[i] = b.bits;
  halves[count + i] = h.bits;
  wide[i] = widen(b);
  wide[count + i] = widen(h);
}
