// SPDX-License-Identifier: Apache-2.0
// Which tokens a step verifies beside choosing the next ones.
#include <algorithm>
#include <utility>

#include "llm/errors.h"
#include "llm/step.h"

namespace anyaccel::llm {

void Model::set_draft(std::shared_ptr<Model> draft, DraftTranslation translation) {
  if (draft.get() == this) throw UsageError("a model cannot draft for itself: load it a second time");
  if (draft != nullptr) {
    const auto its = draft->lock();
    draft->check_ready();
    if (draft->draft_ != nullptr) throw UsageError("the draft model has a draft model itself");
    if (draft->spec_.size != spec_.size || draft->spec_.stages != spec_.stages)
      throw UsageError("the draft model is divided among " + std::to_string(draft->spec_.size * draft->spec_.stages) +
                       " ranks, the model among " + std::to_string(spec_.size * spec_.stages));
  }
  const auto held = lock();
  if (draft != nullptr && weighed_.lock() != draft) {
    model_pace_ = {};
    weighed_ = draft;
  }
  draft_ = std::move(draft);
  translation_ = std::move(translation);
}

DraftPace& Model::pace_of(const Request& request) { return request.options_.draft_model ? model_pace_ : text_pace_; }

int64_t Model::answers_only(const std::vector<Request*>& requests) {
  int64_t count = 0;
  for (const Request* request : requests) {
    if (request->finished_ != Request::Finish::no) continue;
    const bool next = request->answering() && request->cached_ >= request->prompt_ && request->pending() == 1;
    if (!next && request->ahead_.empty()) return 0;
    ++count;
  }
  return count;
}

void Model::draft(const std::vector<Request*>& requests, DraftPace::Step& step) {
  const auto count = static_cast<int64_t>(requests.size());
  if (count == 0 || 2 * count > kGemvTokens || answers_only(requests) == 0) return;
  std::vector<Request*> by_text, by_model;
  bool always = false;
  int64_t room = kGemvTokens / count - 1;
  for (Request* request : requests) {
    const int64_t own = request->draft_room(kGemvTokens / count - 1);
    always = always || request->options_.draft_always;
    room = std::min(room, own);
    if (own > 0) (request->options_.draft_model ? by_model : by_text).push_back(request);
  }
  // A pass is saved only where all answers have a token from the pass before.
  if (!always && (room == 0 || (!by_text.empty() && !by_model.empty()))) return;
  if (!by_text.empty()) draft_by_text(by_text, always);
  if (!by_model.empty()) draft_by_model(by_model, always, step);
  for (const Request* request : requests) step.width = std::max(step.width, request->drafted_);
}

int64_t Model::draft_width(const std::vector<Request*>& requests, int64_t most) {
  DraftPace& pace = pace_of(*requests.front());
  double chance = 1;
  for (const Request* request : requests) chance *= request->chance_.value(pace.prior());
  int64_t width = pace.width(static_cast<int64_t>(requests.size()), chance, most);
  // The others have measured other times.
  if (spec_.size > 1 || spec_.stages > 1) width = static_cast<int64_t>(forward_.shared(static_cast<uint64_t>(width)));
  return width;
}

void Model::draft_by_text(const std::vector<Request*>& requests, bool always) {
  const auto most = kGemvTokens / static_cast<int64_t>(requests.size()) - 1;
  std::vector<std::vector<int64_t>> drafts;
  int64_t shortest = most, longest = 0;
  for (Request* request : requests) {
    drafts.push_back(request->ngrams_.propose(request->tokens_, request->draft_room(most)));
    const auto length = static_cast<int64_t>(drafts.back().size());
    shortest = std::min(shortest, length);
    longest = std::max(longest, length);
  }
  if (longest == 0 || (shortest == 0 && !always)) return;
  const int64_t width = always ? longest : draft_width(requests, longest);
  for (size_t i = 0; i < requests.size(); ++i)
    for (const int64_t token : drafts[i])
      if (requests[i]->drafted_ < width) requests[i]->add_draft(token);
}

// The draft model's request that goes on where this one is, null where it cannot.
Request* Model::drafter_of(Request& request, int64_t most) {
  const std::vector<int64_t> tokens = translation_.to_draft ? translation_.to_draft(request.tokens_) : request.tokens_;
  const DecoderSpec& spec = draft_->spec();
  const auto length = static_cast<int64_t>(tokens.size());
  if (length == 0 || (spec.max_tokens > 0 && length + most >= spec.max_tokens)) return nullptr;
  if (std::any_of(tokens.begin(), tokens.end(), [&](int64_t token) { return token >= spec.vocab; })) return nullptr;
  if (request.drafter_ == nullptr || request.drafter_->model_ != draft_) {
    RequestOptions options;
    if (!translation_.to_draft) {  // it draws as the answer will, with the same random numbers
      options.sampling = request.options_.sampling;
      options.min_new_tokens = request.options_.min_new_tokens;
      options.end_tokens = request.options_.end_tokens;
      options.ignore_end = request.options_.ignore_end;
    }
    request.drafter_ = std::make_shared<Request>(draft_, tokens, std::move(options), nullptr, false);
  }
  request.drafter_->follow(tokens, request);
  return request.drafter_.get();
}

void Model::draft_by_model(const std::vector<Request*>& requests, bool always, DraftPace::Step& step) {
  if (draft_ == nullptr) return;
  const auto most = kGemvTokens / static_cast<int64_t>(requests.size()) - 1;
  int64_t width = most;
  for (const Request* request : requests) width = std::min(width, request->draft_room(most));
  width = always ? most : draft_width(requests, width);
  struct One {
    Request* request;
    Request* drafter;
    int64_t room;
    std::vector<int64_t> before, said;
  };
  std::vector<One> going;
  if (width > 0)
    for (Request* request : requests) {
      const int64_t room = std::min(width, request->draft_room(most));
      Request* drafter = drafter_of(*request, room);
      if (drafter != nullptr) going.push_back({request, drafter, room, drafter->tokens_, {}});
    }
  // Without a draft of each answer none of them saves anything.
  if (going.empty() || (!always && going.size() < requests.size())) return;
  const auto leave = [&] {  // these answers go on without it
    for (const One& one : going) {
      one.request->drafter_.reset();
      one.request->options_.draft_tokens = 0;
    }
  };
  try {
    std::vector<size_t> left(going.size());
    for (size_t i = 0; i < left.size(); ++i) left[i] = i;
    while (!left.empty()) {
      std::vector<Request*> drafters;
      bool reads = false;
      for (const size_t i : left) {
        drafters.push_back(going[i].drafter);
        reads = reads || going[i].drafter->pending() > 2;
      }
      const Stopwatch watch;
      const std::vector<int64_t> tokens = draft_->step(drafters);
      if (reads)
        step.reading += watch.seconds();
      else
        model_pace_.drafted(static_cast<int64_t>(drafters.size()), watch.seconds());
      std::vector<size_t> further;
      for (size_t at = 0; at < left.size(); ++at) {
        One& one = going[left[at]];
        if (tokens[at] < 0 || (!translation_.to_draft && tokens[at] >= spec_.vocab)) continue;
        one.said.push_back(tokens[at]);
        const bool ended = one.drafter->finished_ != Request::Finish::no;
        if (!ended && static_cast<int64_t>(one.said.size()) < one.room) further.push_back(left[at]);
      }
      left = std::move(further);
    }
  } catch (const OutOfCache&) {
    return leave();
  } catch (const ModelError&) {  // its logits are no numbers
    return leave();
  }
  for (One& one : going) {
    if (translation_.from_draft) one.said = translation_.from_draft(one.request->tokens_, one.before, one.said);
    for (const int64_t token : one.said) {
      if (one.request->drafted_ >= one.room || token < 0 || token >= spec_.vocab) break;
      one.request->add_draft(token);
    }
  }
}

}  // namespace anyaccel::llm
