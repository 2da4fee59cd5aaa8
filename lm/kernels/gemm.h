// The inner loop of every matrix product, and the two number formats.
//
// A product C[M, N] += A[M, K] B[K, N] reads B from a panel: the values of NV vectors of columns
// for k = 0, 1, ... in order. The loop therefore streams through memory for every layout of B. A is
// read row by row, one broadcast at a time. Each element of C is summed over k in one fixed order.
// The result does not depend on the threads or on the grouping of rows.
// amx.h multiplies the same panels and rows with tiles if the CPU has AMX.
#ifndef LM_KERNELS_GEMM_H_
#define LM_KERNELS_GEMM_H_

#include "cpu.h"
#include "simd.h"

namespace LM_ISA {

// Formats. Both are streams of 4-byte units in float pointers: one float32, or the bfloat16 values
// 2u and 2u + 1 of a sum. Units(n) is the number of units of n values.
//   Along: the units of consecutive values p[0], p[1], ... (n values exist).
//   Across: one unit of each of n columns. `first` and `second` are rows of values, or null for
//           missing rows.
struct Float32 {
  static constexpr int kDepth = 1;         // values of a unit
  static constexpr bool kConverts = false;  // whether units differ from float32 values
  LM_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return LM_ISA::MulAdd(a, b, c); }
  template <class T>
  LM_INLINE Vec Along(const T* p, int64_t n) { return Load(p, n); }
  template <class T>
  LM_INLINE Vec Across(const T* first, const T*, int64_t n) {
    return first ? Load(first, n) : Vec{};
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  static constexpr int kDepth = 2;
  static constexpr bool kConverts = true;
  LM_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
    return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
  template <class T>
  LM_INLINE Vec Along(const T* p, int64_t n) {
    const Vec low = Load(p, n), high = n > kLanes ? Load(p + kLanes, n - kLanes) : Vec{};
    return (Vec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
  template <class T>
  LM_INLINE Vec Across(const T* first, const T* second, int64_t n) {
    const Vec x = first ? Load(first, n) : Vec{}, y = second ? Load(second, n) : Vec{};
    typedef uint16_t Halves __attribute__((vector_size(64)));
    Halves order = {};  // values of the first and of the second row take turns
    for (int i = 0; i < 32; ++i) order[i] = i / 2 + i % 2 * 16;
    return (Vec)__builtin_shuffle((Halves)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x), order);
  }
};
#else
struct Bfloat16 {  // rounded float32 if the CPU has no bfloat16 products
  static constexpr int kDepth = 1;
  static constexpr bool kConverts = true;
  LM_INLINE Vec MulAdd(Vec a, Vec b, Vec c) { return LM_ISA::MulAdd(a, b, c); }
  template <class T>
  LM_INLINE Vec Along(const T* p, int64_t n) { return RoundToBf16(Load(p, n)); }
  template <class T>
  LM_INLINE Vec Across(const T* first, const T*, int64_t n) {
    return first ? RoundToBf16(Load(first, n)) : Vec{};
  }
};
#endif

template <class Format>
LM_INLINE int64_t Units(int64_t values) {
  return (values + Format::kDepth - 1) / Format::kDepth;
}

// Pack kLanes rows (`rows` of them exist) of units [u0, u0 + n) of sums over K values, lane = row:
// out[i * ldo], i < n, is a vector. Value k of row r is at p[r * ld + k]. Panels of B^T are packed
// this way: a row is a column of B.
template <class Format, class T>
static void PackPanel(const T* p, int64_t ld, int64_t rows, int64_t K, int64_t u0, int64_t n,
                      float* out, int64_t ldo) {
  constexpr int D = Format::kDepth;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t k = (u0 + i) * D;
    Vec block[kLanes];
    for (int r = 0; r < Least(kLanes, rows); ++r)
      for (int line = 4 * D; line < 5 * D; ++line)
        __builtin_prefetch(p + r * ld + k + line * 16);
#pragma GCC unroll 16
    for (int r = 0; r < kLanes; ++r)
      block[r] = r < rows ? Format::Along(p + r * ld + k, K - k) : Vec{};
    Transpose(block);
    for (int j = 0; j < Least(kLanes, n - i); ++j) Store(out + (i + j) * ldo, block[j]);
  }
}

// Pack the units of `rows` rows of K values with stride ld: out[r * ldo + u]. A is packed this way.
template <class Format, class T>
static void PackRows(const T* p, int64_t ld, int64_t rows, int64_t K, float* out, int64_t ldo) {
  constexpr int D = Format::kDepth;
  const int64_t units = Units<Format>(K);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t u = 0; u < units; u += kLanes)
      Store(out + r * ldo + u, Format::Along(p + r * ld + u * D, K - u * D), units - u);
}

