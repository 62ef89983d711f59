#include "ops/matmul.h"

#include <cblas.h>

#include <algorithm>
#include <cstdlib>
#include <dnnl.hpp>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/cpu_features.h"
#include "core/parallel_for.h"
#include "ops/elementwise.h"
#include "ops/grouped_linear.h"
#include "ops/strip_pack.h"
#include "ops/tile_product.h"

namespace sluice::cpu {
namespace {

using dnnl::memory;
using Layout = Product::Layout;

memory::data_type dnnl_type(DType t) {
  return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc plain(DType t, int64_t rows, int64_t cols, bool transposed) {
  return {{rows, cols}, dnnl_type(t), transposed ? memory::format_tag::ba : memory::format_tag::ab};
}

dnnl::primitive_attr attributes() {
  dnnl::primitive_attr a;
  a.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return a;
}

struct ProductHash {
  size_t operator()(const Product& p) const {
    uint64_t h = static_cast<uint64_t>(p.in) | static_cast<uint64_t>(p.out) << 4 |
                 static_cast<uint64_t>(p.b) << 8 | static_cast<uint64_t>(p.a_transposed) << 10 |
                 static_cast<uint64_t>(p.accumulate) << 11 | static_cast<uint64_t>(p.threads) << 16;
    for (int64_t d : {p.m, p.n, p.k}) h = (h ^ static_cast<uint64_t>(d)) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return h;
  }
};

/// A primitive with its arguments, so that running it only sets pointers.
struct Plan {
  static constexpr int kMaxArguments = 4;
  std::optional<dnnl::matmul::primitive_desc> matmul;  // one of the two
  std::optional<dnnl::reorder::primitive_desc> reorder;
  dnnl::primitive primitive;  // created at the first real run; a dry run needs only the description
  std::array<memory, kMaxArguments> memories;
  std::array<int, kMaxArguments> names{};
  int count = 0;
  int64_t scratch = 0, reserved = 0;  // bytes of its own; at least as many, which every run takes

  void argument(int name, const memory::desc& desc, const dnnl::engine& engine) {
    names[static_cast<size_t>(count)] = name;
    memories[static_cast<size_t>(count++)] = memory(desc, engine, DNNL_MEMORY_NONE);
  }
  void arguments(const dnnl::engine& engine, std::initializer_list<std::pair<int, memory::desc>> list,
                 const memory::desc& scratchpad) {
    for (const auto& [name, desc] : list) argument(name, desc, engine);
    scratch = static_cast<int64_t>(scratchpad.get_size());
    if (scratch > 0) argument(DNNL_ARG_SCRATCHPAD, scratchpad, engine);
    reserved = scratch;
  }

  void run(Context& ctx, const dnnl::stream& stream, std::initializer_list<const void*> pointers) {
    ScratchScope t(ctx.scratch);
    const Tensor work = reserved > 0 ? t.alloc("matrix product", DType::u8, {reserved}) : Tensor();
    if (ctx.dry_run) return;
    if (!primitive)
      primitive = matmul ? dnnl::primitive(dnnl::matmul(*matmul)) : dnnl::primitive(dnnl::reorder(*reorder));
    std::array<dnnl_exec_arg_t, kMaxArguments> args;
    size_t i = 0;
    for (const void* p : pointers) memories[i++].set_data_handle(const_cast<void*>(p));
    if (scratch > 0) memories[i].set_data_handle(work.data);
    for (i = 0; i < static_cast<size_t>(count); ++i) args[i] = {names[i], memories[i].get()};
    dnnl::error::wrap_c_api(dnnl_primitive_execute(primitive.get(), stream.get(), count, args.data()),
                            "oneDNN cannot run a matrix product");
  }
};

/// Lowers oneDNN's instruction set with SLUICE_ISA. Only the first call in a process counts.
void limit_dnnl_isa() {
  static const bool done = [] {
    if (cpu_isa() == Isa::avx2) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    if (cpu_isa() == Isa::baseline) dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
    return true;
  }();
  static_cast<void>(done);
}

class MatmulState : public BackendState {
 public:
  MatmulState() : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_) {}

  static MatmulState& of(Context& ctx) {
    if (!ctx.backend) {
      limit_dnnl_isa();
      ctx.backend = std::make_unique<MatmulState>();
    }
    auto* state = dynamic_cast<MatmulState*>(ctx.backend.get());
    SLUICE_CHECK(state, "matrix products: the context's backend state belongs to another backend");
    return *state;
  }

  const dnnl::stream& stream() const { return stream_; }

  Plan& product(const Product& p) {
    if (const auto found = products_.find(p); found != products_.end()) return found->second;
    // A model and its batch have few shapes. The cache must not grow without limit with varying ones (expert
    // loads, prompts).
    if (products_.size() >= kMaxPlans) products_.clear();
    const memory::desc a = plain(p.in, p.m, p.k, p.a_transposed), c = plain(p.out, p.m, p.n, false);
    const memory::desc b = p.b == Layout::packed ? packed_desc(p.in, p.k, p.n)
                                                 : plain(p.in, p.k, p.n, p.b == Layout::transposed);
    const auto described = [&](bool accumulates) {
      dnnl::primitive_attr attr = attributes();
      if (accumulates) {
        dnnl::post_ops sum;
        sum.append_sum(1.0f);
        attr.set_post_ops(sum);
      }
      return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), attr, engine_);
    };
    Plan& plan = products_[p];
    plan.matmul = described(p.accumulate);
    plan.arguments(engine_, {{DNNL_ARG_SRC, a}, {DNNL_ARG_WEIGHTS, b}, {DNNL_ARG_DST, c}},
                   plan.matmul->scratchpad_desc());
    // The first gradient of a step overwrites, and others add: both take the same memory.
    if (p.a_transposed)
      plan.reserved =
          std::max(plan.scratch, static_cast<int64_t>(described(!p.accumulate).scratchpad_desc().get_size()));
    return plan;
  }

