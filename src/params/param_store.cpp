#include "params/param_store.h"

#include <algorithm>
#include <cmath>
#include <utility>

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
void fill_initial(T* values, int64_t first, int64_t n, const Init& init, const RandomStream& random) {
  using A = accumulate_t<T>;
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double x = init.kind == Init::Kind::constant
                           ? init.value
                           : init.value * random.normal(static_cast<uint64_t>(first + i));
      values[i] = static_cast<T>(static_cast<A>(x));
    }
  });
}

}  // namespace

ParamStore::Id ParamStore::add(ParamSpec spec) {
  if (!spec.joined) add_adapters();
  const Id id = push(std::move(spec));
  if (lora_.rank == 0) return id;
  ParamSpec& added = specs_.back();
  added.trainable = false;
  if (!targeted(added.name)) return id;
  if (added.when_frozen != WhenFrozen::adapted)
    fail(ExitCode::usage,
         "lora.targets: {} is named, but gets no adapter in this version (nor do experts, their routers, "
         "norms, embedding and "
         "head); name matrices by more of their names, as self_attn.gate_proj",
         added.name);
  to_adapt_.push_back(id);
  return id;
}

/// Whether a target is the end of the module's name, from a point on.
bool ParamStore::targeted(const std::string& name) {
  constexpr std::string_view kWeight = ".weight";
  if (!name.ends_with(kWeight)) return false;
  const std::string_view module(name.data(), name.size() - kWeight.size());
  bool found = false;
  for (size_t i = 0; i < lora_.targets.size(); ++i) {
    const std::string& target = lora_.targets[i];
    const bool hit = module == target || module.ends_with("." + target);
    if (hit) target_used_[i] = true;
    found |= hit;
  }
  return found;
}

void ParamStore::check_targets() const {
  for (size_t i = 0; lora_.rank > 0 && i < target_used_.size(); ++i)
    if (!target_used_[i])
      fail(ExitCode::usage, "lora.targets: no matrix of this model is called {}", lora_.targets[i]);
}

void ParamStore::add_adapters() {
  const int unit = unit_;
  for (const Id id : std::exchange(to_adapt_, {})) {
    const ParamSpec base = specs_[static_cast<size_t>(id)];
    Adapter adapter{.matrix = id, .a = 0, .b = 0, .begin = 0};
    Id first = id;
    for (; specs_[static_cast<size_t>(first)].joined; --first)
      adapter.begin += specs_[static_cast<size_t>(first) - 1].shape[0];
    const std::string module = base.name.substr(0, base.name.rfind('.'));
    const int64_t out_features = base.shape[0], in_features = base.shape[1];
    unit_ = base.unit;
    adapter.a = push({.name = module + ".lora_A.weight",
                      .shape = {lora_.rank, in_features},
                      .init = Init::normal(1 / std::sqrt(3.0 * static_cast<double>(in_features))),
                      .packed = true});
    adapter.b = push({.name = module + ".lora_B.weight",
                      .shape = {out_features, lora_.rank},
                      .init = Init::constant(0),
                      .packed = true});
    adapters_[static_cast<size_t>(first)].push_back(adapter);
  }
  unit_ = unit;
}

ParamStore::Id ParamStore::push(ParamSpec spec) {
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
  adapters_.emplace_back();
  return static_cast<Id>(specs_.size()) - 1;
}

int64_t ParamStore::numel(Id id) const { return count_elements(specs_[static_cast<size_t>(id)]); }

int64_t ParamStore::total() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += count_elements(spec);
  return n;
}

int64_t ParamStore::total_trained() const {
  int64_t n = 0;
  for (const ParamSpec& spec : specs_) n += spec.trainable ? count_elements(spec) : 0;
  return n;
}

int64_t ParamStore::total_active() const {
  double n = 0;
  for (const ParamSpec& spec : specs_) n += static_cast<double>(count_elements(spec)) * spec.active;
  return static_cast<int64_t>(std::llround(n));
}

