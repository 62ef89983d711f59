// One op at a time, forward and backward, at the shapes of a 1024-token micro-batch, or at tiny ones.
#include <spdlog/fmt/fmt.h>

#include <functional>

#include "bench/bench.h"
#include "core/context.h"
#include "core/parallel_for.h"
#include "core/random.h"
#include "ops/activation.h"
#include "ops/adamw.h"
#include "ops/attention.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/gate.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"

namespace sluice::bench {
namespace {

class OpBench {
 public:
  OpBench(DType dtype, double peak, double seconds) : dtype_(dtype), peak_(peak), seconds_(seconds) {}
  nlohmann::json take_rows() { return std::move(rows_); }

  void linear(int64_t t, int64_t n, int64_t k) {
    Memory m(*this);
    LinearWeight w;
    w.value = m.normal({n, k});
    const LinearPackedBytes bytes = linear_packed_bytes(m.ctx, dtype_, n, k, t);
    if (bytes.forward > 0) w.packed = m.zeros(DType::u8, {bytes.forward});
    if (bytes.transposed > 0) w.packed_transposed = m.zeros(DType::u8, {bytes.transposed});
    const Tensor x = m.normal({t, k}), y = m.normal({t, n}), dw = m.zeros(DType::f32, {n, k});
    const double flops = 2.0 * static_cast<double>(t * n * k);
    const std::string shape = fmt::format("{}, {}, {}", t, n, k);
    const double bytes_packed = static_cast<double>(w.value.bytes() * 2 + bytes.forward + bytes.transposed);
    measure("linear_pack", shape, 0, bytes_packed, [&] { linear_pack(m.ctx, w); });
    measure("linear_forward", shape, flops, 0, [&] { linear_forward(m.ctx, y, x, w); });
    measure("linear_backward_input", shape, flops, 0,
            [&] { linear_backward_input(m.ctx, x, y, w, Into::overwrite); });
    measure("linear_backward_weight", shape, flops, 0, [&] { linear_backward_weight(m.ctx, dw, y, x); });
  }

  void attention(int64_t samples, int64_t sequence, int64_t heads, int64_t kv_heads, int64_t dim) {
    Memory m(*this);
    const int64_t t = samples * sequence;
    const Tensor q = m.normal({t, heads, dim}), k = m.normal({t, kv_heads, dim}),
                 v = m.normal({t, kv_heads, dim});
    const Tensor o = m.normal({t, heads, dim}), d_o = m.normal({t, heads, dim}),
                 dq = m.normal({t, heads, dim});
    const Tensor dk = m.normal({t, kv_heads, dim}), dv = m.normal({t, kv_heads, dim});
    const Tensor lse = m.zeros(DType::f32, {heads, t}), z0 = m.zeros(DType::f32, {heads, t});
    const Tensor first = m.zeros(DType::i32, {t});
    for (int64_t i = 0; i < t; ++i) first.as<int32_t>()[i] = static_cast<int32_t>(i / sequence * sequence);
    // Two products forward and five backward over the visible half of the scores.
    const double flops = 2.0 * static_cast<double>(t * heads * dim) * static_cast<double>(sequence);
    const std::string shape =
        fmt::format("{}x{}, {}/{} heads of {}", samples, sequence, heads, kv_heads, dim);
    measure("attention_forward", shape, flops, 0, [&] {
      attention_forward(m.ctx, {o, lse, z0}, {q, k, v, first, 0.125});
    });
    measure("attention_backward", shape, 2.5 * flops, 0, [&] {
      attention_backward(m.ctx, {dq, dk, dv}, d_o, {q, k, v, first, 0.125}, {o, lse});
    });
  }

