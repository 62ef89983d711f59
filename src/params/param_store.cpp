#include "params/param_store.h"

#include <algorithm>
#include <cmath>

#include "core/host_view.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"

namespace sluice {
namespace {

/// Parameters start at multiples of this many elements in both flat buffers: 64 bytes for bf16, more for
/// wider types, so that a parameter has one element offset whatever the dtype.
constexpr int64_t kAlignElements = 32;

int64_t count_elements(const ParamSpec& spec) {
  int64_t n = 1;
  for (const int64_t d : spec.shape) n *= d;
  return n;
}

Tensor piece(const Tensor& flat, int64_t offset, std::initializer_list<int64_t> dims, const char* name) {
  Tensor t(nullptr, flat.dtype, dims, name, flat.device);
  if (flat.data) t.data = static_cast<char*>(flat.data) + offset * dtype_size(flat.dtype);
  return t;
}

Tensor piece(const Tensor& flat, int64_t offset, const ParamSpec& spec) {
  if (spec.shape.size() == 1) return piece(flat, offset, {spec.shape[0]}, spec.name.c_str());
  return piece(flat, offset, {spec.shape[0], spec.shape[1]}, spec.name.c_str());
}

template <class T>
void fill_initial(T* values, int64_t n, const Init& init, const RandomStream& random) {
  using A = accumulate_t<T>;
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double x = init.kind == Init::Kind::constant
                           ? init.value
                           : init.value * random.normal(static_cast<uint64_t>(i));
      values[i] = static_cast<T>(static_cast<A>(x));
    }
  });
}

}  // namespace

ParamStore::Id ParamStore::add(ParamSpec spec) {
  SLUICE_CHECK(!spec.name.empty() && (spec.shape.size() == 1 || spec.shape.size() == 2),
               "parameter '{}': needs a name and rank 1 or 2, got rank {}", spec.name, spec.shape.size());
  SLUICE_CHECK(std::all_of(spec.shape.begin(), spec.shape.end(), [](int64_t d) { return d > 0; }),
               "parameter {}: every dimension must be positive", spec.name);
  SLUICE_CHECK(names_.insert(spec.name).second, "parameter {} is registered twice", spec.name);
  SLUICE_CHECK(flat_values_.empty(), "parameter {}: registered after the store was allocated", spec.name);
  if (spec.joined) {
    SLUICE_CHECK(!specs_.empty() && spec.shape.size() == 2 && specs_.back().shape.size() == 2 &&
                     specs_.back().shape[1] == spec.shape[1],
                 "parameter {}: joined needs a matrix of {} columns before it", spec.name, spec.shape.back());
  }
  spec.unit = unit_;
  specs_.push_back(std::move(spec));
  return static_cast<Id>(specs_.size()) - 1;
}

int64_t ParamStore::numel(Id id) const { return count_elements(specs_[static_cast<size_t>(id)]); }

int64_t ParamStore::total() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += count_elements(spec);
  return n;
}

int64_t ParamStore::total_active() const {
  double n = 0;
  for (const ParamSpec& spec : specs_) n += static_cast<double>(count_elements(spec)) * spec.active;
  return static_cast<int64_t>(std::llround(n));
}

