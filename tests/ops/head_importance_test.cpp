// Importance of heads compared with plain loops, and the gradient of the head balance loss with central
// differences.
#include "ops/head_importance.h"

#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

constexpr int64_t kT = 700, kH = 3, kW = 5;  // more than one chunk of tokens

enum class Kind { softmax, sink, headwise, elementwise, constant };
constexpr Kind kKinds[] = {Kind::softmax, Kind::sink, Kind::headwise, Kind::elementwise, Kind::constant};

/// Documents of 1, 6 and then 20 tokens: a first token sees itself alone, and there z0 is lse.
HeadGate make_gate(Pool& pool, DType type, Kind kind, GateActivation activation, int64_t tokens = kT) {
  HeadGate g;
  const DType wide = accumulate_dtype(type);
  const Tensor first = pool.zeros(DType::i32, {tokens});
  for (int64_t t = 0, start = 0; t < tokens; ++t) {
    if (t == 1 || t == 7 || (t > 7 && t % 20 == 7)) start = t;
    first.as<int32_t>()[t] = static_cast<int32_t>(start);
  }
  if (kind == Kind::softmax || kind == Kind::sink) g.lse = exact_normal(pool, wide, {kH, tokens});
  if (kind == Kind::softmax) {
    g.first_key = first;
    g.z0 = exact_normal(pool, wide, {kH, tokens});
    for (int64_t i = 0; i < g.z0.numel(); ++i) {
      const int64_t t = i % tokens;
      Pool::set(g.z0, i,
                Pool::get(g.lse, i) - (first.as<int32_t>()[t] == t ? 0 : std::abs(Pool::get(g.z0, i))));
    }
  }
  if (kind == Kind::sink) g.sink = exact_normal(pool, type, {kH});
  if (kind == Kind::headwise) g.logits = exact_normal(pool, type, {tokens, kH}, 2);
  if (kind == Kind::elementwise) g.logits = exact_normal(pool, type, {tokens, kH, kW}, 2);
  if (kind == Kind::constant) g.logits = exact_normal(pool, type, {1, kH, kW}, 2);
  g.kind.activation = activation;
  return g;
}

}  // namespace

TEST_CASE("a head's importance is the mean of its gate over the counted tokens", "[heads]") {
  Context ctx(kTestScratch);
  for (const Kind kind : kKinds)
    for (const bool skip_first : {true, false}) {
      const GateActivation activation = skip_first ? GateActivation::sigmoid : GateActivation::ns_sigmoid;
      CAPTURE(static_cast<int>(kind), skip_first);
      Pool pool;
      HeadGate g = make_gate(pool, DType::f64, kind, activation);
      g.skip_first = skip_first;
      double sums[kH] = {}, counted = 0;
      for (int64_t t = 0; t < kT; ++t) {
        const bool alone = g.first_key && g.first_key.as<int32_t>()[t] == t;
        counted += !(alone && skip_first);
        for (int64_t h = 0; h < kH; ++h) {
          const auto sigmoid = [&](double z) { return 1 / (1 + std::exp(-z)); };
          double open = 0;
          if (g.first_key)
            open = 1 - std::exp(Pool::get(g.z0, h * kT + t) - Pool::get(g.lse, h * kT + t));
          else if (g.sink)
            open = sigmoid(Pool::get(g.lse, h * kT + t) - Pool::get(g.sink, h));
          else {
            const int64_t width = g.logits.rank == 3 ? kW : 1, at = (g.logits.dim(0) == 1 ? 0 : t) * kH + h;
            for (int64_t c = 0; c < width; ++c) {
              const double s = sigmoid(Pool::get(g.logits, at * width + c));
              open +=
                  (activation == GateActivation::sigmoid ? s : 0.5 + 0.5 * s) / static_cast<double>(width);
            }
          }
          sums[h] += open;
        }
      }
      const Tensor batch = pool.normal(DType::f64, {head_row_size(kH)}),
                   totals = pool.zeros(DType::f64, {head_row_size(kH)});
      head_importance(ctx, batch, totals, g, kT);
      head_importance(ctx, batch, totals, g, kT);
      head_importance(ctx, Tensor(), totals, g, kT);
      for (int64_t h = 0; h < kH; ++h) {
        CHECK(Pool::get(batch, h) == Approx(sums[h]).epsilon(1e-12));
        CHECK(Pool::get(totals, h) == Approx(3 * sums[h]).epsilon(1e-12));
      }
      CHECK(Pool::get(batch, kH) == counted);
      CHECK(Pool::get(totals, kH) == 3 * counted);
      CHECK(Pool::get(batch, kH + 1) == 1);
      CHECK(Pool::get(totals, kH + 1) == 3);
      CHECK(Pool::get(batch, kH + 2) == 0);
    }
}

