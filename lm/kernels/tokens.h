// Sums over tokens, in an order that does not depend on the distribution of the batch over ranks.
//
// The rows of the global batch form a fixed number of micro-batches. A rank
// has some consecutive micro-batches. Each micro-batch is summed from zero, time step by time step
// and row by row. The sums are added as a binary tree: ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + ...).
// Each rank computes its part of the tree: all of it on one rank, half of it on each of two ranks.
// The gradient exchange between the ranks computes the rest of the tree.
//
// The tree is computed during the product, tile by tile of the result. Sums that wait for their
// sibling stay in the L1 cache.
#ifndef LM_KERNELS_TOKENS_H_
#define LM_KERNELS_TOKENS_H_

#include "amx.h"
#include "cpu.h"
#include "gemm.h"

namespace LM_ISA {

using lm::SumOrder;

// The levels of the tree at which sums wait for the sum of micro-batch s, as bits. They follow
// carries of a counter: micro-batches 0 to 7 find 0, 1, 0, 3, 0, 1, 0 and 7. The last micro-batch
// takes all remaining sums, so that numbers of micro-batches other than powers of two lead to one
// sum, too.
LM_INLINE int64_t Waiting(int64_t s, bool last) { return last ? s : s & ~(s + 1); }

// The level at which the sum of micro-batch s, including the sums that waited for it, waits next.
LM_INLINE int Level(int64_t s) { return __builtin_ctzll(~s); }

template <int N>
struct Tree {
  alignas(64) float sums[lm::kTreeLevels][N * kLanes];  // waiting sums

  // Add the sums that wait for micro-batch s to its sum (N vectors). Store it if not the last.
  __attribute__((always_inline)) void Add(Vec* sum, int64_t s, bool last) {
    const int64_t waiting = Waiting(s, last);
    for (int level = 0; waiting >> level; ++level) {
      if (~waiting >> level & 1) continue;
#pragma GCC unroll 32
      for (int i = 0; i < N; ++i) sum[i] = Load(sums[level] + i * kLanes) + sum[i];
    }
    if (last) return;
    float* out = sums[Level(s)];
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) Store(out + i * kLanes, sum[i]);
  }
};

// sums[i] = the sum of column i of x, in the order of the micro-batches.
static void ColumnSums(const float* x, int64_t ld, const SumOrder& order, int64_t columns,
                       float* sums) {
  constexpr int kVectors = 8, kWidth = kVectors * kLanes;
  const auto add_up = [&](const float* x, int64_t n, float* out) LM_LAMBDA {
    Tree<kVectors> tree;
    Vec sum[kVectors] = {};
    const int64_t* token = order.tokens;
    for (int64_t s = 0; s < order.count; ++s) {
      for (int v = 0; v < kVectors; ++v) sum[v] = Vec{};
      for (const int64_t* end = order.tokens + order.ends[s]; token < end; ++token)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
          sum[v] = sum[v] + Load(x + *token * ld + v * kLanes, n - v * kLanes);
      tree.Add(sum, s, s + 1 == order.count);
    }
    for (int v = 0; v < kVectors; ++v) Store(out + v * kLanes, sum[v], n - v * kLanes);
  };
  int64_t i = 0;
  for (; i + kWidth <= columns; i += kWidth) add_up(x + i, kWidth, sums + i);
  if (i < columns) add_up(x + i, columns - i, sums + i);
}

// c[MR, NV vectors] = a[MR, units] * panel. The units are the units of the micro-batches' tokens.
template <class Format, int NV, int MR>
static void TreeTile(const float* a, int64_t lda, const float* panel, const SumOrder& order,
                     float* c, int64_t ldc, NextRows* next) {
  PrefetchRows<NV, MR>(c, ldc);
  Tree<MR * NV> tree;
  Vec sum[MR * NV] = {};
  int64_t u = 0;
  for (int64_t s = 0; s < order.count; ++s) {
#pragma GCC unroll 32
    for (int i = 0; i < MR * NV; ++i) sum[i] = Vec{};
    const int64_t end = order.ends[s] / Format::kDepth;
    AddProducts<Format, NV, MR>(sum, a + u, lda, {panel + u * NV * kLanes}, end - u, next);
    u = end;
    tree.Add(sum, s, s + 1 == order.count);
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) Store(c + m * ldc + v * kLanes, sum[m * NV + v]);
}