  /// oneDNN's preferred layout of b. It is queried for one fixed m, so that a packed copy serves every m.
  const memory::desc& packed_desc(DType type, int64_t k, int64_t n) {
    const Product key{type, type, 0, n, k, false, Layout::packed, false, 0};
    if (const auto found = packed_.find(key); found != packed_.end()) return found->second;
    constexpr int64_t kRows = 512;
    const memory::desc b({k, n}, dnnl_type(type), memory::format_tag::any);
    const dnnl::matmul::primitive_desc desc({plain(type, kRows, k, false), b, plain(type, kRows, n, false)},
                                            attributes(), engine_);
    return packed_.emplace(key, desc.weights_desc()).first->second;
  }

  /// Bytes of a packed copy; 0 if b can be used directly. Cached, because every product asks and a
  /// description allocates.
  int64_t packed_size(DType storage, int64_t k, int64_t n) {
    const Product key{storage, storage, 0, n, k, false, Layout::packed, false, 0};
    if (const auto found = packed_sizes_.find(key); found != packed_sizes_.end()) return found->second;
    const DType type = product_dtype(storage);
    const memory::desc& desc = packed_desc(type, k, n);
    const bool already_plain = desc == plain(type, k, n, false) || desc == plain(type, k, n, true);
    // A plain f32 copy of a bf16 weight still saves converting it at every use.
    const int64_t size = type == storage && already_plain ? 0 : static_cast<int64_t>(desc.get_size());
    return packed_sizes_.emplace(key, size).first->second;
  }

