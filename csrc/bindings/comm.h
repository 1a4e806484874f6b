// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace anyaccel::bindings {

void bind_comm(nanobind::module_& m);
void bind_comm_fast(nanobind::module_& m);

}  // namespace anyaccel::bindings
