# SPDX-License-Identifier: Apache-2.0
"""Which files of a project can meet each other's values: those that import one another, in several steps too."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

_FROM = re.compile(r"^[ \t]*from[ \t]+(\.*)[ \t]*([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)", re.MULTILINE)
_WHOLE = re.compile(
    r"^[ \t]*import[ \t]+([\w.]+(?:[ \t]+as[ \t]+\w+)?(?:[ \t]*,[ \t]*[\w.]+(?:[ \t]+as[ \t]+\w+)?)*)", re.MULTILINE
)
_LAZY = re.compile(r"import_module\([ \t]*[\"'](\.*)([\w.]+)[\"']")
_EXTENSION = re.compile(r"\bCUDAExtension\(\s*(?:name\s*=\s*)?[\"']([\w.]+)[\"']")
_LOADED = re.compile(r"%(?:re)?load_ext\s+([\w.]+)")
_PROGRAM = re.compile(r"(?:^[!%]?run|\bpython[\d.]*|\b(?:accelerate|launch|torchrun)\b)[ \t][^\n;&|]*?([\w./-]+)\.py\b")
_NAME = re.compile(r"(\w+|\*)(?:\s+as\s+(\w+))?")
_CODE = re.compile(r"^(?:class|def|async[ \t]+def)[ \t]", re.MULTILINE)


@dataclass(frozen=True)
class Import:
    """One import: how many dots it begins with, the module, the names that are taken from it with those they get."""

    dots: int
    module: str
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Imports:
    """What a file imports, whether it defines something, which extensions it builds, which programs it runs."""

    imports: tuple[Import, ...] = ()
    defines: bool = False
    builds: tuple[str, ...] = ()
    programs: tuple[Import, ...] = ()

    def with_programs(self, lines: Iterable[str]) -> Imports:
        """With what a notebook's lines of magic use as an import does: `!python train.py`, `%load_ext package`."""
        lines = list(lines)
        found = (match[1] for line in lines for match in _PROGRAM.finditer(line))
        parts = ([part for part in each.split("/") if part.strip(".")] for each in found)
        programs = tuple(Import(0, ".".join(each)) for each in parts if each)
        loaded = (Import(0, match[1]) for line in lines if (match := _LOADED.match(line)))
        return replace(self, imports=(*self.imports, *programs, *loaded), programs=programs)


NO_IMPORTS = Imports()


def imports(text: str) -> Imports:
    """The imports of a module, by its lines."""
    found = []
    for match in _FROM.finditer(text):
        listed = re.sub(r"#[^\n]*", "", match[3])
        names = tuple((name[1], name[2] or name[1]) for name in _NAME.finditer(listed))
        found.append(Import(len(match[1]), match[2], names))
    for match in _WHOLE.finditer(text):
        found += [Import(0, each.split()[0]) for each in match[1].split(",")]
    found += [Import(len(match[1]), match[2]) for match in _LAZY.finditer(text)]
    builds = tuple(_EXTENSION.findall(text)) if "CUDAExtension" in text else ()
    return Imports(tuple(found), _CODE.search(text) is not None, builds)


def groups(files: Mapping[str, Imports], package: Callable[[str], str] = str) -> list[list[str]]:
    """The files, parted into groups of which none imports from another; those of one package are in one group."""
    finder = Finder(files)
    above = {path: path for path in files}

    def top(path: str) -> str:
        while above[path] != path:
            above[path] = above[above[path]]
            path = above[path]
        return path

    first: dict[str, str] = {}
    for path, each in files.items():
        above[top(path)] = top(first.setdefault(package(path), path))
        if finder.only_passes_on(path):
            continue  # what it passes on is linked to those that take it from there
        for one in each.imports:
            for other in finder.meant(path, one):
                above[top(other)] = top(path)
    found: dict[str, list[str]] = {}
    for path in files:
        found.setdefault(top(path), []).append(path)
    return list(found.values())


class Finder:
    """Which of these files an import is of."""

    def __init__(self, files: Mapping[str, Imports]) -> None:
        self._files = files
        self._by_name: dict[str, list[tuple[tuple[str, ...], str]]] = {}
        for path in files:
            parts = _module(path)
            if parts and not path.endswith(".ipynb"):  # nothing imports a notebook
                self._by_name.setdefault(parts[-1], []).append((parts, path))
            for name in files[path].builds:  # what imports the extension works together with what builds it
                built = tuple(name.split("."))
                self._by_name.setdefault(built[-1], []).append((built, path))

    def only_passes_on(self, path: str) -> bool:
        return PurePath(path).stem == "__init__" and not self._files[path].defines

    def meant(self, path: str, one: Import, depth: int = 0) -> Iterable[str]:
        """The files that an import of this file may be of."""
        module = tuple(one.module.split(".")) if one.module else ()
        if one.dots:
            folder = PurePath(path).parts[: -one.dots]
            modules = self._exactly((*folder, *module))
        else:
            modules = self._ending(path, module)
        if not one.names:
            return modules
        found: list[str] = []
        for name, _ in one.names:
            if one.dots:
                inner = self._exactly((*PurePath(path).parts[: -one.dots], *module, name))
            else:
                inner = self._ending(path, (*module, name))
            found += inner or [each for one_module in modules for each in self._holding(one_module, name, depth)]
        return found

    def _holding(self, module: str, name: str, depth: int) -> Iterable[str]:
        """The files that a name of a module comes from."""
        if not self.only_passes_on(module) or depth > 8:
            return [module]
        found: list[str] = []
        taken = [(each, inner, known) for each in self._files[module].imports for inner, known in each.names]
        known_as = [each for each in taken if each[2] == name]
        for each, inner, _ in known_as or [each for each in taken if "*" in (name, each[1])]:
            passed = ((name if inner == "*" else inner, name),)
            found += self.meant(module, Import(each.dots, each.module, passed), depth + 1)
        return found or [module]

    def _exactly(self, parts: Sequence[str]) -> list[str]:
        return [path for known, path in self._by_name.get(parts[-1] if parts else "", ()) if known == tuple(parts)]

    def _ending(self, path: str, module: tuple[str, ...]) -> list[str]:
        """The files that the name of a module fits, those of the same folder first."""
        if not module:
            return []
        beside = self._exactly((*PurePath(path).parts[:-1], *module))
        if beside:
            return beside
        return [other for known, other in self._by_name.get(module[-1], ()) if known[-len(module) :] == module]


def _module(path: str) -> tuple[str, ...]:
    parts = PurePath(path).parts
    if parts[-1].startswith("__init__."):
        return parts[:-1]
    return (*parts[:-1], PurePath(path).stem)