  /// Whether the packed form of f32 is what strip_pack writes.
  bool packs_in_strips(int64_t k, int64_t n) {
    const memory::desc& d = packed_desc(DType::f32, k, n);
    const int64_t rows = (k + kStripRows - 1) / kStripRows * kStripRows,
                  columns = (n + kStripColumns - 1) / kStripColumns * kStripColumns;
    if (d.data.format_kind != dnnl_blocked || d.data.offset0 != 0 ||
        static_cast<int64_t>(d.get_size()) != rows * columns * dtype_size(DType::f32))
      return false;
    const dnnl_blocking_desc_t& b = d.data.format_desc.blocking;
    return b.inner_nblks == 2 && b.inner_idxs[0] == 0 && b.inner_idxs[1] == 1 &&
           b.inner_blks[0] == kStripRows && b.inner_blks[1] == kStripColumns &&
           b.strides[0] == kStripRows * kStripColumns && b.strides[1] == rows * kStripColumns;
  }

  Plan& packing(DType storage, int64_t k, int64_t n, bool transposed) {
    const Product key{storage, storage, 0, n, k, transposed, Layout::packed, false, num_threads()};
    if (const auto found = packings_.find(key); found != packings_.end()) return found->second;
    const memory::desc from = plain(storage, k, n, transposed),
                       to = packed_desc(product_dtype(storage), k, n);
    Plan& plan = packings_[key];
    plan.reorder.emplace(engine_, from, engine_, to, attributes());
    plan.arguments(engine_, {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}, plan.reorder->scratchpad_desc());
    return plan;
  }

 private:
  static constexpr size_t kMaxPlans = 1024;
  dnnl::engine engine_;
  dnnl::stream stream_;
  std::unordered_map<Product, Plan, ProductHash> products_, packings_;
  std::unordered_map<Product, memory::desc, ProductHash> packed_;
  std::unordered_map<Product, int64_t, ProductHash> packed_sizes_;
};

/// Calls a function that uses oneDNN and converts its exceptions to Error.
template <class F>
auto with_dnnl(F&& f) {
  try {
    return f();
  } catch (const dnnl::error& e) {
    fail(ExitCode::internal, "matrix product: oneDNN: {} (status {})", e.what(), static_cast<int>(e.status));
  }
}

/// Chunks of rows of fixed size, each by one thread: a row's bits do not depend on the number of threads.
void multiply_f64(const Product& p, const double* a, const double* b, double* c) {
  constexpr int64_t kRows = 64;
  openblas_set_num_threads(1);
  parallel_for((p.m + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kRows; row < std::min(p.m, end * kRows); row += kRows) {
      const int64_t rows = std::min(kRows, p.m - row);
      cblas_dgemm(CblasRowMajor, p.a_transposed ? CblasTrans : CblasNoTrans,
                  p.b == Layout::transposed ? CblasTrans : CblasNoTrans, static_cast<int>(rows),
                  static_cast<int>(p.n), static_cast<int>(p.k), 1.0, a + (p.a_transposed ? row : row * p.k),
                  static_cast<int>(p.a_transposed ? p.m : p.k), b,
                  static_cast<int>(p.b == Layout::transposed ? p.k : p.n), p.accumulate ? 1.0 : 0.0,
                  c + row * p.n, static_cast<int>(p.n));
    }
  });
}

/// By the grouped product of one group, which computes every row of c in one order, however many there are.
void multiply_independent_rows(Context& ctx, const Product& p, const void* a, const void* b, void* c) {
  SLUICE_CHECK(p.b != Layout::packed,
               "multiply: independent rows are computed from plain weights, got packed");
  const bool transposed = p.b == Layout::transposed;
  const auto tensor = [&](const void* data, int64_t rows, int64_t columns) {
    return Tensor(const_cast<void*>(data), p.in, {rows, columns});
  };
  const Tensor x = tensor(a, p.m, p.k), y = tensor(c, p.m, p.n);
  LinearWeight weight;
  weight.value = transposed ? tensor(b, p.n, p.k) : tensor(b, p.k, p.n);
  ScratchScope t(ctx.scratch);
  const Tensor offsets = t.alloc("rows of a product", DType::i32, {2});
  if (!ctx.dry_run) offsets.as<int32_t>()[0] = 0, offsets.as<int32_t>()[1] = static_cast<int32_t>(p.m);
  const Tensor to = p.accumulate ? t.like("product", y) : y;
  (transposed ? grouped_linear_forward : grouped_linear_backward_input)(ctx, to, x, weight, offsets, {});
  if (p.accumulate) add_forward(ctx, y, y, to);
}

}  // namespace

