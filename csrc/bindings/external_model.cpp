// SPDX-License-Identifier: Apache-2.0
#include "bindings/external_model.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "llm/decoder/state.h"
#include "llm/errors.h"

namespace nb = nanobind;
using namespace anyaccel::llm;

namespace anyaccel::bindings {
namespace {

// Calls Python. What says that the model is at fault has the meaning here that an executor's own error has.
template <class Function>
auto call(Function function) {
  const nb::gil_scoped_acquire gil;
  try {
    return function();
  } catch (nb::python_error& error) {
    if (!error.matches(nb::module_::import_("anyaccel.errors").attr("ModelError"))) throw;
    throw ModelError(nb::cast<std::string>(nb::str(error.value())));
  }
}

}  // namespace

Executor hold(nb::object object) {
  return {new nb::object(std::move(object)), [](nb::object* held) {
            const nb::gil_scoped_acquire gil;
            delete held;
          }};
}

int ExternalSequences::create() {
  changes_.emplace_back(next_, -1, 0);
  sequences_[next_] = {};
  return next_++;
}

void ExternalSequences::drop_last_kept(One& one) {
  changes_.emplace_back(one.kept.back().sequence, -1, -1);
  one.kept.pop_back();
}

bool ExternalSequences::drop_kept(int sequence) {
  One& one = sequences_.at(sequence);
  const bool some = !one.kept.empty();
  while (!one.kept.empty()) drop_last_kept(one);
  return some;
}

void ExternalSequences::destroy(int sequence) {
  drop_kept(sequence);
  changes_.emplace_back(sequence, -1, -1);
  sequences_.erase(sequence);
}

int ExternalSequences::source(int sequence, int64_t tokens) const {
  const One& one = sequences_.at(sequence);
  if (state_bytes_ == 0 || tokens == one.length) return sequence;
  for (const Kept& kept : one.kept)
    if (kept.tokens == tokens) return kept.sequence;
  return -1;
}

int ExternalSequences::fork(int sequence, int64_t tokens) {
  if (tokens < 0 || tokens > length(sequence)) throw UsageError("fork beyond the sequence's end");
  changes_.emplace_back(next_, source(sequence, tokens), tokens);
  sequences_[next_].length = tokens;
  return next_++;
}

void ExternalSequences::truncate(int sequence, int64_t tokens) {
  if (tokens < 0 || tokens > length(sequence)) throw UsageError("truncate beyond the sequence's end");
  One& one = sequences_.at(sequence);
  changes_.emplace_back(sequence, source(sequence, tokens), tokens);
  while (!one.kept.empty() && one.kept.back().tokens > tokens) drop_last_kept(one);
  one.length = tokens;
}

int64_t ExternalSequences::reachable(int sequence, int64_t tokens) const {
  const One& one = sequences_.at(sequence);
  if (state_bytes_ == 0 || tokens == one.length) return tokens;
  int64_t last = 0;
  for (const Kept& kept : one.kept)
    if (kept.tokens <= tokens) last = kept.tokens;
  return last;
}

void ExternalSequences::keep(int sequence, bool anyway) {
  One& one = sequences_.at(sequence);
  if (state_bytes_ == 0 || one.length == 0 || (!one.kept.empty() && one.kept.back().tokens == one.length)) return;
  const size_t most = limit_bytes(), left = most - std::min(most, used_bytes());
  if (!anyway && left <= 2 * state_bytes_ + most / 8) return;
  if (one.kept.size() == 2) drop_last_kept(one);
  changes_.emplace_back(next_, sequence, one.length);
  one.kept.push_back({one.length, next_++});
}

void ExternalSequences::tell() const {
  while (!changes_.empty()) {
    const auto [sequence, of, length] = changes_.front();
    executor_->attr("change")(sequence, of, length);
    changes_.pop_front();
  }
}

size_t ExternalSequences::bytes(const char* name) const {
  return call([&] {
    tell();
    return nb::cast<size_t>(executor_->attr(name));
  });
}

ExternalModel::ExternalModel(DecoderSpec spec, nb::object executor)
    : Model(std::move(spec)),
      executor_(hold(std::move(executor))),
      sequences_(executor_, static_cast<size_t>(StateLayout(spec_).floats) * sizeof(float)) {}

size_t ExternalModel::weight_bytes() const {
  return call([&] { return nb::cast<size_t>(executor_->attr("weight_bytes")); });
}

void ExternalModel::connect(const std::vector<std::string>&, const std::vector<int>&) {
  const auto held = lock();
  call([&] { executor_->attr("connect")(); });
}

void ExternalModel::check_room(const std::vector<Work>& work) {
  Wanted wanted;
  for (const Work& one : work) wanted.emplace_back(one.sequence, one.count);
  reserve(wanted);
}

void ExternalModel::reserve(const Wanted& wanted) {
  const auto reserve_all = [&] {
    call([&] {
      sequences_.tell();
      executor_->attr("reserve")(wanted);
    });
  };
  try {
    reserve_all();
  } catch (const ModelError&) {  // rather states of sequences that go on than those that are kept
    bool some = false;
    for (const auto& [sequence, count] : wanted) some |= sequences_.drop_kept(sequence);
    if (!some) throw;
    reserve_all();
  }
}

int64_t ExternalModel::most_tokens() const {
  return call([&] { return nb::cast<int64_t>(executor_->attr("most_tokens")); });
}

void ExternalModel::run(const StepTokens& step, std::vector<Pick>& picks) {
  std::vector<std::tuple<int, int64_t, std::vector<int32_t>, int64_t>> segments;
  for (size_t i = 0; i < step.queries.size(); ++i) {
    const Query& query = step.queries[i];
    const auto begin = step.tokens.begin() + query.row;
    segments.emplace_back(query.sequence, query.position, std::vector<int32_t>(begin, begin + query.tokens),
                          step.contexts[i]);
  }
  if (sequences_.state_bytes() > 0) {  // of those that have kept a state since the step began, each needs one more
    Wanted wanted;
    for (const Query& query : step.queries)
      if (wanted.empty() || std::get<0>(wanted.back()) != query.sequence)
        wanted.emplace_back(query.sequence, query.tokens);
      else
        std::get<1>(wanted.back()) += query.tokens;
    reserve(wanted);
  }
  std::vector<std::tuple<int, float, int, float, float, double, double>> choices;
  for (const Pick& pick : picks)
    choices.emplace_back(pick.row, pick.temperature, pick.top_k, pick.top_p, pick.min_p, pick.uniform, pick.following);
  const auto tokens = call([&] {
    sequences_.tell();
    return nb::cast<std::vector<int64_t>>(
        executor_->attr("run")(segments, choices, step.wanted, reinterpret_cast<uintptr_t>(step.logits),
                               step.hidden_wanted, reinterpret_cast<uintptr_t>(step.hidden)));
  });
  if (tokens.size() != picks.size())
    throw ModelError("the executor has chosen " + std::to_string(tokens.size()) + " tokens of " +
                     std::to_string(picks.size()));
  for (size_t i = 0; i < picks.size(); ++i) picks[i].token = tokens[i];
}

void ExternalModel::clear(int sequence) {
  sequences_.drop_kept(sequence);
  call([&] {
    sequences_.tell();
    executor_->attr("clear")(sequence);
  });
}

uint64_t ExternalModel::exchange(uint64_t value) {
  return call([&] { return nb::cast<uint64_t>(executor_->attr("shared")(value)); });
}

}  // namespace anyaccel::bindings
