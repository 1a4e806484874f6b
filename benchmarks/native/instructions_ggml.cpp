// SPDX-License-Identifier: Apache-2.0
// The same layer as llama.cpp computes it: its graph of ggml's operators, weights in the memory that repacks them where
// ggml has one for their type, a cache of halves and flash attention, on one thread. See instructions.h.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include "instructions.h"

using namespace layer;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "instructions_ggml: %s\n", what);
  std::exit(1);
}

ggml_context* context(size_t tensors) {
  return ggml_init({ggml_tensor_overhead() * tensors + ggml_graph_overhead(), nullptr, true});
}

// The memory that llama.cpp chooses for a weight: the first that can multiply it.
ggml_backend_buffer_type_t memory_for(ggml_backend_dev_t device, ggml_tensor* weight) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
  const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
  ggml_context* trial = context(4);
  ggml_tensor* copy = ggml_new_tensor_2d(trial, weight->type, weight->ne[0], weight->ne[1]);
  ggml_tensor* product = ggml_mul_mat(trial, copy, ggml_new_tensor_2d(trial, GGML_TYPE_F32, weight->ne[0], 512));
  ggml_backend_buffer_type_t found = ggml_backend_dev_buffer_type(device);
  for (ggml_backend_buffer_type_t* each = extra ? extra(device) : nullptr; each != nullptr && *each != nullptr;
       ++each) {
    copy->buffer = ggml_backend_buft_alloc_buffer(*each, 0);
    const bool can = ggml_backend_dev_supports_op(device, product);
    ggml_backend_buffer_free(copy->buffer);
    copy->buffer = nullptr;
    if (can) {
      found = *each;
      break;
    }
  }
  ggml_free(trial);
  return found;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments what = arguments(argc, argv);
  const int tokens = what.tokens, cells = (what.context + tokens + 255) / 256 * 256;  // as llama.cpp pads its cache
  const ggml_type type = what.format == "bf16"   ? GGML_TYPE_BF16
                         : what.format == "int8" ? GGML_TYPE_Q8_0
                                                 : GGML_TYPE_Q4_0;
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, 1);
  ggml_backend_dev_t device = ggml_backend_get_device(backend);
  const ggml_backend_buffer_type_t plain = ggml_backend_dev_buffer_type(device);

  std::vector<ggml_context*> kept;
  auto matrix = [&](const std::vector<float>& values, int64_t first, int64_t rows, int64_t cols) {
    ggml_context* own = kept.emplace_back(context(2));
    ggml_tensor* tensor = ggml_new_tensor_2d(own, type, cols, rows);
    const ggml_backend_buffer_type_t memory = memory_for(device, tensor);
    if (first == 0) std::fprintf(stderr, "%s in %s\n", ggml_type_name(type), ggml_backend_buft_name(memory));
    require(ggml_backend_alloc_ctx_tensors_from_buft(own, memory) != nullptr, "no memory");
    std::vector<uint8_t> data(ggml_nbytes(tensor));
    ggml_quantize_chunk(type, values.data() + first * cols, data.data(), 0, rows, cols, nullptr);
    ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
    return tensor;
  };
  const int qkv_rows = (kHeads + 2 * kKvHeads) * kHeadDim;
  const std::vector<float> qkv_values = numbers(static_cast<size_t>(qkv_rows) * kHidden, 1, 0.1f),
                           out_values = numbers(static_cast<size_t>(kHidden) * kHidden, 2, 0.1f),
                           up_values = numbers(static_cast<size_t>(2 * kMlp) * kHidden, 3, 0.1f),
                           down_values = numbers(static_cast<size_t>(kHidden) * kMlp, 4, 0.1f);
  ggml_tensor* wq = matrix(qkv_values, 0, kHidden, kHidden);
  ggml_tensor* wk = matrix(qkv_values, kHidden, kKvHeads * kHeadDim, kHidden);
  ggml_tensor* wv = matrix(qkv_values, kHidden + kKvHeads * kHeadDim, kKvHeads * kHeadDim, kHidden);
  ggml_tensor* wo = matrix(out_values, 0, kHidden, kHidden);
  ggml_tensor* gate = matrix(up_values, 0, kMlp, kHidden);
  ggml_tensor* up = matrix(up_values, kMlp, kMlp, kHidden);
  ggml_tensor* down = matrix(down_values, 0, kHidden, kMlp);

  ggml_context* own = kept.emplace_back(context(16));
  ggml_tensor* x = ggml_new_tensor_2d(own, GGML_TYPE_F32, kHidden, tokens);
  ggml_tensor* ones = ggml_new_tensor_1d(own, GGML_TYPE_F32, kHidden);
  ggml_tensor* positions = ggml_new_tensor_1d(own, GGML_TYPE_I32, tokens);
  ggml_tensor* places = ggml_new_tensor_1d(own, GGML_TYPE_I64, tokens);
  ggml_tensor* mask = ggml_new_tensor_2d(own, GGML_TYPE_F16, cells, tokens);
  ggml_tensor* keys = ggml_new_tensor_2d(own, GGML_TYPE_F16, kKvHeads * kHeadDim, cells);
  ggml_tensor* values = ggml_new_tensor_2d(own, GGML_TYPE_F16, kKvHeads * kHeadDim, cells);
  require(ggml_backend_alloc_ctx_tensors_from_buft(own, plain) != nullptr, "no memory");
  auto set = [](ggml_tensor* tensor, const auto& from) {
    require(ggml_nbytes(tensor) == from.size() * sizeof(from[0]), "a tensor of another size");
    ggml_backend_tensor_set(tensor, from.data(), 0, ggml_nbytes(tensor));
  };
  set(x, numbers(static_cast<size_t>(tokens) * kHidden, 6, 1.0f));
  set(ones, std::vector<float>(kHidden, 1.0f));
  std::vector<int32_t> at(static_cast<size_t>(tokens));
  std::vector<int64_t> cell(at.size());
  std::vector<ggml_fp16_t> seen(static_cast<size_t>(tokens) * cells),
      k(static_cast<size_t>(cells) * kKvHeads * kHeadDim), v(k.size());
  for (int t = 0; t < tokens; ++t) {
    at[static_cast<size_t>(t)] = what.context + t;
    cell[static_cast<size_t>(t)] = what.context + t;
    for (int c = 0; c < cells; ++c)
      seen[static_cast<size_t>(t) * cells + c] = ggml_fp32_to_fp16(c <= what.context + t ? 0.0f : -INFINITY);
  }
  const std::vector<float> before = numbers(static_cast<size_t>(what.context) * qkv_rows, 5, 1.0f);
  for (int c = 0; c < what.context; ++c)
    for (int i = 0; i < kKvHeads * kHeadDim; ++i) {
      const auto to = static_cast<size_t>(c * kKvHeads * kHeadDim + i);
      k[to] = ggml_fp32_to_fp16(before[static_cast<size_t>(c * qkv_rows + kHeads * kHeadDim + i)]);
      v[to] = ggml_fp32_to_fp16(before[static_cast<size_t>(c * qkv_rows + (kHeads + kKvHeads) * kHeadDim + i)]);
    }
  set(positions, at);
  set(places, cell);
  set(mask, seen);
  set(keys, k);
  set(values, v);

  ggml_context* ctx = kept.emplace_back(context(256));
  ggml_cgraph* graph = ggml_new_graph(ctx);
  auto norm = [&](ggml_tensor* of) { return ggml_mul(ctx, ggml_rms_norm(ctx, of, kEps), ones); };
  auto rotated = [&](ggml_tensor* of, int heads) {
    return ggml_rope_ext(ctx, ggml_reshape_3d(ctx, of, kHeadDim, heads, tokens), positions, nullptr, kHeadDim,
                         GGML_ROPE_TYPE_NEOX, 2048, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
  };
  ggml_tensor* normed = norm(x);
  ggml_tensor* q = rotated(ggml_mul_mat(ctx, wq, normed), kHeads);
  ggml_tensor* new_k = rotated(ggml_mul_mat(ctx, wk, normed), kKvHeads);
  ggml_tensor* new_v = ggml_mul_mat(ctx, wv, normed);
  ggml_build_forward_expand(graph, q);
  ggml_build_forward_expand(graph,
                            ggml_set_rows(ctx, keys, ggml_reshape_2d(ctx, new_k, kKvHeads * kHeadDim, tokens), places));
  ggml_build_forward_expand(graph, ggml_set_rows(ctx, values, new_v, places));
  auto cached = [&](ggml_tensor* cache) {
    const size_t head = kHeadDim * sizeof(ggml_fp16_t);
    return ggml_view_3d(ctx, cache, kHeadDim, cells, kKvHeads, kKvHeads * head, head, 0);
  };
  ggml_tensor* mixed = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), cached(keys), cached(values), mask,
                                           1.0f / std::sqrt(static_cast<float>(kHeadDim)), 0.0f, 0.0f);
  ggml_tensor* residual = ggml_add(ctx, ggml_mul_mat(ctx, wo, ggml_reshape_2d(ctx, mixed, kHidden, tokens)), x);
  normed = norm(residual);
  ggml_tensor* both = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, gate, normed), ggml_mul_mat(ctx, up, normed));
  ggml_tensor* result = ggml_add(ctx, ggml_mul_mat(ctx, down, both), residual);
  ggml_build_forward_expand(graph, result);
  require(ggml_backend_alloc_ctx_tensors_from_buft(ctx, plain) != nullptr, "no memory");
  for (int turn = 0; turn < what.times; ++turn)
    require(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "the graph cannot be computed");
  std::vector<float> last(kHidden);
  ggml_backend_tensor_get(result, last.data(), static_cast<size_t>(tokens - 1) * kHidden * 4, kHidden * 4);
  print(last.data());
  for (ggml_context* each : kept) ggml_free(each);
  return 0;
}
