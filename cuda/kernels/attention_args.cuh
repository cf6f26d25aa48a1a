// Arguments of the launches of a pass's attention, and where keys and values are.
#pragma once
#include "online_softmax.cuh"
#include "reach.cuh"

// One request of a pass. Position t of key head h of layer l lies at cache + l * layer_stride + h * head_stride +
// place(t) * head size elements, where place(t) goes through the page table; value heads follow the key heads.
struct Segment {
  int64_t cache;                       // address
  int64_t layer_stride, head_stride;   // elements
  int64_t pages;                       // address of int32 page numbers; 0: place(t) = t
  int64_t length, rows;                // positions cached, new rows behind them
  int64_t first;                       // index of the first new row in the pass
};

// Keys start .. stop - 1 of a segment: the work of a block for each key head. `slot`: where its states go; -1: the
// chunk is all that the rows see, and the result goes to `out`.
struct Chunk {
  int64_t segment, start, stop, slot;
};

// The slots first .. first + count - 1 of a segment's chunks.
struct Split {
  int64_t segment, first, count;
};

struct AttendArgs {
  const void* heads;       // [rows, query + key + value heads, head size]: queries scaled, both rotated
  void* out;               // [rows, query heads, head size]
  float* sums;             // [slots, key heads, queries, head size]: weighted sums of values
  Softmax* states;         // [slots, key heads, queries]
  const Segment* segments;
  const Chunk* chunks;     // one for each block in x
  const Split* splits;     // of the merge: one for each block in x
  int64_t row_stride;      // of heads, elements
  int32_t layer;
  int32_t key_heads, groups;  // groups: query heads of a key head
  int32_t queries;            // of a key head: the most that a segment has
  int32_t page_shift;         // log2 of the positions of a page
  Reach reach;
};

// Keys and values of one head of a segment: cached ones, then those of the pass. `which`: 0 for keys, 1 for values.
template <class T, int SIZE>
struct Source {
  const AttendArgs& args;
  const Segment& segment;
  T* cache;
  const T* fresh;
  const int32_t* pages;
  int64_t stride_of_values;
  int32_t length;

  __device__ Source(const AttendArgs& args, const Segment& segment, int head) : args(args), segment(segment) {
    cache = reinterpret_cast<T*>(segment.cache) + args.layer * segment.layer_stride + head * segment.head_stride;
    fresh = static_cast<const T*>(args.heads) + segment.first * args.row_stride +
            (args.key_heads * args.groups + head) * SIZE;
    pages = reinterpret_cast<const int32_t*>(segment.pages);
    stride_of_values = args.key_heads * segment.head_stride;
    length = static_cast<int32_t>(segment.length);
  }

  // Elements from a key to its value. Asynchronous copies clobber memory, so without `stride_of_values` the segment is
  // read again for each; float32 does that, since heads of 256 have no register left to keep the stride in.
  __device__ int64_t to_values() const {
    if constexpr (sizeof(T) == 4)
      return args.key_heads * segment.head_stride;
    else
      return stride_of_values;
  }

  __device__ T* cached(int position, int which) const {
    int64_t place = position;
    if (pages != nullptr) {
      const int page = position >> args.page_shift;
      place = (static_cast<int64_t>(pages[page]) << args.page_shift) + (position - (page << args.page_shift));
    }
    return cache + which * to_values() + place * SIZE;
  }

  __device__ const T* given(int position, int which) const {
    return fresh + which * args.key_heads * SIZE + (position - length) * args.row_stride;
  }

  __device__ const T* at(int position, int which) const {
    return position < length ? cached(position, which) : given(position, which);
  }
};
