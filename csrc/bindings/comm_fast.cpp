// SPDX-License-Identifier: Apache-2.0
// inference_all_reduce and all_reduce_add_rms_norm, as CPython calls functions: no argument tuple, no object but the
// tensors; all_reduce_call is the first as torch.distributed.all_reduce calls a group. Whatever is out of the
// ordinary (another kind of tensor or group, a strided tensor, the first call of a group) goes to the Python function
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

// Above this, the interpreter's lock is given up for the whole of a call; below, only where the wait gets long.
constexpr size_t kHoldLockBytes = 128 << 10;

struct Known {
  PyObject* reference = nullptr;  // weak, to the process group
  PyObject* native = nullptr;     // keeps the next one alive
  ShmGroup* group = nullptr;
};

// The state of the fast calls in this process, guarded by the interpreter's lock.
struct Fast {
  bool enabled = false;
  PyObject* slow_all_reduce = nullptr;
  PyObject* slow_norm = nullptr;
  PyObject* torch_variables = nullptr;  // where torch has its default group
  PyObject* default_name = nullptr;     // "_default_pg" there
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* op_name = nullptr;
  PyObject* group_name = nullptr;
  PyObject* forget = nullptr;
  PyObject* async_name = nullptr;  // of torch's options
  PyObject* reduce_op_name = nullptr;
  std::array<PyObject*, 5> ops{};  // in the order of ReduceOp
  std::array<Py_hash_t, 5> op_hashes{};
  std::array<PyObject*, 2> watchers{};
  const DLExchange* exchange = nullptr;
  std::array<Known, 4> known{};
  size_t next = 0;
};
Fast fast;

void drop(Known& known) {
  Known old = known;
  known = {};
  Py_XDECREF(old.reference);
  Py_XDECREF(old.native);
}

PyObject* forget_dead(PyObject*, PyObject*) {
  for (Known& known : fast.known)
    if (known.reference != nullptr && PyWeakref_GetObject(known.reference) == Py_None) drop(known);
  Py_RETURN_NONE;
}
PyMethodDef forget_def{"_forget_group", forget_dead, METH_O, nullptr};

ShmGroup* find(PyObject* group) {
  if (group == nullptr || group == Py_None) {
    group = PyDict_GetItemWithError(fast.torch_variables, fast.default_name);
    if (group == nullptr || group == Py_None) return nullptr;
  }
  for (const Known& known : fast.known)
    if (known.reference != nullptr && PyWeakref_GetObject(known.reference) == group)
      return known.group->waiting() ? nullptr : known.group;  // asynchronous calls come first
  return nullptr;
}

