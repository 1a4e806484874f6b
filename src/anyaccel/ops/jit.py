# SPDX-License-Identifier: Apache-2.0
"""Builds the library of an op once and keeps it in the user's cache.

``<cache>/ops`` has a folder for each library, ``<name>-<hash>``, with the library and a manifest. It is found by two
hashes. The first is over what is known before a build: sources, flags, compiler, machine, Python and torch. It names
``.<name>-<hash>.headers``, the list of headers that the compiler reported in the last such build. The second hash is
over the first and the contents of those headers, so that a changed header gives another library, and changing it back
finds the old library again.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from anyaccel import env
from anyaccel.errors import OpBuildError
from anyaccel.ops import toolchains
from anyaccel.ops.toolchains import Compiler

logger = logging.getLogger("anyaccel.ops")

_FORMAT = 1  # a part of each key; increase it when the layout of the cache changes
_MANIFEST = "manifest.json"
_MESSAGE_SECONDS = 10.0
# Variables with folders in which GCC and clang find for headers and libraries.
_COMPILER_VARIABLES = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")


@dataclass(frozen=True)
class Recipe:
    """Everything that the library of an op is built from; paths are absolute.

    Attributes:
        name: name of the op, and of the library's file without suffix.
        sources: C++ files, each compiled by itself.
        include_dirs: folders of the op's own headers; a change of a header in them is noticed.
        system_include_dirs: folders whose headers are identified by `variant`, such as torch's.
        cxx_args: flags to compile with.
        link_args: flags to link with, after the objects.
        variant: the machine, the Python and, if it matters, the torch that the library is for.
    """

    name: str
    sources: tuple[Path, ...]
    include_dirs: tuple[Path, ...]
    system_include_dirs: tuple[Path, ...]
    cxx_args: tuple[str, ...]
    link_args: tuple[str, ...]
    variant: str


def build(recipe: Recipe, verbose: bool = False) -> Path:
    """The library of `recipe`: from the cache, or built now.

    One process builds at a time; the others wait for it and use what it made.

    Args:
        verbose: also write the compilers' commands and warnings to stderr (they go to the log at level DEBUG).

    Raises:
        OpBuildError: there is no compiler, it failed or took too long, or the cache cannot be used.
    """
    compiler = toolchains.find_compiler()
    key = _key(recipe, compiler)
    cache = env.cache_dir().absolute() / "ops"
    try:
        return _Entry(recipe, compiler, cache, key).library(verbose)
    except OSError as error:
        raise OpBuildError(
            f"op {recipe.name}: the folder for built ops, {cache}, cannot be used ({error}); "
            f"set {env.ANYACCEL_CACHE_DIR.name} to a folder of yours on a disk with space"
        ) from error


@dataclass(frozen=True)
class Built:
    """A library in the cache.

    Attributes:
        path: its file.
        seconds: that building it took.
        compiler: first line of what the compiler says of itself.
    """

    path: Path
    seconds: float
    compiler: str


def find(recipe: Recipe) -> Built | None:
    """The library of `recipe` in the cache; None when it is not there, or damaged. Builds nothing.

    Raises:
        OpBuildError: there is no compiler, whose version is a part of the key; or the cache is not private.
    """
    compiler = toolchains.find_compiler()
    cache = env.cache_dir().absolute() / "ops"
    if not cache.is_dir():
        return None
    _check_private(cache)
    path, _ = _Entry(recipe, compiler, cache, _key(recipe, compiler)).find()
    if path is None:
        return None
    manifest = json.loads((path.parent / _MANIFEST).read_text())
    return Built(path, float(manifest["seconds"]), str(manifest["compiler"]))


def clean(cache: Path) -> tuple[int, int]:
    """Remove every library below `cache`; programs that have loaded one keep it.

    Returns:
        Libraries removed, and bytes freed.

    Raises:
        OSError: a file cannot be removed.
    """
    libraries = size = 0
    for entry in sorted(cache.iterdir()) if cache.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            size += sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            libraries += not entry.name.startswith(".")
            shutil.rmtree(entry)
        elif not entry.name.endswith(".lock"):  # a process may hold a lock
            size += entry.stat().st_size
            entry.unlink()
    return libraries, size


def open_library(path: Path, module_name: str) -> ModuleType | ctypes.CDLL:
    """Load a built library.

    Args:
        path: the library; its name up to the first dot is the name of the op.
        module_name: full name for the module, when it is one.

    Returns:
        The Python module, when the library exports ``PyInit_<name>``; else the plain C library.

    Raises:
        OpBuildError: it cannot be loaded.
    """
    name = path.name.partition(".")[0]
    try:
        library = ctypes.CDLL(str(path))
        if not hasattr(library, f"PyInit_{name}"):
            return library
        # Python derives the name of the init function from the last part.
        full_name = ".".join([*module_name.split(".")[:-1], name])
        loader = importlib.machinery.ExtensionFileLoader(full_name, str(path))
        spec = importlib.util.spec_from_file_location(full_name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (OSError, ImportError) as error:
        advice = "libraries_args() names the libraries to link with" if "undefined symbol" in str(error) else ""
        raise OpBuildError("; ".join(filter(None, [f"op {name}: cannot load {path}: {error}", advice]))) from error
    return module


def _key(recipe: Recipe, compiler: Compiler) -> str:
    """Hash of what is known before a build."""
    parts: dict[str, object] = {
        "format": _FORMAT,
        "recipe": asdict(recipe),
        "sources": [_hash_of(source) for source in recipe.sources],
        "compiler": asdict(compiler),
        "variables": [os.environ.get(name) for name in _COMPILER_VARIABLES],
    }
    native = [flag for flag in recipe.cxx_args if "=native" in flag]
    if native:
        from anyaccel import _native

        # Home folders may be shared between machines, and the compiler detects more features than we do.
        parts["cpu"] = [_native.cpu_features(), compiler.macros(native)]
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode())[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash_of(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError as error:
        raise OpBuildError(f"{path} cannot be read: {error.strerror}") from None


class _Entry:
    """The entry of the cache for one key."""

    def __init__(self, recipe: Recipe, compiler: Compiler, cache: Path, key: str) -> None:
        self._recipe = recipe
        self._compiler = compiler
        self._cache = cache
        self._key = key
        # The prefix of the lock, the list of headers and temporary folders.
        self._hidden = f".{recipe.name}-{key}"

    def library(self, verbose: bool) -> Path:
        self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._cache.mkdir(exist_ok=True, mode=0o700)
        _check_private(self._cache)
        found, _ = self.find()
        if found is not None:
            return found
        with _locked(self._cache / f"{self._hidden}.lock", self._recipe.name):
            found, damage = self.find()  # another process may have built it meanwhile
            if found is not None:
                return found
            if damage:
                logger.warning("op %s: %s; building it again", self._recipe.name, damage)
            return self._build(verbose)

    def find(self) -> tuple[Path | None, str]:
        """The library if it is in the cache and undamaged, and a description of the damage if it is not."""
        try:
            headers = json.loads((self._cache / f"{self._hidden}.headers").read_text())
            folder = self._folder({str(header): _digest(Path(header).read_bytes()) for header in headers})
        except (OSError, ValueError, TypeError):
            return None, ""  # it was never built, or a header is missing
        if not folder.exists():
            return None, ""
        library = folder / f"{self._recipe.name}.so"
        try:
            _check_private(folder)
            expected = json.loads((folder / _MANIFEST).read_text())["sha256"]
            whole = expected == _digest(library.read_bytes())
        except (OSError, ValueError, TypeError, KeyError) as error:
            return None, f"{folder} is incomplete ({error!r})"
        return (library, "") if whole else (None, f"{library} is not what was built (its sha256 differs)")

    def _folder(self, headers: dict[str, str]) -> Path:
        digest = _digest(json.dumps([self._key, headers], sort_keys=True).encode())
        return self._cache / f"{self._recipe.name}-{digest[:16]}"

    def _build(self, verbose: bool) -> Path:
        recipe = self._recipe
        for left in self._cache.glob(f"{self._hidden}-*"):  # left by a killed build, as we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        count = len(recipe.sources)
        logger.info("building op %s (%d source%s) in %s", recipe.name, count, "" if count == 1 else "s", self._cache)
        start = time.monotonic()
        work_folder = Path(tempfile.mkdtemp(prefix=f"{self._hidden}-", dir=self._cache))
        try:
            folder = self._compile(work_folder, _announcer(verbose))
        except OpBuildError as error:
            raise OpBuildError(f"op {recipe.name}: {error}") from None
        finally:
            shutil.rmtree(work_folder, ignore_errors=True)
        logger.info("built op %s in %.1f s: %s", recipe.name, time.monotonic() - start, folder)
        return folder / f"{recipe.name}.so"

    def _compile(self, work_folder: Path, announce: Callable[[str], object]) -> Path:
        """Build in the folder `work_folder` and move the result to its place, which is returned."""
        recipe = self._recipe
        timeout = env.ANYACCEL_BUILD_TIMEOUT.get()
        started, began = time.time(), time.monotonic()
        ready = work_folder / "ready"
        ready.mkdir(mode=0o700)
        library = ready / f"{recipe.name}.so"
        objects = [work_folder / f"{source.name}.o" for source in recipe.sources]
        compiles = [
            self._compile_command(source, target) for source, target in zip(recipe.sources, objects, strict=True)
        ]
        link = [*self._compiler.command, "-shared", *map(str, objects), *recipe.link_args, "-o", str(library)]
        jobs = toolchains.max_jobs()
        for commands in (compiles, [link]):
            # Run there, so that files of killed compilers are removed with it, and relative flags do not depend on the
            # current folder.
            for output in toolchains.run_all(
                commands, jobs=jobs, seconds=timeout, since=began, folder=work_folder, announce=announce
            ):
                if output:
                    announce(output.rstrip())
        headers = _headers(objects, recipe.sources)
        _check_unchanged([*recipe.sources, *headers], started)
        hashes = {str(header): _hash_of(header) for header in headers}
        manifest = {
            "format": _FORMAT,
            "name": recipe.name,
            "variant": recipe.variant,
            "sources": {str(source): _hash_of(source) for source in recipe.sources},
            "headers": hashes,
            "compiler": self._compiler.version.partition("\n")[0],
            "commands": [shlex.join(command) for command in (*compiles, link)],
            "seconds": round(time.monotonic() - began, 3),
            "sha256": _digest(library.read_bytes()),
        }
        (ready / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        folder = self._folder(hashes)
        if folder.exists():  # it is damaged
            shutil.rmtree(folder)
        ready.rename(folder)
        (work_folder / "headers").write_text(json.dumps(sorted(hashes)))
        (work_folder / "headers").replace(self._cache / f"{self._hidden}.headers")
        return folder

    def _compile_command(self, source: Path, target: Path) -> list[str]:
        recipe = self._recipe
        dependencies = ["-MMD", "-MF", f"{target}.d", "-MT", "it"]
        includes = [f"-I{folder}" for folder in recipe.include_dirs]
        for folder in recipe.system_include_dirs:
            includes += ["-isystem", str(folder)]
        return [
            *self._compiler.command, *recipe.cxx_args, *includes, *dependencies, "-c", str(source), "-o", str(target)
        ]  # fmt: skip


def _headers(objects: Sequence[Path], sources: Sequence[Path]) -> list[Path]:
    """The headers that the compilers report work_folder `objects`, without those of the system."""
    found = set()
    for target in objects:
        rule = Path(f"{target}.d").read_text().replace("\\\n", " ").partition(":")[2]
        for name in re.findall(r"(?:\\.|[^\\\s])+", rule):
            found.add(Path(re.sub(r"\\(.)", r"\1", name).replace("$$", "$")))
    return sorted(found - set(sources))


def _check_unchanged(files: Sequence[Path], started: float) -> None:
    """Raise if a file was written after `started`, as it is unknown which contents were compiled."""
    for path in files:
        if started < path.stat().st_mtime <= time.time():
            raise OpBuildError(f"{path} was changed while it was compiled; load the op again")


def _check_private(folder: Path) -> None:
    """Check that nobody else can put code into a folder from which libraries are loaded.

    Raises:
        OpBuildError: the folder is another user's, or others may write to it.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        wrong, advice = "is not a folder", "remove it"
    elif status.st_uid != os.geteuid():
        wrong = f"belongs to user {status.st_uid}, not to you ({os.geteuid()})"
        advice = f"set {env.ANYACCEL_CACHE_DIR.name} to a folder of yours"
    elif status.st_mode & 0o022:
        wrong = f"may be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
        advice = f"if you trust what is in it: chmod 700 {folder}"
    else:
        return
    raise OpBuildError(f"built ops are not loaded from {folder}: it {wrong}; {advice}")


def _announcer(verbose: bool) -> Callable[[str], object]:
    def announce(text: str) -> None:
        logger.debug("%s", text)
        if verbose:
            sys.stderr.write(f"{text}\n")

    return announce


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Lock the building of an op; the kernel releases the lock when its holder ends in whatever way."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _acquire(descriptor, name)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        try:
            yield
        finally:
            # Closing is not enough, as a child that was forked meanwhile has the descriptor too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, name: str) -> None:
    timeout = env.ANYACCEL_BUILD_TIMEOUT.get()
    start = time.monotonic()
    next_message = start + _MESSAGE_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        if now > start + timeout:
            raise OpBuildError(
                f"op {name}: {holder} has been building it for {timeout:g} s; end that process, or set "
                f"{env.ANYACCEL_BUILD_TIMEOUT.name} to more seconds"
            )
        if now > next_message:
            logger.warning("op %s: waiting for %s to build it (%.0f s)", name, holder, now - start)
            next_message = now + _MESSAGE_SECONDS
        time.sleep(0.05)
