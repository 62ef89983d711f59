#pragma once
#include <cstdint>

namespace sluice {

enum class Device : uint8_t { cpu, cuda };
constexpr const char* device_name(Device d) { return d == Device::cpu ? "cpu" : "cuda"; }

}  // namespace sluice
