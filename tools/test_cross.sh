#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compiles the native tests for another machine and runs them with qemu:
#   tools/test_cross.sh MACHINE TESTS PROCESSOR[/ISA]...
# MACHINE as uname -m calls it, TESTS a regular expression of their names, PROCESSOR a model of qemu's (-cpu), ISA what
# ANYACCEL_ISA is. With QUICK=ON only the newest variants are compiled, and tests have a few cases of each kind
# (tests/native/check.h). Where the compiler or qemu cannot be had it says so, and that these tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

machine=$1 tests=$2
shift 2
bin=$PWD/.venv/bin
folder=build/cross/$machine${QUICK:+-quick}

tools/install_test_tools.sh cross "$machine"
for program in "${machine/ppc64le/powerpc64le}-linux-gnu-g++" "qemu-$machine"; do
  if ! command -v "$program" >/dev/null; then
    echo "test_cross: there is no $program; the tests for $machine are skipped"
    exit 0
  fi
done

"$bin/cmake" -S . -B "$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$bin/python" \
  -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/cross.cmake" -DANYACCEL_CROSS="$machine" -DANYACCEL_TESTS=ON \
  -DANYACCEL_QUICK="${QUICK:-OFF}" -DANYACCEL_TEST_TIMEOUT=1800 >/dev/null
programs=$(cd tests/native && printf '%s\n' *_test.cpp | sed 's/_test\.cpp$//' | { grep -xE "$tests" || true; })
if [ -z "$programs" ]; then
  echo "test_cross: no test is called $tests" >&2
  exit 1
fi
# shellcheck disable=SC2086
MAKEFLAGS='' "$bin/cmake" --build "$folder" --target $(printf '%s_test ' $programs) -- --quiet

failed=0
for each in "$@"; do
  processor=${each%/*} isa=
  [ "$each" = "$processor" ] || isa=${each#*/}
  echo "$machine, processor $processor${isa:+, up to $isa}:"
  QEMU_CPU=$processor ANYACCEL_ISA=$isa "$bin/ctest" --test-dir "$folder" -j"$(nproc)" -R "^($tests)\$" \
    --no-tests=error --output-on-failure || failed=1
done
exit $failed
