// The matrix products of a 1.7B model, forward and both backward products, and its output head with
// cross-entropy. On a GPU each is measured twice: with the algorithm that the library's heuristic prefers,
// and with the one that timing found to be the fastest.
#include <spdlog/fmt/fmt.h>

#include <array>
#include <functional>

#include "bench/bench.h"
#include "ops/cross_entropy.h"
#include "ops/linear.h"
#include "ops/product_algorithms.h"

namespace sluice::bench {
namespace {

struct Shape {
  const char* what;
  int64_t rows, out, in;
};

std::vector<Candidate> products(Inputs& in, const Shape& s, DType type) {
  LinearWeight w;
  w.value = in.normal(type, {s.out, s.in}, 0.02);
  std::array<Tensor, 2> x, y;
  for (Tensor& t : x) t = in.normal(type, {s.rows, s.in});
  for (Tensor& t : y) t = in.normal(type, {s.rows, s.out});
  const Tensor dw = in.zeros(DType::f32, {s.out, s.in});
  const double flops =
      2.0 * static_cast<double>(s.rows) * static_cast<double>(s.out) * static_cast<double>(s.in);
  const nlohmann::json labels{{"shape", fmt::format("{} x {} x {}", s.rows, s.out, s.in)},
                              {"precision", dtype_name(type)}};
  Context& ctx = in.ctx;
  const auto of = [](const std::array<Tensor, 2>& r, int turn) { return r[static_cast<size_t>(turn % 2)]; };
  return {{fmt::format("{}, forward", s.what),
           [=, &ctx](int i) { linear_forward(ctx, of(y, i), of(x, i), w); }, flops, 0, labels},
          {fmt::format("{}, backward to input", s.what),
           [=, &ctx](int i) { linear_backward_input(ctx, of(x, i), of(y, i), w, Into::overwrite); }, flops, 0,
           labels},
          {fmt::format("{}, backward to weight", s.what),
           [=, &ctx](int i) { linear_backward_weight(ctx, dw, of(y, i), of(x, i)); }, flops, 0, labels}};
}

std::vector<Candidate> loss(Inputs& in, const Shape& s, DType type) {
  LinearWeight head;
  head.value = in.normal(type, {s.out, s.in}, 0.02);
  const Tensor hidden = in.normal(type, {s.rows, s.in}), dhidden = in.zeros(type, {s.rows, s.in});
  const Tensor losses = in.zeros(DType::f32, {s.rows}), dweight = in.zeros(DType::f32, {s.out, s.in});
  const Tensor scale = in.numbers({1e-4});
  const int64_t words = s.out;
  const Tensor targets =
      in.integers(s.rows, [words](int64_t i) { return static_cast<int32_t>(i * 7919 % words); });
  const double flops =
      2.0 * static_cast<double>(s.rows) * static_cast<double>(s.out) * static_cast<double>(s.in);
  const nlohmann::json labels{{"shape", fmt::format("{} x {} x {}", s.rows, s.out, s.in)},
                              {"precision", dtype_name(type)}};
  Context& ctx = in.ctx;
  return {{"head and cross-entropy, forward",
           [=, &ctx](int) { cross_entropy_forward(ctx, losses, hidden, head, targets); }, flops, 0, labels},
          {"head and cross-entropy, forward and backward",
           [=, &ctx](int) {
             cross_entropy_forward_backward(ctx, losses, dhidden, dweight, hidden, head, targets, scale);
           },
           3 * flops, 0, labels}};
}

using Make = std::function<std::vector<Candidate>(Inputs&)>;

/// The fastest algorithms of all products of the candidates; of a CPU none.
ProductAlgorithms time_candidates(const RaceOptions& options, const Make& make) {
  std::set<GpuProduct> products;
  Context dry(0, options.device);
  dry.products = &products;
  Arena measure("bench", 0, options.device);
  Inputs inputs(dry, measure);
  for (const Candidate& c : make(inputs)) c.run(0);
  return time_products(products, dry.deterministic);
}

/// race(), on a GPU of every candidate with either choice of algorithms, one row behind the other.
nlohmann::json race_algorithms(const RaceOptions& options, const Make& make) {
  if (options.device == Device::cpu) return race(options, make);
  const ProductAlgorithms timed = time_candidates(options, make);
  nlohmann::json rows = race(options, [&](Inputs& in) {
    std::vector<Candidate> both;
    for (const Candidate& c : make(in))
      for (const ProductAlgorithms* algorithms : {static_cast<const ProductAlgorithms*>(nullptr), &timed}) {
        both.push_back(c);
        both.back().labels["algorithm"] = algorithms ? "timed" : "heuristic";
        both.back().run = [run = c.run, algorithms, &ctx = in.ctx](int turn) {
          ctx.algorithms = algorithms;
          run(turn);
        };
      }
    return both;
  });
  for (size_t i = 1; i < rows.size(); i += 2)
    if (rows[i].contains("us") && rows[i - 1].contains("us"))
      rows[i]["of_heuristic"] = rows[i]["us"].get<double>() / rows[i - 1]["us"].get<double>();
  return rows;
}

}  // namespace

nlohmann::json measure_matmul(const RaceOptions& options) {
  std::vector<Shape> shapes{{"square", 8192, 8192, 8192},
                            {"query, key and value", 16384, 4096, 2048},
                            {"query, key, value and gate", 16384, 6144, 2048},
                            {"attention output", 16384, 2048, 2048},
                            {"FFN in", 16384, 12288, 2048},
                            {"FFN out", 16384, 2048, 6144}};
  Shape head{"head", 16384, 151936, 2048};
  if (options.tiny) shapes = {{"square", 24, 24, 24}, {"odd", 13, 7, 9}}, head = {"head", 10, 301, 16};
  nlohmann::json rows = nlohmann::json::array();
  const auto add = [&](const nlohmann::json& more) {
    for (const nlohmann::json& row : more) rows.push_back(row);
  };
  for (const Shape& s : shapes)
    add(race_algorithms(options, [&](Inputs& in) { return products(in, s, DType::bf16); }));
  add(race_algorithms(options, [&](Inputs& in) { return products(in, shapes[0], DType::f32); }));
  add(race_algorithms(options, [&](Inputs& in) { return loss(in, head, DType::bf16); }));
  return rows;
}

}  // namespace sluice::bench
