// Cross-entropy over the words of a cluster of an adaptive softmax, and its gradient.
//
// A cluster has many words and few units, so its logits are large compared with the work per logit.
// Therefore, they are never stored (as in Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009).
// The first pass processes the words in blocks, and keeps a running sum of exponentials. The second
// pass computes the logits of a panel of words again, and both gradients while the panel is in the
// L1 cache. Logarithms have base 2, which makes the exponentials cheaper.
#ifndef LM_KERNELS_CLUSTER_H_
#define LM_KERNELS_CLUSTER_H_

#include "cpu.h"
#include "gemm.h"
#include "tokens.h"

namespace LM_ISA {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// 2^x within 2 ulp for x in [-126, 127]; 2^-126 for smaller x. NaN stays NaN. Larger x are invalid:
// callers subtract the maximum. The polynomial is from the Cephes library (exp2f.c).
LM_INLINE Vec Exp2(Vec x) {
  x = Select(x < Set(-126.f), Set(-126.f), x);
  const Vec shift = Set(12582912.f);  // see Exp
  const Vec shifted = x + shift;
  const Vec r = x - (shifted - shift);
  Vec p = Set(1.535336188319500e-4f);
  p = MulAdd(p, r, Set(1.339887440266574e-3f));
  p = MulAdd(p, r, Set(9.618437357674640e-3f));
  p = MulAdd(p, r, Set(5.550332471162809e-2f));
  p = MulAdd(p, r, Set(2.402264791363012e-1f));
  p = MulAdd(p, r, Set(6.931472028550421e-1f));
  p = MulAdd(p, r, Set(1.f));
  return p * (Vec)(((IVec)shifted << 23) + 0x3f800000);
}

// Large logits are relative to their maximum `shift`, because rounding would otherwise change their
// exponentials by more than 0.01 %, and the logarithm with base 2 could overflow. 0 if not large.
LM_INLINE Vec Shift(Vec max) {
  return Select((max > 1024.f) | (max < -1024.f), max, Vec{});
}

LM_INLINE Vec ToBase2(Vec x, Vec shift) { return (x - shift) * kLog2E; }

struct Cluster {
  static constexpr int64_t kWidth = 2 * kLanes;  // words of a panel
  static constexpr int64_t kBlock = 256;         // words whose logits are in the L1 cache
  static constexpr int kRows = MaxRows<2>();

  static int64_t PaddedUnits(int64_t K) { return (K + kLanes - 1) / kLanes * kLanes; }

  static int64_t ScratchFloats(int64_t N, int64_t K) {
    const int64_t padded = PaddedUnits(K);
    const int64_t first = kBlock * K + N * 2 * 16 + kRows * kBlock;
    const int64_t second = kWidth * (2 * K + padded) + N * (kWidth + padded);
    return first > second ? first : second;
  }

  LM_INLINE Vec Factor(Vec x, bool bf16) { return bf16 ? RoundToBf16(x) : x; }

  // Copy the hidden units, and transpose them to [K, ld] if `transposed` is not null.
  static void PackHidden(const float* hidden, int64_t N, int64_t K, bool bf16, float* rounded,
                         float* transposed, int64_t ld) {
    for (int64_t i = 0; i < N * K; i += kLanes)
      Store(rounded + i, Factor(Load(hidden + i, N * K - i), bf16), N * K - i);
    if (!transposed) return;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) transposed[k * ld + n] = rounded[n * K + k];
  }

  // panel[K, kWidth] = the units of words [v, v + count), transposed; zero for missing words.
  static void PackPanel(const lm::Cluster& p, int64_t v, int64_t count, float* panel) {
    const int64_t K = p.K;
    const float* words = p.words + v * K;
    if (K < kLanes || count < kWidth) {
      for (int64_t k = 0; k < K; ++k)
        for (int64_t w = 0; w < kWidth; ++w)
          panel[k * kWidth + w] = w < count ? words[w * K + k] : 0;
    } else {
      for (int64_t w = 0; w < kWidth; w += kLanes)
        for (int64_t k = 0; k < K; k += kLanes) {
          Vec block[kLanes];
          for (int i = 0; i < kLanes; ++i) block[i] = Load(words + (w + i) * K + k, K - k);
          Transpose(block);
          for (int i = 0; i < Least(kLanes, K - k); ++i)
            Store(panel + (k + i) * kWidth + w, block[i]);
        }
    }
    if (p.bf16)
      for (int64_t i = 0; i < K * kWidth; i += kLanes)
        Store(panel + i, RoundToBf16(Load(panel + i)));
  }

  // x[N, kWidth] with stride ldx = the logits of rows [row0, row1) for a panel of words.
  static void Logits(const lm::Cluster& p, int64_t row0, int64_t row1, const float* panel, float* x,
                     int64_t ldx) {
    static const float zeros[kWidth] = {};
    for (int64_t r = row0; r < row1; r += kRows, x += kRows * ldx)
      TileOf<Float32, 2>(Least(kRows, row1 - r), p.hidden + r * p.K, p.K, {panel}, p.K, zeros, 0, x,
                         ldx);
  }

