// The vector abstraction in plain C++: 16 floats as an array.
//
// All vector types offer the same operations with the same results, bit for bit: each one is a
// single IEEE operation per lane or integer arithmetic. NaN becomes 0x7FC0 (bf16) or 0x7E00 (fp16).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {
namespace {

struct Portable {
  struct Floats {
    float lane[16];
  };
  struct Doubles {
    double lane[16];
  };

  template <class Operation>
  static Floats each(Operation operation) {
    Floats result;
    for (std::size_t j = 0; j < 16; ++j) result.lane[j] = operation(j);
    return result;
  }

  static Floats broadcast(float value) {
    return each([=](std::size_t) { return value; });
  }
  static Floats load(const float* from) {
    return each([=](std::size_t j) { return from[j]; });
  }
  static Floats load_bf16(const std::uint16_t* from) {
    return each([=](std::size_t j) { return from_bits(std::uint32_t{from[j]} << 16); });
  }
  static Floats load_fp16(const std::uint16_t* from) {
    return each([=](std::size_t j) { return from_fp16(from[j]); });
  }
  // The float whose upper half, rounded half up in the bits, is `high` and whose lower half is
  // `low`: rounding up carried, so the carry is taken back.
  static Floats load_split(const std::uint16_t* high, const std::uint16_t* low) {
    return each([=](std::size_t j) {
      const std::uint32_t upper = std::uint32_t{high[j]} << 16;
      const std::uint32_t lower = low[j];
      return from_bits(upper + lower - ((lower >> 15) << 16));
    });
  }
  static void store_low(std::uint16_t* to, const Floats& x) {
    for (std::size_t j = 0; j < 16; ++j) to[j] = static_cast<std::uint16_t>(to_bits(x.lane[j]));
  }
  static void stream_high(std::uint16_t* to, const Floats& x) {
    for (std::size_t j = 0; j < 16; ++j) {
      to[j] = static_cast<std::uint16_t>((to_bits(x.lane[j]) + 0x8000u) >> 16);
    }
  }
  static void store(float* to, const Floats& x) { std::memcpy(to, x.lane, sizeof(x.lane)); }
  static void stream_bf16(std::uint16_t* to, const Floats& x) {
    for (std::size_t j = 0; j < 16; ++j) to[j] = to_bf16(x.lane[j]);
  }
  static void stream_fp16(std::uint16_t* to, const Floats& x) {
    for (std::size_t j = 0; j < 16; ++j) to[j] = to_fp16(x.lane[j]);
  }
  static void finish_streams() {}

  static Floats add(const Floats& a, const Floats& b) {
    return each([&](std::size_t j) { return a.lane[j] + b.lane[j]; });
  }
  static Floats sub(const Floats& a, const Floats& b) {
    return each([&](std::size_t j) { return a.lane[j] - b.lane[j]; });
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return each([&](std::size_t j) { return a.lane[j] * b.lane[j]; });
  }
  static Floats div(const Floats& a, const Floats& b) {
    return each([&](std::size_t j) { return a.lane[j] / b.lane[j]; });
  }
  static Floats sqrt(const Floats& a) {
    return each([&](std::size_t j) { return std::sqrt(a.lane[j]); });
  }
  static Floats max(const Floats& a, const Floats& b) {
    return each([&](std::size_t j) { return a.lane[j] > b.lane[j] ? a.lane[j] : b.lane[j]; });
  }
  // -1, 0 or 1; 0 of NaN.
  static Floats sign(const Floats& a) {
    return each([&](std::size_t j) {
      const float x = a.lane[j];
      return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : 0.0f);
    });
  }

  static Doubles zero_doubles() { return Doubles{}; }
  static void add_squares(Doubles& sums, const Floats& x) {
    for (std::size_t j = 0; j < 16; ++j) {
      const double value = x.lane[j];
      sums.lane[j] += value * value;
    }
  }
  static void store(double* to, const Doubles& x) { std::memcpy(to, x.lane, sizeof(x.lane)); }

 private:
  static std::uint32_t to_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }

  static float from_fp16(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
    const std::uint32_t magnitude = half & 0x7FFFu;
    if (magnitude >= 0x7C00u) return from_bits(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
    if (magnitude >= 0x0400u) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
    const float small = static_cast<float>(magnitude) * 0x1p-24f;  // denormals, exactly
    return from_bits(sign | to_bits(small));
  }

  // Round to nearest, ties to even, by adding just less than (odd: exactly) half of the last place.
  static std::uint16_t to_bf16(float value) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>(value == value ? rounded : 0x7FC0u);
  }

  static std::uint16_t to_fp16(float value) {
    const std::uint32_t bits = to_bits(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7E00u;
    std::uint32_t half;
    if (magnitude >= 0x47800000u) {  // 2^16 and above, infinity
      half = 0x7C00u;
    } else if (magnitude < 0x38800000u) {
      // Below the smallest normal number, 2^-14. The last place of [0.5, 1) is 2^-24, which is the
      // unit of fp16's denormals, so the addition rounds to it.
      half = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
    } else {
      const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
      half = (rounded - (112u << 23)) >> 13;  // exponent bias 127 -> 15; may carry into infinity
    }
    return static_cast<std::uint16_t>(sign | half);
  }
};

}  // namespace
}  // namespace penstock
