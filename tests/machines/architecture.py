# SPDX-License-Identifier: Apache-2.0
"""What machines of one architecture boot with: a kernel, a ramdisk, and the folder that is their root."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

GUEST = Path(__file__).parent / "guest"
REPOSITORY = Path(__file__).parent.parent.parent
_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_net", "sch_netem")
_TOOLS = {"busybox": "busybox-static", "cpio": "cpio", "depmod": "kmod"}
# For arm64: what this repository is run with there, and what the tests compare with.
_ARM64_PACKAGES = (
    "linux-image-arm64 busybox-static numactl libnuma1 hwloc-nox libhwloc15 libudev1 libtinfo6 python3.11-minimal "
    "libpython3.11-minimal libpython3.11-stdlib libc6 libexpat1 zlib1g libffi8 libssl3 libbz2-1.0 liblzma5 "
    "libsqlite3-0 libstdc++6 libgcc-s1 libuuid1 libcrypt1"
)
_ARM64_SITE = REPOSITORY / "build" / "cross" / "python" / "site"  # tools/arm64_package.sh makes it


class Missing(Exception):
    """What is needed to boot a machine, and cannot be had."""


@dataclass(frozen=True)
class Boot:
    """Attributes:
    kernel, ramdisk: files that qemu starts.
    root: the folder of this host that is the machine's root.
    share: more folders of this host, which the machine has at their own paths.
    python: there.
    """

    kernel: Path
    ramdisk: Path
    root: str = "/"
    share: tuple[Path, ...] = ()
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """Attributes:
    qemu: the program, and Debian's package of it.
    machine: its -machine.
    processor: its -cpu, where a shape names none.
    console: the serial port of the kernel's messages.
    """

    name: str
    qemu: tuple[str, str]
    machine: str
    processor: str
    console: str

    def boot(self) -> Boot:
        """Raises:
        Missing: a program, a package, or our modules for it.
        """
        missing = [package for program, package in (self.qemu, *_TOOLS.items()) if not find_program(program)]
        if missing:
            raise Missing(f"booting machines needs: apt-get install {' '.join(missing)}")
        return _boot_arm64() if self.name == "aarch64" else _boot_x86()


X86 = Architecture("x86_64", ("qemu-system-x86_64", "qemu-system-x86"), "q35", "max", "ttyS0")
ARM64 = Architecture("aarch64", ("qemu-system-aarch64", "qemu-system-arm"), "virt,gic-version=3", "max", "ttyAMA0")


def find_program(name: str) -> str | None:
    """Its path, those of administrators included."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _cache() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anyaccel-tests" / "machine"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


@functools.cache
def _boot_x86() -> Boot:
    cache = _cache()
    if not list(cache.glob("kernel/boot/vmlinuz-*")):
        _fetch_kernel(cache)
    (kernel,) = cache.glob("kernel/boot/vmlinuz-*")
    return Boot(kernel, _make_ramdisk(cache / "ramdisk", cache / "kernel", Path(str(find_program("busybox")))))


@functools.cache
def _boot_arm64() -> Boot:
    if not list((_ARM64_SITE / "anyaccel").glob("_native*.so")):
        raise Missing("arm64 machines need the package for arm64: tools/arm64_package.sh")
    cache = _cache()
    root = cache / "arm64"
    if not root.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [str(REPOSITORY / "tools" / "arm64_root.sh"), f"{folder}/root", *_ARM64_PACKAGES.split()]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"arm64 machines need Debian's packages: {done.stderr.strip()[-400:]}")
            (Path(folder) / "root").replace(root)
    (kernel,) = root.glob("boot/vmlinuz-*")
    ramdisk = _make_ramdisk(cache / "ramdisk-arm64", root, root / "bin" / "busybox")
    env = {"PYTHONPATH": str(_ARM64_SITE)}
    return Boot(kernel, ramdisk, str(root), (GUEST, _ARM64_SITE), "/usr/bin/python3.11", env)


def _fetch_kernel(cache: Path) -> None:
    shown = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in shown.splitlines() if "Depends:" in line]
    if not names:
        raise Missing("booting machines needs Debian's package linux-image-amd64, of which apt knows nothing")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        for command in (["apt-get", "download", "-q", names[0]], ["sh", "-c", "dpkg -x *.deb kernel"]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"booting machines needs Debian's package {names[0]}: {done.stderr.strip()}")
        (Path(folder) / "kernel").replace(cache / "kernel")


def _make_ramdisk(made: Path, kernel: Path, busybox: Path) -> Path:
    """Pack guest/init with busybox and those modules of the kernel in a folder that the first minute needs."""
    (release,) = (kernel / "lib" / "modules").iterdir()
    newest = max(path.stat().st_mtime for path in (GUEST / "init", Path(__file__)))
    if made.exists() and made.stat().st_mtime > newest:
        return made
    subprocess.run([str(find_program("depmod")), "-b", str(kernel), release.name], check=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        root = Path(folder) / "root"
        for name in ("bin", "modules", "proc", "sys", "dev", "lower", "new"):
            (root / name).mkdir(parents=True)
        shutil.copy(busybox, root / "bin" / "busybox")
        shutil.copy(GUEST / "init", root / "init")
        (root / "init").chmod(0o755)
        order: dict[str, None] = {}
        for module in _MODULES:
            command = [str(find_program("modprobe")), "-d", str(kernel), "-S", release.name]
            shown = subprocess.run([*command, "--show-depends", module], capture_output=True, text=True, check=True)
            for line in shown.stdout.splitlines():
                if line.startswith("insmod"):
                    file = Path(line.split()[1])
                    shutil.copy(file, root / "modules" / file.name)
                    order[file.name] = None
        (root / "modules" / "order").write_text("\n".join(order) + "\n")
        pack = f"cd {root} && find . | cpio -o -H newc --quiet | gzip -1 > {folder}/ramdisk"
        subprocess.run(["sh", "-c", pack], check=True)
        (Path(folder) / "ramdisk").replace(made)
    return made
