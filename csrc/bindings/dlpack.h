// SPDX-License-Identifier: Apache-2.0
// The part of DLPack's C exchange interface (https://dmlc.github.io/dlpack/latest/c_api.html, version 1.x) that reads a
// tensor's address, shape and strides without making a Python object.
#pragma once

#include <cstdint>

namespace anyaccel::bindings {

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLExchange {
  uint32_t major, minor;
  void* previous;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*view)(void* object, DLTensor* out);  // may be null; returns -1 with a Python error set
  void* current_stream;
};

constexpr int32_t kDLCpu = 1;
enum DLCode : uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4 };
constexpr char kDLCapsule[] = "dlpack_exchange_api";

}  // namespace anyaccel::bindings
