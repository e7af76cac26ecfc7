// What every operator of this library needs of ONNX Runtime: its tensors, attributes and threads, and errors turned
// into its statuses.
#pragma once

#include <exception>
#include <new>

#include "parallel.h"
#include "ort_abi.h"

#if defined(_WIN32)
#define EDGEKV_EXPORT extern "C" __declspec(dllexport)
#else
#define EDGEKV_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace edgekv {

inline ort::Api api;  // set when the library is registered

// A failed call or a problem that does not fit; carries what goes back to ONNX Runtime.
class Failure {
 public:
  explicit Failure(ort::Status* status) : status_(status) {}
  explicit Failure(const char* text) : status_(api.CreateStatus(ort::kInvalidArgument, text)) {}
  ort::Status* status() const { return status_; }

 private:
  ort::Status* status_;
};

inline void check(ort::Status* status) {
  if (status) throw Failure(status);
}

inline void require(bool condition, const char* otherwise) {
  if (!condition) throw Failure(otherwise);
}

// Runs something that may throw, for callers that must not.
template <class Work>
ort::Status* guarded(Work work) noexcept {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status();
  } catch (const std::exception& error) {
    return api.CreateStatus(ort::kFail, error.what());
  }
}

constexpr size_t kMaxRank = 4;

struct Tensor {
  void* data = nullptr;
  int type = ort::kUndefined;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};

  bool is(int wanted, size_t wanted_rank) const { return data && type == wanted && rank == wanted_rank; }
};

// Releases the shape whatever happens while it is read.
struct Info {
  ort::TensorInfo* pointer = nullptr;
  ~Info() {
    if (pointer) api.ReleaseTensorInfo(pointer);
  }
};

inline Tensor input(const ort::KernelContext* context, size_t index) {
  const ort::Value* value = nullptr;
  check(api.GetInput(context, index, &value));
  Tensor tensor;
  if (!value) return tensor;  // an optional input that is not there
  Info info;
  check(api.GetTensorTypeAndShape(value, &info.pointer));
  check(api.GetTensorElementType(info.pointer, &tensor.type));
  check(api.GetDimensionsCount(info.pointer, &tensor.rank));
  require(tensor.rank <= kMaxRank, "an input has more than four dimensions");
  check(api.GetDimensions(info.pointer, tensor.dims, tensor.rank));
  check(api.GetTensorMutableData(value, &tensor.data));
  return tensor;
}

template <typename Number>
Number attribute(const ort::KernelInfo* info, const char* name, Number otherwise) {
  Number value = otherwise;
  if (ort::Status* status = api.GetAttribute(info, name, &value)) {
    api.ReleaseStatus(status);
    return otherwise;
  }
  return value;
}

inline int64_t integer(const ort::KernelInfo* info, const char* name, int64_t otherwise) {
  return attribute(info, name, otherwise);
}

inline float number(const ort::KernelInfo* info, const char* name, float otherwise) {
  return attribute(info, name, otherwise);
}

// Data of the output, made with this shape.
inline float* output(ort::KernelContext* context, const int64_t* shape, size_t rank) {
  ort::Value* value = nullptr;
  check(api.GetOutput(context, 0, shape, rank, &value));
  void* data = nullptr;
  check(api.GetTensorMutableData(value, &data));
  return static_cast<float*>(data);
}

// The session's own threads.
inline void run_parallel(void* context, void (*body)(void*, size_t), size_t count, void* argument) {
  check(api.ParallelFor(static_cast<const ort::KernelContext*>(context), body, count, 0, argument));
}

// What an operator takes in one place: a type (kUndefined: any, and the kernel checks it), and whether it may be left
// out. Not made by default, so that a table that lacks one does not compile.
struct Slot {
  int type;
  ort::Characteristic characteristic;
  constexpr Slot(int slot_type, ort::Characteristic slot_characteristic = ort::kRequired)
      : type(slot_type), characteristic(slot_characteristic) {}
};

template <class Kernel>
ort::CustomOp make_op() {
  ort::CustomOp op{};
  op.version = ort::kVersion;
  op.GetName = [](const ort::CustomOp*) { return Kernel::kName; };
  op.GetInputType = [](const ort::CustomOp*, size_t index) -> int { return Kernel::kSlots[index].type; };
  op.GetInputTypeCount = [](const ort::CustomOp*) -> size_t { return sizeof Kernel::kSlots / sizeof(Slot); };
  op.GetInputCharacteristic = [](const ort::CustomOp*, size_t index) -> int {
    return Kernel::kSlots[index].characteristic;
  };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetOutputType = [](const ort::CustomOp*, size_t) -> int { return ort::kFloat; };
  op.GetOutputTypeCount = [](const ort::CustomOp*) -> size_t { return 1; };
  op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t) -> int { return ort::kRequired; };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) -> int { return ort::kDefaultMemory; };
  op.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.CreateKernelV2 = [](const ort::CustomOp*, const ort::ApiTable*, const ort::KernelInfo* info, void** kernel) {
    return guarded([&] { *kernel = new Kernel(info); });
  };
  op.KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
    return guarded([&] { static_cast<const Kernel*>(kernel)->compute(context); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetStartVersion = [](const ort::CustomOp*) { return 1; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 0x7fffffff; };
  return op;
}

// The operator on the CPU with one float output that a class stands for: `kName`, `kSlots`, and objects that are made
// from a node and have `compute(context) const`.
template <class Kernel>
const ort::CustomOp* custom_op() {
  static const ort::CustomOp op = make_op<Kernel>();
  return &op;
}

// The operators of matmul_op.cpp and table_op.cpp.
const ort::CustomOp* packed_matmul_op();
const ort::CustomOp* packed_rows_op();
const ort::CustomOp* table_matmul_op();

}  // namespace edgekv
