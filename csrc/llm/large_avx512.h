// SPDX-License-Identifier: Apache-2.0
// What the kernel files of AVX-512 and above share: pairs of bfloat16, unpacked weights, sums written out.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "llm/large_kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the undefined operands inside GCC 12's own intrinsics
#endif

namespace anyaccel::llm {
namespace {

// Rounded to nearest even; a NaN stays one. Not VCVTNEPS2BF16, which makes subnormal numbers zero.
inline __m256i to_bf16(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}

// Sixteen pairs from x on, of which `count` columns exist; the others are zeros.
inline __m512i pairs_of(const float* x, int64_t count) {
  const auto first = static_cast<__mmask16>(count >= 16 ? 0xffff : count > 0 ? (1 << count) - 1 : 0);
  const auto second = static_cast<__mmask16>(count >= 32 ? 0xffff : count > 16 ? (1 << (count - 16)) - 1 : 0);
  const __m256i low = to_bf16(_mm512_maskz_loadu_ps(first, x));
  const __m256i high = second != 0 ? to_bf16(_mm512_maskz_loadu_ps(second, x + 16)) : _mm256_setzero_si256();
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// out = scale * (sums + bias), or added to it; sums[token][kWidth rows].
template <int kWidth>
void write_sums(const float* sums, int tokens, const LargeTile& to) {
  const __m512 scale = _mm512_set1_ps(to.scale);
  for (int r = 0; r < kWidth && r < to.rows; r += 16) {
    const int64_t left = to.rows - r;
    const auto valid = static_cast<__mmask16>(left >= 16 ? 0xffff : (1 << left) - 1);
    const __m512 bias = to.bias != nullptr ? _mm512_maskz_loadu_ps(valid, to.bias + r) : _mm512_setzero_ps();
    for (int t = 0; t < tokens; ++t) {
      float* out = to.out + t * to.stride + r;
      __m512 sum = _mm512_mul_ps(_mm512_add_ps(_mm512_load_ps(sums + t * kWidth + r), bias), scale);
      if (to.add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(valid, out));
      _mm512_mask_storeu_ps(out, valid, sum);
    }
  }
}

inline __m512 halves_at(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// value = scale * q + minimum, of the unsigned q that quantised values are here: int8 have 128 added.
struct Scales {
  __m512 scale, minimum;
};
// Those of the group that `column` is in.
inline Scales scales_of(const BlockLayout& layout, const uint8_t* block, int64_t column) {
  const uint8_t* scales = block + layout.scales_offset;
  Scales result;
  if (layout.group == 0) {
    result.scale = _mm512_loadu_ps(scales);
  } else {
    scales += static_cast<size_t>(column / layout.group) * layout.scale_stride;
    result.scale = halves_at(scales);
  }
  const bool bytes = layout.format == Format::i8;
  const __m512 stored = layout.minimum ? halves_at(scales + 32) : _mm512_setzero_ps();
  const float zero = bytes ? -128.0f : layout.minimum ? 0.0f : -8.0f;
  result.minimum = _mm512_fmadd_ps(result.scale, _mm512_set1_ps(zero), stored);
  return result;
}

// The unit's columns four at a time, as unsigned bytes [16 rows][4 columns]: put(index of the four, bytes).
template <class Put>
inline void for_quads(const BlockLayout& layout, const uint8_t* block, int64_t unit, const Put& put) {
  if (layout.format == Format::i8) {
    const uint8_t* from = block + unit * kUnit * 16;
    for (int i = 0; i < 8; ++i)
      put(i, _mm512_xor_si512(_mm512_loadu_si512(from + i * 64), _mm512_set1_epi8(static_cast<char>(0x80))));
    return;
  }
  const uint8_t* from = block + unit * kUnit * 8;
  const __m512i mask = _mm512_set1_epi8(15);
  for (int i = 0; i < 4; ++i) {
    const __m512i line = _mm512_loadu_si512(from + i * 64);
    put(2 * i, _mm512_and_si512(line, mask));
    put(2 * i + 1, _mm512_and_si512(_mm512_srli_epi16(line, 4), mask));
  }
}

// A quantised unit as floats, four columns at a time: put(first column, columns).
template <class Put>
inline void for_columns(const BlockLayout& layout, const uint8_t* block, int64_t unit, const Put& put) {
  Scales scales = scales_of(layout, block, unit * kUnit);
  const __m512i mask = _mm512_set1_epi32(255);
  for_quads(layout, block, unit, [&](int quad, __m512i bytes) {
    if (quad == 4 && layout.group == kUnit / 2) scales = scales_of(layout, block, unit * kUnit + kUnit / 2);
    const __m512i q[4] = {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi32(bytes, 8), mask),
                          _mm512_and_si512(_mm512_srli_epi32(bytes, 16), mask), _mm512_srli_epi32(bytes, 24)};
    __m512 values[4];
    for (int i = 0; i < 4; ++i) values[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(q[i]), scales.scale, scales.minimum);
    put(4 * quad, values);
  });
}

inline void unpack_pairs(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kUnit * 32)
    for_columns(layout, block, u, [&](int column, const __m512(&values)[4]) {
      for (int i = 0; i < 4; i += 2) {
        const __m512i low = _mm512_cvtepu16_epi32(to_bf16(values[i]));
        const __m512i high = _mm512_cvtepu16_epi32(to_bf16(values[i + 1]));
        _mm512_storeu_si512(to + (column + i) * 32, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    });
}

}  // namespace
}  // namespace anyaccel::llm
