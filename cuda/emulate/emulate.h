// CUDA's threads on the host: all that kernels name, so that a host compiler takes them and they run.
//
// A block's threads are fibers on one thread (fibers.cpp: fast), or threads (threads.cpp with EMULATE_THREADS: so that
// the thread sanitizer sees races). Blocks run one after another. What would hang or be undefined on a device throws an
// `Error` with a sentence.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace emulate {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Where threads meet: the line of the kernel's source, and the operation.
struct Site {
  const char* operation;
  const char* file;
  int line;
  bool operator==(const Site&) const = default;
  std::string text() const;
};
#define EMULATE_SITE(operation) \
  ::emulate::Site { operation, file, line }

// Threads that wait for each other: a block or a warp.
struct Group {
  unsigned size = 0, arrived = 0, generation = 0;
  Site site{};
#ifdef EMULATE_THREADS
  std::mutex mutex;
  std::condition_variable changed;
#endif
};

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr std::size_t kMostShared = 232448;  // of one block, bytes

// The block that runs.
struct Block {
  Index grid, index, size;
  unsigned char* shared = nullptr;
  Group threads, warps[kMostThreads / kWarp];
  std::uint64_t slots[kMostThreads / kWarp][2][kWarp];
};
inline Block block;

struct Thread {
  Index index;
  unsigned phase = 0;  // which half of the warp's slots its next exchange uses
};
#ifdef EMULATE_THREADS
inline thread_local Thread* current;
#else
inline Thread* current;
#endif

// Returns when every thread of the group has come to the same place; otherwise throws `Error`.
void meet(Group& group, Site site);

inline Group& warp() { return block.warps[current->index.x / kWarp]; }

void arrive(Group& group, Site site);  // counts the caller in; throws if others wait at another place

inline void check_mask(unsigned mask, Site site) {
  if (mask != 0xffffffffu) throw Error(site.text() + " names some lanes only: a full mask is expected");
}

// Each lane gives a value and reads that of lane `source`. Two halves of slots are used in turn: a lane returns to a
// half only after a meeting that all lanes reach after they have read that half.
template <class T>
T exchange(T value, unsigned source, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  const unsigned lane = current->index.x % kWarp;
  auto& slots = block.slots[current->index.x / kWarp][current->phase];
  current->phase ^= 1;
  std::memcpy(&slots[lane], &value, sizeof value);
  meet(warp(), site);
  std::memcpy(&value, &slots[source], sizeof value);
  return value;
}

template <class T>
unsigned ballot(T predicate, Site site) {
  const unsigned lane = current->index.x % kWarp;
  auto& slots = block.slots[current->index.x / kWarp][current->phase];
  current->phase ^= 1;
  slots[lane] = static_cast<bool>(predicate);
  meet(warp(), site);
  unsigned votes = 0;
  for (unsigned i = 0; i < kWarp; ++i) votes |= static_cast<unsigned>(slots[i]) << i;
  return votes;
}

// A static shared variable, poisoned before each block; on the heap, so that the address sanitizer sees its end.
void* shared_memory(std::size_t bytes);
template <class T>
T& shared_variable() {
  return *static_cast<T*>(shared_memory(sizeof(T)));
}

// An entry that KERNEL makes.
struct Entry {
  std::size_t args_bytes;
  unsigned most_threads;
  void (*run)(const void* args);
};
struct Registered {
  Registered(const char* name, Entry entry);
};
template <class... Rest>
constexpr unsigned first(unsigned value, Rest...) {
  return value;
}

const Entry* find(const char* name);
// Runs a grid; throws `Error`.
void launch(const char* entry, Index grid, unsigned threads, std::size_t shared_bytes, const void* args,
            std::size_t args_bytes);
// Runs one block of `threads` threads, each calling `run(args)`; given by fibers.cpp or threads.cpp.
void run_block(unsigned threads, void (*run)(const void*), const void* args);
// For the sentence about a block that cannot go on: which threads wait where.
std::string stuck(unsigned returned);

float from_half(std::uint16_t bits);
std::uint16_t to_half(float x);
std::uint16_t to_bfloat(float x);

}  // namespace emulate

#include "builtins.h"
