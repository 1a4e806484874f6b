# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine, for tests: network namespaces with an sshd each and, on request, Slurm.

    python tools/test_cluster.py run 4 -- ssh node2 hostname     # set up, run a command on node1, take down
    python tools/test_cluster.py up 4 [--slurm]                  # set up, and leave it there
    python tools/test_cluster.py enter node1                     # a shell (or a command) on a host of it
    python tools/test_cluster.py down                            # take everything down

It needs root, and touches neither the machine's network nor its files: the hosts hang on a bridge inside a network
namespace of its own, and see their own /run, /dev/shm, /etc/hosts, /etc/nsswitch.conf, /etc/passwd, /etc/slurm and
/etc/ssh/ssh_config through mount namespaces; root's home there is an empty folder. All other folders are the
machine's, as on a cluster with a shared file system. Processes have one numbering on all hosts, so a test can look at
them, and all hosts have the machine's CPUs. See docs/testing-clusters.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import cluster_config

# Names of namespaces and temporary folders are PREFIX-OWNER-KEY-HOST. OWNER is a process; 0 is `up`.
PREFIX = "anyaccel-test"
NETNS = Path("/run/netns")
SUBNET = "10.77.0"
NOBODY = f"{SUBNET}.99"  # `nobody` in /etc/hosts: an address without a host
SSH_PORT = 22
SSH_OTHER_PORT = 2222  # for --ssh_port
READY_SECONDS = 30.0
END_SECONDS = 10.0


class ClusterError(RuntimeError):
    """The cluster cannot be set up; the text says why."""


def missing(slurm: bool = False) -> str | None:
    """What stands in the way of a cluster on this machine, and what to do about it; None when nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    packages = {
        "ip": "iproute2",
        "nsenter": "util-linux",
        "unshare": "util-linux",
        "setpriv": "util-linux",
        "ssh": "openssh-client",
        "ssh-keygen": "openssh-client",
        "sshd": "openssh-server",
    }
    if slurm:
        packages |= {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client"}
    for program, package in packages.items():
        if which(program) is None:
            return f"{program} is not installed; apt install {package}, or tools/install_test_tools.sh"
    name = f"{PREFIX}-{_identity(os.getpid())}-try-0"
    tried = _call(["ip", "netns", "add", name])
    _call(["ip", "netns", "del", name])
    if tried.returncode:
        return f"`ip netns add` is refused here: {tried.stderr.strip()}"
    return None


def which(program: str) -> str | None:
    """The program's path; daemons are in folders that an ordinary user's PATH lacks."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/local/sbin")


