// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace anyaccel::llm {

// What the caller asked for cannot be right. The bindings turn both into their Python classes.
struct UsageError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The model, its weights or what it computed is at fault.
struct ModelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace anyaccel::llm
