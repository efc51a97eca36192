// The vector abstraction for AVX2 with F16C: 16 floats in two registers. See vector_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock {
namespace {

struct Avx2 {
  struct Floats {
    __m256 low, high;
  };
  struct Doubles {
    __m256d quarter[4];
  };

  static Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats load(const float* from) { return {_mm256_load_ps(from), _mm256_load_ps(from + 8)}; }
  static Floats load_bf16(const std::uint16_t* from) { return {widen(from), widen(from + 8)}; }
  static Floats load_fp16(const std::uint16_t* from) {
    return {_mm256_cvtph_ps(load_half(from)), _mm256_cvtph_ps(load_half(from + 8))};
  }
  static Floats load_split(const std::uint16_t* high, const std::uint16_t* low) {
    return {join(high, low), join(high + 8, low + 8)};
  }
  static void store_low(std::uint16_t* to, const Floats& x) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to),
                       pack(_mm256_and_si256(_mm256_castps_si256(x.low), mask),
                            _mm256_and_si256(_mm256_castps_si256(x.high), mask)));
  }
  static void stream_high(std::uint16_t* to, const Floats& x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), pack(round_up(x.low), round_up(x.high)));
  }
  static void store(float* to, const Floats& x) {
    _mm256_store_ps(to, x.low);
    _mm256_store_ps(to + 8, x.high);
  }
  static void stream_bf16(std::uint16_t* to, const Floats& x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        pack(round_bf16(x.low), round_bf16(x.high)));
  }
  static void stream_fp16(std::uint16_t* to, const Floats& x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_set_m128i(to_fp16(x.high), to_fp16(x.low)));
  }
  static void finish_streams() { _mm_sfence(); }

  static Floats add(const Floats& a, const Floats& b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static Floats sub(const Floats& a, const Floats& b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  static Floats mul(const Floats& a, const Floats& b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  static Floats div(const Floats& a, const Floats& b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  static Floats sqrt(const Floats& a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
  static Floats max(const Floats& a, const Floats& b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  static Floats sign(const Floats& a) { return {sign(a.low), sign(a.high)}; }

  static Doubles zero_doubles() {
    const __m256d zero = _mm256_setzero_pd();
    return {{zero, zero, zero, zero}};
  }
  static void add_squares(Doubles& sums, const Floats& x) {
    add_squares(sums.quarter[0], _mm256_castps256_ps128(x.low));
    add_squares(sums.quarter[1], _mm256_extractf128_ps(x.low, 1));
    add_squares(sums.quarter[2], _mm256_castps256_ps128(x.high));
    add_squares(sums.quarter[3], _mm256_extractf128_ps(x.high, 1));
  }
  static void store(double* to, const Doubles& x) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, x.quarter[i]);
  }

 private:
  static __m128i load_half(const std::uint16_t* from) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(from));
  }
  static __m256 widen(const std::uint16_t* from) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(from)), 16));
  }
  static __m256 join(const std::uint16_t* high, const std::uint16_t* low) {
    const __m256i upper = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(high)), 16);
    const __m256i lower = _mm256_cvtepu16_epi32(load_half(low));
    const __m256i borrow = _mm256_slli_epi32(_mm256_srli_epi32(lower, 15), 16);
    return _mm256_castsi256_ps(_mm256_sub_epi32(_mm256_add_epi32(upper, lower), borrow));
  }
  static __m256i round_up(__m256 x) {
    const __m256i rounded = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
    return _mm256_srli_epi32(rounded, 16);
  }
  // packus works within 128-bit halves: the permutation puts the quarters in order again.
  static __m256i pack(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  }
  static __m256 sign(__m256 a) {
    const __m256 bit = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
    const __m256 not_zero = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    return _mm256_and_ps(_mm256_or_ps(bit, _mm256_set1_ps(1.0f)), not_zero);
  }
  static __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i nearest =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(nearest, 16), _mm256_set1_epi32(0x7FC0), nan);
  }
  static __m128i to_fp16(__m256 x) {
    const __m256 one_nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_cvtps_ph(_mm256_blendv_ps(x, one_nan, nan), _MM_FROUND_TO_NEAREST_INT);
  }
  static void add_squares(__m256d& sums, __m128 x) {
    const __m256d value = _mm256_cvtps_pd(x);
    sums = _mm256_add_pd(sums, _mm256_mul_pd(value, value));
  }
};

}  // namespace
}  // namespace penstock
