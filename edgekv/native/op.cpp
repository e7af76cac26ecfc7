// edgekv::CachedAttention as an operator of ONNX Runtime, domain "edgekv", CPU provider.
//
//     inputs    qkv      float [1, T, (H + 2 K) D]   packed queries, keys and values of the new tokens
//               keys     int8 [1, K, slots, D + 2], float or uint8 (FP8) [1, K, slots, D]   the cache, written in
//                        place; kernels.h has its order: in INT8 a head's codes, then its rows' factors, 2 bytes each
//               values   like keys, or beside INT8 keys of 4 bits, int8 [1, K, slots, D / 2 + 2]; in INT4 so are both
//               state    int64 [4 P]   cached tokens before, evicted tokens, pinned tokens S, capacity C. With P > 1
//                        tokens are evicted within the run: four numbers for each part of it, and a part ends where the
//                        cache is full. The parts are done in turn, as if each were a run of its own
//               angles   float [4, T, R / 2]   cos and sin at the absolute positions, and less the evicted tokens, of
//                        the R <= D channels that are rotated; left out where a layer rotates nothing
//               scales   float [2, K, D]   of keys (before they are mixed) and of values; not with float
//               centre   float [K, D]   what is taken out of keys before they turn; with the next two, or left out
//               pairs    int64 [P]   where the centre is not zero: channels pairs[i] and pairs[i] + R / 2
//               turns    float [2, P, slots]   cos and sin of those pairs at the angle of each slot's key; in INT4
//                        int8 [slots, 2 P filled up to a multiple of 4], see Problem::turn_codes
//               value_centre  float [K, D]   what is taken out of values and added to the output, or left out
//     output    float [1, T, H D]
//     attributes  num_heads, kv_num_heads (int), scale (float, 0 is 1 / sqrt(D)), softcap (float, 0 is none), window
//               (int: how many tokens each sees, itself included; 0 is all)
//
// A layer with a window may have fewer slots than C: it then is a ring of its last tokens, with no pinned prefix.
//
// Writing into an input is what makes the cache a buffer that is bound once; no other node may read it.
#include <cmath>
#include <cstdlib>
#include <initializer_list>

#include "attention.h"
#include "matmul.h"
#include "ort_kernel.h"
#include "table.h"

namespace edgekv {
namespace {

enum Input : size_t { kQkv, kKeys, kValues, kState, kAngles, kScales, kCentre, kPairs, kTurns, kValueCentre, kInputs };

class CachedAttention {
 public:
  static constexpr const char* kName = "CachedAttention";
  static constexpr Slot kSlots[kInputs] = {
      {ort::kFloat},                  // qkv
      {ort::kUndefined},              // keys
      {ort::kUndefined},              // values
      {ort::kInt64},                  // state
      {ort::kFloat, ort::kOptional},  // angles
      {ort::kFloat, ort::kOptional},  // scales
      {ort::kFloat, ort::kOptional},  // centre
      {ort::kInt64, ort::kOptional},  // pairs
      {ort::kUndefined, ort::kOptional},  // turns
      {ort::kFloat, ort::kOptional},  // value_centre
  };

  explicit CachedAttention(const ort::KernelInfo* info)
      : heads_(integer(info, "num_heads", 0)),
        kv_heads_(integer(info, "kv_num_heads", 0)),
        scale_(number(info, "scale", 0.0f)),
        softcap_(number(info, "softcap", 0.0f)),
        window_(integer(info, "window", 0)) {
    require(heads_ > 0 && kv_heads_ > 0 && heads_ < 65536 && heads_ % kv_heads_ == 0,
            "CachedAttention: num_heads must be a multiple of kv_num_heads");
    const char* limit = std::getenv("EDGEKV_NATIVE_ISA");  // for tests and measurements
    for (int type = 0; type < kCacheTypes; type++) kernels_[type] = best_kernels(static_cast<CacheType>(type), limit);
  }

  void compute(ort::KernelContext* context) const {
    Problem problem = read(context);
    const Tensor state = input(context, kState);
    each_part(problem, state, [](const Problem& part) {
      if (const char* what = fault(part)) throw Failure(what);
    });
    const int64_t shape[3] = {1, problem.tokens, int64_t{problem.heads} * problem.dim};
    ort::Value* output = nullptr;
    check(api.GetOutput(context, 0, shape, 3, &output));
    void* data = nullptr;
    check(api.GetTensorMutableData(output, &data));
    problem.out = static_cast<float*>(data);
    each_part(problem, state, [&](const Problem& part) {
      cached_attention(part, *kernels_[static_cast<int>(part.type)], Parallel{context, run_parallel});
    });
  }

