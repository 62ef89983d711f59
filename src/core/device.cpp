#include "core/device.h"

#include <cstring>

#include "core/context.h"
#if defined(SLUICE_HAS_CUDA)
#include "core/cuda_backend.h"
#endif

namespace sluice {

#if defined(SLUICE_HAS_CUDA)
bool built_with_cuda() { return true; }
std::vector<DeviceInfo> cuda_devices() { return cuda::devices(); }
void synchronize(Context& ctx) {
  if (ctx.device == Device::cuda && !ctx.dry_run) cuda::synchronize(ctx);
}
#else
bool built_with_cuda() { return false; }
std::vector<DeviceInfo> cuda_devices() { return {}; }
void synchronize(Context&) {}
#endif

void copy(Context& ctx, const Tensor& dst, const Tensor& src) {
  SLUICE_CHECK(dst.dtype == src.dtype && dst.numel() == src.numel(), "copy: {} from {}", dst.describe(),
               src.describe());
  if (ctx.dry_run || dst.data == src.data || dst.numel() == 0) return;
#if defined(SLUICE_HAS_CUDA)
  if (dst.device == Device::cuda || src.device == Device::cuda) {
    SLUICE_CHECK(ctx.device == Device::cuda, "copy: tensors on a GPU, but the context is the CPU's");
    cuda::copy(ctx, dst.data, src.data, dst.bytes());
    return;
  }
#endif
  std::memcpy(dst.data, src.data, static_cast<size_t>(dst.bytes()));
}

double read_scalar(Context& ctx, const Tensor& t) {
  SLUICE_CHECK(t.numel() == 1 && (t.dtype == DType::f64 || t.dtype == DType::f32), "read_scalar: got {}",
               t.describe());
  if (ctx.dry_run) return 0;
  double wide = 0;
  float narrow = 0;
  const bool is_wide = t.dtype == DType::f64;
  copy(ctx, Tensor(is_wide ? static_cast<void*>(&wide) : &narrow, t.dtype, {1}), t);
  synchronize(ctx);
  return is_wide ? wide : narrow;
}

}  // namespace sluice
