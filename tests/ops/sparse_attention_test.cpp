// Attention over selected keys: against masked dense attention by its definition, and central differences.
#include "ops/sparse_attention.h"

#include <set>

#include "ops/op_support.h"
#include "ops/some_queries.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct Shape {
  int64_t tokens, heads, kv_heads, depth, sets, block, most;
  int64_t documents = 1;
};

/// Random blocks of every query among those before its own, always with its own one (so that none is empty).
Selection random_selection(Pool& pool, const Shape& s, const Tensor& first_key) {
  const int64_t room = selection_room(s.most, s.tokens, s.block) + 1;
  Selection keys{.first = pool.zeros(DType::i32, {s.sets, s.tokens, room}),
                 .count = pool.zeros(DType::i32, {s.sets, s.tokens}),
                 .first_key = first_key,
                 .block = s.block};
  std::mt19937 random(3);
  for (int64_t row = 0; row < s.sets * s.tokens; ++row) {
    const int64_t t = row % s.tokens, start = first_key.as<int32_t>()[t], own = (t - start) / s.block;
    std::set<int64_t> blocks = {own};
    for (int64_t i = 0; i < s.most && own > 0; ++i) blocks.insert(static_cast<int64_t>(random()) % own);
    int32_t i = 0;
    for (const int64_t block : blocks)
      keys.first.as<int32_t>()[row * room + i++] = static_cast<int32_t>(start + block * s.block);
    keys.count.as<int32_t>()[row] = i;
  }
  return keys;
}

struct Case {
  Shape s;
  Tensor q, k, v, d_o, first_key, dlse, coef0;
  Tensor o, lse, z0, dq, dk, dv;
  Selection keys;

  Case(Pool& pool, const Shape& shape, DType dtype = DType::f64) : s(shape) {
    const DType wide = accumulate_dtype(dtype);
    q = exact_normal(pool, dtype, {s.tokens, s.heads, s.depth});
    k = exact_normal(pool, dtype, {s.tokens, s.kv_heads, s.depth});
    v = exact_normal(pool, dtype, {s.tokens, s.kv_heads, s.depth});
    d_o = exact_normal(pool, dtype, {s.tokens, s.heads, s.depth});
    dlse = exact_normal(pool, wide, {s.heads, s.tokens});
    coef0 = exact_normal(pool, wide, {s.heads, s.tokens});
    first_key = pool.zeros(DType::i32, {s.tokens});
    const int64_t length = (s.tokens + s.documents - 1) / s.documents;
    for (int64_t t = 0; t < s.tokens; ++t)
      first_key.as<int32_t>()[t] = static_cast<int32_t>(t / length * length);
    o = pool.normal(dtype, {s.tokens, s.heads, s.depth});
    dq = pool.normal(dtype, {s.tokens, s.heads, s.depth});
    dk = pool.normal(dtype, {s.tokens, s.kv_heads, s.depth});
    dv = pool.normal(dtype, {s.tokens, s.kv_heads, s.depth});
    lse = pool.zeros(wide, {s.heads, s.tokens});
    z0 = pool.zeros(wide, {s.heads, s.tokens});
    keys = random_selection(pool, s, first_key);
  }
  AttentionInputs inputs() const {
    return {
        .q = q, .k = k, .v = v, .first_key = first_key, .scale = 1 / std::sqrt(static_cast<double>(s.depth))};
  }
  void forward(Context& ctx) const {
    sparse_attention_forward(ctx, {.o = o, .lse = lse, .z0 = z0}, inputs(), keys);
  }
  void backward(Context& ctx, const ScoreGrads& of_scores) const {
    sparse_attention_backward(ctx, {.dq = dq, .dk = dk, .dv = dv}, d_o, inputs(), {.o = o, .lse = lse}, keys,
                              of_scores);
  }
  /// Selects every visible key.
  void select_all(Pool& pool) {
    keys.block = 1;
    keys.first = pool.zeros(DType::i32, {s.sets, s.tokens, s.tokens});
    for (int64_t row = 0; row < s.sets * s.tokens; ++row) {
      const int64_t t = row % s.tokens, first = first_key.as<int32_t>()[t];
      for (int64_t j = first; j <= t; ++j)
        keys.first.as<int32_t>()[row * s.tokens + j - first] = static_cast<int32_t>(j);
      keys.count.as<int32_t>()[row] = static_cast<int32_t>(t - first + 1);
    }
  }
  /// By its definition: a softmax over all visible keys, with the others masked out. Of many queries some.
  void check_forward() const {
    const double scale = inputs().scale;
    double worst = 0;
    for (int64_t t = 0; t<s.tokens; t += s.tokens> 100 ? 47 : 1)
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t g = h / (s.heads / s.sets), kv = h / (s.heads / s.kv_heads), room = keys.first.dim(2);
        std::vector<double> z(static_cast<size_t>(s.tokens), -INFINITY), y(static_cast<size_t>(s.depth));
        const auto dot_of = [&](int64_t j) {
          double x = 0;
          for (int64_t d = 0; d < s.depth; ++d)
            x += Pool::get(q, (t * s.heads + h) * s.depth + d) *
                 Pool::get(k, (j * s.kv_heads + kv) * s.depth + d);
          return scale * x;
        };
        const int64_t row = g * s.tokens + t;
        for (int64_t i = 0; i < keys.count.as<int32_t>()[row]; ++i)
          for (int64_t b = 0; b < keys.block; ++b)
            if (const int64_t j = keys.first.as<int32_t>()[row * room + i] + b; j <= t)
              z[static_cast<size_t>(j)] = dot_of(j);
        double sum = 0;
        for (const double x : z) sum += std::exp(x);
        for (size_t j = 0; j < z.size(); ++j)
          for (int64_t d = 0; d < s.depth; ++d)
            y[static_cast<size_t>(d)] +=
                std::exp(z[j]) / sum *
                Pool::get(v, (static_cast<int64_t>(j) * s.kv_heads + kv) * s.depth + d);
        for (int64_t d = 0; d < s.depth; ++d)
          worst = std::max(
              worst, std::abs(y[static_cast<size_t>(d)] - Pool::get(o, (t * s.heads + h) * s.depth + d)));
        worst = std::max(worst, std::abs(std::log(sum) - Pool::get(lse, h * s.tokens + t)));
        const double first = z[static_cast<size_t>(first_key.as<int32_t>()[t])];
        const double got = Pool::get(z0, h * s.tokens + t);
        if (first == -INFINITY)
          CHECK(got == kNotSelected);
        else
          worst = std::max(worst, std::abs(first - got));
      }
    CHECK(worst < 1e-12);
  }
};

