// edgekv::PackedMatMul as an operator of ONNX Runtime, domain "edgekv", CPU provider.
//
//     inputs    x        float [..., K]
//               weights  uint8 [bytes]   the packed matrices of the whole model; matmul.h has their order
//               bias     float [N]       or left out, as are the next two
//               residual float [..., N]  added to the output
//               gain     float [K]       of an RMS norm that x goes through first
//     output    float [..., N], or [..., N / 2] with a gate
//     attributes  N, K, bits (5 and 6, too), block_size as MatMulNBits has them; zero_points, half, minima (0 or 1:
//               what is stored, and how); offset (where this matrix begins in the weights); gate (0 none, 1 SiLU, 2
//               GELU by tanh: the matrix is two, their panels in turn, and act(first) * second is the output); epsilon
//               (of the norm)
//
// One input holds all matrices because an input of a node costs a microsecond a run, and because one block of memory
// can be given to large pages.
#include <cstdlib>

#include "matmul.h"
#include "ort_kernel.h"

namespace edgekv {
namespace {

enum Input : size_t { kX, kWeights, kBias, kResidual, kGain, kInputs };

class MatMul {
 public:
  static constexpr const char* kName = "PackedMatMul";
  static constexpr Slot kSlots[kInputs] = {
      {ort::kFloat},                  // x
      {ort::kUint8},                  // weights
      {ort::kFloat, ort::kOptional},  // bias
      {ort::kFloat, ort::kOptional},  // residual
      {ort::kFloat, ort::kOptional},  // gain
  };

  explicit MatMul(const ort::KernelInfo* info)
      : packing_{integer(info, "N", 0),
                 integer(info, "K", 0),
                 static_cast<int>(integer(info, "bits", 4)),
                 integer(info, "block_size", 32),
                 integer(info, "zero_points", 0) != 0,
                 integer(info, "half", 0) != 0,
                 integer(info, "minima", 0) != 0},
        offset_(integer(info, "offset", 0)),
        gate_(static_cast<Gate>(integer(info, "gate", 0))),
        epsilon_(number(info, "epsilon", 0.0f)),
        kernels_(*best_matmul(std::getenv("EDGEKV_NATIVE_ISA"))) {
    if (const char* what = fault(packing_)) throw Failure(what);
    require(offset_ >= 0 && offset_ % kLine == 0, "PackedMatMul: the offset is no multiple of 64");
    require(gate_ == Gate::kNone || packing_.outputs % (2 * kPanel) == 0, "PackedMatMul: a gate needs whole panels");
  }

  void compute(ort::KernelContext* context) const {
    const Tensor x = input(context, kX), weights = input(context, kWeights);
    require(x.type == ort::kFloat && x.rank > 0 && x.dims[x.rank - 1] == packing_.inputs,
            "PackedMatMul: x is not float [..., K]");
    require(weights.is(ort::kUint8, 1) && weights.dims[0] >= offset_ + packing_.bytes(),
            "PackedMatMul: the weights do not reach as far as this matrix");
    require(reinterpret_cast<uintptr_t>(weights.data) % kLine == 0, "PackedMatMul: the weights are not aligned");
    int64_t shape[kMaxRank];
    for (size_t i = 0; i < x.rank; i++) shape[i] = x.dims[i];
    Product product{};
    product.packing = packing_;
    product.weights = static_cast<const uint8_t*>(weights.data) + offset_;
    product.gate = gate_;
    product.epsilon = epsilon_;
    product.x = static_cast<const float*>(x.data);
    product.rows = 1;
    for (size_t i = 0; i + 1 < x.rank; i++) product.rows *= shape[i];
    shape[x.rank - 1] = product.width();
    product.bias = optional(context, kBias, &packing_.outputs, 1);
    product.gain = optional(context, kGain, &packing_.inputs, 1);
    product.residual = optional(context, kResidual, shape, x.rank);
    require(gate_ == Gate::kNone || !(product.bias || product.residual), "PackedMatMul: nothing is added to a gate");
    product.out = output(context, shape, x.rank);
    if (product.rows) multiply(product, kernels_, Parallel{context, run_parallel});
  }

 private:
  // Floats of this shape, or null where the input is left out.
  static const float* optional(const ort::KernelContext* context, size_t index, const int64_t* dims, size_t rank) {
    size_t count = 0;
    check(api.GetInputCount(context, &count));
    const Tensor tensor = index < count ? input(context, index) : Tensor{};
    if (!tensor.data) return nullptr;
    bool fits = tensor.is(ort::kFloat, rank);
    for (size_t i = 0; fits && i < rank; i++) fits = tensor.dims[i] == dims[i];
    require(fits, "PackedMatMul: the bias is not float [N], the gain not [K], or the residual not like the output");
    return static_cast<const float*>(tensor.data);
  }

  Packing packing_;
  int64_t offset_;
  Gate gate_;
  float epsilon_;
  const MatMulKernels& kernels_;
};

}  // namespace

const ort::CustomOp* packed_matmul_op() { return custom_op<MatMul>(); }

}  // namespace edgekv

EDGEKV_EXPORT int edgekv_packing_format() { return edgekv::kPackingFormat; }

// For the loader: how many bytes a packed matrix takes, or 0 if it cannot be packed; and packing some panels of one.
EDGEKV_EXPORT void edgekv_packed_bytes(const edgekv::Packing* packing, int64_t* bytes) {
  *bytes = edgekv::fault(*packing) ? 0 : packing->bytes();
}

EDGEKV_EXPORT void edgekv_pack(const edgekv::Packing* packing, const edgekv::Unpacked* matrix, int64_t first,
                               int64_t last, int64_t step, uint8_t* out) {
  edgekv::pack(*packing, *matrix, first, last, step, out);
}
