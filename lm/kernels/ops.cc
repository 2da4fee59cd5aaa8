// The TensorFlow ops: shapes, checks, memory and threads. Except for element-wise ops at the end,
// isa.cc contains the arithmetic.
//
// CPU kernels only. Results do not depend on the number of threads.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cmath>
#include <string>

#include "cpu.h"
#include "parallel.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace generic { extern const lm::Kernels kernels; }
#if defined(__x86_64__)
// Weak: null if the compiler did not support the instruction set, so that build.py omitted it.
#define LM_IF_BUILT __attribute__((weak)) extern const lm::Kernels kernels
namespace avx2 { LM_IF_BUILT; }
namespace avx512 { LM_IF_BUILT; }
namespace avx512bf16 { LM_IF_BUILT; }
namespace amx { LM_IF_BUILT; }
#endif

namespace lm {
namespace {

using namespace tensorflow;  // NOLINT: an op file is written in TensorFlow's terms
using shape_inference::InferenceContext;
using shape_inference::ShapeHandle;

#if defined(__x86_64__)
// Uses cpuid, leaf 7.1: g++ before 10 does not have __builtin_cpu_supports("avx512bf16").
bool HasAvx512Bf16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1 << 5);
}

// Linux requires a request before a process uses tiles, which add 8 KB of state per thread.
bool MayUseAmx() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBf16 = 1 << 22, kTiles = 1 << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || ~edx & (kBf16 | kTiles)) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // <asm/prctl.h>, too new for some
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// Return the best build for this CPU, or the build that LM_KERNELS_ISA names if the CPU can run it.
const Kernels& Cpu() {
  static const Kernels* const chosen = [] {
    std::vector<const Kernels*> usable = {&generic::kernels};
#if defined(__x86_64__)
    const auto add = [&](const Kernels* k) {
      if (k) usable.push_back(k);
    };
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      add(&avx2::kernels);
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        add(&avx512::kernels);
        if (HasAvx512Bf16()) {
          add(&avx512bf16::kernels);
          if (MayUseAmx()) add(&amx::kernels);
        }
      }
    }
#endif
    const char* wanted = getenv("LM_KERNELS_ISA");
    for (const Kernels* k : usable)
      if (wanted && std::string(wanted) == k->name) return k;
    return usable.back();
  }();
  return *chosen;
}

int64_t Vectors(int64_t N) { return (N + Cpu().lanes - 1) / Cpu().lanes; }  // of N columns

template <class Fn>
void ParallelFor(OpKernelContext* ctx, int64_t steps, int64_t blocks, const Fn& fn) {
  const auto* workers = ctx->device()->tensorflow_cpu_worker_threads();
  RunSteps(workers->workers, workers->num_threads, steps, blocks, fn);
}

Status CheckShape(const char* name, const Tensor& tensor, const TensorShape& shape) {
  if (tensor.shape() == shape) return OkStatus();
  return errors::InvalidArgument(name, " has shape ", tensor.shape().DebugString(), ", not ",
                                 shape.DebugString());
}

const float* Floats(const Tensor& tensor) { return tensor.flat<float>().data(); }
float* Floats(Tensor* tensor) { return tensor->flat<float>().data(); }

// The tokens of some rows, [T, rows], micro-batch by micro-batch, each time step by time step.
struct TokenOrder {
  std::vector<int64_t> tokens, ends;
  SumOrder view() const { return {tokens.data(), ends.data(), static_cast<int64_t>(ends.size())}; }
};

// `rows` contains the rows of each micro-batch in order. If empty, all tokens are one micro-batch.
// Each micro-batch is padded to a multiple of `multiple` with missing tokens.
Status OrderTokens(int64_t tokens, const std::vector<int64_t>& rows, int64_t multiple,
                   TokenOrder* order) {
  const std::vector<int64_t> micro_batches = rows.empty() ? std::vector<int64_t>{tokens} : rows;
  int64_t all = 0;
  for (const int64_t micro_batch : micro_batches) {
    if (micro_batch < 0) return errors::InvalidArgument("a micro-batch of ", micro_batch, " rows");
    all += micro_batch;
  }
  const int64_t count = micro_batches.size();
  if (count > kMostMicroBatches || (all ? tokens % all : tokens) != 0)
    return errors::InvalidArgument(tokens, " tokens are not those of ", count,
                                   " micro-batches with ", all, " rows, at most ",
                                   kMostMicroBatches);
  int64_t first = 0;
  for (const int64_t micro_batch : micro_batches) {
    for (int64_t step = 0; step < tokens; step += all)
      for (int64_t row = 0; row < micro_batch; ++row) order->tokens.push_back(step + first + row);
    while (order->tokens.size() % multiple != 0) order->tokens.push_back(-1);
    order->ends.push_back(order->tokens.size());
    first += micro_batch;
  }
  return OkStatus();
}

// The tokens [0, `tokens`) are already ordered by micro-batch. `ends` contains the end of each.
Status OrderByEnds(int64_t tokens, const Tensor& ends, int64_t multiple, TokenOrder* order) {
  if (ends.dims() != 1 || ends.NumElements() > kMostMicroBatches)
    return errors::InvalidArgument("the ends of the micro-batches have shape ",
                                   ends.shape().DebugString(), ", not [1] to [", kMostMicroBatches,
                                   "]");
  int64_t token = 0;
  for (int64_t i = 0; i < ends.NumElements(); ++i) {
    const int64_t end = ends.flat<int64_t>()(i);
    if (end < token || end > tokens)
      return errors::InvalidArgument("a micro-batch ends at ", end, ", not between ", token,
                                     " and ", tokens);
    while (token < end) order->tokens.push_back(token++);
    while (order->tokens.size() % multiple != 0) order->tokens.push_back(-1);
    order->ends.push_back(order->tokens.size());
  }
  if (token == tokens) return OkStatus();
  return errors::InvalidArgument("the last micro-batch ends at ", token, ", not at ", tokens);
}

