// edgekv::PackedMatMul and PackedRows as operators of ONNX Runtime, domain "edgekv", CPU provider.
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
// edgekv::PackedRows: rows of a packed matrix by their numbers, as an embedding that is the output head, too, is read.
//
//     inputs    ids      int64 [...]     outputs of the matrix, 0 .. N - 1
//               weights  uint8 [bytes]
//     output    float [..., K]
//     attributes  N, K, bits, block_size, zero_points, half, minima, offset
//
// One input holds all matrices because an input of a node costs a microsecond a run, and because one block of memory
// can be given to large pages.
#include <algorithm>
#include <cstdlib>

#include "matmul.h"
#include "ort_kernel.h"

namespace edgekv {
namespace {

enum Input : size_t { kX, kWeights, kBias, kResidual, kGain, kInputs };
enum RowInput : size_t { kIds, kRowWeights, kRowInputs };

constexpr int64_t kRowsAtOnce = 16;  // that one thread unpacks

Packing packing_of(const ort::KernelInfo* info) {
  return {integer(info, "N", 0),
          integer(info, "K", 0),
          static_cast<int>(integer(info, "bits", 4)),
          integer(info, "block_size", 32),
          integer(info, "zero_points", 0) != 0,
          integer(info, "half", 0) != 0,
          integer(info, "minima", 0) != 0};
}

// Where a matrix is among all weights.
struct Place {
  Packing packing;
  int64_t offset;

  explicit Place(const ort::KernelInfo* info) : packing(packing_of(info)), offset(integer(info, "offset", 0)) {
    if (const char* what = fault(packing)) throw Failure(what);
    require(offset >= 0 && offset % kLine == 0, "packed weights: the offset is no multiple of 64");
  }
  const uint8_t* in(const Tensor& weights) const {
    require(weights.is(ort::kUint8, 1) && weights.dims[0] >= offset + packing.bytes(),
            "packed weights do not reach as far as this matrix");
    require(reinterpret_cast<uintptr_t>(weights.data) % kLine == 0, "packed weights are not aligned");
    return static_cast<const uint8_t*>(weights.data) + offset;
  }
};

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
      : place_(info),
        gate_(static_cast<Gate>(integer(info, "gate", 0))),
        epsilon_(number(info, "epsilon", 0.0f)),
        kernels_(*best_matmul(std::getenv("EDGEKV_NATIVE_ISA"))) {
    require(gate_ == Gate::kNone || place_.packing.outputs % (2 * kPanel) == 0,
            "PackedMatMul: a gate needs whole panels");
  }

  void compute(ort::KernelContext* context) const {
    const Tensor x = input(context, kX), weights = input(context, kWeights);
    require(x.type == ort::kFloat && x.rank > 0 && x.dims[x.rank - 1] == place_.packing.inputs,
            "PackedMatMul: x is not float [..., K]");
    int64_t shape[kMaxRank];
    for (size_t i = 0; i < x.rank; i++) shape[i] = x.dims[i];
    Product product{};
    product.packing = place_.packing;
    product.weights = place_.in(weights);
    product.gate = gate_;
    product.epsilon = epsilon_;
    product.x = static_cast<const float*>(x.data);
    product.rows = 1;
    for (size_t i = 0; i + 1 < x.rank; i++) product.rows *= shape[i];
    shape[x.rank - 1] = product.width();
    product.bias = optional(context, kBias, &place_.packing.outputs, 1);
    product.gain = optional(context, kGain, &place_.packing.inputs, 1);
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

  Place place_;
  Gate gate_;
  float epsilon_;
  const MatMulKernels& kernels_;
};

class Rows {
 public:
  static constexpr const char* kName = "PackedRows";
  static constexpr Slot kSlots[kRowInputs] = {{ort::kInt64}, {ort::kUint8}};

  explicit Rows(const ort::KernelInfo* info) : place_(info) {}

  void compute(ort::KernelContext* context) const {
    const Tensor ids = input(context, kIds);
    require(ids.rank < kMaxRank, "PackedRows: ids have more than three dimensions");
    int64_t shape[kMaxRank], count = 1;
    for (size_t i = 0; i < ids.rank; i++) count *= shape[i] = ids.dims[i];
    shape[ids.rank] = place_.packing.inputs;
    Job job{place_.packing, place_.in(input(context, kRowWeights)), static_cast<const int64_t*>(ids.data), count};
    for (int64_t i = 0; i < count; i++) {
      require(job.ids[i] >= 0 && job.ids[i] < job.packing.outputs, "PackedRows: an id is not within the matrix");
    }
    job.out = output(context, shape, ids.rank + 1);
    const int64_t pieces = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    if (pieces == 1) return unpack_rows(&job, 0);
    if (pieces) run_parallel(context, unpack_rows, static_cast<size_t>(pieces), &job);
  }

 private:
  struct Job {
    const Packing& packing;
    const uint8_t* weights;
    const int64_t* ids;
    int64_t count;
    float* out = nullptr;
  };

  static void unpack_rows(void* argument, size_t piece) {
    const Job& job = *static_cast<Job*>(argument);
    const int64_t first = static_cast<int64_t>(piece) * kRowsAtOnce, last = std::min(first + kRowsAtOnce, job.count);
    for (int64_t i = first; i < last; i++) {
      unpack(job.packing, job.weights, job.ids[i], job.out + i * job.packing.inputs);
    }
  }

  Place place_;
};

}  // namespace

const ort::CustomOp* packed_matmul_op() { return custom_op<MatMul>(); }
const ort::CustomOp* packed_rows_op() { return custom_op<Rows>(); }

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