// The number of rows of C that fit in registers together with NV vectors of columns.
template <int NV>
constexpr int MaxRows() {
  return kLanes == 16 ? (NV == 4 ? 6 : 12) : (NV == 4 ? 3 : 6);
}

// The units of NV vectors of columns of B. Unit k is at p[k * ld].
template <int NV>
struct Panel {
  const float* p;
  int64_t ld = NV * kLanes;
  const float* next = nullptr;  // will be read soon: one or two cache lines per unit are prefetched
  int64_t ld_next = 16;
  float* copy = nullptr;        // receives a copy with the stride NV * kLanes
  bool two_lines = false;
};

constexpr int64_t kAhead = 8;  // units of a panel that are fetched from the L2 cache in advance

// sum[MR, NV vectors] += a[MR, units] * panel. The loops over m and v unroll into registers.
template <class Format, int NV, int MR>
LM_INLINE void AddProducts(Vec* sum, const float* a, int64_t lda, Panel<NV> panel, int64_t units) {
  for (int64_t k = 0; k < units; ++k, panel.p += panel.ld) {
    Vec b[NV];
    if (panel.next) {
      __builtin_prefetch(panel.next + k * panel.ld_next);
      if (panel.two_lines) __builtin_prefetch(panel.next + k * panel.ld_next + 16);
    } else {
      for (int i = 0; i < NV * kLanes; i += 16) __builtin_prefetch(panel.p + kAhead * panel.ld + i);
    }
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) b[v] = Load(panel.p + v * kLanes);
    if (panel.copy) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) Store(panel.copy + (k * NV + v) * kLanes, b[v]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const Vec x = Set(a[m * lda + k]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[m * NV + v] = Format::MulAdd(x, b[v], sum[m * NV + v]);
    }
  }
}

// The rows of B that will be packed next. They are fetched line by line during products, because a
// core can only wait for a few lines at a time.
struct NextRows {
  const char* p;
  int64_t ld, count, lines;        // bytes from row to row, number of rows, cache lines of each
  int64_t lines_per_chunk = 1;
  const int64_t* order = nullptr;  // row i is the row order[i] of p
  int64_t row = 0, line = 0;

  static constexpr int64_t kChunk = 32;  // units of products

  template <class T>
  NextRows(const T* p, int64_t ld, int64_t rows, int64_t columns)
      : p((const char*)p), ld(ld * sizeof *p), count(columns > 0 ? rows : 0),
        lines((columns * sizeof *p + 63) / 64) {}

  // Fetch all rows during the products of `units` units.
  void Spread(int64_t units) { lines_per_chunk = count * lines * kChunk / (units + 1) + 1; }

  void Fetch() {
    for (int64_t i = 0; i < lines_per_chunk && row < count; ++i) {
      __builtin_prefetch(p + (order ? order[row] : row) * ld + line * 64, 0, 2);
      if (++line < lines) continue;
      line = 0;
      ++row;
    }
  }
};

