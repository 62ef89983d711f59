#pragma once
// The part of cuDNN 9's backend API that cudnn.cu needs: the library, loaded on first use, and operation
// graphs of named tensors. Only host code; included only if cuDNN's headers are available.
#include <cudnn.h>
#include <dlfcn.h>

#include <array>
#include <vector>

#include "core/error.h"

namespace sluice::cuda::cudnn {

/// The functions called, looked up at run time, so that the program runs without cuDNN and reports its
/// absence only on use.
struct Library {
  void* handle = nullptr;
  decltype(&cudnnCreate) create = nullptr;
  decltype(&cudnnDestroy) destroy = nullptr;
  decltype(&cudnnSetStream) set_stream = nullptr;
  decltype(&cudnnGetErrorString) error_string = nullptr;
  decltype(&cudnnGetVersion) version = nullptr;
  decltype(&cudnnBackendCreateDescriptor) create_descriptor = nullptr;
  decltype(&cudnnBackendDestroyDescriptor) destroy_descriptor = nullptr;
  decltype(&cudnnBackendFinalize) finalize = nullptr;
  decltype(&cudnnBackendSetAttribute) set_attribute = nullptr;
  decltype(&cudnnBackendGetAttribute) get_attribute = nullptr;
  decltype(&cudnnBackendExecute) execute = nullptr;

  /// Error(usage) "attention.kernel cudnn: libcudnn.so.9: cannot open shared object file".
  void load() {
    handle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (!handle) fail(ExitCode::usage, "attention.kernel cudnn: {}", dlerror());
    find(create, "cudnnCreate"), find(destroy, "cudnnDestroy"), find(set_stream, "cudnnSetStream");
    find(error_string, "cudnnGetErrorString"), find(version, "cudnnGetVersion");
    find(create_descriptor, "cudnnBackendCreateDescriptor"),
        find(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    find(finalize, "cudnnBackendFinalize"), find(execute, "cudnnBackendExecute");
    find(set_attribute, "cudnnBackendSetAttribute"), find(get_attribute, "cudnnBackendGetAttribute");
  }
  void check(cudnnStatus_t status, const char* call) const {
    if (status != CUDNN_STATUS_SUCCESS) fail(ExitCode::internal, "{}: {}", call, error_string(status));
  }

 private:
  template <class F>
  void find(F& f, const char* name) {
    f = reinterpret_cast<F>(dlsym(handle, name));
    if (!f) fail(ExitCode::usage, "attention.kernel cudnn: libcudnn.so.9 has no {}", name);
  }
};

/// A backend descriptor that destroys itself.
class Descriptor {
 public:
  Descriptor(const Library& library, cudnnBackendDescriptorType_t type) : library_(&library) {
    library.check(library.create_descriptor(type, &raw_), "cudnnBackendCreateDescriptor");
  }
  Descriptor(Descriptor&& other) noexcept : library_(other.library_), raw_(other.raw_) {
    other.raw_ = nullptr;
  }
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (raw_) library_->destroy_descriptor(raw_);
  }

  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T* values,
                  int64_t count) {
    library_->check(library_->set_attribute(raw_, name, type, count, values), "cudnnBackendSetAttribute");
    return *this;
  }
  template <class T>
  Descriptor& set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, T value) {
    return set(name, type, &value, 1);
  }
  Descriptor& set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    return set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, value.raw_);
  }
  Descriptor& finalize(const char* what) {
    library_->check(library_->finalize(raw_), what);
    return *this;
  }
  /// Whether cuDNN accepts the descriptor.
  bool try_finalize() { return library_->finalize(raw_) == CUDNN_STATUS_SUCCESS; }
  cudnnBackendDescriptor_t raw() const { return raw_; }

 private:
  const Library* library_;
  cudnnBackendDescriptor_t raw_ = nullptr;
};

using Dims = std::array<int64_t, 4>;  // batch, heads, rows, columns

/// Operations on tensors, which are numbered from 0 in the order of their creation. Bound tensors and scalars
/// come first; the others exist only inside the kernels.
class GraphBuilder {
 public:
  using Id = int64_t;
  static int64_t unique_id(Id id) { return id + 1; }
  explicit GraphBuilder(const Library& library) : library_(library) {}

  /// Memory, 16-byte aligned.
  Id bound(cudnnDataType_t type, Dims dims, Dims strides) { return add(type, dims, strides, false, false); }
  /// A number on the host, given at every call.
  Id scalar() { return add(CUDNN_DATA_FLOAT, {1, 1, 1, 1}, {1, 1, 1, 1}, false, true); }
  Id inner(cudnnDataType_t type, Dims dims, Dims strides) { return add(type, dims, strides, true, false); }
  Id inner(cudnnDataType_t type, Dims dims) {
    return inner(type, dims, {dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1});
  }

