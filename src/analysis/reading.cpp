#include "analysis/reading.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "analysis/whole_rows.h"
#include "core/parallel_for.h"
#include "ops/gate.h"
#include "ops/permute.h"
#include "ops/reduce.h"

namespace sluice {

std::vector<double> read_values(Context& ctx, const Tensor& t) {
  std::vector<double> values(static_cast<size_t>(t ? t.numel() : 0));
  if (values.empty()) return values;
  const HostView view(ctx, t);
  if (ctx.dry_run) return values;
  const Tensor& host = view.tensor();
  const auto convert = [&](auto* from) {
    using S = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(static_cast<accumulate_t<S>>(from[i]));
  };
  if (host.dtype == DType::f64) convert(host.as<double>());
  if (host.dtype == DType::f32) convert(host.as<float>());
  if (host.dtype == DType::bf16) convert(host.as<bf16>());
  return values;
}

double largest_magnitude(Context& ctx, const Tensor& x, const Queries& queries) {
  ScratchScope scratch(ctx.scratch);
  const Tensor result = scratch.alloc("analysis.largest", DType::f64, {1});
  double largest = 0;
  for (const Queries::Rows& rows : queries.rows) {
    max_abs(ctx, result, x.rows(rows.begin, rows.size));
    raise(largest, read_scalar(ctx, result));
  }
  return largest;
}

std::vector<double> value_norms(Context& ctx, const Tensor& values, const SequenceRanks* ranks) {
  const int64_t rows = values.dim(0) * values.dim(1), D = values.dim(2);
  const std::vector<double> v = read_values(ctx, values);
  std::vector<double> norms(static_cast<size_t>(rows));
  parallel_for(rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      double squares = 0;
      for (int64_t d = 0; d < D; ++d) {
        const double x = v[static_cast<size_t>(row * D + d)];
        squares += x * x;
      }
      norms[static_cast<size_t>(row)] = std::sqrt(squares);
    }
  });
  return whole_rows(ctx, ranks, std::move(norms), values.dim(1));
}

void raise(double& x, double value) {
  if (std::isnan(value) || value > x) x = value;
}

void raise(FirstAndRest& x, const FirstAndRest& values) {
  raise(x.first, values.first);
  raise(x.rest, values.rest);
}

namespace {

/// The same for tokens of several ranks, each of which reads its own.
FirstAndRest largest_of_ranks(Context& ctx, const Tensor& x, const Queries& queries,
                              const SequenceRanks* ranks) {
  const auto C = static_cast<size_t>(x.dim(1));
  const std::vector<double> values = read_values(ctx, x);
  std::vector<double> found(static_cast<size_t>(x.dim(0)));
  for (size_t i = 0; i < values.size(); ++i) raise(found[i / C], std::abs(values[i]));
  found = whole_rows(ctx, ranks, std::move(found), 1);
  FirstAndRest largest;
  for (const Queries::Sequence& s : queries.sequences)
    for (int64_t i = 0; i < s.size; ++i)
      raise(i == 0 ? largest.first : largest.rest, found[static_cast<size_t>(s.begin + i)]);
  return largest;
}

}  // namespace

FirstAndRest largest_of_queries(Context& ctx, const Tensor& x, const Queries& queries,
                                const SequenceRanks* ranks) {
  if (ranks) return largest_of_ranks(ctx, x, queries, ranks);
  const int64_t T = x.dim(0);
  ScratchScope scratch(ctx.scratch);
  const Tensor found = scratch.alloc("analysis.largest", DType::f64, {T});  // no more parts than tokens
  if (ctx.dry_run) {
    max_abs(ctx, found.rows(0, 1), x);
    return {};
  }
  std::vector<bool> of_first;
  const auto look = [&](int64_t begin, int64_t count, bool first) {
    if (count == 0) return;
    max_abs(ctx, found.rows(std::ssize(of_first), 1), x.rows(begin, count));
    of_first.push_back(first);
  };
  for (const Queries::Sequence& s : queries.sequences) {
    look(s.begin, 1, true);
    look(s.begin + 1, s.size - 1, false);
  }
  FirstAndRest largest;
  if (of_first.empty()) return largest;
  const std::vector<double> values = read_values(ctx, found.rows(0, std::ssize(of_first)));
  for (size_t i = 0; i < values.size(); ++i) raise(of_first[i] ? largest.first : largest.rest, values[i]);
  return largest;
}

FirstKey::FirstKey(Context& ctx, const Attention& attention, const Attention::Saved& s,
                   const SequenceRanks* ranks)
    : heads_(s.core.lse.dim(0)),
      tokens_(s.core.lse.dim(1) * (ranks ? ranks->split().ranks : 1)),
      lse_(whole_statistics(ctx, ranks, read_values(ctx, s.core.lse), heads_)),
      z0_(whole_statistics(ctx, ranks, read_values(ctx, s.core.z0), heads_)),
      sinks_(read_values(ctx, attention.sink_logits(s))),
      sink_value_(read_values(ctx, attention.sink_value())) {
  if (std::ssize(sinks_) > heads_) sinks_ = whole_statistics(ctx, ranks, std::move(sinks_), heads_);
}

