// AdamW over flat buffers: segments that begin and end anywhere, gaps, several tiles; steps that are judged
// not to apply.
#include "ops/adamw.h"

#include <spdlog/fmt/fmt.h>

#include <cmath>

#include "ops/cases.h"
#include "ops/reduce.h"

namespace sluice::test {
namespace {

const AdamwSettings kSettings = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};

UpdateControl plain_control() {
  UpdateControl c = {};
  c.lr = 0.01, c.step = 3, c.gradient_scale = 0.125, c.max_grad_norm = 1, c.loss_limit = 50,
  c.grad_norm_limit = 90;
  c.loss = 24, c.squares = 9;
  return c;
}

Tensor control_tensor(CaseRun& r, const UpdateControl& c) {
  return r.input("control", DType::f64, {kUpdateControl}, [&](int64_t i) {
    double values[kUpdateControl];
    std::memcpy(values, &c, sizeof c);
    return values[i];
  });
}

struct Segment {
  int64_t begin, end;
  double multiplier, decay;
};

OpCase update_case(const std::string& what, int64_t count, const std::vector<Segment>& segments,
                   UpdateControl control, bool with_master = true, bool shifted = false) {
  return {fmt::format("adamw_update ({}) {}", count, what), [=](CaseRun& r) {
            const int64_t n = count + (shifted ? 1 : 0);
            const auto part = [&](const Tensor& t) { return shifted ? t.rows(1, count) : t; };
            const Tensor value = r.inout("value", r.dtype, {n}), m = r.inout("m", r.wide, {n}, 0.1);
            const Tensor v = r.compared(
                "v", r.input("v", r.wide, {n}, [](int64_t i) { return 1e-3 * static_cast<double>(i % 97); }));
            const Tensor gradient = r.input("gradient", r.wide, {n});
            Tensor master;
            if (with_master || r.dtype != r.wide) master = part(r.inout("master", r.wide, {n}));
            const Tensor table =
                r.input("segments", DType::f64, {static_cast<int64_t>(segments.size()), 4}, [&](int64_t i) {
                  const Segment& s = segments[static_cast<size_t>(i / 4)];
                  return i % 4 == 0   ? static_cast<double>(s.begin)
                         : i % 4 == 1 ? static_cast<double>(s.end)
                         : i % 4 == 2 ? s.multiplier
                                      : s.decay;
                });
            const Tensor c = control_tensor(r, control);
            judge_update(r.ctx, c, kSettings);
            adamw_update(r.ctx, part(value), master, part(m), part(v), part(gradient), table, c, kSettings);
          }};
}

OpCase judge_case(const std::string& what, UpdateControl control) {
  return {"judge_update " + what, [=](CaseRun& r) {
            judge_update(r.ctx, r.compared("control", control_tensor(r, control)), kSettings);
          }};
}

/// A gradient that is not finite: its norm, computed on the device, keeps the parameters as they are.
OpCase not_finite_case(double bad) {
  return {fmt::format("a gradient of {} is not applied", bad), [=](CaseRun& r) {
            const int64_t n = 100;
            const Tensor gradient = r.input(
                "gradient", r.wide, {n}, [=](int64_t i) { return i == 70 ? bad : static_cast<double>(i); });
            const Tensor c = control_tensor(r, plain_control());
            const Tensor squares(
                c.data ? static_cast<double*>(c.data) + offsetof(UpdateControl, squares) / sizeof(double)
                       : nullptr,
                DType::f64, {1}, "squares", c.device);
            sum_of_squares(r.ctx, squares, gradient);
            judge_update(r.ctx, c, kSettings);
            const Tensor table =
                r.input("segments", DType::f64, {1, 4}, [=](int64_t i) { return i == 1 ? n : i * 0.5; });
            Tensor master;
            if (r.dtype != r.wide) master = r.inout("master", r.wide, {n});
            adamw_update(r.ctx, r.inout("value", r.dtype, {n}), master, r.inout("m", r.wide, {n}),
                         r.inout("v", r.wide, {n}), gradient, table, c, kSettings);
          }};
}

std::vector<Segment> random_segments(Random& random, int64_t count) {
  std::vector<Segment> segments;
  for (int64_t at = uniform(random, 0, 5); at < count;) {
    const int64_t end =
        std::min(count, at + one_of<int64_t>(random, {1, 2, 5, 64, uniform(random, 1, 5000)}));
    segments.push_back({at, end, one_of(random, {1.0, 0.5}), one_of(random, {0.0, 0.1})});
    at = end + one_of<int64_t>(random, {0, 0, 1, 3, 17});
  }
  if (segments.empty()) segments.push_back({0, count, 1, 0.1});
  return segments;
}

}  // namespace

OpFamily adamw_cases() {
  const UpdateControl plain = plain_control();
  UpdateControl unclipped = plain, first = plain, large_loss = plain, large_norm = plain, no_number = plain,
                inexact = plain;
  unclipped.max_grad_norm = 0;
  first.step = 1, first.squares = 0.25;
  large_loss.loss = 8 * 50.5;
  large_norm.squares = 90.5 * 90.5;
  inexact.loss = 10.1, inexact.gradient_scale = 1.0 / 3;                        // a product that is rounded
  no_number.max_grad_norm = 0, no_number.squares = 4, no_number.loss = 8 * 50;  // at the limit: applied

  OpFamily family{"adamw", {}, {}};
  auto& cases = family.cases;
  cases = {judge_case("clips", plain),
           judge_case("does not clip", unclipped),
           judge_case("of step 1", first),
           judge_case("refuses a loss", large_loss),
           judge_case("refuses a norm", large_norm),
           judge_case("at the limit", no_number),
           judge_case("of a loss whose product with the scale is rounded", inexact),
           update_case("after such a loss", 100, {{0, 100, 1, 0.1}}, inexact),
           not_finite_case(NAN),
           not_finite_case(INFINITY)};
  for (const int64_t n : {1, 3, 64, 1000, 4096, 2 * 4096 + 7}) {
    cases.push_back(update_case("one segment", n, {{0, n, 1, 0.1}}, plain));
    cases.push_back(update_case("one segment, no master", n, {{0, n, 1, 0.1}}, first, false));
    cases.push_back(update_case("one segment, one element on", n, {{0, n, 1, 0.1}}, plain, true, true));
  }
  cases.push_back(update_case("refused", 1000, {{0, 1000, 1, 0.1}}, large_loss));
  cases.push_back(update_case("with gaps", 9000,
                              {{3, 4, 1, 0},
                               {5, 6, 2, 0.1},
                               {6, 7, 1, 0.5},
                               {8, 12, 1, 0.1},
                               {13, 4095, 0.5, 0.1},
                               {4097, 4099, 1, 0},
                               {4099, 8999, 1, 0.1}},
                              unclipped));
  cases.push_back(update_case("one element in the second tile", 9000, {{5001, 5002, 1, 0.1}}, plain));
  std::vector<Segment> many;
  for (int64_t i = 0; i < 2000; ++i)
    many.push_back({i * 5, i * 5 + 5 - i % 2, 1 + static_cast<double>(i % 3), 0.1});
  cases.push_back(update_case("2,000 segments in several tiles", 10000, many, plain));
  family.fuzz = [](Random& random) {
    const int64_t count = uniform(random, 1, 12000);
    return update_case("random segments", count, random_segments(random, count), plain_control(),
                       uniform(random, 0, 1) == 1, uniform(random, 0, 3) == 0);
  };
  return family;
}

}  // namespace sluice::test