const Shape kShapes[] = {
    {.tokens = 1, .heads = 2, .kv_heads = 1, .depth = 4, .sets = 1, .block = 1, .most = 3},
    {.tokens = 37, .heads = 4, .kv_heads = 2, .depth = 10, .sets = 1, .block = 1, .most = 6},
    {.tokens = 70, .heads = 6, .kv_heads = 2, .depth = 16, .sets = 2, .block = 1, .most = 9, .documents = 3},
    {.tokens = 45, .heads = 4, .kv_heads = 4, .depth = 36, .sets = 4, .block = 4, .most = 3, .documents = 2},
    {.tokens = 50, .heads = 8, .kv_heads = 1, .depth = 66, .sets = 1, .block = 7, .most = 2}};
/// More keys than are read at a time, and more queries than a block has.
const Shape kLong = {
    .tokens = 600, .heads = 3, .kv_heads = 1, .depth = 256, .sets = 1, .block = 1, .most = 40};

template <class F>
void for_each_shape(F&& f) {
  for (const Shape& shape : kShapes) f(shape);
  f(kLong);
}

}  // namespace

TEST_CASE("sparse attention equals masked dense attention", "[sparse_attention]") {
  Context ctx(kTestScratch);
  for_each_shape([&](const Shape& shape) {
    INFO("tokens " << shape.tokens << ", block " << shape.block);
    Pool pool(11);
    const Case c(pool, shape);
    c.forward(ctx);
    c.check_forward();
  });
}

TEST_CASE("sparse attention over all keys equals dense attention", "[sparse_attention]") {
  Context ctx(kTestScratch);
  for_each_shape([&](const Shape& shape) {
    Pool pool(12);
    Case c(pool, shape);
    c.select_all(pool);
    c.forward(ctx);
    const ScoreGrads of_scores = {.dlse = c.dlse, .coef0 = c.coef0};
    c.backward(ctx, of_scores);
    const Case dense(pool, shape);
    AttentionInputs in = c.inputs();
    attention_forward(ctx, {.o = dense.o, .lse = dense.lse, .z0 = dense.z0}, in);
    attention_backward(ctx, {.dq = dense.dq, .dk = dense.dk, .dv = dense.dv}, c.d_o, in,
                       {.o = dense.o, .lse = dense.lse}, of_scores);
    CHECK(relative_error(c.o, dense.o) < 1e-13);
    CHECK(relative_error(c.lse, dense.lse) < 1e-13);
    CHECK(relative_error(c.z0, dense.z0) < 1e-13);
    CHECK(relative_error(c.dq, dense.dq) < 1e-12);
    CHECK(relative_error(c.dk, dense.dk) < 1e-12);
    CHECK(relative_error(c.dv, dense.dv) < 1e-12);
  });
}

