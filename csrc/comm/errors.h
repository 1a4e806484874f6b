// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

namespace anyaccel::comm {

// Thrown when a collective could not be completed. The bindings translate each kind to its Python class.
struct CommError : std::runtime_error {
  enum class Kind { broken, peer_lost, timeout };
  CommError(Kind k, const std::string& what) : std::runtime_error(what), kind(k) {}
  Kind kind;
};

inline std::string seconds_text(double value) {
  char text[32];
  snprintf(text, sizeof text, "%.3g s", value);
  return text;
}

}  // namespace anyaccel::comm
