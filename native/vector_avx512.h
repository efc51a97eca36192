// The vector abstraction for AVX-512 (F and BW): 16 floats in one register. See vector_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock {
namespace {

struct Avx512 {
  using Floats = __m512;
  struct Doubles {
    __m512d low, high;
  };

  static Floats broadcast(float value) { return _mm512_set1_ps(value); }
  static Floats load(const float* from) { return _mm512_load_ps(from); }
  static Floats load_bf16(const std::uint16_t* from) {
    return _mm512_castsi512_ps(load_upper(from));
  }
  static Floats load_fp16(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Floats load_split(const std::uint16_t* high, const std::uint16_t* low) {
    const __m512i upper = load_upper(high);
    const __m512i lower = load_words(low);
    const __m512i borrow = _mm512_slli_epi32(_mm512_srli_epi32(lower, 15), 16);
    return _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_add_epi32(upper, lower), borrow));
  }
  static void store_low(std::uint16_t* to, Floats x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to),
                       _mm512_cvtepi32_epi16(_mm512_castps_si512(x)));
  }
  static void stream_high(std::uint16_t* to, Floats x) {
    stream_upper(to, _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000)));
  }
  static void store(float* to, Floats x) { _mm512_store_ps(to, x); }
  // Adds half of the last kept place, less one where that place is even; what is NaN stays one.
  static void stream_bf16(std::uint16_t* to, Floats x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __mmask16 number = _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q);
    const __m512i one_nan = _mm512_set1_epi32(0x7FC00000);
    const __m512i down = _mm512_mask_add_epi32(one_nan, number, bits, _mm512_set1_epi32(0x7FFF));
    stream_upper(to, _mm512_mask_add_epi32(down, odd, down, _mm512_set1_epi32(1)));
  }
  static void stream_fp16(std::uint16_t* to, Floats x) {
    const __m512 one_nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    const __m512 cleaned = _mm512_mask_mov_ps(x, is_nan(x), one_nan);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(cleaned, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static void finish_streams() { _mm_sfence(); }

  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats sqrt(Floats a) { return _mm512_sqrt_ps(a); }
  static Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats sign(Floats a) {
    const __m512i bits = _mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(1 << 31));
    const __m512 one = _mm512_castsi512_ps(_mm512_or_epi32(bits, _mm512_set1_epi32(0x3F800000)));
    const __mmask16 not_zero = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return _mm512_maskz_mov_ps(not_zero, one);
  }

  static Doubles zero_doubles() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static void add_squares(Doubles& sums, Floats x) {
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
    add_squares(sums.low, _mm512_castps512_ps256(x));
    add_squares(sums.high, high);
  }
  static void store(double* to, const Doubles& x) {
    _mm512_storeu_pd(to, x.low);
    _mm512_storeu_pd(to + 8, x.high);
  }

 private:
  static __m512i load_words(const std::uint16_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  }
  // The words as upper halves, above zeros: one instruction less than to widen and to shift.
  static __m512i load_upper(const std::uint16_t* from) {
    const __m256i words = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_maskz_permutexvar_epi16(0xAAAAAAAA, twice_each(), _mm512_castsi256_si512(words));
  }
  static void stream_upper(std::uint16_t* to, __m512i x) {
    const __m512i packed = _mm512_permutexvar_epi16(upper_first(), x);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(packed));
  }
  // Word j of twice_each() is j / 2, of upper_first() 2 j + 1, of which each selects some.
  static __m512i twice_each() {
    const __m512i pair = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_epi32(pair, _mm512_slli_epi32(pair, 16));
  }
  static __m512i upper_first() {
    return _mm512_add_epi32(_mm512_slli_epi32(twice_each(), 2), _mm512_set1_epi32(0x00030001));
  }
  static __mmask16 is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
  static void add_squares(__m512d& sums, __m256 x) {
    const __m512d value = _mm512_cvtps_pd(x);
    sums = _mm512_fmadd_pd(value, value, sums);  // the product is exact: no bit is different
  }
};

}  // namespace
}  // namespace penstock