double FirstKey::kept(int64_t head, int64_t token) const {
  if (sinks_.empty()) return 1;
  const size_t of_head = static_cast<size_t>(head), i = at(head, token);
  return 1 / (1 + std::exp(sinks_[sinks_.size() == static_cast<size_t>(heads_) ? of_head : i] - lse_[i]));
}

double FirstKey::sink_value(int64_t head, int64_t channel, int64_t head_dim) const {
  if (sink_value_.empty()) return 0;
  const int64_t group = heads_ * head_dim / std::ssize(sink_value_);
  return sink_value_[static_cast<size_t>(head / group * head_dim + channel)];
}

double FirstKey::attention(int64_t head, int64_t token) const {
  return std::exp(std::min(z0_[at(head, token)] - lse_[at(head, token)], 0.0)) * kept(head, token);
}

Tensor scores_of(Context& ctx, ScratchScope& scratch, const Gate& gate, const Gate::Saved& s) {
  const Tensor z = gate.logits(s);
  const DType dtype = accumulate_dtype(z.dtype);
  const Tensor scores = z.rank == 3 ? scratch.alloc("analysis.scores", dtype, {z.dim(0), z.dim(1), z.dim(2)})
                                    : scratch.alloc("analysis.scores", dtype, {z.dim(0), z.dim(1)});
  gate_scores(ctx, scores, z, gate.kind());
  return scores;
}

std::vector<double> output_before_gates(Context& ctx, const Attention::Saved& s, const FirstKey& first_key) {
  if (s.output.y) return read_values(ctx, s.output.y);
  // The core applied the gate as well: what it found was not written down.
  const Tensor& o = s.core.o;
  std::vector<double> values = read_values(ctx, o);
  const int64_t T = o.dim(0), H = o.dim(1), D = o.dim(2);
  for (int64_t t = 0; t < T; ++t)
    for (int64_t h = 0; h < H; ++h) {
      const double kept = first_key.kept(h, t);
      for (int64_t d = 0; d < D; ++d) {
        double& value = values[static_cast<size_t>((t * H + h) * D + d)];
        value = kept * value + (1 - kept) * first_key.sink_value(h, d, D);
      }
    }
  return values;
}

namespace {

/// index (n) i32 = the numbers that `of` gives for 0, 1, ..., n - 1.
template <class Of>
Tensor index_of(Context& ctx, ScratchScope& t, int64_t n, const Of& of) {
  const Tensor index = t.alloc("analysis.index", DType::i32, {n});
  std::vector<int32_t> host(static_cast<size_t>(n));
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<int32_t>(of(static_cast<int64_t>(i)));
  write_tensor(ctx, index, host.data());
  return index;
}

/// The gate of the queries alone, without the padding among a batch's tokens.
HeadGate of_queries(Context& ctx, ScratchScope& t, HeadGate gate, const Queries& queries, int64_t tokens) {
  const int64_t n = queries.count;
  std::vector<int64_t> row;  // of each query
  for (const Queries::Rows& rows : queries.rows)
    for (int64_t i = 0; i < rows.size; ++i) row.push_back(rows.begin + i);
  const auto at = [&](int64_t i) { return row[static_cast<size_t>(i)]; };
  if (gate.logits) {
    if (gate.logits.dim(0) == 1) return gate;
    const Tensor& z = gate.logits;
    const int64_t width = z.numel() / tokens;
    const Tensor taken = z.rank == 3 ? t.alloc("analysis.logits", z.dtype, {n, z.dim(1), z.dim(2)})
                                     : t.alloc("analysis.logits", z.dtype, {n, z.dim(1)});
    take_rows(ctx, taken.view({n, width}), z.view({tokens, width}), index_of(ctx, t, n, at));
    gate.logits = taken;
    return gate;
  }
  const int64_t H = gate.lse.dim(0);
  const Tensor by_head = index_of(ctx, t, H * n, [&](int64_t i) { return i / n * tokens + at(i % n); });
  for (Tensor* x : {&gate.lse, &gate.z0, &gate.sink}) {
    if (x->rank != 2) continue;
    const Tensor taken = t.alloc("analysis.statistics", x->dtype, {H, n});
    take_rows(ctx, taken.view({H * n, 1}), x->view({H * tokens, 1}), by_head);
    *x = taken;
  }
  if (gate.first_key) {  // what matters is whether a query sees its own key alone
    const HostView first_key(ctx, gate.first_key);
    gate.first_key = index_of(ctx, t, n, [&](int64_t i) {
      return ctx.dry_run || first_key.tensor().as<int32_t>()[at(i)] == at(i) ? i : i - 1;
    });
  }
  return gate;
}

}  // namespace

double add_importance(Context& ctx, std::vector<double>& sums, const std::optional<HeadGate>& gate,
                      const Queries& queries, int64_t tokens) {
  if (!gate || queries.count == 0) return 0;
  ScratchScope scratch(ctx.scratch);
  const Tensor row = scratch.alloc("analysis.importance", DType::f64, {head_row_size(std::ssize(sums))});
  const bool padded = queries.count < tokens || ctx.dry_run;  // a dry run measures the larger memory
  head_importance(ctx, row, Tensor(), padded ? of_queries(ctx, scratch, *gate, queries, tokens) : *gate,
                  queries.count);
  const std::vector<double> values = read_values(ctx, row);
  for (size_t h = 0; h < sums.size(); ++h) sums[h] += values[h];
  return values[sums.size()];
}

}  // namespace sluice
