// The memory-bound ops at the shapes of a 1.7B model (16,384 tokens, hidden size 2048, 16/8 heads of 128, FFN
// 6144): bytes that must move per second, compared with a plain copy measured before and after.
#include <array>

#include "bench/bench.h"
#include "ops/activation.h"
#include "ops/adamw.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gate.h"
#include "ops/norm_rope.h"
#include "ops/reduce.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"

namespace sluice::bench {
namespace {

constexpr int kTurns = 3;  // sets of buffers, each larger than an L2 cache of 60 MB at full size
using Rotating = std::array<Tensor, kTurns>;

struct Sizes {
  int64_t tokens = 16384, width = 2048, heads = 16, depth = 128, inner = 6144, words = 151936,
          parameters = 200'000'000;
  int64_t copy_bytes = int64_t{1} << 30;
  static Sizes tiny() { return {12, 64, 2, 64, 96, 50, 1000, 4096}; }
};

const Tensor& of(const Rotating& r, int turn) { return r[static_cast<size_t>(turn % kTurns)]; }

class Kernels {
 public:
  Kernels(Inputs& in, const Sizes& sizes) : in_(in), s_(sizes) {}

  std::vector<Candidate> residual_and_norm() {
    const double row = bytes(s_.tokens * s_.width);
    const Rotating x = matrices(s_.width), y = matrices(s_.width), z = matrices(s_.width),
                   w = matrices(s_.width);
    const Tensor weight = in_.normal(DType::bf16, {s_.width}), dweight = in_.zeros(DType::f32, {s_.width});
    const Tensor rstd = in_.zeros(DType::f32, {s_.tokens});
    Context& ctx = in_.ctx;
    rmsnorm_forward(ctx, y[0], rstd, x[0], weight, 1e-6);  // rstd is needed by backward
    return {{"add_forward", [=, &ctx](int i) { add_forward(ctx, of(z, i), of(x, i), of(y, i)); }, 0, 3 * row},
            {"rmsnorm_forward",
             [=, &ctx](int i) { rmsnorm_forward(ctx, of(y, i), rstd, of(x, i), weight, 1e-6); }, 0, 2 * row},
            {"add_rmsnorm_forward",
             [=, &ctx](int i) {
               add_rmsnorm_forward(ctx, of(z, i), of(y, i), rstd, of(x, i), of(w, i), weight, 1e-6);
             },
             0, 4 * row},
            {"rmsnorm_backward",
             [=, &ctx](int i) {
               rmsnorm_backward(ctx, of(z, i), dweight, of(y, i), of(x, i), weight, rstd, Into::overwrite);
             },
             0, 3 * row},
            {"rmsnorm_backward, added",
             [=, &ctx](int i) {
               rmsnorm_backward(ctx, of(z, i), dweight, of(y, i), of(x, i), weight, rstd, Into::add);
             },
             0, 4 * row}};
  }

  std::vector<Candidate> heads() {
    const int64_t width = s_.heads * s_.depth;
    const double row = bytes(s_.tokens * width);
    const auto as_heads = [&](Rotating r) {
      for (Tensor& t : r) t = t.view({s_.tokens, s_.heads, s_.depth});
      return r;
    };
    const Rotating x = as_heads(matrices(width)), y = as_heads(matrices(width)),
                   z = as_heads(matrices(width)), dx = as_heads(matrices(width)),
                   dz = as_heads(matrices(width));
    const Tensor per_head = in_.normal(DType::bf16, {s_.tokens, s_.heads});
    const Tensor dper_head = in_.zeros(DType::bf16, {s_.tokens, s_.heads});
    const Tensor weight = in_.normal(DType::bf16, {s_.depth}), dweight = in_.zeros(DType::f32, {s_.depth});
    const Tensor rstd = in_.zeros(DType::f32, {s_.tokens * s_.heads});
    const Tensor cos = in_.normal(DType::f32, {s_.tokens, s_.depth / 2}),
                 sin = in_.normal(DType::f32, {s_.tokens, s_.depth / 2});
    const Tensor positions = in_.integers(s_.tokens, [](int64_t i) { return static_cast<int32_t>(i); });
    Context& ctx = in_.ctx;
    norm_rope_forward(ctx, y[0], rstd, x[0], weight, 1e-6, positions, cos, sin);
    return {
        {"norm_rope_forward",
         [=, &ctx](int i) {
           norm_rope_forward(ctx, of(y, i), rstd, of(x, i), weight, 1e-6, positions, cos, sin);
         },
         0, 2 * row},
        {"norm_rope_backward",
         [=, &ctx](int i) {
           norm_rope_backward(ctx, of(dx, i), dweight, of(y, i), of(x, i), weight, rstd, positions, cos, sin);
         },
         0, 3 * row},
        {"gate_forward, elementwise",
         [=, &ctx](int i) { gate_forward(ctx, of(y, i), of(x, i), of(z, i), {}); }, 0, 3 * row},
        {"gate_backward, elementwise",
         [=, &ctx](int i) { gate_backward(ctx, of(dx, i), of(dz, i), of(y, i), of(x, i), of(z, i), {}); }, 0,
         5 * row},
        {"gate_forward, headwise", [=, &ctx](int i) { gate_forward(ctx, of(y, i), of(x, i), per_head, {}); },
         0, 2 * row},
        {"gate_backward, headwise",
         [=, &ctx](int i) { gate_backward(ctx, of(dx, i), dper_head, of(y, i), of(x, i), per_head, {}); }, 0,
         3 * row}};
  }

