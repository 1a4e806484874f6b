// SPDX-License-Identifier: Apache-2.0
// The decoder against a reference in double precision that is written down here as plainly as possible: small random
// models with every part that a layer may have, prompts at once and in pieces, batches, several threads.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "llm/errors.h"
#include "llm/model/decoder_model.h"
#include "llm/model/request.h"
#include "llm_reference.h"

namespace {

using namespace anyaccel::llm;
using llm_reference::Reference;
using llm_reference::Row;
using llm_reference::Rows;
using llm_reference::Values;

template <class Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  std::fprintf(stderr, "no error was thrown\n");
  std::abort();
}

// --- specs

constexpr int64_t kVocab = 50;
constexpr NormSpec kRms{NormKind::rms, 1e-5f, true, false};
constexpr NormSpec kLayer{NormKind::layer, 1e-5f, true, true};

DecoderSpec llama() {
  DecoderSpec spec;
  spec.vocab = kVocab;
  spec.hidden = 40;
  spec.max_tokens = 2048;
  spec.final_norm = kRms;
  RopeSpec rope;
  for (int i = 0; i < 6; ++i) rope.inv_freq.push_back(std::pow(100.0, -i / 6.0));
  spec.ropes.push_back(rope);
  for (int i = 0; i < 2; ++i) {
    LayerSpec layer;
    layer.attention.emplace();
    layer.attention->heads = 6;
    layer.attention->kv_heads = 2;
    layer.attention->head_dim = layer.attention->value_dim = 12;
    layer.attention->scale = 0.3f;
    layer.attention->rope = 0;
    layer.mlp = MlpSpec{70, Activation::silu, true, false, false};
    layer.attn_norm = layer.mlp_norm = kRms;
    spec.layers.push_back(layer);
  }
  return spec;
}

std::map<std::string, DecoderSpec> specs() {
  std::map<std::string, DecoderSpec> all;
  all["llama"] = llama();
  {
    DecoderSpec& spec = all["gemma-like"] = llama();
    spec.tied = true;
    spec.embedding_scale = 3.0f;
    spec.logits_softcap = 2.0f;
    for (LayerSpec& layer : spec.layers) {
      layer.attn_post_norm = layer.mlp_post_norm = kRms;
      layer.attention->softcap = 3.0f;
      layer.attention->qk_norm = QkNormSpec{kRms, false, false, false};
      layer.mlp->activation = Activation::gelu_tanh;
    }
    spec.layers[0].attention->window = 5;
  }
  {
    DecoderSpec& spec = all["neox-like"] = llama();
    spec.ropes[0].inv_freq.resize(3);
    spec.final_norm = kLayer;
    for (LayerSpec& layer : spec.layers) {
      layer.parallel = true;
      layer.attn_norm = layer.mlp_norm = kLayer;
      layer.attention->qkv_bias = layer.attention->out_bias = true;
      layer.mlp = MlpSpec{66, Activation::gelu, false, true, true};
    }
    spec.layers[1].mlp_norm.reset();  // as GPT-J: both read one norm
  }
  {
    DecoderSpec& spec = all["gpt2-like"] = llama();
    spec.ropes.clear();
    spec.positions = 2050;
    spec.position_offset = 2;
    spec.embedding_norm = kLayer;
    for (LayerSpec& layer : spec.layers) {
      layer.attention->rope = -1;
      layer.attention->clip = 0.8f;
      layer.attention->alibi = {0.5f, 0.25f, 0.125f, 0.06f, 0.03f, 0.01f};
      layer.residual_from_norm = true;
      layer.residual_scale = 0.7f;
      layer.mlp->activation = Activation::relu;
    }
  }
  {
    DecoderSpec& spec = all["olmo-like"] = llama();
    spec.logits_scale = 0.5f;
    for (LayerSpec& layer : spec.layers) {
      layer.attn_norm.reset();
      layer.mlp_norm.reset();
      layer.attn_post_norm = layer.mlp_post_norm = kRms;
      layer.attention->qk_norm = QkNormSpec{kRms, true, false, false};
    }
    spec.layers[1].attention->qk_norm = QkNormSpec{kLayer, false, true, true};
    spec.layers[1].attention->sinks = true;
  }
  {
    DecoderSpec& spec = all["experts"] = llama();
    MoeSpec moe;
    moe.experts = 6;
    moe.top_k = 2;
    moe.expert = MlpSpec{24, Activation::silu, true, true, true};
    moe.router_bias = true;
    moe.shared = MlpSpec{30, Activation::silu, true, false, false};
    moe.shared_gate = true;
    for (LayerSpec& layer : spec.layers) {
      layer.mlp.reset();
      layer.moe = moe;
    }
    MoeSpec& second = *spec.layers[1].moe;
    second.scoring = MoeSpec::Scoring::sigmoid;
    second.choice_bias = true;
    second.groups = 3;
    second.top_groups = 2;
    second.group_score = MoeSpec::GroupScore::top2;
    second.scale = 2.5f;
    second.shared.reset();
    second.shared_gate = false;
  }
  {
    DecoderSpec& spec = all["latent"] = llama();
    spec.ropes[0].inv_freq.resize(2);
    spec.ropes[0].interleaved = true;
    spec.ropes[0].first = 8;
    for (LayerSpec& layer : spec.layers) {
      layer.attention->kv_heads = 6;
      layer.attention->value_dim = 10;
      layer.attention->mla = MlaSpec{18, 20, 8, 4, kRms, kRms};
    }
    spec.layers[1].attention->mla->q_rank = 0;
  }
  return all;
}

