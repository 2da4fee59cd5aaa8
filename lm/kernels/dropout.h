// Dropout whose mask is a function of counters: made here, used and forgotten, in either direction.
#ifndef LM_KERNELS_DROPOUT_H_
#define LM_KERNELS_DROPOUT_H_

#include "cpu.h"
#include "simd.h"

namespace LM_ISA {

// The four numbers of each of the counters (low, high), (low + 1, high), ...: Philox4x32-10
// (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2).
LM_INLINE void Philox(uint64_t key, uint64_t low, uint64_t high, uint32_t* out) {
  uint32_t c[4][kLanes];
  for (int i = 0; i < kLanes; ++i) {
    c[0][i] = (uint32_t)(low + i);
    c[1][i] = (uint32_t)((low + i) >> 32);
    c[2][i] = (uint32_t)high;
    c[3][i] = (uint32_t)(high >> 32);
  }
  uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9e3779b9u, key1 += 0xbb67ae85u) {
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t p0 = (uint64_t)c[0][i] * 0xd2511f53u, p2 = (uint64_t)c[2][i] * 0xcd9e8d57u;
      c[0][i] = (uint32_t)(p2 >> 32) ^ c[1][i] ^ key0;
      c[1][i] = (uint32_t)p2;
      c[2][i] = (uint32_t)(p0 >> 32) ^ c[3][i] ^ key1;
      c[3][i] = (uint32_t)p0;
    }
  }
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = c[j][i];
}

// Row b of the batch at all time steps; see cpu.h. Its numbers are those of its T H units in order,
// in [0, 1) from the low 23 bits, as TensorFlow makes them.
static void DropoutRow(const lm::Dropout& d, int64_t b) {
  const uint64_t first = d.counter_low + (uint64_t)(b * ((d.T * d.H + 3) / 4));
  const float scale = 1.f / d.keep_prob;
  uint32_t bits[5 * kLanes];  // one vector more than is made: the last load may reach past the end
  for (int64_t t = 0; t < d.T; ++t) {
    const int64_t row = (t * d.B + b) * d.H;
    for (int64_t u = 0, n; u < d.H; u += n) {
      const int64_t number = t * d.H + u, skipped = number % 4;
      Philox(d.key, first + (uint64_t)(number / 4), d.counter_high, bits);
      n = Least(4 * kLanes - skipped, d.H - u);
      for (int64_t i = 0; i < n; i += kLanes) {
        IVec mantissa;
        memcpy(&mantissa, bits + skipped + i, sizeof mantissa);
        const Vec uniform = (Vec)((mantissa & 0x7fffff) | 0x3f800000) - 1.f;
        const Vec kept = Load(d.x + row + u + i, n - i) * scale;
        Store(d.y + row + u + i, Select(uniform < Set(d.keep_prob), kept, Vec{}), n - i);
      }
    }
  }
}

}  // namespace LM_ISA

#endif  // LM_KERNELS_DROPOUT_H_