// AddProducts that fetches the next rows at the same time. `next` may be null.
template <class Format, int NV, int MR>
LM_INLINE void AddProducts(Vec* sum, const float* a, int64_t lda, Panel<NV> panel, int64_t units,
                           NextRows* next) {
  if (!next) return AddProducts<Format, NV, MR>(sum, a, lda, panel, units);
  for (int64_t n; units > 0; units -= n, a += n, panel.p += n * panel.ld) {
    n = Least(NextRows::kChunk, units);
    next->Fetch();
    AddProducts<Format, NV, MR>(sum, a, lda, {panel.p, panel.ld}, n);
  }
}

// Fetch MR rows of NV vectors that will be written. Otherwise, the stores wait for the memory.
template <int NV, int MR>
LM_INLINE void PrefetchRows(const float* c, int64_t ldc) {
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) __builtin_prefetch(c + m * ldc + v * kLanes, 1);
}

// c[MR, NV vectors] = from[MR, NV vectors] + a[MR, units] * panel. `from` may be c itself, or one
// row for all rows (ldf == 0).
template <class Format, int NV, int MR>
static void Tile(const float* a, int64_t lda, Panel<NV> panel, int64_t units, const float* from,
                 int64_t ldf, float* c, int64_t ldc, NextRows* next) {
  PrefetchRows<NV, MR>(c, ldc);
  Vec sum[MR * NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[m * NV + v] = Load(from + m * ldf + v * kLanes);
  AddProducts<Format, NV, MR>(sum, a, lda, panel, units, next);
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) Store(c + m * ldc + v * kLanes, sum[m * NV + v]);
}

// The same for `rows` <= MaxRows rows.
template <class Format, int NV, int MR = MaxRows<NV>()>
static void TileOf(int64_t rows, const float* a, int64_t lda, Panel<NV> panel, int64_t units,
                   const float* from, int64_t ldf, float* c, int64_t ldc,
                   NextRows* next = nullptr) {
  if constexpr (MR > 1) {
    if (rows < MR)
      return TileOf<Format, NV, MR - 1>(rows, a, lda, panel, units, from, ldf, c, ldc, next);
  }
  Tile<Format, NV, MR>(a, lda, panel, units, from, ldf, c, ldc, next);
}

// Sums are computed in pieces of this many units, so that a piece of a panel stays in the L1 / L2
// cache while all rows use it.
constexpr int64_t kPiece = 512;

// Products of the recurrence: few rows, and panels that are packed once for all time steps.
template <class Numbers>
struct VectorProducts {
  using Format = Numbers;
  static constexpr int64_t kRows = 24;     // rows of C per pass
  static constexpr int kPanelVectors = 4;  // maximum vectors of columns per panel

  // The stride of rows of A, and the length of a panel, for sums over `units` units.
  static int64_t RowUnits(int64_t units) { return units; }
  static int64_t PanelUnits(int64_t units) { return units; }

  // c[rows, NV vectors] += a[rows, units] * panel, for any number of rows. With few rows, the
  // computation is faster than memory, so the next piece of the panel is prefetched.
  template <int NV>
  static void Multiply(int64_t rows, const float* a, int64_t lda, const float* panel,
                       int64_t units, float* c, int64_t ldc) {
    constexpr int64_t kLongest = kPiece / NV;  // at most 32 KiB, to stay in the L1 cache
    const int64_t pieces = (units + kLongest - 1) / kLongest;
    const int64_t groups = (rows + MaxRows<NV>() - 1) / MaxRows<NV>();
    // Pieces and groups of equal size: the prefetched piece is as long as the current piece, and 20
    // rows are 10 + 10 instead of 12 + 8.
    for (int64_t p = 0; p < pieces; ++p)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t r0 = rows * g / groups, r1 = rows * (g + 1) / groups;
        const int64_t k = units * p / pieces, length = units * (p + 1) / pieces - k;
        const float* here = panel + k * NV * kLanes;
        const int64_t ld_next = groups * 2 <= NV ? 32 : 16;
        const float* next = here + length * NV * kLanes + g * length * ld_next;
        const Panel<NV> piece = {here, NV * kLanes, next, ld_next, nullptr, ld_next > 16};
        TileOf<Format, NV>(r1 - r0, a + r0 * lda + k, lda, piece, length, c + r0 * ldc, ldc,
                           c + r0 * ldc, ldc);
      }
  }
};

