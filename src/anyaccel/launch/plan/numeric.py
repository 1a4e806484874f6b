# SPDX-License-Identifier: Apache-2.0
"""The OpenMP variables for the cores of a rank: OMP_PLACES, and those that the user has set.

Measured with torch's libgomp and Intel's libiomp5 (docs/binding.md): with OMP_PLACES alone, or OMP_PROC_BIND=true,
OpenMP pins the main thread to the first core when it starts, and threads and processes that are made later (data
loaders) inherit that one core. So the places are exported with OMP_PROC_BIND=false: a program that asks for pinning
finds the right places, and nobody is pinned who did not ask. The mask of the process keeps threads on its cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from anyaccel.topology import format_cpu_list

# A larger number is a mistake, not a reason to fill memory.
_MAX_CPU = 1 << 16
_BINDING_VARIABLES = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def places(cores: Sequence[int]) -> str:
    """OMP_PLACES for these logical CPUs: ``{0},{1}``."""
    return ",".join(f"{{{core}}}" for core in cores)


def openmp_binding(
    shares: Sequence[Sequence[int]], environ: Mapping[str, str]
) -> tuple[list[dict[str, str]], list[str], list[str]]:
    """Variables of each rank that agree with its cores.

    A value that the user has set is kept if it is valid for a rank's own cores ("close", "cores", a list of those
    cores), and replaced if not, as every rank inherits the same text.

    Args:
        shares: logical CPUs of each rank.
        environ: what the ranks inherit.

    Returns:
        Variables by rank, notes about what was kept, and warnings about what was replaced.
    """
    users = {name: environ[name] for name in _BINDING_VARIABLES if environ.get(name, "").strip()}
    if not users:
        return [{"OMP_PLACES": places(cores), "OMP_PROC_BIND": "false"} for cores in shares], [], []
    found: list[dict[str, str]] = [{} for _ in shares]
    notes, warnings = [], []
    for name, text in users.items():
        changed: list[str] = []
        for rank, (cores, variables) in enumerate(zip(shares, found, strict=True)):
            own = _on_own_cores(name, text, cores)
            if own != text:
                variables[name] = own
                changed.append(f"{own} for worker {rank}")
        if changed:
            others = " and so on" if len(changed) > 1 else ""
            warnings.append(
                f"{name}={text} is about CPUs that are not those of each worker; it becomes {changed[0]}{others}"
            )
        else:
            notes.append(f"{name}={text} is kept as it was set")
    return found, notes, warnings


def _on_own_cores(name: str, text: str, cores: Sequence[int]) -> str:
    """The text, or an equivalent one for these cores if it names others."""
    if name == "KMP_AFFINITY":
        return _intel(text, cores)
    if name == "GOMP_CPU_AFFINITY":
        named = _gnu_list(text)
        return format_cpu_list(cores) if _names_other_cpus(named, cores) else text
    if name == "OMP_PLACES":
        named = _place_list(text)
        return places(cores) if _names_other_cpus(named, cores) else text
    return text


def _intel(text: str, cores: Sequence[int]) -> str:
    """KMP_AFFINITY: libiomp stays within the mask of the process unless it reads `norespect`."""
    words = _split(text)
    found = []
    for word in words:
        name, equals, value = word.strip().partition("=")
        if name.strip().lower() == "norespect":
            found.append("respect")
        elif name.strip().lower() == "proclist" and equals:
            named = _gnu_list(value.strip().strip("[]").replace("{", " ").replace("}", " "))
            found.append(f"proclist=[{format_cpu_list(cores)}]" if _names_other_cpus(named, cores) else word)
        else:
            found.append(word)
    return ",".join(found)


def _split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    words, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += character
    return words


def _names_other_cpus(named: Iterable[int] | None, cores: Sequence[int]) -> bool:
    """Whether a CPU is named that is not among the cores; stops at the first, as a short text can name billions."""
    own = set(cores)
    return named is not None and any(cpu not in own for cpu in named)


def _gnu_list(text: str) -> Iterator[int] | None:
    """CPUs of ``"0 3 1-2 4-15:2"``; None if it is no such list, which the OpenMP library will report."""
    found = []
    try:
        for part in text.replace(",", " ").split():
            numbers, _, step = part.partition(":")
            first, dash, last = numbers.partition("-")
            found.append(range(_number(first), _number(last if dash else first) + 1, _number(step or "1")))
    except ValueError:
        return None
    return chain.from_iterable(found)


def _place_list(text: str) -> Iterator[int] | None:
    """CPUs of ``"{0,1},{2:4}:3:4"``; None for a name such as "cores", and if it is no such list."""
    found: list[tuple[list[range], range]] = []
    try:
        for part in map(str.strip, _split(text)):
            if part.startswith("!"):
                continue
            place, closing, rest = part.removeprefix("{").partition("}")
            if closing:
                found.append(([_interval(interval) for interval in place.split(",")], _interval(f"0{rest}")))
            else:
                found.append(([_interval(part)], range(1)))
    except ValueError:
        return None
    return (cpu + offset for intervals, offsets in found for cpu in chain(*intervals) for offset in offsets)


def _interval(text: str) -> range:
    """CPUs of "first", "first:count" or "first:count:step"."""
    first, count, step, *more = [*map(_number, text.split(":")), 1, 1][: max(3, text.count(":") + 1)]
    if more:
        raise ValueError(text)
    return range(first, first + count * step, step)


def _number(text: str) -> int:
    number = int(text)
    if not 0 <= number < _MAX_CPU:
        raise ValueError(text)
    return number
