// Which keys the rows of a request see: the one mask of verify passes and draft blocks.
#pragma once

// Positions start .. stop - 1.
struct Span {
  int32_t start, stop;

  __device__ bool has(int32_t position) const { return position >= start && position < stop; }
  __device__ Span within(Span other) const {
    return {start > other.start ? start : other.start, stop < other.stop ? stop : other.stop};
  }
};

struct Reach {
  int32_t causal;    // whether a row sees nothing later than itself
  int32_t window;    // the most keys that a row sees; 0 for all
  int32_t anchored;  // whether the window is fixed: every row sees the `window` keys before the first row, and the rows

  // What row `row` of `rows` behind `length` keys sees.
  __device__ Span of(int32_t row, int32_t rows, int32_t length) const {
    const int32_t own = length + row;
    int32_t start = 0;
    if (window > 0) start = anchored ? length - window : own + 1 - window;
    return {start > 0 ? start : 0, causal ? own + 1 : length + rows};
  }

  // What all rows see.
  __device__ Span common(int32_t rows, int32_t length) const {
    return of(0, rows, length).within(of(rows - 1, rows, length));
  }
};
