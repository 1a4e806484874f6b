# SPDX-License-Identifier: Apache-2.0
"""A machine of any shape, booted with qemu on Debian's kernel; what runs there sees this machine's files, read only."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
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

from architecture import GUEST, X86, Missing, find_program
from shapes import Shape

_SECONDS_TO_BOOT = 600  # 64 processors in software, with other work beside; eight take ten seconds


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
        boot = shape.architecture.boot()
        self._env = boot.env
        self._folder = tempfile.TemporaryDirectory(prefix="anyaccel-machine-")
        folder = Path(self._folder.name)
        agent, monitor = str(folder / "agent"), str(folder / "monitor")
        self._log = folder / "console"
        words = (
            f"console={shape.architecture.console} quiet panic=1 tsc=reliable nowatchdog root={boot.root}"
            f" share={','.join(map(str, boot.share))} python={boot.python} agent={GUEST / 'agent.py'}"
            f" name={name or shape.name} {shape.kernel}"
        )
        command = [shape.architecture.qemu[0], *_processor(shape), *shape.arguments(), "-nographic", "-no-reboot"]
        command += ["-kernel", str(boot.kernel), "-initrd", str(boot.ramdisk), "-append", words]
        command += [*(network or ("-nic", "none")), *_device_tree(shape, command, folder)]
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
        if boot.python != sys.executable:
            self._stand_in_for_the_environment(boot.python)
        for each in shape.before:
            self.check(["sh", "-c", each])

    def _stand_in_for_the_environment(self, python: str) -> None:
        """Programs at the paths of those that the tests run with, for the machine's own Python."""
        script = 'mkdir -p "$0" && cd "$0" && printf "#!/bin/sh\\nexec %s \\"\\$@\\"\\n" "$1" > "$2" && chmod +x "$2"'
        folder = str(Path(sys.executable).parent)
        for name, words in ((Path(sys.executable).name, python), ("anyaccel", f"{python} -m anyaccel")):
            self.check(["sh", "-c", script, folder, words, name])

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
        seconds: float = 300,
    ) -> Running:
        """Start a command as root; `Running.result` waits for its end."""
        number = next(self._numbers)
        request = {
            "number": number,
            "command": [str(word) for word in command],
            "env": {**self._env, **(env or {})},
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
    if accelerated() and shape.architecture is X86:
        return ["-accel", "kvm", "-cpu", shape.model or "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", shape.model or shape.architecture.processor]


def _device_tree(shape: Shape, command: Sequence[str], folder: Path) -> list[str]:
    """Where cores have capacities: the device tree of the machine that the command starts, with them in it."""
    if not shape.capacities:
        return []
    if not find_program("fdtput"):
        raise Missing("a machine whose cores have capacities needs: apt-get install device-tree-compiler")
    tree = folder / "tree"
    at = command.index("-machine") + 1
    dump = [*command[:at], f"{command[at]},dumpdtb={tree}", *command[at + 1 :]]
    subprocess.run(dump, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    for cpu, capacity in enumerate(shape.capacities):
        put = ["fdtput", "-t", "i", str(tree), f"/cpus/cpu@{cpu}", "capacity-dmips-mhz", str(capacity)]
        subprocess.run(put, check=True)
    return ["-dtb", str(tree)]


@functools.cache
def accelerated() -> bool:
    """Whether the processor helps; else all is emulated, some twenty times slower."""
    words = set(Path("/proc/cpuinfo").read_text().split())
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(words & {"vmx", "svm"})
