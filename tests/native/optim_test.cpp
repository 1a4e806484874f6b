// SPDX-License-Identifier: Apache-2.0
// The optimizers, for sanitizers: windows in memory of exactly their size, every dtype, odd counts, several callers at
// once, a child after fork(); all instruction sets against the scalar one.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "optim/work.h"
#include "simd/isa.h"

extern "C" {
int anyaccel_adam_step(const AnyaccelTensors*, double, double, double, double, double, int, int);
int anyaccel_adam_rollback(float*, const float*, float*, float*, int64_t, double, double, double, double, double,
                           double, int, int);
int anyaccel_adagrad_step(const AnyaccelTensors*, double, double, double, double);
int anyaccel_lion_step(const AnyaccelTensors*, double, double, double, double);
}

namespace {

using anyaccel::optim::bytes_of;
using anyaccel::optim::DType;

// Numbers near 1 in each dtype, made of random bits; on the heap and of exactly this size, so that a read or write
// beyond is seen.
std::unique_ptr<unsigned char[]> numbers(int64_t count, DType dtype, unsigned seed, bool positive) {
  std::mt19937 random(seed);
  std::unique_ptr<unsigned char[]> memory(new unsigned char[static_cast<size_t>(count) * bytes_of(dtype)]);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = static_cast<uint32_t>(random());
    const uint32_t sign = positive ? 0 : word >> 31;
    if (dtype == DType::f32) {
      const uint32_t bits = sign << 31 | 0x3f000000u | (word & 0x7fffffu);
      std::memcpy(&memory[static_cast<size_t>(i) * 4], &bits, 4);
    } else {
      const uint32_t base = dtype == DType::bf16 ? 0x3f00u | (word & 0x7fu) : 0x3800u | (word & 0x3ffu);
      const uint16_t bits = static_cast<uint16_t>(sign << 15 | base);
      std::memcpy(&memory[static_cast<size_t>(i) * 2], &bits, 2);
    }
  }
  return memory;
}

// Some tensors, and one optimizer's call over them.
struct Batch {
  std::vector<int64_t> sizes;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  std::vector<void*> params, states1, states2, copies;
  std::vector<const void*> grads;
  std::vector<float> counts;
  std::vector<float*> steps;
  std::vector<int32_t> dtypes;
  std::vector<int64_t> written;  // bytes of each memory that a step may change

  Batch(const std::vector<int64_t>& wanted, DType param, DType grad, DType state, bool copied) : sizes(wanted) {
    counts.resize(sizes.size(), 2.0f);
    unsigned seed = 0;
    const auto add = [&](int64_t count, DType dtype, bool positive) -> void* {
      memory.push_back(numbers(count, dtype, ++seed, positive));
      return memory.back().get();
    };
    for (size_t t = 0; t < sizes.size(); ++t) {
      params.push_back(add(sizes[t], param, false));
      grads.push_back(add(sizes[t], grad, false));
      states1.push_back(add(sizes[t], state, true));
      states2.push_back(add(sizes[t], state, true));
      const DType copy = param == DType::f16 ? DType::f16 : DType::bf16;
      copies.push_back(copied ? add(sizes[t], copy, false) : nullptr);
      steps.push_back(&counts[t]);
      dtypes.push_back(static_cast<int32_t>(param) | static_cast<int32_t>(grad) << 2 |
                       static_cast<int32_t>(state) << 4 | static_cast<int32_t>(copy) << 6);
    }
  }

  AnyaccelTensors tensors(int threads, int isa) const {
    return {static_cast<int64_t>(sizes.size()),
            sizes.data(),
            params.data(),
            grads.data(),
            states1.data(),
            states2.data(),
            copies.data(),
            steps.data(),
            dtypes.data(),
            threads,
            isa};
  }
};

using Step = std::function<int(const AnyaccelTensors*)>;

const Step kSteps[] = {
    [](const AnyaccelTensors* t) { return anyaccel_adam_step(t, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 1); },
    [](const AnyaccelTensors* t) { return anyaccel_adam_step(t, 1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0); },
    [](const AnyaccelTensors* t) { return anyaccel_adagrad_step(t, 1e-2, 0.1, 1e-10, 0.1); },
    [](const AnyaccelTensors* t) { return anyaccel_lion_step(t, 1e-2, 0.9, 0.99, 0.1); },
};

struct Dtypes {
  DType param, grad;
};
constexpr Dtypes kDtypes[] = {{DType::f32, DType::f32},   {DType::f32, DType::bf16}, {DType::f32, DType::f16},
                              {DType::bf16, DType::bf16}, {DType::bf16, DType::f32}, {DType::f16, DType::f16},
                              {DType::f16, DType::f32}};

