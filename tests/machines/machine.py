# SPDX-License-Identifier: Apache-2.0
"""A machine of any shape, booted with qemu on Debian's kernel; what runs there sees this machine's files, read only."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import Shape

GUEST = Path(__file__).parent / "guest"
REPOSITORY = Path(__file__).parent.parent.parent
_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_net", "sch_netem")
_PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "cpio": "cpio", "depmod": "kmod"}
_SECONDS_TO_BOOT = 600  # 64 processors in software, with other work beside; eight take ten seconds


class Missing(Exception):
    """What is needed to boot a machine, and cannot be had."""


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    def json_lines(self) -> list[Any]:
        """Those of the output's lines that are objects."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


class Machine:
    """A machine that runs. `close` ends it.

    Args:
        network: arguments of qemu for its network.
        name: of the host; the shape's, if it is not given.
    """

    def __init__(self, shape: Shape, network: Sequence[str] = (), name: str = "") -> None:
        self.shape = shape
        kernel, ramdisk = boot_files()
        self._folder = tempfile.TemporaryDirectory(prefix="anyaccel-machine-")
        folder = Path(self._folder.name)
        agent, monitor = str(folder / "agent"), str(folder / "monitor")
        self._log = folder / "console"
        words = (
            f"console=ttyS0 quiet panic=1 tsc=reliable nowatchdog python={sys.executable}"
            f" agent={GUEST / 'agent.py'} name={name or shape.name}"
        )
        command = ["qemu-system-x86_64", *_processor(shape), *shape.arguments(), "-nographic", "-no-reboot"]
        command += ["-kernel", str(kernel), "-initrd", str(ramdisk), "-append", words, *(network or ("-nic", "none"))]
        command += ["-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"]
        command += ["-chardev", f"socket,id=agent,path={agent},server=on,wait=off", "-device", "virtio-serial-pci"]
        command += ["-device", "virtserialport,chardev=agent,name=agent", "-qmp", f"unix:{monitor},server=on,wait=off"]
        with self._log.open("wb") as log:
            self._qemu = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        self._numbers = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._answered = threading.Condition()
        self._boots = 1
        self._lost = ""
        self._monitor_path = monitor
        self._reader: Any = None
        try:
            self._port = self._connect(agent)
            self._reader = self._port.makefile("rb")
            self._expect_ready()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._read, daemon=True).start()
        for each in shape.before:
            self.check(["sh", "-c", each])

    def _connect(self, path: str) -> socket.socket:
        until = time.monotonic() + _SECONDS_TO_BOOT
        while time.monotonic() < until and self._qemu.poll() is None:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(path)
            except OSError:
                made.close()
                time.sleep(0.05)
                continue
            made.settimeout(_SECONDS_TO_BOOT)
            return made
        raise RuntimeError(f"{self.shape.name}: qemu did not start:\n{self._console()}")

    def _expect_ready(self) -> None:
        try:
            line = self._reader.readline()
        except OSError:  # it takes too long, or qemu has ended
            line = b""
        if line != b'{"ready": true}\n':
            raise RuntimeError(f"{self.shape.name}: the machine did not boot:\n{self._console()}")
        self._port.settimeout(None)

    def _console(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._reader:
                answer = json.loads(line)
                with self._answered:
                    if "ready" in answer:
                        self._boots += 1
                    else:
                        self._answers[answer.pop("number")] = answer
                    self._answered.notify_all()
        with self._answered:
            self._lost = "the machine has ended"
            self._answered.notify_all()

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        folder: str | Path = "/root",
        seconds: float = 120,
    ) -> Running:
        """Start a command as root; `Running.result` waits for its end."""
        number = next(self._numbers)
        request = {
            "number": number,
            "command": [str(word) for word in command],
            "env": dict(env or {}),
            "folder": str(folder),
            "seconds": seconds,
        }
        self._port.sendall(json.dumps(request).encode() + b"\n")
        return Running(self, number, seconds, " ".join(request["command"]))

    def run(self, command: Sequence[str | Path], **more: Any) -> Result:
        """Run a command to its end."""
        return self.start(command, **more).result()

    def check(self, command: Sequence[str | Path], **more: Any) -> Result:
        """Run a command that must succeed."""
        found = self.run(command, **more)
        assert found.status == 0, f"{self.shape.name}: {command} ended with {found.status}:\n{found.out}\n{found.err}"
        return found

    def anyaccel(self, *words: str | Path, **more: Any) -> Result:
        """Run the command of the environment that the tests run in."""
        return self.run([Path(sys.executable).parent / "anyaccel", *words], **more)

    def has_answered(self, number: int) -> bool:
        with self._answered:
            return number in self._answers or bool(self._lost)

    def wait(self, number: int, seconds: float, what: str) -> Result:
        with self._answered:
            there = self._answered.wait_for(lambda: number in self._answers or self._lost, seconds + 60)
            if number not in self._answers:
                why = self._lost or ("" if there else "the machine does not answer")
                raise RuntimeError(f"{self.shape.name}: {what}: {why}:\n{self._console()}")
            answer = self._answers.pop(number)
        if answer["status"] is None:
            raise TimeoutError(f"{self.shape.name}: {what}: not done in {seconds} s\n{answer['out']}\n{answer['err']}")
        return Result(**answer)

    def monitor(self, command: str, **arguments: Any) -> None:
        """Give qemu a command, such as `stop`, `cont` and `system_reset`."""
        with socket.socket(socket.AF_UNIX) as made:
            made.settimeout(30)
            made.connect(self._monitor_path)
            lines = made.makefile("rwb")
            lines.readline()
            for name, given in (("qmp_capabilities", {}), (command, arguments)):
                lines.write(json.dumps({"execute": name, "arguments": given}).encode() + b"\n")
                lines.flush()
                while "event" in (answer := json.loads(lines.readline())):
                    continue
                assert "return" in answer, answer

    def reset(self) -> None:
        """Restart it at once, as after a power failure; `wait_for_boot` waits until it can be used again."""
        self._boots = 0
        self.monitor("set-action", reboot="reset")
        self.monitor("system_reset")

    def wait_for_boot(self) -> None:
        with self._answered:
            assert self._answered.wait_for(lambda: self._boots or self._lost, _SECONDS_TO_BOOT), self._console()
        assert not self._lost, self._lost

    def close(self) -> None:
        self._qemu.kill()
        self._qemu.wait()
        if self._reader is not None:
            self._reader.close()
            self._port.close()
        self._folder.cleanup()