  void cross_entropy(int64_t t, int64_t vocabulary, int64_t width) {
    Memory m(*this);
    LinearWeight w;
    w.value = m.normal({vocabulary, width});
    const LinearPackedBytes bytes = linear_packed_bytes(m.ctx, dtype_, vocabulary, width, t);
    if (bytes.forward > 0) w.packed = m.zeros(DType::u8, {bytes.forward});
    if (bytes.transposed > 0) w.packed_transposed = m.zeros(DType::u8, {bytes.transposed});
    linear_pack(m.ctx, w);
    const Tensor hidden = m.normal({t, width}), dhidden = m.normal({t, width});
    const Tensor losses = m.zeros(DType::f32, {t}), dweight = m.zeros(DType::f32, {vocabulary, width});
    const Tensor targets = m.words(t, vocabulary);
    const double flops = 2.0 * static_cast<double>(t * vocabulary * width);
    const std::string shape = fmt::format("{}, {}, {}", t, vocabulary, width);
    measure("cross_entropy_forward", shape, flops, 0,
            [&] { cross_entropy_forward(m.ctx, losses, hidden, w, targets); });
    const Tensor scale = m.zeros(DType::f64, {1});
    fill(m.ctx, scale, 1e-3);
    measure("cross_entropy_forward_backward", shape, 3 * flops, 0, [&] {
      cross_entropy_forward_backward(m.ctx, losses, dhidden, dweight, hidden, w, targets, scale);
    });
  }

  void streaming(int64_t t, int64_t width, int64_t inner, int64_t heads, int64_t vocabulary) {
    Memory m(*this);
    const double element = static_cast<double>(dtype_size(dtype_));
    const Tensor x = m.normal({t, width}), y = m.normal({t, width}), dy = m.normal({t, width});
    const Tensor weight = m.normal({width}), dweight = m.zeros(DType::f32, {width}),
                 rstd = m.zeros(DType::f32, {t});
    const double row_bytes = element * static_cast<double>(t * width);
    const std::string shape = fmt::format("{}, {}", t, width);
    measure("rmsnorm_forward", shape, 0, 2 * row_bytes,
            [&] { rmsnorm_forward(m.ctx, y, rstd, x, weight, 1e-6); });
    measure("rmsnorm_backward", shape, 0, 3 * row_bytes,
            [&] { rmsnorm_backward(m.ctx, y, dweight, dy, x, weight, rstd, Into::overwrite); });
    measure("add_forward", shape, 0, 3 * row_bytes, [&] { add_forward(m.ctx, y, x, dy); });

    const int64_t dim = width / heads;
    const Tensor cos = m.zeros(DType::f32, {t, dim / 2}), sin = m.zeros(DType::f32, {t, dim / 2});
    rope_table(cos, sin, 1e4, {});
    const Tensor positions = m.zeros(DType::i32, {t});
    for (int64_t i = 0; i < t; ++i) positions.as<int32_t>()[i] = static_cast<int32_t>(i);
    const Tensor per_head = x.view({t, heads, dim}), z = m.normal({t, heads, dim});
    measure("rope_forward", shape, 0, 2 * row_bytes, [&] {
      rope_forward(m.ctx, y.view({t, heads, dim}), per_head, positions, cos, sin);
    });
    measure("gate_forward", shape, 0, 3 * row_bytes, [&] {
      gate_forward(m.ctx, y.view({t, heads, dim}), per_head, z, {});
    });
    const Tensor dz = m.normal({t, heads, dim});
    measure("gate_backward", shape, 0, 5 * row_bytes, [&] {
      gate_backward(m.ctx, y.view({t, heads, dim}), dz, dy.view({t, heads, dim}), per_head, z, {});
    });

    const Tensor gate_up = m.normal({t, 2 * inner}), h = m.normal({t, inner}),
                 dgate_up = m.normal({t, 2 * inner});
    const double inner_bytes = element * static_cast<double>(t * inner);
    const std::string inner_shape = fmt::format("{}, {}", t, inner);
    measure("swiglu_forward", inner_shape, 0, 3 * inner_bytes, [&] { swiglu_forward(m.ctx, h, gate_up); });
    measure("swiglu_backward", inner_shape, 0, 5 * inner_bytes,
            [&] { swiglu_backward(m.ctx, dgate_up, h, gate_up); });

    const Tensor table = m.normal({vocabulary, width}), dtable = m.zeros(DType::f32, {vocabulary, width});
    const Tensor tokens = m.words(t, vocabulary);
    measure("embedding_forward", shape, 0, 2 * row_bytes,
            [&] { embedding_forward(m.ctx, y, tokens, table); });
    measure("embedding_backward", shape, 0, 3 * row_bytes,
            [&] { embedding_backward(m.ctx, dtable, dy, tokens); });
  }

