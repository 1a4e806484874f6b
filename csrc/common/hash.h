// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace anyaccel {

// FNV-1a, over whole numbers: tells ranks whether they do the same.
class Fnv1a {
 public:
  void mix(int64_t value) { hash_ = (hash_ ^ static_cast<uint64_t>(value)) * 1099511628211u; }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 14695981039346656037u;
};

}  // namespace anyaccel
