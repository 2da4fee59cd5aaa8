// The arithmetic for one instruction set. build.py compiles this file once per instruction set with
// -DLM_ISA=<name> and the matching compiler flags. ops.cc selects one at run time.
#include "amx.h"
#include "cluster.h"
#include "cpu.h"
#include "dropout.h"
#include "gemm.h"
#include "lstm.h"
#include "norm.h"
#include "softmax.h"
#include "tokens.h"

#define LM_STRING_(x) #x
#define LM_STRING(x) LM_STRING_(x)

namespace LM_ISA {

template <class D>
constexpr lm::LstmDirection Direction() {
  return {D::Blocks, D::PanelFloats, D::ScratchFloats, D::Pack, D::Start, D::Step};
}

template <class G>
constexpr lm::GemmFormat Products() {
  return {G::kWidest, G::RowUnits, G::PanelFloats, G::NeedsPackRows, G::PackRows, G::Block};
}

template <class S>
constexpr lm::TokenSumFormat TokenSums() {
  return {S::kMultiple, S::Widest, S::RowUnits, S::PanelFloats, S::PackRows, S::Block};
}

extern const lm::Kernels kernels;
const lm::Kernels kernels = {
    LM_STRING(LM_ISA),
    kLanes,
    {Products<Gemm<Float32>>(), Products<Bfloat16Gemm>()},
    {TokenSums<TokenSum<Float32>>(), TokenSums<Bfloat16TokenSum>()},
    {Direction<Forward<VectorProducts<Float32>>>(), Direction<Forward<Bfloat16Products>>()},
    {Direction<Backward<VectorProducts<Float32>>>(), Direction<Backward<Bfloat16Products>>()},
    SoftmaxRows,
    {Cluster::ScratchFloats, Cluster::PackHidden, Cluster::LogSums, Cluster::Losses,
     Cluster::Gradients},
    DropoutRow,
    ColumnSums,
    SumOfSquares,
};

}  // namespace LM_ISA