  // Add the exponentials of `count` logits, a multiple of 16. lanes[0..15] contains the maximum of
  // each of sixteen lanes, and lanes[16..31] the sum of the lane, relative to the maximum.
  static void AddExponentials(float* x, int64_t count, float* lanes) {
    for (int lane = 0; lane < 16; lane += kLanes) {
      const Vec before = Load(lanes + lane);
      Vec max = before;
      for (int64_t i = lane; i < count; i += 16) max = Max(Load(x + i), max);
      const Vec shift = Shift(max), most = ToBase2(max, shift);
      if (!IsZero(shift))
        for (int64_t i = lane; i < count; i += 16) Store(x + i, Load(x + i) - shift);
      Vec sum = Load(lanes + 16 + lane) * Exp2(ToBase2(before, shift) - most);
      for (int64_t i = lane; i < count; i += 16)
        sum = sum + Exp2(MulAdd(Load(x + i), Set(kLog2E), -most));
      Store(lanes + lane, max);
      Store(lanes + 16 + lane, sum);
    }
  }

  // First pass over the words of a chunk: the maximum and the sum of exponentials of each token.
  static void LogSums(const lm::Cluster& p, int64_t chunk, float* scratch) {
    const int64_t begin = chunk * lm::ClusterChunk(p.K);
    const int64_t end = Least(begin + lm::ClusterChunk(p.K), p.V);
    float *panels = scratch, *lanes = panels + kBlock * p.K, *x = lanes + p.N * 32;
    for (int64_t i = 0; i < p.N * 32; ++i) lanes[i] = i & 16 ? 0 : -__FLT_MAX__;
    for (int64_t v = begin; v < end; v += kBlock) {
      const int64_t count = Least(kBlock, end - v), whole = (count + 15) / 16 * 16;
      for (int64_t w = 0; w < count; w += kWidth) PackPanel(p, v + w, count - w, panels + w * p.K);
      for (int64_t r = 0; r < p.N; r += kRows) {
        const int64_t rows = Least(kRows, p.N - r);
        for (int64_t w = 0; w < count; w += kWidth)
          Logits(p, r, r + rows, panels + w * p.K, x + w, kBlock);
        for (int64_t m = 0; m < rows; ++m) {
          for (int64_t w = count; w < whole; ++w) x[m * kBlock + w] = -__builtin_inff();
          AddExponentials(x + m * kBlock, whole, lanes + (r + m) * 32);
        }
      }
    }
    for (int64_t n = 0; n < p.N; ++n) {
      const float *max = lanes + n * 32, *sum = max + 16;
      float most = max[0], total = 0, scaled[16];
      for (int i = 1; i < 16; ++i) most = max[i] > most ? max[i] : most;
      const Vec shift = Shift(Set(most)), largest = ToBase2(Set(most), shift);
      for (int i = 0; i < 16; i += kLanes)
        Store(scaled + i, Load(sum + i) * Exp2(ToBase2(Load(max + i), shift) - largest));
      for (int i = 0; i < 16; ++i) total += scaled[i];
      p.max[chunk * p.N + n] = most;
      p.sum[chunk * p.N + n] = total;
    }
  }

  // Combine the chunks of the first pass.
  static void Losses(const lm::Cluster& p, int64_t chunks) {
    for (int64_t n = 0; n < p.N; n += kLanes) {
      const int64_t count = p.N - n;
      Vec max = Load(p.max + n, count), sum = {}, logit = {};
      for (int64_t c = 1; c < chunks; ++c) max = Max(Load(p.max + c * p.N + n, count), max);
      const Vec shift = Shift(max), most = ToBase2(max, shift);
      for (int64_t c = 0; c < chunks; ++c) {
        const Vec factor = Exp2(ToBase2(Load(p.max + c * p.N + n, count), shift) - most);
        sum = MulAdd(Load(p.sum + c * p.N + n, count), factor, sum);
      }
      for (int64_t i = 0; i < Least(kLanes, count); ++i)
        logit[i] = TargetLogit(p, n + i);
      const Vec log = Log(sum);
      Store(p.shift + n, shift, count);
      Store(p.log_sum + n, MulAdd(log, Set(kLog2E), most), count);
      Store(p.nll + n, MulAdd(most, Set(kLn2), log) - (logit - shift), count);
    }
  }

  static float TargetLogit(const lm::Cluster& p, int64_t n) {
    Vec sum = {};
    for (int64_t k = 0; k < p.K; ++k)
      sum = MulAdd(Set(p.hidden[n * p.K + k]), Factor(Set(p.words[p.targets[n] * p.K + k]), p.bf16),
                   sum);
    return sum[0];
  }

