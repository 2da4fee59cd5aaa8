// Interface between ops.cc (TensorFlow, baseline CPU) and isa.cc (arithmetic per instruction set).
#ifndef LM_KERNELS_CPU_H_
#define LM_KERNELS_CPU_H_

#include <stdint.h>

namespace lm {

// One LSTM layer over one window. Row-major; T time, B rows, H hidden units, gates i, j, f, o.
// A "unit" is the 4 bytes of one broadcast in the inner loop: one float32 or two bfloat16.
struct Lstm {
  int64_t T, B, H;
  const float* weights;  // [H, 4H], recurrent
  float* panels;         // the weights as packed by Pack, PanelFloats(H) floats
  float* scratch;        // ScratchFloats(B, H) floats (bfloat16 only)
  const float* keep;     // [T, B]: 0 where the state starts anew, otherwise 1; or null
  // Forward. `gates` holds x Wx on entry, the activated gates on return.
  const float* bias;  // [4H]
  float* h;           // [T + 1, B, H]; the first contains the initial state
  float* c;           // [T + 1, B, H]
  float* gates;       // [T, B, 4H]
  // Backward. `gates` holds the activated gates on entry, d loss / d z on return.
  const float* dh;       // [T, B, H]
  const float* dh_last;  // [B, H]
  float* dh0;            // [B, H]
  float* dc;             // [B, H]: d loss / d c_last on entry, d loss / d c0 on return

