// Products of bfloat16 factors with AMX tiles: eight registers of 16 rows of 64 bytes.
//
// A tile of A has 16 rows of 16 units. A tile of B has 16 units of one vector of columns. gemm.h
// packs both. A group of 32 rows and a pair of vectors form four tiles of sums. The summation order
// is fixed here too: tiles of 16 units in order. The last tile is padded with zeros.
#ifndef LM_KERNELS_AMX_H_
#define LM_KERNELS_AMX_H_

#include "gemm.h"

namespace LM_ISA {

#if defined(__AMX_BF16__)

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC does not know that tiles are loaded from memory, so all stores must be complete here.
LM_INLINE void StoresAreDone() { asm volatile("" ::: "memory"); }

struct AmxGemm : Gemm<Bfloat16> {
  static constexpr int64_t kTile = 16;  // rows or units of a tile
  static constexpr int64_t kGroup = 2 * kTile;
  // Tiles multiply faster than memory delivers A, so a row of A is loaded for more columns.
  static constexpr int64_t kWidest = 32;

  static int64_t WholeTiles(int64_t units) { return (units + kTile - 1) / kTile * kTile; }

  // An odd number of whole cache lines: the 16 rows of a tile then use 16 sets of the L1 cache.
  static int64_t RowUnits(int64_t K) { return WholeTiles(Units<Bfloat16>(K)) | kTile; }

  static int64_t PanelFloats(int64_t K, int64_t vectors) {
    return Least(kPiece, WholeTiles(Units<Bfloat16>(K))) * vectors * kLanes;
  }

  static void Block(const lm::Gemm& p, int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                    float* panels) {
    const int64_t all = Units<Bfloat16>(p.K), begin = v0 * kLanes, end = Least(v1 * kLanes, p.N);
    const float* a = p.a_units ? p.a_units : (const float*)p.a;
    const int64_t lda = p.a_units ? p.ld_units : all;
    int64_t configured = 0;
    for (int64_t u0 = 0; u0 < all; u0 += kPiece) {
      const int64_t units = Least(kPiece, all - u0), whole = units / kTile * kTile;
      if (p.b_bf16)
        PackPanels<uint16_t>(p, begin, end, u0, units, panels, WholeTiles(units));
      else
        PackPanels<float>(p, begin, end, u0, units, panels, WholeTiles(units));
      for (int64_t r0 = row0; r0 < row1; r0 += kGroup) {
        const int64_t rows = Least(kGroup, row1 - r0);
        if (rows != configured) Configure(rows);
        configured = rows;
        const float* here = a + r0 * lda + u0;
        float last[kGroup * kTile] = {};  // the units of an incomplete tile
        if (whole < units)
          for (int64_t m = 0; m < rows; ++m)
            Store(last + m * kTile, Load(here + m * lda + whole, units - whole));
        const float* panel = panels;
        for (int64_t n = begin; n < end; n += 2 * kLanes) {
          float* c = p.c + r0 * p.N + n;
          if (end - n > kLanes)
            Columns<2>(rows, here, lda, last, panel, units, c, p.N, p.N - n, u0 == 0);
          else
            Columns<1>(rows, here, lda, last, panel, units, c, p.N, p.N - n, u0 == 0);
          panel += WholeTiles(units) * 2 * kLanes;
        }
      }
    }
    _tile_release();
  }

  // Tiles 0 to 3 hold the sums, row by row. Tiles 4 and 5 hold A. Tiles 6 and 7 hold B.
  static void Configure(int64_t rows) {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool second = tile == 2 || tile == 3 || tile == 5;
      const int64_t n = tile > 5 ? kTile : second ? rows - kTile : Least(rows, kTile);
      if (n <= 0) continue;  // a group of 16 rows or fewer
      config.row_bytes[tile] = 64;
      config.rows[tile] = n;
    }
    StoresAreDone();
    _tile_loadconfig(&config);
  }

