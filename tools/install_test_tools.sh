#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the cluster tests run jobs with: MPI, pdsh, Slurm and sshd from Debian's packages, Intel MPI from PyPI;
# and oneCCL from PyPI, for the tests of backend ccl and benchmarks/allreduce.py.
# What is there is left alone (then it takes 0.1 s); what cannot be had is one line, and the tests that need it are
# skipped. Nothing that is installed here is started, now or at the next boot.
# And on x86-64 the cross compiler of arm64 with qemu, for the native tests that `make test` runs for it.
# With the argument `machines`: instead qemu and what tests/machines boots with it.
# With arguments, `cross MACHINE...`: instead the cross compilers for these machines (as uname -m calls them) and qemu,
# for tools/test_cross.sh.
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
pip=("$python" -m pip --disable-pip-version-check install -q --no-compile --no-deps --ignore-installed)
impi=${IMPI_FOLDER:-.venv/impi} # mpiexec.hydra is in its bin/
oneccl=${CCL_ROOT:-.venv/oneccl} # libccl.so.1 is in its lib/
PATH=$PATH:/usr/sbin:/sbin

say() { echo "install_test_tools: $*"; }

# program:package
what="tests of clusters and of arm64"
wanted="mpirun.openmpi:openmpi-bin mpiexec.mpich:mpich pdsh:pdsh sshd:openssh-server ssh:openssh-client
  slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge ip:iproute2 numactl:numactl
  nsenter:util-linux"
[ "$(uname -m)" != x86_64 ] || wanted="$wanted aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64:qemu-user"
if [ "${1:-}" = cross ]; then
  what="tests for ${*:2}" wanted=
  for machine in "${@:2}"; do
    triple=${machine/ppc64le/powerpc64le}-linux-gnu
    wanted="$wanted $triple-g++:g++-$triple qemu-$machine:qemu-user"
  done
fi

if [ "${1:-}" = machines ]; then
  what="tests of machines that boot"
  wanted="qemu-system-x86_64:qemu-system-x86 qemu-system-aarch64:qemu-system-arm fdtput:device-tree-compiler
    busybox:busybox-static cpio:cpio depmod:kmod numactl:numactl
    lstopo-no-graphics:hwloc-nox mpirun.openmpi:openmpi-bin mpiexec.mpich:mpich ip:iproute2 sshd:openssh-server"
fi

packages=
for pair in $wanted; do
  command -v "${pair%%:*}" >/dev/null || packages="$packages ${pair#*:}"
done

# Debian starts a service when it installs one, unless this file says no.
policy=/usr/sbin/policy-rc.d
made_policy=
tidy() { [ -z "$made_policy" ] || rm -f "$policy"; }
trap tidy EXIT

install_packages() {
  if ! command -v apt-get >/dev/null; then
    say "this is not Debian or Ubuntu; the $what need:$packages"
    return
  fi
  if [ "$(id -u)" != 0 ]; then
    say "not root, so nothing is installed; the $what need: sudo apt-get install$packages"
    return
  fi
  if [ ! -e "$policy" ]; then
    made_policy=yes
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
  fi
  local units_before log package unit
  units_before=$(ls /etc/systemd/system/multi-user.target.wants 2>/dev/null)
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  local get=(apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=2)
  say "installing$packages"
  # The lists may be missing, or too old for the server.
  # shellcheck disable=SC2086
  if ! "${get[@]}" install -y --no-install-recommends $packages >"$log" 2>&1; then
    "${get[@]}" update >>"$log" 2>&1
    # shellcheck disable=SC2086
    if ! "${get[@]}" install -y --no-install-recommends $packages >>"$log" 2>&1; then
      for package in $packages; do # one that cannot be had must not take the others with it
        "${get[@]}" install -y --no-install-recommends "$package" >>"$log" 2>&1 ||
          say "$package cannot be installed: $(grep -E '^E: ' "$log" | tail -1)"
      done
    fi
  fi
  rm -f "$log"
  for unit in ssh munge slurmd slurmctld; do
    if [ -e "/etc/systemd/system/multi-user.target.wants/$unit.service" ] &&
      ! grep -qx "$unit.service" <<<"$units_before"; then
      systemctl -q disable "$unit.service" 2>/dev/null
    fi
  done
}

[ -z "$packages" ] || install_packages
[ "${1:-}" != cross ] || exit 0

# In a folder of its own: nothing of it shadows what the project's environment has. It is for x86-64 only.
if [ ! -x "$impi/bin/mpiexec.hydra" ]; then
  if [ "$(uname -m)" != x86_64 ]; then
    say "Intel MPI is for x86-64, this is $(uname -m); its tests are skipped"
  else
    say "installing impi-rt from PyPI into $impi (130 MB)"
    why=$("${pip[@]}" --prefix "$impi" impi-rt 2>&1)
    if [ -x "$impi/bin/mpiexec.hydra" ]; then
      # Its bin/ goes on a PATH, where nobody wants benchmarks.
      rm -f "$impi"/bin/IMB-*
    else
      say "impi-rt cannot be installed, and the tests of Intel MPI are skipped: $(tail -1 <<<"$why")"
      rm -rf "$impi"
    fi
  fi
fi

# oneCCL with its headers, and the Intel MPI of its time with libfabric and headers, in a folder of their own too: as
# packages of the environment they would make backend ccl the default of every test. No --target: these wheels are data.
if [ ! -e "$oneccl/lib/libccl.so.1" ]; then
  if [ "$(uname -m)" != x86_64 ]; then
    say "oneCCL is for x86-64, this is $(uname -m); its tests are skipped"
  else
    say "installing oneCCL from PyPI into $oneccl (150 MB)"
    why=$("${pip[@]}" --prefix "$oneccl" \
      "oneccl-cpu==2021.16.*" "oneccl-cpu-devel==2021.16.*" "impi-rt==2021.16.*" "impi-devel==2021.16.*" 2>&1)
    if [ -e "$oneccl/lib/libccl.so.1" ]; then
      rm -f "$oneccl"/bin/IMB-* "$oneccl"/lib/libccl.a "$oneccl"/lib/ccl/cpu/lib/libccl.a
    else
      say "oneCCL cannot be installed, and its tests are skipped: $(tail -1 <<<"$why")"
      rm -rf "$oneccl"
    fi
  fi
fi
exit 0
