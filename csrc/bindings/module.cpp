// SPDX-License-Identifier: Apache-2.0
// Python bindings. Tensors cross as addresses; the Python callers check dtype, contiguity, device and size
// first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "comm/errors.h"
#include "comm/shm_group.h"
#include "common/cpu_features.h"
#include "common/process.h"
#include "common/resident.h"

namespace nb = nanobind;
using anyaccel::comm::CommError;
using anyaccel::comm::DType;
using anyaccel::comm::ShmGroup;

namespace {

const char* python_class(CommError::Kind kind) {
  switch (kind) {
    case CommError::Kind::peer_lost:
      return "PeerLostError";
    case CommError::Kind::timeout:
      return "CommTimeoutError";
    case CommError::Kind::broken:
      break;
  }
  return "CommError";
}

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const CommError& error) {
    const nb::object type = nb::module_::import_("anyaccel.errors").attr(python_class(error.kind));
    PyErr_SetString(type.ptr(), error.what());
  } catch (const std::system_error& error) {
    // OSError(errno, text) picks the subclass (PermissionError, ...) by itself.
    const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

void check_signals() {
  const nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(translate);

  m.def("cpu_features", &anyaccel::cpu_features);
  m.def("isa", [] { return anyaccel::isa_name(anyaccel::selected_isa()); });
  m.def("set_mempolicy", &anyaccel::set_mempolicy, nb::arg("mode"), nb::arg("nodes"));
  m.def("set_parent_death_signal", &anyaccel::set_parent_death_signal, nb::arg("signal"));
  m.def("resident_bytes", &anyaccel::resident_bytes);
  m.def("set_child_subreaper", &anyaccel::set_child_subreaper, nb::arg("enabled"));

  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<ShmGroup>(m, "ShmGroup")
      .def(
          "__init__",
          [](ShmGroup* self, int rank, int size, size_t buffer_bytes, double timeout_s) {
            new (self) ShmGroup(rank, size, buffer_bytes, timeout_s);
            self->set_interrupt_check(check_signals);
          },
          nb::arg("rank"), nb::arg("size"), nb::arg("buffer_bytes"), nb::arg("timeout_s"))
      .def_prop_ro("name", &ShmGroup::name)
      .def("connect", &ShmGroup::connect, nb::arg("names"), nb::arg("pids"))
      .def("unlink", &ShmGroup::unlink)
      .def(
          "all_reduce_sum",
          [](ShmGroup& self, uintptr_t address, size_t count, int dtype) {
            self.all_reduce_sum(reinterpret_cast<void*>(address), count, static_cast<DType>(dtype));
          },
          nb::arg("address"), nb::arg("count"), nb::arg("dtype"), no_gil)
      .def(
          "broadcast",
          [](ShmGroup& self, uintptr_t address, size_t bytes, int root) {
            self.broadcast(reinterpret_cast<void*>(address), bytes, root);
          },
          nb::arg("address"), nb::arg("bytes"), nb::arg("root"), no_gil)
      .def("barrier", &ShmGroup::barrier, no_gil);
}
