// The recurrence of an LSTM layer without peepholes (Zaremba et al., arXiv:1409.2329, eq. 4):
//   z_t = x_t Wx + b + h_{t-1} Wh;  i, f, o = sigmoid(z_i, z_f, z_o);  j = tanh(z_j)
//   c_t = f c_{t-1} + i j;  h_t = o tanh(c_t)
// Each block computes a few hidden units from the product to h, so that z stays in the cache.
#ifndef LM_KERNELS_LSTM_H_
#define LM_KERNELS_LSTM_H_

#include "amx.h"
#include "cpu.h"

namespace LM_ISA {

using lm::Lstm;

// Write the first n values of v as the units from value number `first` (even) of a row.
template <class Format>
LM_INLINE void PutUnits(float* row, int64_t first, Vec v, int64_t n) {
  float values[kLanes];
  Store(values, v);
  const Vec units = Format::Along(values, Least(n, kLanes));
  row += first / Format::kDepth;
  if (n >= kLanes)
    memcpy(row, &units, sizeof units / Format::kDepth);
  else
    Store(row, units, Units<Format>(n));
}

// Set the padding of each of `rows` rows of `units` units to zero.
template <class Products>
LM_INLINE void FillUp(float* row, int64_t rows, int64_t units) {
  const int64_t ld = Products::RowUnits(units);
  for (int64_t r = 0; r < rows; ++r) memset(row + r * ld + units, 0, (ld - units) * sizeof *row);
}

// Forward: block n is the units [n kLanes, (n + 1) kLanes) with all four gates.
template <class Products>
struct Forward {
  using Format = typename Products::Format;
  static constexpr int kWidth = 4 * kLanes;

  static int64_t RowUnits(int64_t H) { return Products::RowUnits(Units<Format>(H)); }
  static int64_t PanelUnits(int64_t H) { return Products::PanelUnits(Units<Format>(H)); }
  static int64_t Blocks(int64_t H) { return (H + kLanes - 1) / kLanes; }
  static int64_t PanelFloats(int64_t H) { return Blocks(H) * PanelUnits(H) * kWidth; }
  // The units of h_{t-1} and h_t alternate between two buffers.
  static int64_t ScratchFloats(int64_t B, int64_t H) {
    return Format::kConverts ? 2 * B * RowUnits(H) : 0;
  }

  // A single time step reads each weight once. Packing the weights would take longer.
  static int64_t FirstPackedBlock(const Lstm& s) {
    return !Format::kConverts && s.T == 1 ? s.H / kLanes : 0;
  }

  // Pack a part of the units of all panels, because the rows of the weights are in order in memory.
  static void Pack(const Lstm& s, int64_t part) {
    constexpr int V = Products::kPanelVectors, D = Format::kDepth;
    const int64_t blocks = Blocks(s.H), length = PanelUnits(s.H), packed = FirstPackedBlock(s);
    if (packed == blocks) return;
    for (int64_t u = length * part / blocks; u < length * (part + 1) / blocks; ++u) {
      const float* first = u * D < s.H ? s.weights + u * D * 4 * s.H : nullptr;
      const float* second = u * D + 1 < s.H ? first + 4 * s.H : nullptr;
      for (int g = 0; g < 4; ++g)
        for (int64_t block = packed; block < blocks; ++block) {
          const int64_t u0 = block * kLanes, n = g * s.H + u0;
          const float *x = first ? first + n : nullptr, *y = second ? second + n : nullptr;
          Store(s.panels + block * length * kWidth + (g / V * length * V + u * V + g % V) * kLanes,
                Format::Across(x, y, s.H - u0));
        }
    }
  }

  // The units of h_{-1} = h0, in the buffer that step 0 reads.
  static void Start(const Lstm& s, int64_t row0, int64_t row1) {
    if constexpr (Format::kConverts) {
      const int64_t ld = RowUnits(s.H);
      for (int64_t b = row0; b < row1; ++b)
        for (int64_t u = 0; u < s.H; u += kLanes)
          PutUnits<Format>(State(s, -1) + b * ld, u, Load(s.h + b * s.H + u, s.H - u), s.H - u);
      for (int64_t t = -1; t <= 0; ++t)
        FillUp<Products>(State(s, t) + row0 * ld, row1 - row0, Units<Format>(s.H));
    }
  }

  static float* State(const Lstm& s, int64_t t) {
    return s.scratch + (t & 1) * s.B * RowUnits(s.H);
  }

