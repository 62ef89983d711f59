#pragma once
// Element types. Arithmetic is in float for f32 and bf16 storage, and in double for f64.
#include <bit>
#include <cstdint>

namespace sluice {

enum class DType : uint8_t { f32, bf16, f64, i32, u8 };

constexpr int64_t dtype_size(DType t) {
  switch (t) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f64:
      return 8;
    case DType::i32:
      return 4;
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr const char* dtype_name(DType t) {
  switch (t) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}

/// Type of parameter gradients and statistics (rstd, lse, losses) in a model that stores `t`: f64 for f64,
/// otherwise f32.
constexpr DType accumulate_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

/// bfloat16: the upper half of an f32. Conversion rounds to nearest even; NaN stays a (quiet) NaN.
struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

template <class T>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<uint8_t> {
  static constexpr DType value = DType::u8;
};

/// The type in which arithmetic on T is done.
template <class T>
struct accumulate_of {
  using type = float;
};
template <>
struct accumulate_of<double> {
  using type = double;
};
template <class T>
using accumulate_t = typename accumulate_of<T>::type;

}  // namespace sluice
