// SPDX-License-Identifier: Apache-2.0
// What the last stage of a step has chosen, as bytes for the others.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "llm/errors.h"
#include "llm/model/step.h"

namespace anyaccel::llm {
namespace {

static_assert(std::is_trivially_copyable_v<Random>);

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string text;
};

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}
  template <class T>
  T get() {
    T value{};
    if (sizeof value > text_.size() - at_)
      throw comm::CommError(comm::CommError::Kind::broken, "a step's tokens are cut");
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::string rest() const { return text_.substr(at_); }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

void put(Writer& to, const ChosenToken& chosen) {
  to.put(chosen.token);
  to.put(chosen.random);
  to.put(chosen.score.token);
  to.put(chosen.score.logprob);
  to.put(static_cast<uint64_t>(chosen.score.top.size()));
  for (const auto& [token, logprob] : chosen.score.top) {
    to.put(token);
    to.put(logprob);
  }
}

ChosenToken get_chosen(Reader& from) {
  ChosenToken chosen;
  chosen.token = from.get<int64_t>();
  chosen.random = from.get<Random>();
  chosen.score.token = from.get<int64_t>();
  chosen.score.logprob = from.get<float>();
  for (auto count = from.get<uint64_t>(); count > 0; --count) {
    const auto token = from.get<int64_t>();
    chosen.score.top.emplace_back(token, from.get<float>());
  }
  return chosen;
}

}  // namespace

void Model::share_chosen(size_t begin, std::string& failure, StepResult& result) {
  Writer message;
  if (stages_->is_last()) {
    message.put(static_cast<uint64_t>(failure.empty() ? result.ones.size() - begin : UINT64_MAX));
    if (!failure.empty()) {
      message.text += failure;
    } else {
      for (size_t i = begin; i < result.ones.size(); ++i) {
        const StepResult::One& one = result.ones[i];
        const auto at = std::find(result.asked.begin(), result.asked.end(), one.request);
        message.put(static_cast<uint64_t>(at - result.asked.begin()));
        message.put(static_cast<uint64_t>(one.chosen.size()));
        for (const ChosenToken& chosen : one.chosen) put(message, chosen);
      }
    }
  }
  stages_->share_text(message.text);
  if (stages_->is_last()) return;
  Reader from(message.text);
  const auto count = from.get<uint64_t>();
  if (count == UINT64_MAX) {
    failure = from.rest();
    return;
  }
  for (uint64_t i = 0; i < count; ++i) {
    const auto at = from.get<uint64_t>();
    if (at >= result.asked.size())
      throw comm::CommError(comm::CommError::Kind::broken, "a step's tokens are of another one's requests");
    StepResult::One one{result.asked[at], {}};
    for (auto left = from.get<uint64_t>(); left > 0; --left) one.chosen.push_back(get_chosen(from));
    result.ones.push_back(std::move(one));
  }
}

}  // namespace anyaccel::llm