// Run fn(row0, row1, v0, v1, panels) in parallel for blocks of a matrix of M rows and `vectors`
// vectors of columns. A block has at most `widest` vectors, so that a row is used for many vectors
// while the panels stay in the L2 cache. All threads get the same number of pairs of vectors. The
// remaining pairs, fewer than threads, are divided by rows too. Return false if out of memory.
template <class Fn>
bool RunBlocks(OpKernelContext* ctx, int64_t M, int64_t vectors, int64_t widest,
               int64_t (*panel_floats)(int64_t, int64_t), int64_t K, const Fn& fn) {
  const int64_t threads = ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
  const int64_t pairs = (vectors + 1) / 2, rest = pairs % threads, share = pairs / threads;
  const int64_t columns = std::min((2 * share + widest - 1) / widest, share);  // per thread
  const int64_t rows = rest ? std::max<int64_t>(1, std::min(threads / rest, M / 32)) : 0;
  std::atomic<bool> out_of_memory{false};
  const auto run = [&](int64_t row0, int64_t row1, int64_t pair0, int64_t pair1) {
    Scratch panels(panel_floats(K, 2 * (pair1 - pair0)));
    if (panels.data())
      fn(row0, row1, 2 * pair0, 2 * pair1, panels.data());
    else
      out_of_memory = true;
  };
  ParallelFor(ctx, 1, threads * (columns + 1), [&](int64_t, int64_t block) {
    const int64_t thread = block / (columns + 1), column = block % (columns + 1);
    if (column < columns) {
      const int64_t pair = thread * share;
      run(0, M, pair + share * column / columns, pair + share * (column + 1) / columns);
    } else if (thread < rest * rows) {
      const int64_t pair = threads * share + thread / rows, row = thread % rows;
      run(M * row / rows, M * (row + 1) / rows, pair, pair + 1);
    }
  });
  return !out_of_memory;
}

constexpr int64_t kPackedRows = 32;

// Run fn(first, end) in parallel for blocks of rows or tokens, to pack them.
template <class Fn>
void RunRows(OpKernelContext* ctx, int64_t M, const Fn& fn) {
  ParallelFor(ctx, 1, (M + kPackedRows - 1) / kPackedRows, [&](int64_t, int64_t block) {
    fn(block * kPackedRows, std::min(M, (block + 1) * kPackedRows));
  });
}

// ---- Matrix product -----------------------------------------------------------------------------

REGISTER_OP("LmMatMul")
    .Input("a: A")  // [M, K]
    .Input("b: B")  // [K, N], or [N, K] if transpose_b
    .Attr("A: {float, bfloat16}")
    .Attr("B: {float, bfloat16}")
    .Attr("transpose_b: bool = false")
    .Attr("bf16: bool = false")  // round a and b to bfloat16
    .Output("c: float")          // [M, N]
    .SetShapeFn([](InferenceContext* c) {
      bool transpose_b;
      TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
      ShapeHandle a, b;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &a));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &b));
      c->set_output(0, c->Matrix(c->Dim(a, 0), c->Dim(b, transpose_b ? 0 : 1)));
      return OkStatus();
    });

class MatMulOp : public OpKernel {
 public:
  explicit MatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_b", &transpose_b_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bf16", &bf16_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &a = ctx->input(0), &b = ctx->input(1);
    OP_REQUIRES(ctx, a.dims() == 2 && b.dims() == 2 &&
                         a.dim_size(1) == b.dim_size(transpose_b_ ? 1 : 0),
                errors::InvalidArgument("cannot multiply ", a.shape().DebugString(), " and ",
                                        b.shape().DebugString()));
    Gemm p = {};
    p.M = a.dim_size(0);
    p.K = a.dim_size(1);
    p.N = b.dim_size(transpose_b_ ? 0 : 1);
    p.a = a.data();
    p.lda = p.K;
    p.a_bf16 = a.dtype() == DT_BFLOAT16;
    p.b = b.data();
    p.ldb = b.dim_size(1);
    p.b_bf16 = b.dtype() == DT_BFLOAT16;
    p.b_across = !transpose_b_;
    Tensor* c;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {p.M, p.N}, &c));
    p.c = Floats(c);
    if (p.M == 0 || p.N == 0) return;
    OP_REQUIRES(ctx, p.K > 0, errors::InvalidArgument("a product over no elements"));

    const GemmFormat& format = Cpu().gemm[bf16_];
    const bool pack_rows = format.NeedsPackRows(p);
    p.ld_units = format.RowUnits(p.K);
    Scratch a_units(pack_rows ? p.M * p.ld_units : 0);
    p.a_units = pack_rows ? a_units.data() : nullptr;
    bool memory = !pack_rows || p.a_units;
    if (pack_rows && memory)
      RunRows(ctx, p.M, [&](int64_t row0, int64_t row1) { format.PackRows(p, row0, row1); });
    memory = memory && RunBlocks(ctx, p.M, Vectors(p.N), format.widest, format.PanelFloats,
                                 p.K, [&](int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                                          float* panels) {
                                   format.Block(p, row0, row1, v0, v1, panels);
                                 });
    OP_REQUIRES(ctx, memory, errors::ResourceExhausted("no memory for a product"));
  }

 private:
  bool transpose_b_, bf16_;
};
REGISTER_KERNEL_BUILDER(Name("LmMatMul").Device(DEVICE_CPU), MatMulOp);

// ---- Sums over tokens ---------------------------------------------------------------------------

REGISTER_OP("LmTokenSum")
    .Input("a: A")  // [N, K]
    .Input("b: B")  // [N, M]
    .Input("ends: int64")  // see OrderByEnds; if empty, OrderTokens applies
    .Attr("A: {float, bfloat16}")
    .Attr("B: {float, bfloat16}")
    .Attr("micro_batches: list(int) = []")  // the rows of each
    .Attr("bf16: bool = false")  // round a and b to bfloat16
    .Output("c: float")  // [K, M]: a^T b
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle a, b;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &a));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 2, &b));
      c->set_output(0, c->Matrix(c->Dim(a, 1), c->Dim(b, 1)));
      return OkStatus();
    });

class TokenSumOp : public OpKernel {
 public:
  explicit TokenSumOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("micro_batches", &micro_batches_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bf16", &bf16_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &a = ctx->input(0), &b = ctx->input(1);
    OP_REQUIRES(ctx, a.dims() == 2 && b.dims() == 2 && a.dim_size(0) == b.dim_size(0),
                errors::InvalidArgument("cannot add up products of ", a.shape().DebugString(),
                                        " and ", b.shape().DebugString()));
    const TokenSumFormat& format = Cpu().token_sum[bf16_];
    TokenOrder order;
    const Tensor& ends = ctx->input(2);
    OP_REQUIRES_OK(ctx, ends.NumElements()
                            ? OrderByEnds(a.dim_size(0), ends, format.multiple, &order)
                            : OrderTokens(a.dim_size(0), micro_batches_, format.multiple, &order));
    lm::TokenSum p = {};
    p.M = a.dim_size(1);
    p.N = b.dim_size(1);
    p.order = order.view();
    p.a = a.data();
    p.a_bf16 = a.dtype() == DT_BFLOAT16;
    p.b = b.data();
    p.b_bf16 = b.dtype() == DT_BFLOAT16;
    Tensor* c;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {p.M, p.N}, &c));
    p.c = Floats(c);
    if (p.M == 0 || p.N == 0) return;

    const int64_t tokens = order.tokens.size();
    p.ld_units = format.RowUnits(tokens);
    Scratch a_units(p.M * p.ld_units);
    p.a_units = a_units.data();
    bool memory = p.a_units;
    if (memory) {
      RunRows(ctx, tokens, [&](int64_t first, int64_t end) { format.PackRows(p, first, end); });
      memory = RunBlocks(ctx, p.M, Vectors(p.N), format.Widest(tokens), format.PanelFloats,
                         tokens, [&](int64_t row0, int64_t row1, int64_t v0, int64_t v1,
                                     float* panels) {
                           format.Block(p, row0, row1, v0, v1, panels);
                         });
    }
    OP_REQUIRES(ctx, memory, errors::ResourceExhausted("no memory for a sum over tokens"));
  }

 private:
  std::vector<int64_t> micro_batches_;
  bool bf16_;
};
REGISTER_KERNEL_BUILDER(Name("LmTokenSum").Device(DEVICE_CPU), TokenSumOp);