/// Offsets and buckets: units ascend, each with what is alike first, then its experts.
void ParamStore::lay_out() {
  const auto aligned = [](int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; };
  offsets_.assign(specs_.size(), 0);
  buckets_.clear();
  units_.clear();
  for (const ParamSpec& spec : specs_)
    if (static_cast<size_t>(spec.unit) >= units_.size()) units_.resize(static_cast<size_t>(spec.unit) + 1);
  frozen_ = {};
  for (size_t i = 0; i < specs_.size(); ++i) {
    Unit& unit = specs_[i].trainable ? units_[static_cast<size_t>(specs_[i].unit)] : frozen_;
    unit.ids.push_back(static_cast<Id>(i));
    if (specs_[i].trainable) continue;
    if (!specs_[i].joined) frozen_.end = aligned(frozen_.end, kAlignElements);
    offsets_[i] = frozen_.end;
    frozen_.end += count_elements(specs_[i]);
  }
  int64_t end = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    unit.begin = end;
    for (const bool of_expert : {false, true}) {
      const int64_t begin = end;
      if (of_expert) unit.expert_begin = begin;
      for (const Id id : unit.ids) {
        const ParamSpec& spec = specs_[static_cast<size_t>(id)];
        if (spec.of_expert != of_expert) continue;
        if (!spec.joined) end = aligned(end, kAlignElements);
        offsets_[static_cast<size_t>(id)] = end;
        end += count_elements(spec);
      }
      end = begin +
            aligned(end - begin, kAlignElements * (of_expert ? layout_.expert_ranks : layout_.dense_ranks));
      if (end > begin) buckets_.push_back({static_cast<int>(u), of_expert, begin, end});
    }
    unit.end = end;
  }
}

std::vector<ParamStore::Piece> ParamStore::pieces(int dense_rank, int expert_rank) const {
  std::vector<Piece> pieces;
  int64_t at = 0;
  for (const Bucket& b : buckets_) {
    const int64_t count = (b.end - b.begin) / (b.of_expert ? layout_.expert_ranks : layout_.dense_ranks);
    pieces.push_back({b, b.begin + (b.of_expert ? expert_rank : dense_rank) * count, count, at});
    at += count;
  }
  return pieces;
}

std::vector<ParamStore::Slice> ParamStore::slices(const Piece& piece) const {
  std::vector<Slice> slices;
  for (const Id id : units_[static_cast<size_t>(piece.of.unit)].ids) {
    const int64_t first = std::max(piece.begin, offset(id)),
                  end = std::min(piece.begin + piece.count, offset(id) + numel(id));
    if (first < end) slices.push_back({id, first - offset(id), end - first, first - piece.begin});
  }
  return slices;
}

/// Where packed copies lie in their unit's, and how much all of a unit need.
void ParamStore::measure_packed(Context& ctx, int64_t rows, Arena& values, bool transposed) {
  packed_offsets_.assign(specs_.size(), -1);
  packed_transposed_offsets_.assign(specs_.size(), -1);
  for (size_t i = 0; i < specs_.size(); ++i) {
    LinearWeight& whole = joined_[i];
    if (specs_[i].joined || !specs_[i].packed) continue;
    const int64_t out_features = whole.value.dim(0) / whole.groups, in_features = whole.value.dim(1);
    SLUICE_CHECK(out_features * whole.groups == whole.value.dim(0),
                 "parameter {}: {} rows are not {} equal groups", specs_[i].name, whole.value.dim(0),
                 whole.groups);
    const LinearPackedBytes bytes =
        whole.groups > 1 ? grouped_linear_packed_bytes(ctx, dtype_, whole.groups, out_features, in_features)
                         : linear_packed_bytes(ctx, dtype_, out_features, in_features, rows);
    const auto take = [&](int64_t size, Tensor& packed, int64_t& offset, const char* suffix) {
      if (size == 0) return;
      if (layout_.whole_values || !specs_[i].trainable) {
        packed = values.alloc(specs_[i].name + suffix, DType::u8, {size});
        return;
      }
      Unit& unit = units_[static_cast<size_t>(specs_[i].unit)];
      packed = Tensor(nullptr, DType::u8, {size}, specs_[i].name.c_str(), device_);
      offset = unit.packed_bytes;
      unit.packed_bytes += (size + 63) / 64 * 64;
    };
    take(bytes.forward, whole.packed, packed_offsets_[i], ".packed");
    if (transposed)
      take(bytes.transposed, whole.packed_transposed, packed_transposed_offsets_[i], ".packed_transposed");
  }
}