 private:
  // The problem as the inputs state it, every size checked.
  Problem read(const ort::KernelContext* context) const {
    const Tensor qkv = input(context, 0), keys = input(context, 1), values = input(context, 2);
    const Tensor state = input(context, 3), angles = input(context, 4);
    size_t count = 0;
    check(api.GetInputCount(context, &count));
    const Tensor scales = count > 5 ? input(context, 5) : Tensor{};
    require(qkv.is(ort::kFloat, 3) && qkv.dims[0] == 1, "CachedAttention: qkv is not float [1, T, (H + 2 K) D]");
    const int64_t tokens = qkv.dims[1], dim = qkv.dims[2] / (heads_ + 2 * kv_heads_);
    require(qkv.dims[2] == (heads_ + 2 * kv_heads_) * dim, "CachedAttention: qkv is not float [1, T, (H + 2 K) D]");
    const CacheType type = cache_type(keys, values, dim);
    require(state.is(ort::kInt64, 1) && state.dims[0] >= 4 && state.dims[0] % 4 == 0,
            "CachedAttention: state is not int64 [4 P]");
    Problem problem{};
    if (angles.data) {
      require(angles.is(ort::kFloat, 3) && angles.dims[0] == 4 && angles.dims[1] == tokens && angles.dims[2] <= dim / 2,
              "CachedAttention: angles are not float [4, T, R / 2]");
      problem.half = static_cast<int>(angles.dims[2]);
    }
    problem.type = type;
    if (type != CacheType::kFloat) {
      require(scales.is(ort::kFloat, 3) && scales.dims[0] == 2 && scales.dims[1] == kv_heads_ && scales.dims[2] == dim,
              "CachedAttention: scales are not float [2, K, D]");
      problem.k_scale = static_cast<const float*>(scales.data);
      problem.v_scale = problem.k_scale + kv_heads_ * dim;
    }
    problem.heads = static_cast<int>(heads_);
    problem.kv_heads = static_cast<int>(kv_heads_);
    problem.dim = static_cast<int>(dim <= kMaxDim ? dim : 0);
    problem.scale = scale_ != 0.0f ? scale_ : 1.0f / std::sqrt(static_cast<float>(dim));
    problem.softcap = softcap_;
    problem.window = window_;
    problem.tokens = tokens;
    problem.slots = keys.dims[2];
    problem.qkv = static_cast<const float*>(qkv.data);
    problem.keys = keys.data;
    problem.values = values.data;
    const float* table = static_cast<const float*>(angles.data);
    const int64_t size = tokens * problem.half;
    problem.cos = table;
    problem.sin = table + size;
    problem.cos_pinned = table + 2 * size;
    problem.sin_pinned = table + 3 * size;
    if (count > kCentre) read_centre(context, dim, problem);
    if (count > kValueCentre) problem.v_centre = centre_of(input(context, kValueCentre), dim);
    require(state.dims[0] == 4 || !problem.centre, "CachedAttention: a run with a centre has one part");
    return problem;
  }

  // How the cache is held, as the tensors' types and shapes say.
  CacheType cache_type(const Tensor& keys, const Tensor& values, int64_t dim) const {
    const bool coded = keys.type == ort::kInt8;
    require(coded || keys.type == ort::kFloat || keys.type == ort::kUint8,
            "CachedAttention: the cache is neither int8 nor float nor uint8");
    require(keys.is(keys.type, 4) && keys.dims[0] == 1 && keys.dims[1] == kv_heads_,
            "CachedAttention: keys are not [1, K, slots, row]");
    require(values.is(keys.type, 4), "CachedAttention: values are not of the type of keys");
    for (int i = 0; i < 3; i++) require(values.dims[i] == keys.dims[i], "CachedAttention: values have not keys' shape");
    const auto rows_have = [&](int64_t k, int64_t v) { return keys.dims[3] == k && values.dims[3] == v; };
    const int64_t whole = dim + kFactorBytes, halves = dim / 2 + kFactorBytes;
    if (coded && rows_have(whole, halves)) return CacheType::kK8V4;
    if (coded && rows_have(halves, halves)) return CacheType::kInt4;
    require(coded ? rows_have(whole, whole) : rows_have(dim, dim),
            "CachedAttention: rows of keys or values are not of D numbers");
    return coded ? CacheType::kInt8 : keys.type == ort::kFloat ? CacheType::kFloat : CacheType::kFp8;
  }