@dataclass(frozen=True)
class Running:
    """A command that runs on a machine."""

    machine: Machine
    number: int
    seconds: float
    what: str

    def done(self) -> bool:
        """Whether it has ended."""
        return self.machine.has_answered(self.number)

    def result(self) -> Result:
        return self.machine.wait(self.number, self.seconds, self.what)


def _processor(shape: Shape) -> list[str]:
    if accelerated():
        return ["-accel", "kvm", "-cpu", shape.model or "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", shape.model or "max"]


@functools.cache
def accelerated() -> bool:
    """Whether the processor helps; else all is emulated, some twenty times slower."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(words & {"vmx", "svm"})


@functools.cache
def boot_files() -> tuple[Path, Path]:
    """Debian's kernel, and the memory disk that it starts with; kept in the user's cache folder.

    Raises:
        Missing: a program or the kernel's package.
    """
    missing = [package for program, package in _PROGRAMS.items() if not _program(program)]
    if missing:
        raise Missing(f"booting machines needs: apt-get install {' '.join(missing)}")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anyaccel-tests" / "machine"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("kernel/boot/vmlinuz-*")):
        _fetch_kernel(cache)
    (kernel,) = cache.glob("kernel/boot/vmlinuz-*")
    return kernel, _make_ramdisk(cache)


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


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


def _make_ramdisk(cache: Path) -> Path:
    (release,) = (cache / "kernel" / "lib" / "modules").iterdir()
    made = cache / "ramdisk"
    newest = max(path.stat().st_mtime for path in (GUEST / "init", Path(__file__)))
    if made.exists() and made.stat().st_mtime > newest:
        return made
    depmod = str(_program("depmod"))
    subprocess.run([depmod, "-b", str(cache / "kernel"), release.name], check=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root = Path(folder) / "root"
        for name in ("bin", "modules", "proc", "sys", "dev", "lower", "new"):
            (root / name).mkdir(parents=True)
        shutil.copy(str(_program("busybox")), root / "bin" / "busybox")
        shutil.copy(GUEST / "init", root / "init")
        (root / "init").chmod(0o755)
        order: dict[str, None] = {}
        for module in _MODULES:
            command = [str(_program("modprobe")), "-d", str(cache / "kernel"), "-S", release.name]
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
