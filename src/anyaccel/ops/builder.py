# SPDX-License-Identifier: Apache-2.0
"""Op builders, with DeepSpeed's contract: a class that names its sources and loads the library built from them."""

from __future__ import annotations

import abc
import ctypes
import importlib
import importlib.util
import inspect
import logging
import os
import platform
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from anyaccel import env
from anyaccel.errors import CapabilityError, OpBuildError, UsageError
from anyaccel.ops import jit, toolchains

logger = logging.getLogger("anyaccel.ops")

# The loaded library of each builder class and name, for the life of the process, as in DeepSpeed.
_loaded: dict[tuple[type[OpBuilder], str], Any] = {}

# Flags that GCC and clang also need when they link.
_ALSO_LINK = re.compile(r"-(f|m|O|g|pthread$)")


class OpStatus(NamedTuple):
    """Where an op would come from.

    Attributes:
        kind: "prebuilt", "cached" (built here before), "jit" (would be built now) or "unavailable".
        detail: the library's file; for "jit" the compiler; for "unavailable" the reason.
        seconds: that building it took; None where that is not known.
    """

    kind: str
    detail: str
    seconds: float | None = None


class OpBuilder(abc.ABC):
    """How one op is built and loaded.

    A subclass gives `NAME`, `absolute_name()` and `sources()`. `load()` returns the op: the copy that was built when
    its package was installed, else one that is built now and kept in the user's cache.

    What is returned depends on the library. One that exports ``PyInit_<NAME>`` is a Python extension module. Any other
    is a plain C library, a `ctypes.CDLL` (calls release the GIL): its functions are ``extern "C"``, and the caller sets
    their types, since ctypes would pass an address as a 32-bit int:

        library = SimdScaleBuilder().load()
        library.scale.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float]
        library.scale.restype = None
        library.scale(tensor.data_ptr(), tensor.numel(), 2.0)

    Paths that `sources()` and `include_paths()` return are absolute, or relative to the folder of the module that
    defines the class (or a base class, for what is not there). Where the class has a method
    ``<prefix>_kernel_path(code_path)``, a relative source goes through it first, and a relative include folder through
    ``<prefix>_kernel_include(code_path)``; what they return is absolute or relative to the same folder.

    A prebuilt copy is used when it is for this machine, Python and torch: when its ``anyaccel_variant`` equals
    `variant()`. That is an attribute of a Python module, or in a C library a symbol:
    ``extern "C" const char anyaccel_variant[] = ANYACCEL_VARIANT;`` (the macro is defined in every build). A copy
    without one is taken as it is.

    Attributes:
        NAME: short name, such as ``"simd_scale"``; also the name of the library's file.
        BUILD_VAR: environment variable that switches the op off with the value 0.
        TORCH_HEADERS: the sources include torch's headers: they are found, torch is linked with, and another version of
            torch is another build.
        ACCELERATOR: name of the accelerator in errors.
    """

    NAME: ClassVar[str] = ""
    BUILD_VAR: ClassVar[str] = ""
    TORCH_HEADERS: ClassVar[bool] = False
    ACCELERATOR: ClassVar[str] = "host"

    def __init__(self, name: str | None = None) -> None:
        """Args: name: instead of `NAME`.

        Raises:
            UsageError: the name is not made of letters, digits, ``_`` and ``-``.
        """
        self.name = self.NAME if name is None else name
        if not re.fullmatch(r"\w[\w-]*", self.name):
            raise UsageError(
                f"{type(self).__name__}: the name of an op has letters, digits, _ and - only, not {self.name!r}"
            )

    # Overridden by subclasses -------------------------------------------------------------------------------

    @abc.abstractmethod
    def absolute_name(self) -> str:
        """Dotted name of the module under which a prebuilt copy may be installed."""

    @abc.abstractmethod
    def sources(self) -> list[str]:
        """C++ files; no two may have the same file name."""

    def include_paths(self) -> list[str]:
        """Folders of the op's own headers."""
        return []

    def cxx_args(self) -> list[str]:
        """Flags to compile with.

        Symbols are visible and the code runs on every CPU of this architecture, unless a subclass adds
        ``-fvisibility=hidden`` or ``-march=native`` (with the latter the cache tells CPUs apart).
        """
        return ["-O3", "-std=c++20", "-fPIC"]

    def extra_ldflags(self) -> list[str]:
        """Flags to link with."""
        return []

    def libraries_args(self) -> list[str]:
        """Libraries to link with: ``"m"`` or ``"-lm"``."""
        return []

    # Whether it works here ----------------------------------------------------------------------------------

    def is_compatible(self, verbose: bool = False) -> bool:
        """True when load() can be expected to work.

        Args:
            verbose: log the reason why not, as a warning.
        """
        reason = self.why_not()
        if reason and verbose:
            logger.warning("op %s: %s", self.name, reason)
        return not reason

    def why_not(self) -> str:
        """Why load() cannot work, in one line; empty when it is expected to."""
        reason = self._switched_off()
        if reason or self._find_prebuilt():
            return reason
        try:
            self._source_files()
            toolchains.find_compiler()
        except OpBuildError as error:
            return str(error).partition("\n")[0]
        return ""

    def status(self) -> OpStatus:
        """Where load() would take the op from. Builds nothing."""
        reason = self.why_not()
        if reason:
            return OpStatus("unavailable", reason)
        if self._load_prebuilt() is not None:
            return OpStatus("prebuilt", self._find_prebuilt())
        try:
            built = jit.find(self._recipe(self.name))
            compiler = toolchains.find_compiler()
        except OpBuildError as error:  # the prebuilt copy is another variant, and there is no compiler
            return OpStatus("unavailable", str(error).partition("\n")[0])
        if built is not None:
            return OpStatus("cached", str(built.path), built.seconds)
        return OpStatus("jit", compiler.version.partition("\n")[0])

    def _switched_off(self) -> str:
        off = bool(self.BUILD_VAR) and os.environ.get(self.BUILD_VAR) == "0"
        return f"{self.BUILD_VAR}=0 in the environment switches it off" if off else ""

    def _incapable(self, reason: str) -> CapabilityError:
        return CapabilityError(self.ACCELERATOR, self.name, reason)

    # Loading ------------------------------------------------------------------------------------------------

    def load(self, verbose: bool = False) -> Any:
        """The op: a Python module or a `ctypes.CDLL`, the same one on each call in a process.

        Args:
            verbose: write the compilers' commands to stderr.

        Raises:
            CapabilityError: it is switched off, or a subclass says that it is not compatible.
            OpBuildError: it cannot be built or loaded.
        """
        key = type(self), self.name
        if key not in _loaded:
            if reason := self._switched_off():
                raise self._incapable(reason)
            op = self._load_prebuilt()
            _loaded.setdefault(key, self.jit_load(verbose) if op is None else self.wrap(op))
        return _loaded[key]

    def jit_load(self, verbose: bool = False) -> Any:
        """Like load(), but neither a prebuilt copy nor what the process has loaded already is used.

        The user's cache is: what did not change since it was built is not built again.
        """
        if reason := self._switched_off():
            raise self._incapable(reason)
        recipe = self._recipe(self.name)
        toolchains.find_compiler()
        if not self.is_compatible(verbose):
            raise self._incapable(self.why_not() or f"{type(self).__name__}.is_compatible() is false")
        return self.wrap(jit.open_library(jit.build(recipe, verbose), self.absolute_name()))

    def wrap(self, op: ModuleType | ctypes.CDLL) -> Any:
        """What load() returns for a library that was opened; a subclass may put an object of its own around it."""
        return op

    def variant(self) -> str:
        """What a library is built for: machine, Python and, with TORCH_HEADERS, torch's version and C++ ABI."""
        # Whether the library is a Python module, and so bound to one Python, is known only when it is built.
        variant = f"{platform.machine()}-{sysconfig.get_config_var('SOABI')}"
        if self.TORCH_HEADERS:
            import torch

            variant += f"-torch{torch.__version__}-cxx11abi{int(torch.compiled_with_cxx11_abi())}"
        return variant

    def _find_prebuilt(self) -> str:
        """File of the prebuilt copy; empty when there is none. Imports the packages around it, not the copy."""
        try:
            spec = importlib.util.find_spec(self.absolute_name())
        except (ImportError, ValueError):  # the package is not there; a module without a spec
            return ""
        origin = spec.origin if spec is not None else None
        # find_spec looks into sys.modules first, where modules that were built here may be.
        if origin is None or Path(origin).is_relative_to(env.cache_dir().absolute()):
            return ""
        return origin

    def _load_prebuilt(self) -> ModuleType | ctypes.CDLL | None:
        """The prebuilt copy; None if there is none that loads and has this variant."""
        file = self._find_prebuilt()
        if not file:
            return None
        name = self.absolute_name()
        try:
            if file.endswith(".so") and name not in sys.modules:
                op = jit.open_library(Path(file), name)
            else:
                op = importlib.import_module(name)
        except (ImportError, OpBuildError) as error:
            logger.warning("op %s: the prebuilt copy %s does not load (%s); building it", self.name, file, error)
            return None
        found, wanted = _variant_of(op), self.variant()
        if found in (None, wanted):
            return op
        logger.warning("op %s: %s is built for %s, not for %s; building it", self.name, file, found, wanted)
        return None

    # Building -----------------------------------------------------------------------------------------------

    def builder(self) -> Any:
        """The `setuptools.Extension` of this op for the setup.py of its package: the same sources and flags.

        Sources below the current folder are relative to it, as setuptools wants them.

        Raises:
            OpBuildError: a source is missing, or setuptools is.
        """
        try:
            setuptools = importlib.import_module("setuptools")
        except ImportError as error:
            raise OpBuildError(
                f"op {self.name}: setuptools cannot be imported ({error}): pip install setuptools"
            ) from None
        recipe = self._recipe(self.absolute_name().rpartition(".")[2])
        here = Path.cwd()
        return setuptools.Extension(
            self.absolute_name(),
            [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in recipe.sources],
            include_dirs=[str(path) for path in (*recipe.include_dirs, *recipe.system_include_dirs)],
            extra_compile_args=list(recipe.cxx_args),
            extra_link_args=list(recipe.link_args),
            language="c++",
        )

    def _recipe(self, library_name: str) -> jit.Recipe:
        variant = self.variant()
        cxx_args = ["-fPIC", f'-DANYACCEL_VARIANT="{variant}"']
        system_include_dirs = [Path(sysconfig.get_paths()["include"])]
        libraries: list[str] = []
        if self.TORCH_HEADERS:
            import torch

            root = Path(torch.__file__).parent
            system_include_dirs += [root / "include", root / "include/torch/csrc/api/include"]
            cxx_args += [
                "-std=c++20",  # a later -std wins
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                "-DTORCH_API_INCLUDE_EXTENSION_H",
                f"-DTORCH_EXTENSION_NAME={library_name}",
            ]
            folder = root / "lib"
            libraries += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        cxx_args += filter(None, self.cxx_args())
        libraries += [name if name.startswith("-") else f"-l{name}" for name in self.libraries_args() if name]
        return jit.Recipe(
            name=library_name,
            sources=tuple(self._source_files()),
            include_dirs=tuple(self._resolve(path, "_kernel_include") for path in self.include_paths() if path),
            system_include_dirs=tuple(system_include_dirs),
            cxx_args=tuple(cxx_args),
            link_args=(
                *filter(_ALSO_LINK.match, cxx_args), *filter(None, self.extra_ldflags()), *libraries,
            ),
            variant=variant,
        )  # fmt: skip

    def _source_files(self) -> list[Path]:
        by_name: dict[str, Path] = {}
        for entry in filter(None, self.sources()):
            path = self._resolve(entry, "_kernel_path")
            if path.name in by_name:
                raise OpBuildError(
                    f"op {self.name}: two sources are called {path.name} ({by_name[path.name]} and {path}); rename one"
                )
            if path.is_dir():
                raise OpBuildError(f"op {self.name}: source {str(entry)!r} is a folder ({path}); name the files in it")
            if not path.exists():
                raise OpBuildError(
                    f"op {self.name}: source {str(entry)!r} does not exist (looked for {path}); sources() returns "
                    f"absolute paths, or paths relative to the folder of {type(self).__module__}"
                )
            by_name[path.name] = path
        if not by_name:
            raise OpBuildError(f"op {self.name}: {type(self).__name__}.sources() is empty")
        return list(by_name.values())

    def _resolve(self, entry: str, hook: str) -> Path:
        """The absolute path of an entry of sources() or include_paths()."""
        path = Path(entry)
        if not path.is_absolute():
            for name in dir(type(self)):
                if name.endswith(hook) and name != hook:
                    path = Path(getattr(self, name)(entry))
                    break
        if path.is_absolute():
            return path
        places = [folder / path for folder in _folders(type(self))]
        return next((place for place in places if place.exists()), places[0])