void ParamStore::allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                          const std::function<int64_t(int64_t)>& padded) {
  const auto aligned = [](int64_t n) { return (n + kAlignElements - 1) / kAlignElements * kAlignElements; };
  offsets_.clear();
  int64_t end = 0;
  for (const ParamSpec& spec : specs_) {
    if (!spec.joined) end = aligned(end);
    offsets_.push_back(end);
    end += count_elements(spec);
  }
  end = padded ? padded(aligned(end)) : aligned(end);

  dtype_ = dtype;
  flat_values_ = values.alloc("values", dtype, {end});
  flat_grads_ = gradients ? gradients->alloc("gradients", accumulate_dtype(dtype), {end}) : Tensor();
  values_.assign(specs_.size(), {});
  joined_.assign(specs_.size(), {});
  grads_.assign(specs_.size(), {});
  joined_grads_.assign(specs_.size(), {});
  for (size_t i = 0; i < specs_.size(); ++i) {
    values_[i].value = piece(flat_values_, offsets_[i], specs_[i]);
    if (gradients) grads_[i] = piece(flat_grads_, offsets_[i], specs_[i]);
  }
  // A group of joined matrices has packed copies as a whole, and its members none.
  for (size_t first = 0; first < specs_.size();) {
    size_t last = first + 1;
    while (last < specs_.size() && specs_[last].joined) ++last;
    const ParamSpec& spec = specs_[first];
    LinearWeight& whole = joined_[first];
    whole = values_[first];
    joined_grads_[first] = grads_[first];
    if (last - first > 1) {
      int64_t out_features = 0;
      for (size_t i = first; i < last; ++i) out_features += specs_[i].shape[0];
      whole.value = piece(flat_values_, offsets_[first], {out_features, spec.shape[1]}, spec.name.c_str());
      if (gradients)
        joined_grads_[first] =
            piece(flat_grads_, offsets_[first], {out_features, spec.shape[1]}, spec.name.c_str());
    }
    whole.groups = spec.groups;
    if (spec.packed) {
      const int64_t out_features = whole.value.dim(0) / spec.groups, in_features = whole.value.dim(1);
      SLUICE_CHECK(out_features * spec.groups == whole.value.dim(0), "parameter {}: {} rows are not {} equal groups",
                   spec.name, whole.value.dim(0), spec.groups);
      const LinearPackedBytes bytes =
          spec.groups > 1 ? grouped_linear_packed_bytes(ctx, dtype, spec.groups, out_features, in_features)
                          : linear_packed_bytes(ctx, dtype, out_features, in_features, rows);
      if (bytes.forward > 0) whole.packed = values.alloc(spec.name + ".packed", DType::u8, {bytes.forward});
      if (gradients && bytes.transposed > 0)
        whole.packed_transposed =
            values.alloc(spec.name + ".packed_transposed", DType::u8, {bytes.transposed});
      if (last - first == 1) values_[first] = whole;
    }
    first = last;
  }
}

Tensor ParamStore::joined_grad(Id first, int source) const {
  SLUICE_CHECK(source >= 0 && source < grad_sources_, "joined_grad: source {} of {}", source, grad_sources_);
  return joined_grad(first);
}

Tensor ParamStore::part(const Tensor& flat, Id id) const {
  return piece(flat, offset(id), specs_[static_cast<size_t>(id)]);
}

void ParamStore::initialize(Context& ctx, uint64_t seed) {
  for (size_t i = 0; i < specs_.size(); ++i) {
    SLUICE_CHECK(values_[i].value.data, "initialize: parameter {} has no memory", specs_[i].name);
    HostView view(ctx, values_[i].value, HostView::Content::uninitialized);
    const Tensor& value = view.tensor();
    const RandomStream random(seed, specs_[i].name);
    switch (value.dtype) {
      case DType::f32:
        fill_initial(value.as<float>(), value.numel(), specs_[i].init, random);
        break;
      case DType::bf16:
        fill_initial(value.as<bf16>(), value.numel(), specs_[i].init, random);
        break;
      case DType::f64:
        fill_initial(value.as<double>(), value.numel(), specs_[i].init, random);
        break;
      default:
        fail(ExitCode::internal, "initialize: parameters cannot be {}", dtype_name(value.dtype));
    }
    view.write_back();
  }
}

void ParamStore::pack(Context& ctx) {
  for (const LinearWeight& w : joined_)
    if (w.packed || w.packed_transposed) w.groups > 1 ? grouped_linear_pack(ctx, w) : linear_pack(ctx, w);
}

void ParamStore::zero_grads(Context& ctx) { fill(ctx, flat_grads_, 0.0); }

}  // namespace sluice
