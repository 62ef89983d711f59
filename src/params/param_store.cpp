#include "params/param_store.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "params/init.h"

namespace sluice {
namespace {

Tensor piece(const Tensor& flat, int64_t offset, std::initializer_list<int64_t> dims, const char* name) {
  Tensor t(nullptr, flat.dtype, dims, name, flat.device);
  if (flat.data) t.data = static_cast<char*>(flat.data) + offset * dtype_size(flat.dtype);
  return t;
}

Tensor piece(const Tensor& flat, int64_t offset, const ParamSpec& spec) {
  if (spec.shape.size() == 1) return piece(flat, offset, {spec.shape[0]}, spec.name.c_str());
  return piece(flat, offset, {spec.shape[0], spec.shape[1]}, spec.name.c_str());
}

char* at(const Tensor& t, int64_t element) {
  return t.data ? static_cast<char*>(t.data) + element * dtype_size(t.dtype) : nullptr;
}

}  // namespace

void ParamStore::allocate(Context& ctx, DType dtype, int64_t rows, Arena& values, Arena* gradients,
                          const StoreLayout& layout) {
  registry_.close();
  layout_ = layout;
  dtype_ = dtype;
  device_ = values.device();
  flat_ = FlatLayout(specs(), layout);
  slots_ = {};
  flat_values_ = layout.whole_values ? values.alloc("values", dtype, {flat_size()}) : Tensor();
  flat_grads_ = gradients && layout.whole_grads
                    ? gradients->alloc("gradients", accumulate_dtype(dtype), {flat_size()})
                    : Tensor();
  frozen_ = {};
  if (!flat_.frozen().ids.empty())
    frozen_.values = static_cast<char*>(values.alloc("frozen values", dtype, {flat_.frozen().end}).data);
  make_views(gradients != nullptr);
  packed_.allocate(ctx, specs(),
                   {.dtype = dtype,
                    .rows = rows,
                    .transposed = gradients != nullptr,
                    .move_with_unit = !layout.whole_values},
                   values, {values_, joined_});
  for (size_t i = 0; i < specs().size(); ++i)
    for (const Adapter& adapter : adapters(static_cast<Id>(i))) {
      LowRank low_rank = {.a = &linear(adapter.a),
                          .b = &linear(adapter.b),
                          .scale = registry_.adapter_scale(),
                          .begin = adapter.begin};
      joined_[i].low_rank.push_back(low_rank);
      low_rank.begin = 0;
      if (packed_.forward_alone(adapter.matrix))
        values_[static_cast<size_t>(adapter.matrix)].low_rank.push_back(low_rank);
    }
  set_value_views(flat_.frozen(), frozen_);
  if (gradients) place_discarded(*gradients);
  allocate_slots(values, gradients);

  places_.assign(flat_.units().size(), {});
  int64_t source_at = 0;
  for (int u = 0; u < num_units(); ++u) {
    const FlatLayout::Unit& unit = flat_.unit(u);
    if (layout.whole_values) {
      place(u).values = at(flat_values_, unit.begin);
      set_value_views(unit, place(u));
    }
    if (flat_grads_) {
      place(u).grads = at(flat_grads_, unit.begin);
      place(u).source_grads = at(slots_[0].source_grads, source_at);
      source_at += (layout.grad_sources - 1) * unit.experts();
      set_grad_views(unit, place(u));
    }
    if (!layout.whole_values) place_values(u);
    if (gradients && !layout.whole_grads) place_grads(u);
  }
}

/// Shapes of all values and gradients, and of joined groups; without memory.
void ParamStore::make_views(bool gradients) {
  const DType wide = accumulate_dtype(dtype_);
  const std::vector<ParamSpec>& specs = this->specs();
  values_.assign(specs.size(), {});
  joined_.assign(specs.size(), {});
  grads_.assign(specs.size(), {});
  joined_grads_.assign(specs.size(), {});
  unbegun_.assign(specs.size(), false);
  for (size_t i = 0; i < specs.size(); ++i) {
    const ParamSpec& spec = specs[i];
    values_[i].value = piece(Tensor(nullptr, dtype_, {1}, "", device_), 0, spec);
    joined_[i] = values_[i];
    values_[i].joined_in_backward = gradients && spec.joined_in_backward;
    joined_[i].groups = spec.groups;
    int64_t out_features = spec.shape[0];
    for (size_t next = i + 1; !spec.joined && next < specs.size() && specs[next].joined; ++next)
      out_features += specs[next].shape[0];
    if (out_features > spec.shape[0]) joined_[i].value.shape[0] = out_features;
    if (!gradients || (!spec.trainable && spec.when_frozen != WhenFrozen::discarded)) continue;
    grads_[i] = values_[i].value;
    joined_grads_[i] = joined_[i].value;
    grads_[i].dtype = joined_grads_[i].dtype = wide;
  }
}

/// Memory for units whose values or gradients are not kept whole, and for experts' gradients of other
/// sources.
void ParamStore::allocate_slots(Arena& values, Arena* gradients) {
  const DType wide = accumulate_dtype(dtype_);
  int64_t block = 0, block_packed = 0, block_experts = 0, experts = 0;
  for (int u = 0; u < num_units(); ++u) {
    const FlatLayout::Unit& unit = flat_.unit(u);
    experts += unit.experts();
    if (u == 0) continue;
    block = std::max(block, unit.end - unit.begin);
    block_packed = std::max(block_packed, packed_.unit_bytes(u));
    block_experts = std::max(block_experts, unit.experts());
  }
  const int64_t more = layout_.grad_sources - 1;
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const bool around = slot == 2;
    const int64_t n = around ? flat_.unit(0).end - flat_.unit(0).begin : block,
                  packed = around ? packed_.unit_bytes(0) : block_packed;
    if (!layout_.whole_values) {
      slots_[slot].values = values.alloc("values of a unit", dtype_, {n});
      if (packed > 0) slots_[slot].packed = values.alloc("packed weights of a unit", DType::u8, {packed});
    }
    if (gradients && !layout_.whole_grads) {
      slots_[slot].grads = gradients->alloc("gradients of a unit", wide, {n});
      if (more * block_experts > 0 && !around)
        slots_[slot].source_grads =
            gradients->alloc("experts' gradients by source", wide, {more * block_experts});
    }
  }
  if (gradients && layout_.whole_grads && more * experts > 0)
    slots_[0].source_grads = gradients->alloc("experts' gradients by source", wide, {more * experts});
}

