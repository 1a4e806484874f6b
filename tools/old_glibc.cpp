// SPDX-License-Identifier: Apache-2.0
// What newer headers and libstdc++.a take from glibc and glibc 2.28 does not have, by what it has. tools/old_glibc.py
// puts these into what the wheels are linked with; nothing else uses them.
#include <pthread.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Older headers call these with the version of the structure, which has been the same one for as long as glibc has
// these machines.
#ifdef __x86_64__
constexpr int kStat = 1;
#else
constexpr int kStat = 0;
#endif
int __xstat(int version, const char* path, struct stat* found);
int __lxstat(int version, const char* path, struct stat* found);
int __fxstat(int version, int file, struct stat* found);
int __fxstatat(int version, int folder, const char* path, struct stat* found, int flags);

int stat(const char* path, struct stat* found) noexcept { return __xstat(kStat, path, found); }
int lstat(const char* path, struct stat* found) noexcept { return __lxstat(kStat, path, found); }
int fstat(int file, struct stat* found) noexcept { return __fxstat(kStat, file, found); }
int fstatat(int folder, const char* path, struct stat* found, int flags) noexcept {
  return __fxstatat(kStat, folder, path, found, flags);
}

// libstdc++ counts references without atomics where this is true.
char __libc_single_threaded = 0;

// std::random_device's source of numbers.
uint32_t arc4random() noexcept {
  uint32_t number;
  if (getrandom(&number, sizeof number, 0) != sizeof number) abort();  // no part of so few bytes is ever returned
  return number;
}

// Waits on a clock: here on the clock of the day, until as much later. A change of that clock while it waits makes the
// wait longer or shorter, as it did with every libstdc++ of the time of glibc 2.28.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, until);
  struct timespec now;
  struct timespec deadline;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += until->tv_sec - now.tv_sec;
  deadline.tv_nsec += until->tv_nsec - now.tv_nsec;
  constexpr long kSecond = 1000000000;
  if (deadline.tv_nsec >= kSecond) {
    deadline.tv_nsec -= kSecond;
    ++deadline.tv_sec;
  } else if (deadline.tv_nsec < 0) {
    deadline.tv_nsec += kSecond;
    --deadline.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &deadline);
}

// Headers of glibc 2.38 and later rename these, for C23's binary numbers.
long old_strtol(const char*, char**, int) __asm__("strtol");
unsigned long old_strtoul(const char*, char**, int) __asm__("strtoul");
long long old_strtoll(const char*, char**, int) __asm__("strtoll");
unsigned long long old_strtoull(const char*, char**, int) __asm__("strtoull");
long __isoc23_strtol(const char* text, char** end, int base) { return old_strtol(text, end, base); }
unsigned long __isoc23_strtoul(const char* text, char** end, int base) { return old_strtoul(text, end, base); }
long long __isoc23_strtoll(const char* text, char** end, int base) { return old_strtoll(text, end, base); }
unsigned long long __isoc23_strtoull(const char* text, char** end, int base) { return old_strtoull(text, end, base); }

}  // extern "C"