// ---- Batched products ---------------------------------------------------------------------------

REGISTER_OP("LmBatchMatMul")
    .Input("a: float")  // [.., M, K], or [.., K, M] if transpose_a
    .Input("b: float")  // [.., K, N], or [.., N, K] if transpose_b
    .Attr("transpose_a: bool = false")  // not both
    .Attr("transpose_b: bool = false")
    .Output("c: float")  // [.., M, N], of factors that are rounded to bfloat16
    .SetShapeFn([](InferenceContext* c) {
      bool transpose_a, transpose_b;
      TF_RETURN_IF_ERROR(c->GetAttr("transpose_a", &transpose_a));
      TF_RETURN_IF_ERROR(c->GetAttr("transpose_b", &transpose_b));
      ShapeHandle a, b, batch, of_b, shape;
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(0), 2, &a));
      TF_RETURN_IF_ERROR(c->WithRankAtLeast(c->input(1), 2, &b));
      TF_RETURN_IF_ERROR(c->Subshape(a, 0, -2, &batch));
      TF_RETURN_IF_ERROR(c->Subshape(b, 0, -2, &of_b));
      TF_RETURN_IF_ERROR(c->Merge(batch, of_b, &batch));
      const auto M = c->Dim(a, transpose_a ? -1 : -2), N = c->Dim(b, transpose_b ? -2 : -1);
      TF_RETURN_IF_ERROR(c->Concatenate(batch, c->Matrix(M, N), &shape));
      c->set_output(0, shape);
      return OkStatus();
    });

// Each matrix is multiplied by one thread.
class BatchMatMulOp : public OpKernel {
 public:
  explicit BatchMatMulOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_a", &transpose_a_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("transpose_b", &transpose_b_));
    OP_REQUIRES(ctx, !(transpose_a_ && transpose_b_),
                errors::InvalidArgument("cannot transpose both factors"));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &a = ctx->input(0), &b = ctx->input(1);
    const int rank = a.dims();
    bool fits = rank >= 2 && b.dims() == rank;
    for (int i = 0; fits && i < rank - 2; ++i) fits = a.dim_size(i) == b.dim_size(i);
    fits = fits && a.dim_size(rank - (transpose_a_ ? 2 : 1)) ==
                       b.dim_size(rank - (transpose_b_ ? 1 : 2));
    OP_REQUIRES(ctx, fits,
                errors::InvalidArgument("cannot multiply ", a.shape().DebugString(), " and ",
                                        b.shape().DebugString()));
    const int64_t M = a.dim_size(rank - (transpose_a_ ? 1 : 2));
    const int64_t K = a.dim_size(rank - (transpose_a_ ? 2 : 1));
    const int64_t N = b.dim_size(rank - (transpose_b_ ? 2 : 1));
    TensorShape shape = a.shape();
    shape.set_dim(rank - 2, M);
    shape.set_dim(rank - 1, N);
    Tensor* c;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &c));
    if (shape.num_elements() == 0) return;
    if (K == 0) {
      std::fill_n(c->flat<float>().data(), c->NumElements(), 0.f);
      return;
    }
    TokenOrder order;
    if (transpose_a_)
      OP_REQUIRES_OK(ctx, OrderTokens(K, {}, Cpu().token_sum[1].multiple, &order));
    const int64_t count = shape.num_elements() / (M * N);
    std::atomic<bool> out_of_memory{false};
    ParallelFor(ctx, 1, count, [&](int64_t, int64_t i) {
      const float *from_a = Floats(a) + i * M * K, *from_b = Floats(b) + i * K * N;
      float* to = Floats(c) + i * M * N;
      const bool memory = transpose_a_ ? SumOverRows(M, N, order, from_a, from_b, to)
                                       : Multiply(M, K, N, from_a, from_b, to);
      if (!memory) out_of_memory = true;
    });
    OP_REQUIRES(ctx, !out_of_memory, errors::ResourceExhausted("no memory for a product"));
  }

 private:
  // Run block(v0, v1, panels) for blocks of at most `widest` vectors of columns.
  template <class Fn>
  static bool RunColumns(int64_t vectors, int64_t widest, int64_t floats, const Fn& block) {
    Scratch panels(floats);
    if (!panels.data()) return false;
    for (int64_t v = 0; v < vectors; v += widest)
      block(v, std::min(vectors, v + widest), panels.data());
    return true;
  }

  // c[M, N] = a[M, K] b.
  bool Multiply(int64_t M, int64_t K, int64_t N, const float* a, const float* b, float* c) const {
    const GemmFormat& format = Cpu().gemm[1];
    Gemm p = {M, N, K, a, K, false, b, transpose_b_ ? K : N, false, !transpose_b_, c};
    const bool pack_rows = format.NeedsPackRows(p);
    p.ld_units = format.RowUnits(K);
    Scratch a_units(pack_rows ? M * p.ld_units : 0);
    if (!a_units.data()) return false;
    if (pack_rows) {
      p.a_units = a_units.data();
      format.PackRows(p, 0, M);
    }
    const int64_t vectors = Vectors(N), widest = std::min(vectors, format.widest);
    return RunColumns(vectors, widest, format.PanelFloats(K, widest + widest % 2),
                      [&](int64_t v0, int64_t v1, float* panels) {
                        format.Block(p, 0, M, v0, v1, panels);
                      });
  }

  // c[M, N] = a[K, M]^T b[K, N] for K rows in this order.
  static bool SumOverRows(int64_t M, int64_t N, const TokenOrder& order, const float* a,
                          const float* b, float* c) {
    const TokenSumFormat& format = Cpu().token_sum[1];
    const int64_t tokens = order.tokens.size();
    lm::TokenSum p = {M, N, order.view(), a, false, b, false, c};
    p.ld_units = format.RowUnits(tokens);
    Scratch a_units(M * p.ld_units);
    p.a_units = a_units.data();
    if (!p.a_units) return false;
    for (int64_t first = 0; first < tokens; first += kPackedRows)
      format.PackRows(p, first, std::min(tokens, first + kPackedRows));
    const int64_t vectors = Vectors(N);
    const int64_t widest = std::min(vectors, format.Widest(tokens));
    return RunColumns(vectors, widest, format.PanelFloats(tokens, widest + widest % 2),
                      [&](int64_t v0, int64_t v1, float* panels) {
                        format.Block(p, 0, M, v0, v1, panels);
                      });
  }

  bool transpose_a_, transpose_b_;
};
REGISTER_KERNEL_BUILDER(Name("LmBatchMatMul").Device(DEVICE_CPU), BatchMatMulOp);

