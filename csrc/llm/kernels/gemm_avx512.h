// SPDX-License-Identifier: Apache-2.0
// What the kernel files of AVX-512 and above share: pairs of bfloat16, unpacked weights, sums written out.
#pragma once

#include <cstdint>

#include "llm/kernels/gemm_kernels.h"
#include "llm/kernels/scales.h"
#include "simd/pick.h"
#include "simd/simd.h"

namespace anyaccel::llm {
namespace {

using namespace simd::ANYACCEL_ISA_VARIANT;

// Loads the first `count` of sixteen floats, which may be none, and zeros for the rest.
inline Vec load_first(const float* p, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), p); }

// out = scale * (sums + bias), or added to it; sums[token][kWidth rows].
template <int kWidth>
void write_sums(const float* sums, int tokens, const GemmTile& to) {
  const Vec scale = broadcast(to.scale);
  for (int r = 0; r < kWidth && r < to.rows; r += 16) {
    const Mask valid = first_lanes(to.rows - r);
    const Vec bias = to.bias != nullptr ? load_first(to.bias + r, to.rows - r) : broadcast(0.0f);
    for (int t = 0; t < tokens; ++t) {
      float* out = to.out + t * to.stride + r;
      Vec sum = mul(add(load(sums + t * kWidth + r), bias), scale);
      if (to.add) sum = add(sum, _mm512_maskz_loadu_ps(valid, out));
      _mm512_mask_storeu_ps(out, valid, sum);
    }
  }
}

// The scales of the group that `column` is in, for the unsigned q that quantised values are here: int8 have 128 added.
inline RowScales scales_of(const BlockLayout& layout, const uint8_t* block, int64_t column) {
  RowScales scales = row_scales(layout, block, column, 0);
  const float zero = layout.format == Format::i8 ? -128.0f : layout.minimum ? 0.0f : -8.0f;
  scales.minimum = fma(scales.scale, broadcast(zero), scales.minimum);
  return scales;
}

// The unit's columns four at a time, as unsigned bytes [16 rows][4 columns]: put(index of the four, bytes).
template <class Put>
inline void for_quads(const BlockLayout& layout, const uint8_t* block, int64_t unit, const Put& put) {
  const uint8_t* from = block + layout.unit_at(unit * kUnit);
  if (layout.format == Format::i8) {
    for (int i = 0; i < 8; ++i)
      put(i, _mm512_xor_si512(load_ints(from + i * 64), _mm512_set1_epi8(static_cast<char>(0x80))));
    return;
  }
  const IVec mask = _mm512_set1_epi8(15);
  for (int i = 0; i < 4; ++i) {
    const IVec line = load_ints(from + i * 64);
    put(2 * i, _mm512_and_si512(line, mask));
    put(2 * i + 1, _mm512_and_si512(_mm512_srli_epi16(line, 4), mask));
  }
}

// A quantised unit as floats, four columns at a time: put(first column, columns).
template <class Put>
inline void for_columns(const BlockLayout& layout, const uint8_t* block, int64_t unit, const Put& put) {
  RowScales scales = scales_of(layout, block, unit * kUnit);
  const IVec mask = broadcast(int32_t{255});
  for_quads(layout, block, unit, [&](int quad, IVec bytes) {
    if (quad == 4 && layout.group == kUnit / 2) scales = scales_of(layout, block, unit * kUnit + kUnit / 2);
    const IVec q[4] = {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi32(bytes, 8), mask),
                       _mm512_and_si512(_mm512_srli_epi32(bytes, 16), mask), _mm512_srli_epi32(bytes, 24)};
    Vec values[4];
    for (int i = 0; i < 4; ++i) values[i] = fma(convert(q[i]), scales.scale, scales.minimum);
    put(4 * quad, values);
  });
}

inline void unpack_pairs(const BlockLayout& layout, const uint8_t* block, int64_t unit, int64_t units, uint8_t* to) {
  for (int64_t u = unit; u < unit + units; ++u, to += kUnit * 32)
    for_columns(layout, block, u, [&](int column, const Vec(&values)[4]) {
      for (int i = 0; i < 4; i += 2)
        store(static_cast<void*>(to + (column + i) * 32), interleave_bf16(values[i], values[i + 1]));
    });
}

}  // namespace
}  // namespace anyaccel::llm