  void adamw(int64_t n) {
    Memory m(*this);
    const Tensor value = m.normal({n}), gradient = m.zeros(DType::f32, {n}), am = m.zeros(DType::f32, {n}),
                 v = m.zeros(DType::f32, {n});
    const Tensor master = dtype_ == DType::bf16 ? m.zeros(DType::f32, {n}) : Tensor();
    const Tensor segments = m.zeros(DType::f64, {1, 4}), control = m.zeros(DType::f64, {kUpdateControl});
    const double whole[] = {0, static_cast<double>(n), 1, 0.1};
    write_tensor(m.ctx, segments, whole);
    const UpdateControl step{.lr = 1e-4, .clip = 1, .apply = 1, .correction1 = 0.1, .correction2 = 0.05};
    write_tensor(m.ctx, control, &step);
    const double bytes = static_cast<double>(n) * (dtype_ == DType::bf16 ? 30 : 28);
    measure("adamw_update", fmt::format("{}", n), 0, bytes,
            [&] { adamw_update(m.ctx, value, master, am, v, gradient, segments, control, AdamwSettings{}); });
  }

 private:
  /// The tensors of one measurement. Values come from a short random table, which is random enough for
  /// realistic power consumption.
  struct Memory {
    explicit Memory(const OpBench& bench) : ctx(kScratch), arena("bench", kArena), dtype(bench.dtype_) {}
    Tensor zeros(DType type, std::initializer_list<int64_t> dims) { return arena.alloc("t", type, dims); }
    Tensor normal(std::initializer_list<int64_t> dims) {
      const Tensor t = arena.alloc("t", dtype, dims);
      const RandomStream random(1, "bench");
      std::array<float, 1009> table;
      for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(random.normal(i));
      for (int64_t i = 0; i < t.numel(); ++i) {
        const float x = 0.1f * table[static_cast<size_t>(i) % table.size()];
        if (dtype == DType::bf16)
          t.as<bf16>()[i] = bf16(x);
        else
          t.as<float>()[i] = x;
      }
      return t;
    }
    Tensor words(int64_t count, int64_t vocabulary) {
      const Tensor t = arena.alloc("words", DType::i32, {count});
      const RandomStream random(2, "bench");
      for (int64_t i = 0; i < count; ++i)
        t.as<int32_t>()[i] =
            static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocabulary));
      return t;
    }
    static constexpr int64_t kScratch = int64_t{1} << 30,
                             kArena = int64_t{2} << 30;  // pages are allocated when touched
    Context ctx;
    Arena arena;
    DType dtype;
  };

  void measure(const char* op, const std::string& shape, double flops, double bytes,
               const std::function<void()>& f) {
    const double seconds = best_time(seconds_, f);
    nlohmann::json row{
        {"op", op}, {"precision", dtype_name(dtype_)}, {"shape", shape}, {"us", seconds * 1e6}};
    if (flops > 0) {
      row["gflops"] = flops / seconds * 1e-9;
      row["percent_of_peak"] = flops / seconds * 1e-7 / peak_;
    }
    if (bytes > 0) row["gb_per_second"] = bytes / seconds * 1e-9;
    rows_.push_back(row);
  }

  DType dtype_;
  double peak_, seconds_;
  nlohmann::json rows_ = nlohmann::json::array();
};

}  // namespace

nlohmann::json measure_ops(DType dtype, bool tiny, double peak_gflops, double seconds) {
  OpBench b(dtype, peak_gflops, seconds);
  if (tiny) {
    b.linear(128, 96, 64);
    b.cross_entropy(128, 512, 64);
    b.attention(2, 64, 4, 2, 32);
    b.streaming(128, 64, 96, 2, 512);
    b.adamw(10'000);
    return b.take_rows();
  }
  b.linear(1024, 384, 384);
  b.linear(1024, 128, 384);
  b.linear(1024, 2048, 384);
  b.linear(1024, 384, 1024);
  b.linear(2048, 3072, 768);
  b.linear(1024, 8064, 384);
  b.cross_entropy(1024, 8064, 384);
  b.cross_entropy(1024, 50304, 384);
  b.attention(4, 256, 6, 2, 64);
  b.attention(1, 1024, 6, 2, 64);
  b.attention(1, 4096, 6, 2, 64);
  b.streaming(1024, 384, 1024, 6, 8064);
  b.adamw(10'000'000);
  return b.take_rows();
}

}  // namespace sluice::bench
