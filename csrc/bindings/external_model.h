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
//
// A recurrent state is kept by a sequence of its own, a fork that nobody goes on with: to go back to it is to fork
// that.
class ExternalSequences final : public llm::Sequences {
 public:
  ExternalSequences(Executor executor, size_t state_bytes)
      : executor_(std::move(executor)), state_bytes_(state_bytes) {}

  int create() override;
  void destroy(int sequence) override;
  int fork(int sequence, int64_t tokens) override;
  void truncate(int sequence, int64_t tokens) override;
  bool exists(int sequence) const override { return sequences_.contains(sequence); }
  int64_t length(int sequence) const override { return sequences_.at(sequence).length; }
  void extend(int sequence, int64_t tokens) override { sequences_.at(sequence).length += tokens; }
  int64_t reachable(int sequence, int64_t tokens) const override;
  void keep(int sequence, bool anyway) override;
  // Gives up the states that a sequence has kept; whether there were any.
  bool drop_kept(int sequence);

  size_t token_bytes() const override { return bytes("token_bytes"); }
  size_t state_bytes() const override { return state_bytes_; }
  size_t used_bytes() const override { return bytes("used_bytes"); }
  size_t reserved_bytes() const override { return bytes("reserved_bytes"); }
  size_t limit_bytes() const override { return bytes("limit_bytes"); }

  // Tells the executor what it has not heard of. With the interpreter's lock held.
  void tell() const;

 private:
  struct Kept {
    int64_t tokens;
    int sequence;  // whose state is that of so many tokens
  };
  struct One {
    int64_t length = 0;
    std::vector<Kept> kept;  // by tokens
  };

  size_t bytes(const char* name) const;
  // The sequence whose state is that of the first `tokens` tokens; -1: nobody has one.
  int source(int sequence, int64_t tokens) const;
  void drop_last_kept(One& one);

  const Executor executor_;
  const size_t state_bytes_;
  std::unordered_map<int, One> sequences_;
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
                             const std::string&, int) override {
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
  using Wanted = std::vector<std::tuple<int, int64_t>>;  // sequences and how many tokens come
  void reserve(const Wanted& wanted);

  const Executor executor_;
  ExternalSequences sequences_;
};

}  // namespace anyaccel::bindings