void same(const Batch& a, const Batch& b) {
  for (size_t t = 0, m = 0; t < a.sizes.size(); ++t) {
    CHECK(a.counts[t] == b.counts[t]);
    const int32_t code = a.dtypes[t];
    const int codes[] = {code & 3, (code >> 2) & 3, (code >> 4) & 3, (code >> 4) & 3, (code >> 6) & 3};
    for (int which = 0; which < (a.copies[t] == nullptr ? 4 : 5); ++which, ++m) {
      const size_t bytes = static_cast<size_t>(a.sizes[t]) * bytes_of(static_cast<DType>(codes[which]));
      CHECK(bytes == 0 || std::memcmp(a.memory[m].get(), b.memory[m].get(), bytes) == 0);
    }
  }
}

void every_dtype_and_size() {
  std::vector<int64_t> sizes;
  for (int64_t size = 0; size <= 70; ++size) sizes.push_back(size);
  sizes.insert(sizes.end(), {1000, 4095, 4096, 4097, 0, 40001, 0});
  for (const Step& step : kSteps)
    for (const Dtypes& dtypes : kDtypes)
      for (const DType state : {DType::f32, DType::bf16}) {
        Batch scalar(sizes, dtypes.param, dtypes.grad, state, true);
        const AnyaccelTensors reference = scalar.tensors(1, static_cast<int>(anyaccel::Isa::scalar));
        CHECK(step(&reference) == 0);
        for (const anyaccel::IsaRow& row : anyaccel::kIsaRows) {
          if (!anyaccel::can_run(row.isa) || row.variants == anyaccel::Variants::some_kernels) continue;
          if (kQuick && row.isa != anyaccel::highest_of_every_kernel(anyaccel::selected_isa())) continue;
          const int isa = static_cast<int>(row.isa);
          Batch one(sizes, dtypes.param, dtypes.grad, state, true),
              other(sizes, dtypes.param, dtypes.grad, state, true);
          const AnyaccelTensors a = one.tensors(1, isa), b = other.tensors(3, isa);
          CHECK(step(&a) == 0);
          CHECK(step(&b) == 0);
          same(one, other);
          same(one, scalar);
          CHECK(one.counts[0] == 3.0f);
        }
      }
}

void several_callers_at_once() {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([caller] {
      Batch batch({50000, 3, 20000}, DType::f32, DType::f32, DType::f32, caller % 2 == 0);
      Batch alone({50000, 3, 20000}, DType::f32, DType::f32, DType::f32, caller % 2 == 0);
      const AnyaccelTensors tensors = batch.tensors(3, -1), single = alone.tensors(1, -1);
      for (int i = 0; i < (kQuick ? 3 : 20); ++i) {
        CHECK(kSteps[caller](&tensors) == 0);
        CHECK(kSteps[caller](&single) == 0);
      }
      same(batch, alone);
    });
  for (std::thread& caller : callers) caller.join();
}

void wrong_dtypes() {
  Batch batch({5}, DType::bf16, DType::f16, DType::f32, false);
  const AnyaccelTensors tensors = batch.tensors(1, -1);
  for (const Step& step : kSteps) CHECK(step(&tensors) == anyaccel::optim::kBadDtype);
  CHECK(batch.counts[0] == 2.0f);
}

void rollback() {
  Batch batch({40001}, DType::f32, DType::f32, DType::f32, false);
  const auto before = numbers(40001, DType::f32, 1, false);
  const AnyaccelTensors tensors = batch.tensors(3, -1);
  CHECK(kSteps[0](&tensors) == 0);
  auto* param = static_cast<float*>(batch.params[0]);
  anyaccel_adam_rollback(param, static_cast<const float*>(batch.grads[0]), static_cast<float*>(batch.states1[0]),
                         static_cast<float*>(batch.states2[0]), 40001, 3.0, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 3);
  for (int i = 0; i < 40001; ++i) {
    float was;
    std::memcpy(&was, &before[static_cast<size_t>(i) * 4], 4);
    CHECK(std::fabs(param[i] - was) < 1e-5f);
  }
}

// The pool's threads are not in the child. TSan does not follow programs with threads there, nor does qemu.
void a_child_after_fork() {
  if (kEmulated) return;
#ifndef __SANITIZE_THREAD__
  const pid_t child = fork();
  if (child == 0) {
    several_callers_at_once();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
#endif
}

}  // namespace

int main() {
  every_dtype_and_size();
  several_callers_at_once();
  wrong_dtypes();
  rollback();
  a_child_after_fork();
  return 0;
}