void ParamStore::allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                          const StoreLayout& layout) {
  add_adapters();
  check_targets();
  layout_ = layout;
  dtype_ = dtype;
  device_ = values.device();
  lay_out();
  const DType wide = accumulate_dtype(dtype);
  slots_ = {};
  flat_values_ = layout.whole_values ? values.alloc("values", dtype, {flat_size()}) : Tensor();
  flat_grads_ =
      gradients && layout.whole_grads ? gradients->alloc("gradients", wide, {flat_size()}) : Tensor();

  if (!frozen_.ids.empty())
    frozen_.values = static_cast<char*>(values.alloc("frozen values", dtype, {frozen_.end}).data);
  values_.assign(specs_.size(), {});
  joined_.assign(specs_.size(), {});
  grads_.assign(specs_.size(), {});
  joined_grads_.assign(specs_.size(), {});
  for (size_t i = 0; i < specs_.size(); ++i) {
    const ParamSpec& spec = specs_[i];
    values_[i].value = piece(Tensor(nullptr, dtype, {1}, "", device_), 0, spec);
    joined_[i] = values_[i];
    joined_[i].groups = spec.groups;
    int64_t out_features = spec.shape[0];
    for (size_t next = i + 1; !spec.joined && next < specs_.size() && specs_[next].joined; ++next)
      out_features += specs_[next].shape[0];
    if (out_features > spec.shape[0])
      joined_[i].value = Tensor(nullptr, dtype, {out_features, spec.shape[1]}, spec.name.c_str(), device_);
    if (!gradients || (!spec.trainable && spec.when_frozen != WhenFrozen::discarded)) continue;
    grads_[i] = values_[i].value;
    joined_grads_[i] = joined_[i].value;
    grads_[i].dtype = joined_grads_[i].dtype = wide;
  }
  measure_packed(ctx, rows, values, gradients != nullptr);
  for (size_t i = 0; i < specs_.size(); ++i)
    for (const Adapter& adapter : adapters_[i])
      joined_[i].low_rank.push_back({.a = &linear(adapter.a),
                                     .b = &linear(adapter.b),
                                     .scale = lora_.alpha / static_cast<double>(lora_.rank),
                                     .begin = adapter.begin});
  set_value_views(frozen_);
  if (gradients) place_discarded(*gradients);

  // Places for what is not kept whole.
  int64_t block = 0, block_packed = 0, block_experts = 0, experts = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    experts += unit.end - unit.expert_begin;
    if (u == 0) continue;
    block = std::max(block, unit.end - unit.begin);
    block_packed = std::max(block_packed, unit.packed_bytes);
    block_experts = std::max(block_experts, unit.end - unit.expert_begin);
  }
  const int64_t more = layout.grad_sources - 1;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const bool around = slot == 2;
    const int64_t n = around ? units_[0].end - units_[0].begin : block,
                  packed = around ? units_[0].packed_bytes : block_packed;
    if (!layout.whole_values) {
      slots_[slot].values = values.alloc("values of a unit", dtype, {n});
      if (packed > 0) slots_[slot].packed = values.alloc("packed weights of a unit", DType::u8, {packed});
    }
    if (gradients && !layout.whole_grads) {
      slots_[slot].grads = gradients->alloc("gradients of a unit", wide, {n});
      if (more * block_experts > 0 && !around)
        slots_[slot].source_grads =
            gradients->alloc("experts' gradients by source", wide, {more * block_experts});
    }
  }
  if (gradients && layout.whole_grads && more * experts > 0)
    slots_[0].source_grads = gradients->alloc("experts' gradients by source", wide, {more * experts});

  int64_t source_at = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    const auto at = [](const Tensor& t, int64_t element) {
      return t.data ? static_cast<char*>(t.data) + element * dtype_size(t.dtype) : nullptr;
    };
    if (layout.whole_values) {
      unit.values = at(flat_values_, unit.begin);
      set_value_views(unit);
    }
    if (flat_grads_) {
      unit.grads = at(flat_grads_, unit.begin);
      unit.source_grads = at(slots_[0].source_grads, source_at);
      source_at += more * (unit.end - unit.expert_begin);
      set_grad_views(unit);
    }
    if (!layout.whole_values) place_values(static_cast<int>(u));
    if (gradients && !layout.whole_grads) place_grads(static_cast<int>(u));
  }
}

