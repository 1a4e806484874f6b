// SPDX-License-Identifier: Apache-2.0
// The stages of a decoder whose layers are divided among ranks (pipeline parallelism; Huang et al., "GPipe", 2019).
// Each stage takes the residual of a run's tokens from the stage before it, computes its layers, and hands the residual
// on; the last one has the head. So several runs are under way at once, each in another stage.
//
// With tensor parallelism inside the stages, rank r of each stage is a member of a pipeline of its own: all ranks of a
// stage have the same residual. Ranks are numbered stage by stage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/shm_segment.h"
#include "comm/stage_links.h"
#include "llm/decoder/spec.h"
#include "llm/decoder/workspace.h"

namespace anyaccel::llm {

class Stages {
 public:
  // `most_tokens`: of a run. `hosts`: of all ranks; empty for one host.
  Stages(const DecoderSpec& spec, int64_t most_tokens, int64_t cache_pages, int64_t state_pages, double timeout_s,
         comm::ShmSegment::Kind kind, const std::vector<int>& hosts, const std::vector<std::string>& addresses);

  // What connect() needs on the other ranks: for them only.
  const std::string& name() const { return name_; }
  // With the names of all ranks. Throws UsageError when they do not fit together, comm::CommError, std::system_error.
  void connect(const std::vector<std::string>& names, const std::vector<int>& pids);
  void unlink() noexcept { links_.unlink(); }
  bool connected() const { return connected_; }
  void set_interrupt_check(const std::function<void()>& check) { links_.set_interrupt_check(check); }

  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ == count_ - 1; }
  int count() const { return count_; }
  // The smallest cache of all ranks. After connect().
  int64_t cache_pages() const { return cache_pages_; }
  int64_t state_pages() const { return state_pages_; }

  // The residual that came and that goes: rows of `hidden` floats, room for a run.
  float* in() const { return in_.get() + kLineFloats; }
  float* out() const { return out_.get() + kLineFloats; }

  // `signature`: of what is computed, the same on all stages. Throw comm::CommError and what the interrupt check
  // throws; the stages stay broken then.
  void take(uint64_t signature, int64_t tokens);
  void pass_on(uint64_t signature, int64_t tokens);
  // What the last stage has there, on all others; in the stages' order `from` the first one.
  void share(void* data, size_t bytes, bool from_first = false);
  // The same of a text, whose length the others do not know.
  void share_text(std::string& text);

  // This rank cannot go on: tells the other stages why.
  void fail(const char* why) noexcept { links_.fail(why); }

 private:
  static constexpr int64_t kLineFloats = comm::StageLinks::kLine / sizeof(float);

  const int rank_, size_, stage_, count_;
  const int64_t hidden_;
  const int64_t first_layer_, layers_;
  const uint64_t model_;
  comm::StageLinks links_;
  Buffer in_, out_;
  std::vector<char> packet_;
  std::string name_;
  int64_t cache_pages_, state_pages_;
  uint64_t shares_ = 0;
  bool connected_ = false;
};

}  // namespace anyaccel::llm