TEST_CASE("sparse attention: gradients equal central differences", "[sparse_attention]") {
  Context ctx(kTestScratch);
  for (const Shape& shape : kShapes) {
    INFO("tokens " << shape.tokens << ", block " << shape.block);
    Pool pool(13);
    const Case c(pool, shape);
    c.forward(ctx);
    c.backward(ctx, {.dlse = c.dlse});
    const auto loss = [&] {
      c.forward(ctx);
      return dot(c.d_o, c.o) + dot(c.dlse, c.lse);
    };
    CHECK(gradient_error(c.q, c.dq, loss, 30) < kGradientTolerance);
    CHECK(gradient_error(c.k, c.dk, loss, 30) < kGradientTolerance);
    CHECK(gradient_error(c.v, c.dv, loss, 30) < kGradientTolerance);
  }
}

TEST_CASE("sparse attention: types agree, and threads do not change a bit", "[sparse_attention]") {
  for (const int64_t block : {1, 4}) {
    check_op([&](Pool& pool, Context& ctx, DType type) {
      const Case c(pool,
                   {.tokens = 260,
                    .heads = 4,
                    .kv_heads = 2,
                    .depth = 32,
                    .sets = 2,
                    .block = block,
                    .most = 40 / block,
                    .documents = 2},
                   type);
      c.forward(ctx);
      c.backward(ctx, {.dlse = c.dlse, .coef0 = c.coef0});
      return std::vector<Tensor>{c.o, c.lse, c.dq, c.dk, c.dv};
    });
  }
}

TEST_CASE("sparse attention refuses a selection of keys that a query does not see", "[sparse_attention]") {
  Context ctx(kTestScratch);
  Pool pool(14);
  const Case c(pool, kShapes[1]);
  int32_t* const first = c.keys.first.as<int32_t>();
  const int64_t room = c.keys.first.dim(2);
  const int32_t before = first[5 * room];
  first[5 * room] = 6;
  CHECK(error_of([&] { c.forward(ctx); }).find("query 5 selects key 6, which is not in [0, 5]") !=
        std::string::npos);
  first[5 * room] = before;
  c.forward(ctx);
}

TEST_CASE(
    "sparse attention of queries that are any of the keys: as that of all queries, and its gradients add up "
    "to theirs",
    "[sparse_attention][context]") {
  Context ctx(kTestScratch);
  for (Shape shape : kShapes) {
    shape.tokens = (shape.tokens + 3) / 4 * 4;
    if (shape.documents > 1) shape.documents += 3;  // some within a chunk
    INFO("tokens " << shape.tokens << ", block " << shape.block);
    Pool pool(15);
    const Case all(pool, shape);
    all.forward(ctx);
    all.backward(ctx, {.dlse = all.dlse, .coef0 = all.coef0});
    const Tensor dk = pool.zeros(DType::f64, {shape.tokens, shape.kv_heads, shape.depth}),
                 dv = pool.zeros(DType::f64, {shape.tokens, shape.kv_heads, shape.depth});
    for (const auto& chunks : kChunks) {
      const SomeQueries some(pool, shape.tokens, chunks, all.first_key);
      const Tensor d_o = some.of(pool, all.d_o),
                   o = pool.normal(DType::f64, {some.size(), shape.heads, shape.depth}),
                   dq = pool.normal(DType::f64, {some.size(), shape.heads, shape.depth}),
                   lse = pool.zeros(DType::f64, {shape.heads, some.size()}),
                   z0 = pool.zeros(DType::f64, {shape.heads, some.size()}),
                   dk_part = pool.copy(all.k, DType::f64), dv_part = pool.copy(all.v, DType::f64);
      AttentionInputs in = all.inputs();
      in.q = some.of(pool, all.q), in.first_key = some.first_key, in.own_key = some.own_key;
      Selection keys = all.keys;
      keys.first = some.of(pool, keys.first, 1), keys.count = some.of(pool, keys.count, 1);
      sparse_attention_forward(ctx, {.o = o, .lse = lse, .z0 = z0}, in, keys);
      sparse_attention_backward(ctx, {.dq = dq, .dk = dk_part, .dv = dv_part}, d_o, in, {.o = o, .lse = lse},
                                keys,
                                {.dlse = some.of(pool, all.dlse, 1), .coef0 = some.of(pool, all.coef0, 1)});
      CHECK(relative_error(o, some.of(pool, all.o)) < 1e-14);
      CHECK(relative_error(lse, some.of(pool, all.lse, 1)) < 1e-14);
      CHECK(relative_error(z0, some.of(pool, all.z0, 1)) < 1e-14);
      CHECK(relative_error(dq, some.of(pool, all.dq)) < 1e-14);
      add_to(dk, dk_part);
      add_to(dv, dv_part);
    }
    CHECK(relative_error(dk, all.dk) < 1e-13);
    CHECK(relative_error(dv, all.dv) < 1e-13);
  }
}