// --- the model

std::shared_ptr<Model> make(const DecoderSpec& spec, const Values& values, int threads, size_t limit = 1 << 26) {
  std::vector<MatrixEntry> matrices;
  std::vector<VectorEntry> vectors;
  for (const auto& [name, value] : values.all()) {
    if (value.cols > 0)
      matrices.push_back({name, value.rows, value.cols, Format::f32, 0, false});
    else
      vectors.push_back({name, value.rows});
  }
  auto model = std::make_shared<DecoderModel>(spec, matrices, vectors, threads, CacheFormat::f32, limit);
  message_of<ModelError>([&] { model->finish(); });
  for (const auto& [name, value] : values.all()) {
    if (value.cols > 0)
      model->set_rows(name, 0, value.rows, {value.data.data(), SourceType::f32, value.cols * 4, 0}, nullptr);
    else
      model->set_vector(name, 0, value.rows, value.data.data(), SourceType::f32, 4, 0);
  }
  model->finish();
  return model;
}

std::vector<int64_t> random_tokens(std::mt19937& random, int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int64_t>(random() % kVocab));
  return tokens;
}

// Logits of all new tokens of each sequence.
std::vector<float> forward(Model& model, const std::vector<int>& sequences,
                           const std::vector<std::vector<int64_t>>& news) {
  std::vector<int64_t> counts, tokens, rows;
  for (const auto& one : news) {
    counts.push_back(static_cast<int64_t>(one.size()));
    tokens.insert(tokens.end(), one.begin(), one.end());
  }
  for (size_t i = 0; i < tokens.size(); ++i) rows.push_back(static_cast<int64_t>(i));
  std::vector<float> logits(tokens.size() * kVocab);
  model.forward(sequences, counts, tokens.data(), logits.data(), rows);
  return logits;
}

void check_close(const float* actual, const Row& expected, double tolerance, const char* what) {
  double largest = 0, error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    const double difference = std::fabs(static_cast<double>(actual[i]) - expected[i]);
    if (!(difference <= error)) error = difference;
  }
  if (error <= tolerance * largest) return;
  std::fprintf(stderr, "%s: error %g of %g\n", what, error, largest);
  std::abort();
}

