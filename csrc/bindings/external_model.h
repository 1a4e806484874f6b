// SPDX-License-Identifier: Apache-2.0
// A model whose tokens Python computes: the runtimes of inference/device. `_llm.pyi` lists what the object must have.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "llm/model/model.h"

namespace anyaccel::bindings {

// The object, which may be let go by a thread that has not the interpreter's lock.
using Executor = std::shared_ptr<nanobind::object>;
Executor hold(nanobind::object object);

// The sequences of an executor. It hears of what happens to them before its next run, so that no step ends half way
// here because a signal has ended a call there: whatever was not taken over then is said again.
class ExternalSequences final : public llm::Sequences {
 public:
  explicit ExternalSequences(Executor executor) : executor_(std::move(executor)) {}

  int create() override;
  void destroy(int sequence) override;
  int fork(int sequence, int64_t tokens) override;
  void truncate(int sequence, int64_t tokens) override;
  bool exists(int sequence) const override { return lengths_.contains(sequence); }
  int64_t length(int sequence) const override { return lengths_.at(sequence); }
  void extend(int sequence, int64_t tokens) override { lengths_[sequence] += tokens; }

  size_t token_bytes() const override { return bytes("token_bytes"); }
  size_t used_bytes() const override { return bytes("used_bytes"); }
  size_t reserved_bytes() const override { return bytes("reserved_bytes"); }
  size_t limit_bytes() const override { return bytes("limit_bytes"); }

  // Tells the executor what it has not heard of. With the interpreter's lock held.
  void tell() const;

 private:
  size_t bytes(const char* name) const;

  const Executor executor_;
  std::unordered_map<int, int64_t> lengths_;
  int next_ = 0;
  // (sequence, the one whose tokens it has or -1, its length; -1: it is gone)
  mutable std::deque<std::tuple<int, int, int64_t>> changes_;
};

class ExternalModel final : public llm::Model {
 public:
  ExternalModel(llm::DecoderSpec spec, nanobind::object executor);

  const nanobind::object& executor() const { return *executor_; }
  size_t weight_bytes() const override;
  int threads() const override { return 0; }
  std::string create_segment(double, bool, const std::vector<int>&, const std::vector<std::string>&, const std::string&,
                             const std::string&) override {
    return {};
  }
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids) override;
  void unlink() override {}

 protected:
  llm::Sequences& cache() override { return sequences_; }
  const llm::Sequences& cache() const override { return sequences_; }
  void check_room(const std::vector<Work>& work) override;
  int64_t most_tokens() const override;
  bool picks() const override { return true; }
  void run(const llm::StepTokens& tokens, std::vector<llm::Pick>& picks) override;
  void clear(int sequence) override;
  uint64_t exchange(uint64_t value) override;

 private:
  const Executor executor_;
  ExternalSequences sequences_;
};

}  // namespace anyaccel::bindings
