// Runs one launch from a file, for the sanitizers: they need a program of their own, and each buffer in an allocation
// of its exact size. Reads FILE, launches, writes the buffers back. Exit code 3 and a sentence on standard error if the
// emulation refuses.
//
// The file: entry name (64 bytes), grid x y z, threads, shared bytes, bytes of arguments, number of buffers (int64 each),
// the arguments, then of each buffer: its address in the process that wrote the file, its bytes (int64), its contents.
// Every aligned 8 bytes of arguments and buffers that point into one of the old buffers are made to point into the new.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulate.h"

namespace {

struct Buffer {
  std::uint64_t old_start, bytes;
  unsigned char* start;
};

void must(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "replay: %s\n", what);
  std::exit(2);
}

template <class T>
T read_one(std::FILE* file) {
  T value;
  must(std::fread(&value, sizeof value, 1, file) == 1, "the file ends early");
  return value;
}

// Turns old addresses into new ones; with `back`, new ones into old ones.
void relocate(unsigned char* bytes, std::size_t size, const std::vector<Buffer>& buffers, bool back) {
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    std::uint64_t value;
    std::memcpy(&value, bytes + i, 8);
    for (const Buffer& buffer : buffers) {
      const std::uint64_t fresh = reinterpret_cast<std::uint64_t>(buffer.start);
      const std::uint64_t from = back ? fresh : buffer.old_start, to = back ? buffer.old_start : fresh;
      if (value < from || value - from >= (buffer.bytes > 0 ? buffer.bytes : 1)) continue;
      value = value - from + to;
      std::memcpy(bytes + i, &value, 8);
      break;
    }
  }
}

}  // namespace

int main(int count, char** words) {
  must(count == 2, "usage: replay FILE");
  std::FILE* file = std::fopen(words[1], "r+b");
  must(file != nullptr, "the file cannot be opened");
  char entry[64];
  must(std::fread(entry, sizeof entry, 1, file) == 1 && entry[63] == 0, "no name of an entry");
  std::int64_t head[7];
  for (std::int64_t& field : head) field = read_one<std::int64_t>(file);
  std::vector<unsigned char> args(head[5]);
  must(std::fread(args.data(), 1, args.size(), file) == args.size(), "the arguments end early");
  std::vector<Buffer> buffers;
  std::vector<long> places;
  for (std::int64_t i = 0; i < head[6]; ++i) {
    const auto old_start = read_one<std::uint64_t>(file), bytes = read_one<std::uint64_t>(file);
    auto* start = static_cast<unsigned char*>(std::malloc(bytes));
    places.push_back(std::ftell(file));
    must(std::fread(start, 1, bytes, file) == bytes, "a buffer ends early");
    buffers.push_back({old_start, bytes, start});
  }
  relocate(args.data(), args.size(), buffers, false);
  for (const Buffer& buffer : buffers) relocate(buffer.start, buffer.bytes, buffers, false);
  try {
    const emulate::Index grid{unsigned(head[0]), unsigned(head[1]), unsigned(head[2])};
    emulate::launch(entry, grid, unsigned(head[3]), head[4], args.data(), args.size());
  } catch (const emulate::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::_Exit(3);
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    relocate(buffers[i].start, buffers[i].bytes, buffers, true);
    std::fseek(file, places[i], SEEK_SET);
    must(std::fwrite(buffers[i].start, 1, buffers[i].bytes, file) == buffers[i].bytes, "the file cannot be written");
    std::free(buffers[i].start);
  }
  std::fclose(file);
}
