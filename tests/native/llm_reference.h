// SPDX-License-Identifier: Apache-2.0
// A decoder in double precision, written down as plainly as possible, with random weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "llm/decoder/spec.h"

namespace llm_reference {

using namespace anyaccel::llm;
using Row = std::vector<double>;
using Rows = std::vector<Row>;

// Weights by name, random and made when they are first asked for.
class Values {
 public:
  struct Value {
    int64_t rows = 0, cols = 0;  // cols 0: a vector
    std::vector<float> data;
  };

  const Value& get(const std::string& name, int64_t rows, int64_t cols) {
    const auto found = values_.find(name);
    if (found != values_.end()) return found->second;
    std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(name)));
    const float spread = cols > 0 ? 1.5f / std::sqrt(static_cast<float>(cols)) : 0.3f;
    std::normal_distribution<float> normal(0.0f, spread);
    Value value{rows, cols, std::vector<float>(static_cast<size_t>(rows * std::max<int64_t>(cols, 1)))};
    const bool is_norm = name.ends_with("norm.weight");
    for (float& x : value.data) x = normal(random) + (is_norm ? 1.0f : 0.0f);
    return values_.emplace(name, std::move(value)).first->second;
  }
  const std::map<std::string, Value>& all() const { return values_; }

 private:
  std::map<std::string, Value> values_;
};

class Reference {
 public:
  explicit Reference(const DecoderSpec& spec) : spec_(spec) { logits({0, 1}); }
  const Values& values() const { return values_; }

  Rows logits(const std::vector<int64_t>& tokens) {
    const auto& embed = values_.get("embed", spec_.vocab, spec_.hidden);
    Rows h;
    for (size_t t = 0; t < tokens.size(); ++t) {
      Row row(static_cast<size_t>(spec_.hidden));
      for (size_t i = 0; i < row.size(); ++i)
        row[i] = static_cast<double>(embed.data[static_cast<size_t>(tokens[t] * spec_.hidden) + i]) *
                 static_cast<double>(spec_.embedding_scale);
      if (spec_.positions > 0) {
        const auto& positions = values_.get("positions", spec_.positions, spec_.hidden);
        for (size_t i = 0; i < row.size(); ++i)
          row[i] +=
              static_cast<double>(positions.data[(t + static_cast<size_t>(spec_.position_offset)) * row.size() + i]);
      }
      h.push_back(row);
    }
    norm_all("embed_norm", spec_.embedding_norm, h, h);
    for (size_t i = 0; i < spec_.layers.size(); ++i) layer("layers." + std::to_string(i) + ".", spec_.layers[i], h);
    norm_all("final_norm", spec_.final_norm, h, h);
    Rows out;
    for (const Row& row : h) {
      Row logit = linear(spec_.tied ? "embed" : "head", spec_.vocab, row, false);
      for (double& x : logit) {
        x *= static_cast<double>(spec_.logits_scale);
        if (spec_.logits_softcap > 0) {
          const auto cap = static_cast<double>(spec_.logits_softcap);
          x = cap * std::tanh(x / cap);
        }
      }
      out.push_back(logit);
    }
    return out;
  }

 private:
  Row linear(const std::string& name, int64_t rows, const Row& x, bool bias) {
    const auto cols = static_cast<int64_t>(x.size());
    const auto& w = values_.get(name, rows, cols);
    Row out(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) {
      double sum = bias ? static_cast<double>(values_.get(name + ".bias", rows, 0).data[static_cast<size_t>(r)]) : 0;
      for (int64_t c = 0; c < cols; ++c)
        sum += static_cast<double>(w.data[static_cast<size_t>(r * cols + c)]) * x[static_cast<size_t>(c)];
      out[static_cast<size_t>(r)] = sum;
    }
    return out;
  }

