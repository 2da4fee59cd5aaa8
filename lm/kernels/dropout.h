// Dropout with a mask that is a function of counters, so that the gradient recomputes the mask.
#ifndef LM_KERNELS_DROPOUT_H_
#define LM_KERNELS_DROPOUT_H_

#include "cpu.h"
#include "simd.h"

namespace LM_ISA {

typedef uint64_t Wide __attribute__((vector_size(4 * LM_LANES)));
constexpr int kCounters = kLanes / 2;  // processed at a time

// The products of the lower 32 bits of each lane of a with b < 2^32. GCC 12 would compute 64 bits
// of a, which takes three times as long with AVX-512, and longer with AVX2.
LM_INLINE Wide MultiplyLow(Wide a, uint64_t b) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)(Wide{} + b));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)(Wide{} + b));
#else
  return a * b;
#endif
}

// Return the four random numbers of each counter (low, high), (low + 1, high), ...: Philox4x32-10
// (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2).
// Vectorized by hand: GCC 12 does not vectorize the plain loop, and dropout is three times slower.
LM_INLINE void Philox(uint64_t key, uint64_t low, uint64_t high, uint32_t* out) {
  constexpr uint64_t kLow = 0xffffffff;
  Wide counter = {}, front = {}, back = {};  // the pairs of each counter in the order of counters
  for (int i = 0; i < kCounters; ++i) {
    counter[i] = i;
    front[i] = i / 2 + i % 2 * kCounters;
    back[i] = front[i] + kCounters / 2;
  }
  counter += low;
  Wide c0 = counter & kLow, c1 = counter >> 32;
  Wide c2 = Wide{} + (high & kLow), c3 = Wide{} + (high >> 32);
  uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
    const Wide p0 = MultiplyLow(c0, 0xd2511f53), p2 = MultiplyLow(c2, 0xcd9e8d57);
    c0 = (p2 >> 32) ^ c1 ^ uint64_t{key0};
    c1 = p2 & kLow;
    c2 = (p0 >> 32) ^ c3 ^ uint64_t{key1};
    c3 = p0 & kLow;
  }
  const Wide first = c0 | c1 << 32, second = c2 | c3 << 32;
  const Wide pairs[2] = {__builtin_shuffle(first, second, front),
                         __builtin_shuffle(first, second, back)};
  memcpy(out, pairs, sizeof pairs);
}

// Process row b of the batch at all time steps (cpu.h). The random numbers of the T H units follow
// in order. The low 23 bits become a number in [0, 1), as in TensorFlow.
static void DropoutRow(const lm::Dropout& dropout, int64_t b) {
  const lm::Dropout d = dropout;  // a copy, which no store can change
  const uint64_t first = d.counter_low + (uint64_t)(b * ((d.T * d.H + 3) / 4));
  uint32_t bits[3 * kLanes];  // one more vector: the last load may exceed the data
  for (int64_t t = 0; t < d.T; ++t) {
    const int64_t row = (t * d.B + b) * d.H;
    for (int64_t u = 0, n; u < d.H; u += n) {
      const int64_t number = t * d.H + u, skipped = number % 4;
      Philox(d.key, first + (uint64_t)(number / 4), d.counter_high, bits);
      n = Least(4 * kCounters - skipped, d.H - u);
      for (int64_t i = 0; i < n; i += kLanes) {
        IVec mantissa;
        memcpy(&mantissa, bits + skipped + i, sizeof mantissa);
        const Vec uniform = (Vec)((mantissa & 0x7fffff) | 0x3f800000) - 1.f;
        const Vec kept = Load(d.x + row + u + i, n - i) * d.scale;
        Store(d.y + row + u + i, Select(uniform < Set(d.keep_prob), kept, Vec{}), n - i);
      }
    }
  }
}

}  // namespace LM_ISA

#endif  // LM_KERNELS_DROPOUT_H_
