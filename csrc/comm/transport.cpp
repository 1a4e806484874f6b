// SPDX-License-Identifier: Apache-2.0
#include "comm/transport.h"

#include <dlfcn.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "comm/errors.h"

namespace anyaccel::comm {
namespace {

[[noreturn]] void fail(const std::string& text) { throw CommError(CommError::Kind::broken, text); }

class Library {
 public:
  Library(const std::string& path, const char* variable) : path_(path) {
    // Global: both look for parts of themselves among what is loaded.
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle_ == nullptr)
      fail(std::string("ANYACCEL_BETWEEN_HOSTS=") + variable + ": the library cannot be loaded: " + dlerror());
  }
  void* find(const char* name) const { return dlsym(handle_, name); }
  template <class Function>
  void get(Function& function, const char* name) const {
    function = reinterpret_cast<Function>(find(name));
    if (function == nullptr) fail(path_ + " has no " + name);
  }

 private:
  const std::string path_;
  void* handle_;
};

void set_kind(Transport::Endpoint& endpoint, const char* kind) {
  std::strncpy(endpoint.kind, kind, sizeof endpoint.kind - 1);
}

// --- MPI

// Handles are int in one ABI (MPICH, Intel MPI, MVAPICH: mpich.org/abi) and pointers in the other (Open MPI); both fit
// here, since the calling conventions of x86-64 and arm64 pass either in a register of 64 bits, whose upper half a
// function that takes an int does not look at. A request is written into the first bytes of such a handle.
using Handle = intptr_t;

class Mpi {
 public:
  explicit Mpi(const std::string& path) : library_(path, "mpi") {
    library_.get(initialized_, "MPI_Initialized");
    library_.get(init_thread_, "MPI_Init_thread");
    library_.get(finalize_, "MPI_Finalize");
    library_.get(comm_rank_, "MPI_Comm_rank");
    library_.get(comm_size_, "MPI_Comm_size");
    library_.get(set_errhandler_, "MPI_Comm_set_errhandler");
    library_.get(isend_, "MPI_Isend");
    library_.get(irecv_, "MPI_Irecv");
    library_.get(test_, "MPI_Test");
    library_.get(error_string_, "MPI_Error_string");
    Handle errors_return = 0x54000001;
    if (void* open_mpi = library_.find("ompi_mpi_comm_world")) {
      world_ = reinterpret_cast<Handle>(open_mpi);
      byte_ = reinterpret_cast<Handle>(library_.find("ompi_mpi_byte"));
      errors_return = reinterpret_cast<Handle>(library_.find("ompi_mpi_errors_return"));
      ignore_status_ = nullptr;
    }
    int was_started = 0, has = 0;
    initialized_(&was_started);
    if (was_started == 0) {
      check(init_thread_(nullptr, nullptr, kMultiple, &has), "MPI_Init_thread");
      started_here_ = true;
      if (has < kSerialized) fail(path + " was built without threads: MPI_THREAD_SERIALIZED is needed");
    }
    check(set_errhandler_(world_, errors_return), "MPI_Comm_set_errhandler");
    check(comm_rank_(world_, &rank_), "MPI_Comm_rank");
    check(comm_size_(world_, &size_), "MPI_Comm_size");
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  void send(const void* data, int bytes, int to, int tag, Handle& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check(isend_(data, bytes, byte_, to, tag, world_, &request), "MPI_Isend");
  }
  void receive(void* data, int bytes, int from, int tag, Handle& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check(irecv_(data, bytes, byte_, from, tag, world_, &request), "MPI_Irecv");
  }
  bool is_done(Handle& request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int flag = 0;
    check(test_(&request, &flag, ignore_status_), "MPI_Test");
    return flag != 0;
  }
  void keep_running() noexcept { started_here_ = false; }
  void end() noexcept {
    if (started_here_) finalize_();
    started_here_ = false;
  }

 private:
  static constexpr int kSerialized = 2, kMultiple = 3;

  void check(int code, const char* what) const {
    if (code == 0) return;
    char text[4096] = {};
    int length = 0;
    if (error_string_(code, text, &length) != 0) text[0] = 0;
    fail(std::string(what) + " failed: " + text);
  }

  const Library library_;
  std::mutex mutex_;
  Handle world_ = 0x44000000, byte_ = 0x4c00010d;
  void* ignore_status_ = reinterpret_cast<void*>(1);
  int rank_ = 0, size_ = 0;
  bool started_here_ = false;
  int (*initialized_)(int*);
  int (*init_thread_)(int*, char***, int, int*);
  int (*finalize_)();
  int (*comm_rank_)(Handle, int*);
  int (*comm_size_)(Handle, int*);
  int (*set_errhandler_)(Handle, Handle);
  int (*isend_)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv_)(void*, int, Handle, int, int, Handle, Handle*);
  int (*test_)(Handle*, int*, void*);
  int (*error_string_)(int, char*, int*);
};

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(Mpi& mpi) : mpi_(mpi) {}

