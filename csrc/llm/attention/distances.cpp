// SPDX-License-Identifier: Apache-2.0
#include "llm/attention/distances.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "llm/attention/cache.h"
#include "simd/convert.h"

namespace anyaccel::llm {
namespace {

template <class T>
std::shared_ptr<T> zeros(size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{64});
  std::memset(memory, 0, bytes);
  return {static_cast<T*>(memory), [](T* p) { ::operator delete(p, std::align_val_t{64}); }};
}

}  // namespace

// In float32 and in this order, as the models' own code: a row ends where a logarithm is a whole number.
std::vector<int32_t> DistanceRows::rows() const {
  std::vector<int32_t> found;
  const int64_t half = span / 2;
  for (int64_t distance = -max_distance; distance <= max_distance; ++distance) {
    const int64_t far = std::abs(distance);
    int64_t row = far;
    if (logarithmic && far > half) {
      const float part =
          std::log(static_cast<float>(far) / static_cast<float>(half)) /
          std::log(static_cast<float>(static_cast<double>(max_distance - 1) / static_cast<double>(half)));
      row = static_cast<int64_t>(std::ceil(part * static_cast<float>(half - 1))) + half;
    }
    found.push_back(static_cast<int32_t>(std::clamp<int64_t>((distance < 0 ? -row : row) + span, 0, count() - 1)));
  }
  return found;
}

DistanceTerms::DistanceTerms(int64_t rows, int heads, int head_dim, CacheFormat format)
    : heads_(heads), head_dim_(head_dim), f32_(format == CacheFormat::f32) {
  const HeadLayout layout = head_layout({heads, heads, head_dim, head_dim}, format);
  padded_head_dim_ = layout.padded_head_dim;
  block_bytes_ = layout.key_block_bytes;
  head_bytes_ = static_cast<size_t>((rows + 15) / 16) * block_bytes_;
  head_floats_ = rows * padded_head_dim_;
  keys_ = zeros<uint8_t>(head_bytes_ * static_cast<size_t>(heads));
  queries_ = zeros<float>(static_cast<size_t>(head_floats_ * heads) * sizeof(float));
}

void DistanceTerms::set_key(int64_t row, const float* key) noexcept {
  has_keys_ = true;
  for (int head = 0; head < heads_; ++head, key += head_dim_) {
    uint8_t* const block =
        keys_.get() + static_cast<size_t>(head) * head_bytes_ + static_cast<size_t>(row / 16) * block_bytes_;
    for (int i = 0; i < head_dim_; ++i) {
      if (f32_)
        reinterpret_cast<float*>(block)[16 * i + row % 16] = key[i];
      else
        reinterpret_cast<uint16_t*>(block)[(i / 2 * 16 + row % 16) * 2 + i % 2] = simd::to_bf16(key[i]);
    }
  }
}

void DistanceTerms::set_query(int64_t row, const float* query, float scale) noexcept {
  constexpr float kLog2E = 1.44269504088896341f;  // scores are in units of log 2
  has_queries_ = true;
  for (int head = 0; head < heads_; ++head, query += head_dim_) {
    float* const to = queries_.get() + head * head_floats_ + row * padded_head_dim_;
    for (int i = 0; i < head_dim_; ++i) to[i] = query[i] * (scale * kLog2E);
  }
}

DistanceScores DistanceTerms::scores() const noexcept {
  DistanceScores scores{};
  if (has_keys_) scores.keys = keys_.get();
  if (has_queries_) scores.queries = queries_.get();
  scores.head_bytes = head_bytes_;
  scores.head_floats = head_floats_;
  return scores;
}

}  // namespace anyaccel::llm
