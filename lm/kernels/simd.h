// Vectors of the instruction set that this file is compiled for, and functions that an LSTM needs.
//
// isa.cc is compiled once per instruction set. All code here is in a namespace that is named after
// the instruction set, and no C++ library header is included. Otherwise, the linker could use the
// AVX-512 version of a shared inline function in code for an older CPU, which would crash.
#ifndef LM_KERNELS_SIMD_H_
#define LM_KERNELS_SIMD_H_

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LM_LANES 16
#elif defined(__AVX2__)
#define LM_LANES 8
#else
#define LM_LANES 4
#endif

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LM_INLINE static inline __attribute__((always_inline))
#define LM_LAMBDA __attribute__((always_inline))  // so that a constant length folds

namespace LM_ISA {

constexpr int kLanes = LM_LANES;

LM_INLINE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// GCC's vector types: arithmetic and comparison are elementwise, and compile to instructions of the
// target (including NEON).
//
// In float32, all instruction sets with a fused multiply-add compute the same bits. Each element of
// a result has one order of operations, and each operation is rounded once. The compiler never
// forms a fused multiply-add itself (-ffp-contract=off): MulAdd says where they are. Sums over lanes
// use Lanes16.
typedef float Vec __attribute__((vector_size(4 * LM_LANES)));
typedef int32_t IVec __attribute__((vector_size(4 * LM_LANES)));

LM_INLINE Vec Set(float x) { return x - Vec{}; }

// a * b + c, rounded once if the CPU has a fused multiply-add.
LM_INLINE Vec MulAdd(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

LM_INLINE Vec Load(const float* p) {
  Vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

LM_INLINE void Store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

// A mask of the first n < kLanes lanes. n may be negative.
LM_INLINE uint16_t FirstLanes(int64_t n) { return n < 0 ? 0 : (1 << n) - 1; }

// The first n lanes; the remaining lanes are zero. n == kLanes is the fast, common case.
LM_INLINE Vec Load(const float* p, int64_t n) {
  if (n >= kLanes) return Load(p);
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(FirstLanes(n), p);
#else
  Vec v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
#endif
}

LM_INLINE void Store(float* p, Vec v, int64_t n) {
  if (n >= kLanes) return Store(p, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, FirstLanes(n), (__m512)v);
#else
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// Lanes of `a` where the mask is set (each lane is all ones or all zeros), otherwise lanes of `b`.
LM_INLINE Vec Select(IVec mask, Vec a, Vec b) {
  return mask ? a : b;
}

// NaN in x is kept: a comparison with NaN is false, so x is selected.
LM_INLINE Vec Clamp(Vec x, float low, float high) {
  x = Select(x < Set(low), Set(low), x);
  return Select(x > Set(high), Set(high), x);
}

// Whether all lanes are zero.
LM_INLINE bool IsZero(Vec x) {
  const IVec nonzero = x != 0.f;
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= nonzero[i];
  return !any;
}

LM_INLINE Vec Max(Vec a, Vec b) { return Select(a > b, a, b); }

// Sixteen partial sums: lane l adds elements l, l + 16, ... of a row.
struct Lanes16 {
  static constexpr int kVectors = 16 / kLanes;
  Vec sums[kVectors] = {};
};

// The sum of all lanes, in the same order for every number of lanes in a vector.
LM_INLINE float Sum(const Lanes16& lanes) {
  float tree[16];
  memcpy(tree, lanes.sums, sizeof tree);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) tree[i] += tree[i + half];
  return tree[0];
}

LM_INLINE float Max(Vec v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// exp(x) within 2 ulp if the result is a normal float32. Otherwise, the nearest normal number.
// 2^n * p(r), r = x - n ln 2 in two parts, with the Cephes library's minimax polynomial p (expf.c).
LM_INLINE Vec Exp(Vec x) {
  x = Clamp(x, -87.3f, 88.3f);
  // Adding 1.5 * 2^23 puts the nearest integer into the low bits of the sum.
  const Vec shift = Set(12582912.f);
  const Vec shifted = MulAdd(x, Set(1.44269504088896341f), shift);
  const Vec n = shifted - shift;
  Vec r = MulAdd(n, Set(-0.693359375f), x);
  r = MulAdd(n, Set(2.12194440e-4f), r);
  Vec p = Set(1.9875691500e-4f);
  p = MulAdd(p, r, Set(1.3981999507e-3f));
  p = MulAdd(p, r, Set(8.3334519073e-3f));
  p = MulAdd(p, r, Set(4.1665795894e-2f));
  p = MulAdd(p, r, Set(1.6666665459e-1f));
  p = MulAdd(p, r, Set(5.0000001201e-1f));
  p = MulAdd(p, r * r, r) + 1.f;
  const IVec exponent = ((IVec)shifted - (IVec)shift + 127) << 23;
  return p * (Vec)exponent;
}

// log(x) within 1 ulp for a positive, normal x. NaN stays NaN. x = 2^n (1 + m), with the Cephes
// library's polynomial for log(1 + m) (logf.c). Unlike logf, it does not depend on the C library.
LM_INLINE Vec Log(Vec x) {
  const IVec bits = (IVec)x - 0x3f3504f3;  // so that 1 + m is in [sqrt(1/2), sqrt(2))
  const Vec n = __builtin_convertvector(bits >> 23, Vec);
  const Vec m = (Vec)((bits & 0x7fffff) + 0x3f3504f3) - 1.f;
  const Vec z = m * m;
  Vec p = Set(7.0376836292e-2f);
  p = MulAdd(p, m, Set(-1.1514610310e-1f));
  p = MulAdd(p, m, Set(1.1676998740e-1f));
  p = MulAdd(p, m, Set(-1.2420140846e-1f));
  p = MulAdd(p, m, Set(1.4249322787e-1f));
  p = MulAdd(p, m, Set(-1.6668057665e-1f));
  p = MulAdd(p, m, Set(2.0000714765e-1f));
  p = MulAdd(p, m, Set(-2.4999993993e-1f));
  p = MulAdd(p, m, Set(3.3333331174e-1f));
  p = MulAdd(n, Set(-2.12194440e-4f), p * m * z);
  p = m + MulAdd(z, Set(-0.5f), p);
  return Select(x == x, MulAdd(n, Set(0.693359375f), p), x);
}

LM_INLINE Vec Sigmoid(Vec x) { return 1.f / (1.f + Exp(-x)); }

// tanh(x): the Cephes polynomial (tanhf.c) near zero, because 1 - 2 / (e^2x + 1) would cancel.
LM_INLINE Vec Tanh(Vec x) {
  const Vec z = x * x;
  Vec p = Set(-5.70498872745e-3f);
  p = MulAdd(p, z, Set(2.06390887954e-2f));
  p = MulAdd(p, z, Set(-5.37397155531e-2f));
  p = MulAdd(p, z, Set(1.33314422036e-1f));
  p = MulAdd(p, z, Set(-3.33332819422e-1f));
  p = MulAdd(p * z, x, x);
  const Vec e = 1.f - 2.f / (Exp(x + x) + 1.f);
  return Select((x < 0.625f) & (x > -0.625f), p, e);
}

// Round to the nearest bfloat16, ties to even. NaN stays NaN.
LM_INLINE Vec RoundToBf16(Vec x) {
  const IVec bits = (IVec)x;
  const IVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & (int32_t)0xffff0000;
  return Select(x == x, (Vec)rounded, x);
}

LM_INLINE void StoreBf16(uint16_t* p, Vec v, int64_t n) {
  typedef uint16_t Half __attribute__((vector_size(2 * LM_LANES)));
#if defined(__AVX512BF16__)
  const Half h = (Half)_mm512_cvtneps_pbh((__m512)v);
#else
  const Half h = __builtin_convertvector((IVec)RoundToBf16(v) >> 16, Half);
#endif
  if (n >= kLanes) {
    memcpy(p, &h, sizeof h);
    return;
  }
  for (int64_t i = 0; i < n; ++i) p[i] = h[i];
}

// The first n of the values at p as float32. The values at p may be bfloat16.
LM_INLINE Vec Load(const uint16_t* p, int64_t n) {
#if defined(__AVX512F__)  // GCC 12 would convert halves of the vector.
  const __m256i half = n >= kLanes ? _mm256_loadu_si256((const __m256i*)p)
                                   : _mm256_maskz_loadu_epi16(FirstLanes(n), p);
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
  IVec bits = {};
  if (n >= kLanes) {
    typedef uint16_t Half __attribute__((vector_size(2 * LM_LANES)));
    Half h;
    memcpy(&h, p, sizeof h);
    bits = __builtin_convertvector(h, IVec);
  } else {
    for (int64_t i = 0; i < n; ++i) bits[i] = p[i];
  }
  return (Vec)(bits << 16);
#endif
}

// Transpose kLanes vectors: swap blocks of 1, then 2, 4, ... lanes across the diagonal.
LM_INLINE void Transpose(Vec* rows) {
#pragma GCC unroll 4
  for (int s = 1; s < kLanes; s *= 2) {
    // Lanes kLanes and up belong to the second vector. Without the initial values, GCC 12 would
    // insert the lanes one by one at run time.
    IVec low = {}, high = {};
    for (int j = 0; j < kLanes; ++j) {
      low[j] = j & s ? kLanes + j - s : j;
      high[j] = j & s ? kLanes + j : j + s;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & s) continue;
      const Vec a = rows[i], b = rows[i + s];
      rows[i] = __builtin_shuffle(a, b, low);
      rows[i + s] = __builtin_shuffle(a, b, high);
    }
  }
}

}  // namespace LM_ISA

#endif  // LM_KERNELS_SIMD_H_
