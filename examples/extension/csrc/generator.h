// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>

namespace simd0 {

// The generator of a device that operators use when they are given none.
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator new_generator(c10::DeviceIndex index);
// The CPU generator that a generator of this device keeps its state in.
at::Generator host_generator(const at::Generator& generator);

}  // namespace simd0
