# SPDX-License-Identifier: Apache-2.0
"""Several machines on one network that reach each other by ssh, each with a kernel and a memory of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binding import COMMAND
from machine import Machine, Running
from shapes import Shape

SHAPE = Shape("hosts", "2,sockets=1,cores=2", megabytes=1792)
_KEY = "/root/.ssh/id_ed25519"
_SSHD = """
: > /root/.bashrc && mkdir -p /run/sshd /root/.ssh && cd /root/.ssh && chmod 700 .
echo "$KEY" > id_ed25519 && chmod 600 id_ed25519
ssh-keygen -y -f id_ed25519 > authorized_keys && echo "$NAMES" > /etc/hosts
printf 'StrictHostKeyChecking no\\nUserKnownHostsFile /dev/null\\nLogLevel ERROR\\n' > config
printf 'HostKey %s\\nPermitRootLogin yes\\nStrictModes no\\nUseDNS no\\n' $PWD/id_ed25519 > /run/sshd_config
ip addr add $ADDRESS/24 dev eth0 && ip link set eth0 up && /usr/sbin/sshd -f /run/sshd_config
"""


class Hosts:
    """Machines node1, node2, … on one network. `close` ends them."""

    def __init__(self, count: int) -> None:
        self.names = [f"node{number + 1}" for number in range(count)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            group = f"230.77.0.1:{free.getsockname()[1]}"
        with ThreadPoolExecutor(count) as pool, contextlib.ExitStack() as booted:
            boots = [pool.submit(Machine, SHAPE, _card(group, at), name) for at, name in enumerate(self.names)]
            for boot in boots:
                with contextlib.suppress(Exception):
                    booted.callback(boot.result().close)
            self.machines = [boot.result() for boot in boots]
            self._key = self._make_key()
            for at in range(count):
                self.connect(at)
            self._booted = booted.pop_all()

    def __getitem__(self, at: int) -> Machine:
        return self.machines[at]

    def _make_key(self) -> str:
        script = f"mkdir -p /root/.ssh && rm -f {_KEY} && ssh-keygen -q -t ed25519 -N '' -f {_KEY} && cat {_KEY}"
        return self.machines[0].check(["sh", "-c", script]).out

    def connect(self, at: int) -> None:
        """Give a machine that has just booted its address and an sshd."""
        names = "\n".join(["127.0.0.1 localhost", *(f"{_address(at)} {name}" for at, name in enumerate(self.names))])
        env = {"KEY": self._key, "NAMES": names, "ADDRESS": _address(at)}
        self[at].check(["sh", "-c", _SSHD], env=env)

    def hostfile(self, *slots: int) -> str:
        """The path, on the first machine, of a hostfile with that many slots for each of the first machines."""
        path = f"/run/hosts-{'-'.join(map(str, slots))}"
        lines = "\n".join(f"{name} slots={count}" for name, count in zip(self.names, slots, strict=False))
        self[0].check(["sh", "-c", f"echo {shlex.quote(lines)} > {path}"])
        return path

    def start(self, *words: str | Path, seconds: float = 240, **env: str) -> Running:
        """A command of anyaccel on the first machine."""
        return self[0].start([COMMAND, *words], seconds=seconds, env=env)

    def cable(self, at: int, plugged: bool) -> None:
        self[at].monitor("set_link", name="net", up=plugged)

    @contextlib.contextmanager
    def disturbed(self, *how: str) -> Iterator[None]:
        """Delay or lose what each machine sends, in netem's words."""
        for machine in self.machines:
            machine.check(["tc", "qdisc", "add", "dev", "eth0", "root", "netem", *how])
        yield
        for machine in self.machines:
            machine.check(["tc", "qdisc", "del", "dev", "eth0", "root"])

    def left(self, at: int, seconds: float) -> Sequence[str]:
        """The commands of jobs that still run on a machine after that time; it returns once there is none."""
        until = time.monotonic() + seconds
        script = "ps -eo pid=,args= | grep -E 'anyaccel|local_rank' | grep -v -E 'agent.py|grep'"
        while (found := self[at].run(["sh", "-c", script]).out.splitlines()) and time.monotonic() < until:
            time.sleep(0.5)
        return found

    def close(self) -> None:
        self._booted.close()


def _address(at: int) -> str:
    return f"10.78.0.{at + 1}"


def _card(group: str, at: int) -> list[str]:
    device = f"virtio-net-pci,netdev=net,mac=52:54:00:00:{os.getpid() & 0xFF:02x}:{at + 1:02x}"
    return ["-netdev", f"socket,id=net,mcast={group},localaddr=127.0.0.1", "-device", device]