  void matmul(Id a, Id b, Id c) {
    Descriptor product(library_, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    product.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT).finalize("cudnn matmul");
    operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, at(a))
        .set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, at(b))
        .set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, at(c))
        .set(CUDNN_ATTR_OPERATION_MATMUL_DESC, product)
        .finalize("cudnn matmul");
    keep(std::move(product));
  }
  /// y = mode(x), mode(x, b), or t ? x : b.
  void pointwise(cudnnPointwiseMode_t mode, Id y, Id x, Id b = -1, Id t = -1,
                 cudnnDataType_t compute = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    Descriptor point(library_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    point.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode)
        .set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
    if (axis >= 0) point.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, axis);
    point.finalize("cudnn pointwise");
    Descriptor& op = operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, point)
        .set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, at(x));
    if (b >= 0) op.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, at(b));
    if (t >= 0) op.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, at(t));
    op.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, at(y)).finalize("cudnn pointwise");
    keep(std::move(point));
  }
  /// Over the dimensions in which y is 1 (or, heads, a divisor) and x is not.
  void reduce(cudnnReduceTensorOp_t mode, Id y, Id x) {
    Descriptor reduction(library_, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    reduction.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, mode)
        .set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT)
        .finalize("cudnn reduction");
    operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, at(x))
        .set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, at(y))
        .set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, reduction)
        .finalize("cudnn reduction");
    keep(std::move(reduction));
  }
  void reshape(Id y, Id x) {
    operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)
        .set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, at(x))
        .set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, at(y))
        .finalize("cudnn reshape");
  }
  /// In rows, columns of scores: -infinity right of the diagonal.
  Id causal(Id scores, Dims dims, Id minus_infinity) {
    const Id row = inner(CUDNN_DATA_INT32, dims), column = inner(CUDNN_DATA_INT32, dims);
    const Id visible = inner(CUDNN_DATA_BOOLEAN, dims), masked = inner(CUDNN_DATA_FLOAT, dims);
    pointwise(CUDNN_POINTWISE_GEN_INDEX, row, scores, -1, -1, CUDNN_DATA_INT32, 2);
    pointwise(CUDNN_POINTWISE_GEN_INDEX, column, scores, -1, -1, CUDNN_DATA_INT32, 3);
    pointwise(CUDNN_POINTWISE_CMP_GE, visible, row, column, -1, CUDNN_DATA_BOOLEAN);
    pointwise(CUDNN_POINTWISE_BINARY_SELECT, masked, scores, minus_infinity, visible);
    return masked;
  }

  /// The first plan of cuDNN's heuristic that can be built; empty if there is none.
  std::vector<Descriptor> plan(cudnnHandle_t handle) {
    std::vector<cudnnBackendDescriptor_t> raw;
    for (const Descriptor& op : operations_) raw.push_back(op.raw());
    Descriptor graph(library_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle)
        .set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, raw.data(),
             static_cast<int64_t>(raw.size()));
    std::vector<Descriptor> result;
    if (!graph.try_finalize()) return result;
    for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
      Descriptor heuristic(library_, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
      heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph)
          .set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
      if (!heuristic.try_finalize()) continue;
      constexpr int64_t kMost = 16;
      std::vector<Descriptor> configs;
      std::vector<cudnnBackendDescriptor_t> config_raw;
      for (int64_t i = 0; i < kMost; ++i) {
        configs.emplace_back(library_, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        config_raw.push_back(configs.back().raw());
      }
      int64_t count = 0;
      library_.check(library_.get_attribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                            CUDNN_TYPE_BACKEND_DESCRIPTOR, kMost, &count, config_raw.data()),
                     "cudnnBackendGetAttribute");
      for (int64_t i = 0; i < count && i < kMost; ++i) {
        Descriptor plan(library_, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle)
            .set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[static_cast<size_t>(i)]);
        if (!plan.try_finalize()) continue;
        result.push_back(std::move(plan));
        return result;
      }
    }
    return result;
  }

 private:
  Id add(cudnnDataType_t type, Dims dims, Dims strides, bool is_inner, bool by_value) {
    const Id id = static_cast<Id>(tensors_.size());
    Descriptor t(library_, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    t.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, unique_id(id))
        .set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type)
        .set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16})
        .set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims.data(), 4)
        .set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides.data(), 4)
        .set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_inner)
        .set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, by_value)
        .finalize("cudnn tensor");
    tensors_.push_back(std::move(t));
    return id;
  }
  Descriptor& operation(cudnnBackendDescriptorType_t type) {
    operations_.emplace_back(library_, type);
    return operations_.back();
  }
  const Descriptor& at(Id id) const { return tensors_[static_cast<size_t>(id)]; }
  void keep(Descriptor d) { kept_.push_back(std::move(d)); }

  const Library& library_;
  std::vector<Descriptor> tensors_, operations_, kept_;
};

}  // namespace sluice::cuda::cudnn