DType product_dtype(DType storage) {
  return storage == DType::bf16 && !bf16_products() ? DType::f32 : storage;
}

void multiply(Context& ctx, Product p, const void* a, const void* b, void* c) {
  if (p.m == 0 || p.n == 0) return;
  // Those of bf16 are independent anyway (ops/tile_product.h).
  if (ctx.independent_rows && !p.a_transposed && p.in != DType::bf16)
    return multiply_independent_rows(ctx, p, a, b, c);
  if (p.in == DType::f64) {
    if (!ctx.dry_run)
      multiply_f64(p, static_cast<const double*>(a), static_cast<const double*>(b), static_cast<double*>(c));
    return;
  }
  if (p.in == DType::bf16) return tile_product(ctx, p, a, b, c);
  library_multiply(ctx, p, a, b, c);
}

void library_multiply(Context& ctx, Product p, const void* a, const void* b, void* c) {
  p.threads = num_threads();
  with_dnnl([&] {
    MatmulState& state = MatmulState::of(ctx);
    state.product(p).run(ctx, state.stream(), {a, b, c});
  });
}

int64_t library_packed_bytes(Context& ctx, DType type, int64_t k, int64_t n) {
  return with_dnnl(
      [&] { return static_cast<int64_t>(MatmulState::of(ctx).packed_desc(type, k, n).get_size()); });
}

void library_pack(Context& ctx, DType type, int64_t k, int64_t n, bool b_transposed, const void* b,
                  void* packed) {
  with_dnnl([&] {
    MatmulState& state = MatmulState::of(ctx);
    state.packing(type, k, n, b_transposed).run(ctx, state.stream(), {b, packed});
  });
}

int64_t packed_bytes(Context& ctx, DType storage, int64_t k, int64_t n) {
  if (storage == DType::f64 || k == 0 || n == 0) return 0;
  if (storage == DType::bf16 && bf16_products()) return tile_packed_bytes(k, n);
  if (ctx.independent_rows) return 0;
  return with_dnnl([&] { return MatmulState::of(ctx).packed_size(storage, k, n); });
}

void pack(Context& ctx, DType storage, int64_t k, int64_t n, bool b_transposed, const void* b, void* packed) {
  if (storage == DType::bf16 && bf16_products())
    return tile_pack(ctx, k, n, b_transposed, static_cast<const bf16*>(b), static_cast<float*>(packed));
  with_dnnl([&] {
    MatmulState& state = MatmulState::of(ctx);
    if (storage == DType::f32 && state.packs_in_strips(k, n))
      return strip_pack(ctx, k, n, b_transposed, static_cast<const float*>(b), static_cast<float*>(packed));
    library_pack(ctx, storage, k, n, b_transposed, b, packed);
  });
}

std::string library_kernels() {
  using dnnl::cpu_isa;
  constexpr std::pair<cpu_isa, const char*> kNames[] = {
      {cpu_isa::sse41, "sse41"},
      {cpu_isa::avx, "avx"},
      {cpu_isa::avx2, "avx2"},
      {cpu_isa::avx512_core, "avx512_core"},
      {cpu_isa::avx512_core_vnni, "avx512_core_vnni"},
      {cpu_isa::avx512_core_bf16, "avx512_core_bf16"},
      {cpu_isa::avx512_core_amx, "avx512_core_amx"},
  };
  const cpu_isa chosen = dnnl::get_effective_cpu_isa();
  std::string name = fmt::format("{:#x}", static_cast<int>(chosen));
  for (const auto& [isa, text] : kNames)
    if (isa == chosen) name = text;
  return fmt::format("oneDNN {}, OpenBLAS {}, bf16 products in {}", name, openblas_get_corename(),
                     dtype_name(product_dtype(DType::bf16)));
}

}  // namespace sluice::cpu
