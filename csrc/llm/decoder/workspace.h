// SPDX-License-Identifier: Apache-2.0
// Memory of a step: activations between phases. Allocated before the threads start, kept from step to step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llm/decoder/spec.h"
#include "llm/kernels/multiply.h"
#include "llm/pack/matrix.h"

namespace anyaccel::llm {

// Floats from one row to the next: whole cache lines, and not a multiple of 4 KiB, where all rows would share few
// places of the cache.
inline int64_t padded_stride(int64_t count) {
  const int64_t padded = (count + 15) / 16 * 16;
  return padded % 1024 == 0 ? padded + 16 : padded;
}

// Linear attention goes through the tokens of a head in groups of so many, whose queries, keys, decays and strengths
// a thread has beside the head's state.
constexpr int kHeadTokens = 16;
inline int64_t head_scratch(int64_t key_dim) { return 3 * padded_stride(key_dim) + 2; }

// Floats on cache lines of their own.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count);  // throws std::bad_alloc
  float* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(float* memory) const noexcept;
  };
  std::unique_ptr<float, Free> memory_;
};

// Activations prepared for each kind of matrix that the model has.
class Inputs {
 public:
  // Throws std::bad_alloc.
  void reserve(const std::vector<Shape>& shapes, int64_t tokens);
  size_t index(const Shape& shape) const noexcept {
    size_t i = 0;
    while (!same(slots_[i].shape, shape)) ++i;  // every shape was reserved
    return i;
  }
  Input& at(size_t index) noexcept { return slots_[index].input; }
  static bool same(const Shape& a, const Shape& b) noexcept {
    return a.format == b.format && a.group == b.group && a.minimum == b.minimum && a.scales == b.scales;
  }
  static constexpr size_t kMost = 16;

 private:
  struct Slot {
    Shape shape;
    Input input;
  };
  std::vector<Slot> slots_;
};

// Which experts each token goes to, and the tokens of each expert.
struct Routing {
  std::vector<int32_t> chosen;  // [tokens, top_k]
  std::vector<float> weights;   // [tokens, top_k]
  std::vector<int32_t> begin;   // [experts + 1]: of each expert's rows below
  std::vector<int32_t> rows;    // tokens
  std::vector<float> row_weights;
  std::vector<float> scores;  // scratch: of a token's experts and groups

  void reserve(int64_t tokens, const MoeSpec& moe);
  // Makes rows, row_weights and begin from chosen and weights: tokens by expert, each expert's in ascending order.
  void sort(int64_t tokens, const MoeSpec& moe) noexcept;
};

// Multi-head latent attention: tokens whose queries are brought to latents at once, and latents that heads' keys are
// made of at once.
constexpr int64_t kLatentTokens = 64, kLatentTile = 512;

// The widths that a model's steps need, in floats.
struct Widths {
  int64_t hidden = 0;    // of the residual
  int64_t qkv = 0;       // queries, keys, values
  int64_t latent = 0;    // MLA: the larger latent, with the rotated part
  int64_t keys = 0;      // MLA: the latent and the rotated part
  int64_t absorbed = 0;  // MLA: queries of all heads for those, and what they see of latents
  int64_t latent_out = 0;
  int64_t index_q = 0;  // of an indexer: queries of all heads, a key, and the heads' weights
  int64_t index_key = 0;
  int64_t index_weights = 0;
  int64_t expanded = 0;    // MLA: a key and a value of one head
  int64_t out = 0;         // of attention
  int64_t mixed = 0;       // of a recurrent mixer: what it makes of its input
  int64_t steps = 0;       // and of linear attention, the inputs of steps and strengths
  int64_t mixer_out = 0;   // and its result
  int64_t features = 0;    // of any MLP
  int64_t router = 0;      // experts and the shared gate
  int top_k = 0;           // experts a token, the shared one included
  bool two_norms = false;  // a layer whose MLP, router or experts have a norm of their own
  bool gated = false;
  int64_t layer_inputs = 0;  // of all layers
  bool two_gates = false;    // a short convolution's b and c
  bool own_norm = false;     // a norm of linear attention's result over several heads
  int64_t key_dim = 0;       // of linear attention
  int64_t fused = 0;         // of hidden_inputs: the embedding and the hidden states
  int64_t draft_vocab = 0;   // rows of a head that has not all tokens
  int64_t normed = 0;        // of a norm behind attention or an MLP's features
  bool cutoffs = false;      // of an MLP's gates
  int64_t laurel = 0;        // its rank
  bool side_blocks = false;
  int streams = 1;

  explicit Widths(const DecoderSpec& spec);
  // Floats a token of the shared buffers.
  int64_t token_floats() const;
};

struct Workspace {
  // One thread's own memory: in small steps it norms all tokens for itself, which saves a barrier before the product.
  struct Own {
    Buffer residual, x, second_x, heads, latent, row, fused, normed, embedded;
    Buffer streams, old_streams;  // the latter of one token
    Buffer expanded_rows;         // of kLatentTile tokens
    Buffer head_keys, mixer_out;  // of linear attention: queries and keys of some tokens, the result behind its norm
    Inputs inputs;
    Routing routing;
    // Where experts stay in a file: what a later layer's router may say, and experts that are not there yet.
    Routing likely;
    std::vector<int32_t> late;
  };

  Buffer residual, x, second_x, qkv, latent, second_latent, keys, out, gate, up, router, expert_out, layer_inputs;
  Buffer index_q, index_key, index_weights;
  Buffer absorbed, latent_out, latent_tile;  // of kLatentTokens and kLatentTile tokens
  Buffer mixed, mix_gates[2], steps, mixer_out, fused, draft_logits, embedded;
  // Streams are padded_stride(hidden) apart; `side` is what their linears, laurel or a side block give.
  Buffer streams, side, laurel;
  Buffer cutoffs;   // of each token
  Buffer delta[2];  // what attention and MLP add to the residual, when no other rank adds to it
  Inputs inputs;
  Routing routing;
  std::vector<Own> own;
  int64_t tokens = 0;

  // Room for steps of `wanted` tokens. Throws std::bad_alloc, and is as it was then.
  void reserve(const Widths& widths, const DecoderSpec& spec, const std::vector<Shape>& shapes, int64_t wanted,
               int threads);
};

}  // namespace anyaccel::llm
