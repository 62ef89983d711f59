#include "config/derived.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sluice {

DType storage_dtype(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return DType::f32;
    case Precision::bf16:
      return DType::bf16;
    case Precision::f64:
      return DType::f64;
  }
  fail(ExitCode::internal, "unknown precision");
}

Device resolve_device(DeviceChoice choice) {
  switch (choice) {
    case DeviceChoice::cpu:
      return Device::cpu;
    case DeviceChoice::automatic:
      return automatic_device();
    case DeviceChoice::cuda:
      if (!built_with_cuda())
        fail(ExitCode::usage, "train.device: cuda is not in this build, which is CPU-only; use auto or cpu");
      if (cuda_devices().empty())
        fail(ExitCode::usage,
             "train.device: cuda, but no GPU is visible (no driver, no card, or an empty "
             "CUDA_VISIBLE_DEVICES); use auto or cpu");
      return Device::cuda;
  }
  fail(ExitCode::internal, "unknown device");
}

int64_t receive_rows(int64_t tokens, int64_t experts_per_token, int64_t experts, int64_t ranks,
                     double capacity) {
  const int64_t possible = ranks * tokens * std::min(experts_per_token, experts / ranks);
  const double stated = std::ceil(capacity * static_cast<double>(tokens * experts_per_token));
  return stated < static_cast<double>(possible) ? std::max(tokens, static_cast<int64_t>(stated)) : possible;
}

}  // namespace sluice
