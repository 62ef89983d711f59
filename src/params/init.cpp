#include "params/init.h"

#include "core/host_view.h"
#include "core/parallel_for.h"
#include "core/random.h"

namespace sluice {
namespace {

template <class T>
void fill_initial(T* values, int64_t first, int64_t n, const Init& init, const RandomStream& random) {
  using A = accumulate_t<T>;
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double x = init.kind == Init::Kind::constant
                           ? init.value
                           : init.value * random.normal(static_cast<uint64_t>(first + i));
      values[i] = static_cast<T>(static_cast<A>(x));
    }
  });
}

}  // namespace

void write_initial_values(Context& ctx, const ParamSpec& spec, int64_t begin, int64_t count,
                          const Tensor& target, uint64_t seed) {
  const RandomStream random(seed, spec.name);
  HostView view(ctx, target, HostView::Content::uninitialized);
  const Tensor& part = view.tensor();
  switch (part.dtype) {
    case DType::f32:
      fill_initial(part.as<float>(), begin, count, spec.init, random);
      break;
    case DType::bf16:
      fill_initial(part.as<bf16>(), begin, count, spec.init, random);
      break;
    case DType::f64:
      fill_initial(part.as<double>(), begin, count, spec.init, random);
      break;
    case DType::i32:
    case DType::u8:
      fail(ExitCode::internal, "initialize: parameters cannot be {}", dtype_name(part.dtype));
  }
  view.write_back();
}

}  // namespace sluice
