// SPDX-License-Identifier: Apache-2.0
// A fast path of inference_all_reduce and all_reduce_add_rms_norm by CPython's vectorcall protocol, without an argument
// tuple or any object but the tensors. all_reduce_call is the fast path of torch.distributed.all_reduce. Every other
// case (another kind of tensor or group, a strided tensor, the first call of a group) falls back to the Python function
// of the same name in comm/api.py.
#include <array>
#include <stdexcept>

#include "bindings/comm.h"
#include "bindings/dlpack.h"
#include "bindings/translate.h"
#include "comm/shm_group.h"

namespace anyaccel::bindings {
namespace {

using comm::DType;
using comm::ReduceOp;
using comm::ShmGroup;

// A call of more bytes releases the interpreter's lock; a smaller one releases it only in a long wait.
constexpr size_t kHoldLockBytes = 128 << 10;

struct DTypeOfDLPack {
  uint8_t code, bits;
  DType dtype;
};
constexpr DTypeOfDLPack kDTypesOfDLPack[] = {
    {kDLFloat, 32, DType::f32}, {kDLBfloat, 16, DType::bf16}, {kDLFloat, 16, DType::f16},
    {kDLFloat, 64, DType::f64}, {kDLInt, 8, DType::i8},       {kDLInt, 16, DType::i16},
    {kDLInt, 32, DType::i32},   {kDLInt, 64, DType::i64},     {kDLUInt, 8, DType::u8}};

struct KnownGroup {
  PyObject* weak_reference = nullptr;  // to the process group
  PyObject* native = nullptr;          // owns `group`
  ShmGroup* group = nullptr;
};

// The state of the fast path, guarded by the interpreter's lock.
struct FastCalls {
  bool enabled = false;
  PyObject* slow_all_reduce = nullptr;
  PyObject* slow_norm = nullptr;
  PyObject* torch_variables = nullptr;  // the namespace with torch's default group
  PyObject* default_name = nullptr;     // "_default_pg"
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* op_name = nullptr;
  PyObject* group_name = nullptr;
  PyObject* forget = nullptr;
  PyObject* async_name = nullptr;  // an attribute of torch's options, as is the next
  PyObject* reduce_op_name = nullptr;
  std::array<PyObject*, 5> ops{};  // in the order of ReduceOp
  std::array<Py_hash_t, 5> op_hashes{};
  std::array<PyObject*, 2> watchers{};
  const DLExchange* exchange = nullptr;
  std::array<KnownGroup, 4> known{};
  size_t next = 0;
};
FastCalls fast;

void drop(KnownGroup& known) {
  KnownGroup old = known;
  known = {};
  Py_XDECREF(old.weak_reference);
  Py_XDECREF(old.native);
}

PyObject* forget_dead_groups(PyObject*, PyObject*) {
  for (KnownGroup& known : fast.known)
    if (known.weak_reference != nullptr && PyWeakref_GetObject(known.weak_reference) == Py_None) drop(known);
  Py_RETURN_NONE;
}
PyMethodDef forget_def{"_forget_group", forget_dead_groups, METH_O, nullptr};

ShmGroup* find_group(PyObject* group) {
  if (group == nullptr || group == Py_None) {
    group = PyDict_GetItemWithError(fast.torch_variables, fast.default_name);
    if (group == nullptr || group == Py_None) return nullptr;
  }
  for (const KnownGroup& known : fast.known)
    if (known.weak_reference != nullptr && PyWeakref_GetObject(known.weak_reference) == group)
      return known.group->waiting() ? nullptr : known.group;  // pending asynchronous calls run first
  return nullptr;
}

// Reads a dense CPU tensor of more than one element; returns false for any other. No negative view of a real tensor is
// dense, so the bits of the memory are the values.
bool view_tensor(PyObject* object, DLTensor& view, size_t& count, DType& dtype) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != fast.tensor_type && type != fast.parameter_type) return false;
  if (fast.exchange->view(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view.device_type != kDLCpu || view.lanes != 1) return false;
  if (view.data == nullptr) return false;  // torch may represent zeros without memory
  int64_t expected = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    if (view.shape[d] != 1 && view.strides != nullptr && view.strides[d] != expected) return false;
    expected *= view.shape[d];
  }
  if (expected < 2) return false;
  count = static_cast<size_t>(expected);
  view.data = static_cast<char*>(view.data) + view.byte_offset;
  for (const auto& [code, bits, found] : kDTypesOfDLPack) {
    dtype = found;
    if (view.code == code && view.bits == bits) return true;
  }
  return false;
}

