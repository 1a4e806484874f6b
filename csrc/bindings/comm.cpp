// SPDX-License-Identifier: Apache-2.0
// Bindings of the collectives. Tensors are passed as addresses; the Python callers (comm/) check dtype, contiguity,
// device and size first.
#include "bindings/comm.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings/translate.h"
#include "comm/messages.h"
#include "comm/rank_watch.h"
#include "comm/shm_group.h"

namespace anyaccel::bindings {
namespace {

using comm::DType;
using comm::RankWatch;
using comm::ReduceOp;
using comm::ShmGroup;
using Addresses = std::vector<uintptr_t>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }
DType dtype_of(int code) { return static_cast<DType>(code); }
ReduceOp op_of(int code) { return static_cast<ReduceOp>(code); }

// Converts the addresses, one for each rank; an empty list stands for a rank without data.
std::vector<void*> pointers(const ShmGroup& group, const Addresses& addresses, bool needed = true) {
  if (addresses.size() != static_cast<size_t>(group.size()) && (needed || !addresses.empty()))
    throw std::invalid_argument(std::to_string(addresses.size()) + " tensors for " + std::to_string(group.size()) +
                                " ranks");
  std::vector<void*> result;
  for (uintptr_t address : addresses) result.push_back(pointer(address));
  return result;
}

const void* const* constant(const std::vector<void*>& all) { return all.data(); }

void check_counts(const ShmGroup& group, const std::vector<size_t>& counts) {
  if (counts.size() != static_cast<size_t>(group.size()))
    throw std::invalid_argument(std::to_string(counts.size()) + " sizes for " + std::to_string(group.size()) +
                                " ranks");
}

void* give_up_lock() { return PyEval_SaveThread(); }
void take_lock_again(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

}  // namespace

void bind_comm(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<ShmGroup>(m, "ShmGroup", nb::is_weak_referenceable())
      .def(
          "__init__",
          [](ShmGroup* self, int rank, int size, size_t buffer_bytes, double timeout_s, bool memfd,
             size_t mailbox_bytes) {
            const auto kind = memfd ? comm::ShmSegment::Kind::memfd : comm::ShmSegment::Kind::posix;
            new (self) ShmGroup(rank, size, buffer_bytes, timeout_s, kind, mailbox_bytes);
            self->set_interrupt_check(check_signals);
            self->set_idle_hooks({give_up_lock, take_lock_again});
          },
          nb::arg("rank"), nb::arg("size"), nb::arg("buffer_bytes"), nb::arg("timeout_s"), nb::arg("memfd") = false,
          nb::arg("mailbox_bytes") = 0)
      .def_prop_ro("name", &ShmGroup::name)
      .def_prop_rw("timeout", &ShmGroup::timeout, &ShmGroup::set_timeout)
      .def("add_waiting", &ShmGroup::add_waiting, nb::arg("calls"))
      .def("connect", nb::overload_cast<const std::vector<std::string>&, const std::vector<int>&>(&ShmGroup::connect),
           nb::arg("names"), nb::arg("pids"))
      .def("unlink", &ShmGroup::unlink)
      .def(
          "add_symmetric",
          [](ShmGroup& self, uint16_t id, const Addresses& addresses, size_t bytes) {
            std::vector<char*> bases;
            for (uintptr_t address : addresses) bases.push_back(static_cast<char*>(pointer(address)));
            self.add_symmetric(id, bases, bytes);
          },
          nb::arg("id"), nb::arg("addresses"), nb::arg("bytes"), no_gil)
      .def("remove_symmetric", &ShmGroup::remove_symmetric, nb::arg("id"), no_gil)
      .def("abort", &ShmGroup::abort)
      .def("leave", &ShmGroup::leave)
      .def(
          "all_reduce",
          [](ShmGroup& self, uintptr_t address, size_t count, int dtype, int op, int caller_dtype) {
            self.all_reduce(pointer(address), count, dtype_of(dtype), op_of(op), false, dtype_of(caller_dtype));
          },
          nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("caller_dtype") = 0, no_gil)
      .def(
          "reduce",
          [](ShmGroup& self, uintptr_t in, uintptr_t out, size_t count, int dtype, int op, int root, int caller_dtype) {
            self.reduce(pointer(in), pointer(out), count, dtype_of(dtype), op_of(op), root, dtype_of(caller_dtype));
          },
          nb::arg("input"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"), nb::arg("root"),
          nb::arg("caller_dtype") = 0, no_gil)
      .def(
          "reduce_scatter",
          [](ShmGroup& self, const Addresses& ins, uintptr_t out, size_t count, int dtype, int op, int caller_dtype) {
            const auto inputs = pointers(self, ins);
            self.reduce_scatter(constant(inputs), pointer(out), count, dtype_of(dtype), op_of(op),
                                dtype_of(caller_dtype));
          },
          nb::arg("inputs"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("op"),
          nb::arg("caller_dtype") = 0, no_gil)
      .def(
          "broadcast",
          [](ShmGroup& self, uintptr_t address, size_t count, int dtype, int root) {
            self.broadcast(pointer(address), count, dtype_of(dtype), root);
          },
          nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), no_gil)
      .def(
          "all_gather",
          [](ShmGroup& self, uintptr_t in, const Addresses& outs, const std::vector<size_t>& counts, int dtype) {
            check_counts(self, counts);
            self.all_gather(pointer(in), pointers(self, outs).data(), counts.data(), dtype_of(dtype));
          },
          nb::arg("input"), nb::arg("outputs"), nb::arg("counts"), nb::arg("dtype"), no_gil)
      .def(
          "gather",
          [](ShmGroup& self, uintptr_t in, const Addresses& outs, size_t count, int dtype, int root) {
            self.gather(pointer(in), pointers(self, outs, self.rank() == root).data(), count, dtype_of(dtype), root);
          },
          nb::arg("input"), nb::arg("outputs"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), no_gil)
      .def(
          "scatter",
          [](ShmGroup& self, const Addresses& ins, uintptr_t out, size_t count, int dtype, int root) {
            const auto inputs = pointers(self, ins, self.rank() == root);
            self.scatter(constant(inputs), pointer(out), count, dtype_of(dtype), root);
          },
          nb::arg("inputs"), nb::arg("output"), nb::arg("count"), nb::arg("dtype"), nb::arg("root"), no_gil)
      .def(
          "all_to_all",
          [](ShmGroup& self, const Addresses& ins, const std::vector<size_t>& in_counts, const Addresses& outs,
             const std::vector<size_t>& out_counts, int dtype) {
            check_counts(self, in_counts);
            check_counts(self, out_counts);
            const auto inputs = pointers(self, ins);
            self.all_to_all(constant(inputs), in_counts.data(), pointers(self, outs).data(), out_counts.data(),
                            dtype_of(dtype));
          },
          nb::arg("inputs"), nb::arg("input_counts"), nb::arg("outputs"), nb::arg("output_counts"), nb::arg("dtype"),
          no_gil)
      .def(
          "all_reduce_add_rms_norm",
          [](ShmGroup& self, uintptr_t partial, uintptr_t residual, uintptr_t weight, float eps, size_t rows,
             size_t width, int dtype) {
            self.all_reduce_add_rms_norm(pointer(partial), pointer(residual), pointer(weight), eps, rows, width,
                                         dtype_of(dtype));
          },
          nb::arg("partial"), nb::arg("residual"), nb::arg("weight"), nb::arg("eps"), nb::arg("rows"), nb::arg("width"),
          nb::arg("dtype"), no_gil)
      .def(
          "barrier", [](ShmGroup& self, double timeout_s) { self.barrier(timeout_s); }, nb::arg("timeout_s") = 0.0,
          no_gil);

  nb::class_<RankWatch::Seen>(m, "Seen")
      .def_ro("beats", &RankWatch::Seen::beats)
      .def_ro("works", &RankWatch::Seen::works)
      .def_ro("silent_s", &RankWatch::Seen::silent_s)
      .def_ro("left_s", &RankWatch::Seen::left_s);

  nb::class_<RankWatch>(m, "RankWatch", nb::is_weak_referenceable())
      .def(nb::init<int, int, const std::vector<std::string>&, double>(), nb::arg("rank"), nb::arg("size"),
           nb::arg("addresses"), nb::arg("beat_s"))
      .def_prop_ro("endpoint", &RankWatch::endpoint)
      .def(
          "connect",
          [](RankWatch& self, const std::vector<std::string>& endpoints, double timeout_s) {
            self.connect(endpoints, timeout_s, check_signals);
          },
          nb::arg("endpoints"), nb::arg("timeout_s"), no_gil)
      .def("name", &RankWatch::name, nb::arg("rank"))
      .def("look", &RankWatch::look)
      .def("arrive", &RankWatch::arrive, nb::arg("place"))
      .def("arrived", &RankWatch::arrived, nb::arg("rank"), nb::arg("place"))
      .def("close", &RankWatch::close, no_gil);

  // The symmetric memory of one rank, and the addresses of its peers' memory.
  nb::class_<comm::ShmSegment>(m, "ShmSegment")
      .def_static(
          "create",
          [](size_t bytes, bool memfd) {
            return comm::ShmSegment::create(bytes,
                                            memfd ? comm::ShmSegment::Kind::memfd : comm::ShmSegment::Kind::posix);
          },
          nb::arg("bytes"), nb::arg("memfd"))
      .def_static("open", &comm::ShmSegment::open, nb::arg("name"), nb::arg("bytes"))
      .def("unlink", &comm::ShmSegment::unlink)
      .def_prop_ro("name", &comm::ShmSegment::name)
      .def_prop_ro("bytes", &comm::ShmSegment::bytes)
      .def_prop_ro("address", [](const comm::ShmSegment& self) { return reinterpret_cast<uintptr_t>(self.data()); });

  nb::class_<comm::Message>(m, "Message")
      .def_prop_ro("done", [](const comm::Message& self) { return self.done.load(std::memory_order_acquire); })
      .def_prop_ro("peer", [](const comm::Message& self) { return self.peer; });
  nb::class_<comm::Messages>(m, "Messages")
      .def(nb::init<ShmGroup&>(), nb::arg("group"), nb::keep_alive<1, 2>())
      .def(
          "send",
          [](comm::Messages& self, uintptr_t address, size_t count, int dtype, int peer, int tag) {
            return self.send(pointer(address), count, dtype_of(dtype), peer, tag);
          },
          nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("peer"), nb::arg("tag"), no_gil)
      .def(
          "receive",
          [](comm::Messages& self, uintptr_t address, size_t count, int dtype, int peer, int tag) {
            return self.receive(pointer(address), count, dtype_of(dtype), peer, tag);
          },
          nb::arg("address"), nb::arg("count"), nb::arg("dtype"), nb::arg("peer"), nb::arg("tag"), no_gil)
      .def("wait", &comm::Messages::wait, nb::arg("message"), no_gil)
      .def("pump", &comm::Messages::pump, nb::arg("seconds"), no_gil)
      .def_static("bytes_a_rank", &comm::Messages::bytes_a_rank, nb::arg("size"), nb::arg("pair_bytes"));
}

}  // namespace anyaccel::bindings