// sums[v] = the sum of column v of x [.., V].
void SumColumns(OpKernelContext* ctx, const float* x, int64_t V, const SumOrder& order,
                float* sums) {
  constexpr int64_t kColumns = 512;
  ParallelFor(ctx, 1, (V + kColumns - 1) / kColumns, [&](int64_t, int64_t block) {
    const int64_t v = block * kColumns;
    Cpu().ColumnSums(x + v, V, order, std::min(kColumns, V - v), sums + v);
  });
}

REGISTER_OP("LmColumnSums")
    .Input("x: float")  // [N, V]
    .Attr("micro_batches: list(int) = []")
    .Output("sums: float")  // [V]
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle x;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &x));
      c->set_output(0, c->Vector(c->Dim(x, 1)));
      return OkStatus();
    });

class ColumnSumsOp : public OpKernel {
 public:
  explicit ColumnSumsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("micro_batches", &micro_batches_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& x = ctx->input(0);
    OP_REQUIRES(ctx, x.dims() == 2, errors::InvalidArgument("x is not [N, V]"));
    TokenOrder order;
    OP_REQUIRES_OK(ctx, OrderTokens(x.dim_size(0), micro_batches_, 1, &order));
    Tensor* sums;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {x.dim_size(1)}, &sums));
    SumColumns(ctx, Floats(x), x.dim_size(1), order.view(), Floats(sums));
  }

 private:
  std::vector<int64_t> micro_batches_;
};
REGISTER_KERNEL_BUILDER(Name("LmColumnSums").Device(DEVICE_CPU), ColumnSumsOp);

// ---- The recurrence -----------------------------------------------------------------------------

// Weights of at most this many bytes stay in one core's L2 cache. If the weights fit, each thread
// processes independent rows of the batch at all steps. Otherwise, units are divided in each step.
constexpr int64_t kCacheFloats = (768 << 10) / sizeof(float);

void RunLstm(OpKernelContext* ctx, const LstmDirection& direction, Lstm s, int64_t first_t,
             int64_t last_t) {
  const int64_t panel_floats = direction.PanelFloats(s.H);
  Scratch panels(panel_floats), scratch(direction.ScratchFloats(s.B, s.H));
  s.panels = panels.data();
  s.scratch = scratch.data();
  OP_REQUIRES(ctx, s.panels && s.scratch, errors::ResourceExhausted("no memory for the weights"));
  const int64_t blocks = direction.Blocks(s.H), steps = std::abs(last_t - first_t) + 1;
  const int64_t sign = last_t < first_t ? -1 : 1;
  ParallelFor(ctx, 1, blocks, [&](int64_t, int64_t block) { direction.Pack(s, block); });
  direction.Start(s, 0, s.B);
  const int64_t threads = ctx->device()->tensorflow_cpu_worker_threads()->num_threads;
  if (panel_floats <= kCacheFloats && s.B >= 4 * threads) {
    ParallelFor(ctx, 1, threads, [&](int64_t, int64_t group) {
      const int64_t row0 = s.B * group / threads, row1 = s.B * (group + 1) / threads;
      for (int64_t step = 0; step < steps; ++step)
        for (int64_t block = 0; block < blocks; ++block)
          direction.Step(s, first_t + sign * step, block, row0, row1);
    });
  } else {
    ParallelFor(ctx, steps, blocks, [&](int64_t step, int64_t block) {
      direction.Step(s, first_t + sign * step, block, 0, s.B);
    });
  }
}

Status ReadKeep(const Tensor& keep, Lstm* s) {
  if (keep.NumElements() == 0) return OkStatus();
  s->keep = Floats(keep);
  return CheckShape("keep", keep, {s->T, s->B});
}

REGISTER_OP("LmLstm")
    .Input("projection: float")  // [T, B, 4H]: x Wx
    .Input("bias: float")        // [4H]
    .Input("weights: float")     // [H, 4H]
    .Input("h0: float")          // [B, H]
    .Input("c0: float")          // [B, H]
    .Input("keep: float")        // [T, B]: factors 0 or 1 of the state before each step; or [0]
    .Attr("bf16: bool = false")
    .Output("h: float")      // [T + 1, B, H]: h0, then h at each step
    .Output("c: float")      // [T + 1, B, H]
    .Output("gates: float")  // [T, B, 4H], activated
    .SetShapeFn([](InferenceContext* c) {
      ShapeHandle projection, state, states;
      shape_inference::DimensionHandle times;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 3, &projection));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(3), 2, &state));
      TF_RETURN_IF_ERROR(c->Add(c->Dim(projection, 0), 1, &times));
      TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(times), state, &states));
      c->set_output(0, states);
      c->set_output(1, states);
      c->set_output(2, projection);
      return OkStatus();
    });

