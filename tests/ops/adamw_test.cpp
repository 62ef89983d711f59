#include "ops/adamw.h"

#include "core/parallel_for.h"
#include "ops/bit_sum.h"
#include "ops/op_support.h"

using namespace sluice;
using namespace sluice::test;

namespace {

struct AdamwStep {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  double gradient_scale;
};

/// One update of the whole buffer as one segment.
void adamw_update(Context& ctx, const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                  const Tensor& gradient, const AdamwStep& s) {
  double segment[] = {0, static_cast<double>(value.numel()), 1, s.weight_decay};
  UpdateControl control{
      .lr = s.lr, .step = static_cast<double>(s.step), .loss_limit = INFINITY, .grad_norm_limit = INFINITY};
  const Tensor numbers(&control, DType::f64, {kUpdateControl});
  const AdamwSettings settings{s.beta1, s.beta2, s.eps};
  judge_update(ctx, numbers, settings);
  control.clip = s.gradient_scale;
  sluice::adamw_update(ctx, value, master, m, v, gradient, Tensor(segment, DType::f64, {1, 4}), numbers,
                       settings);
}

/// Algorithm 2 of the paper, one element after another.
struct Reference {
  std::vector<double> w, m, v;
  void update(const Tensor& gradient, const AdamwStep& s) {
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = Pool::get(gradient, static_cast<int64_t>(i)) * s.gradient_scale;
      m[i] = s.beta1 * m[i] + (1 - s.beta1) * g;
      v[i] = s.beta2 * v[i] + (1 - s.beta2) * g * g;
      const double m_hat = m[i] / (1 - std::pow(s.beta1, static_cast<double>(s.step)));
      const double v_hat = v[i] / (1 - std::pow(s.beta2, static_cast<double>(s.step)));
      w[i] -= s.lr * (m_hat / (std::sqrt(v_hat) + s.eps) + s.weight_decay * w[i]);
    }
  }
};

AdamwStep step_number(int64_t step) {
  return {.lr = 0.01 * static_cast<double>(step),
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .step = step,
          .gradient_scale = 0.7};
}

}  // namespace

TEST_CASE("ten adamw steps equal the published algorithm, in every type", "[adamw]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes)
    for (const int64_t n : {1, 37, 1001}) {
      INFO(dtype_name(type) << ", " << n);
      Pool pool;
      const DType acc = accumulate_dtype(type);
      const Tensor value = exact_normal(pool, type, {n});
      const Tensor master = type == acc ? Tensor() : pool.copy(value, acc);
      const Tensor m = pool.zeros(acc, {n}), v = pool.zeros(acc, {n});
      Reference reference;
      reference.m.resize(static_cast<size_t>(n));
      reference.v.resize(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i) reference.w.push_back(Pool::get(value, i));
      const Tensor start = pool.copy(value, DType::f64);
      for (int64_t step = 1; step <= 10; ++step) {
        const Tensor gradient = pool.normal(acc, {n}, 0.01);
        adamw_update(ctx, value, master, m, v, gradient, step_number(step));
        reference.update(gradient, step_number(step));
      }
      const auto tensor = [&](std::vector<double>& data) { return Tensor(data.data(), DType::f64, {n}); };
      CHECK(relative_error(start, tensor(reference.w)) > 0.01);
      CHECK(relative_error(value, tensor(reference.w)) <= tolerance(type));
      CHECK(relative_error(m, tensor(reference.m)) <= tolerance(acc));
      CHECK(relative_error(v, tensor(reference.v)) <= tolerance(acc));
      if (master) {
        CHECK(relative_error(master, tensor(reference.w)) <= tolerance(acc));
        CHECK(same_bits(pool.copy(master, type), value));  // the value is the master, rounded
      }
    }
}