  // Second pass over the words of a chunk: the gradient of the words, and the chunk's part of the
  // gradient of the hidden units.
  static void Gradients(const lm::Cluster& p, int64_t chunk, float* scratch) {
    const int64_t begin = chunk * lm::ClusterChunk(p.K), K = p.K, padded = PaddedUnits(K);
    const int64_t end = Least(begin + lm::ClusterChunk(K), p.V);
    float *panel = scratch, *sums = panel + K * kWidth, *rows = sums + K * kWidth;
    float *x = rows + kWidth * padded, *dhidden = x + p.N * kWidth;
    memset(dhidden, 0, p.N * padded * sizeof *dhidden);
    for (int64_t v = begin; v < end; v += kWidth) {
      const int64_t count = Least(kWidth, end - v);
      PackPanel(p, v, count, panel);
      Logits(p, 0, p.N, panel, x, kWidth);
      LogitGradients(p, v, count, x);
      for (int64_t k = 0; k < K; k += kRows)
        TreeTileOf<Float32, 2>(Least(kRows, K - k), p.hidden_units + k * p.ld_units, p.ld_units, x,
                               p.order, sums + k * kWidth, kWidth);
      StoreWords(p, v, count, sums);
      AddToHidden(p, v, count, x, rows, dhidden);
    }
    for (int64_t n = 0; n < p.N; ++n)
      memcpy(p.dhidden + (chunk * p.N + n) * K, dhidden + n * padded, K * sizeof *dhidden);
  }

  // Replace the logits of words [v, v + count) by their gradients, scale (softmax - onehot). The
  // padding of the panel keeps its zeros.
  static void LogitGradients(const lm::Cluster& p, int64_t v, int64_t count, float* x) {
    for (int64_t n = 0; n < p.N; ++n, x += kWidth) {
      const Vec log_sum = Set(p.log_sum[n]), scale = Set(p.scale[n]);
      if (p.shift[n] != 0)
        for (int64_t w = 0; w < count; ++w) x[w] -= p.shift[n];
      for (int i = 0; i < kWidth; i += kLanes)
        Store(x + i, Exp2(MulAdd(Load(x + i), Set(kLog2E), -log_sum)) * scale, count - i);
      const int64_t target = p.targets[n] - v;
      if (target >= 0 && target < count) x[target] -= p.scale[n];
      if (p.bf16)
        for (int i = 0; i < kWidth; i += kLanes) Store(x + i, RoundToBf16(Load(x + i)));
    }
  }

  // Store the gradient of words [v, v + count), which is transposed in sums [K, kWidth].
  static void StoreWords(const lm::Cluster& p, int64_t v, int64_t count, const float* sums) {
    const int64_t K = p.K;
    float* out = p.dwords + v * K;
    if (K < kLanes || count < kWidth) {
      for (int64_t w = 0; w < count; ++w)
        for (int64_t k = 0; k < K; ++k) out[w * K + k] = sums[k * kWidth + w];
      return;
    }
    for (int64_t w = 0; w < kWidth; w += kLanes)
      for (int64_t k = 0; k < K; k += kLanes) {
        Vec block[kLanes] = {};
        for (int i = 0; i < Least(kLanes, K - k); ++i)
          block[i] = Load(sums + (k + i) * kWidth + w);
        Transpose(block);
        for (int i = 0; i < kLanes; ++i) Store(out + (w + i) * K + k, block[i], K - k);
      }
  }

  // dhidden[N, padded] += x[N, kWidth] * words[kWidth, K]. `rows` is a buffer.
  static void AddToHidden(const lm::Cluster& p, int64_t v, int64_t count, const float* x,
                          float* rows, float* dhidden) {
    for (int64_t k = 0; k < p.K; k += 2 * kLanes)
      if (p.K - k > kLanes)
        AddToUnits<2>(p, v, count, k, x, rows, dhidden + k);
      else
        AddToUnits<1>(p, v, count, k, x, rows, dhidden + k);
  }

  template <int NV>
  static void AddToUnits(const lm::Cluster& p, int64_t v, int64_t count, int64_t k, const float* x,
                         float* rows, float* dhidden) {
    const int64_t padded = PaddedUnits(p.K);
    for (int64_t w = 0; w < kWidth; ++w)
      for (int i = 0; i < NV; ++i) {
        const int64_t unit = k + i * kLanes;
        const Vec units = w < count ? Load(p.words + (v + w) * p.K + unit, p.K - unit) : Vec{};
        Store(rows + (w * NV + i) * kLanes, Factor(units, p.bf16));
      }
    constexpr int kMost = MaxRows<NV>();
    for (int64_t n = 0; n < p.N; n += kMost) {
      float* out = dhidden + n * padded;
      TileOf<Float32, NV>(Least(kMost, p.N - n), x + n * kWidth, kWidth, {rows}, kWidth, out, padded,
                          out, padded);
    }
  }
};

}  // namespace LM_ISA

#endif  // LM_KERNELS_CLUSTER_H_