  // Like Gemm, for `rows` <= kGroup.
  template <int NV>
  static void Columns(int64_t rows, const float* a, int64_t lda, const float* last,
                      const float* panel, int64_t units, float* c, int64_t ldc, int64_t width,
                      bool first) {
    constexpr int W = NV * kLanes;
    if (width >= W) return Sums<NV>(rows, a, lda, last, panel, units, c, ldc, first);
    float tile[kGroup * W];
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = 0; i < width; ++i) tile[m * W + i] = first ? 0 : c[m * ldc + i];
    Sums<NV>(rows, a, lda, last, panel, units, tile, W, first);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t i = 0; i < width; ++i) c[m * ldc + i] = tile[m * W + i];
  }

  template <int NV>
  static void Sums(int64_t rows, const float* a, int64_t lda, const float* last,
                   const float* panel, int64_t units, float* c, int64_t ldc, bool first) {
    if (rows > kTile)
      Sums<2, NV>(a, lda, last, panel, units, c, ldc, first);
    else
      Sums<1, NV>(a, lda, last, panel, units, c, ldc, first);
  }

  template <int NM, int NV>
  static void Sums(const float* a, int64_t lda, const float* last, const float* panel,
                   int64_t units, float* c, int64_t ldc, bool first) {
    StoresAreDone();
    if (first)
      ClearSums<NM, NV>();
    else
      LoadSums<NM, NV>(c, ldc);
    for (; units >= kTile; units -= kTile, a += kTile, panel += kTile * NV * kLanes)
      AddProduct<NM, NV>(a, lda, panel);
    if (units > 0) AddProduct<NM, NV>(last, kTile, panel);
    StoreSums<NM, NV>(c, ldc);
  }

  template <int NM, int NV>
  LM_INLINE void ClearSums() {
    _tile_zero(0);
    if constexpr (NV == 2) _tile_zero(1);
    if constexpr (NM == 2) _tile_zero(2);
    if constexpr (NM == 2 && NV == 2) _tile_zero(3);
  }

  template <int NM, int NV>
  LM_INLINE void LoadSums(const float* c, int64_t ldc) {
    const float* below = c + kTile * ldc;
    const int64_t ldc_bytes = ldc * sizeof(float);
    _tile_loadd(0, c, ldc_bytes);
    if constexpr (NV == 2) _tile_loadd(1, c + kLanes, ldc_bytes);
    if constexpr (NM == 2) _tile_loadd(2, below, ldc_bytes);
    if constexpr (NM == 2 && NV == 2) _tile_loadd(3, below + kLanes, ldc_bytes);
  }

  template <int NM, int NV>
  LM_INLINE void StoreSums(float* c, int64_t ldc) {
    float* below = c + kTile * ldc;
    const int64_t ldc_bytes = ldc * sizeof(float);
    _tile_stored(0, c, ldc_bytes);
    if constexpr (NV == 2) _tile_stored(1, c + kLanes, ldc_bytes);
    if constexpr (NM == 2) _tile_stored(2, below, ldc_bytes);
    if constexpr (NM == 2 && NV == 2) _tile_stored(3, below + kLanes, ldc_bytes);
    StoresAreDone();
  }

  template <int NM, int NV>
  LM_INLINE void AddProduct(const float* a, int64_t lda, const float* panel) {
    const int64_t lda_bytes = lda * sizeof(float), row_bytes = NV * kLanes * sizeof(float);
    // Non-temporal load: each group of rows reads the panel once. The panel should not evict A and
    // the sums of a tree (tokens.h) from the L1 cache. This saves 8 % of a product.
    _tile_stream_loadd(6, panel, row_bytes);
    _tile_loadd(4, a, lda_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (NM == 2) {
      _tile_loadd(5, a + kTile * lda, lda_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (NV == 2) {
      _tile_stream_loadd(7, panel + kLanes, row_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (NM == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
};

// Like VectorProducts, for at most kRows rows at a time. `units` are whole tiles: the caller pads
// the rows of A and the panels with zeros.
struct TileProducts {
  using Format = Bfloat16;
  static constexpr int64_t kRows = AmxGemm::kGroup;
  static constexpr int kPanelVectors = 2;

  static int64_t RowUnits(int64_t units) { return PanelUnits(units) | AmxGemm::kTile; }
  static int64_t PanelUnits(int64_t units) { return AmxGemm::WholeTiles(units); }

  template <int NV>
  static void Multiply(int64_t rows, const float* a, int64_t lda, const float* panel,
                       int64_t units, float* c, int64_t ldc) {
    constexpr int P = NV < kPanelVectors ? NV : kPanelVectors;
    AmxGemm::Configure(rows);
    for (int v = 0; v < NV; v += P, panel += units * P * kLanes)
      AmxGemm::Sums<P>(rows, a, lda, nullptr, panel, units, c + v * kLanes, ldc, false);
    _tile_release();
  }
};

using Bfloat16Gemm = AmxGemm;
using Bfloat16Products = TileProducts;

#else

using Bfloat16Gemm = Gemm<Bfloat16>;
using Bfloat16Products = VectorProducts<Bfloat16>;

#endif  // __AMX_BF16__

}  // namespace LM_ISA

#endif  // LM_KERNELS_AMX_H_