// One whole product, C[M, N] = A[M, K] B[K, N] (cpu.h).
template <class Format>
struct Gemm {
  static constexpr int64_t kWidest = 8;
  static constexpr int64_t kManyRows = 128;  // rows that are worth packing B first

  static int64_t RowUnits(int64_t K) { return Units<Format>(K); }
  static int64_t PanelFloats(int64_t K, int64_t vectors) {
    return Least(kPiece, Units<Format>(K)) * vectors * kLanes;
  }

  static bool NeedsPackRows(const lm::Gemm& p) {
    if (p.a_bf16) return !(Format::kDepth == 2 && p.K % 2 == 0);
    return Format::kConverts;
  }

  static void PackRows(const lm::Gemm& p, int64_t row0, int64_t row1) {
    float* out = p.a_units + row0 * p.ld_units;
    const int64_t first = row0 * p.lda, rows = row1 - row0;
    if (p.a_bf16)
      LM_ISA::PackRows<Format>((const uint16_t*)p.a + first, p.lda, rows, p.K, out, p.ld_units);
    else
      LM_ISA::PackRows<Format>((const float*)p.a + first, p.lda, rows, p.K, out, p.ld_units);
  }

  // Pack columns [column, end), two vectors per panel. Units after `units` are zero up to `padded`.
  template <class T>
  static void PackPanels(const lm::Gemm& p, int64_t column, int64_t end, int64_t u0, int64_t units,
                         float* out, int64_t padded) {
    const T* b = (const T*)p.b;
    const auto width = [&](int64_t n) { return end - n > kLanes ? 2 * kLanes : kLanes; };
    for (int64_t n = column; n < end; n += 2 * kLanes) {
      float* panel = out + (n - column) * padded;
      memset(panel + units * width(n), 0, (padded - units) * width(n) * sizeof *panel);
      for (int64_t v = n; v < n + width(n) && !p.b_across; v += kLanes)
        PackPanel<Format>(b + v * p.ldb, p.ldb, end - v, p.K, u0, units, panel + v - n, width(n));
    }
    // Memory is fastest if it is read in its order, so each row of B is packed for all panels.
    for (int64_t u = 0; u < units && p.b_across; ++u) {
      const int64_t k = (u0 + u) * Format::kDepth;
      const T *first = b + k * p.ldb, *second = k + 1 < p.K ? first + p.ldb : nullptr;
      for (int64_t n = column; n < end; n += 2 * kLanes) {
        float* to = out + (n - column) * padded + u * width(n);
        for (int64_t v = n; v < n + width(n); v += kLanes)
          Store(to + v - n, Format::Across(first + v, second ? second + v : nullptr, end - v));
      }
    }
  }

  // The values that are packed after columns [begin, end) and the units before u: the next units of
  // these columns, or the first units of the next columns.
  static NextRows Next(const lm::Gemm& p, int64_t begin, int64_t end, int64_t u) {
    const int64_t k = u * Format::kDepth < p.K ? u * Format::kDepth : 0;
    const int64_t n = k ? begin : end;
    const int64_t columns = Least(end - begin, p.N - n);
    const int64_t values = Least(kPiece * Format::kDepth, p.K - k);
    const int64_t at = p.b_across ? k * p.ldb + n : n * p.ldb + k;
    const int64_t rows = p.b_across ? values : columns, length = p.b_across ? columns : values;
    if (p.b_bf16) return NextRows((const uint16_t*)p.b + at, p.ldb, rows, length);
    return NextRows((const float*)p.b + at, p.ldb, rows, length);
  }