// A dense CPU tensor of more than one element; its bits are its values: a real tensor that is a negative view has a
// stride above one.
bool look(PyObject* object, DLTensor& view, size_t& count, DType& dtype) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != fast.tensor_type && type != fast.parameter_type) return false;
  if (fast.exchange->view(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (view.device_type != kDLCpu || view.lanes != 1) return false;
  if (view.data == nullptr) return false;  // torch has zeros without memory
  int64_t expected = 1;
  for (int d = view.ndim - 1; d >= 0; --d) {
    if (view.shape[d] != 1 && view.strides != nullptr && view.strides[d] != expected) return false;
    expected *= view.shape[d];
  }
  if (expected < 2) return false;
  count = static_cast<size_t>(expected);
  switch (view.code << 8 | view.bits) {
    case kDLFloat << 8 | 32:
      dtype = DType::f32;
      break;
    case kDLBfloat << 8 | 16:
      dtype = DType::bf16;
      break;
    case kDLFloat << 8 | 16:
      dtype = DType::f16;
      break;
    case kDLFloat << 8 | 64:
      dtype = DType::f64;
      break;
    case kDLInt << 8 | 8:
      dtype = DType::i8;
      break;
    case kDLInt << 8 | 16:
      dtype = DType::i16;
      break;
    case kDLInt << 8 | 32:
      dtype = DType::i32;
      break;
    case kDLInt << 8 | 64:
      dtype = DType::i64;
      break;
    case kDLUInt << 8 | 8:
      dtype = DType::u8;
      break;
    default:
      return false;
  }
  view.data = static_cast<char*>(view.data) + view.byte_offset;
  return true;
}

// The Python error for what native code has thrown.
PyObject* raise() {
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

class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// The arguments from number `first` on are optional: `names` says what they are called. False: not understood.
template <size_t kCount>
bool take(PyObject* const* args, Py_ssize_t given, PyObject* keywords, size_t first,
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
    if (!take(args, given, keywords, 1, {fast.op_name, fast.group_name}, values)) break;
    int op = 0;
    if (values[0] != nullptr) {
      while (op < 5 && fast.ops[op] != values[0]) ++op;
      if (op == 5) break;
    }
    ShmGroup* group = find(values[1]);
    if (group == nullptr || !look(args[0], view, count, dtype)) break;
    try {
      const ReduceOp reduce = static_cast<ReduceOp>(op);
      if (count * comm::dtype_bytes(dtype) <= kHoldLockBytes) {
        if (!group->try_all_reduce(view.data, count, dtype, reduce)) break;
      } else {
        const Unlocked unlocked;
        group->all_reduce(view.data, count, dtype, reduce);
      }
    } catch (...) {
      return raise();
    }
    Py_INCREF(args[0]);
    return args[0];
  }
  return PyObject_Vectorcall(fast.slow_all_reduce, args, static_cast<size_t>(given), keywords);
}

// Whether an attribute of options is this object.
bool is_attribute(PyObject* options, PyObject* name, PyObject* wanted) {
  PyObject* found = PyObject_GetAttr(options, name);
  if (found == nullptr) PyErr_Clear();
  Py_XDECREF(found);
  return found == wanted;
}

// The number of the reduction that options ask for; -1: not one of those here.
int reduction_of(PyObject* options) {
  PyObject* found = PyObject_GetAttr(options, fast.reduce_op_name);
  // torch's objects have the reduction's number as their hash, which is quicker to ask for than the number.
  const Py_hash_t hash = found == nullptr ? -1 : PyObject_Hash(found);
  if (hash == -1) PyErr_Clear();
  Py_XDECREF(found);
  for (size_t op = 0; op < fast.op_hashes.size(); ++op)
    if (hash != -1 && fast.op_hashes[op] == hash) return static_cast<int>(op);
  return -1;
}

// Whether a profiler or a mode of torch wants to see what is called.
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

// all_reduce_call(native group, tensors, options), as torch.distributed.all_reduce calls a group: whether it was done;
// False: another way is to be taken.
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
      !look(PyList_GetItem(args[1], 0), view, count, dtype) || !is_attribute(args[2], fast.async_name, Py_False) ||
      is_watched() || !nb::try_cast<ShmGroup*>(nb::handle(args[0]), group) || group->waiting())
    Py_RETURN_FALSE;
  const int op = reduction_of(args[2]);
  if (op < 0) Py_RETURN_FALSE;
  try {
    const ReduceOp reduce = static_cast<ReduceOp>(op);
    if (count * comm::dtype_bytes(dtype) <= kHoldLockBytes) {
      if (!group->try_all_reduce(view.data, count, dtype, reduce)) Py_RETURN_FALSE;
    } else {
      const Unlocked unlocked;
      group->all_reduce(view.data, count, dtype, reduce);
    }
  } catch (...) {
    return raise();
  }
  Py_RETURN_TRUE;
}

PyObject* add_rms_norm(PyObject*, PyObject* const* args, Py_ssize_t given, PyObject* keywords) {
  std::array<PyObject*, 1> values{};
  while (fast.enabled) {
    if (!take(args, given, keywords, 4, {fast.group_name}, values)) break;
    ShmGroup* group = find(values[0]);
    DLTensor partial, residual, weight;
    size_t count, other, width;
    DType dtype, residual_dtype, weight_dtype;
    if (group == nullptr || !look(args[0], partial, count, dtype) || !look(args[1], residual, other, residual_dtype) ||
        !look(args[2], weight, width, weight_dtype))
      break;
    if (dtype > DType::f16 || residual_dtype != dtype || weight_dtype != dtype || other != count || partial.ndim < 1 ||
        weight.ndim != 1 || static_cast<int64_t>(width) != partial.shape[partial.ndim - 1])
      break;
    const double eps = PyFloat_AsDouble(args[3]);
    if (eps == -1.0 && PyErr_Occurred()) return nullptr;
    try {
      const Unlocked unlocked;
      group->all_reduce_add_rms_norm(partial.data, residual.data, weight.data, static_cast<float>(eps), count / width,
                                     width, dtype);
    } catch (...) {
      return raise();
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
        Known& known = fast.known[fast.next++ % fast.known.size()];
        drop(known);
        PyObject* reference = PyWeakref_NewRef(group.ptr(), fast.forget);
        if (reference == nullptr) throw nb::python_error();
        known = {reference, keep(native), pointer};
      },
      nb::arg("group"), nb::arg("native"));
}

}  // namespace anyaccel::bindings
