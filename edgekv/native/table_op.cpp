// edgekv::TableMatMul as an operator of ONNX Runtime, domain "edgekv", CPU provider: MatMulBnb4 with the table as an
// input.
//
//     inputs    x       float [..., K]
//               codes   uint8 [N K / 2]       output after output, the even input in the high nibble
//               absmax  float [N K / block]
//               table   float [16]
//     output    float [..., N]
//     attributes  N, K, block_size as MatMulBnb4 has them
#include <cstdlib>

#include "ort_kernel.h"
#include "table.h"

namespace edgekv {
namespace {

enum Input : size_t { kX, kCodes, kAbsmax, kTable, kInputs };

class TableMatMul {
 public:
  static constexpr const char* kName = "TableMatMul";
  static constexpr Slot kSlots[kInputs] = {{ort::kFloat}, {ort::kUint8}, {ort::kFloat}, {ort::kFloat}};

  explicit TableMatMul(const ort::KernelInfo* info) : kernels_(*best_table(std::getenv("EDGEKV_NATIVE_ISA"))) {
    product_.outputs = integer(info, "N", 0);
    product_.inputs = integer(info, "K", 0);
    product_.block = integer(info, "block_size", 0);
    if (const char* what = fault(product_)) throw Failure(what);
  }

  void compute(ort::KernelContext* context) const {
    const Tensor x = input(context, kX), codes = input(context, kCodes);
    const Tensor absmax = input(context, kAbsmax), table = input(context, kTable);
    const int64_t weights = product_.outputs * product_.inputs;
    require(x.type == ort::kFloat && x.rank > 0 && x.dims[x.rank - 1] == product_.inputs,
            "TableMatMul: x is not float [..., K]");
    require(codes.is(ort::kUint8, 1) && codes.dims[0] == weights / 2, "TableMatMul: codes are not uint8 [N K / 2]");
    require(absmax.is(ort::kFloat, 1) && absmax.dims[0] == weights / product_.block,
            "TableMatMul: absmax is not float [N K / block]");
    require(table.is(ort::kFloat, 1) && table.dims[0] == 16, "TableMatMul: the table is not float [16]");
    TableProduct product = product_;
    product.codes = static_cast<const uint8_t*>(codes.data);
    product.absmax = static_cast<const float*>(absmax.data);
    product.table = static_cast<const float*>(table.data);
    product.x = static_cast<const float*>(x.data);
    int64_t shape[kMaxRank];
    product.rows = 1;
    for (size_t i = 0; i < x.rank; i++) shape[i] = x.dims[i];
    for (size_t i = 0; i + 1 < x.rank; i++) product.rows *= shape[i];
    shape[x.rank - 1] = product.outputs;
    product.out = output(context, shape, x.rank);
    if (product.rows) multiply(product, kernels_, Parallel{context, run_parallel});
  }

 private:
  TableProduct product_{};
  const TableKernels& kernels_;
};

}  // namespace

const ort::CustomOp* table_matmul_op() { return custom_op<TableMatMul>(); }

}  // namespace edgekv