TEST_CASE("adamw agrees over types and threads", "[adamw]") {
  check_op([&](Pool& pool, Context& ctx, DType type) {
    const int64_t n = 50003;
    const DType acc = accumulate_dtype(type);
    const Tensor value = exact_normal(pool, type, {n}), gradient = exact_normal(pool, acc, {n});
    const Tensor master = type == acc ? Tensor() : pool.copy(value, acc);
    const Tensor m = exact_normal(pool, acc, {n}), v = pool.zeros(acc, {n});
    for (int64_t i = 0; i < n; ++i) Pool::set(v, i, std::abs(Pool::get(m, i)));
    adamw_update(ctx, value, master, m, v, gradient, step_number(3));
    return std::vector{value, m, v};
  });
}

TEST_CASE("adamw with an f32 master gives the rounded bits of f32 without one", "[adamw]") {
  Pool pool;
  Context ctx(kTestScratch);
  const int64_t n = 333;
  const Tensor half = pool.normal(DType::bf16, {n}), master = pool.copy(half, DType::f32),
               value = pool.copy(half, DType::f32);
  const Tensor m1 = pool.zeros(DType::f32, {n}), v1 = pool.zeros(DType::f32, {n});
  const Tensor m2 = pool.zeros(DType::f32, {n}), v2 = pool.zeros(DType::f32, {n});
  for (int64_t step = 1; step <= 5; ++step) {
    const Tensor gradient = pool.normal(DType::f32, {n});
    adamw_update(ctx, half, master, m1, v1, gradient, step_number(step));
    adamw_update(ctx, value, Tensor(), m2, v2, gradient, step_number(step));
  }
  CHECK(same_bits(master, value));
  CHECK(same_bits(half, pool.copy(value, DType::bf16)));
}

TEST_CASE("adamw gives an element the same bits for any partition of the work", "[adamw]") {
  Context ctx(kTestScratch);
  for (const DType type : kFloatingTypes) {
    INFO(dtype_name(type));
    Pool pool;
    const DType acc = accumulate_dtype(type);
    const int64_t n = 1000;
    const Tensor value = pool.normal(type, {n}), value1 = pool.copy(value, type);
    const Tensor master = pool.copy(value, acc), master1 = pool.copy(value, acc),
                 gradient = pool.normal(acc, {n});
    const Tensor m = pool.normal(acc, {n}), m1 = pool.copy(m, acc), v = pool.normal(acc, {n});
    for (int64_t i = 0; i < n; ++i) Pool::set(v, i, std::abs(Pool::get(v, i)));
    const Tensor v1 = pool.copy(v, acc);
    adamw_update(ctx, value, master, m, v, gradient, step_number(4));
    for (int64_t i = 0; i < n; ++i)
      adamw_update(ctx, value1.rows(i, 1), master1.rows(i, 1), m1.rows(i, 1), v1.rows(i, 1),
                   gradient.rows(i, 1), step_number(4));
    CHECK(same_bits(value, value1));
    CHECK(same_bits(master, master1));
    CHECK(same_bits(m, m1));
    CHECK(same_bits(v, v1));
  }
}

TEST_CASE("adamw applies only decay to a weight without gradient", "[adamw]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor value = pool.normal(DType::f64, {9}), before = pool.copy(value, DType::f64);
  const Tensor m = pool.zeros(DType::f64, {9}), v = pool.zeros(DType::f64, {9}),
               gradient = pool.zeros(DType::f64, {9});
  AdamwStep step = step_number(2);
  adamw_update(ctx, value, Tensor(), m, v, gradient, step);
  for (int64_t i = 0; i < 9; ++i)
    CHECK(Pool::get(value, i) ==
          Approx(Pool::get(before, i) * (1 - step.lr * step.weight_decay)).epsilon(1e-15));
}

