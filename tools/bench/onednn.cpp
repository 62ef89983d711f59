#include "bench/onednn.h"

#include <dnnl.hpp>

#include "core/error.h"

namespace sluice::bench {
namespace {

using dnnl::memory;
using Layout = cpu::Product::Layout;

memory::data_type type_of(DType t) {
  return t == DType::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc matrix(DType t, int64_t rows, int64_t columns, memory::format_tag tag) {
  return {{rows, columns}, type_of(t), tag};
}

memory::format_tag tag_of(bool transposed) {
  return transposed ? memory::format_tag::ba : memory::format_tag::ab;
}

template <class F>
auto checked(F&& f) {
  try {
    return f();
  } catch (const dnnl::error& e) {
    fail(ExitCode::internal, "bench matmul: oneDNN: {}", e.what());
  }
}

}  // namespace

struct OneDnnProduct::State {
  explicit State(const cpu::Product& p)
      : product(p),
        engine(dnnl::engine::kind::cpu, 0),
        stream(engine),
        description(dnnl::matmul::desc(matrix(p.in, p.m, p.k, tag_of(p.a_transposed)),
                                       matrix(p.in, p.k, p.n,
                                              p.b == Layout::packed ? memory::format_tag::any
                                                                    : tag_of(p.b == Layout::transposed)),
                                       matrix(p.out, p.m, p.n, memory::format_tag::ab)),
                    engine),
        matmul(description),
        a(description.src_desc(), engine, DNNL_MEMORY_NONE),
        b(description.weights_desc(), engine, DNNL_MEMORY_NONE),
        c(description.dst_desc(), engine, DNNL_MEMORY_NONE) {}

  cpu::Product product;
  dnnl::engine engine;
  dnnl::stream stream;
  dnnl::matmul::primitive_desc description;
  dnnl::matmul matmul;
  memory a, b, c, packed;
};

OneDnnProduct::OneDnnProduct(const cpu::Product& product)
    : state_(checked([&] { return std::make_unique<State>(product); })) {}
OneDnnProduct::~OneDnnProduct() = default;
OneDnnProduct::OneDnnProduct(OneDnnProduct&&) noexcept = default;

void OneDnnProduct::pack(const void* b, bool transposed) {
  State& s = *state_;
  checked([&] {
    memory plain(matrix(s.product.in, s.product.k, s.product.n, tag_of(transposed)), s.engine,
                 const_cast<void*>(b));
    s.packed = memory(s.description.weights_desc(), s.engine);
    dnnl::reorder(plain, s.packed).execute(s.stream, plain, s.packed);
    s.stream.wait();
  });
}

void OneDnnProduct::run(const void* a, const void* b, void* c) {
  State& s = *state_;
  checked([&] {
    s.a.set_data_handle(const_cast<void*>(a));
    s.c.set_data_handle(c);
    const bool packed = s.product.b == Layout::packed;
    if (!packed) s.b.set_data_handle(const_cast<void*>(b));
    s.matmul.execute(s.stream,
                     {{DNNL_ARG_SRC, s.a}, {DNNL_ARG_WEIGHTS, packed ? s.packed : s.b}, {DNNL_ARG_DST, s.c}});
    s.stream.wait();
  });
}

}  // namespace sluice::bench