def _identity(pid: int) -> str:
    """A process for good: its number comes again, with another start time. Empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return f"{pid}.{stat.rsplit(')', 1)[1].split()[19]}"


def _call(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS, check=False, **options)


def _must(command: Sequence[str], **options: Any) -> str:
    done = _call(command, **options)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _until(ready: Callable[[], bool], what: str, why: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} took more than {READY_SECONDS:.0f} s; {why()}")
        time.sleep(0.01)


@dataclass
class Host:
    """One host of the cluster."""

    name: str
    address: str
    namespace: str
    folder: Path
    holder: int = 0  # process that keeps the host's namespaces
    daemons: dict[str, int] = field(default_factory=dict)

    def command(self, command: Sequence[str], folder: str | os.PathLike[str] | None = None) -> list[str]:
        """`command` as it must be started here to run on this host; the process that is started becomes it."""
        target = ["nsenter", f"--target={self.holder}", "--net", "--uts", "--ipc", "--mount"]
        home = f"HOME={self.folder.parent / 'home'}"
        return [*target, "--", "env", "-C", str(folder or Path.cwd()), home, *command]

    def popen(self, command: Sequence[str], *, cwd: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """subprocess.Popen on this host; `pid` is that of the command itself."""
        return subprocess.Popen(self.command(command, cwd), **options)

    def run(
        self, command: Sequence[str], *, cwd: str | os.PathLike[str] | None = None, timeout: float = 60, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run on this host, with output captured as text."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        return subprocess.run(self.command(command, cwd), text=True, timeout=timeout, check=False, **options)

    def processes(self) -> dict[int, str]:
        """Command lines of what runs on this host besides its daemons, by process number."""
        found = {}
        known = {self.holder, *self.daemons.values()}
        for pid in _processes_in(self.namespace):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if pid not in known and line:  # a zombie has no command line
                    found[pid] = line
        return found

    def disconnect(self) -> None:
        """Pull the network cable: connections stay open and hear nothing."""
        _must(["ip", "-n", self.namespace, "link", "set", "eth0", "down"])

    def reconnect(self) -> None:
        """Plug it in again."""
        _must(["ip", "-n", self.namespace, "link", "set", "eth0", "up"])

    def listens(self, port: int) -> bool:
        """Whether something listens on a TCP port here."""
        lines = Path(f"/proc/{self.holder}/net/tcp").read_text().splitlines()[1:]
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


class Cluster:
    """Hosts node1, node2, … that reach each other by these names through ssh, without a question.

    Args:
        hosts: how many.
        slurm: start munge and Slurm too, with all hosts as nodes.
        lasting: the hosts outlive this process, until `take_down` of any process.

    Raises:
        ClusterError: it cannot be set up; nothing is left behind.
    """

    def __init__(self, hosts: int = 4, *, slurm: bool = False, lasting: bool = False) -> None:
        self._lasting = lasting
        self._key = secrets.token_hex(2)
        self._name = f"{PREFIX}-{'0' if lasting else _identity(os.getpid())}-{self._key}"
        self._children: list[subprocess.Popen[bytes]] = []
        self.folder = Path()
        self.hosts: list[Host] = []
        self.has_slurm = False
        remove_leftovers()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{self._name}-"))
            self._make_hosts(hosts)
            self._start_sshd()
            if slurm:
                self.start_slurm()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def hostfile(self, slots: int | Sequence[int] = 1, hosts: int | None = None) -> str:
        """Text of a hostfile with the first `hosts` hosts."""
        chosen = self.hosts[:hosts]
        each = [slots] * len(chosen) if isinstance(slots, int) else slots
        return "".join(f"{host.name} slots={count}\n" for host, count in zip(chosen, each, strict=True))

    def processes(self) -> dict[str, dict[int, str]]:
        """What runs on the hosts besides their daemons; a host without anything is not named."""
        return {host.name: found for host in self.hosts if (found := host.processes())}

    def wait_idle(self, seconds: float) -> dict[str, dict[int, str]]:
        """Wait until nothing runs on the hosts; what still does after `seconds`."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def kill_jobs(self) -> None:
        """Kill whatever runs on the hosts besides their daemons."""
        while self.processes():
            for pid in [pid for found in self.processes().values() for pid in found]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        """Take the cluster down."""
        _remove(self._name)
        for child in self._children:
            child.wait()
        self._children.clear()

    def _spawn(self, host: Host, name: str, command: Sequence[str]) -> int:
        """Start a daemon; it ends with this process, except in a lasting cluster."""
        tied = [] if self._lasting else ["setpriv", "--pdeathsig", "KILL", "--"]
        environment = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        environment["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        with open(host.folder / f"{name}.log", "ab") as log:
            child = subprocess.Popen(
                [*tied, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                cwd="/", start_new_session=True,
            )  # fmt: skip
        self._children.append(child)
        return child.pid

    def _daemon(self, host: Host, name: str, command: Sequence[str]) -> None:
        host.daemons[name] = self._spawn(host, name, host.command(command, "/"))

    def _log(self, host: Host, name: str) -> str:
        return f"the end of {name}'s log: " + (host.folder / f"{name}.log").read_text(errors="replace")[-1000:]

    def _make_hosts(self, count: int) -> None:
        names = {f"node{number}": f"{SUBNET}.{number}" for number in range(1, count + 1)}
        switch = f"{self._name}-sw"
        (self.folder / "home").mkdir()
        links = ["link add bridge type bridge forward_delay 0", "link set bridge up"]
        _must(["ip", "netns", "add", switch])
        for number, (name, address) in enumerate(names.items(), 1):
            host = Host(name, address, f"{self._name}-{name}", self.folder / name)
            self.hosts.append(host)
            host.folder.mkdir()
            (host.folder / "slurm").mkdir()
            table = {"127.0.0.1": "localhost", **{there: known for known, there in names.items()}, NOBODY: "nobody"}
            (host.folder / "hosts").write_text("".join(f"{there}\t{known}\n" for there, known in table.items()))
            (host.folder / "nsswitch.conf").write_text(cluster_config.NSSWITCH)
            (host.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
            passwd = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
            home = str(self.folder / "home")
            lines = [":".join([*user[:5], home, "/bin/bash"] if user[0] == "root" else user) for user in passwd]
            (host.folder / "passwd").write_text("\n".join(lines) + "\n")
            (host.folder / "ssh_config").write_text(cluster_config.SSH_CONFIG.format(folder=self.folder))
            _must(["ip", "netns", "add", host.namespace])
            links += [
                f"link add port{number} type veth peer name eth0 netns {host.namespace}",
                f"link set port{number} master bridge",
                f"link set port{number} up",
            ]
        _must(["ip", "-n", switch, "-batch", "-"], input="\n".join(links) + "\n")
        for host in self.hosts:
            _must(
                ["ip", "-n", host.namespace, "-batch", "-"],
                input=f"address add {host.address}/24 dev eth0\nlink set eth0 up\n",
            )
            enter = ["nsenter", f"--net={NETNS / host.namespace}", "unshare", "--uts", "--ipc", "--mount"]
            host.holder = self._spawn(
                host, "host", [*enter, "sh", "-c", cluster_config.HOST_SCRIPT, "host", host.name, str(host.folder)]
            )
        for host in self.hosts:
            ready = Path(f"/proc/{host.holder}/root/run/ready")
            _until(ready.exists, f"setting up {host.name}", lambda host=host: self._log(host, "host"))

    def _start_sshd(self) -> None:
        for name in ("host_key", "user_key"):
            _must(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "anyaccel test", "-f", str(self.folder / name)])
        key = (self.folder / "host_key.pub").read_text()
        names = [(host.name, host.address) for host in self.hosts]
        known = [name for pair in names for name in pair] + [
            f"[{name}]:{SSH_OTHER_PORT}" for pair in names for name in pair
        ]
        (self.folder / "known_hosts").write_text(f"{','.join(known)} {key}")
        for host in self.hosts:
            settings = {"address": host.address, "port": SSH_PORT, "other_port": SSH_OTHER_PORT}
            (host.folder / "sshd_config").write_text(cluster_config.SSHD_CONFIG.format(folder=self.folder, **settings))
            self._daemon(host, "sshd", [str(which("sshd")), "-D", "-e", "-f", str(host.folder / "sshd_config")])
        for host in self.hosts:
            _until(
                lambda host=host: host.listens(SSH_PORT) and host.listens(SSH_OTHER_PORT),
                f"sshd on {host.name}",
                lambda host=host: self._log(host, "sshd"),
            )

    def start_slurm(self, cpus: int = 4) -> None:
        """Start munge and Slurm on all hosts; each has `cpus` CPUs to Slurm, whatever the machine has."""
        if self.has_slurm:
            return
        first = self.hosts[0]
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus}" for host in self.hosts)
        key = secrets.token_bytes(128)
        for host in self.hosts:
            text = cluster_config.SLURM_CONFIG.format(first=first.name, first_address=first.address, nodes=nodes)
            (host.folder / "slurm" / "slurm.conf").write_text(text)
            key_file = Path(f"/proc/{host.holder}/root/run/munge/munge.key")
            key_file.touch(0o400)
            key_file.write_bytes(key)
            settings = {"key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "munged.seed"}
            options = [f"--{option}=/run/munge/{name}" for option, name in settings.items()]
            self._daemon(host, "munged", [str(which("munged")), "--foreground", "--force", *options])
        for host in self.hosts:
            socket = Path(f"/proc/{host.holder}/root/run/munge/munge.socket.2")
            _until(socket.exists, f"munged on {host.name}", lambda host=host: self._log(host, "munged"))
        self._daemon(first, "slurmctld", [str(which("slurmctld")), "-D"])
        for host in self.hosts:
            self._daemon(host, "slurmd", [str(which("slurmd")), "-D"])
        _until(self._slurm_is_ready, "Slurm", lambda: self._log(first, "slurmctld") + self._log(first, "slurmd"))
        for host in self.hosts:
            host.daemons |= {f"{name} {pid}": pid for pid, name in host.processes().items()}  # slurmctld's helper
        self.has_slurm = True

    def _slurm_is_ready(self) -> bool:
        states = self.hosts[0].run(["sinfo", "--noheader", "--Node", "--format=%T"])
        return states.stdout.split() == ["idle"] * len(self.hosts)


def _processes_in(namespace: str) -> list[int]:
    """Processes whose network is that namespace."""
    try:
        wanted = (NETNS / namespace).stat().st_ino
    except OSError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino == wanted:
                    found.append(int(entry.name))
    return found


def _namespaces(name: str) -> list[str]:
    """Network namespaces of the cluster of that name."""
    return [path.name for path in NETNS.iterdir() if path.name.startswith(f"{name}-")] if NETNS.is_dir() else []


def _remove(name: str) -> None:
    """End what runs in a cluster and remove what it left."""
    namespaces = _namespaces(name)
    deadline = time.monotonic() + END_SECONDS
    while pids := [pid for namespace in namespaces for pid in _processes_in(namespace)]:
        if time.monotonic() > deadline:
            raise ClusterError(f"processes {pids} of the test cluster cannot be ended")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    for namespace in namespaces:
        _call(["ip", "netns", "del", namespace])  # its links go with it
    for folder in Path(tempfile.gettempdir()).glob(f"{name}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _clusters() -> Iterable[str]:
    """Names of all clusters that this machine has something of."""
    found = [path.name for folder in (NETNS, Path(tempfile.gettempdir())) for path in folder.glob(f"{PREFIX}-*-*-*")]
    return sorted({name.removeprefix(f"{PREFIX}-").rsplit("-", 1)[0] for name in found})


def remove_leftovers() -> None:
    """Remove clusters of processes that are gone."""
    for cluster in _clusters():
        owner = cluster.split("-")[0]
        if owner != "0" and owner != _identity(int(owner.split(".")[0])):
            _remove(f"{PREFIX}-{cluster}")


def take_down() -> None:
    """Remove lasting clusters, and those of processes that are gone."""
    for cluster in _clusters():
        if cluster.startswith("0-"):
            _remove(f"{PREFIX}-{cluster}")
    remove_leftovers()


def _enter(name: str, command: Sequence[str]) -> int:
    """Become a command on a host of the lasting cluster."""
    for namespace in _namespaces(f"{PREFIX}-0"):
        if namespace.endswith(f"-{name}"):
            holder = next((p for p in _processes_in(namespace) if Path(f"/proc/{p}/comm").read_text() == "sleep\n"), 0)
            cluster = namespace.removesuffix(f"-{name}")
            folder = next(Path(tempfile.gettempdir()).glob(f"{cluster}-*"), Path.cwd()) / name
            host = Host(name, "", namespace, folder, holder)
            line = host.command(command or [os.environ.get("SHELL", "/bin/sh")])
            os.execvp(line[0], line)
    print(f"test_cluster: no host {name} is up; `test_cluster.py up 4` makes node1 to node4", file=sys.stderr)
    return 1


def _run(hosts: int, slurm: bool, command: Sequence[str]) -> int:
    started = time.monotonic()
    with Cluster(hosts, slurm=slurm) as cluster:
        print(f"test_cluster: {hosts} hosts in {time.monotonic() - started:.1f} s", file=sys.stderr)
        child = cluster[0].popen(command or [os.environ.get("SHELL", "/bin/sh")])
        try:
            return int(child.wait())
        finally:
            child.kill()
            child.wait()


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="test_cluster.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="action", required=True)
    for action, text in (
        ("up", "set up, and leave it there"),
        ("run", "set up, run a command (or a shell) on node1, take down"),
    ):
        one = commands.add_parser(action, help=text)
        one.add_argument("hosts", type=int, help="how many hosts")
        one.add_argument("--slurm", action="store_true", help="with Slurm")
        if action == "run":
            one.add_argument("command", nargs="*", help="after --")
    enter = commands.add_parser("enter", help="a shell, or a command, on a host of `up`")
    enter.add_argument("host")
    enter.add_argument("command", nargs="*", help="after --")
    commands.add_parser("down", help="take down what `up` and crashed runs left")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    try:
        if given.action == "down":
            take_down()
            return 0
        if given.action == "enter":
            return _enter(given.host, given.command)
        if why := missing(given.slurm):
            raise ClusterError(why)
        if given.action == "run":
            return _run(given.hosts, given.slurm, given.command)
        cluster = Cluster(given.hosts, slurm=given.slurm, lasting=True)
        print(*(f"{host.name} {host.address}" for host in cluster), sep="\n")
        return 0
    except ClusterError as error:
        print(f"test_cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