class LstmOp : public OpKernel {
 public:
  explicit LstmOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bf16", &bf16_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &projection = ctx->input(0), &bias = ctx->input(1), &weights = ctx->input(2);
    const Tensor &h0 = ctx->input(3), &c0 = ctx->input(4);
    OP_REQUIRES(ctx, projection.dims() == 3 && h0.dims() == 2,
                errors::InvalidArgument("projection and h0 have shapes ",
                                        projection.shape().DebugString(), " and ",
                                        h0.shape().DebugString(), ", not [T, B, 4H] and [B, H]"));
    Lstm s = {};
    s.T = projection.dim_size(0);
    s.B = h0.dim_size(0);
    s.H = h0.dim_size(1);
    OP_REQUIRES(ctx, s.T > 0 && s.H > 0, errors::InvalidArgument("no time step or no unit"));
    OP_REQUIRES_OK(ctx, CheckShape("projection", projection, {s.T, s.B, 4 * s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("bias", bias, {4 * s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("weights", weights, {s.H, 4 * s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("c0", c0, {s.B, s.H}));
    OP_REQUIRES_OK(ctx, ReadKeep(ctx->input(5), &s));
    Tensor *h, *c, *gates;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {s.T + 1, s.B, s.H}, &h));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {s.T + 1, s.B, s.H}, &c));
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 2, projection.shape(), &gates));
    s.weights = Floats(weights);
    s.bias = Floats(bias);
    s.h = std::copy_n(Floats(h0), s.B * s.H, Floats(h)) - s.B * s.H;
    s.c = std::copy_n(Floats(c0), s.B * s.H, Floats(c)) - s.B * s.H;
    s.gates = Floats(gates);
    if (s.gates != Floats(projection))
      std::copy_n(Floats(projection), projection.NumElements(), s.gates);
    RunLstm(ctx, Cpu().lstm_forward[bf16_], s, 0, s.T - 1);
  }

 private:
  bool bf16_;
};
REGISTER_KERNEL_BUILDER(Name("LmLstm").Device(DEVICE_CPU), LstmOp);

REGISTER_OP("LmLstmGrad")
    .Input("weights: float")  // inputs and outputs of LmLstm
    .Input("c: float")
    .Input("gates: float")
    .Input("dh: float")       // [T, B, H]: d loss / d h after each step
    .Input("dh_last: float")  // [B, H]
    .Input("dc_last: float")  // [B, H]
    .Input("keep: float")     // [T, B] or [0]
    .Attr("bf16: bool = false")
    .Output("dz: float")   // [T, B, 4H]: d loss / d projection
    .Output("dh0: float")  // [B, H]
    .Output("dc0: float")  // [B, H]
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(2));
      c->set_output(1, c->input(4));
      c->set_output(2, c->input(4));
      return OkStatus();
    });

class LstmGradOp : public OpKernel {
 public:
  explicit LstmGradOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bf16", &bf16_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &weights = ctx->input(0), &c = ctx->input(1), &gates = ctx->input(2);
    const Tensor &dh = ctx->input(3), &dh_last = ctx->input(4), &dc_last = ctx->input(5);
    OP_REQUIRES(ctx, dh.dims() == 3, errors::InvalidArgument("dh is not [T, B, H]"));
    Lstm s = {};
    s.T = dh.dim_size(0);
    s.B = dh.dim_size(1);
    s.H = dh.dim_size(2);
    const TensorShape state({s.B, s.H});
    OP_REQUIRES_OK(ctx, CheckShape("weights", weights, {s.H, 4 * s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("c", c, {s.T + 1, s.B, s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("gates", gates, {s.T, s.B, 4 * s.H}));
    OP_REQUIRES_OK(ctx, CheckShape("dh_last", dh_last, state));
    OP_REQUIRES_OK(ctx, CheckShape("dc_last", dc_last, state));
    OP_REQUIRES_OK(ctx, ReadKeep(ctx->input(6), &s));
    Tensor *dz, *dh0, *dc0;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({2}, 0, gates.shape(), &dz));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, state, &dh0));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, state, &dc0));
    s.weights = Floats(weights);
    s.c = const_cast<float*>(Floats(c));
    s.gates = Floats(dz);
    if (s.gates != Floats(gates)) std::copy_n(Floats(gates), gates.NumElements(), s.gates);
    s.dh = Floats(dh);
    s.dh_last = Floats(dh_last);
    s.dh0 = Floats(dh0);
    s.dc = Floats(dc0);
    std::copy_n(Floats(dc_last), s.B * s.H, s.dc);
    RunLstm(ctx, Cpu().lstm_backward[bf16_], s, s.T - 1, -1);
  }

 private:
  bool bf16_;
};
REGISTER_KERNEL_BUILDER(Name("LmLstmGrad").Device(DEVICE_CPU), LstmGradOp);

// ---- Dropout ------------------------------------------------------------------------------------

REGISTER_OP("LmDropout")
    .Input("x: float")         // [T, B, H]
    .Input("key: uint64")      // [1]
    .Input("counter: uint64")  // [2]: low and high half of the first counter
    .Attr("keep_prob: float")
    .Attr("scale: float")  // 1 / keep_prob, computed before rounding to float32
    .Output("y: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      return OkStatus();
    });

class DropoutOp : public OpKernel {
 public:
  explicit DropoutOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep_prob", &keep_prob_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("scale", &scale_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &x = ctx->input(0), &key = ctx->input(1), &counter = ctx->input(2);
    OP_REQUIRES(ctx, x.dims() == 3, errors::InvalidArgument("x is not [T, B, H]"));
    OP_REQUIRES_OK(ctx, CheckShape("key", key, {1}));
    OP_REQUIRES_OK(ctx, CheckShape("counter", counter, {2}));
    Tensor* y;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, x.shape(), &y));
    lm::Dropout d = {};
    d.T = x.dim_size(0);
    d.B = x.dim_size(1);
    d.H = x.dim_size(2);
    d.x = Floats(x);
    d.y = Floats(y);
    d.keep_prob = keep_prob_;
    d.scale = scale_;
    d.key = key.flat<uint64>()(0);
    d.counter_low = counter.flat<uint64>()(0);
    d.counter_high = counter.flat<uint64>()(1);
    ParallelFor(ctx, 1, d.B, [&](int64_t, int64_t row) { Cpu().DropoutRow(d, row); });
  }

 private:
  float keep_prob_, scale_;
};
REGISTER_KERNEL_BUILDER(Name("LmDropout").Device(DEVICE_CPU), DropoutOp);

// Read `count` token IDs, int32 or int64, in [0, V).
Status ReadTargets(const Tensor& targets, int64_t count, int64_t V, std::vector<int64_t>* words) {
  TF_RETURN_IF_ERROR(CheckShape("targets", targets, {count}));
  for (int64_t n = 0; n < count; ++n) {
    words->push_back(targets.dtype() == DT_INT32 ? static_cast<int64_t>(targets.flat<int32>()(n))
                                                 : targets.flat<int64_t>()(n));
    if (words->back() < 0 || words->back() >= V)
      return errors::InvalidArgument("targets[", n, "] = ", words->back(),
                                     " is not a word: the vocabulary has ", V);
  }
  return OkStatus();
}

// ---- Softmax cross-entropy ----------------------------------------------------------------------