  // Calls `visit` with each part of the run in turn; a run without room for all its tokens has one part too many.
  template <class Visit>
  void each_part(const Problem& whole, const Tensor& state, Visit visit) const {
    const int64_t* counts = static_cast<const int64_t*>(state.data);
    const int64_t* end = counts + state.dims[0];
    int64_t first = 0;
    for (; counts < end; counts += 4) {
      const State now{counts[0], counts[1], counts[2], counts[3], 0};
      const int64_t left = whole.tokens - first, room = now.capacity - now.before;
      const bool last = counts + 4 == end;
      const Problem part = part_of(whole, first, last || left < room ? left : room, now);
      visit(part);
      first += part.tokens;
    }
  }

  Problem part_of(const Problem& whole, int64_t first, int64_t tokens, const State& state) const {
    Problem part = whole;
    part.tokens = tokens;
    part.state = state;
    if (window_ && part.slots < state.capacity) part.state.ring = part.slots;
    part.qkv += first * whole.qkv_stride();
    if (part.out) part.out += first * whole.heads * whole.dim;
    for (const float** angles : {&part.cos, &part.sin, &part.cos_pinned, &part.sin_pinned}) {
      if (part.half) *angles += first * whole.half;
    }
    return part;
  }

  const float* centre_of(const Tensor& centre, int64_t dim) const {
    if (!centre.data) return nullptr;
    require(centre.is(ort::kFloat, 2) && centre.dims[0] == kv_heads_ && centre.dims[1] == dim,
            "CachedAttention: a centre is not float [K, D]");
    return static_cast<const float*>(centre.data);
  }

  void read_centre(const ort::KernelContext* context, int64_t dim, Problem& problem) const {
    const Tensor centre = input(context, kCentre), pairs = input(context, kPairs), turns = input(context, kTurns);
    problem.centre = centre_of(centre, dim);
    if (!problem.centre) return;  // it is left out
    require(pairs.is(ort::kInt64, 1), "CachedAttention: pairs are not int64 [P]");
    problem.pairs = static_cast<const int64_t*>(pairs.data);
    problem.turned = static_cast<int>(pairs.dims[0] <= kMaxTurned ? pairs.dims[0] : -1);
    if (problem.type == CacheType::kInt4) {
      require(turns.is(ort::kInt8, 2) && turns.dims[0] == problem.slots && turns.dims[1] == problem.turn_items(),
              "CachedAttention: turns are not int8 [slots, 2 P]");
      problem.turn_codes = static_cast<const int8_t*>(turns.data);
    } else {
      require(turns.is(ort::kFloat, 3) && turns.dims[0] == 2 && turns.dims[1] == pairs.dims[0] &&
                  turns.dims[2] == problem.slots,
              "CachedAttention: turns are not float [2, P, slots]");
      problem.turns = static_cast<const float*>(turns.data);
    }
  }

  int64_t heads_, kv_heads_;
  float scale_, softcap_;
  int64_t window_;
  const Kernels* kernels_[kCacheTypes];
};

}  // namespace
}  // namespace edgekv

// What ONNX Runtime calls when the library is registered.
EDGEKV_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  const ort::ApiTable* table = base->GetApi(ort::kVersion);
  if (!table) {
    const ort::Api oldest(base->GetApi(1));
    return oldest.CreateStatus(ort::kFail, "edgekv's operators need ONNX Runtime 1.17 or later");
  }
  edgekv::api = ort::Api(table);
  ort::CustomOpDomain* domain = nullptr;
  if (ort::Status* status = edgekv::api.CreateCustomOpDomain("edgekv", &domain)) return status;
  for (const ort::CustomOp* op :
       {edgekv::custom_op<edgekv::CachedAttention>(), edgekv::packed_matmul_op(), edgekv::packed_rows_op(),
        edgekv::table_matmul_op()}) {
    if (ort::Status* status = edgekv::api.CustomOpDomain_Add(domain, op)) return status;
  }
  return edgekv::api.AddCustomOpDomain(options, domain);
}

// How the cache is laid out; Python's native.py has the same number, so that a library from other sources is not used.
EDGEKV_EXPORT int edgekv_cache_format() { return edgekv::kCacheFormat; }

// The instruction set that INT8 attention runs with, for `edgekv info`.
EDGEKV_EXPORT const char* edgekv_instruction_set() {
  return edgekv::best_kernels(edgekv::CacheType::kInt8, std::getenv("EDGEKV_NATIVE_ISA"))->name;
}

// The instruction set that products of packed weights run with; "plain" is slower than ONNX Runtime's own.
EDGEKV_EXPORT const char* edgekv_matmul_instruction_set() {
  return edgekv::best_matmul(std::getenv("EDGEKV_NATIVE_ISA"))->name;
}

// The instruction set that products with a table (NF4, FP4) run with; "plain" is slower than ONNX Runtime's own.
EDGEKV_EXPORT const char* edgekv_table_instruction_set() {
  return edgekv::best_table(std::getenv("EDGEKV_NATIVE_ISA"))->name;
}
