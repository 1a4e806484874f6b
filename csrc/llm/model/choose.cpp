// SPDX-License-Identifier: Apache-2.0
// From the logits of a step to the tokens that it chooses.
#include <algorithm>
#include <exception>

#include "llm/errors.h"
#include "llm/model/step.h"

namespace anyaccel::llm {

// Whether the next token follows from its logits alone, as far as Pick can say how.
bool Model::can_pick(const Request& request) const {
  const RequestOptions& options = request.options_;
  const SamplingOptions& s = options.sampling;
  const bool changed = !s.bias.empty() || s.repetition_penalty != 1 || s.presence_penalty != 0 ||
                       s.frequency_penalty != 0 || s.no_repeat_ngram > 0 || s.typical_p < 1 || s.dry_multiplier != 0 ||
                       s.xtc_probability > 0;
  const auto answered = static_cast<int64_t>(request.tokens_.size()) - request.prompt_;
  return picks() && !changed && request.mask_.empty() && !request.keep_logits_ && options.logprobs < 0 &&
         request.drafted_ == 0 && answered >= options.min_new_tokens;
}

Pick Request::pick(int32_t row) const {
  const SamplingOptions& s = options_.sampling;
  if (!s.do_sample) return {row};
  Random random = random_;
  return {row, s.temperature, s.top_k, s.top_p, s.min_p, random.uniform(), random.uniform()};
}

void Model::take_picks(const std::vector<Wanted>& rows, StepResult& result) {
  for (size_t i = 0; i < rows.size(); ++i) {
    Request& request = *rows[i].request;
    if (picks_[i].token < 0) refuse_logits(request, result);
    ChosenToken chosen{picks_[i].token, request.random_, {}};
    if (request.options_.sampling.do_sample) chosen.random.uniform();
    result.ones.push_back({&request, {chosen}});
  }
}

void Model::refuse_logits(Request& request, const StepResult& result) {
  clear(request.sequence_);
  const auto index = std::find(result.asked.begin(), result.asked.end(), &request);
  throw ModelError("the model's logits are NaN or infinite, for request " +
                   std::to_string(index - result.asked.begin()) +
                   " of the step: its weights may be damaged; or try another dtype, such as fp32");
}

// Takes what is wanted of rows whose logits have been computed: the next token of an answer, or, within a prompt,
// the log-probability of the prompt's next token. Behind a draft, a token is chosen in the same way,
// with the same draws of the generator, as long as all drafts before it are what was chosen: so the answer is what it
// is without drafts, and for drafts that are no distribution this is the rejection sampling of Leviathan et al. (2023).
void Model::choose(const std::vector<Wanted>& rows, StepResult& result) {
  if (rows.empty()) return;
  struct Group {  // rows of one request, one after the other
    size_t begin, end;
    size_t place;  // in result.ones; SIZE_MAX: of a prompt
  };
  const auto of_prompt = [](const Wanted& row) {
    const Request& request = *row.request;
    return row.position + 1 + request.drafted_ < static_cast<int64_t>(request.tokens_.size());
  };
  std::vector<Group> groups;
  const size_t begin = result.ones.empty() ? 0 : result.ones.size() - 1;
  for (size_t i = 0; i < rows.size(); ++i) {
    const Wanted& row = rows[i];
    if (of_prompt(row)) {
      groups.push_back({i, i + 1, SIZE_MAX});
    } else if (!result.ones.empty() && result.ones.back().request == row.request) {  // an answer's further rows
      if (i > 0 && groups.back().place == result.ones.size() - 1)
        groups.back().end = i + 1;
      else
        groups.push_back({i, i + 1, result.ones.size() - 1});
    } else {
      groups.push_back({i, i + 1, result.ones.size()});
      result.ones.push_back({row.request, {}});
    }
  }
  std::exception_ptr failure;
  std::mutex failed;
  Request* wrong = nullptr;
  const auto answer_row = [&](const Wanted& row, float* logits, StepResult::One& one, SamplingScratch& scratch) {
    Request& request = *row.request;
    const RequestOptions& options = request.options_;
    if (request.keep_logits_) request.logits_.assign(logits, logits + spec_.vocab);
    if (options.logprobs >= 0) scratch.kept.assign(logits, logits + spec_.vocab);
    const int64_t length = row.position + 1;
    const auto& ends = options.end_tokens;
    const bool goes_on = length - request.prompt_ < options.min_new_tokens;
    ChosenToken next{-1, one.chosen.empty() ? request.random_ : one.chosen.back().random, {}};
    next.token = sample(logits, spec_.vocab, options.sampling, request.tokens_.data(), length, request.prompt_,
                        ends.data(), goes_on ? static_cast<int64_t>(ends.size()) : 0, next.random, scratch,
                        request.mask_.empty() ? nullptr : request.mask_.data());
    if (next.token < 0) return false;
    if (options.logprobs >= 0 &&
        !score(scratch.kept.data(), spec_.vocab, next.token, options.logprobs, scratch, next.score))
      return false;
    const bool is_end = !options.ignore_end && std::find(ends.begin(), ends.end(), next.token) != ends.end();
    one.open = !is_end && length < static_cast<int64_t>(request.tokens_.size()) &&
               request.tokens_[static_cast<size_t>(length)] == next.token;
    one.chosen.push_back(std::move(next));
    return true;
  };
  const auto one_group = [&](const Group& group, SamplingScratch& scratch) {
    for (size_t i = group.begin; i < group.end; ++i) {
      const Wanted& row = rows[i];
      float* logits = logits_.data() + i * static_cast<size_t>(spec_.vocab);
      Request& request = *row.request;
      if (group.place == SIZE_MAX)
        return score(logits, spec_.vocab, request.tokens_[static_cast<size_t>(row.position + 1)],
                     request.options_.prompt_logprobs, scratch,
                     request.prompt_scores_[static_cast<size_t>(row.position)]);
      StepResult::One& one = result.ones[group.place];
      if (!one.open) return true;
      // Logits behind a draft that are no numbers end the drafts: without them, the next step would say so.
      if (!answer_row(row, logits, one, scratch)) {
        one.open = false;
        return !one.chosen.empty();
      }
    }
    return true;
  };
  const auto choose_part = [&](int thread, int threads) {
    try {
      for (auto i = static_cast<size_t>(thread); i < groups.size(); i += static_cast<size_t>(threads)) {
        if (one_group(groups[i], scratch_[static_cast<size_t>(thread)])) continue;
        const std::lock_guard<std::mutex> lock(failed);
        wrong = rows[groups[i].begin].request;
      }
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failed);
      failure = std::current_exception();
    }
  };
  if (scratch_.empty()) scratch_.resize(static_cast<size_t>(std::max(threads(), 1)));
  profile_.start();
  if (groups.size() > 1)
    on_threads(choose_part);
  else
    choose_part(0, 1);
  profile_.mark(anyaccel::llm::Work::sample);
  if (failure) std::rethrow_exception(failure);
  if (wrong == nullptr) return;
  for (size_t i = begin; i < result.ones.size(); ++i)  // threads have found several in any order: name the first
    if (result.ones[i].chosen.empty()) {
      wrong = result.ones[i].request;
      break;
    }
  refuse_logits(*wrong, result);
}

}  // namespace anyaccel::llm
