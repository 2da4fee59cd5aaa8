// Sums of squares that are bitwise identical on all CPUs.
#ifndef LM_KERNELS_NORM_H_
#define LM_KERNELS_NORM_H_

#include "simd.h"

namespace LM_ISA {

// In double precision, the square of a float32 is exact. A fused multiply-add therefore rounds like
// a separate multiplication and addition, and no square overflows. Every instruction set uses the
// same sixteen partial sums, so the results are bitwise identical on all CPUs.
static double SumOfSquares(const float* x, int64_t n) {
  constexpr int kSums = 16, kWidth = kLanes / 2, kVectors = kSums / kWidth;
  typedef float Narrow __attribute__((vector_size(2 * LM_LANES), unused));
  typedef double Wide __attribute__((vector_size(4 * LM_LANES)));
  Wide sums[kVectors] = {};
  const auto add = [&](const float* p) LM_LAMBDA {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
#if defined(__AVX512F__)  // GCC 12 would convert halves of the vector.
      const Wide wide = (Wide)_mm512_cvtps_pd(_mm256_loadu_ps(p + v * kWidth));
#elif defined(__AVX2__)
      const Wide wide = (Wide)_mm256_cvtps_pd(_mm_loadu_ps(p + v * kWidth));
#else
      Narrow narrow;
      memcpy(&narrow, p + v * kWidth, sizeof narrow);
      const Wide wide = __builtin_convertvector(narrow, Wide);
#endif
      sums[v] += wide * wide;
    }
  };
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) add(x + i);
  float rest[kSums] = {};
  memcpy(rest, x + i, (n - i) * sizeof(float));
  add(rest);
  double tree[kSums];
  memcpy(tree, sums, sizeof tree);
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) tree[j] += tree[j + half];
  return tree[0];
}

}  // namespace LM_ISA

#endif  // LM_KERNELS_NORM_H_