/// Gradients that nobody reads.
void ParamStore::place_discarded(Arena& gradients) {
  const auto discarded = [&](Id id) {
    return specs_[static_cast<size_t>(id)].when_frozen == WhenFrozen::discarded;
  };
  int64_t most = 0;
  for (const Id id : frozen_.ids)
    if (discarded(id)) most = std::max(most, numel(id));
  discarded_ = {};
  if (most == 0) return;
  discarded_ = gradients.alloc("gradients of what is frozen", accumulate_dtype(dtype_), {most});
  for (const Id id : frozen_.ids)
    if (discarded(id))
      grads_[static_cast<size_t>(id)].data = joined_grads_[static_cast<size_t>(id)].data = discarded_.data;
}

void ParamStore::set_value_views(const Unit& unit) {
  for (const Id id : unit.ids) {
    const auto i = static_cast<size_t>(id);
    if (unit.values)
      values_[i].value.data = joined_[i].value.data =
          unit.values + (offsets_[i] - unit.begin) * dtype_size(dtype_);
    // A group of joined matrices has packed copies as a whole, and its members none.
    const bool alone = !specs_[i].joined && (i + 1 == specs_.size() || !specs_[i + 1].joined);
    if (alone) values_[i] = joined_[i];
  }
}

void ParamStore::set_grad_views(const Unit& unit) {
  if (!unit.grads) return;
  for (const Id id : unit.ids) {
    const auto i = static_cast<size_t>(id);
    grads_[i].data = joined_grads_[i].data =
        unit.grads + (offsets_[i] - unit.begin) * dtype_size(grads_[i].dtype);
  }
}

Tensor ParamStore::unit_values(int unit) const {
  const Unit& u = units_[static_cast<size_t>(unit)];
  const int64_t n = u.end - u.begin;
  return layout_.whole_values ? flat_values_.rows(u.begin, n)
                              : slots_[static_cast<size_t>(slot_of(unit))].values.rows(0, n);
}

void ParamStore::place_values(int unit) {
  Unit& u = units_[static_cast<size_t>(unit)];
  const Slot& s = slots_[static_cast<size_t>(slot_of(unit))];
  u.values = static_cast<char*>(s.values.data);
  for (const Id id : u.ids) {
    const auto i = static_cast<size_t>(id);
    if (!s.packed.data) continue;
    if (packed_offsets_[i] >= 0)
      joined_[i].packed.data = static_cast<char*>(s.packed.data) + packed_offsets_[i];
    if (packed_transposed_offsets_[i] >= 0)
      joined_[i].packed_transposed.data = static_cast<char*>(s.packed.data) + packed_transposed_offsets_[i];
  }
  set_value_views(u);
}

void ParamStore::place_grads(int unit) {
  Unit& u = units_[static_cast<size_t>(unit)];
  const Slot& s = slots_[static_cast<size_t>(slot_of(unit))];
  u.grads = static_cast<char*>(s.grads.data);
  u.source_grads = static_cast<char*>(s.source_grads.data);
  set_grad_views(u);
}