// Sets the Python error for the exception that is being handled; returns null.
PyObject* set_python_error() {
  try {
    throw;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const comm::CommError& error) {
    set_error(python_class(error.kind), error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Returns false, without having done anything, where another thread runs a call of the group.
bool run_all_reduce(ShmGroup* group, const DLTensor& view, size_t count, DType dtype, int op) {
  const ReduceOp reduce = static_cast<ReduceOp>(op);
  if (count * comm::dtype_bytes(dtype) <= kHoldLockBytes) return group->try_all_reduce(view.data, count, dtype, reduce);
  const nb::gil_scoped_release unlocked;
  group->all_reduce(view.data, count, dtype, reduce);
  return true;
}

// Reads the optional arguments, which begin with number `first` and have these `names`. Returns false for a call that
// the fast path does not understand.
template <size_t kCount>
bool parse_arguments(PyObject* const* args, Py_ssize_t given, PyObject* keywords, size_t first,
                     const std::array<PyObject*, kCount>& names, std::array<PyObject*, kCount>& values) {
  if (static_cast<size_t>(given) < first || static_cast<size_t>(given) > first + kCount) return false;
  for (size_t i = 0; i + first < static_cast<size_t>(given); ++i) values[i] = args[first + i];
  if (keywords == nullptr) return true;
  const Py_ssize_t named = PyTuple_Size(keywords);
  for (Py_ssize_t k = 0; k < named; ++k) {
    PyObject* name = PyTuple_GetItem(keywords, k);
    bool found = false;
    for (size_t i = 0; i < kCount; ++i) {
      if (name != names[i]) continue;  // both are interned
      values[i] = args[given + k];
      found = true;
    }
    if (!found) return false;
  }
  return true;
}

PyObject* all_reduce(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::array<PyObject*, 2> values{};
  DLTensor view;
  size_t count;
  DType dtype;
  while (fast.enabled) {
    if (!parse_arguments(args, given, keywords, 1, {fast.op_name, fast.group_name}, values)) break;
    int op = 0;
    if (values[0] != nullptr) {
      while (op < 5 && fast.ops[op] != values[0]) ++op;
      if (op == 5) break;
    }
    ShmGroup* group = find_group(values[1]);
    if (group == nullptr || !view_tensor(args[0], view, count, dtype)) break;
    try {
      if (!run_all_reduce(group, view, count, dtype, op)) break;
    } catch (...) {
      return set_python_error();
    }
    Py_INCREF(args[0]);
    return args[0];
  }
  return PyObject_Vectorcall(fast.slow_all_reduce, args, static_cast<size_t>(given), keywords);
}

// Whether an attribute of options is the object `wanted`.
bool is_attribute(PyObject* options, PyObject* name, PyObject* wanted) {
  PyObject* found = PyObject_GetAttr(options, name);
  if (found == nullptr) PyErr_Clear();
  Py_XDECREF(found);
  return found == wanted;
}

// The number of the reduction in torch's options; -1 for one that the fast path does not have.
int find_reduction(PyObject* options) {
  PyObject* found = PyObject_GetAttr(options, fast.reduce_op_name);
  // The hash of torch's object is the number of the reduction, and is quicker to get.
  const Py_hash_t hash = found == nullptr ? -1 : PyObject_Hash(found);
  if (hash == -1) PyErr_Clear();
  Py_XDECREF(found);
  for (size_t op = 0; op < fast.op_hashes.size(); ++op)
    if (hash != -1 && fast.op_hashes[op] == hash) return static_cast<int>(op);
  return -1;
}

// Whether a profiler or a mode of torch intercepts calls.
bool is_watched() {
  for (PyObject* ask : fast.watchers) {
    PyObject* answer = PyObject_CallNoArgs(ask);
    const int yes = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    if (yes < 0) PyErr_Clear();
    Py_XDECREF(answer);
    if (yes != 0) return true;
  }
  return false;
}

// all_reduce_call(native group, tensors, options) has the arguments of a group's all-reduce in torch. Returns False,
// without having done anything, when the caller must use the slow path.
PyObject* all_reduce_call(PyObject*, PyObject* const* args, Py_ssize_t given) {
  DLTensor view;
  size_t count;
  DType dtype;
  if (given != 3) {
    PyErr_SetString(PyExc_TypeError, "all_reduce_call: a group, a list of tensors and options");
    return nullptr;
  }
  ShmGroup* group = nullptr;
  if (!fast.enabled || !PyList_CheckExact(args[1]) || PyList_Size(args[1]) != 1 ||
      !view_tensor(PyList_GetItem(args[1], 0), view, count, dtype) ||
      !is_attribute(args[2], fast.async_name, Py_False) || is_watched() ||
      !nb::try_cast<ShmGroup*>(nb::handle(args[0]), group) || group->waiting())
    Py_RETURN_FALSE;
  const int op = find_reduction(args[2]);
  if (op < 0) Py_RETURN_FALSE;
  try {
    if (!run_all_reduce(group, view, count, dtype, op)) Py_RETURN_FALSE;
  } catch (...) {
    return set_python_error();
  }
  Py_RETURN_TRUE;
}

PyObject* add_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::array<PyObject*, 1> values{};
  while (fast.enabled) {
    if (!parse_arguments(args, given, keywords, 4, {fast.group_name}, values)) break;
    ShmGroup* group = find_group(values[0]);
    DLTensor partial, residual, weight;
    size_t count, other, width;
    DType dtype, residual_dtype, weight_dtype;
    if (group == nullptr || !view_tensor(args[0], partial, count, dtype) ||
        !view_tensor(args[1], residual, other, residual_dtype) || !view_tensor(args[2], weight, width, weight_dtype))
      break;
    if (dtype > DType::f16 || residual_dtype != dtype || weight_dtype != dtype || other != count || partial.ndim < 1 ||
        weight.ndim != 1 || static_cast<int64_t>(width) != partial.shape[partial.ndim - 1])
      break;
    const double eps = PyFloat_AsDouble(args[3]);
    if (eps == -1.0 && PyErr_Occurred()) return nullptr;
    try {
      const nb::gil_scoped_release unlocked;
      group->all_reduce_add_rms_norm(partial.data, residual.data, weight.data, static_cast<float>(eps), count / width,
                                     width, dtype);
    } catch (...) {
      return set_python_error();
    }
    Py_INCREF(args[0]);
    return args[0];
  }
  return PyObject_Vectorcall(fast.slow_norm, args, static_cast<size_t>(given), keywords);
}

template <class Function>
PyCFunction as_method(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef all_reduce_def{"inference_all_reduce", as_method(all_reduce), METH_FASTCALL | METH_KEYWORDS, nullptr};
PyMethodDef norm_def{"all_reduce_add_rms_norm", as_method(add_rms_norm), METH_FASTCALL | METH_KEYWORDS, nullptr};

PyMethodDef call_def{"all_reduce_call", as_method(all_reduce_call), METH_FASTCALL, nullptr};

PyObject* keep(nb::handle object) { return object.inc_ref().ptr(); }

}  // namespace

void bind_comm_fast(nb::module_& m) {
  m.def(
      "make_fast",
      [](nb::handle slow_all_reduce, nb::handle slow_norm, nb::dict torch_variables, nb::handle tensor_type,
         nb::handle parameter_type, nb::list ops, nb::list op_hashes, nb::list watchers) {
        fast.slow_all_reduce = keep(slow_all_reduce);
        fast.slow_norm = keep(slow_norm);
        fast.torch_variables = keep(torch_variables);
        fast.default_name = PyUnicode_InternFromString("_default_pg");
        fast.op_name = PyUnicode_InternFromString("op");
        fast.group_name = PyUnicode_InternFromString("group");
        fast.tensor_type = keep(tensor_type);
        fast.parameter_type = keep(parameter_type);
        fast.async_name = PyUnicode_InternFromString("asyncOp");
        fast.reduce_op_name = PyUnicode_InternFromString("reduceOp");
        fast.forget = PyCFunction_New(&forget_def, nullptr);
        for (size_t i = 0; i < fast.ops.size(); ++i) fast.ops[i] = keep(ops[i]);
        for (size_t i = 0; i < fast.op_hashes.size(); ++i) fast.op_hashes[i] = nb::cast<Py_hash_t>(op_hashes[i]);
        for (size_t i = 0; i < fast.watchers.size(); ++i) fast.watchers[i] = keep(watchers[i]);
        const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
        if (PyCapsule_IsValid(capsule.ptr(), kDLCapsule))
          fast.exchange = static_cast<const DLExchange*>(PyCapsule_GetPointer(capsule.ptr(), kDLCapsule));
        if (fast.exchange != nullptr && (fast.exchange->major != 1 || fast.exchange->view == nullptr))
          fast.exchange = nullptr;
        fast.enabled = fast.exchange != nullptr;
        return nb::make_tuple(nb::steal(PyCFunction_New(&all_reduce_def, nullptr)),
                              nb::steal(PyCFunction_New(&norm_def, nullptr)));
      },
      nb::arg("all_reduce"), nb::arg("all_reduce_add_rms_norm"), nb::arg("torch_variables"), nb::arg("tensor_type"),
      nb::arg("parameter_type"), nb::arg("ops"), nb::arg("op_hashes"), nb::arg("watchers"));
  m.attr("all_reduce_call") = nb::steal(PyCFunction_New(&call_def, nullptr));
  m.def("enable_fast", [](bool enabled) { fast.enabled = enabled && fast.exchange != nullptr; }, nb::arg("enabled"));
  m.def(
      "remember_group",
      [](nb::handle group, nb::handle native) {
        ShmGroup* pointer = nb::cast<ShmGroup*>(native);
        if (fast.forget == nullptr) return;
        KnownGroup& known = fast.known[fast.next++ % fast.known.size()];
        drop(known);
        PyObject* weak_reference = PyWeakref_NewRef(group.ptr(), fast.forget);
        if (weak_reference == nullptr) throw nb::python_error();
        known = {weak_reference, keep(native), pointer};
      },
      nb::arg("group"), nb::arg("native"));
}

}  // namespace anyaccel::bindings
