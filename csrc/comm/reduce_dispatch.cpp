// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "comm/reduce_kernels.h"
#include "simd/pick.h"

namespace anyaccel::comm {

const ReduceKernels& reduce_kernels(Isa isa) { return pick<ReduceKernels>(isa); }

namespace {

struct DTypeInfo {
  const char* name;
  size_t bytes;
};

constexpr DTypeInfo kInfo[] = {{"float32", 4},
                               {"bfloat16", 2},
                               {"float16", 2},
                               {"float64", 8},
                               {"int8", 1},
                               {"int16", 2},
                               {"int32", 4},
                               {"int64", 8},
                               {"uint8", 1},
                               {"bool", 1},
                               {"complex32", 4},
                               {"complex64", 8},
                               {"complex128", 16},
                               {"uint16", 2},
                               {"uint32", 4},
                               {"uint64", 8},
                               {"float8_e4m3fn", 1},
                               {"float8_e5m2", 1},
                               {"float8_e4m3fnuz", 1},
                               {"float8_e5m2fnuz", 1},
                               {"float8_e8m0fnu", 1},
                               {"float4_e2m1fn_x2", 1},
                               {"bytes", 1}};
constexpr int kInfos = sizeof kInfo / sizeof kInfo[0];
static_assert(kInfos == static_cast<int>(DType::bytes) + 1);

}  // namespace

size_t dtype_bytes(DType dtype) {
  const int code = static_cast<int>(dtype);
  if (code < 0 || code >= kInfos) throw std::invalid_argument("unknown dtype code " + std::to_string(code));
  return kInfo[code].bytes;
}

const char* dtype_name(DType dtype) {
  const int code = static_cast<int>(dtype);
  return code < 0 || code >= kInfos ? "unknown" : kInfo[code].name;
}

const char* reduce_op_name(ReduceOp op) {
  constexpr const char* kNames[kReduceOps] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor"};
  const int code = static_cast<int>(op);
  return code < 0 || code >= kReduceOps ? "unknown" : kNames[code];
}

}  // namespace anyaccel::comm
