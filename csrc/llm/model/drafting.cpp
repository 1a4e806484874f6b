// SPDX-License-Identifier: Apache-2.0
// Which tokens a step verifies beside choosing the next ones.
#include <algorithm>
#include <utility>

#include "llm/errors.h"
#include "llm/model/step.h"

namespace anyaccel::llm {

void Model::check_head(const Model& draft, const DraftTranslation& translation) const {
  const HiddenInputsSpec& inputs = *draft.spec_.hidden_inputs;
  if (translation.to_draft || !gives_features() || spec_.stages > 1 || spec_.hidden_inputs)
    throw UsageError("a head that drafts has its model's tokens and hidden states: one stage of the native runtime");
  const int most = *std::max_element(inputs.taps.begin(), inputs.taps.end());
  if (draft.spec_.hidden > inputs.width || most > static_cast<int>(spec_.layers.size()) ||
      draft.spec_.vocab != spec_.vocab || inputs.width != static_cast<int64_t>(inputs.taps.size()) * spec_.hidden)
    throw UsageError("this head drafts for a model with other layers, another width or vocabulary");
}

void Model::set_draft(std::shared_ptr<Model> draft, DraftTranslation translation) {
  if (draft.get() == this) throw UsageError("a model cannot draft for itself: load it a second time");
  if (draft != nullptr) {
    if (!exact() || !draft->exact()) throw UsageError("only the native runtime has drafts");
    const auto its = draft->lock();
    draft->check_ready();
    if (draft->cache().state_bytes() > 0) throw UsageError("a model with a recurrent state makes no drafts");
    if (draft->draft_ != nullptr) throw UsageError("the draft model has a draft model itself");
    if (draft->spec_.size != spec_.size || draft->spec_.stages != spec_.stages)
      throw UsageError("the draft model is divided among " + std::to_string(draft->spec_.size * draft->spec_.stages) +
                       " ranks, the model among " + std::to_string(spec_.size * spec_.stages));
    if (draft->spec_.hidden_inputs) check_head(*draft, translation);
  }
  const auto held = lock();
  if (draft != nullptr && draft_of_pace_.lock() != draft) {
    const Weights::Load own = load(), its = draft->load();
    model_pace_ = {};
    model_pace_.set_cost(its.bytes / own.bytes, its.products / own.products);
    draft_of_pace_ = draft;
    draft_cost_ = its.bytes / own.bytes;
    draft_pause_ = 0;
  }
  draft_ = std::move(draft);
  translation_ = std::move(translation);
}

DraftPace& Model::pace_of(const Request& request) { return request.options_.draft_model ? model_pace_ : lookup_pace_; }

int64_t Model::answers_only(const std::vector<Request*>& requests) {
  int64_t count = 0;
  for (const Request* request : requests) {
    if (request->finished_ != Request::Finish::no) continue;
    const bool next = request->answering() && request->cached_ >= request->prompt_ && request->pending() == 1;
    if (!next && request->chosen_.empty()) return 0;
    ++count;
  }
  return count;
}

void Model::draft(const std::vector<Request*>& requests, DraftPace::Step& step) {
  const auto count = static_cast<int64_t>(requests.size());
  if (!exact() || count == 0 || 2 * count > kGemvTokens || answers_only(requests) == 0) return;
  if (cache().state_bytes() > 0 && !cache().can_checkpoint(count)) return;
  std::vector<Request*> by_lookup, by_model;
  bool always = false;
  int64_t room = kGemvTokens / count - 1;
  for (Request* request : requests) {
    const int64_t own = request->draft_room(kGemvTokens / count - 1);
    always = always || request->options_.draft_always;
    room = std::min(room, own);
    if (own > 0) (request->options_.draft_model ? by_model : by_lookup).push_back(request);
  }
  // A pass is saved only where all answers have a token from the pass before.
  if (!always && (room == 0 || (!by_lookup.empty() && !by_model.empty()))) return;
  if (!by_lookup.empty()) draft_by_lookup(by_lookup, always);
  if (!by_model.empty()) draft_by_model(by_model, always, step);
}

DraftPace::Choice Model::choose_drafts(const std::vector<Request*>& requests, int64_t most) {
  DraftPace& pace = pace_of(*requests.front());
  const bool by_model = requests.front()->options_.draft_model;
  const bool ranks = spec_.size > 1 || spec_.stages > 1;
  if (by_model && ranks && draft_pause_ > 0) {
    --draft_pause_;
    return {};
  }
  DraftPace::Batch batch{.requests = static_cast<int64_t>(requests.size()), .most = most, .chance = 1};
  batch.again.fill(1);
  batch.proven = true;
  batch.answered = batch.known = INT64_MAX;
  for (const Request* request : requests) {
    const auto length = static_cast<int64_t>(request->tokens_.size()), answered = length - request->prompt_;
    // A head has no more to read than the hidden states that are kept.
    const bool part = request->draft_from_ > 0 && !has_head();
    const int64_t readable = has_head() ? request->states_.count() : length;
    const size_t level = request->draft_level();
    const double chance = request->acceptance_.value(pace.prior(level));
    batch.chance *= chance;
    for (size_t other = 0; other < batch.again.size(); ++other) {
      const double prior = request->acceptance_.value(pace.prior(other));
      batch.again[other] *= other > level ? pace.with_more(chance, other) : std::min(chance, prior);
    }
    batch.proven = batch.proven && request->acceptance_.proven();
    batch.lost = request == requests.front() ? request->draft_lost_ : std::max(batch.lost, request->draft_lost_);
    batch.answered = std::min(batch.answered, answered);
    if (const int64_t limit = request->options_.max_new_tokens; limit > 0)
      batch.left = std::min(batch.left, limit - answered);
    if (!by_model) continue;
    batch.part = batch.part || part;
    batch.known = std::min(batch.known, length - request->draft_from_);
    const int64_t unread = request->follows(draft_) ? length - request->draft_read_to_ : readable;
    batch.tokens += part ? length : unread;
    if (batch.unread >= 0) batch.unread = request->follows(draft_) ? batch.unread + unread : -1;
  }
  const DraftPace::Choice choice = pace.choose(batch);
  if (!ranks) return choice;
  // The other ranks have measured other times. Rank 0 decides, and within its pause nothing is exchanged.
  constexpr uint64_t kByte = 256;
  const uint64_t shared =
      exchange(static_cast<uint64_t>(choice.width) +
               kByte * (static_cast<uint64_t>(choice.reads) + kByte * static_cast<uint64_t>(choice.pause)));
  if (by_model) draft_pause_ = static_cast<int64_t>(shared / kByte / kByte);
  return {static_cast<int64_t>(shared % kByte), static_cast<DraftPace::Reads>(shared / kByte % kByte)};
}

void Model::draft_by_lookup(const std::vector<Request*>& requests, bool always) {
  const auto most = kGemvTokens / static_cast<int64_t>(requests.size()) - 1;
  std::vector<std::vector<int64_t>> drafts;
  int64_t shortest = most, longest = 0;
  for (Request* request : requests) {
    request->check_guess();
    drafts.push_back(request->ngrams_.propose(request->tokens_, request->draft_room(most)));
    const auto length = static_cast<int64_t>(drafts.back().size());
    shortest = std::min(shortest, length);
    longest = std::max(longest, length);
  }
  const bool useful = longest > 0 && (shortest > 0 || always);
  const int64_t width = !useful ? 0 : always ? longest : choose_drafts(requests, longest).width;
  for (size_t i = 0; i < requests.size(); ++i)
    if (width == 0 && !drafts[i].empty()) requests[i]->guess(drafts[i].front());
  for (size_t i = 0; i < requests.size(); ++i)
    for (const int64_t token : drafts[i])
      if (requests[i]->drafted_ < width) requests[i]->add_draft(token);
}

// The draft model's request that goes on where this one is, null where it cannot.
Request* Model::drafter_of(Request& request, int64_t most, DraftPace::Reads reads) {
  if (has_head()) return head_of(request, most, reads);
  const auto all = static_cast<int64_t>(request.tokens_.size());
  if (reads != DraftPace::Reads::on || !request.follows(draft_)) {
    // Its drafts are others then.
    if (request.draft_from_ > 0 && reads != DraftPace::Reads::on) request.acceptance_ = {};
    request.draft_from_ = DraftPace::is_end(reads) ? std::max<int64_t>(all - DraftPace::end_tokens(reads), 0) : 0;
  }
  std::vector<int64_t> tokens(request.tokens_.begin() + request.draft_from_, request.tokens_.end());
  if (translation_.to_draft) tokens = translation_.to_draft(tokens);
  const DecoderSpec& spec = draft_->spec();
  const auto length = static_cast<int64_t>(tokens.size());
  if (length == 0 || (spec.max_tokens > 0 && length + most >= spec.max_tokens)) return nullptr;
  if (std::any_of(tokens.begin(), tokens.end(), [&](int64_t token) { return token >= spec.vocab; })) return nullptr;
  make_drafter(request, tokens).follow(tokens, request, request.draft_from_);
  request.draft_read_to_ = static_cast<int64_t>(request.tokens_.size());
  return request.drafter_.get();
}

Request& Model::make_drafter(Request& request, const std::vector<int64_t>& tokens) {
  if (request.follows(draft_)) return *request.drafter_;
  RequestOptions options;
  if (!translation_.to_draft) {  // it draws as the answer will, with the same random numbers
    options.sampling = request.options_.sampling;
    options.min_new_tokens = request.options_.min_new_tokens;
    options.end_tokens = request.options_.end_tokens;
    options.ignore_end = request.options_.ignore_end;
  }
  request.drafter_ = std::make_shared<Request>(draft_, tokens, std::move(options), nullptr, false);
  return *request.drafter_;
}

// A head reads a token with the hidden states of the token before it: its text begins with the second one. What it
// read with its own hidden states, of tokens that it drafted, it reads again with the model's.
Request* Model::head_of(Request& request, int64_t most, DraftPace::Reads reads) {
  const auto all = static_cast<int64_t>(request.tokens_.size());
  const HiddenStates& states = request.states_;
  if (states.count() == 0 || states.end() != all - 1) return nullptr;
  int64_t from = request.draft_from_;
  if (reads != DraftPace::Reads::on || !request.follows(draft_)) {
    from = DraftPace::is_end(reads) ? std::max<int64_t>(all - 1 - DraftPace::end_tokens(reads), 0) : 0;
    from = std::max(from, states.begin());
    request.drafter_.reset();
  }
  const int64_t context = draft_->spec().max_tokens;
  for (;;) {
    const std::vector<int64_t> tokens(request.tokens_.begin() + from + 1, request.tokens_.end());
    if (context > 0 && static_cast<int64_t>(tokens.size()) + most >= context) return nullptr;
    make_drafter(request, tokens).follow(tokens, request, from + 1);
    if (from + request.drafter_->cached_ >= states.begin()) break;
    request.drafter_.reset();  // some of what it would read on with is not kept any more
    from = states.begin();
  }
  Request& drafter = *request.drafter_;
  for (int64_t position = from + drafter.cached_; position < all - 1; ++position)
    drafter.states_.put(position - from, states.at(position), draft_->spec().hidden_inputs->width);
  drafter.sure_ = all - 1 - from;
  request.draft_from_ = from;
  request.draft_read_to_ = all;
  return &drafter;
}

std::vector<int> Model::taps_of(const Request& request) const {
  if (spec_.hidden_inputs) return {spec_.hidden_inputs->own_tap};
  const bool drafts = has_head() && request.options_.draft_model && request.options_.draft_tokens > 0;
  return drafts ? draft_->spec_.hidden_inputs->taps : std::vector<int>();
}

std::optional<double> Model::draft_cost() {
  const auto held = lock();
  return draft_ == nullptr ? std::nullopt : std::optional(draft_cost_);
}

bool Model::draft_can_pay() {
  const auto held = lock();
  return draft_ != nullptr && model_pace_.can_pay();
}

std::pair<int64_t, int64_t> Model::draft_work() {
  const auto held = lock();
  return {draft_read_, draft_passes_};
}

void Model::draft_by_model(const std::vector<Request*>& requests, bool always, DraftPace::Step& step) {
  if (draft_ == nullptr) return;
  const auto most = kGemvTokens / static_cast<int64_t>(requests.size()) - 1;
  int64_t width = most;
  for (const Request* request : requests) width = std::min(width, request->draft_room(most));
  DraftPace::Choice choice{most};
  if (!always)
    choice = choose_drafts(requests, width);
  else if (requests.front()->options_.draft_end)
    choice.reads = DraftPace::Reads::end;
  width = choice.width;
  struct One {
    Request* request;
    Request* drafter;
    int64_t room;
    std::vector<int64_t> before, drafts;
  };
  std::vector<One> going;
  const Stopwatch all;
  if (width > 0)
    for (Request* request : requests) {
      const int64_t room = std::min(width, request->draft_room(most));
      Request* drafter = drafter_of(*request, room, choice.reads);
      if (drafter != nullptr) going.push_back({request, drafter, room, drafter->tokens_, {}});
    }
  // Without a draft of each answer none of them saves anything.
  if (going.empty() || (!always && going.size() < requests.size())) {
    step.reading += all.seconds();
    return;
  }
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
      int64_t read = 0;
      for (const size_t i : left) {
        drafters.push_back(going[i].drafter);
        reads = reads || going[i].drafter->pending() > (has_head() ? kGemvTokens : 2);
        read += going[i].drafter->pending();
      }
      const Stopwatch watch;
      const std::vector<int64_t> tokens = draft_->step(drafters);
      draft_read_ += read;
      ++draft_passes_;
      (reads ? step.reading : step.drafting) += watch.seconds();
      if (reads)
        model_pace_.read(read, watch.seconds());
      else
        ++step.passes;
      std::vector<size_t> further;
      for (size_t at = 0; at < left.size(); ++at) {
        One& one = going[left[at]];
        if (tokens[at] < 0 || (!translation_.to_draft && tokens[at] >= spec_.vocab)) continue;
        one.drafts.push_back(tokens[at]);
        const bool ended = one.drafter->finished_ != Request::Finish::no;
        if (!ended && static_cast<int64_t>(one.drafts.size()) < one.room) further.push_back(left[at]);
      }
      left = std::move(further);
    }
  } catch (const OutOfCache&) {
    return leave();
  } catch (const ModelError&) {  // its logits are no numbers
    return leave();
  }
  for (One& one : going) {
    if (translation_.from_draft) one.drafts = translation_.from_draft(one.request->tokens_, one.before, one.drafts);
    for (const int64_t token : one.drafts) {
      if (one.request->drafted_ >= one.room || token < 0 || token >= spec_.vocab) break;
      one.request->add_draft(token);
    }
  }
  // The text of tokens takes its time too: that of many when it is read, else that of a few behind each pass.
  const double beside = all.seconds() - step.reading - step.drafting;
  (step.reading > 0 ? step.reading : step.drafting) += beside;
  if (step.passes > 0)
    model_pace_.drafted(static_cast<int64_t>(going.size()), step.drafting / static_cast<double>(step.passes));
}

}  // namespace anyaccel::llm
