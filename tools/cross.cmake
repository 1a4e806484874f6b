# SPDX-License-Identifier: Apache-2.0
# For cmake's -DCMAKE_TOOLCHAIN_FILE: compiles for another machine with Debian's cross compilers, and has ctest run the
# programs with qemu. -DANYACCEL_CROSS=aarch64 (the default), riscv64, ppc64le or s390x. The processor that qemu is
# comes from the environment variable QEMU_CPU.
set(ANYACCEL_CROSS aarch64 CACHE STRING "Machine to compile for, as uname -m calls it")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ANYACCEL_CROSS)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${ANYACCEL_CROSS})
# Debian's name of the compilers and of the folder of libraries.
string(REPLACE "ppc64le" "powerpc64le" triple "${ANYACCEL_CROSS}-linux-gnu")
set(CMAKE_CXX_COMPILER ${triple}-g++)
set(CMAKE_CXX_COMPILER_TARGET ${triple})
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-${ANYACCEL_CROSS} -L /usr/${triple})

set(CMAKE_FIND_ROOT_PATH /usr/${triple})
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
