// SPDX-License-Identifier: Apache-2.0
// Lower bounds for two processes on two cores: what the hardware needs for a flag, for memcpy, and for a two-rank
// all-reduce without any of a library's duties (no groups, no checks, no deadlines).
//
// "flag": half a round trip of a flag between two cache lines. "memcpy": bandwidth of both processes at once, read and
// written bytes. "copying": copy in, flag, add the peer's (small), or reduce one's own half, flag, copy the peer's half
// out (large). "shared": the tensors lie in shared memory already, each rank sums its half and writes it to both.
#define _GNU_SOURCE
#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "allreduce.h"

#define CAPACITY (64u << 20)

struct shared {
  _Alignas(128) atomic_long flag[2][16];
  _Alignas(128) char buffer[2][2][CAPACITY];
  _Alignas(128) char tensor[2][CAPACITY];
};
static struct shared* S;
static int me;
static long sequence;

static void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}
static void post(void) { atomic_store_explicit(&S->flag[me][0], ++sequence, memory_order_release); }
static void await(void) {
  while (atomic_load_explicit(&S->flag[1 - me][0], memory_order_acquire) < sequence) _mm_pause();
}
static void synchronise(void) {
  post();
  await();
}

static void add_fp32(float* out, const float* a, const float* b, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

// Widened, added, rounded to nearest even by hand: this machine may lack AVX-512 BF16. NaNs are not looked after.
static void add_bf16(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; i++) {
    union {
      uint32_t u;
      float f;
    } x = {(uint32_t)a[i] << 16}, y = {(uint32_t)b[i] << 16};
    x.f += y.f;
    out[i] = (x.u + 0x7fff + (x.u >> 16 & 1)) >> 16;
  }
}

static void add(int bf16, void* out, const void* a, const void* b, size_t bytes) {
  if (bf16)
    add_bf16(out, a, b, bytes / 2);
  else
    add_fp32(out, a, b, bytes / 4);
}

static void all_reduce(char* x, size_t n, int bf16, int in_shared, int odd) {
  char* mine = in_shared ? S->tensor[me] : S->buffer[odd][me];
  char* peer = in_shared ? S->tensor[1 - me] : S->buffer[odd][1 - me];
  const size_t half = n / 2, low = me * half, others = (1 - me) * half;
  if (in_shared) {
    synchronise();
    add(bf16, mine + low, mine + low, peer + low, half);
    memcpy(peer + low, mine + low, half);
    synchronise();
  } else if (n <= 65536) {
    memcpy(mine, x, n);
    synchronise();
    add(bf16, x, x, peer, n);
  } else {
    memcpy(mine + others, x + others, half);
    synchronise();
    add(bf16, x + low, x + low, peer + low, half);
    memcpy(mine + low, x + low, half);
    synchronise();
    memcpy(x + others, peer + others, half);
  }
}

static double us[200000];

static void flags(void) {
  const int n = 100000;
  for (int i = 0; i < n; i++) {
    const double start = bench_now_us();
    if (me == 0) {
      post();
      await();
    } else {
      sequence++;
      await();
      sequence--;
      post();
    }
    us[i] = (bench_now_us() - start) / 2;
  }
  qsort(us, n, sizeof *us, bench_compare);
  if (me == 0) printf("flag 0 %.3f %.3f right\n", us[n / 2], us[(int)(n * 0.99)]), fflush(stdout);
}

static void copies(char* x, char* y, size_t bytes) {
  const int n = bytes < 16 << 20 ? 1000 : 40;
  synchronise();
  for (int i = 0; i < n; i++) {
    const double start = bench_now_us();
    memcpy(y, x, bytes);
    us[i] = bench_now_us() - start;
  }
  qsort(us, n, sizeof *us, bench_compare);
  if (me == 0) printf("memcpy %zu %.3f %.3f right\n", bytes, us[n / 2], us[(int)(n * 0.99)]), fflush(stdout);
  synchronise();
}

// allreduce_floor copying|shared BYTES... ; both first print what "flag" and, for each size, "memcpy" take.
int main(int argc, char** argv) {
  S = mmap(0, sizeof *S, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (argc < 2 || S == MAP_FAILED) return 2;
  const int in_shared = !strcmp(argv[1], "shared");
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  int cores[2], found = 0;
  for (int c = 0; c < CPU_SETSIZE && found < 2; c++)
    if (CPU_ISSET(c, &allowed)) cores[found++] = c;
  if (found < 2) return 3;
  me = fork() == 0;
  bind_to(cores[me]);
  for (int i = 0; i < 2; i++) memset(S->buffer[i][me], 0, CAPACITY);
  memset(S->tensor[me], 0, CAPACITY);
  char *x = aligned_alloc(64, CAPACITY), *y = aligned_alloc(64, CAPACITY);
  memset(x, 0, CAPACITY);
  memset(y, 1, CAPACITY);
  flags();
  for (int a = 2; a < argc; a++) copies(x, y, strtoull(argv[a], 0, 10));
  for (int bf16 = 0; bf16 < 2; bf16++)
    for (int a = 2; a < argc; a++) {
      const size_t bytes = strtoull(argv[a], 0, 10);
      const int calls = bench_calls(bytes);
      char* in = in_shared ? S->tensor[me] : x;
      bench_fill(in, bytes, bf16);
      synchronise();
      all_reduce(x, bytes, bf16, in_shared, 1);
      const int right = bench_is_two(in, bytes, bf16);
      synchronise();
      memset(in, 0, bytes);
      synchronise();
      for (int i = -calls / 10 - 1; i < calls; i++) {
        const double start = bench_now_us();
        all_reduce(x, bytes, bf16, in_shared, i & 1);
        if (i >= 0) us[i] = bench_now_us() - start;
      }
      if (me == 0) bench_print(bf16, bytes, us, calls, right);
    }
  if (me) _exit(0);
  wait(0);
}