/// Gradients that are never read.
void ParamStore::place_discarded(Arena& gradients) {
  const auto discarded = [&](Id id) { return spec(id).when_frozen == WhenFrozen::discarded; };
  int64_t most = 0;
  for (const Id id : flat_.frozen().ids)
    if (discarded(id)) most = std::max(most, numel(id));
  discarded_ = {};
  if (most == 0) return;
  discarded_ = gradients.alloc("gradients of what is frozen", accumulate_dtype(dtype_), {most});
  for (const Id id : flat_.frozen().ids)
    if (discarded(id))
      grads_[static_cast<size_t>(id)].data = joined_grads_[static_cast<size_t>(id)].data = discarded_.data;
}

void ParamStore::set_value_views(const FlatLayout::Unit& unit, const Place& place) {
  for (const Id id : unit.ids) {
    const auto i = static_cast<size_t>(id);
    if (place.values)
      values_[i].value.data = joined_[i].value.data =
          place.values + (offset(id) - unit.begin) * dtype_size(dtype_);
    // The members of a joined group have no packed copies of their own, or forward's alone.
    const bool alone = !specs()[i].joined && (i + 1 == specs().size() || !specs()[i + 1].joined);
    if (alone) values_[i] = joined_[i];
  }
}

void ParamStore::set_grad_views(const FlatLayout::Unit& unit, const Place& place) {
  if (!place.grads) return;
  for (const Id id : unit.ids) {
    const auto i = static_cast<size_t>(id);
    grads_[i].data = joined_grads_[i].data =
        place.grads + (offset(id) - unit.begin) * dtype_size(grads_[i].dtype);
  }
}

Tensor ParamStore::unit_values(int unit) const {
  const FlatLayout::Unit& u = flat_.unit(unit);
  const int64_t n = u.end - u.begin;
  return layout_.whole_values ? flat_values_.rows(u.begin, n) : slot(unit).values.rows(0, n);
}

void ParamStore::place_values(int unit) {
  place(unit).values = static_cast<char*>(slot(unit).values.data);
  packed_.place(flat_.unit(unit).ids, slot(unit).packed.data, {values_, joined_});
  set_value_views(flat_.unit(unit), place(unit));
}

void ParamStore::place_grads(int unit) {
  place(unit).grads = static_cast<char*>(slot(unit).grads.data);
  place(unit).source_grads = static_cast<char*>(slot(unit).source_grads.data);
  set_grad_views(flat_.unit(unit), place(unit));
}

Tensor ParamStore::bucket_values(const Bucket& b) const {
  const int64_t begin = b.begin - flat_.unit(b.unit).begin;
  char* values = place(b.unit).values;
  return Tensor(values ? values + begin * dtype_size(dtype_) : nullptr, dtype_, {b.end - b.begin}, "values",
                device_);
}

Tensor ParamStore::bucket_grads(const Bucket& b, int source) const {
  const int64_t begin = b.begin - flat_.unit(b.unit).begin;
  const Place& placed = place(b.unit);
  const DType wide = accumulate_dtype(dtype_);
  SLUICE_CHECK(source == 0 || (b.split == SplitAxis::expert && source < layout_.grad_sources),
               "bucket_grads: source {}", source);
  char* grads = !placed.grads ? nullptr
                : source == 0 ? placed.grads + begin * dtype_size(wide)
                              : placed.source_grads + (source - 1) * (b.end - b.begin) * dtype_size(wide);
  return Tensor(grads, wide, {b.end - b.begin}, "gradients", device_);
}