  Endpoint endpoint(int) override {
    static std::mutex mutex;
    static uint32_t made = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    Endpoint endpoint{};
    set_kind(endpoint, "mpi");
    endpoint.rank = mpi_.rank();
    endpoint.tag = 1 + made++ % 30'000;  // MPI has 32,767 for certain
    return endpoint;
  }

  void connect(int host, const std::vector<Endpoint>& endpoints) override {
    host_ = host;
    tag_ = static_cast<int>(endpoints[0].tag);
    for (const Endpoint& endpoint : endpoints) {
      if (endpoint.rank < 0 || endpoint.rank >= mpi_.size())
        fail("the ranks of several jobs of MPI cannot share a model");
      ranks_.push_back(endpoint.rank);
    }
    sent_.resize(endpoints.size());
    came_.resize(endpoints.size());
  }

  void begin(const Bytes& own, std::vector<Bytes>& others) override {
    if (own.size() > INT_MAX) fail("more than 2 GiB of one exchange do not go through MPI");
    for (size_t host = 0; host < ranks_.size(); ++host) {
      if (static_cast<int>(host) == host_) continue;
      came_[host] = {0, false};
      mpi_.receive(others[host].data(), static_cast<int>(others[host].size()), ranks_[host], tag_, came_[host].handle);
      under_way_ = true;
    }
    for (size_t host = 0; host < ranks_.size(); ++host) {
      if (static_cast<int>(host) == host_) continue;
      sent_[host] = {0, false};
      mpi_.send(own.data(), static_cast<int>(own.size()), ranks_[host], tag_, sent_[host].handle);
    }
  }

  bool done() override {
    bool all = true;
    for (size_t host = 0; host < ranks_.size(); ++host)
      for (Request* request : {&sent_[host], &came_[host]}) {
        if (!request->done) request->done = mpi_.is_done(request->handle);
        all = all && request->done;
      }
    under_way_ = !all;
    return all;
  }

  bool waits_for(int host) const override {
    const auto at = static_cast<size_t>(host);
    return !sent_[at].done || !came_[at].done;
  }

  void give_up() noexcept override {
    if (under_way_) mpi_.keep_running();  // MPI_Finalize would wait for what is under way
  }

 private:
  struct Request {
    Handle handle = 0;
    bool done = true;
  };
  Mpi& mpi_;
  int host_ = 0, tag_ = 0;
  bool under_way_ = false;
  std::vector<int> ranks_;
  std::vector<Request> sent_, came_;
};

// --- oneCCL, through csrc/ccl

struct Ccl {
  explicit Ccl(const std::string& path) : library(path, "ccl") {
    library.get(last_error, "ccl_last_error");
    library.get(address_bytes, "ccl_address_bytes");
    library.get(new_kvs, "ccl_new_kvs");
    library.get(join_kvs, "ccl_join_kvs");
    library.get(free_kvs, "ccl_free_kvs");
    library.get(new_communicator, "ccl_new_communicator");
    library.get(free_communicator, "ccl_free_communicator");
    library.get(start, "ccl_start");
    library.get(wait, "ccl_wait");
    library.get(free, "ccl_free");
  }
  [[noreturn]] void raise(const char* what) const {
    const char* text = last_error();
    fail(std::string("oneCCL: ") + what + ": " + (text == nullptr || *text == 0 ? "no reason was given" : text));
  }

  // Calls must not overlap. Throws where one is under way that will not end.
  std::unique_lock<std::mutex> lock() {
    if (stuck) fail("oneCCL still waits for a host that an earlier model has given up; start the job anew");
    return std::unique_lock<std::mutex>(mutex);
  }

  const Library library;
  std::mutex mutex;
  std::atomic<bool> stuck = false;
  const char* (*last_error)();
  size_t (*address_bytes)();
  void* (*new_kvs)(char*);
  void* (*join_kvs)(const char*);
  void (*free_kvs)(void*);
  void* (*new_communicator)(void*, int, int);
  void (*free_communicator)(void*);
  void* (*start)(void*, int, const void*, void*, size_t, const size_t*, const size_t*, int, int, int);
  int (*wait)(void*, double);
  void (*free)(void*);
};

class CclTransport : public Transport {
 public:
  explicit CclTransport(Ccl& ccl) : ccl_(ccl) {}
  ~CclTransport() override {
    if (operation_ != nullptr || connecting_) return;  // of a host that does not come: nothing of it can be freed
    const std::lock_guard<std::mutex> lock(ccl_.mutex);
    if (communicator_ != nullptr) ccl_.free_communicator(communicator_);
    if (kvs_ != nullptr) ccl_.free_kvs(kvs_);
  }

  Endpoint endpoint(int host) override {
    Endpoint endpoint{};
    set_kind(endpoint, "ccl");
    if (host != 0) return endpoint;  // all of them meet at the first one's
    if (ccl_.address_bytes() > sizeof endpoint.address) fail("oneCCL has longer addresses than are known here");
    const auto lock = ccl_.lock();
    kvs_ = ccl_.new_kvs(endpoint.address);
    if (kvs_ == nullptr) ccl_.raise("making a key-value store");
    return endpoint;
  }

