// The few entries of ONNX Runtime's C API that a custom operator needs, declared from its documented ABI.
//
// The pip packages carry no headers. OrtApi is a table of function pointers that only ever grows at its end, so an
// entry is known for good by its index; OrtCustomOp is a struct that the operator's maker fills in, and whose `version`
// says how much of it exists. Both are asked for as of version 17 (ONNX Runtime 1.17), the first that has ParallelFor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 17;

// Opaque types of the API.
struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kUndefined = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kInt64 = 7 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kDefaultMemory = 0 };

struct ApiTable {
  void* entries[275];
};

struct ApiBase {
  const ApiTable* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The table with types. Every function that returns a Status returns null when all is well.
class Api {
 public:
  explicit Api(const ApiTable* table = nullptr) : table_(table) {}

  Status* CreateStatus(ErrorCode code, const char* text) const { return call<0, Status*>(code, text); }
  Status* CreateCustomOpDomain(const char* name, CustomOpDomain** out) const { return call<26, Status*>(name, out); }
  Status* CustomOpDomain_Add(CustomOpDomain* domain, const void* op) const { return call<27, Status*>(domain, op); }
  Status* AddCustomOpDomain(SessionOptions* options, CustomOpDomain* domain) const {
    return call<28, Status*>(options, domain);
  }
  Status* GetTensorMutableData(const Value* value, void** out) const { return call<51, Status*>(value, out); }
  Status* GetTensorElementType(const TensorInfo* info, int* out) const { return call<60, Status*>(info, out); }
  Status* GetDimensionsCount(const TensorInfo* info, size_t* out) const { return call<61, Status*>(info, out); }
  Status* GetDimensions(const TensorInfo* info, int64_t* out, size_t count) const {
    return call<62, Status*>(info, out, count);
  }
  Status* GetTensorTypeAndShape(const Value* value, TensorInfo** out) const { return call<65, Status*>(value, out); }
  Status* GetAttribute(const KernelInfo* info, const char* name, float* out) const {
    return call<85, Status*>(info, name, out);
  }
  Status* GetAttribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return call<86, Status*>(info, name, out);
  }
  Status* GetInputCount(const KernelContext* context, size_t* out) const { return call<88, Status*>(context, out); }
  Status* GetInput(const KernelContext* context, size_t index, const Value** out) const {
    return call<90, Status*>(context, index, out);
  }
  Status* GetOutput(KernelContext* context, size_t index, const int64_t* shape, size_t rank, Value** out) const {
    return call<91, Status*>(context, index, shape, rank, out);
  }
  void ReleaseStatus(Status* status) const { call<93, void>(status); }
  void ReleaseTensorInfo(TensorInfo* info) const { call<99, void>(info); }
  // body(argument, i) for i in 0 .. total - 1 on the session's own threads; batches 0: one by one, as they get free.
  Status* ParallelFor(const KernelContext* context, void (*body)(void*, size_t), size_t total, size_t batches,
                      void* argument) const {
    return call<274, Status*>(context, body, total, batches, argument);
  }

 private:
  template <int Index, class Result, class... Arguments>
  Result call(Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(table_->entries[Index])(arguments...);
  }
  const ApiTable* table_;
};

// OrtCustomOp as of version 17.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const ApiTable*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const ApiTable*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, void*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  void* reserved[4];  // fields of later versions
};

}  // namespace ort
