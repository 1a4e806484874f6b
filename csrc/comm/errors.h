// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace anyaccel::comm {

// A collective could not be completed. The bindings turn each kind into its Python class.
struct CommError : std::runtime_error {
  enum class Kind { broken, peer_lost, timeout };
  CommError(Kind k, const std::string& what) : std::runtime_error(what), kind(k) {}
  Kind kind;
};

}  // namespace anyaccel::comm