  // Compute rows [row0, row1) and vectors [v0, v1) of C. The caller provides `panels`.
  static void Block(const lm::Gemm& p, int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                    float* panels) {
    const int64_t all = Units<Format>(p.K), begin = v0 * kLanes, end = Least(v1 * kLanes, p.N);
    const float* a = p.a_units ? p.a_units : (const float*)p.a;
    // If there are few rows, the first rows read B itself, and copy it into the panels. Its values
    // must be the units.
    const bool direct = p.b_across && !p.b_bf16 && !Format::kConverts && row1 - row0 < kManyRows;
    const int64_t first = direct ? begin + (end - begin) / (2 * kLanes) * 2 * kLanes : begin;
    for (int64_t u0 = 0; u0 < all; u0 += kPiece) {
      const int64_t units = Least(kPiece, all - u0);
      float* packed = panels + (first - begin) * units;
      if (p.b_bf16)
        PackPanels<uint16_t>(p, first, end, u0, units, packed, units);
      else
        PackPanels<float>(p, first, end, u0, units, packed, units);
      const int64_t groups = (row1 - row0 + MaxRows<2>() - 1) / MaxRows<2>();
      NextRows rows = Next(p, begin, end, u0 + units);
      rows.Spread(groups * (v1 - v0) / 2 * units);
      NextRows* next_rows = direct ? nullptr : &rows;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t r0 = row0 + (row1 - row0) * g / groups;
        const int64_t r1 = row0 + (row1 - row0) * (g + 1) / groups;
        float* panel = panels;
        for (int64_t n = begin; n < end; n += 2 * kLanes, panel += units * 2 * kLanes) {
          const float *a_u0 = a + r0 * all + u0, *b = (const float*)p.b + u0 * p.ldb + n;
          const int64_t line = (groups - 1 - g) * 16;
          const float* next = direct && line < 2 * kLanes ? b + line + (v1 - v0) * kLanes : nullptr;
          float* copy = groups > 1 ? panel : nullptr;  // nothing reads it if there is one group
          if (g == 0 && n < first)
            Columns<2>(p, r0, r1, n, a_u0, all, {b, p.ldb, next, p.ldb, copy}, units, u0 == 0,
                       next_rows);
          else if (end - n > kLanes)
            Columns<2>(p, r0, r1, n, a_u0, all, {panel, 2 * kLanes, next, p.ldb}, units, u0 == 0,
                       next_rows);
          else
            Columns<1>(p, r0, r1, n, a_u0, all, {panel}, units, u0 == 0, next_rows);
        }
      }
    }
  }

  // One tile of C at column n. If the last columns of C end within a vector, they use a buffer.
  template <int NV>
  static void Columns(const lm::Gemm& p, int64_t r0, int64_t r1, int64_t n, const float* a,
                      int64_t lda, Panel<NV> panel, int64_t units, bool first, NextRows* next) {
    constexpr int W = NV * kLanes;
    static const float zeros[W] = {};
    float* c = p.c + r0 * p.N + n;
    const int64_t rows = r1 - r0, width = p.N - n;
    if (width >= W) {
      return TileOf<Format, NV>(rows, a, lda, panel, units, first ? zeros : c, first ? 0 : p.N,
                                c, p.N, next);
    }
    float tile[MaxRows<NV>() * W];
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = 0; i < W; i += kLanes)
        Store(tile + m * W + i, first ? Vec{} : Load(c + m * p.N + i, width - i));
    TileOf<Format, NV>(rows, a, lda, panel, units, tile, W, tile, W);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = 0; i < W; i += kLanes)
        Store(c + m * p.N + i, Load(tile + m * W + i), width - i);
  }
};

}  // namespace LM_ISA

#endif  // LM_KERNELS_GEMM_H_