REGISTER_OP("LmSoftmax")
    .Input("logits: float")   // [N, V], without the bias
    .Input("bias: float")     // [V]
    .Input("targets: Index")  // [N]
    .Input("scale: float")    // [N]
    .Attr("Index: {int32, int64}")
    .Attr("D: {float, bfloat16} = DT_FLOAT")
    .Attr("gradient: bool")
    .Attr("micro_batches: list(int) = []")  // for dbias
    .Output("nll: float")    // [N], not scaled
    .Output("dlogits: D")    // [N, V] or [0] without gradient: d sum(scale * nll) / d logits
    .Output("dbias: float")  // [V] or [0] without gradient
    .SetShapeFn([](InferenceContext* c) {
      bool gradient;
      TF_RETURN_IF_ERROR(c->GetAttr("gradient", &gradient));
      c->set_output(0, c->input(3));
      c->set_output(1, gradient ? c->input(0) : c->Vector(0));
      c->set_output(2, gradient ? c->input(1) : c->Vector(0));
      return OkStatus();
    });

class SoftmaxOp : public OpKernel {
 public:
  explicit SoftmaxOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("gradient", &gradient_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("micro_batches", &micro_batches_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &logits = ctx->input(0), &bias = ctx->input(1);
    const Tensor &targets = ctx->input(2), &scale = ctx->input(3);
    OP_REQUIRES(ctx, logits.dims() == 2 && logits.dim_size(1) > 0,
                errors::InvalidArgument("logits have shape ", logits.shape().DebugString(),
                                        ", not [N, V]"));
    const int64_t N = logits.dim_size(0), V = logits.dim_size(1);
    OP_REQUIRES_OK(ctx, CheckShape("bias", bias, {V}));
    OP_REQUIRES_OK(ctx, CheckShape("scale", scale, {N}));
    std::vector<int64_t> words;
    OP_REQUIRES_OK(ctx, ReadTargets(targets, N, V, &words));
    Tensor *nll, *dlogits, *dbias;
    const TensorShape none({0});
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {N}, &nll));
    OP_REQUIRES_OK(ctx, gradient_ ? ctx->forward_input_or_allocate_output({0}, 1, logits.shape(),
                                                                          &dlogits)
                                  : ctx->allocate_output(1, none, &dlogits));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(2, gradient_ ? bias.shape() : none, &dbias));
    lm::Softmax s = {};
    s.V = V;
    s.logits = Floats(logits);
    s.bias = Floats(bias);
    s.targets = words.data();
    s.scale = Floats(scale);
    s.nll = Floats(nll);
    s.dlogits = gradient_ ? dlogits->data() : nullptr;
    s.bf16 = dlogits->dtype() == DT_BFLOAT16;
    // Each micro-batch is divided into groups of a fixed size, and the sums of the groups are added
    // in order: d bias is bitwise identical on any number of threads.
    constexpr int64_t kRows = 8;
    TokenOrder order;
    OP_REQUIRES_OK(ctx, OrderTokens(N, micro_batches_, 1, &order));
    TokenOrder groups;  // `tokens`: the index of each group
    std::vector<int64_t> firsts;
    int64_t first = 0;
    for (const int64_t end : order.ends) {
      for (; first < end; first = std::min(first + kRows, end)) {
        groups.tokens.push_back(firsts.size());
        firsts.push_back(first);
      }
      groups.ends.push_back(firsts.size());
    }
    firsts.push_back(N);
    Scratch sums(gradient_ ? groups.tokens.size() * V : 0);
    std::atomic<bool> out_of_memory{!sums.data()};
    if (!out_of_memory) {
      ParallelFor(ctx, 1, groups.tokens.size(), [&](int64_t, int64_t group) {
        Scratch buffer(V);
        if (!buffer.data()) {
          out_of_memory = true;
          return;
        }
        Cpu().SoftmaxRows(s, order.tokens.data() + firsts[group], firsts[group + 1] - firsts[group],
                          sums.data() + group * V, buffer.data());
      });
    }
    OP_REQUIRES(ctx, !out_of_memory, errors::ResourceExhausted("no memory for the softmax"));
    if (gradient_) SumColumns(ctx, sums.data(), V, groups.view(), Floats(dbias));
  }

 private:
  bool gradient_;
  std::vector<int64_t> micro_batches_;
};
REGISTER_KERNEL_BUILDER(Name("LmSoftmax").Device(DEVICE_CPU), SoftmaxOp);

// ---- Clusters of an adaptive softmax ------------------------------------------------------------

REGISTER_OP("LmCluster")
    .Input("hidden: float")  // [N, K]
    .Input("words: float")   // [V, K]
    .Input("targets: T")     // [N]
    .Attr("T: {int32, int64}")
    .Attr("bf16: bool = false")
    .Output("nll: float")      // [N]
    .Output("log_sum: float")  // [N], for the gradient
    .Output("shift: float")    // [N], for the gradient
    .SetShapeFn([](InferenceContext* c) {
      for (int i = 0; i < 3; ++i) c->set_output(i, c->input(2));
      return OkStatus();
    });

REGISTER_OP("LmClusterGrad")
    .Input("hidden: float")  // inputs and outputs of LmCluster
    .Input("words: float")
    .Input("targets: T")
    .Input("log_sum: float")
    .Input("shift: float")
    .Input("dnll: float")  // [N]: d loss / d nll
    .Input("ends: int64")  // the end of each micro-batch; tokens are ordered by micro-batch
    .Attr("T: {int32, int64}")
    .Attr("bf16: bool = false")
    .Output("dhidden: float")
    .Output("dwords: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->input(0));
      c->set_output(1, c->input(1));
      return OkStatus();
    });

