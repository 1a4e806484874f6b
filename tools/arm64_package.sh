#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The package for arm64, to be run with qemu: build/cross/python/site/anyaccel, beside what `anyaccel generate` imports,
# for the Python of tools/arm64_python.sh. Where the compiler, qemu or Debian's packages cannot be had it says so.
# With an argument, `_native`: only that module, which jobs on machines need (tests/machines).
set -euo pipefail
cd "$(dirname "$0")/.."

modules=${*:-_native _llm}
tools/install_test_tools.sh cross aarch64
for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  if ! command -v "$program" >/dev/null; then
    echo "arm64_package: there is no $program; the tests of an arm64 Python are skipped"
    exit 0
  fi
done
python=$PWD/build/cross/python
if ! tools/arm64_python.sh "$python"; then
  echo "arm64_package: there is no arm64 Python; its tests are skipped"
  exit 0
fi

bin=$PWD/.venv/bin
folder=build/cross/aarch64 # where the native tests are built too
# The modules are for this one Python: its headers, and this machine's Python for the build.
"$bin/cmake" -S . -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cross.cmake" -DANYACCEL_CROSS=aarch64 -DSKBUILD=ON \
  -DPython_EXECUTABLE="$bin/python" -DPython_INCLUDE_DIR="$python/root/usr/include/python3.11" \
  -Dnanobind_DIR="$("$bin/python" -m nanobind --cmake_dir)" >/dev/null
# shellcheck disable=SC2086
MAKEFLAGS='' "$bin/cmake" --build "$folder" --target $modules -- --quiet
rm -rf "$python/site/anyaccel"
cp -r src/anyaccel "$python/site/"
for module in $modules; do cp "$folder/$module".*.so "$python/site/anyaccel/$module.so"; done