  // z[rows, 4 kLanes] += a[rows, H] * the weights of the units from u0, in the same order of sums.
  static void MultiplyWeights(const Lstm& s, int64_t u0, int64_t rows, const float* a, float* z) {
    for (int g = 0; g < 4; ++g) {
      const float* weights = s.weights + g * s.H + u0;
      for (int64_t r0 = 0; r0 < rows; r0 += MaxRows<1>()) {
        float* c = z + r0 * kWidth + g * kLanes;
        TileOf<Format, 1>(Least(MaxRows<1>(), rows - r0), a + r0 * s.H, s.H,
                          {weights, 4 * s.H, weights + kLanes, 4 * s.H}, s.H, c, kWidth, c, kWidth);
      }
    }
  }

  static void Step(const Lstm& s, int64_t t, int64_t block, int64_t row0, int64_t row1) {
    const int64_t H = s.H, BH = s.B * H, lda = RowUnits(H), units = PanelUnits(H);
    const int64_t u0 = block * kLanes, n = H - u0;
    const float* before = Format::kConverts ? State(s, t - 1) : s.h + t * BH;
    const float* panel = s.panels + block * units * kWidth;
    alignas(64) float z[Products::kRows * kWidth];
    for (int64_t r0 = row0; r0 < row1; r0 += Products::kRows) {
      const int64_t rows = Least(Products::kRows, row1 - r0);
      const auto start = [&](int64_t m) {  // z = x Wx + b
        for (int g = 0; g < 4; ++g)
          Store(z + m * kWidth + g * kLanes,
                Load(s.gates + (t * s.B + r0 + m) * 4 * H + g * H + u0, n) +
                    Load(s.bias + g * H + u0, n));
      };
      for (int64_t m = 0; m < rows; ++m) start(m);
      if (block < FirstPackedBlock(s))
        MultiplyWeights(s, u0, rows, before + r0 * lda, z);
      else
        Products::template Multiply<4>(rows, before + r0 * lda, lda, panel, units, z, kWidth);
      for (int64_t m = 0; m < rows; ++m) {
        const bool starts_anew = s.StartsAnew(t, r0 + m);
        if (starts_anew) start(m);  // without the product
        const float* zm = z + m * kWidth;
        const Vec i = Sigmoid(Load(zm)), j = Tanh(Load(zm + kLanes));
        const Vec f = Sigmoid(Load(zm + 2 * kLanes)), o = Sigmoid(Load(zm + 3 * kLanes));
        const int64_t at = (r0 + m) * H + u0;
        const Vec c = MulAdd(f, starts_anew ? Vec{} : Load(s.c + t * BH + at, n), i * j);
        const Vec h = o * Tanh(c);
        float* gates = s.gates + (t * s.B + r0 + m) * 4 * H + u0;
        Store(gates, i, n);
        Store(gates + H, j, n);
        Store(gates + 2 * H, f, n);
        Store(gates + 3 * H, o, n);
        Store(s.c + (t + 1) * BH + at, c, n);
        Store(s.h + (t + 1) * BH + at, h, n);
        if constexpr (Format::kConverts) PutUnits<Format>(State(s, t) + (r0 + m) * lda, u0, h, n);
      }
    }
  }
};

// Backward: block n is the units [2 n kLanes, 2 (n + 1) kLanes). The last may have one vector.
// The product runs over the 4H gates. Each gate starts a new unit: 4 * Units(H) units in total.
template <class Products>
struct Backward {
  using Format = typename Products::Format;
  static constexpr int kWidth = 2 * kLanes;
  static_assert(Products::kPanelVectors >= 2, "a block's panel is one");

  static int64_t RowUnits(int64_t H) { return Products::RowUnits(4 * Units<Format>(H)); }
  static int64_t PanelUnits(int64_t H) { return Products::PanelUnits(4 * Units<Format>(H)); }
  static int64_t Blocks(int64_t H) { return (H + kWidth - 1) / kWidth; }
  static int64_t Width(int64_t H, int64_t block) {
    return H - block * kWidth > kLanes ? kWidth : kLanes;
  }
  static int64_t PanelFloats(int64_t H) { return Blocks(H) * PanelUnits(H) * kWidth; }
  // The units of dz_{t+1} and dz_t alternate between two buffers.
  static int64_t ScratchFloats(int64_t B, int64_t H) {
    return Format::kConverts ? 2 * B * RowUnits(H) : 0;
  }

