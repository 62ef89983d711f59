// The matrix products of a 1.7B model, forward and both backward products, and its output head with
// cross-entropy. On a GPU each is measured twice: with the algorithm that the library's heuristic prefers,
// and with the one that timing found to be the fastest. On a CPU products of bf16 are measured at the sizes
// of small models, where the kernels multiply bf16, each in turns with oneDNN's.
#include "ops/matmul.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

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

/// The fastest algorithms of all products of the candidates.
ProductAlgorithms time_candidates(const RaceOptions& options, const Make& make) {
  std::set<GpuProduct> products;
  Context dry(0, options.device);
  dry.products = &products;
  Arena measure("bench", 0, options.device);
  Inputs inputs(dry, measure);
  for (const Candidate& c : make(inputs)) c.run(0);
  return time_products(products, dry.deterministic);
}

/// race() of every candidate with either choice of algorithms, one row behind the other.
nlohmann::json race_algorithms(const RaceOptions& options, const Make& make) {
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

/// Of an operand or a result, of which each turn takes another one.
template <class T>
class Copies {
 public:
  explicit Copies(std::vector<T> copies) : copies_(std::move(copies)) {}
  const T& operator()(int turn) const { return copies_[static_cast<size_t>(turn) % copies_.size()]; }

 private:
  std::vector<T> copies_;
};

/// Candidates for the three products of a layer, by Sluice, and by oneDNN with a weight as it lies and
/// packed. As in a step of training, where one layer follows the other, a turn finds nothing of what it reads
/// or writes in the caches of its cores.
struct CpuRace {
  Inputs& in;
  const Shape& shape;
  std::vector<Candidate> candidates = {};

  /// How many copies there are of each operand and result.
  int64_t copies() const {
    constexpr int64_t kBytes = 64 << 20, kMost = 64;
    return std::clamp<int64_t>(kBytes / (2 * (shape.rows * (shape.out + shape.in) + shape.out * shape.in)), 2,
                               kMost);
  }
  /// make(i): copy i.
  template <class Make>
  auto copied(Make&& make) const {
    std::vector<decltype(make(0))> all;
    for (int i = 0; i < copies(); ++i) all.push_back(make(i));
    return Copies(std::move(all));
  }

  void add(const char* pass, const char* library, std::function<void(int)> run) {
    const double flops = 2.0 * static_cast<double>(shape.rows) * static_cast<double>(shape.out) *
                         static_cast<double>(shape.in);
    candidates.push_back({fmt::format("{}, {}, {}", shape.what, pass, library),
                          std::move(run),
                          flops,
                          0,
                          {{"shape", fmt::format("{} x {} x {}", shape.rows, shape.out, shape.in)},
                           {"precision", "bf16"},
                           {"pass", pass},
                           {"library", library}}});
  }

  void add_peer(const char* pass, cpu::Product p, const Copies<Tensor>& b, bool b_transposed,
                const Copies<Tensor>& a, const Copies<Tensor>& to) {
    Context& ctx = in.ctx;
    const bool packed = p.b == cpu::Product::Layout::packed;
    const Copies<Tensor> operand = !packed ? b : copied([&](int i) {
      const Tensor t = in.zeros(DType::u8, {cpu::library_packed_bytes(ctx, p.in, p.k, p.n)});
      cpu::library_pack(ctx, p.in, p.k, p.n, b_transposed, b(i).data, t.data);
      return t;
    });
    add(pass, packed ? "oneDNN, packed" : "oneDNN", [=, &ctx](int turn) {
      cpu::library_multiply(ctx, p, a(turn).data, operand(turn).data, to(turn).data);
    });
  }
};

std::vector<Candidate> cpu_products(Inputs& in, const Shape& s) {
  using Layout = cpu::Product::Layout;
  constexpr DType kType = DType::bf16;
  CpuRace race{in, s};
  Context& ctx = in.ctx;
  const LinearPackedBytes bytes = linear_packed_bytes(ctx, kType, s.out, s.in, s.rows);
  const auto w = race.copied([&](int) {
    LinearWeight one;
    one.value = in.normal(kType, {s.out, s.in}, 0.02);
    one.packed = in.zeros(DType::u8, {bytes.forward});
    one.packed_transposed = in.zeros(DType::u8, {bytes.transposed});
    linear_pack(ctx, one);
    return one;
  });
  const auto normal = [&](int64_t columns) {
    return race.copied([&](int) { return in.normal(kType, {s.rows, columns}); });
  };
  const auto x = normal(s.in), y = normal(s.out), values = race.copied([&](int i) { return w(i).value; }),
             dw = race.copied([&](int) {
               return in.zeros(DType::f32, {s.out, s.in});
             });

  const char* pass = "forward";
  race.add(pass, "own", [=, &ctx](int i) { linear_forward(ctx, y(i), x(i), w(i)); });
  for (const Layout b : {Layout::transposed, Layout::packed})
    race.add_peer(pass, {kType, kType, s.rows, s.out, s.in, false, b}, values, true, x, y);
  pass = "backward to input";
  race.add(pass, "own", [=, &ctx](int i) { linear_backward_input(ctx, x(i), y(i), w(i), Into::overwrite); });
  for (const Layout b : {Layout::plain, Layout::packed})
    race.add_peer(pass, {kType, kType, s.rows, s.in, s.out, false, b}, values, false, y, x);
  pass = "backward to weight";
  race.add(pass, "own",
           [=, &ctx](int i) { linear_backward_weight(ctx, dw(i), y(i), x(i), Into::overwrite); });
  race.add_peer(pass, {kType, DType::f32, s.out, s.in, s.rows, true, Layout::plain}, x, false, y, dw);
  return race.candidates;
}

/// Rows of Sluice's own products have `of_onednn`, their time divided by that of oneDNN's faster form.
nlohmann::json measure_cpu_products(const RaceOptions& options) {
  std::vector<Shape> shapes{{"attention output", 1024, 384, 384}, {"FFN in", 1024, 2048, 384},
                            {"FFN out", 1024, 384, 1024},         {"head", 1024, 8064, 384},
                            {"124M, FFN in", 2048, 3072, 768},    {"124M, FFN out", 2048, 768, 3072}};
  if (options.tiny) shapes = {{"odd", 13, 7, 9}};
  nlohmann::json all = nlohmann::json::array();
  if (!bf16_products() || bf16_unit() == Bf16Unit::amx_emulated) return all;  // nothing that time would tell
  for (const Shape& s : shapes) {
    nlohmann::json rows = race(options, [&](Inputs& in) { return cpu_products(in, s); });
    for (nlohmann::json& row : rows) {
      double best = std::numeric_limits<double>::infinity();
      for (const nlohmann::json& other : rows)
        if (other["pass"] == row["pass"] && other["library"] != "own")
          best = std::min(best, other["us"].get<double>());
      if (row["library"] == "own") row["of_onednn"] = row["us"].get<double>() / best;
    }
    for (const nlohmann::json& row : rows) all.push_back(row);
  }
  return all;
}

}  // namespace

nlohmann::json measure_matmul(const RaceOptions& options) {
  if (options.device == Device::cpu) return measure_cpu_products(options);
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
