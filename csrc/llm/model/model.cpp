// SPDX-License-Identifier: Apache-2.0
#include "llm/model/model.h"

#include <algorithm>

#include "llm/errors.h"

namespace anyaccel::llm {

Model::~Model() = default;

std::unique_lock<std::mutex> Model::lock() {
  // Before the lock is taken: in a forked child it may have been held by a thread that does not exist there.
  if (!usable())
    throw UsageError(
        "this process was forked after the model was made, and its threads are the parent's; make the model in the "
        "process that uses it");
  std::unique_lock<std::mutex> held(mutex_);
  std::vector<int> left;
  {
    const std::lock_guard<std::mutex> of_left(left_mutex_);
    left.swap(left_);
  }
  for (int sequence : left) cache().destroy(sequence);
  return held;
}

void Model::leave(int sequence) noexcept {
  if (!usable()) return;
  const std::lock_guard<std::mutex> left(left_mutex_);
  try {
    left_.push_back(sequence);
  } catch (...) {  // no memory to note its number: the sequence is freed with the model
  }
}

uint64_t Model::shared(uint64_t value) {
  const auto held = lock();
  check_ready();
  return exchange(value);
}

// --- checks

void Model::check_tokens(const int64_t* tokens, int64_t count) const {
  for (int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= spec_.vocab)
      throw UsageError("token " + std::to_string(tokens[i]) + " at position " + std::to_string(i) +
                       " is not in the vocabulary of " + std::to_string(spec_.vocab) + " tokens");
}

void Model::check_sequence(int sequence) const {
  if (!cache().exists(sequence)) throw UsageError("there is no sequence " + std::to_string(sequence));
}

void Model::check_reachable(int sequence, int64_t tokens) const {
  if (tokens < 0 || tokens > cache().length(sequence)) return;  // the cache refuses it
  const int64_t there = cache().reachable(sequence, tokens);
  if (there != tokens)
    throw UsageError("a sequence of a model with a recurrent state cannot go back to " + std::to_string(tokens) +
                     " tokens, only to " + std::to_string(there) + ": begin a new one");
}

// --- sequences

int Model::create() {
  const auto held = lock();
  return cache().create();
}

int Model::fork(int sequence, int64_t tokens) {
  const auto held = lock();
  check_sequence(sequence);
  check_reachable(sequence, tokens);
  return cache().fork(sequence, tokens);
}

void Model::truncate(int sequence, int64_t tokens) {
  const auto held = lock();
  check_sequence(sequence);
  check_reachable(sequence, tokens);
  cache().truncate(sequence, tokens);
}

void Model::destroy(int sequence) {
  const auto held = lock();
  check_sequence(sequence);
  cache().destroy(sequence);
}

int64_t Model::length(int sequence) {
  const auto held = lock();
  check_sequence(sequence);
  return cache().length(sequence);
}

// --- memory and time

size_t Model::cache_bytes_per_state() {
  const auto held = lock();
  return cache().state_bytes();
}

size_t Model::cache_bytes_per_token() {
  const auto held = lock();
  return cache().token_bytes();
}

size_t Model::cache_limit_bytes() {
  const auto held = lock();
  return cache().limit_bytes();
}

size_t Model::cache_used_bytes() {
  const auto held = lock();
  return cache().used_bytes();
}

size_t Model::cache_reserved_bytes() {
  const auto held = lock();
  return cache().reserved_bytes();
}

Profile::Entries Model::profile(bool enabled) {
  const auto held = lock();
  const Profile::Entries entries = profile_.entries;
  profile_.entries = {};
  profile_.enabled = enabled;
  return entries;
}

}  // namespace anyaccel::llm
