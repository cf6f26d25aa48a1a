// A block's threads as threads of the host, for the thread sanitizer. Each group has its own lock, so that only threads
// that meet are ordered; everything that all of them touch is relaxed, since a race would hide behind any order.
#ifndef EMULATE_THREADS
#error "every file is compiled with EMULATE_THREADS, or none"
#endif
#include <exception>
#include <thread>
#include <vector>

#include "emulate.h"

namespace emulate {

namespace {

struct Abandoned {};  // leaves a kernel whose block has failed

struct Crew {
  std::atomic<unsigned> running{0};  // threads that neither wait nor have returned
  std::atomic<unsigned> returned{0};
  std::atomic<bool> failed{false};
  std::mutex guard;
  std::string sentence;
};
Crew crew;

void wake(Group& group) {
  std::lock_guard lock(group.mutex);
  group.changed.notify_all();
}

void fail(const std::string& sentence) {
  {
    std::lock_guard lock(crew.guard);
    if (crew.sentence.empty()) crew.sentence = sentence;
  }
  crew.failed.store(true, std::memory_order_relaxed);
  wake(block.threads);
  for (Group& warp : block.warps) wake(warp);
}

// The caller stops running, by waiting or by returning. If no thread can go on while some wait, the block fails.
void stop_running() {
  if (crew.running.fetch_sub(1, std::memory_order_relaxed) > 1) return;
  unsigned waiting = 0;
  auto count = [&](Group& group) {
    std::lock_guard lock(group.mutex);
    waiting += group.arrived;
  };
  count(block.threads);
  for (Group& warp : block.warps) count(warp);
  if (waiting > 0) fail(stuck(crew.returned.load(std::memory_order_relaxed)));
}

void body(Thread thread, void (*run)(const void*), const void* args) {
  current = &thread;
  try {
    run(args);
  } catch (const Abandoned&) {
  } catch (const Error& error) {
    fail(error.what());
  }
  crew.returned.fetch_add(1, std::memory_order_relaxed);
  stop_running();
}

}  // namespace

void meet(Group& group, Site site) {
  unsigned generation;
  {
    std::unique_lock lock(group.mutex);
    arrive(group, site);
    if (group.arrived == group.size) {
      group.arrived = 0;
      ++group.generation;
      crew.running.fetch_add(group.size - 1, std::memory_order_relaxed);
      group.changed.notify_all();
      return;
    }
    generation = group.generation;
  }
  stop_running();
  std::unique_lock lock(group.mutex);
  group.changed.wait(lock, [&] {
    return group.generation != generation || crew.failed.load(std::memory_order_relaxed);
  });
  if (group.generation == generation) throw Abandoned();
}

void run_block(unsigned threads, void (*run)(const void*), const void* args) {
  crew.running = threads;
  crew.returned = 0;
  crew.failed = false;
  crew.sentence.clear();
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads; ++i) all.emplace_back(body, Thread{{i, 0, 0}, 0}, run, args);
  for (std::thread& one : all) one.join();
  if (crew.failed) throw Error(crew.sentence);
}

}  // namespace emulate