TEST_CASE("adamw refuses wrong arguments by name", "[adamw]") {
  Pool pool;
  Context ctx(kTestScratch);
  const Tensor half = pool.zeros(DType::bf16, {4}), f = pool.zeros(DType::f32, {4}),
               five = pool.zeros(DType::f32, {5});
  AdamwStep step = step_number(1);
  CHECK(error_of([&] { adamw_update(ctx, half, Tensor(), f, f, f, step); }) ==
        "adamw_update: master must hold 4 elements of f32, got () f32");
  CHECK(error_of([&] { adamw_update(ctx, half, f, half, f, f, step); }) ==
        "adamw_update: m must hold 4 elements of f32, got (4) bf16");
  CHECK(error_of([&] { adamw_update(ctx, f, Tensor(), f, five, f, step); }) ==
        "adamw_update: v must hold 4 elements of f32, got (5) f32");
  CHECK(error_of([&] { adamw_update(ctx, f, Tensor(), f, f, five, step); }) ==
        "adamw_update: gradient must hold 4 elements of f32, got (5) f32");
  double numbers[kUpdateControl] = {};
  const Tensor control(numbers, DType::f64, {kUpdateControl}), short_control(numbers, DType::f64, {3});
  CHECK(error_of([&] { judge_update(ctx, short_control, {}); }) ==
        "judge_update: control must be (14) f64, got (3) f64");
  CHECK(error_of([&] { sluice::adamw_update(ctx, f, Tensor(), f, f, f, short_control, control, {}); }) ==
        "adamw_update: segments must be (S, 4) f64, got (3) f64");
}

TEST_CASE("adamw updates the segments, each with its rate and decay, and does not change padding",
          "[adamw]") {
  Pool pool;
  Context ctx(kTestScratch);
  double table[] = {3, 40, 1, 0.5, 40, 41, 2, 0, 64, 100, 1, 0};
  const Tensor segments(table, DType::f64, {3, 4});
  const Tensor value = pool.normal(DType::f64, {120}), before = pool.copy(value, DType::f64);
  const Tensor m = pool.zeros(DType::f64, {120}), v = pool.zeros(DType::f64, {120}),
               gradient = pool.normal(DType::f64, {120});
  UpdateControl control{
      .lr = 0.01, .step = 1, .max_grad_norm = 0, .loss_limit = INFINITY, .grad_norm_limit = INFINITY};
  const Tensor numbers(&control, DType::f64, {kUpdateControl});
  judge_update(ctx, numbers, {});
  sluice::adamw_update(ctx, value, Tensor(), m, v, gradient, segments, numbers, {});
  for (int64_t i = 0; i < 120; ++i) {
    const double lr = i < 3 || (i >= 41 && i < 64) || i >= 100 ? 0
                      : i == 40                                ? 0.02
                                                               : 0.01,
                 decay = i < 40 ? 0.5 : 0;
    const double g = Pool::get(gradient, i), w = Pool::get(before, i);
    // The first step of Adam moves by lr, whatever the size of the gradient.
    CHECK(Pool::get(value, i) == Approx(w * (1 - lr * decay) - lr * g / (std::abs(g) + 1e-8)).epsilon(1e-12));
  }
}

TEST_CASE("an update is clipped, and not applied if its loss or norm exceeds the limits", "[adamw]") {
  Pool pool;
  Context ctx(kTestScratch);
  const auto judged = [&](UpdateControl c) {
    judge_update(ctx, Tensor(&c, DType::f64, {kUpdateControl}), {});
    return c;
  };
  const UpdateControl good{.lr = 1,
                           .step = 2,
                           .gradient_scale = 0.25,
                           .max_grad_norm = 1,
                           .loss_limit = 3,
                           .grad_norm_limit = 10,
                           .loss = 8,
                           .squares = 16};
  const UpdateControl c = judged(good);
  CHECK((c.loss == 2 && c.grad_norm == 4 && c.clip == 0.25 && c.apply == 1));
  CHECK(c.correction1 == Approx(1 - 0.81));
  const auto with = [&](double UpdateControl::*field, double value) {
    UpdateControl changed = good;
    changed.*field = value;
    return judged(changed);
  };
  CHECK(with(&UpdateControl::max_grad_norm, 0).clip == 1);
  CHECK(with(&UpdateControl::squares, 0.25).clip == 1);
  CHECK(with(&UpdateControl::loss_limit, 1.99).apply == 0);
  CHECK(with(&UpdateControl::grad_norm_limit, 3.99).apply == 0);
  CHECK(with(&UpdateControl::loss_limit, INFINITY).apply == 1);
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    CHECK(with(&UpdateControl::loss, bad).apply == 0);
    CHECK(with(&UpdateControl::squares, bad).apply == 0);
  }
  UpdateControl refused = with(&UpdateControl::loss, NAN);
  double table[] = {0, 9, 1, 0};
  const Tensor value = pool.normal(DType::f32, {9}), before = pool.copy(value, DType::f32);
  const Tensor m = pool.zeros(DType::f32, {9}), v = pool.zeros(DType::f32, {9});
  sluice::adamw_update(ctx, value, Tensor(), m, v, before, Tensor(table, DType::f64, {1, 4}),
                       Tensor(&refused, DType::f64, {kUpdateControl}), {});
  CHECK(same_bits(value, before));
  CHECK(same_bits(m, v));
}