  std::vector<Candidate> ffn() {
    const double row = bytes(s_.tokens * s_.inner);
    const Rotating gate_up = matrices(2 * s_.inner), h = matrices(s_.inner),
                   dgate_up = matrices(2 * s_.inner);
    Context& ctx = in_.ctx;
    return {
        {"swiglu_forward", [=, &ctx](int i) { swiglu_forward(ctx, of(h, i), of(gate_up, i)); }, 0, 3 * row},
        {"swiglu_backward",
         [=, &ctx](int i) { swiglu_backward(ctx, of(dgate_up, i), of(h, i), of(gate_up, i)); }, 0, 5 * row}};
  }

  std::vector<Candidate> embedding() {
    const Tensor table = in_.normal(DType::bf16, {s_.words, s_.width}),
                 dtable = in_.zeros(DType::f32, {s_.words, s_.width});
    const Rotating y = matrices(s_.width);
    const int64_t words = s_.words;
    const Tensor tokens =
        in_.integers(s_.tokens, [words](int64_t i) { return static_cast<int32_t>(i * 7919 % words); });
    const double elements = static_cast<double>(s_.tokens * s_.width);
    Context& ctx = in_.ctx;
    return {{"embedding_forward", [=, &ctx](int i) { embedding_forward(ctx, of(y, i), tokens, table); }, 0,
             4 * elements},
            {"embedding_backward", [=, &ctx](int i) { embedding_backward(ctx, dtable, of(y, i), tokens); }, 0,
             10 * elements}};
  }

  std::vector<Candidate> optimizer() {
    const int64_t n = s_.parameters;
    const double count = static_cast<double>(n);
    const Tensor value = in_.zeros(DType::bf16, {n}), gradient = in_.normal(DType::f32, {n}, 1e-3);
    const Tensor master = in_.normal(DType::f32, {n}), m = in_.zeros(DType::f32, {n}),
                 v = in_.zeros(DType::f32, {n});
    const Tensor segments = in_.numbers({0, count, 1, 0.1}).view({1, 4});
    UpdateControl c;
    c.lr = 1e-4, c.step = 10, c.clip = 1, c.apply = 1, c.correction1 = 0.65, c.correction2 = 0.4;
    const Tensor control = in_.zeros(DType::f64, {kUpdateControl}), result = in_.zeros(DType::f64, {1});
    write_tensor(in_.ctx, control, &c);
    Context& ctx = in_.ctx;
    return {{"adamw_update",
             [=, &ctx](int) { adamw_update(ctx, value, master, m, v, gradient, segments, control, {}); }, 0,
             30 * count},
            {"sum_of_squares", [=, &ctx](int) { sum_of_squares(ctx, result, gradient); }, 0, 4 * count},
            {"fill", [=, &ctx](int) { fill(ctx, m, 0); }, 0, 4 * count}};
  }

  std::vector<Candidate> plain_copy() {
    const Tensor a = in_.normal(DType::f32, {s_.copy_bytes / 4}),
                 b = in_.zeros(DType::f32, {s_.copy_bytes / 4});
    Context& ctx = in_.ctx;
    return {{"copy", [=, &ctx](int) { copy(ctx, b, a); }, 0, 2.0 * static_cast<double>(s_.copy_bytes)}};
  }

 private:
  static double bytes(int64_t elements) { return 2.0 * static_cast<double>(elements); }
  Rotating matrices(int64_t width) {
    Rotating r;
    for (Tensor& t : r) t = in_.normal(DType::bf16, {s_.tokens, width});
    return r;
  }

  Inputs& in_;
  Sizes s_;
};

}  // namespace

nlohmann::json measure_kernels(const RaceOptions& options) {
  const Sizes sizes = options.tiny ? Sizes::tiny() : Sizes();
  const auto group = [&](std::vector<Candidate> (Kernels::*make)()) {
    return race(options, [&](Inputs& in) { return (Kernels(in, sizes).*make)(); });
  };
  const nlohmann::json before = group(&Kernels::plain_copy);
  nlohmann::json rows = before;
  for (const auto make : {&Kernels::residual_and_norm, &Kernels::heads, &Kernels::ffn, &Kernels::embedding,
                          &Kernels::optimizer})
    for (const nlohmann::json& row : group(make)) rows.push_back(row);
  const nlohmann::json after = group(&Kernels::plain_copy);
  rows.push_back(after[0]);
  rows.back()["name"] = "copy, again";
  const double copy =
      std::max(before[0]["tb_per_second"].get<double>(), after[0]["tb_per_second"].get<double>());
  for (nlohmann::json& row : rows)
    if (row.contains("tb_per_second"))
      row["percent_of_copy"] = 100 * row["tb_per_second"].get<double>() / copy;
  return rows;
}

}  // namespace sluice::bench
