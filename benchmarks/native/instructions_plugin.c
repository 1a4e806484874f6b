// SPDX-License-Identifier: Apache-2.0
// A plugin for qemu 7.2's user mode: writes the number of instructions that a program has executed into the file that
// its argument `out` names, when the program ends. Each block of code adds its length to one number, so threads have to
// be one. What is declared here is the part of qemu's plugin interface, version 1, that it takes.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct qemu_plugin_tb;
extern void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*call)(uint64_t id, struct qemu_plugin_tb* block));
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int operation, void* to,
                                                     uint64_t number);
extern void qemu_plugin_register_atexit_cb(uint64_t id, void (*call)(uint64_t id, void* data), void* data);

#define SHOWN __attribute__((visibility("default")))
SHOWN int qemu_plugin_version = 1;

static const int kAdd = 0;  // the only operation of version 1
static uint64_t executed;
static char path[4096];

static void translated(uint64_t id, struct qemu_plugin_tb* block) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &executed, qemu_plugin_tb_n_insns(block));
}

static void ended(uint64_t id, void* data) {
  (void)id;
  (void)data;
  FILE* file = fopen(path, "w");
  if (file == NULL) {
    perror(path);
    return;
  }
  fprintf(file, "%llu\n", (unsigned long long)executed);
  fclose(file);
}

SHOWN int qemu_plugin_install(uint64_t id, const void* info, int argc, char** argv) {
  (void)info;
  for (int i = 0; i < argc; ++i)
    if (strncmp(argv[i], "out=", 4) == 0) snprintf(path, sizeof path, "%s", argv[i] + 4);
  if (path[0] == '\0') {
    fprintf(stderr, "instructions_plugin: no file: -plugin instructions_plugin.so,out=FILE\n");
    return 1;
  }
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, ended, NULL);
  return 0;
}
