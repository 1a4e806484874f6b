// SPDX-License-Identifier: Apache-2.0
// What the native all-reduce benchmarks share. They print one line a size: dtype, bytes, median and 99th percentile in
// microseconds. Called with the sizes in bytes as arguments; rank 0 prints.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kMaxCalls = 20000 };

static double bench_now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static int bench_calls(size_t bytes) {
  const size_t calls = ((size_t)384 << 20) / bytes;
  return calls > 4000 ? 4000 : calls < 15 ? 15 : (int)calls;
}

static int bench_compare(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static void bench_fill(void* data, size_t bytes, int bf16) {
  for (size_t i = 0; i < bytes / (bf16 ? 2 : 4); i++)
    if (bf16)
      ((uint16_t*)data)[i] = 0x3f80;
    else
      ((float*)data)[i] = 1;
}

// Whether each element is 2: the sum of two ones.
static int bench_is_two(const void* data, size_t bytes, int bf16) {
  for (size_t i = 0; i < bytes / (bf16 ? 2 : 4); i++)
    if (bf16 ? ((const uint16_t*)data)[i] != 0x4000 : ((const float*)data)[i] != 2) return 0;
  return 1;
}

static void bench_print(int bf16, size_t bytes, double* us, int calls, int right) {
  qsort(us, calls, sizeof *us, bench_compare);
  printf("%s %zu %.3f %.3f %s\n", bf16 ? "bfloat16" : "float32", bytes, us[calls / 2], us[(int)(calls * 0.99)],
         right ? "right" : "WRONG");
  fflush(stdout);
}