  // oneCCL waits for the other hosts without a deadline, so that a thread of its own does, which is left where it is
  // when one of them does not come.
  void connect(int host, const std::vector<Endpoint>& endpoints) override {
    host_ = static_cast<size_t>(host);
    connecting_ = std::make_shared<Connecting>();
    connecting_->kvs = kvs_;
    std::thread([&ccl = ccl_, connecting = connecting_, host, hosts = static_cast<int>(endpoints.size()),
                 first = endpoints[0]] {
      try {
        const auto lock = ccl.lock();
        if (host != 0) connecting->kvs = ccl.join_kvs(first.address);
        if (connecting->kvs == nullptr) ccl.raise("joining the key-value store");
        connecting->communicator = ccl.new_communicator(connecting->kvs, hosts, host);
        if (connecting->communicator == nullptr) ccl.raise("joining the other hosts");
      } catch (...) {
        connecting->error = std::current_exception();
      }
      connecting->done = true;
    }).detach();
  }

  bool connected() override {
    if (!connecting_->done) return false;
    const auto connecting = std::move(connecting_);
    kvs_ = connecting->kvs;
    communicator_ = connecting->communicator;
    if (connecting->error) std::rethrow_exception(connecting->error);
    return true;
  }

  void give_up() noexcept override {
    if (connecting_ && !connecting_->done) ccl_.stuck = true;
  }

  void begin(const Bytes& own, std::vector<Bytes>& others) override {
    counts_.clear();
    size_t total = 0;
    for (size_t host = 0; host < others.size(); ++host) {
      counts_.push_back(host == host_ ? own.size() : others[host].size());
      total += counts_.back();
    }
    all_.resize(total);
    own_ = own;
    others_ = &others;
    const auto lock = ccl_.lock();
    operation_ = ccl_.start(communicator_, kAllGather, own_.data(), all_.data(), own_.size(), nullptr, counts_.data(),
                            kUint8, 0, 0);
    if (operation_ == nullptr) ccl_.raise("starting an operation");
  }

  bool done() override {
    const auto lock = ccl_.lock();
    const int answer = ccl_.wait(operation_, 0);
    if (answer < 0) ccl_.raise("an operation failed");
    if (answer == 0) return false;
    ccl_.free(operation_);
    operation_ = nullptr;
    const char* at = all_.data();
    for (size_t host = 0; host < counts_.size(); at += counts_[host++])
      if (host != host_) std::memcpy((*others_)[host].data(), at, counts_[host]);
    return true;
  }

  bool waits_for(int) const override { return operation_ != nullptr || connecting_; }

 private:
  struct Connecting {
    void *kvs = nullptr, *communicator = nullptr;
    std::exception_ptr error;
    std::atomic<bool> done = false;
  };
  static constexpr int kAllGather = 3, kUint8 = 1;  // of csrc/ccl, and of oneCCL's datatypes
  Ccl& ccl_;
  void *kvs_ = nullptr, *communicator_ = nullptr, *operation_ = nullptr;
  std::shared_ptr<Connecting> connecting_;  // until all hosts have
  size_t host_ = 0;
  std::vector<size_t> counts_;
  Bytes own_, all_;
  std::vector<Bytes>* others_ = nullptr;
};

// --- what has been started

// Never freed: both libraries live as long as the process.
struct Started {
  std::mutex mutex;
  std::map<std::string, Mpi*> mpi;
  std::map<std::string, Ccl*> ccl;
};

Started& started() {
  static auto* found = new Started;
  return *found;
}

bool is(const std::string& transport, const char* kind, std::string& library) {
  const size_t length = std::strlen(kind);
  if (transport.compare(0, length, kind) != 0 || transport.size() <= length || transport[length] != ':') return false;
  library = transport.substr(length + 1);
  return true;
}

}  // namespace

void start_transport(const std::string& transport) {
  Started& all = started();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::string library;
  if (is(transport, "mpi", library)) {
    if (!all.mpi.contains(library)) all.mpi[library] = new Mpi(library);
  } else if (is(transport, "ccl", library)) {
    if (!all.ccl.contains(library)) all.ccl[library] = new Ccl(library);
  } else if (!transport.empty() && transport != "tcp") {
    fail("'" + transport + "': nothing of that name carries what goes between hosts");
  }
}

std::unique_ptr<Transport> make_transport(const std::string& transport) {
  start_transport(transport);
  Started& all = started();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::string library;
  if (is(transport, "mpi", library)) return std::make_unique<MpiTransport>(*all.mpi[library]);
  if (is(transport, "ccl", library)) return std::make_unique<CclTransport>(*all.ccl[library]);
  return nullptr;
}

void end_transports() noexcept {
  for (const auto& [library, mpi] : started().mpi) mpi->end();
}

}  // namespace anyaccel::comm
