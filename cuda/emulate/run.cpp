// Entries by name, and a grid as a loop over blocks.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <vector>

#include "emulate.h"

namespace emulate {

namespace {

// Memory that was never written reads as NaN (float32, float16, bfloat16) or -1: NaN spreads through sums, and as an
// index -1 is out of bounds. Not every byte does that: 0xA5, say, makes a float of -2.9e-16, which a sum swallows.
constexpr int kPoison = 0xff;

std::map<std::string, Entry>& entries() {
  static std::map<std::string, Entry> all;
  return all;
}

struct Region {
  void* start;
  std::size_t bytes;
};
std::mutex regions_guard;
std::vector<Region>& regions() {
  static std::vector<Region> all;
  return all;
}

// Dynamic shared memory, of exactly its size, so that the address sanitizer sees its end.
struct Dynamic {
  explicit Dynamic(std::size_t bytes) : bytes(bytes) {
    if (bytes > 0) start = static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(16)));
    block.shared = start;
  }
  ~Dynamic() {
    block.shared = nullptr;
    if (start != nullptr) ::operator delete(start, std::align_val_t(16));
  }
  unsigned char* start = nullptr;
  std::size_t bytes;
};

void prepare_block(Index index, unsigned threads, const Dynamic& dynamic) {
  block.index = index;
  block.threads.size = threads;
  block.threads.arrived = 0;
  for (Group& warp : block.warps) warp.size = kWarp, warp.arrived = 0;
  if (dynamic.start != nullptr) std::memset(dynamic.start, kPoison, dynamic.bytes);
  for (const Region& region : regions()) std::memset(region.start, kPoison, region.bytes);
}

std::string number(std::size_t value) { return std::to_string(value); }

}  // namespace

void* shared_memory(std::size_t bytes) {
  void* start = ::operator new(bytes, std::align_val_t(16));
  std::memset(start, kPoison, bytes);
  std::lock_guard lock(regions_guard);
  regions().push_back({start, bytes});
  return start;
}

Registered::Registered(const char* name, Entry entry) {
  if (!entries().emplace(name, entry).second) {
    std::fprintf(stderr, "two kernels are called %s\n", name);
    std::abort();
  }
}

const Entry* find(const char* name) {
  const auto found = entries().find(name);
  return found == entries().end() ? nullptr : &found->second;
}

std::string Site::text() const {
  const std::string path(file);
  return std::string(operation) + " (" + path.substr(path.rfind('/') + 1) + ":" + std::to_string(line) + ")";
}

void arrive(Group& group, Site site) {
  if (group.arrived > 0 && !(group.site == site)) {
    throw Error("threads of one " + std::string(group.size == kWarp && &group != &block.threads ? "warp" : "block") +
                " wait at different places: " + group.site.text() + " and " + site.text());
  }
  group.site = site;
  ++group.arrived;
}

std::string stuck(unsigned returned) {
  std::string waiting;
  auto add = [&](const Group& group, const std::string& whose) {
    if (group.arrived == 0) return;
    waiting += (waiting.empty() ? "" : ", ") + number(group.arrived) + " of " + number(group.size) + " threads of " +
               whose + " at " + group.site.text();
  };
  add(block.threads, "the block");
  for (unsigned i = 0; i < kMostThreads / kWarp; ++i) add(block.warps[i], "warp " + number(i));
  const std::string left = returned > 0 ? "; " + number(returned) + " threads have returned" : "";
  return "a block cannot go on: " + waiting + " wait for the others" + left;
}

void launch(const char* name, Index grid, unsigned threads, std::size_t shared_bytes, const void* args,
            std::size_t args_bytes) {
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  const Entry* entry = find(name);
  const std::string who = "kernel " + std::string(name);
  if (entry == nullptr) throw Error("there is no " + who);
  if (args_bytes != entry->args_bytes) {
    throw Error(who + " takes " + number(entry->args_bytes) + " bytes of arguments, not " + number(args_bytes));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535) {
    throw Error(who + ": a grid of " + number(grid.x) + " x " + number(grid.y) + " x " + number(grid.z) + " blocks");
  }
  if (threads == 0 || threads % kWarp != 0 || threads > entry->most_threads || threads > kMostThreads) {
    throw Error(who + " runs in whole warps of up to " + number(entry->most_threads) + " threads, not " +
                number(threads));
  }
  if (shared_bytes > kMostShared) throw Error(who + ": " + number(shared_bytes) + " bytes of shared memory");
  const Dynamic dynamic(shared_bytes);
  block.grid = grid;
  block.size = {threads, 1, 1};
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        prepare_block({x, y, z}, threads, dynamic);
        run_block(threads, entry->run, args);
      }
    }
  }
}

float from_half(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t exponent = (bits >> 10) & 31u, fraction = bits & 1023u;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const std::uint32_t wide = exponent == 31 ? 255u : exponent + 112u;
  return std::bit_cast<float>(sign | wide << 23 | fraction << 13);
}

std::uint16_t to_half(float x) {
  const std::uint16_t sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16 & 0x8000u);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
    return sign | static_cast<std::uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  }
  std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  bits += 0xfffu + (bits >> 13 & 1u);
  return sign | static_cast<std::uint16_t>((bits >> 13) - (112u << 10));
}

std::uint16_t to_bfloat(float x) {
  if (std::isnan(x)) return 0x7fff;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulate

namespace {
thread_local std::string last_error;
}

extern "C" {

// Runs a grid. Returns 0, or 1 with a sentence in emulate_error().
int emulate_launch(const char* entry, const unsigned* grid, unsigned threads, unsigned shared_bytes, const void* args,
                   std::size_t args_bytes) {
  try {
    emulate::launch(entry, {grid[0], grid[1], grid[2]}, threads, shared_bytes, args, args_bytes);
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

const char* emulate_error() { return last_error.c_str(); }

// The names of all entries, each with a newline.
const char* emulate_entries() {
  static const std::string all = [] {
    std::string names;
    for (const auto& [name, entry] : emulate::entries()) names += name + "\n";
    return names;
  }();
  return all.c_str();
}
}