// The same for `rows` <= MaxRows rows.
template <class Format, int NV, int MR = MaxRows<NV>()>
static void TreeTileOf(int64_t rows, const float* a, int64_t lda, const float* panel,
                       const SumOrder& order, float* c, int64_t ldc, NextRows* next = nullptr) {
  if constexpr (MR > 1) {
    if (rows < MR)
      return TreeTileOf<Format, NV, MR - 1>(rows, a, lda, panel, order, c, ldc, next);
  }
  TreeTile<Format, NV, MR>(a, lda, panel, order, c, ldc, next);
}

// The largest number of vectors whose panel (all tokens) is at most as large as `most` in Gemm.
template <class Format>
static int64_t WidestPanel(int64_t tokens, int64_t most) {
  const int64_t widest = most * kPiece / (Units<Format>(tokens) + 1);
  return widest < 2 ? 2 : Least(widest, most);
}

// One whole sum of products, C[M, N] = A^T B (cpu.h). Both factors are packed in the order of the
// micro-batches. A panel contains all tokens: an interrupted sum would require storing its tree.
template <class Format>
struct TokenSum {
  static constexpr int64_t kMultiple = Format::kDepth;

  static int64_t CountUnits(const SumOrder& order) {
    return Units<Format>(order.ends[order.count - 1]);
  }
  // An odd number of whole cache lines: neighboring rows then use different sets of the cache.
  static int64_t RowUnits(int64_t tokens) { return (Units<Format>(tokens) + 15) / 16 * 16 | 16; }
  static int64_t Widest(int64_t tokens) {
    return WidestPanel<Format>(tokens, Gemm<Format>::kWidest);
  }
  static int64_t PanelFloats(int64_t tokens, int64_t vectors) {
    return Units<Format>(tokens) * vectors * kLanes;
  }

  // The row of x that is value i of the sums, or null if it does not exist.
  template <class T>
  LM_INLINE const T* Row(const T* x, int64_t ld, const SumOrder& order, int64_t i) {
    return order.tokens[i] < 0 ? nullptr : x + order.tokens[i] * ld;
  }

  // Call fn(u, first, second) for units [u0, u1) with one or two rows of x.
  template <class T, class Fn>
  LM_INLINE void ForUnits(const T* x, int64_t ld, const SumOrder& order, int64_t u0, int64_t u1,
                          const Fn& fn) {
    constexpr int D = Format::kDepth;
    for (int64_t u = u0; u < u1; ++u)
      fn(u, Row(x, ld, order, u * D), D > 1 ? Row(x, ld, order, u * D + 1) : nullptr);
  }

  template <class T>
  static void PackRowsOf(const T* a, const lm::TokenSum& p, int64_t token0, int64_t token1) {
    const int64_t units = Units<Format>(token1);
    for (int64_t u0 = token0 / Format::kDepth; u0 < units; u0 += kLanes)
      for (int64_t r = 0; r < p.M; r += kLanes) {
        Vec block[kLanes] = {};
        ForUnits(a + r, p.M, p.order, u0, Least(u0 + kLanes, units),
                 [&](int64_t u, const T* first, const T* second) LM_LAMBDA {
                   block[u - u0] = Format::Across(first, second, p.M - r);
                 });
        Transpose(block);
        for (int i = 0; i < Least(kLanes, p.M - r); ++i)
          Store(p.a_units + (r + i) * p.ld_units + u0, block[i]);
      }
  }

  // Pack values [token0, token1) of all rows of A^T. token0 is a multiple of 32.
  static void PackRows(const lm::TokenSum& p, int64_t token0, int64_t token1) {
    if (p.a_bf16)
      PackRowsOf((const uint16_t*)p.a, p, token0, token1);
    else
      PackRowsOf((const float*)p.a, p, token0, token1);
  }

