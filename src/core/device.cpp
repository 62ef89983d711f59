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

namespace {
int chosen_device = 0;  // of the whole process, which is one rank
}  // namespace

void choose_cuda_device(int index) {
  const auto count = static_cast<int>(cuda_devices().size());
  if (count == 0) return;
  chosen_device = index % count;
#if defined(SLUICE_HAS_CUDA)
  cuda::choose(chosen_device);
#endif
}

void use_chosen_cuda_device() {
#if defined(SLUICE_HAS_CUDA)
  if (!cuda_devices().empty()) cuda::choose(chosen_device);
#endif
}

int chosen_cuda_device() { return chosen_device; }

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

void read_tensor(Context& ctx, void* host, const Tensor& t) {
  if (ctx.dry_run || t.numel() == 0) return;
#if defined(SLUICE_HAS_CUDA)
  if (t.device == Device::cuda) return cuda::read(ctx, host, t.data, t.bytes());
#endif
  std::memcpy(host, t.data, static_cast<size_t>(t.bytes()));
}

void write_tensor(Context& ctx, const Tensor& t, const void* host) {
  if (ctx.dry_run || t.numel() == 0) return;
#if defined(SLUICE_HAS_CUDA)
  if (t.device == Device::cuda) return cuda::write(ctx, t.data, host, t.bytes());
#endif
  std::memcpy(t.data, host, static_cast<size_t>(t.bytes()));
}

void prefetch(Context& ctx, const Tensor& dst, const Tensor& src) {
#if defined(SLUICE_HAS_CUDA)
  if (ctx.device == Device::cuda && !ctx.dry_run) return cuda::prefetch(ctx, dst.data, src.data, dst.bytes());
#endif
  copy(ctx, dst, src);
}

void await_prefetch(Context& ctx) {
#if defined(SLUICE_HAS_CUDA)
  if (ctx.device == Device::cuda && !ctx.dry_run) cuda::await_prefetch(ctx);
#else
  (void)ctx;
#endif
}

Mark::Mark() = default;
Mark::~Mark() = default;
Mark::Mark(Mark&& other) noexcept = default;
Mark& Mark::operator=(Mark&& other) noexcept = default;

void Mark::set(Context& ctx) {
#if defined(SLUICE_HAS_CUDA)
  if (ctx.device != Device::cuda || ctx.dry_run) return;
  if (!impl_) impl_ = cuda::make_mark();
  impl_->set(ctx);
#else
  (void)ctx;
#endif
}

void Mark::await(Context& ctx) const {
  if (impl_) impl_->await(ctx);
}

Graph::Graph() = default;
Graph::~Graph() = default;
Graph::Graph(Graph&& other) noexcept = default;
Graph& Graph::operator=(Graph&& other) noexcept = default;

void Graph::record(Context& ctx, const std::function<void()>& ops) {
  SLUICE_CHECK(ctx.device == Device::cuda && !ctx.dry_run, "Graph::record: only on a GPU");
#if defined(SLUICE_HAS_CUDA)
  impl_ = cuda::record(ctx, ops);
#else
  (void)ops;
#endif
}

void Graph::launch(Context& ctx) {
  SLUICE_CHECK(recorded(), "Graph::launch: nothing was recorded");
  impl_->launch(ctx);
}

Device automatic_device() {
  const std::vector<DeviceInfo> devices = cuda_devices();
  return devices.empty() || devices[0].emulated ? Device::cpu : Device::cuda;
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
