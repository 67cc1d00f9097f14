// Metal's half and bfloat, CUDA's half and bfloat16: stored in 16 bits, computed in float, rounded after each operation.
#pragma once
#include <cstdint>
#include <type_traits>

namespace emulator {

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline uint16_t to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bits >> 16) | 0x40;  // stays a NaN
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline float from_bfloat(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

inline float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return float_of(sign | bits_of(fraction * 0x1p-24f));
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
inline uint16_t to_half(float value) {
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffff;
  const uint16_t sign = (bits >> 16) & 0x8000;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;  // rounds to more than 65504
  if (size < 0x38800000)  // below the smallest normal number; the sum rounds to a multiple of 2^-24
    return sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f));
  return sign | ((size + 0xfff + ((size >> 13) & 1) - 0x38000000) >> 13);
}

// float becomes half by itself, and bfloat only when a kernel says so.
template <bool BRAIN>
struct Small {
  uint16_t bits;
  static uint16_t encode(float value) { return BRAIN ? to_bfloat(value) : to_half(value); }
  Small() = default;
  template <class I, std::enable_if_t<std::is_integral_v<I>, int> = 0>
  Small(I value) : bits(encode(value)) {}
  template <class F, std::enable_if_t<std::is_same_v<F, float> && !BRAIN, int> = 0>
  Small(F value) : bits(encode(value)) {}
  template <class F, std::enable_if_t<std::is_same_v<F, float> && BRAIN, int> = 0, class = void>
  explicit Small(F value) : bits(encode(value)) {}
  operator float() const { return BRAIN ? from_bfloat(bits) : from_half(bits); }
};

#define OPERATOR(op) \
  template <bool B> Small<B> operator op(Small<B> a, Small<B> b) { return Small<B>(float(a) op float(b)); } \
  template <bool B, class T> Small<B>& operator op##=(Small<B>& a, T b) { return a = Small<B>(float(a) op float(b)); }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/)
#undef OPERATOR

}  // namespace emulator
