#pragma once
// One list of op cases for every backend: a case creates its tensors on the device on which it is run and
// calls the op. tests/ops/parity_test.cpp runs each on the CPU and on CUDA (emulated or real), in f32 and
// bf16, and compares every output by one tolerance table.
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/gradcheck.h"

namespace sluice::test {

/// One run of a case on one device. Inputs depend only on their name, shape and spread, so that they are
/// equal on every device. A run with a measuring arena computes nothing and determines the memory that the
/// real one needs.
class CaseRun {
 public:
  struct Output {
    std::string name;
    Tensor device, host;  // host: filled by collect()
  };

  CaseRun(Context& context, DType storage, Arena& device_memory)
      : ctx(context), dtype(storage), wide(accumulate_dtype(storage)), memory_(device_memory) {}

  Context& ctx;
  const DType dtype, wide;  // storage of activations and weights; of gradients of parameters and statistics

  /// Normal values that bf16 holds exactly, in the storage type or another.
  Tensor input(const std::string& name, std::initializer_list<int64_t> dims, double spread = 1.0) {
    return input(name, dtype, dims, spread);
  }
  Tensor input(const std::string& name, DType type, std::initializer_list<int64_t> dims,
               double spread = 1.0) {
    Pool pool(static_cast<uint32_t>(std::hash<std::string>()(name)));
    return upload(name, pool.copy(pool.normal(DType::bf16, dims, spread), type));
  }
  /// Element i is value(i).
  Tensor input(const std::string& name, DType type, std::initializer_list<int64_t> dims,
               const std::function<double(int64_t)>& value) {
    Pool pool;
    const Tensor host = pool.zeros(type, dims);
    for (int64_t i = 0; i < host.numel(); ++i) Pool::set(host, i, value(i));
    return upload(name, host);
  }
  Tensor integers(const std::string& name, std::initializer_list<int64_t> dims, int32_t low, int32_t high) {
    Pool pool(static_cast<uint32_t>(std::hash<std::string>()(name)));
    return upload(name, pool.integers(dims, low, high));
  }

  /// Overwritten by the op: initialised to 0xff (NaN, -1), and compared afterwards.
  Tensor output(const std::string& name, std::initializer_list<int64_t> dims) {
    return output(name, dtype, dims);
  }
  Tensor output(const std::string& name, DType type, std::initializer_list<int64_t> dims) {
    Pool pool;
    const Tensor host = pool.zeros(type, dims);
    std::memset(host.data, 0xff, static_cast<size_t>(host.bytes()));
    return compared(name, upload(name, host));
  }
  /// Updated by the op: random before, compared afterwards.
  Tensor inout(const std::string& name, DType type, std::initializer_list<int64_t> dims,
               double spread = 1.0) {
    return compared(name, input(name, type, dims, spread));
  }
  /// An output in columns of a matrix that is wider by 8 on each side, which are compared as well.
  Tensor columns(const std::string& name, int64_t rows, int64_t width) {
    return inout(name + "'s matrix", dtype, {rows, width + 16}).columns(8, width);
  }
  /// An input that the op overwrites in place (aliasing): compared afterwards.
  Tensor compared(const std::string& name, const Tensor& t) {
    outputs_.push_back({name, t, {}});
    return t;
  }

  /// The same, compared bit for bit.
  Tensor compared_exactly(const std::string& name, const Tensor& t) {
    outputs_.push_back({name, Tensor(t.data, DType::u8, {t.bytes()}, t.name, t.device), {}});
    return t;
  }

  /// Waits, and brings the outputs to the host.
  const std::vector<Output>& collect() {
    for (Output& o : outputs_) {
      o.host = pool_.copy(Tensor(pool_.zeros(o.device.dtype, {o.device.numel()})), o.device.dtype);
      copy(ctx, o.host, o.device);
    }
    synchronize(ctx);
    return outputs_;
  }

 private:
  Tensor upload(const std::string& name, const Tensor& host) {
    Tensor t = host;
    t.data = memory_.alloc(name, host.dtype, {host.numel()}).data;
    t.device = memory_.device();
    t.name = memory_.entries().back().name.c_str();
    if (t.data) {
      copy(ctx, t, host);
      synchronize(ctx);  // host leaves
    }
    return t;
  }

  Arena& memory_;
  Pool pool_;
  std::vector<Output> outputs_;
};

struct OpCase {
  std::string name;  // "rope_forward T=5 H=2 D=8": op, then the parameters of the case
  std::function<void(CaseRun&)> run;
  double tolerance_factor = 1;  // factor on the table's entry; other values than 1 need a comment
  bool f32 = true, bf16 = true;
};

/// The table: norm-wise relative error between backends. A single element may be off by 16 times that, in
/// units of the root mean square of its tensor.
constexpr double parity_tolerance(DType storage) { return storage == DType::f32 ? 2e-6 : 4e-3; }

/// Random shapes: a family's generator appends one case.
using Random = std::mt19937;
inline int64_t uniform(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
template <class T>
T one_of(Random& random, std::initializer_list<T> choices) {
  return *(choices.begin() + uniform(random, 0, static_cast<int64_t>(choices.size()) - 1));
}

/// A family of ops: its cases by hand, and its generator (tests/ops/cases/FAMILY.cpp).
struct OpFamily {
  std::string name;
  std::vector<OpCase> cases;
  std::function<OpCase(Random&)> fuzz;
};

OpFamily activation_cases();
OpFamily adamw_cases();
OpFamily attention_cases();
OpFamily attention_hopper_cases();
OpFamily attention_kinds_cases();
OpFamily bias_cases();
OpFamily bit_sum_cases();
OpFamily cross_entropy_cases();
OpFamily elementwise_cases();
OpFamily embedding_cases();
OpFamily exclusive_cases();
OpFamily fixed_sum_cases();
OpFamily gate_cases();
OpFamily grouped_linear_cases();
OpFamily head_importance_cases();
OpFamily linear_cases();
OpFamily muon_cases();
OpFamily permute_cases();
OpFamily reduce_cases();
OpFamily rmsnorm_cases();
OpFamily rope_cases();
OpFamily router_cases();
OpFamily sparse_cases();
OpFamily switch_heads_cases();

}  // namespace sluice::test