  // Norms count values from x, with weights from `at` on of `total`.
  void norm(const std::string& name, const NormSpec& spec, double* x, int64_t count, int64_t at, int64_t total) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < count; ++i) mean += x[i] / static_cast<double>(count);
    if (spec.kind == NormKind::rms) mean = 0;
    for (int64_t i = 0; i < count; ++i) square += (x[i] - mean) * (x[i] - mean) / static_cast<double>(count);
    for (int64_t i = 0; i < count; ++i) {
      x[i] = (x[i] - mean) / std::sqrt(square + static_cast<double>(spec.eps));
      if (spec.weight)
        x[i] *= static_cast<double>(values_.get(name + ".weight", total, 0).data[static_cast<size_t>(at + i)]);
      if (spec.bias)
        x[i] += static_cast<double>(values_.get(name + ".bias", total, 0).data[static_cast<size_t>(at + i)]);
    }
  }
  void norm_all(const std::string& name, const std::optional<NormSpec>& spec, const Rows& in, Rows& out) {
    out = in;
    if (!spec) return;
    for (Row& row : out)
      norm(name, *spec, row.data(), static_cast<int64_t>(row.size()), 0, static_cast<int64_t>(row.size()));
  }

  static double activate(Activation kind, double x) {
    switch (kind) {
      case Activation::silu:
        return x / (1 + std::exp(-x));
      case Activation::gelu:
        return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
      case Activation::gelu_tanh:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      default:
        return std::max(x, 0.0);
    }
  }

  Row mlp(const std::string& name, const MlpSpec& spec, const Row& x) {
    const auto f = static_cast<size_t>(spec.features);
    const Row both = linear(name + ".gate_up", spec.features * (spec.gated ? 2 : 1), x, spec.bias);
    Row features(f);
    for (size_t i = 0; i < f; ++i) features[i] = activate(spec.activation, both[i]) * (spec.gated ? both[f + i] : 1.0);
    return linear(name + ".down", spec_.hidden, features, spec.out_bias);
  }

  Row experts(const std::string& at, const MoeSpec& spec, const Row& x) {
    Row scores = linear(at + "router", spec.experts, x, spec.router_bias);
    double sum = 0;
    const double top = *std::max_element(scores.begin(), scores.end());
    if (spec.scoring == MoeSpec::Scoring::softmax) {
      for (double& s : scores) sum += s = std::exp(s - top);
      for (double& s : scores) s /= sum;
    } else if (spec.scoring == MoeSpec::Scoring::sigmoid) {
      for (double& s : scores) s = 1 / (1 + std::exp(-s));
    }
    Row choice = scores;
    if (spec.choice_bias)
      for (size_t e = 0; e < choice.size(); ++e)
        choice[e] += static_cast<double>(values_.get(at + "router.choice_bias", spec.experts, 0).data[e]);
    const size_t members = choice.size() / static_cast<size_t>(spec.groups);
    if (spec.groups > 1) {
      std::vector<std::pair<double, size_t>> groups;
      for (size_t g = 0; g < static_cast<size_t>(spec.groups); ++g) {
        Row part(choice.begin() + static_cast<int64_t>(g * members),
                 choice.begin() + static_cast<int64_t>((g + 1) * members));
        std::sort(part.rbegin(), part.rend());
        groups.emplace_back(spec.group_score == MoeSpec::GroupScore::max ? part[0] : part[0] + part[1], g);
      }
      std::sort(groups.rbegin(), groups.rend());
      for (size_t i = static_cast<size_t>(spec.top_groups); i < groups.size(); ++i)
        for (size_t e = 0; e < members; ++e) choice[groups[i].second * members + e] = -1e300;
    }
    std::vector<size_t> order(choice.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = e;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return choice[a] > choice[b]; });
    order.resize(static_cast<size_t>(spec.top_k));
    sum = 0;
    for (size_t e : order) sum += scores[e];
    Row out(x.size());
    for (int e = 0; e < spec.experts; ++e) {  // all: so that their weights are known
      const Row one = mlp(at + "experts." + std::to_string(e), spec.expert, x);
      if (std::find(order.begin(), order.end(), static_cast<size_t>(e)) == order.end()) continue;
      const double factor =
          scores[static_cast<size_t>(e)] / (spec.normalise ? sum : 1.0) * static_cast<double>(spec.scale);
      for (size_t i = 0; i < out.size(); ++i) out[i] += factor * one[i];
    }
    if (spec.shared) {
      const Row one = mlp(at + "shared", *spec.shared, x);
      const double gate = spec.shared_gate ? 1 / (1 + std::exp(-linear(at + "shared_gate", 1, x, false)[0])) : 1.0;
      for (size_t i = 0; i < out.size(); ++i) out[i] += gate * one[i];
    }
    return out;
  }

  void rotate(const RopeSpec& rope, double* x, size_t position) {
    const size_t half = rope.inv_freq.size();
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * rope.inv_freq[i];
      double& a = rope.interleaved ? x[2 * i] : x[i];
      double& b = rope.interleaved ? x[2 * i + 1] : x[half + i];
      const double c = std::cos(angle) * rope.scale, s = std::sin(angle) * rope.scale, old = a;
      a = old * c - b * s;
      b = b * c + old * s;
    }
  }

  Rows attention(const std::string& at, const AttentionSpec& a, const Rows& x) {
    const auto hd = static_cast<size_t>(a.head_dim), vd = static_cast<size_t>(a.value_dim);
    const auto heads = static_cast<size_t>(a.heads), kv = static_cast<size_t>(a.kv_heads);
    const RopeSpec* rope = a.rope < 0 ? nullptr : &spec_.ropes[static_cast<size_t>(a.rope)];
    Rows q, k, v;
    for (size_t t = 0; t < x.size(); ++t) {
      Row tq, tk, tv;
      if (a.mla) {
        const MlaSpec& m = *a.mla;
        Row latent = x[t];
        if (m.q_rank > 0) {
          latent = linear(at + "q_a", m.q_rank, x[t], a.qkv_bias);
          norm(at + "q_a_norm", *m.q_norm, latent.data(), m.q_rank, 0, m.q_rank);
        }
        tq = linear(at + "q_b", a.heads * a.head_dim, latent, false);
        Row kva = linear(at + "kv_a", m.kv_rank + m.rope_dim, x[t], a.qkv_bias);
        Row shared(kva.begin() + m.kv_rank, kva.end());
        if (rope != nullptr) rotate(*rope, shared.data(), t);
        kva.resize(static_cast<size_t>(m.kv_rank));
        norm(at + "kv_a_norm", m.kv_norm, kva.data(), m.kv_rank, 0, m.kv_rank);
        const Row kvb = linear(at + "kv_b", a.heads * (m.nope_dim + a.value_dim), kva, false);
        for (size_t head = 0; head < heads; ++head) {
          const auto from = kvb.begin() + static_cast<int64_t>(head) * (m.nope_dim + a.value_dim);
          tk.insert(tk.end(), from, from + m.nope_dim);
          tk.insert(tk.end(), shared.begin(), shared.end());
          tv.insert(tv.end(), from + m.nope_dim, from + m.nope_dim + a.value_dim);
          if (rope != nullptr) rotate(*rope, tq.data() + head * hd + rope->first, t);
        }
      } else {
        Row all = linear(at + "qkv", qkv_rows(a), x[t], a.qkv_bias);
        if (a.clip > 0)
          for (double& y : all) y = std::clamp(y, -static_cast<double>(a.clip), static_cast<double>(a.clip));
        tq.assign(all.begin(), all.begin() + static_cast<int64_t>(heads * hd));
        tk.assign(all.begin() + static_cast<int64_t>(heads * hd),
                  all.begin() + static_cast<int64_t>((heads + kv) * hd));
        tv.assign(all.begin() + static_cast<int64_t>((heads + kv) * hd), all.end());
        const auto norms = [&] {
          if (!a.qk_norm) return;
          const QkNormSpec& n = *a.qk_norm;
          for (auto [name, row, count] : {std::tuple(at + "q_norm", &tq, heads), std::tuple(at + "k_norm", &tk, kv)}) {
            const auto total = static_cast<int64_t>(n.across || n.own_weights ? count * hd : hd);
            if (n.across) norm(name, n.norm, row->data(), total, 0, total);
            for (size_t head = 0; head < count && !n.across; ++head)
              norm(name, n.norm, row->data() + head * hd, a.head_dim,
                   n.own_weights ? static_cast<int64_t>(head * hd) : 0, total);
          }
        };
        if (!a.qk_norm || !a.qk_norm->after_rope) norms();
        for (size_t head = 0; head < heads && rope != nullptr; ++head)
          rotate(*rope, tq.data() + head * hd + rope->first, t);
        for (size_t head = 0; head < kv && rope != nullptr; ++head)
          rotate(*rope, tk.data() + head * hd + rope->first, t);
        if (a.qk_norm && a.qk_norm->after_rope) norms();
      }
      q.push_back(tq);
      k.push_back(tk);
      v.push_back(tv);
    }
    Rows out;
    for (size_t t = 0; t < x.size(); ++t) {
      Row joined(heads * vd);
      for (size_t head = 0; head < heads; ++head) {
        const size_t group = head / (heads / kv);
        const size_t first =
            a.window > 0 && t + 1 > static_cast<size_t>(a.window) ? t + 1 - static_cast<size_t>(a.window) : 0;
        Row scores;
        double top = a.sinks ? static_cast<double>(values_.get(at + "sinks", a.heads, 0).data[head]) : -1e300;
        const double sink = top;
        for (size_t s = first; s <= t; ++s) {
          double score = 0;
          for (size_t i = 0; i < hd; ++i) score += q[t][head * hd + i] * k[s][group * hd + i];
          score *= static_cast<double>(a.scale);
          if (a.softcap > 0) score = static_cast<double>(a.softcap) * std::tanh(score / static_cast<double>(a.softcap));
          if (!a.alibi.empty())
            score += static_cast<double>(a.alibi[head]) * (static_cast<double>(s) - static_cast<double>(t));
          scores.push_back(score);
          top = std::max(top, score);
        }
        double sum = a.sinks ? std::exp(sink - top) : 0;
        for (double& s : scores) sum += s = std::exp(s - top);
        for (size_t s = first; s <= t; ++s)
          for (size_t i = 0; i < vd; ++i) joined[head * vd + i] += scores[s - first] / sum * v[s][group * vd + i];
      }
      out.push_back(linear(at + "o", spec_.hidden, joined, a.out_bias));
    }
    return out;
  }

  void layer(const std::string& at, const LayerSpec& spec, Rows& h) {
    const auto add = [&](const Rows& delta) {
      for (size_t t = 0; t < h.size(); ++t)
        for (size_t i = 0; i < h[t].size(); ++i) h[t][i] += static_cast<double>(spec.residual_scale) * delta[t][i];
    };
    const auto feed = [&](const Rows& in) {
      Rows out;
      for (const Row& row : in) out.push_back(spec.moe ? experts(at, *spec.moe, row) : mlp(at + "mlp", *spec.mlp, row));
      return out;
    };
    Rows x, y;
    norm_all(at + "attn_norm", spec.attn_norm, h, x);
    if (spec.parallel) {
      y = x;
      if (spec.mlp_norm) norm_all(at + "mlp_norm", spec.mlp_norm, h, y);
      const Rows first = attention(at, *spec.attention, x), second = feed(y);
      add(first);
      add(second);
      return;
    }
    if (spec.residual_from_norm) h = x;
    x = attention(at, *spec.attention, x);
    norm_all(at + "attn_post_norm", spec.attn_post_norm, x, x);
    add(x);
    norm_all(at + "mlp_norm", spec.mlp_norm, h, x);
    if (spec.residual_from_norm) h = x;
    x = feed(x);
    norm_all(at + "mlp_post_norm", spec.mlp_post_norm, x, x);
    add(x);
  }

  const DecoderSpec spec_;
  Values values_;
};

}  // namespace llm_reference