void test_against_reference(const std::string& name, const DecoderSpec& spec) {
  Reference reference(spec);
  std::mt19937 random(7);
  for (int threads : {1, 3}) {
    const auto model = make(spec, reference.values(), threads);
    // Small and large first steps, together; then token by token, one of them in pieces.
    const std::vector<int64_t> lengths = {5, 40, 23};
    std::vector<std::vector<int64_t>> tokens, news;
    std::vector<Rows> expected;
    std::vector<int> sequences;
    for (int64_t length : lengths) {
      tokens.push_back(random_tokens(random, length + 4));
      expected.push_back(reference.logits(tokens.back()));
      sequences.push_back(model->create());
      news.emplace_back(tokens.back().begin(), tokens.back().begin() + length);
    }
    const auto check_all = [&](const std::vector<float>& logits, const std::vector<int64_t>& first) {
      size_t at = 0;
      for (size_t i = 0; i < news.size(); ++i)
        for (size_t t = 0; t < news[i].size(); ++t, ++at)
          check_close(&logits[at * kVocab], expected[i][static_cast<size_t>(first[i]) + t], 2e-5, name.c_str());
    };
    check_all(forward(*model, sequences, news), {0, 0, 0});
    for (int step = 0; step < 2; ++step) {
      std::vector<int64_t> first;
      for (size_t i = 0; i < 3; ++i) {
        first.push_back(lengths[i] + step);
        news[i] = {tokens[i][static_cast<size_t>(first[i])]};
      }
      check_all(forward(*model, sequences, news), first);
    }
    // A fork goes its own way, and its origin as before; a truncated one as if the tokens had never been.
    const int fork = model->fork(sequences[1], 30);
    const std::vector<int64_t> rest(tokens[1].begin() + 30, tokens[1].end());
    const auto logits = forward(*model, {fork}, {rest});
    for (size_t t = 0; t < rest.size(); ++t) check_close(&logits[t * kVocab], expected[1][30 + t], 2e-5, "fork");
    model->truncate(sequences[1], 10);
    const auto again = forward(*model, {sequences[1]}, {{tokens[1].begin() + 10, tokens[1].begin() + 20}});
    for (size_t t = 0; t < 10; ++t) check_close(&again[t * kVocab], expected[1][10 + t], 2e-5, "truncate");
    for (int sequence : sequences) model->destroy(sequence);
    model->destroy(fork);
    CHECK(model->cache_used_bytes() == 0);
  }
}

void test_long_prompts_in_pieces() {
  const DecoderSpec spec = llama();
  Reference reference(spec);
  std::mt19937 random(3);
  const auto model = make(spec, reference.values(), 2);
  const auto tokens = random_tokens(random, 1300);
  const int whole = model->create(), pieces = model->create();
  const auto expected = forward(*model, {whole}, {tokens});
  for (size_t at = 0; at < tokens.size(); at += 260) {
    const auto logits =
        forward(*model, {pieces},
                {{tokens.begin() + static_cast<int64_t>(at), tokens.begin() + static_cast<int64_t>(at) + 260}});
    for (size_t t = 0; t < 260; ++t) {
      const float* row = &expected[(at + t) * kVocab];
      check_close(&logits[t * kVocab], Row(row, row + kVocab), 2e-5, "pieces");
    }
  }
}

RequestOptions options(int64_t count, bool sampled = false, uint64_t seed = 0) {
  RequestOptions result;
  result.max_new_tokens = count;
  result.sampling.do_sample = sampled;
  result.seed = seed;
  return result;
}

std::vector<int64_t> alone(const std::shared_ptr<Model>& model, const std::vector<int64_t>& prompt,
                           const RequestOptions& how) {
  Request request(model, prompt, how, nullptr, false);
  while (request.finished() == Request::Finish::no) model->step({&request});
  return request.tokens();
}

void test_requests() {
  const DecoderSpec spec = llama();
  Reference reference(spec);
  std::mt19937 random(5);
  const auto model = make(spec, reference.values(), 2);
  std::vector<std::vector<int64_t>> prompts, expected;
  std::vector<RequestOptions> how;
  const auto shared = random_tokens(random, 70);
  for (int i = 0; i < 24; ++i) {
    auto prompt = i % 3 == 0 ? shared : std::vector<int64_t>();
    const auto own = random_tokens(random, 1 + static_cast<int64_t>(random() % 40));
    prompt.insert(prompt.end(), own.begin(), own.end());
    prompts.push_back(prompt);
    how.push_back(options(1 + static_cast<int64_t>(random() % 12), i % 2 == 0, random()));
    expected.push_back(alone(model, prompt, how.back()));
  }
  // In batches that requests come to and leave; those with the shared prompt share its pages.
  std::vector<std::shared_ptr<Request>> requests, running;
  for (size_t i = 0; i < prompts.size(); ++i)
    requests.push_back(
        std::make_shared<Request>(model, prompts[i], how[i], i % 3 == 0 && i > 0 ? requests[0] : nullptr, true));
  size_t next = 0;
  while (next < requests.size() || !running.empty()) {
    for (size_t n = random() % 6; n > 0 && next < requests.size(); --n) running.push_back(requests[next++]);
    std::vector<Request*> step;
    for (const auto& request : running) step.push_back(request.get());
    model->step(step);
    std::erase_if(running, [](const auto& request) { return request->finished() != Request::Finish::no; });
  }
  for (size_t i = 0; i < requests.size(); ++i) CHECK(requests[i]->tokens() == expected[i]);
  // One that has ended goes on as a longer prompt would.
  const auto more = random_tokens(random, 5);
  requests[1]->extend(more, 4);
  auto longer = prompts[1];
  longer.insert(longer.end(), expected[1].begin(), expected[1].end());
  longer.insert(longer.end(), more.begin(), more.end());
  CHECK(requests[1]->prompt_length() == static_cast<int64_t>(longer.size()));
  while (requests[1]->finished() == Request::Finish::no) model->step({requests[1].get()});
  RequestOptions greedy = how[1];
  greedy.max_new_tokens = 4;
  if (!greedy.sampling.do_sample) CHECK(requests[1]->tokens() == alone(model, longer, greedy));
  requests.clear();
  CHECK(model->cache_used_bytes() == 0);
}

