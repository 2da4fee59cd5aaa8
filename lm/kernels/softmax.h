// Softmax cross-entropy and its gradient, row by row while the row is in the L1 / L2 cache.
#ifndef LM_KERNELS_SOFTMAX_H_
#define LM_KERNELS_SOFTMAX_H_

#include "cpu.h"
#include "simd.h"

namespace LM_ISA {

// See cpu.h. nll = log(sum_v exp(x_v - max)) + (max - x_target), for x = logits + bias. NaN and
// +Inf in a row make the nll NaN: they reach the sum through exp(x - max).
static void SoftmaxRows(const lm::Softmax& s, const int64_t* rows, int64_t count, float* bias_sum,
                        float* buffer) {
  const int64_t V = s.V, whole = V / kLanes * kLanes;
  const float* bias = s.bias;
  if (s.dlogits) memset(bias_sum, 0, V * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t r = rows[i];
    const float* logits = s.logits + r * V;
    const int64_t target = s.targets[r];
    const float target_logit = logits[target] + bias[target];
    Vec max0 = Set(-__builtin_inff()), max1 = max0;
    int64_t v = 0;
    for (; v + 2 * kLanes <= whole; v += 2 * kLanes) {
      max0 = Max(Load(logits + v) + Load(bias + v), max0);
      max1 = Max(Load(logits + v + kLanes) + Load(bias + v + kLanes), max1);
    }
    float max = Max(Max(max0, max1));
    for (; v < V; ++v) max = logits[v] + bias[v] > max ? logits[v] + bias[v] : max;

    // If the gradient overwrites the logits, the exponentials overwrite the logits too.
    float* e = s.bf16 || !s.dlogits ? buffer : (float*)s.dlogits + r * V;
    uint16_t* out = s.bf16 ? (uint16_t*)s.dlogits + r * V : nullptr;
    Lanes16 sums;
    // Fetch the logits of the next row during the computation of this row.
    const float* next = s.logits + rows[i + 1 < count ? i + 1 : i] * V;
    const auto exponentials = [&](int64_t v, int64_t n) LM_LAMBDA {
      __builtin_prefetch(next + v);
      const Vec x = Exp(Load(logits + v, n) + Load(bias + v, n) - Set(max));
      Store(e + v, x, n);
      if (out) __builtin_prefetch(out + v, 1);  // otherwise, the stores below wait for the memory
      return x;
    };
    for (v = 0; v + 16 <= V; v += 16)
#pragma GCC unroll 4
      for (int i = 0; i < Lanes16::kVectors; ++i)
        sums.sums[i] = sums.sums[i] + exponentials(v + i * kLanes, kLanes);
    for (int i = 0; v < V; ++i, v += kLanes) {
      exponentials(v, V - v);
      sums.sums[i] = sums.sums[i] + Load(e + v, V - v);
    }
    const float sum = Sum(sums);
    s.nll[r] = Log(Set(sum))[0] + (max - target_logit);
    if (!s.dlogits) continue;

    const float factor = s.scale[r] / sum;
    e[target] -= sum;  // softmax - 1, times the factor
    const auto gradients = [&](int64_t v, int64_t n) LM_LAMBDA {
      const Vec d = Load(e + v, n) * factor;
      if (out)
        StoreBf16(out + v, d, n);
      else
        Store(e + v, d, n);
      Store(bias_sum + v, Load(bias_sum + v, n) + d, n);
    };
    for (v = 0; v < whole; v += kLanes) gradients(v, kLanes);
    if (v < V) gradients(v, V - v);
  }
}

}  // namespace LM_ISA

#endif  // LM_KERNELS_SOFTMAX_H_
