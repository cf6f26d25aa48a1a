// Copies of 16 bytes from global to shared memory, in groups, that run while a thread computes.
#pragma once

#ifdef __CUDA_ARCH__

// If not `wanted`, writes zeros and does not read `from`.
__device__ inline void copy_async(void* to, const void* from, bool wanted) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(wanted ? 16 : 0)
                 : "memory");
}

// Closes the group of this thread's copies since the last call.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the last PENDING groups of this thread are still under way.
template <int PENDING>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else

// On the host, a copy happens as late as it may: when it is waited for. A missing wait thus reads the old contents.
struct LateCopies {
  static constexpr int MOST = 64, GROUPS = 8;
  struct {
    void* to;
    const void* from;
  } copies[GROUPS][MOST];
  int counts[GROUPS], first, groups;
};
inline LateCopies late_copies[1024];

inline void copy_async(void* to, const void* from, bool wanted) {
  LateCopies& mine = late_copies[threadIdx.x];
  const int group = (mine.first + mine.groups) % LateCopies::GROUPS;
  mine.copies[group][mine.counts[group]++] = {to, wanted ? from : nullptr};
}

inline void end_copies() { ++late_copies[threadIdx.x].groups; }

template <int PENDING>
inline void await_copies() {
  LateCopies& mine = late_copies[threadIdx.x];
  for (; mine.groups > PENDING; --mine.groups, mine.first = (mine.first + 1) % LateCopies::GROUPS) {
    for (int i = 0; i < mine.counts[mine.first]; ++i) {
      const auto& copy = mine.copies[mine.first][i];
      for (int byte = 0; byte < 16; ++byte)
        static_cast<uint8_t*>(copy.to)[byte] = copy.from ? static_cast<const uint8_t*>(copy.from)[byte] : 0;
    }
    mine.counts[mine.first] = 0;
  }
}

#endif
