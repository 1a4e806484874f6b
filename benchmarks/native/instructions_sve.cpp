// SPDX-License-Identifier: Apache-2.0
// The loop of kernels_gemm_sdot.cpp with NEON and with SVE of any length, for counts of instructions: 4 tokens times 16
// rows of int8 weights with a scale for each 32 columns. Two vectors of rows at once, so that the sums of both kinds
// stay in registers. See instructions.py.
#include <arm_neon.h>
#include <arm_sve.h>

#include "instructions.h"

namespace {

constexpr int kTokens = 4, kRows = 16, kUnits = layer::kHidden / 32, kSteps = 8;

struct Work {
  const int8_t* x;        // [unit][step][4 tokens][4 columns]
  const float* x_scales;  // [unit][4 tokens]
  const int8_t* w;        // [tile][unit][step][rows of a tile][4 columns]
  const float* w_scales;  // [tile][unit][rows of a tile]
  float* out;             // [4 tokens][16 rows]
};

void neon(const Work& work) {
  constexpr int kTile = 8;
  const int8_t* w = work.w;
  const float* scales = work.w_scales;
  for (int row = 0; row < kRows; row += kTile) {
    float32x4_t sums[kTokens][2] = {};
    const int8_t* x = work.x;
    for (int u = 0; u < kUnits; ++u) {
      int32x4_t unit[kTokens][2] = {};
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s, x += 16, w += 4 * kTile) {
        const int8x16_t q = vld1q_s8(x);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int8x16_t rows = vld1q_s8(w + 16 * v);
          unit[0][v] = vdotq_laneq_s32(unit[0][v], rows, q, 0);
          unit[1][v] = vdotq_laneq_s32(unit[1][v], rows, q, 1);
          unit[2][v] = vdotq_laneq_s32(unit[2][v], rows, q, 2);
          unit[3][v] = vdotq_laneq_s32(unit[3][v], rows, q, 3);
        }
      }
      const float32x4_t scale_x = vld1q_f32(work.x_scales + u * kTokens);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v, scales += 4) {
        const float32x4_t scale = vld1q_f32(scales);
        const auto scaled = [&](int t) { return vmulq_f32(vcvtq_f32_s32(unit[t][v]), scale); };
        sums[0][v] = vfmaq_laneq_f32(sums[0][v], scaled(0), scale_x, 0);
        sums[1][v] = vfmaq_laneq_f32(sums[1][v], scaled(1), scale_x, 1);
        sums[2][v] = vfmaq_laneq_f32(sums[2][v], scaled(2), scale_x, 2);
        sums[3][v] = vfmaq_laneq_f32(sums[3][v], scaled(3), scale_x, 3);
      }
    }
    for (int t = 0; t < kTokens; ++t)
      for (int v = 0; v < 2; ++v) vst1q_f32(work.out + t * kRows + row + 4 * v, sums[t][v]);
  }
}

// Vectors without a size cannot be members of arrays: one name each.
#define EACH_SUM(DO) DO(0, 0) DO(1, 0) DO(2, 0) DO(3, 0) DO(0, 1) DO(1, 1) DO(2, 1) DO(3, 1)

void sve(const Work& work) {
  const svbool_t all = svptrue_b8();
  const auto lanes = static_cast<int>(svcntw());
  const int8_t* w = work.w;
  const float* scales = work.w_scales;
  for (int row = 0; row < kRows; row += 2 * lanes) {
#define ZERO(t, v) svfloat32_t sum##t##v = svdup_f32(0);
    EACH_SUM(ZERO)
    const int8_t* x = work.x;
    for (int u = 0; u < kUnits; ++u) {
#define ZERO_UNIT(t, v) svint32_t unit##t##v = svdup_s32(0);
      EACH_SUM(ZERO_UNIT)
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s, x += 16, w += 8 * lanes) {
        const svint8_t q = svld1rq_s8(all, x);
        const svint8_t rows0 = svld1_s8(all, w), rows1 = svld1_vnum_s8(all, w, 1);
#define DOT(t, v) unit##t##v = svdot_lane_s32(unit##t##v, rows##v, q, t);
        EACH_SUM(DOT)
      }
      const svfloat32_t scale_x = svld1rq_f32(all, work.x_scales + u * kTokens);
      const svfloat32_t scale0 = svld1_f32(all, scales), scale1 = svld1_vnum_f32(all, scales, 1);
      scales += 2 * lanes;
#define ADD(t, v) \
  sum##t##v = svmla_lane_f32(sum##t##v, svmul_f32_x(all, svcvt_f32_s32_x(all, unit##t##v), scale##v), scale_x, t);
      EACH_SUM(ADD)
    }
#define WRITE(t, v) svst1_f32(all, work.out + t * kRows + row + v * lanes, sum##t##v);
    EACH_SUM(WRITE)
  }
}

}  // namespace

// program neon|sve TIMES
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const bool scalable = std::string(argv[1]) == "sve";
  const int tile = scalable ? 2 * static_cast<int>(svcntw()) : 8;
  if (kRows % tile != 0) return 2;
  std::vector<int8_t> x(static_cast<size_t>(kTokens * kUnits * 32)), w(static_cast<size_t>(kRows * kUnits * 32));
  std::vector<float> x_scales(static_cast<size_t>(kTokens * kUnits)), w_scales(static_cast<size_t>(kRows * kUnits)),
      out(static_cast<size_t>(kTokens * kRows));
  // The same values in both layouts.
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int8_t>(i * 37 % 255 - 127);
  for (size_t i = 0; i < x_scales.size(); ++i) x_scales[i] = 0.001f * static_cast<float>(1 + i % 7);
  for (int row = 0; row < kRows; ++row)
    for (int u = 0; u < kUnits; ++u) {
      const int at = row / tile * kUnits + u;
      w_scales[static_cast<size_t>(at * tile + row % tile)] = 0.002f * static_cast<float>(1 + (row + u) % 5);
      for (int c = 0; c < 32; ++c)
        w[static_cast<size_t>(((at * kSteps + c / 4) * tile + row % tile) * 4 + c % 4)] =
            static_cast<int8_t>((row * 31 + u * 17 + c * 7) % 255 - 127);
    }
  const Work work{x.data(), x_scales.data(), w.data(), w_scales.data(), out.data()};
  for (int turn = 0; turn < std::atoi(argv[2]); ++turn) (scalable ? sve : neon)(work);
  double sum = 0;
  for (const float value : out) sum += value * static_cast<double>(value);
  std::printf("%.9g %.9g %.9g\n", sum, static_cast<double>(out[1]), static_cast<double>(out.back()));
  return 0;
}