Tensor ParamStore::bucket_values(const Bucket& b) const {
  const Unit& u = units_[static_cast<size_t>(b.unit)];
  char* at = u.values ? u.values + (b.begin - u.begin) * dtype_size(dtype_) : nullptr;
  return Tensor(at, dtype_, {b.end - b.begin}, "values", device_);
}

Tensor ParamStore::bucket_grads(const Bucket& b, int source) const {
  const Unit& u = units_[static_cast<size_t>(b.unit)];
  const DType wide = accumulate_dtype(dtype_);
  SLUICE_CHECK(source == 0 || (b.of_expert && source < layout_.grad_sources), "bucket_grads: source {}",
               source);
  char* at = !u.grads      ? nullptr
             : source == 0 ? u.grads + (b.begin - u.begin) * dtype_size(wide)
                           : u.source_grads + (source - 1) * (b.end - b.begin) * dtype_size(wide);
  return Tensor(at, wide, {b.end - b.begin}, "gradients", device_);
}

Tensor ParamStore::joined_grad(Id first, int source) const {
  SLUICE_CHECK(source >= 0 && source < layout_.grad_sources, "joined_grad: source {} of {}", source,
               layout_.grad_sources);
  Tensor t = joined_grad(first);
  if (source == 0 || !t.data) return t;
  const auto i = static_cast<size_t>(first);
  SLUICE_CHECK(specs_[i].of_expert, "joined_grad: {} is no expert's", specs_[i].name);
  const Unit& u = units_[static_cast<size_t>(specs_[i].unit)];
  t.data = u.source_grads +
           ((source - 1) * (u.end - u.expert_begin) + offsets_[i] - u.expert_begin) * dtype_size(t.dtype);
  return t;
}

Tensor ParamStore::part(const Tensor& flat, Id id) const {
  return piece(flat, offset(id), specs_[static_cast<size_t>(id)]);
}

void ParamStore::initialize(Context& ctx, uint64_t seed, bool frozen_too) {
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!frozen_too && !specs_[i].trainable) continue;
    SLUICE_CHECK(values_[i].value.data, "initialize: parameter {} has no memory", specs_[i].name);
    initialize_slice(ctx, {.id = static_cast<Id>(i), .count = values_[i].value.numel()}, values_[i].value,
                     seed);
  }
}

void ParamStore::initialize_slice(Context& ctx, const Slice& slice, const Tensor& target,
                                  uint64_t seed) const {
  const ParamSpec& spec = specs_[static_cast<size_t>(slice.id)];
  const RandomStream random(seed, spec.name);
  HostView view(ctx, target, HostView::Content::uninitialized);
  const Tensor& part = view.tensor();
  switch (part.dtype) {
    case DType::f32:
      fill_initial(part.as<float>(), slice.begin, slice.count, spec.init, random);
      break;
    case DType::bf16:
      fill_initial(part.as<bf16>(), slice.begin, slice.count, spec.init, random);
      break;
    case DType::f64:
      fill_initial(part.as<double>(), slice.begin, slice.count, spec.init, random);
      break;
    case DType::i32:
    case DType::u8:
      fail(ExitCode::internal, "initialize: parameters cannot be {}", dtype_name(part.dtype));
  }
  view.write_back();
}

void ParamStore::pack(Context& ctx) {
  for (const LinearWeight& w : joined_)
    if (w.packed || w.packed_transposed) w.groups > 1 ? grouped_linear_pack(ctx, w) : linear_pack(ctx, w);
}

void ParamStore::pack_trained(Context& ctx) {
  for (const Unit& unit : units_) pack(ctx, unit);
}

void ParamStore::pack(Context& ctx, const Unit& unit) {
  for (const Id id : unit.ids) {
    const LinearWeight& w = joined_[static_cast<size_t>(id)];
    if (w.packed || w.packed_transposed) w.groups > 1 ? grouped_linear_pack(ctx, w) : linear_pack(ctx, w);
  }
}

void ParamStore::zero_grads(Context& ctx) {
  fill(ctx, flat_grads_, 0.0);
  if (discarded_) fill(ctx, discarded_, 0.0);
}

}  // namespace sluice