TEST_CASE("importance and its gradient agree over types and threads", "[heads]") {
  for (const Kind kind : kKinds) {
    CAPTURE(static_cast<int>(kind));
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const HeadGate g = make_gate(pool, type, kind, GateActivation::sigmoid);
      const Tensor totals = pool.normal(DType::f64, {head_row_size(kH)}),
                   u = exact_normal(pool, DType::f64, {kH});
      head_importance(ctx, Tensor(), totals, g, kT);
      if (g.logits) return std::vector{totals};
      const Tensor dlse = pool.zeros(g.lse.dtype, {kH, kT}), coef0 = pool.zeros(g.lse.dtype, {kH, kT}),
                   dsink = pool.zeros(g.lse.dtype, {kH});
      head_importance_backward(ctx, dlse, g.sink ? Tensor() : coef0, g.sink ? dsink : Tensor(), u, g);
      return std::vector{totals, dlse, coef0, dsink};
    });
  }
}

TEST_CASE("the gradient of the head balance loss equals central differences, for any heads left out",
          "[heads]") {
  Context ctx(kTestScratch);
  const int64_t L = 2, H = 6, W = head_row_size(H);
  for (const int64_t ddof : {0, 1})
    for (const int64_t shared_heads : {0, 2, 4, 5})
      for (const bool given : {false, true}) {
        CAPTURE(ddof, shared_heads, given);
        Pool pool(3);
        const Tensor row = pool.zeros(DType::f64, {L, W}), u = pool.zeros(DType::f64, {L, H}),
                     batch = pool.zeros(DType::f64, {L, W}), totals = pool.zeros(DType::f64, {L, W}),
                     mask = pool.zeros(DType::f64, {L, H});
        for (int64_t l = 0; l < L; ++l) {
          for (int64_t h = 0; h < H; ++h) {
            Pool::set(row, l * W + h, 40 * (0.2 + 0.1 * static_cast<double>((h * 5 + l) % H)));
            Pool::set(mask, l * H + h, h < shared_heads ? 1 : 0);
          }
          Pool::set(row, l * W + H, 40);
          Pool::set(row, l * W + H + 1, 3);
        }
        const HeadBalance balance{
            .coefficient = 0.7, .token_fraction = 0.25, .shared_heads = shared_heads, .ddof = ddof};
        const Tensor shared = given ? mask : Tensor();
        const auto loss = [&] {
          head_balance(ctx, u, batch, Tensor(), row, shared, balance);
          return Pool::get(batch, H + 2) + Pool::get(batch, W + H + 2);
        };
        // u is the gradient of one token of one batch: tokens x batches x token_fraction x coefficient of it
        // are the sum's.
        loss();
        const double left = Pool::get(batch, H + 2);
        CHECK((left > 0) == (shared_heads < 5));
        head_balance(ctx, u, batch, totals, row, shared, balance);
        head_balance(ctx, u, batch, totals, row, shared, balance);
        CHECK(Pool::get(totals, H + 2) == Approx(2 * left));
        for (int64_t l = 0; l < L; ++l) {
          const Tensor heads = row.rows(l, 1).view({W}).rows(0, H), gradient = pool.zeros(DType::f64, {H});
          for (int64_t h = 0; h < H; ++h) Pool::set(gradient, h, Pool::get(u, l * H + h) / (0.7 * 0.25 * 3));
          CHECK(gradient_error(heads, gradient, loss) <= kGradientTolerance);
        }
      }
}

TEST_CASE("heads that are closed or without tokens have no balance loss; wrong gates are refused by name",
          "[heads]") {
  Context ctx(kTestScratch);
  Pool pool;
  const Tensor row = pool.zeros(DType::f64, {1, head_row_size(2)}), u = pool.normal(DType::f64, {1, 2}),
               batch = pool.zeros(DType::f64, {1, head_row_size(2)});
  head_balance(ctx, u, batch, Tensor(), row, Tensor(), {.coefficient = 1});
  CHECK(Pool::get(u, 0) == 0);
  Pool::set(row, 2, 10);
  Pool::set(row, 0, 1e-8);
  head_balance(ctx, u, batch, Tensor(), row, Tensor(), {.coefficient = 1});
  CHECK(Pool::get(u, 0) == 0);
  CHECK(Pool::get(batch, 4) == 0);

  HeadGate g = make_gate(pool, DType::f32, Kind::headwise, GateActivation::silu);
  const Tensor totals = pool.zeros(DType::f64, {head_row_size(kH)});
  CHECK(error_of([&] {
          head_importance(ctx, Tensor(), totals, g, kT);
        }).find("scores specific to a head, in [0, 1]") != std::string::npos);
  g.sink = pool.zeros(DType::f32, {kH});
  CHECK(error_of([&] {
          head_importance(ctx, Tensor(), totals, g, kT);
        }).find("one of first_key, sink and logits") != std::string::npos);
}