  // Whether row b starts anew before step t.
  bool StartsAnew(int64_t t, int64_t b) const { return keep && keep[t * B + b] == 0; }
};

// One direction of the recurrence. Step(t, block, row0, row1) may run in parallel for different
// blocks and rows. Step t needs all blocks of its rows at step t - 1 (backward: t + 1).
struct LstmDirection {
  int64_t (*Blocks)(int64_t H);
  int64_t (*PanelFloats)(int64_t H);
  int64_t (*ScratchFloats)(int64_t B, int64_t H);
  void (*Pack)(const Lstm&, int64_t part);  // one of Blocks(H) parts of the weights
  void (*Start)(const Lstm&, int64_t row0, int64_t row1);  // before the first step
  void (*Step)(const Lstm&, int64_t t, int64_t block, int64_t row0, int64_t row1);
};

// C[M, N] = A[M, K] B[K, N], all dense. A(m, k) is at a[m * lda + k]. B(k, n) is at
// b[n * ldb + k], or at b[k * ldb + n] if b_across.
struct Gemm {
  int64_t M, N, K;
  const void* a;
  int64_t lda;
  bool a_bf16;
  const void* b;
  int64_t ldb;
  bool b_bf16, b_across;
  float* c;
  float* a_units;    // [M, ld_units] if NeedsPackRows, otherwise nullptr
  int64_t ld_units;  // RowUnits(K)
};

struct GemmFormat {
  int64_t widest;  // this many vectors of columns at most should be one block
  int64_t (*RowUnits)(int64_t K);
  int64_t (*PanelFloats)(int64_t K, int64_t vectors);
  bool (*NeedsPackRows)(const Gemm&);
  void (*PackRows)(const Gemm&, int64_t row0, int64_t row1);
  void (*Block)(const Gemm&, int64_t row0, int64_t row1, int64_t v0, int64_t v1, float* panels);
};

// The summation order of tokens, or of rows of a matrix: micro-batch by micro-batch (tokens.h).
struct SumOrder {
  const int64_t* tokens;  // token indices; -1 is a missing token (zero)
  const int64_t* ends;    // [count]: end of each micro-batch's tokens
  int64_t count;          // 1 to kMostMicroBatches
};
constexpr int kTreeLevels = 8;
constexpr int64_t kMostMicroBatches = int64_t{1} << kTreeLevels;

// C[M, N] = A^T B, summed over tokens: the gradient of weights.
struct TokenSum {
  int64_t M, N;
  SumOrder order;  // each micro-batch has a multiple of TokenSumFormat::multiple tokens
  const void* a;   // [tokens, M]
  bool a_bf16;
  const void* b;   // [tokens, N]
  bool b_bf16;
  float* c;
  float* a_units;    // [M, ld_units]
  int64_t ld_units;  // RowUnits(number of tokens)
};

struct TokenSumFormat {
  int64_t multiple;
  int64_t (*Widest)(int64_t tokens);  // this many vectors of columns at most should be one block
  int64_t (*RowUnits)(int64_t tokens);
  int64_t (*PanelFloats)(int64_t tokens, int64_t vectors);
  void (*PackRows)(const TokenSum&, int64_t token0, int64_t token1);  // token0: k * 32
  void (*Block)(const TokenSum&, int64_t row0, int64_t row1, int64_t v0, int64_t v1, float* panels);
};

// Cross-entropy of rows of logits + bias, and the gradient scale * (softmax - onehot).
struct Softmax {
  int64_t V;
  const float* logits;     // [N, V]
  const float* bias;       // [V]
  const int64_t* targets;  // [N]
  const float* scale;      // [N]
  float* nll;              // [N]
  void* dlogits;           // [N, V], may alias the logits; nullptr if no gradient
  bool bf16;               // dlogits are bfloat16
};

// Cross-entropy of N tokens over the V words of a cluster (cluster.h). log_sum has base 2.
struct Cluster {
  int64_t N, V, K;
  bool bf16;               // round the factors of products to bfloat16
  const float* hidden;     // [N, K], already rounded
  const float* words;      // [V, K]
  const int64_t* targets;  // [N], words of the cluster
  // First pass: for each chunk of the words, the largest logit, and the sum relative to it.
  float* max;      // [chunks, N]
  float* sum;      // [chunks, N]
  float* shift;    // [N]: subtracted from the logits; 0 unless they are large
  float* log_sum;  // [N]: the logarithm of the sum over all words, after the shift
  float* nll;      // [N]
  // Second pass.
  const float* hidden_units;  // [K, ld_units]: hidden, transposed
  int64_t ld_units;
  const float* scale;  // [N]: d loss / d nll
  SumOrder order;
  float* dwords;   // [V, K]
  float* dhidden;  // [chunks, N, K]
};

// The number of words of a chunk, which one thread processes. Results depend on this size.
constexpr int64_t ClusterChunk(int64_t K) {
  const int64_t words = 32768 / K / 256 * 256;
  return words < 256 ? 256 : words > 4096 ? 4096 : words;
}

struct ClusterFormat {
  int64_t (*ScratchFloats)(int64_t N, int64_t K);
  void (*PackHidden)(const float* hidden, int64_t N, int64_t K, bool bf16, float* rounded,
                     float* transposed, int64_t ld);
  void (*LogSums)(const Cluster&, int64_t chunk, float* scratch);
  void (*Losses)(const Cluster&, int64_t chunks);
  void (*Gradients)(const Cluster&, int64_t chunk, float* scratch);
};

// y = x * scale if the random number of the unit is below keep_prob, otherwise 0. Each row of the
// batch owns ceil(T H / 4) counters of the generator. The low half of row 0 is counter_low.
struct Dropout {
  int64_t T, B, H;
  const float* x;  // [T, B, H]
  float* y;        // [T, B, H], may alias x
  float keep_prob, scale;
  uint64_t key, counter_low, counter_high;
};

struct Kernels {
  const char* name;
  int lanes;           // float32 numbers in a vector
  GemmFormat gemm[2];  // [0] float32, [1] bfloat16 products
  TokenSumFormat token_sum[2];
  LstmDirection lstm_forward[2], lstm_backward[2];
  // Processes `count` rows. bias_sum[V]: column sums of their dlogits. buffer[V] is scratch.
  void (*SoftmaxRows)(const Softmax&, const int64_t* rows, int64_t count, float* bias_sum,
                      float* buffer);
  ClusterFormat cluster;
  void (*DropoutRow)(const Dropout&, int64_t row);
  // The sums of n columns of x with row stride ld. Bitwise identical on every CPU.
  void (*ColumnSums)(const float* x, int64_t ld, const SumOrder&, int64_t n, float* sums);
  double (*SumOfSquares)(const float* x, int64_t n);  // bitwise identical on every CPU
};

}  // namespace lm

#endif  // LM_KERNELS_CPU_H_
