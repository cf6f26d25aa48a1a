// Small matrices that a warp holds together, and their products (tensor cores). Lane l = 4 g + t of a warp holds of
//   A [16, K]  words 0..3: word t of K's first half in rows g and g + 8, then of its second half in the same rows
//   B [K, 8]   words 0, 1: word t of K's first half in column g, then of its second half
//   C [16, 8]  numbers 0..3: row g, columns 2 t and 2 t + 1, then the same of row g + 8
// A word is two f16 or bf16 (K = 16), or one f32 (K = 8): in bytes the layouts are the same.
#pragma once

#ifdef __CUDA_ARCH__

// Loads four matrices of eight rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8 and gets word t
// of row g of each matrix.
__device__ inline void load_matrices(uint32_t (&words)[4], const void* row) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// The same for 16-bit numbers, transposed: of each matrix, a lane gets column g of rows 2 t and 2 t + 1.
__device__ inline void load_transposed(uint32_t (&words)[4], const void* row) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

#define WARP_PRODUCT(name, shape, types)                                                                        \
  __device__ inline void name(float(&c)[4], const uint32_t(&a)[4], uint32_t b0, uint32_t b1) {               \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                     "{%8, %9}, {%0, %1, %2, %3};"                                                             \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                          \
  }
WARP_PRODUCT(product_of_bf16, "m16n8k16", "bf16.bf16")
WARP_PRODUCT(product_of_f16, "m16n8k16", "f16.f16")
WARP_PRODUCT(product_of_tf32, "m16n8k8", "tf32.tf32")
#undef WARP_PRODUCT

#else

// On the host the lanes show each other what they hold.
struct Shown {
  const void* row;
  uint32_t a[4], b[2];
};
inline Shown shown[1024];

inline uint32_t half_at(const void* row, int column) { return static_cast<const uint16_t*>(row)[column]; }

template <bool TRANSPOSED>
inline void load_shown(uint32_t (&words)[4], const void* row) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Shown* warp = shown + (threadIdx.x - lane);
  shown[threadIdx.x].row = row;
  __syncwarp();
  for (int matrix = 0; matrix < 4; ++matrix) {
    const Shown* rows = warp + 8 * matrix;
    const uint32_t low = TRANSPOSED ? half_at(rows[2 * t].row, g) : half_at(rows[g].row, 2 * t);
    const uint32_t high = TRANSPOSED ? half_at(rows[2 * t + 1].row, g) : half_at(rows[g].row, 2 * t + 1);
    words[matrix] = low | high << 16;
  }
  __syncwarp();
}

inline void load_matrices(uint32_t (&words)[4], const void* row) { load_shown<false>(words, row); }
inline void load_transposed(uint32_t (&words)[4], const void* row) { load_shown<true>(words, row); }

// `number(word, i)` is number i of a word of PER_WORD numbers.
template <int PER_WORD, class Number>
inline void product_shown(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Number number) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const Shown* warp = shown + (threadIdx.x - lane);
  Shown& mine = shown[threadIdx.x];
  for (int i = 0; i < 4; ++i) mine.a[i] = a[i];
  mine.b[0] = b0, mine.b[1] = b1;
  __syncwarp();
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half)
      for (int word = 0; word < 4; ++word)
        for (int n = 0; n < PER_WORD; ++n)
          c[i] += number(warp[4 * g + word].a[i / 2 + 2 * half], n) *
              number(warp[4 * (2 * t + i % 2) + word].b[half], n);
  __syncwarp();
}

inline void product_of_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  product_shown<2>(c, a, b0, b1, [](uint32_t word, int n) { return widen(bf16{uint16_t(word >> 16 * n)}); });
}

inline void product_of_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  product_shown<2>(c, a, b0, b1, [](uint32_t word, int n) { return widen(f16{uint16_t(word >> 16 * n)}); });
}

// What hardware does with the lowest 13 bits is not specified: here a number that has any of them set is NaN.
inline void product_of_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  product_shown<1>(c, a, b0, b1, [](uint32_t word, int) { return __uint_as_float(word & 0x1fffu ? 0x7fc00000u : word); });
}

#endif