  static void Pack(const Lstm& s, int64_t block) {
    const int64_t units = Units<Format>(s.H), length = PanelUnits(s.H), width = Width(s.H, block);
    float* panel = s.panels + block * length * kWidth;
    for (int g = 0; g < 4; ++g)
      for (int64_t v = 0; v < width; v += kLanes) {
        const int64_t u = block * kWidth + v;
        PackPanel<Format>(s.weights + u * 4 * s.H + g * s.H, 4 * s.H, s.H - u, s.H, 0, units,
                          panel + g * units * width + v, width);
      }
    memset(panel + 4 * units * width, 0, (length - 4 * units) * width * sizeof *panel);
  }

  static void Start(const Lstm& s, int64_t row0, int64_t row1) {
    if constexpr (Format::kConverts) {
      for (int64_t t = 0; t <= 1; ++t)
        FillUp<Products>(Dz(s, t) + row0 * RowUnits(s.H), row1 - row0, 4 * Units<Format>(s.H));
    }
  }

  static float* Dz(const Lstm& s, int64_t t) {
    return s.scratch + (t & 1) * s.B * RowUnits(s.H);
  }

  // Steps t = T - 1 .. 0, followed by t = -1, which computes d loss / d h0.
  static void Step(const Lstm& s, int64_t t, int64_t block, int64_t row0, int64_t row1) {
    const int64_t H = s.H, lda = RowUnits(H), units = PanelUnits(H);
    const int64_t u0 = block * kWidth, width = Width(H, block);
    const float* after = Format::kConverts ? Dz(s, t + 1) : s.gates + (t + 1) * s.B * 4 * H;
    const float* panel = s.panels + block * units * kWidth;
    alignas(64) float dh[Products::kRows * kWidth];
    for (int64_t r0 = row0; r0 < row1; r0 += Products::kRows) {
      const int64_t rows = Least(Products::kRows, row1 - r0);
      const auto start = [&](int64_t m) {  // the gradients of the outputs
        for (int64_t v = 0; v < width; v += kLanes) {
          const int64_t at = (r0 + m) * H + u0 + v, n = H - u0 - v;
          Vec d = {};
          if (t >= 0) d = Load(s.dh + t * s.B * H + at, n);
          if (t == s.T - 1) d = d + Load(s.dh_last + at, n);
          Store(dh + m * width + v, d);
        }
      };
      for (int64_t m = 0; m < rows; ++m) start(m);
      if (t < s.T - 1) {
        const float* a = after + r0 * lda;
        if (width == kWidth)
          Products::template Multiply<2>(rows, a, lda, panel, units, dh, width);
        else
          Products::template Multiply<1>(rows, a, lda, panel, units, dh, width);
      }
      for (int64_t m = 0; m < rows; ++m) {
        if (t < s.T - 1 && s.StartsAnew(t + 1, r0 + m)) start(m);  // without the product
        for (int64_t v = 0; v < width; v += kLanes)
          Gates(s, t, r0 + m, u0 + v, Load(dh + m * width + v));
      }
    }
  }

  // Compute dz_t and d loss / d c_{t-1} from d loss / d h_t of row b, starting at unit u.
  LM_INLINE void Gates(const Lstm& s, int64_t t, int64_t b, int64_t u, Vec dh) {
    const int64_t H = s.H, at = b * H + u, n = H - u;
    if (t < 0) return Store(s.dh0 + at, dh, n);
    float* gates = s.gates + (t * s.B + b) * 4 * H + u;
    const Vec i = Load(gates, n), j = Load(gates + H, n);
    const Vec f = Load(gates + 2 * H, n), o = Load(gates + 3 * H, n);
    const bool starts_anew = s.StartsAnew(t, b);
    const Vec c_before = starts_anew ? Vec{} : Load(s.c + t * s.B * H + at, n);
    const Vec tanh_c = Tanh(Load(s.c + (t + 1) * s.B * H + at, n));
    const Vec dc = MulAdd(dh * o, 1.f - tanh_c * tanh_c, Load(s.dc + at, n));
    const Vec dz[4] = {dc * j * i * (1.f - i), dc * i * (1.f - j * j),
                       dc * c_before * f * (1.f - f), dh * tanh_c * o * (1.f - o)};
    Store(s.dc + at, starts_anew ? Vec{} : dc * f, n);
    for (int g = 0; g < 4; ++g) {
      Store(gates + g * H, dz[g], n);
      if constexpr (Format::kConverts)
        PutUnits<Format>(Dz(s, t) + b * RowUnits(H) + g * Units<Format>(H), u, dz[g], n);
    }
  }
};

}  // namespace LM_ISA

#endif  // LM_KERNELS_LSTM_H_
