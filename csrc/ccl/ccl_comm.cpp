// SPDX-License-Identifier: Apache-2.0
// oneCCL's C++ interface as plain C functions, for ctypes (anyaccel/comm/ccl.py).
//
// Built on the machine that uses it, against the headers and the library of PyPI's oneccl-cpu-devel and oneccl-cpu.
// An operation is started and then asked for: nothing here waits longer than its caller allows.
//
// oneCCL works without a thread of its own here (CCL_WORKER_OFFLOAD=0): asking whether an operation is complete is
// what carries it on. So calls must not overlap, which the caller's lock sees to.
#include <sched.h>
#include <string.h>

#include <chrono>
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>
#include <string>
#include <utility>
#include <vector>

namespace {

thread_local std::string last_error;

using Kvs = ccl::shared_ptr_class<ccl::kvs>;

enum class Operation : int {
  all_reduce = 0,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  send,
  recv,
  barrier
};

// Runs `body` and returns what it does; nullptr, and the reason kept, when it throws.
template <class Body>
auto guarded(Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an exception of an unknown kind";
  }
  return nullptr;
}

void pause_briefly(int turn) {
  // The peers may need this very core.
  if (turn % 64 == 63) sched_yield();
}

}  // namespace

extern "C" {

const char anyaccel_variant[] = ANYACCEL_VARIANT;

// What went wrong in the last call of this thread that failed.
const char* ccl_last_error() { return last_error.c_str(); }

// "2021.16.2" of the library that runs.
const char* ccl_version() {
  thread_local std::string text;
  const auto* found = guarded([&] {
    ccl::init();
    const auto version = ccl::get_library_version();
    text = std::to_string(version.major) + "." + std::to_string(version.minor) + "." + std::to_string(version.update);
    return &text;
  });
  return found ? found->c_str() : nullptr;
}

size_t ccl_address_bytes() { return ccl::kvs::address_max_size; }

// A new key-value store, whose address is written to `address`.
void* ccl_new_kvs(char* address) {
  return guarded([&]() -> void* {
    ccl::init();
    auto kvs = std::make_unique<Kvs>(ccl::create_main_kvs());
    const auto found = (*kvs)->get_address();
    memcpy(address, found.data(), found.size());
    return kvs.release();
  });
}

void* ccl_join_kvs(const char* address) {
  return guarded([&]() -> void* {
    ccl::init();
    ccl::kvs::address_type found;
    memcpy(found.data(), address, found.size());
    return new Kvs(ccl::create_kvs(found));
  });
}

void ccl_free_kvs(void* kvs) { delete static_cast<Kvs*>(kvs); }

// Blocks until all ranks have come: the caller has seen that they will.
void* ccl_new_communicator(void* kvs, int size, int rank) {
  return guarded(
      [&]() -> void* { return new ccl::communicator(ccl::create_communicator(size, rank, *static_cast<Kvs*>(kvs))); });
}

void ccl_free_communicator(void* communicator) { delete static_cast<ccl::communicator*>(communicator); }

// Starts an operation. `count` is in elements: of the tensor (all_reduce, broadcast, reduce, send, recv), of what this
// rank gives (all_gather) or gets (reduce_scatter). all_gather takes `recv_counts`, all_to_all both. `peer` is the root
// or the other rank. Returns the operation, to be freed by ccl_free; nullptr when it cannot be started.
void* ccl_start(void* communicator, int operation, const void* send, void* recv, size_t count,
                const size_t* send_counts, const size_t* recv_counts, int datatype, int reduction, int peer) {
  return guarded([&]() -> void* {
    const auto& comm = *static_cast<ccl::communicator*>(communicator);
    const auto type = static_cast<ccl::datatype>(datatype);
    const auto op = static_cast<ccl::reduction>(reduction);
    const auto counts = [&](const size_t* first) { return ccl::vector_class<size_t>(first, first + comm.size()); };
    const auto started = [&]() -> ccl::event {
      switch (static_cast<Operation>(operation)) {
        case Operation::all_reduce:
          return ccl::allreduce(send, recv, count, type, op, comm);
        case Operation::broadcast:
          return ccl::broadcast(recv, count, type, peer, comm);
        case Operation::reduce:
          return ccl::reduce(send, recv, count, type, op, peer, comm);
        case Operation::all_gather:
          return ccl::allgatherv(send, count, recv, counts(recv_counts), type, comm);
        case Operation::reduce_scatter:
          return ccl::reduce_scatter(send, recv, count, type, op, comm);
        case Operation::all_to_all:
          return ccl::alltoallv(send, counts(send_counts), recv, counts(recv_counts), type, comm);
        case Operation::send:
          return ccl::send(const_cast<void*>(send), count, type, peer, comm);
        case Operation::recv:
          return ccl::recv(recv, count, type, peer, comm);
        case Operation::barrier:
          return ccl::barrier(comm);
      }
      throw ccl::exception("no such operation");
    };
    return new ccl::event(started());
  });
}

// Carries an operation on for at most `seconds`. 1: it is complete; 0: not yet; -1: it failed.
int ccl_wait(void* operation, double seconds) {
  const int* answer = guarded([&]() -> const int* {
    static const int done = 1, not_yet = 0;
    auto& event = *static_cast<ccl::event*>(operation);
    using clock = std::chrono::steady_clock;
    const auto end = clock::now() + std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(seconds));
    for (int turn = 0;; turn++) {
      if (event.test()) return &done;
      if (turn % 16 == 15 && clock::now() >= end) return &not_yet;
      pause_briefly(turn);
    }
  });
  return answer ? *answer : -1;
}

void ccl_free(void* operation) { delete static_cast<ccl::event*>(operation); }

}  // extern "C"
