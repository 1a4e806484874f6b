# SPDX-License-Identifier: Apache-2.0
"""tools/old_glibc.py: what is linked with its libraries runs with glibc 2.28, and here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

import old_glibc

# Takes what is newer than 2.28 on newer systems: threads, waiting by the steady clock, stat, exp, dlopen.
SOURCE = """
#include <dlfcn.h>
#include <sys/stat.h>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
extern "C" int work(const char* path, double x) {
  int seen = 0;
  std::thread thread([&] { seen = 1; });
  thread.join();
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_lock lock(mutex);
  const auto start = std::chrono::steady_clock::now();
  changed.wait_for(lock, std::chrono::milliseconds(30), [] { return false; });
  const bool waited = std::chrono::steady_clock::now() - start >= std::chrono::milliseconds(30);
  struct stat found;
  bool thrown = false;
  try {
    throw std::runtime_error(std::string(40, 'x'));
  } catch (const std::exception&) {
    thrown = true;
  }
  void* self = dlopen(nullptr, RTLD_NOW);
  return seen + 2 * waited + 4 * (stat(path, &found) == 0 && S_ISDIR(found.st_mode)) + 8 * thrown +
         16 * (self != nullptr) + 32 * (std::exp(x) > 2.7 && std::exp(x) < 2.8);
}
"""


def test_the_newest_version_that_old_systems_have_is_chosen_and_what_moved_goes_back():
    symbols = [
        ("exp", (2, 2, 5), "function"), ("exp", (2, 29), "function"),
        ("memcpy", (2, 2, 5), "function"), ("memcpy", (2, 14), "function"),
        ("pthread_create", (2, 17), "function"), ("pthread_create", (2, 34), "function"),
        ("pthread_self", (2, 17), "function"),
        ("stdout", (2, 17), "object"),
        ("stat", (2, 33), "function"),
    ]  # fmt: skip
    assert old_glibc.choose(iter(symbols)) == {
        "exp": ((2, 2, 5), "function", None),
        "memcpy": ((2, 14), "function", None),
        "pthread_create": ((2, 17), "function", "libpthread.so.0"),
        "pthread_self": ((2, 17), "function", None),
        "stdout": ((2, 17), "object", None),
    }


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("objdump") is None, reason="there is no g++")
def test_a_library_wants_nothing_newer_and_works(tmp_path):
    flags = old_glibc.make(tmp_path / "glibc", "g++")
    source, library = tmp_path / "work.cpp", tmp_path / "libwork.so"
    source.write_text(SOURCE)
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(source), "-o", str(library), "-Wl,-z,defs", *flags],
        check=True, timeout=100,
    )  # fmt: skip
    table = subprocess.run(["objdump", "-T", str(library)], check=True, capture_output=True, text=True).stdout
    wanted = {tuple(map(int, each.split("."))) for each in re.findall(r"\(?GLIBC_([\d.]+)\)", table)}
    assert wanted
    assert max(wanted) <= (2, 28)
    assert "GLIBCXX" not in table
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).work; f.argtypes = [ctypes.c_char_p, ctypes.c_double]"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(f(b'/', 1.0))", str(library)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "63\n", done.stderr
