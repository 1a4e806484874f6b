// SPDX-License-Identifier: Apache-2.0
// A plugin for qemu 7.2's user mode: how many bytes each thread loads from, and stores to, each of some ranges of
// addresses. The program says what by prctl(0x414e59, WHAT, A, B), which no kernel knows:
//   0: the calling thread is number A, and counts from now on; 1: it counts no more;
//   2: a range begins at A and has B bytes; ranges are numbered in the order of these calls.
// When the program ends a line `thread range loaded stored` for each pair goes into the file that the argument `out`
// names. What is declared here is the part of qemu's plugin interface, version 1, that it takes.
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;
typedef uint32_t qemu_plugin_meminfo_t;
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*call)(uint64_t id, struct qemu_plugin_tb* block));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
extern struct qemu_plugin_insn* qemu_plugin_tb_get_insn(const struct qemu_plugin_tb* block, size_t at);
extern void qemu_plugin_register_vcpu_mem_cb(struct qemu_plugin_insn* instruction,
                                             void (*call)(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address,
                                                          void* data),
                                             int flags, int which, void* data);
extern unsigned qemu_plugin_mem_size_shift(qemu_plugin_meminfo_t info);
extern _Bool qemu_plugin_mem_is_store(qemu_plugin_meminfo_t info);
extern void qemu_plugin_register_vcpu_syscall_cb(uint64_t id,
                                                 void (*call)(uint64_t id, unsigned cpu, int64_t number, uint64_t a1,
                                                              uint64_t a2, uint64_t a3, uint64_t a4, uint64_t a5,
                                                              uint64_t a6, uint64_t a7, uint64_t a8));
extern void qemu_plugin_register_atexit_cb(uint64_t id, void (*call)(uint64_t id, void* data), void* data);

#define SHOWN __attribute__((visibility("default")))
SHOWN int qemu_plugin_version = 1;

enum { kThreads = 256, kRanges = 64, kPrctl = 157, kMagic = 0x414e59 };
static int number_of_cpu[kThreads];  // 1 + the thread's number while it counts
static uint64_t begin_of[kRanges], bytes_of[kRanges];
static atomic_int ranges;
static uint64_t moved[kThreads][kRanges][2];
static char path[4096];

static void touched(unsigned cpu, qemu_plugin_meminfo_t info, uint64_t address, void* data) {
  (void)data;
  const int number = number_of_cpu[cpu % kThreads];
  if (number == 0) return;
  const int count = atomic_load(&ranges);
  for (int range = 0; range < count; ++range)
    if (address - begin_of[range] < bytes_of[range])
      moved[number - 1][range][qemu_plugin_mem_is_store(info)] += UINT64_C(1) << qemu_plugin_mem_size_shift(info);
}

static void translated(uint64_t id, struct qemu_plugin_tb* block) {
  (void)id;
  const size_t count = qemu_plugin_tb_n_insns(block);
  for (size_t at = 0; at < count; ++at)
    qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(block, at), touched, 0, 3, NULL);
}

static void called(uint64_t id, unsigned cpu, int64_t number, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4,
                   uint64_t a5, uint64_t a6, uint64_t a7, uint64_t a8) {
  (void)id, (void)a5, (void)a6, (void)a7, (void)a8;
  if (number != kPrctl || a1 != kMagic) return;
  if (a2 == 0) number_of_cpu[cpu % kThreads] = (int)a3 + 1;
  if (a2 == 1) number_of_cpu[cpu % kThreads] = 0;
  if (a2 == 2) {
    const int range = atomic_load(&ranges);
    begin_of[range] = a3;
    bytes_of[range] = a4;
    atomic_store(&ranges, range + 1);
  }
}

static void ended(uint64_t id, void* data) {
  (void)id;
  (void)data;
  FILE* file = fopen(path, "w");
  if (file == NULL) {
    perror(path);
    return;
  }
  for (int thread = 0; thread < kThreads; ++thread)
    for (int range = 0; range < ranges; ++range)
      if (moved[thread][range][0] + moved[thread][range][1] != 0)
        fprintf(file, "%d %d %llu %llu\n", thread, range, (unsigned long long)moved[thread][range][0],
                (unsigned long long)moved[thread][range][1]);
  fclose(file);
}

SHOWN int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
  (void)info;
  for (int i = 0; i < argc; ++i)
    if (strncmp(argv[i], "out=", 4) == 0) snprintf(path, sizeof path, "%s", argv[i] + 4);
  if (path[0] == '\0') {
    fprintf(stderr, "traffic_plugin: no file: -plugin traffic_plugin.so,out=FILE\n");
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_vcpu_syscall_cb(id, called);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
