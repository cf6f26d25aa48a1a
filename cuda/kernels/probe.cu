// Checks that kernels run at all: the launcher calls it once when a device is chosen and reads what it wrote.
#include "device.cuh"

struct ProbeArgs {
  int64_t* out;  // [blocks * threads]
  int64_t start;
};

// out[i] = start + i, by way of shared memory and a shuffle.
KERNEL(probe, ProbeArgs, 64) {
  SHARED(seen, int64_t[64]);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  seen[thread] = args.start + first + thread;
  __syncthreads();
  const int64_t other = seen[blockDim.x - 1 - thread];  // from the other end of the block
  args.out[first + blockDim.x - 1 - thread] = __shfl_xor_sync(kAllLanes, other, 0);
}
