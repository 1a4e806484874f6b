// SPDX-License-Identifier: Apache-2.0
// A decoder of csrc/llm: its weights, KV cache, threads and ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/team.h"
#include "llm/attention/attention.h"
#include "llm/decoder/weights.h"
#include "llm/forward/forward.h"
#include "llm/model/model.h"
#include "llm/ranks/parallel_ranks.h"

namespace anyaccel::llm {

class DecoderModel final : public Model {
 public:
  // `threads`: 0 for as many as this process may use CPUs. `memory`: see Weights. Throws UsageError, std::bad_alloc,
  // std::system_error.
  DecoderModel(DecoderSpec spec, const std::vector<MatrixEntry>& matrices, const std::vector<VectorEntry>& vectors,
               int threads, CacheFormat cache_format, size_t cache_limit_bytes, size_t memory = 0);
  ~DecoderModel() override;

  size_t weight_bytes() const override { return weights_.bytes(); }
  int threads() const override { return team_.size(); }

  // --- weights, see Weights
  void set_rows(const std::string& name, int64_t first, int64_t count, const Source& source, const int64_t* order);
  void set_quantised_rows(const std::string& name, int64_t first, int64_t count, const uint8_t* q, const float* scales,
                          const float* minima);
  void set_vector(const std::string& name, int64_t first, int64_t count, const void* data, SourceType type,
                  int64_t stride, float plus);
  void stream_to(int fd, int64_t offset);
  std::vector<uint64_t> write(int fd, int64_t offset, const FileProgress& progress);
  bool read(int fd, int64_t offset, const std::vector<uint64_t>& checksums, const FileProgress& progress);
  // Of experts that stay in a file; nothing where all are in memory.
  std::optional<ExpertCache::Stats> expert_stats();
  size_t resident_bytes() const { return weights_.resident_bytes(); }
  // After the last weight. Throws ModelError.
  void finish();
  // Of a head that drafts for `model`: it takes that one's embedding, and its head where it has none itself. `tokens`:
  // which ones its own head's rows stand for. Throws UsageError.
  void borrow(DecoderModel& model, const std::vector<int64_t>& tokens);

  std::string create_segment(double timeout_s, bool anonymous, const std::vector<int>& hosts,
                             const std::vector<std::string>& addresses, const std::string& wire_dtype,
                             const std::string& transport, int socket) override;
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids) override;
  void unlink() override;

  // Of an encoder: the last hidden states [all tokens, hidden] of whole sequences, counts[i] tokens one after another.
  // `types`: of the tokens, or null where all are 0. Throws UsageError, OutOfCache.
  void encode(const std::vector<int64_t>& counts, const int64_t* tokens, const int64_t* types, float* hidden);

 protected:
  Sequences& cache() override { return cache_; }
  const Sequences& cache() const override { return cache_; }
  void check_ready() const override;
  bool usable() const noexcept override { return team_.usable(); }
  void check_room(const std::vector<Work>& work) override;
  int64_t most_tokens() const override { return forward_.most_tokens(); }
  bool exact() const override { return true; }
  Weights::Load load() const override { return weights_.load(spec_); }
  bool gives_features() const override { return true; }
  void run(const StepTokens& tokens, std::vector<Pick>& /*picks*/) override { forward_.run(tokens); }
  uint64_t exchange(uint64_t value) override { return forward_.shared(value); }
  void share_rows(const StepTokens& tokens) override { forward_.share_rows(tokens); }
  void on_threads(const std::function<void(int, int)>& function) override;

 private:
  Team team_;
  Weights weights_;
  KvCache cache_;
  std::unique_ptr<ParallelRanks> ranks_;
  Forward forward_;
  std::string transport_;
  bool finished_ = false;
  StepTokens encoded_;
};

}  // namespace anyaccel::llm
