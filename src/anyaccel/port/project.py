# SPDX-License-Identifier: Apache-2.0
"""What files must know of the others that are ported with them: classes with a cuda() of their own, shared answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from anyaccel.port.facts import NO_FACTS, Facts, demanding, facts
from anyaccel.port.links import NO_IMPORTS, Imports, imports

_CLASS = re.compile(r"^([ \t]*)class[ \t]+(\w+)[ \t]*(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?[ \t]*:", re.MULTILINE)
_BLOCK = re.compile(r"^([ \t]*)(?:class|(?:async[ \t]+)?def)[ \t]+(\w+)", re.MULTILINE)
_METHODS = {"cuda", "to", "pin_memory"}
_IMPORT = re.compile(r"^[ \t]*from[ \t]+[\w.]+[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)", re.MULTILINE)
_SHARED = re.compile(r"\w*(?:cuda|gpu|device)\w*", re.IGNORECASE)


@dataclass(frozen=True)
class Project:
    """What is known of all files that are ported together.

    Modules of the same packages that are not ported with them count as well, as far as their outlines say.

    Attributes:
        own_cuda: classes that define cuda(), or are derived from one that does, and define no to() beside it; what a
            torch.nn.Module has of Module passes its cuda() by.
        own_pinning: classes that define pin_memory(), or are derived from one that does.
        imported: names about devices that a file of the project imports from another.
        keeps: what holds whether CUDA is there, for other files to ask.
        demanding: functions and classes that take "cuda" and "cpu" only, or pass the device on to one that does.
        roots: the names of the packages and modules that are ported together.
        asking: one of the files goes on asking whether something is on CUDA.
        held: files -> what they wait for, in another file that they work together with, or in their own.
    """

    own_cuda: frozenset[str] = frozenset()
    own_pinning: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    demanding: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()
    asking: bool = False
    held: Mapping[str, str] = field(default_factory=dict)


NO_PROJECT = Project()


@dataclass(frozen=True)
class Outline:
    """What one file says to the others: its classes with their bases and methods, and the names that it imports."""

    classes: tuple[tuple[str, tuple[str, ...], frozenset[str]], ...] = ()
    imported: frozenset[str] = frozenset()
    facts: Facts = NO_FACTS
    links: Imports = NO_IMPORTS


def outline(text: str) -> Outline:
    """The outline of a module, by its lines: parsing every file of a project would take minutes."""
    classes = {match.start(): match for match in _CLASS.finditer(text)}
    methods: dict[int, set[str]] = {start: set() for start in classes}
    above: list[tuple[int, int]] = []  # indents and starts of the blocks around a line; a docstring may have some too
    for match in _BLOCK.finditer(text) if classes else ():
        indent = len(match[1].expandtabs())
        while above and above[-1][0] >= indent:
            above.pop()
        decorator = text[text.rfind("\n", 0, max(match.start() - 1, 0)) + 1 : match.start()]
        if match[2] in _METHODS and above and above[-1][1] in methods and "property" not in decorator:
            methods[above[-1][1]].add(match[2])
        above.append((indent, match.start()))
    found = []
    for start, match in classes.items():
        bases = re.findall(r"(\w+)\s*(?:\[[^\]]*\])?\s*(?:,|$)", re.sub(r"\w+\s*=[^,]*", "", match[3] or ""))
        found.append((match[2], tuple(bases), frozenset(methods[start])))
    names = {name for match in _IMPORT.finditer(text) for name in _SHARED.findall(match[1])}
    return Outline(tuple(found), frozenset(names), facts(text), imports(text))


def join(outlines: Iterable[Outline], paths: Iterable[str] = ()) -> Project:
    """What the outlines of all files come to.

    Args:
        outlines: of the files.
        paths: of the files, whose folders are the packages that they make.
    """
    outlines = list(outlines)
    bases: dict[str, set[str]] = {}
    methods: dict[str, set[str]] = {}
    imported: set[str] = set()
    for each in outlines:
        imported |= each.imported
        for name, above, own in each.classes:
            bases.setdefault(name, set()).update(above)
            methods.setdefault(name, set()).update(own)
    own_cuda = frozenset(
        name
        for name in bases
        for above in [_above(name, bases)]
        if any("cuda" in methods.get(each, ()) for each in above)
        and not any("to" in methods.get(each, ()) for each in above)
    )
    own_pinning = frozenset(
        name for name in bases if any("pin_memory" in methods.get(each, ()) for each in _above(name, bases))
    )
    keeps = {name for each in outlines for name in each.facts.keeps | (each.facts.named & imported)}
    roots = {part.removesuffix(".py") for path in paths for part in PurePath(path).parts}
    return Project(
        own_cuda,
        own_pinning,
        frozenset(imported),
        frozenset(keeps),
        demanding(each.facts for each in outlines),
        frozenset(roots),
    )


def _above(name: str, bases: Mapping[str, set[str]]) -> set[str]:
    """The class and all that it is derived from."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each not in seen:
            seen.add(each)
            waiting += bases.get(each, ())
    return seen