class ClusterOp : public OpKernel {
 public:
  explicit ClusterOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bf16", &bf16_));
    is_gradient_ = num_inputs() > 3;
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor &hidden = ctx->input(0), &words = ctx->input(1);
    OP_REQUIRES(ctx, hidden.dims() == 2 && words.dims() == 2 && words.NumElements() > 0 &&
                         hidden.dim_size(1) == words.dim_size(1),
                errors::InvalidArgument("hidden and words have shapes ",
                                        hidden.shape().DebugString(), " and ",
                                        words.shape().DebugString(), ", not [N, K] and [V, K]"));
    Cluster p = {};
    p.N = hidden.dim_size(0);
    p.V = words.dim_size(0);
    p.K = words.dim_size(1);
    p.bf16 = bf16_;
    p.words = Floats(words);
    std::vector<int64_t> targets;
    OP_REQUIRES_OK(ctx, ReadTargets(ctx->input(2), p.N, p.V, &targets));
    p.targets = targets.data();
    p.ld_units = p.N;
    const int64_t units = p.N * p.K;
    Scratch rounded(units), transposed(is_gradient_ ? units : 0);
    OP_REQUIRES(ctx, rounded.data() && transposed.data(),
                errors::ResourceExhausted("no memory for a cluster"));
    Cpu().cluster.PackHidden(Floats(hidden), p.N, p.K, bf16_, rounded.data(),
                             is_gradient_ ? transposed.data() : nullptr, p.ld_units);
    p.hidden = rounded.data();
    p.hidden_units = transposed.data();
    is_gradient_ ? Gradients(ctx, p) : Losses(ctx, p);
  }

 private:
  void Losses(OpKernelContext* ctx, Cluster p) {
    Tensor* outputs[3];
    for (int i = 0; i < 3; ++i)
      OP_REQUIRES_OK(ctx, ctx->allocate_output(i, {p.N}, &outputs[i]));
    p.nll = Floats(outputs[0]);
    p.log_sum = Floats(outputs[1]);
    p.shift = Floats(outputs[2]);
    if (p.N == 0) return;
    std::vector<float> max(Chunks(p) * p.N), sum(max.size());
    p.max = max.data();
    p.sum = sum.data();
    if (RunChunks(ctx, p, Cpu().cluster.LogSums)) Cpu().cluster.Losses(p, Chunks(p));
  }

  void Gradients(OpKernelContext* ctx, Cluster p) {
    const Tensor &log_sum = ctx->input(3), &shift = ctx->input(4), &scale = ctx->input(5);
    OP_REQUIRES_OK(ctx, CheckShape("log_sum", log_sum, {p.N}));
    OP_REQUIRES_OK(ctx, CheckShape("shift", shift, {p.N}));
    OP_REQUIRES_OK(ctx, CheckShape("dnll", scale, {p.N}));
    TokenOrder order;
    OP_REQUIRES_OK(ctx, OrderByEnds(p.N, ctx->input(6), 1, &order));
    p.order = order.view();
    Tensor *dhidden, *dwords;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {p.N, p.K}, &dhidden));
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, {p.V, p.K}, &dwords));
    p.log_sum = const_cast<float*>(Floats(log_sum));
    p.shift = const_cast<float*>(Floats(shift));
    p.scale = Floats(scale);
    p.dwords = Floats(dwords);
    if (p.N == 0) {
      std::fill_n(p.dwords, p.V * p.K, 0.f);
      return;
    }
    Scratch parts(Chunks(p) * p.N * p.K);
    OP_REQUIRES(ctx, parts.data(), errors::ResourceExhausted("no memory for a cluster"));
    p.dhidden = parts.data();
    if (!RunChunks(ctx, p, Cpu().cluster.Gradients)) return;
    TokenOrder chunks;
    OP_REQUIRES_OK(ctx, OrderTokens(Chunks(p), {}, 1, &chunks));
    SumColumns(ctx, parts.data(), p.N * p.K, chunks.view(), Floats(dhidden));
  }

  static int64_t Chunks(const Cluster& p) {
    return (p.V + ClusterChunk(p.K) - 1) / ClusterChunk(p.K);
  }

  // Run fn(p, chunk, scratch) in parallel for chunks of the words. Return false if out of memory.
  static bool RunChunks(OpKernelContext* ctx, const Cluster& p,
                        void (*fn)(const Cluster&, int64_t, float*)) {
    std::atomic<bool> out_of_memory{false};
    ParallelFor(ctx, 1, Chunks(p), [&](int64_t, int64_t chunk) {
      Scratch scratch(Cpu().cluster.ScratchFloats(p.N, p.K));
      scratch.data() ? fn(p, chunk, scratch.data()) : (void)(out_of_memory = true);
    });
    if (out_of_memory) ctx->SetStatus(errors::ResourceExhausted("no memory for a cluster"));
    return !out_of_memory;
  }

  bool bf16_, is_gradient_;
};
REGISTER_KERNEL_BUILDER(Name("LmCluster").Device(DEVICE_CPU), ClusterOp);
REGISTER_KERNEL_BUILDER(Name("LmClusterGrad").Device(DEVICE_CPU), ClusterOp);

// ---- Norm ---------------------------------------------------------------------------------------

REGISTER_OP("LmGlobalNorm")
    .Input("x: N * float")  // of any shapes
    .Attr("N: int >= 1")
    .Output("norm: float")
    .SetShapeFn([](InferenceContext* c) {
      c->set_output(0, c->Scalar());
      return OkStatus();
    });

class GlobalNormOp : public OpKernel {
 public:
  explicit GlobalNormOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    // Blocks of a fixed size are summed in a fixed order. The result does not depend on the number
    // of threads or the CPU, so ranks that differ in these clip by the same factor.
    constexpr int64_t kBlock = 1 << 14;
    struct Block {
      const float* x;
      int64_t n;
    };
    std::vector<Block> blocks;
    for (int i = 0; i < ctx->num_inputs(); ++i) {
      const Tensor& x = ctx->input(i);
      for (int64_t at = 0; at < x.NumElements(); at += kBlock)
        blocks.push_back({Floats(x) + at, std::min(kBlock, x.NumElements() - at)});
    }
    std::vector<double> sums(blocks.size());
    ParallelFor(ctx, 1, blocks.size(), [&](int64_t, int64_t block) {
      sums[block] = Cpu().SumOfSquares(blocks[block].x, blocks[block].n);
    });
    double sum = 0;
    for (const double each : sums) sum += each;
    Tensor* norm;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, {}, &norm));
    *Floats(norm) = static_cast<float>(std::sqrt(sum));
  }
};
REGISTER_KERNEL_BUILDER(Name("LmGlobalNorm").Device(DEVICE_CPU), GlobalNormOp);

// ---- Sums of several tensors --------------------------------------------------------------------

// Replaces TensorFlow's own kernel, which starts with the first input whose buffer it can reuse. That
// input depends on the order in which threads finish, and so did the sums of gradients.
template <class T>
class AddNOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* ctx) override {
    for (int i = 1; i < ctx->num_inputs(); ++i)
      OP_REQUIRES_OK(ctx, CheckShape("an input", ctx->input(i), ctx->input(0).shape()));
    if (ctx->num_inputs() == 1) return ctx->set_output(0, ctx->input(0));
    Tensor* sum;
    OP_REQUIRES_OK(ctx, ctx->forward_input_or_allocate_output({0}, 0, ctx->input(0).shape(), &sum));
    T* out = sum->flat<T>().data();
    const int64_t n = sum->NumElements();
    constexpr int64_t kBlock = 1 << 12;  // stays in the L1 cache
    ParallelFor(ctx, 1, (n + kBlock - 1) / kBlock, [&](int64_t, int64_t block) {
      const int64_t first = block * kBlock, end = std::min(n, first + kBlock);
      const T *a = ctx->input(0).flat<T>().data(), *b = ctx->input(1).flat<T>().data();
      for (int64_t i = first; i < end; ++i) out[i] = a[i] + b[i];
      for (int k = 2; k < ctx->num_inputs(); ++k) {
        const T* x = ctx->input(k).flat<T>().data();
        for (int64_t i = first; i < end; ++i) out[i] += x[i];
      }
    });
  }
};
#define REGISTER_ADD_N(T) \
  REGISTER_KERNEL_BUILDER( \
      Name("AddN").Device(DEVICE_CPU).TypeConstraint<T>("T").Priority(1), AddNOp<T>)