  // Pack columns [begin, end), two vectors per panel.
  template <class T>
  static void PackPanelsOf(const T* b, const lm::TokenSum& p, int64_t begin, int64_t end,
                           float* panels) {
    const int64_t units = CountUnits(p.order);
    ForUnits(b, p.N, p.order, 0, units, [&](int64_t u, const T* first, const T* second) LM_LAMBDA {
      const auto unit = [&](int64_t n, int64_t columns) LM_LAMBDA {
        return Format::Across(first ? first + n : nullptr, second ? second + n : nullptr, columns);
      };
      int64_t n = begin;
      float* out = panels + u * 2 * kLanes;
      for (; n + 2 * kLanes <= end; n += 2 * kLanes, out += units * 2 * kLanes) {
        Store(out, unit(n, kLanes));
        Store(out + kLanes, unit(n + kLanes, kLanes));
      }
      if (end - n > kLanes) {
        Store(out, unit(n, kLanes));
        Store(out + kLanes, unit(n + kLanes, end - n - kLanes));
      } else if (end > n) {
        Store(out - u * kLanes, unit(n, end - n));
      }
    });
  }

  static void PackPanels(const lm::TokenSum& p, int64_t begin, int64_t end, float* panels) {
    if (p.b_bf16)
      PackPanelsOf((const uint16_t*)p.b, p, begin, end, panels);
    else
      PackPanelsOf((const float*)p.b, p, begin, end, panels);
  }

  // Compute rows [row0, row1) and vectors [v0, v1) of C. The caller provides `panels`.
  static void Block(const lm::TokenSum& p, int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                    float* panels) {
    const int64_t begin = v0 * kLanes, end = Least(v1 * kLanes, p.N);
    const int64_t units = CountUnits(p.order);
    PackPanels(p, begin, end, panels);
    const int64_t groups = (row1 - row0 + MaxRows<2>() - 1) / MaxRows<2>();
    const int64_t tokens = p.order.ends[p.order.count - 1];
    const int64_t columns = Least(end - begin, p.N - end);
    NextRows next = p.b_bf16 ? NextRows((const uint16_t*)p.b + end, p.N, tokens, columns)
                             : NextRows((const float*)p.b + end, p.N, tokens, columns);
    next.order = p.order.tokens;
    next.Spread(groups * (v1 - v0) / 2 * units);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t r0 = row0 + (row1 - row0) * g / groups;
      const int64_t r1 = row0 + (row1 - row0) * (g + 1) / groups;
      for (int64_t n = begin; n < end; n += 2 * kLanes) {
        const float* panel = panels + (n - begin) * units;
        if (end - n > kLanes)
          Columns<2>(p, r0, r1, n, panel, &next);
        else
          Columns<1>(p, r0, r1, n, panel, &next);
      }
    }
  }

  // One tile of C at column n. If the last columns of C end within a vector, they use a buffer.
  template <int NV>
  static void Columns(const lm::TokenSum& p, int64_t r0, int64_t r1, int64_t n,
                      const float* panel, NextRows* next) {
    constexpr int W = NV * kLanes;
    const float* a = p.a_units + r0 * p.ld_units;
    float* c = p.c + r0 * p.N + n;
    const int64_t rows = r1 - r0, width = p.N - n;
    if (width >= W)
      return TreeTileOf<Format, NV>(rows, a, p.ld_units, panel, p.order, c, p.N, next);
    float tile[MaxRows<NV>() * W];
    TreeTileOf<Format, NV>(rows, a, p.ld_units, panel, p.order, tile, W);
    for (int64_t m = 0; m < rows; ++m) memcpy(c + m * p.N, tile + m * W, width * sizeof *c);
  }
};

#if defined(__AMX_BF16__)

// Each micro-batch is padded to whole tiles of units, so that no tile contains tokens of two
// micro-batches.
struct AmxTokenSum : TokenSum<Bfloat16> {
  static constexpr int64_t kTile = AmxGemm::kTile, kGroup = AmxGemm::kGroup;
  static constexpr int64_t kMultiple = kTile * Bfloat16::kDepth;

  static int64_t Widest(int64_t tokens) {
    return WidestPanel<Bfloat16>(tokens, AmxGemm::kWidest);
  }

