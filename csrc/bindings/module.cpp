// SPDX-License-Identifier: Apache-2.0
// Python bindings. Tensors are passed as addresses; the Python callers check dtype, contiguity, device and size first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/comm.h"
#include "bindings/translate.h"
#include "comm/errors.h"
#include "common/cpu_features.h"
#include "common/heartbeat.h"
#include "common/process.h"
#include "common/resident.h"

namespace nb = nanobind;
using anyaccel::Heartbeat;
using anyaccel::bindings::python_class;
using anyaccel::bindings::set_error;
using anyaccel::bindings::set_system_error;
using anyaccel::comm::CommError;

namespace {

void translate(const std::exception_ptr& pending, void*) {
  try {
    std::rethrow_exception(pending);
  } catch (const CommError& error) {
    set_error(python_class(error.kind), error.what());
  } catch (const std::system_error& error) {
    set_system_error(error);
  }
}

}  // namespace

NB_MODULE(_native, m) {
  nb::register_exception_translator(translate);
  // torch keeps process groups, and with them ShmGroup, alive until after the interpreter has ended.
  nb::set_leak_warnings(false);

  m.def("cpu_features", &anyaccel::cpu_features);
  m.def("isa", [] { return anyaccel::isa_name(anyaccel::selected_isa()); });
  m.def("set_mempolicy", &anyaccel::set_mempolicy, nb::arg("mode"), nb::arg("nodes"));
  m.def("set_parent_death_signal", &anyaccel::set_parent_death_signal, nb::arg("signal"));
  m.def("resident_bytes", &anyaccel::resident_bytes);
  m.def("available_bytes", &anyaccel::available_bytes);
  m.def("release_free_memory", &anyaccel::release_free_memory, nb::call_guard<nb::gil_scoped_release>());
  m.def("set_child_subreaper", &anyaccel::set_child_subreaper, nb::arg("enabled"));

  nb::class_<Heartbeat>(m, "Heartbeat")
      .def(nb::init<int, double>(), nb::arg("socket"), nb::arg("seconds"))
      .def("stop", &Heartbeat::stop, nb::call_guard<nb::gil_scoped_release>());

  anyaccel::bindings::bind_comm(m);
  anyaccel::bindings::bind_comm_fast(m);
}