void test_errors() {
  const DecoderSpec spec = llama();
  Reference reference(spec);
  const auto model = make(spec, reference.values(), 2);
  const auto refused = [&](std::vector<int64_t> prompt) {
    return message_of<UsageError>([&] { Request(model, std::move(prompt), options(1), nullptr, false); });
  };
  CHECK(refused({}).find("empty") != std::string::npos);
  CHECK(refused({1, kVocab}).find("vocabulary of 50") != std::string::npos);
  CHECK(refused({-1}).find("-1") != std::string::npos);
  CHECK(refused(std::vector<int64_t>(2048, 1)).find("2048") != std::string::npos);
  const int sequence = model->create();
  int64_t token = 3;
  float logits[kVocab];
  CHECK(!message_of<UsageError>([&] { model->forward({sequence, sequence}, {1, 1}, &token, logits, {}); }).empty());
  CHECK(!message_of<UsageError>([&] { model->forward({sequence + 1}, {1}, &token, logits, {}); }).empty());
  CHECK(!message_of<UsageError>([&] { model->forward({sequence}, {1}, &token, logits, {1}); }).empty());
  Request request(model, {1, 2, 3}, options(5), nullptr, false);
  CHECK(!message_of<UsageError>([&] { model->step({&request, &request}); }).empty());
  model->step({&request});
  request.finish();
  request.finish();
  CHECK(!message_of<UsageError>([&] { model->step({&request}); }).empty());
  CHECK(!message_of<UsageError>([&] { request.extend({1}, 0); }).empty());

  // The cache has room for one of two.
  const auto small = make(spec, reference.values(), 2, 3 * kPageTokens * model->cache_bytes_per_token());
  Request one(small, std::vector<int64_t>(100, 1), options(3), nullptr, false);
  Request two(small, std::vector<int64_t>(100, 2), options(3), nullptr, false);
  CHECK(!message_of<OutOfCache>([&] { small->step({&one, &two}); }).empty());
  CHECK(small->cache_used_bytes() == 0 && one.tokens().empty());
  CHECK(small->step({&one})[0] == alone(model, std::vector<int64_t>(100, 1), options(1))[0]);

  // One request of a step has no numbers: the others are as before, and go on without it.
  Values broken = reference.values();
  auto& embed = const_cast<Values::Value&>(broken.get("embed", kVocab, spec.hidden));
  embed.data[static_cast<size_t>(7 * spec.hidden)] = std::numeric_limits<float>::quiet_NaN();
  const auto sick = make(spec, broken, 2);
  Request good(sick, {1, 2, 3}, options(3), nullptr, false), bad(sick, {7}, options(3), nullptr, false);
  CHECK(message_of<ModelError>([&] { sick->step({&good, &bad}); }).find("NaN or infinite, for request 1 ") !=
        std::string::npos);
  CHECK(good.tokens().empty());
  while (good.finished() == Request::Finish::no) sick->step({&good});
  CHECK(good.tokens() == alone(model, {1, 2, 3}, options(3)));

  // A child has no threads.
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    bool told = false;
    try {
      model->create();
    } catch (const UsageError&) {
      told = true;
    }
    _exit(told ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main() {
  for (const auto& [name, spec] : specs()) test_against_reference(name, spec);
  test_long_prompts_in_pieces();
  test_requests();
  test_errors();
  std::puts("llm_model: ok");
  return 0;
}
