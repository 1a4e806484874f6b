// SPDX-License-Identifier: Apache-2.0
// Generators, the hooks by which torch's device-independent code finds the device, and the Python module. All that
// torch.accelerator, torch.Stream and torch.Event reach through the hooks and the guard needs no binding here.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <torch/csrc/Generator.h>

#include <mutex>
#include <vector>

#include "generator.h"
#include "runtime.h"

namespace simd0 {
namespace {

// Operators run CPU kernels, so the state is that of a CPU generator, which they are given (see operators.cpp).
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex index, at::Generator host)
      : GeneratorImpl(c10::Device(kDeviceType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  void set_current_seed(uint64_t seed) override { locked()->set_current_seed(seed); }
  uint64_t current_seed() const override { return locked()->current_seed(); }
  uint64_t seed() override { return locked()->seed(); }
  void set_offset(uint64_t offset) override { locked()->set_offset(offset); }
  uint64_t get_offset() const override { return locked()->get_offset(); }
  void set_state(const c10::TensorImpl& state) override { locked()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return locked()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }

  at::Generator host;

 private:
  struct Locked {
    std::unique_lock<std::mutex> lock;
    c10::GeneratorImpl* generator;
    c10::GeneratorImpl* operator->() const { return generator; }
  };

  Locked locked() const {
    auto* generator = host.unsafeGetGeneratorImpl();
    return {std::unique_lock(generator->mutex_), generator};
  }
};

c10::DeviceIndex index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device() : index; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return has_context(index); }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device();
    set_device(index);
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current_device() : exchangeDevice(index);  // -1 says to stay
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index_or_current(index));
  }

  at::Device getDeviceFromPtr(void* address) const override {
    const auto index = owner(address);
    TORCH_CHECK(index >= 0, "the address belongs to no simd device");
    return {kDeviceType, index};
  }

  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// Python -----------------------------------------------------------------------------------------------------

// Calls `function` with the device index that Python gave; an error becomes a Python exception.
template <typename Function>
PyObject* with_device_index(PyObject* argument, Function function) {
  const long index = PyLong_AsLong(argument);
  if (index == -1 && PyErr_Occurred() != nullptr) return nullptr;
  try {
    return function(static_cast<c10::DeviceIndex>(index));
  } catch (const c10::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    return nullptr;
  }
}

PyObject* py_default_generator(PyObject*, PyObject* argument) {
  return with_device_index(argument, [](auto index) { return THPGenerator_Wrap(default_generator(index)); });
}

PyObject* py_has_context(PyObject*, PyObject* argument) {
  return with_device_index(argument, [](auto index) { return PyBool_FromLong(has_context(index)); });
}

PyObject* py_physical_device(PyObject*, PyObject* argument) {
  return with_device_index(argument, [](auto index) { return PyLong_FromLong(physical_device(index)); });
}

PyMethodDef methods[] = {
    {"default_generator", py_default_generator, METH_O, "The torch.Generator that the device of this index uses."},
    {"has_context", py_has_context, METH_O, "Whether memory of the device of this index has been used."},
    {"physical_device", py_physical_device, METH_O, "Number of the physical device behind this index."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

at::Generator new_generator(c10::DeviceIndex index) {
  physical_device(index);  // checks it
  return at::make_generator<Generator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) made->push_back(new_generator(device));
    return made;
  }();
  physical_device(index);
  return (*generators)[static_cast<size_t>(index)];
}

at::Generator host_generator(const at::Generator& generator) { return generator.get<Generator>()->host; }

}  // namespace simd0

PyMODINIT_FUNC PyInit__C() {
  at::RegisterPrivateUse1HooksInterface(new simd0::Hooks);
  return PyModule_Create(&simd0::definition);
}