void ParamStore::check_begun(Id id) const {
  while (specs()[static_cast<size_t>(id)].joined) --id;
  SLUICE_CHECK(!unbegun_[static_cast<size_t>(id)], "{}: its gradient has no value before its first product",
               spec(id).name);
}

Tensor ParamStore::grad(Id id) const {
  check_begun(id);
  return grads_[static_cast<size_t>(id)];
}

Tensor ParamStore::joined_grad(Id first, int source) const {
  SLUICE_CHECK(source >= 0 && source < layout_.grad_sources, "joined_grad: source {} of {}", source,
               layout_.grad_sources);
  check_begun(first);
  Tensor t = joined_grads_[static_cast<size_t>(first)];
  if (source == 0 || !t.data) return t;
  SLUICE_CHECK(spec(first).of_expert(), "joined_grad: {} is no expert's", spec(first).name);
  const FlatLayout::Unit& unit = flat_.unit(spec(first).unit);
  t.data = place(spec(first).unit).source_grads +
           ((source - 1) * unit.experts() + offset(first) - unit.expert_begin) * dtype_size(t.dtype);
  return t;
}

Tensor ParamStore::part(const Tensor& flat, Id id) const { return piece(flat, offset(id), spec(id)); }

void ParamStore::initialize(Context& ctx, uint64_t seed) {
  for (Id id = 0; id < static_cast<Id>(specs().size()); ++id) {
    SLUICE_CHECK(value(id).data, "initialize: parameter {} has no memory", spec(id).name);
    initialize_slice(ctx, {.id = id, .count = numel(id)}, value(id), seed);
  }
}

void ParamStore::initialize_slice(Context& ctx, const Slice& slice, const Tensor& part, uint64_t seed) const {
  write_initial_values(ctx, spec(slice.id), slice.begin, slice.count, part, seed);
}

void ParamStore::pack(Context& ctx) {
  for (Id id = 0; id < static_cast<Id>(specs().size()); ++id) pack_of(ctx, id);
}

void ParamStore::pack_trained(Context& ctx) {
  for (const FlatLayout::Unit& unit : flat_.units()) pack(ctx, unit.ids);
}

void ParamStore::pack(Context& ctx, const std::vector<Id>& ids) {
  for (const Id id : ids) pack_of(ctx, id);
}

void ParamStore::pack_of(Context& ctx, Id id) {
  pack_weight(ctx, joined_[static_cast<size_t>(id)]);
  if (packed_.forward_alone(id)) pack_weight(ctx, values_[static_cast<size_t>(id)]);
}

void ParamStore::zero_grads(Context& ctx) {
  unbegun_.assign(specs().size(), false);
  fill(ctx, flat_grads_, 0.0);
  if (discarded_) fill(ctx, discarded_, 0.0);
}

bool ParamStore::begins_with_product(Id first) const {
  const ParamSpec& spec = this->spec(first);
  return device_ == Device::cpu && spec.summed_by_products && spec.trainable && !spec.joined &&
         (layout_.grad_sources == 1 || !spec.of_expert());
}

void ParamStore::begin_sums(Context& ctx, int unit) {
  const FlatLayout::Unit& of = flat_.unit(unit);
  for (const Bucket& bucket : buckets()) {
    if (bucket.unit != unit) continue;
    const Tensor grads = bucket_grads(bucket);
    int64_t at = bucket.begin;  // all before it is zero or waits for a product
    const auto fill_until = [&](int64_t end) {
      if (end > at) fill(ctx, grads.rows(at - bucket.begin, end - at), 0.0);
    };
    for (const Id id : of.ids) {
      if (offset(id) < bucket.begin || offset(id) >= bucket.end || !begins_with_product(id)) continue;
      fill_until(offset(id));
      at = offset(id) + joined_grads_[static_cast<size_t>(id)].numel();
      unbegun_[static_cast<size_t>(id)] = true;
    }
    fill_until(bucket.end);
    for (int s = 1; s < grad_sources() && bucket.split == SplitAxis::expert; ++s)
      fill(ctx, bucket_grads(bucket, s), 0.0);
  }
}

void ParamStore::end_sums(Context& ctx, int unit) {
  for (const Id id : flat_.unit(unit).ids)
    if (unbegun_[static_cast<size_t>(id)]) fill(ctx, next_sum(id).to, 0.0);
}

ParamStore::Sum ParamStore::next_sum(Id first, int source) {
  const bool begins = unbegun_[static_cast<size_t>(first)];
  SLUICE_CHECK(!begins || source == 0, "next_sum: source {} of {}", source, spec(first).name);
  unbegun_[static_cast<size_t>(first)] = false;
  return {joined_grad(first, source), begins ? Into::overwrite : Into::add};
}

}  // namespace sluice
