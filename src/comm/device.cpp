#include "comm/device.h"

#if defined(SLUICE_HAS_CUDA)
namespace sluice::cuda {
decltype(::sluice::make_device_communicator) make_device_communicator;
decltype(::sluice::nccl_version) nccl_version;
}  // namespace sluice::cuda
#endif

namespace sluice {

#if defined(SLUICE_HAS_CUDA)
std::unique_ptr<Communicator> make_device_communicator(Communicator& inner, Context& ctx,
                                                       const DeviceRanksOptions& options) {
  SLUICE_CHECK(ctx.device == Device::cuda, "make_device_communicator: the context is the CPU's");
  return cuda::make_device_communicator(inner, ctx, options);
}
std::string nccl_version() { return cuda::nccl_version(); }
#else
std::unique_ptr<Communicator> make_device_communicator(Communicator&, Context&, const DeviceRanksOptions&) {
  fail(ExitCode::internal, "make_device_communicator: this build has no CUDA backend");
}
std::string nccl_version() { return ""; }
#endif

}  // namespace sluice