TEST_CASE("the summed update has the same bits, and sums what it read and wrote", "[adamw]") {
  Context ctx(kTestScratch);
  const int64_t n = 20000, end = 19000;
  double table[] = {3, 9000, 1, 0.5, 9000, 9001, 2, 0, 9600, static_cast<double>(end), 1, 0};
  const Tensor segments(table, DType::f64, {3, 4});
  for (const DType type : kFloatingTypes)
    for (const bool with_master : {false, true}) {
      const DType wide = accumulate_dtype(type);
      if (type != wide && !with_master) continue;
      INFO(dtype_name(type) << (with_master ? " with a master" : ""));
      Pool pool;
      const auto abs_of = [&](const Tensor& t) {
        for (int64_t i = 0; i < n; ++i) Pool::set(t, i, std::abs(Pool::get(t, i)));
        return t;
      };
      const Tensor a[] = {pool.normal(type, {n}), with_master ? pool.normal(wide, {n}) : Tensor(),
                          pool.normal(wide, {n}), abs_of(pool.normal(wide, {n}))};
      const auto copy_of = [&](const Tensor& t) { return t ? pool.copy(t, t.dtype) : Tensor(); };
      const Tensor b[] = {copy_of(a[0]), copy_of(a[1]), copy_of(a[2]), copy_of(a[3])},
                   gradient = pool.normal(wide, {n});
      const auto held = [&](int64_t row) {
        const int64_t first = static_cast<int64_t>(table[4 * row]),
                      count = static_cast<int64_t>(table[4 * row + 1]) - first;
        int32_t sum = 0;
        for (const Tensor& t : b)
          if (t) word_sum(ctx, Tensor(&sum, DType::i32, {1}), t.rows(first, count));
        return sum;
      };
      UpdateControl control{
          .lr = 0.01, .step = 3, .max_grad_norm = 0, .loss_limit = INFINITY, .grad_norm_limit = INFINITY};
      const Tensor numbers(&control, DType::f64, {kUpdateControl});
      judge_update(ctx, numbers, {});
      int32_t sums[6] = {7, 7, 7, 7, 7, 7};
      const Tensor sums_tensor(sums, DType::i32, {3, 2});
      for (int64_t row = 0; row < 3; ++row) sums[2 * row] = held(row);
      const std::vector<int32_t> before(sums, sums + 6);
      const int threads = num_threads();
      set_num_threads(2);
      sluice::adamw_update(ctx, a[0], a[1], a[2], a[3], gradient, segments, numbers, {});
      sluice::adamw_update_summed(ctx, sums_tensor, b[0], b[1], b[2], b[3], gradient, segments, numbers, {});
      set_num_threads(threads);
      for (int i = 0; i < 4; ++i) CHECK((!a[i] || same_bits(a[i], b[i])));
      for (int64_t row = 0; row < 3; ++row) {
        CHECK(sums[2 * row] == before[static_cast<size_t>(2 * row)]);
        CHECK(sums[2 * row + 1] == held(row));
      }
      control.apply = 0;
      const std::vector<int32_t> applied(sums, sums + 6);
      sluice::adamw_update_summed(ctx, sums_tensor, b[0], b[1], b[2], b[3], gradient, segments, numbers, {});
      CHECK(std::vector<int32_t>(sums, sums + 6) == applied);
      CHECK(same_bits(a[2], b[2]));
    }
}