class PythonOpBuilder(OpBuilder):
    """Base of the builders of ops that are modules of a package, which need no building.

    Attributes:
        MODULE: the module that load() returns.
    """

    ACCELERATOR: ClassVar[str] = "cpu"
    MODULE: ClassVar[str]

    def absolute_name(self) -> str:
        """The module."""
        return self.MODULE

    def sources(self) -> list[str]:
        """No file."""
        return []

    def jit_load(self, verbose: bool = False) -> Any:
        """Like load(), as there is nothing to build."""
        return self.load(verbose)


class CPUOpBuilder(OpBuilder):
    """Base of the builders of ops that run on the CPU: compiled and linked with OpenMP."""

    ACCELERATOR: ClassVar[str] = "cpu"

    def cxx_args(self) -> list[str]:
        """Those of every op, and ``-fopenmp``; GCC's runtime is also torch's, so the threads are shared with it."""
        return [*super().cxx_args(), "-fopenmp"]


def builders_in(package: str) -> dict[str, type[OpBuilder]]:
    """The op builders that the module or package of this dotted name has as attributes: class name -> class, sorted.

    Base classes (abstract, or without a `NAME`) are not among them.

    Raises:
        ImportError: the module cannot be imported.
    """
    module = importlib.import_module(package)
    found = {
        value.__name__: value
        for value in (getattr(module, name) for name in dir(module))
        if isinstance(value, type) and issubclass(value, OpBuilder) and value.NAME and not inspect.isabstract(value)
    }
    return dict(sorted(found.items()))


def _folders(builder: type[OpBuilder]) -> list[Path]:
    """Folders of the modules that define `builder` and its bases; the current one where there is no file."""
    files = [
        getattr(sys.modules.get(base.__module__), "__file__", None)
        for base in builder.__mro__
        if issubclass(base, OpBuilder) and base.__module__ != __name__
    ]
    return [Path(file).absolute().parent for file in files if file] or [Path.cwd()]


def _variant_of(op: ModuleType | ctypes.CDLL) -> str | None:
    if isinstance(op, ModuleType):
        return getattr(op, "anyaccel_variant", None)
    try:
        symbol = ctypes.c_char.in_dll(op, "anyaccel_variant")
    except ValueError:
        return None
    return ctypes.string_at(ctypes.addressof(symbol)).decode(errors="replace")
