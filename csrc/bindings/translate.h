// SPDX-License-Identifier: Apache-2.0
// Translates the exceptions of the native modules to Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <system_error>

#include "comm/errors.h"

namespace anyaccel::bindings {

namespace nb = nanobind;

inline void set_error(const char* type, const char* what) {
  PyErr_SetString(nb::module_::import_("anyaccel.errors").attr(type).ptr(), what);
}

inline const char* python_class(comm::CommError::Kind kind) {
  switch (kind) {
    case comm::CommError::Kind::peer_lost:
      return "PeerLostError";
    case comm::CommError::Kind::timeout:
      return "CommTimeoutError";
    case comm::CommError::Kind::broken:
      break;
  }
  return "CommError";
}

inline void set_system_error(const std::system_error& error) {
  // OSError(errno, text) selects the subclass, such as PermissionError.
  const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
  PyErr_SetObject(PyExc_OSError, arguments.ptr());
}

inline void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace anyaccel::bindings