REGISTER_ADD_N(float);
REGISTER_ADD_N(double);
REGISTER_ADD_N(Eigen::bfloat16);
REGISTER_ADD_N(Eigen::half);

// ---- Average ------------------------------------------------------------------------------------

REGISTER_OP("LmAddToAverage")
    .Input("average: resource")  // float32 variables of one shape
    .Input("weight: resource")
    .Input("share: float")  // contribution of the weight
    .SetShapeFn(shape_inference::NoOutputs);

class AddToAverageOp : public OpKernel {
 public:
  explicit AddToAverageOp(OpKernelConstruction* ctx) : OpKernel(ctx) {}

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<Var> average, weight;
    OP_REQUIRES_OK(ctx, LookupResource(ctx, HandleFromInput(ctx, 0), &average));
    OP_REQUIRES_OK(ctx, LookupResource(ctx, HandleFromInput(ctx, 1), &weight));
    OP_REQUIRES_OK(ctx, CheckShape("share", ctx->input(2), {}));
    const float share = *Floats(ctx->input(2));
    mutex_lock average_lock(*average->mu());
    tf_shared_lock weight_lock(*weight->mu());
    Tensor* before = average->tensor();
    OP_REQUIRES_OK(ctx, CheckShape("the average", *before, weight->tensor()->shape()));
    Tensor after;
    if (before->RefCountIsOne())
      after = *before;
    else  // other readers remain
      OP_REQUIRES_OK(ctx, ctx->allocate_temp(DT_FLOAT, before->shape(), &after));
    const float *w = Floats(*weight->tensor()), *a = Floats(*before);
    float* out = Floats(&after);
    const int64_t n = before->NumElements();
    constexpr int64_t kBlock = 1 << 16;
    ParallelFor(ctx, 1, (n + kBlock - 1) / kBlock, [&](int64_t, int64_t block) {
      // build.py disables fused multiply-adds for this file: the bits equal the bits of plain.py.
      const int64_t end = std::min(n, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; ++i) out[i] = a[i] + (w[i] - a[i]) * share;
    });
    *before = after;
  }
};
REGISTER_KERNEL_BUILDER(Name("LmAddToAverage").Device(DEVICE_CPU), AddToAverageOp);

// ---- Adam ---------------------------------------------------------------------------------------

// Replaces TensorFlow's own kernel, which computes the same bits in three passes.
class ApplyAdamOp : public OpKernel {
 public:
  explicit ApplyAdamOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("use_nesterov", &use_nesterov_));
  }

  void Compute(OpKernelContext* ctx) override {
    core::RefCountPtr<Var> variables[3];  // the weights and the two moments
    for (int i = 0; i < 3; ++i)
      OP_REQUIRES_OK(ctx, LookupResource(ctx, HandleFromInput(ctx, i), &variables[i]));
    for (int i = 3; i < 9; ++i) OP_REQUIRES_OK(ctx, CheckShape("a setting", ctx->input(i), {}));
    const auto setting = [&](int i) { return *Floats(ctx->input(i)); };
    const float beta1_power = setting(3), beta2_power = setting(4), rate = setting(5);
    const float beta1 = setting(6), beta2 = setting(7), epsilon = setting(8);
    const Tensor& gradient = ctx->input(9);
    mutex_lock lock_w(*variables[0]->mu()), lock_m(*variables[1]->mu()), lock_v(*variables[2]->mu());
    const float* before[3];
    Tensor after[3];
    for (int i = 0; i < 3; ++i) {
      const Tensor& value = *variables[i]->tensor();
      OP_REQUIRES_OK(ctx, CheckShape("a variable", value, gradient.shape()));
      before[i] = Floats(value);
      if (value.RefCountIsOne())
        after[i] = value;
      else  // other readers remain
        OP_REQUIRES_OK(ctx, ctx->allocate_temp(DT_FLOAT, value.shape(), &after[i]));
    }
    const float *g = Floats(gradient), *w = before[0], *m = before[1], *v = before[2];
    float *new_w = Floats(&after[0]), *new_m = Floats(&after[1]), *new_v = Floats(&after[2]);
    const float step = rate * std::sqrt(1 - beta2_power) / (1 - beta1_power);
    const float rest1 = 1 - beta1, rest2 = 1 - beta2;
    const bool nesterov = use_nesterov_;
    const int64_t n = gradient.NumElements();
    constexpr int64_t kBlock = 1 << 14;
    ParallelFor(ctx, 1, (n + kBlock - 1) / kBlock, [&](int64_t, int64_t block) {
      const int64_t end = std::min(n, (block + 1) * kBlock);
#pragma GCC ivdep
      for (int64_t i = block * kBlock; i < end; ++i) {
        const float m1 = m[i] + (g[i] - m[i]) * rest1;
        const float v1 = v[i] + (g[i] * g[i] - v[i]) * rest2;
        const float mean = nesterov ? g[i] * rest1 + beta1 * m1 : m1;
        new_w[i] = w[i] - mean * step / (std::sqrt(v1) + epsilon);
        new_m[i] = m1;
        new_v[i] = v1;
      }
    });
    for (int i = 0; i < 3; ++i) *variables[i]->tensor() = after[i];
  }

 private:
  bool use_nesterov_;
};
REGISTER_KERNEL_BUILDER(
    Name("ResourceApplyAdam").Device(DEVICE_CPU).TypeConstraint<float>("T").Priority(1), ApplyAdamOp);

}  // namespace
}  // namespace lm

// Whether this thread and its child threads treat subnormals as zeros, like TensorFlow's threads.
extern "C" __attribute__((visibility("default"))) void lm_flush_subnormals(bool flush) {
#if defined(__x86_64__)
  constexpr unsigned kFlush = 0x8040;  // FTZ: results, DAZ: operands
  __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~kFlush) | (flush ? kFlush : 0));
#elif defined(__aarch64__)
  constexpr uint64_t kFlush = 1 << 24;  // FZ
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"((control & ~kFlush) | (flush ? kFlush : 0)));
#endif
}

// For the log: the selected build and its compiler.
extern "C" __attribute__((visibility("default"))) const char* lm_kernels_isa() {
  return lm::Cpu().name;
}

extern "C" __attribute__((visibility("default"))) const char* lm_kernels_compiler() {
  return __VERSION__;
}
