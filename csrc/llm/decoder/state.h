// SPDX-License-Identifier: Apache-2.0
// What lies where in the recurrent state of a sequence: floats, layer after layer, the window of a layer's convolution
// before the matrices of its heads.
#pragma once

#include <cstdint>
#include <vector>

#include "llm/decoder/spec.h"

namespace anyaccel::llm {

struct StateLayout {
  struct OfLayer {
    int64_t window = 0;    // [kernel - 1, channels]
    int64_t matrices = 0;  // [heads, key_dim, value_dim], [state_dim, channels] or [channels]
  };
  std::vector<OfLayer> layers;
  int64_t floats = 0;

  explicit StateLayout(const DecoderSpec& spec) {
    const auto take = [this](int64_t count) {
      const int64_t at = floats;
      floats += (count + 15) / 16 * 16;
      return at;
    };
    for (const LayerSpec& layer : spec.layers) {
      OfLayer own;
      if (layer.short_conv) own.window = take((layer.short_conv->kernel - 1) * layer.short_conv->channels);
      if (layer.linear_attention) {
        const LinearAttentionSpec& a = *layer.linear_attention;
        if (a.kernel > 0) own.window = take((a.kernel - 1) * conv_channels(a));
        own.matrices = take(int64_t{a.heads} * a.key_dim * a.value_dim);
      }
      if (layer.scan) {
        own.window = take((layer.scan->kernel - 1) * layer.scan->channels);
        own.matrices = take(layer.scan->channels * layer.scan->state_dim);
      }
      if (layer.lru) {
        own.window = take((layer.lru->kernel - 1) * channels_of(*layer.lru));
        own.matrices = take(channels_of(*layer.lru));
      }
      layers.push_back(own);
    }
  }
};

}  // namespace anyaccel::llm
