// SPDX-License-Identifier: Apache-2.0
// Python bindings. Tensors cross as addresses; the Python callers check dtype, contiguity, device and size
// first.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/translate.h"
#include "comm/errors.h"
#include "comm/shm_group.h"
#include "common/cpu_features.h"
#include "common/process.h"
#include "common/resident.h"

namespace nb = nanobind;
using anyaccel::bindings::check_signals;
using anyaccel::bindings::python_class;
using anyaccel::bindings::set_error;
using anyaccel::bindings::set_system_error;
using anyaccel::comm::CommError;
using anyaccel::comm::DType;
using anyaccel::comm::ShmGroup;

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

  m.def("cpu_features", &anyaccel::cpu_features);
  m.def("isa", [] { return anyaccel::isa_name(anyaccel::selected_isa()); });
  m.def("set_mempolicy", &anyaccel::set_mempolicy, nb::arg("mode"), nb::arg("nodes"));
  m.def("set_parent_death_signal", &anyaccel::set_parent_death_signal, nb::arg("signal"));
  m.def("resident_bytes", &anyaccel::resident_bytes);
  m.def("release_free_memory", &anyaccel::release_free_memory, nb::call_guard<nb::gil_scoped_release>());
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
