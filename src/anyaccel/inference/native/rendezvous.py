# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a native model connect, whatever they talk through until then. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel import env
from anyaccel.errors import AnyAccelError, CommError, ModelError
from anyaccel.inference.checkpoints.identity import weights_of
from anyaccel.inference.native.transport import choose_transport, end_with_process
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.launch.cluster.address import addresses_for_others
from anyaccel.topology import read_machine

if TYPE_CHECKING:
    from anyaccel.inference.native.runtime import NativeModel

# An all-gather of values that JSON can hold: takes this rank's, and returns those of all ranks.
Exchange = Callable[[Any], list[Any]]

# Names of env.WIRE_DTYPES in csrc/comm/wire_format.h.
_WIRE_FORMATS = {"fp32": "f32", "bf16": "bf16", "int8": "i8"}
# Of config.json: what says nothing about the model.
_NOTES = frozenset(("_name_or_path", "transformers_version"))


class OtherRankError(ModelError):
    """What went wrong on another rank."""


def connect_ranks(
    exchange: Exchange,
    load: Callable[[], NativeModel],
    *,
    anonymous: bool = False,
    hosts: Sequence[str] = (),
    source: Path | None = None,
    wire_dtype: str = "auto",
) -> NativeModel:
    """Do this rank's part of loading and connect the ranks; an error of one is the error of all.

    Args:
        exchange: a collective call among the ranks.
        load: loads this rank's part.
        anonymous: the ranks see each other's process ids, so that their shared memory needs no name in /dev/shm, where
            a rank that is killed just then would leave it.
        hosts: the host of each rank, by any name that is equal for ranks which can share memory; () for one host.
        source: the model's folder or file. Each host has its own, and parts of two models would make a third one,
            which talks nonsense: so the hosts compare theirs.
        wire_dtype: see ModelOptions.

    Raises:
        Unsupported: the native runtime lacks something that a rank's part needs, and nothing else is wrong anywhere.
        AnyAccelError: this rank's own error.
        OtherRankError: that of another rank.
    """
    error: BaseException | None = None
    native = None
    own: dict[str, Any] = {"error": "", "lacking": ""}
    try:
        native = load()
        own |= _create_segment(native, anonymous, hosts, source, wire_dtype)
    except (AnyAccelError, OSError, MemoryError, ValueError) as problem:
        error = problem
        own |= {"error": _text(error), "lacking": error.feature if isinstance(error, Unsupported) else ""}
    ranks = exchange(own)
    lacking = [rank["lacking"] for rank in ranks if rank["lacking"]]
    if lacking and len(lacking) == sum(bool(rank["error"]) for rank in ranks):
        raise Unsupported(lacking[0])  # each rank raises it, so that none waits for the others
    _raise_any(error, [rank["error"] for rank in ranks])
    assert native is not None
    model = native.model
    _compare(source, [rank["files"] for rank in ranks])
    _check_transports([rank["transport"].partition(":")[0] for rank in ranks])
    try:
        # A pid of another namespace means nothing here; such a peer's death is noticed by the deadline only.
        pids = [rank["pid"] if rank["pid_namespace"] == own["pid_namespace"] else 0 for rank in ranks]
        model.connect([rank["segment"] for rank in ranks], pids)
        if own["transport"]:
            end_with_process()
    except (AnyAccelError, OSError, ValueError) as problem:
        error = problem if isinstance(problem, CommError) else CommError(f"the ranks cannot be connected: {problem}")
    _raise_any(error, exchange(_text(error)))
    model.unlink()  # every rank has mapped every segment
    return native


def _create_segment(
    native: NativeModel, anonymous: bool, hosts: Sequence[str], source: Path | None, wire_dtype: str
) -> dict[str, Any]:
    """Make this rank's shared memory, and return what the others need to know of it."""
    numbers = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    several = len(set(numbers)) > 1
    wire = _WIRE_FORMATS[env.ANYACCEL_WIRE_DTYPE.get() if wire_dtype == "auto" else wire_dtype]
    transport = choose_transport(hosts)
    addresses = addresses_for_others() if several else []
    timeout = env.ANYACCEL_COMM_TIMEOUT.get()
    return {
        "segment": native.model.create_segment(timeout, anonymous, numbers, addresses, wire, transport, _own_socket()),
        "pid": os.getpid(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),  # noqa: PTH115
        "files": _contents(source, native.config) if source is not None and several else {},
        "transport": transport,
    }


def _own_socket() -> int:
    """The socket that this rank is bound to; -1 where it may run on several."""
    machine = read_machine()
    sockets = {cpu.package for cpu in machine.cpus if cpu.id in machine.allowed_cpus}
    return sockets.pop() if len(sockets) == 1 else -1


def _check_transports(kinds: Sequence[str]) -> None:
    """Raise a CommError, the same on each rank, where a rank has something else between hosts than rank 0."""
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise CommError(
                f"between hosts rank {rank} has {kind or 'tcp'} and rank 0 {kinds[0] or 'tcp'}; set "
                "ANYACCEL_BETWEEN_HOSTS to the same on all hosts"
            )


def _contents(source: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What tells a model's files from those of another; the config of a GGUF file is in the file.

    Raises:
        OSError: a file is gone.
    """
    found: dict[str, Any] = dict(weights_of(source))
    if source.is_dir():
        said = {name: value for name, value in config.items() if name not in _NOTES}
        found["config.json"] = hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()
    return found


def _compare(source: Path | None, contents: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ModelError, the same on each rank, where a file is not what rank 0 has under its name.

    What a host has under other names may be the same weights in other parts.
    """
    for rank, files in enumerate(contents):
        for name in sorted(files.keys() & contents[0].keys()):
            if files[name] != contents[0][name]:
                raise ModelError(
                    f"{source}: {name} on the host of rank {rank} is another file than on that of rank 0; "
                    "copy the model from one host to the others"
                )


def _text(error: BaseException | None) -> str:
    return "" if error is None else str(error) or type(error).__name__


def _raise_any(own: BaseException | None, texts: list[Any]) -> None:
    if own is not None:
        raise own
    for rank, text in enumerate(texts):
        if text:
            raise OtherRankError(f"rank {rank}: {text}")