  static void Block(const lm::TokenSum& p, int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                    float* panels) {
    const int64_t begin = v0 * kLanes, end = Least(v1 * kLanes, p.N);
    const int64_t units = CountUnits(p.order);
    PackPanels(p, begin, end, panels);
    int64_t configured = 0;
    for (int64_t r0 = row0; r0 < row1; r0 += kGroup) {
      const int64_t rows = Least(kGroup, row1 - r0);
      if (rows != configured) AmxGemm::Configure(rows);
      configured = rows;
      for (int64_t n = begin; n < end; n += 2 * kLanes) {
        const float* panel = panels + (n - begin) * units;
        if (end - n > kLanes)
          Columns<2>(p, r0, rows, n, panel);
        else
          Columns<1>(p, r0, rows, n, panel);
      }
    }
    _tile_release();
  }

  template <int NV>
  static void Columns(const lm::TokenSum& p, int64_t r0, int64_t rows, int64_t n,
                      const float* panel) {
    constexpr int W = NV * kLanes;
    float* c = p.c + r0 * p.N + n;
    const int64_t width = p.N - n;
    if (width >= W) return Sums<NV>(p, r0, rows, panel, c, p.N);
    float tile[kGroup * W];
    Sums<NV>(p, r0, rows, panel, tile, W);
    for (int64_t m = 0; m < rows; ++m) memcpy(c + m * p.N, tile + m * W, width * sizeof *c);
  }

  template <int NV>
  static void Sums(const lm::TokenSum& p, int64_t r0, int64_t rows, const float* panel, float* c,
                   int64_t ldc) {
    if (rows > kTile)
      Sums<2, NV>(p, r0, rows, panel, c, ldc);
    else
      Sums<1, NV>(p, r0, rows, panel, c, ldc);
  }

  // Data moves from tiles to vector registers only through memory. If other sums wait for the sum of
  // a micro-batch, it is stored in a buffer first.
  template <int NM, int NV>
  static void Sums(const lm::TokenSum& p, int64_t r0, int64_t rows, const float* panel, float* c,
                   int64_t ldc) {
    constexpr int W = NV * kLanes;
    alignas(64) float sums[lm::kTreeLevels][kGroup * W], buffer[kGroup * W];
    const float* a = p.a_units + r0 * p.ld_units;
    const SumOrder& order = p.order;
    for (int64_t s = 0, u = 0; s < order.count; ++s) {
      AmxGemm::ClearSums<NM, NV>();
      for (const int64_t end = order.ends[s] / Bfloat16::kDepth; u < end; u += kTile)
        AmxGemm::AddProduct<NM, NV>(a + u, p.ld_units, panel + u * W);
      const bool last = s + 1 == order.count;
      float* out = last ? c : sums[Level(s)];
      const int64_t ldo = last ? ldc : W;
      const int64_t waiting = Waiting(s, last);
      AmxGemm::StoreSums<NM, NV>(waiting ? buffer : out, waiting ? W : ldo);
      const float* terms[lm::kTreeLevels];
      int count = 0;
      for (int level = 0; waiting >> level; ++level)
        if (waiting >> level & 1) terms[count++] = sums[level];
      const float* const* term = terms;
      for (; count > 3; --count) Add<1, W>(rows, buffer, term++, buffer, W);
      if (count == 1) Add<1, W>(rows, buffer, term, out, ldo);
      if (count == 2) Add<2, W>(rows, buffer, term, out, ldo);
      if (count == 3) Add<3, W>(rows, buffer, term, out, ldo);
    }
  }

  // out = ((sum + terms[0]) + terms[1]) + ..., in one pass. This is the overhead of the tree.
  template <int kTerms, int W>
  static void Add(int64_t rows, const float* sum, const float* const* terms, float* out,
                  int64_t ldo) {
    for (int64_t m = 0; m < rows; ++m)
#pragma GCC unroll 2
      for (int v = 0; v < W; v += kLanes) {
        Vec x = Load(sum + m * W + v);
#pragma GCC unroll 3
        for (int i = 0; i < kTerms; ++i) x = Load(terms[i] + m * W + v) + x;
        Store(out + m * ldo + v, x);
      }
  }
};

using Bfloat16TokenSum = AmxTokenSum;

#else

using Bfloat16TokenSum = TokenSum<Bfloat16>;

#endif  // __AMX_BF16__

}  // namespace LM_ISA

#endif  // LM_KERNELS_TOKENS_H_
