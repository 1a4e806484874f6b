# SPDX-License-Identifier: Apache-2.0
"""What a builder says and what load() returns, with the real compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_ops import MODULE, SCALE, Compiler, ScaleBuilder, write

from anyaccel.errors import CapabilityError, OpBuildError, UsageError
from anyaccel.ops import CPUOpBuilder, OpBuilder, builders_in


def scaled(library: ctypes.CDLL) -> list[float]:
    library.scale.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.scale.restype = None
    values = torch.arange(4, dtype=torch.float32)
    library.scale(values.data_ptr(), values.numel())
    return values.tolist()


def import_file(path: Path, name: str, patch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_c_library_works_on_a_tensor_and_is_loaded_once(sources, caplog, capfd):
    caplog.set_level(logging.INFO, "anyaccel.ops")
    builder = ScaleBuilder(sources)
    assert builder.is_compatible(verbose=True)
    assert builder.why_not() == ""
    library = builder.load()
    assert scaled(library) == [0, 2, 4, 6]
    assert ScaleBuilder(sources).load() is library
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("building op simd_scale (1 source) in ")
    assert said[1].startswith("built op simd_scale in ")
    assert len(said) == 2
    assert capfd.readouterr() == ("", "")


def test_verbose_writes_the_commands(sources, capfd):
    ScaleBuilder(sources, "-Wall").jit_load(verbose=True)
    out, err = capfd.readouterr()
    assert out == ""
    compile_line, link_line = err.splitlines()
    assert "-Wall" in compile_line
    assert "-shared" in link_line


class TinyBuilder(OpBuilder):
    """A Python extension module that would be installed as no_such_package.ops.tiny."""

    NAME = "tiny"

    def __init__(self, folder: Path, package: str = "no_such_package.ops") -> None:
        super().__init__()
        self.folder = folder
        self.package = package

    def absolute_name(self) -> str:
        return f"{self.package}.{self.NAME}"

    def sources(self) -> list[str]:
        return [str(self.folder / "tiny.cpp")]


def test_python_module(tmp_path, cache):
    write(tmp_path / "tiny.cpp", MODULE)
    module = TinyBuilder(tmp_path).load()
    assert module.answer() == 42
    assert module.__name__ == "no_such_package.ops.tiny"
    assert Path(module.__file__).is_relative_to(cache)
    assert Path(module.__file__).name == "tiny.so"


def test_a_module_that_registers_itself_is_not_taken_for_a_prebuilt_copy(tmp_path, monkeypatch):
    # Single-phase initialisation: Python itself puts the module into sys.modules.
    old = MODULE.replace("PyModuleDef_Init(&definition)", "PyModule_Create(&definition)").replace(
        "slots, null", "nullptr, null"
    )
    write(tmp_path / "tiny.cpp", old)
    monkeypatch.setitem(sys.modules, "no_such_package.ops.tiny", None)
    del sys.modules["no_such_package.ops.tiny"]
    first = TinyBuilder(tmp_path).load()
    assert sys.modules["no_such_package.ops.tiny"] is first
    write(tmp_path / "tiny.cpp", old.replace("42", "43"))

    class Second(TinyBuilder):
        pass

    assert (first.answer(), Second(tmp_path).load().answer()) == (42, 43)


def test_several_sources_and_a_library(tmp_path):
    write(tmp_path / "a.cpp", '#include <zzz.h>\nextern "C" int b(); extern "C" int both() { return Z + b(); }')
    write(tmp_path / "b.cc", 'extern "C" double cos(double); extern "C" int b() { return int(cos(0.0)); }')
    write(tmp_path / "h" / "zzz.h", "#define Z 10")

    class Several(OpBuilder):
        NAME = "several"

        def absolute_name(self):
            return "several"

        def sources(self):
            return [str(tmp_path / "a.cpp"), "", str(tmp_path / "b.cc")]

        def include_paths(self):
            return [str(tmp_path / "h")]

        def libraries_args(self):
            return ["m", "-lpthread"]

    assert Several().load().both() == 11


def test_torch_headers(tmp_path):
    write(
        tmp_path / "halves.cpp",
        """
        #include <c10/util/BFloat16.h>
        #include <c10/core/Device.h>
        #include <cstring>
        extern "C" const char anyaccel_variant[] = ANYACCEL_VARIANT;
        extern "C" float rounded(float x) { return static_cast<float>(c10::BFloat16(x)); }
        extern "C" int is_cpu(const char* name) { return c10::Device(std::string(name)).is_cpu(); }
        """,
    )

    class Halves(CPUOpBuilder):
        NAME = "halves"
        TORCH_HEADERS = True

        def absolute_name(self):
            return "halves"

        def sources(self):
            return [str(tmp_path / "halves.cpp")]

    builder = Halves()
    library = builder.load()
    library.rounded.restype, library.rounded.argtypes = ctypes.c_float, [ctypes.c_float]
    assert library.rounded(1.001) == 1.0
    assert library.is_cpu(b"cpu") == 1
    assert torch.__version__ in builder.variant()
    assert "-fopenmp" in builder.builder().extra_link_args


PACKAGE = """
from anyaccel.ops import OpBuilder

class FolderBuilder(OpBuilder):
    NAME = "simd_scale"
    def absolute_name(self): return "no_such_package.simd_scale"
    def sources(self): return ["csrc/scale.cpp"]
    def include_paths(self): return ["csrc/include"]

class HookBuilder(FolderBuilder):
    def sources(self): return ["scale.cpp"]
    def include_paths(self): return ["include"]
    def toy_kernel_path(self, code_path): return "csrc/" + code_path
    def toy_kernel_include(self, code_path): return __file__.replace("builders.py", "csrc/") + code_path
"""


@pytest.mark.parametrize("name", ["FolderBuilder", "HookBuilder", "Derived"])
def test_relative_paths_and_hooks(tmp_path, monkeypatch, name):
    write(tmp_path / "package" / "builders.py", PACKAGE)
    write(tmp_path / "package" / "csrc" / "scale.cpp", SCALE)
    write(tmp_path / "package" / "csrc" / "include" / "factor.h", "#define FACTOR 3")
    module = import_file(tmp_path / "package" / "builders.py", "test_relative_builders", monkeypatch)
    if name == "Derived":  # in another folder than its base class

        class Derived(module.FolderBuilder):
            pass

        builder = Derived()
    else:
        builder = getattr(module, name)()
    assert scaled(builder.load()) == [0, 3, 6, 9]


def test_sources_that_cannot_be(tmp_path, sources):
    class Bad(ScaleBuilder):
        files: tuple[str, ...] = ()

        def sources(self):
            return list(self.files)

    write(tmp_path / "other" / "scale.cpp", "")
    bad = Bad(sources)
    for files, words in {
        (): "Bad.sources() is empty",
        ("gone.cpp",): f"source 'gone.cpp' does not exist (looked for {Path(__file__).parent / 'gone.cpp'})",
        (str(sources),): "is a folder",
        (str(sources / "scale.cpp"), str(tmp_path / "other" / "scale.cpp")): "two sources are called scale.cpp",
    }.items():
        bad.files = files
        assert words in bad.why_not()
        with pytest.raises(OpBuildError) as error:
            bad.load()
        assert words in str(error.value)
        with pytest.raises(OpBuildError):
            bad.builder()


def test_build_var_switches_off(sources, monkeypatch, caplog):
    monkeypatch.setenv("TEST_BUILD_SCALE", "0")
    builder = ScaleBuilder(sources)
    assert not builder.is_compatible()
    assert not caplog.records
    assert not builder.is_compatible(verbose=True)
    assert "TEST_BUILD_SCALE=0" in caplog.text
    with pytest.raises(CapabilityError, match="'simd_scale': TEST_BUILD_SCALE=0 in the environment"):
        builder.load()
    with pytest.raises(CapabilityError, match="TEST_BUILD_SCALE=0"):
        builder.jit_load()
    monkeypatch.setenv("TEST_BUILD_SCALE", "1")
    assert builder.is_compatible()


def test_a_subclass_may_say_that_it_is_not_compatible(sources):
    class Picky(ScaleBuilder):
        def is_compatible(self, verbose=False):
            return False

    with pytest.raises(CapabilityError, match=r"Picky.is_compatible\(\) is false"):
        Picky(sources).load()


def test_without_a_compiler(sources, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    builder = ScaleBuilder(sources)
    assert not builder.is_compatible()
    assert builder.why_not() == (
        "there is no C++ compiler: PATH has none of c++, g++, clang++; install one "
        "(Debian and Ubuntu: apt install g++; conda: conda install gxx) or set CXX"
    )
    with pytest.raises(OpBuildError, match="apt install"):
        builder.load()


def test_name():
    class Named(CPUOpBuilder):
        NAME = "named"

        def absolute_name(self):
            return self.name

        def sources(self):
            return []

    assert Named().name == "named"
    assert Named("other").name == Named(name="other").name == "other"
    with pytest.raises(UsageError, match="Named: the name"):
        Named("../evil")


# Prebuilt copies --------------------------------------------------------------------------------------------

SETUP = """
import sys
from pathlib import Path
from setuptools import setup
sys.path.insert(0, {tests!r})
from toy_ops import ScaleBuilder
from test_op_builder import TinyBuilder
here = Path.cwd()
{builders}
setup(name="prebuilt", packages=["prebuilt_ops"], ext_modules=[builder.builder() for builder in builders],
      script_args=["-q", "build_ext", "--inplace"])
"""


@pytest.fixture
def prebuilt(sources, tmp_path, monkeypatch):
    """Builds with setuptools into a package that can be imported; returns the two builders."""
    write(sources / "tiny.cpp", MODULE)
    write(sources / "prebuilt_ops" / "__init__.py", "")
    (sources / "scale.cpp").write_text(SCALE + 'extern "C" const char anyaccel_variant[] = ANYACCEL_VARIANT;')
    builders = """
class Scale(ScaleBuilder):
    def absolute_name(self): return "prebuilt_ops.simd_scale"
builders = [Scale(here), TinyBuilder(here, "prebuilt_ops")]
"""
    script = SETUP.format(tests=str(Path(__file__).parent), builders=builders)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=sources, capture_output=True, text=True, timeout=100, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(sources)

    class Scale(ScaleBuilder):
        def absolute_name(self):
            return "prebuilt_ops.simd_scale"

    yield Scale(sources), TinyBuilder(sources, "prebuilt_ops")
    for name in [name for name in sys.modules if name.startswith("prebuilt_ops")]:
        del sys.modules[name]


def test_a_prebuilt_copy_wins_when_it_is_for_this_torch_and_python(prebuilt, monkeypatch, cache, caplog):
    scale, tiny = prebuilt
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert scale.is_compatible()
        assert tiny.load().answer() == 42
        assert scaled(scale.load()) == [0, 2, 4, 6]
    assert not cache.exists()
    assert not caplog.records
    assert tiny.load().__name__ == "prebuilt_ops.tiny"

    class Other(type(scale)):
        def variant(self):
            return "another machine"

    assert scaled(Other(scale.folder).load()) == [0, 2, 4, 6]
    assert "simd_scale" in caplog.text
    assert "not for another machine; building it" in caplog.text
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_prebuilt_copy_that_does_not_load_is_built(sources, monkeypatch, caplog):
    write(sources / "broken_ops" / "__init__.py", "")
    write(sources / "broken_ops" / "simd_scale.so", "not a library")
    monkeypatch.syspath_prepend(sources)

    class Broken(ScaleBuilder):
        def absolute_name(self):
            return "broken_ops.simd_scale"

    assert scaled(Broken(sources).load()) == [0, 2, 4, 6]
    assert "does not load" in caplog.text
    del sys.modules["broken_ops"]


# The sets of builders ---------------------------------------------------------------------------------------

HOST = {
    "AsyncIOBuilder": ("async_io", "DS_BUILD_AIO"),
    "CPUAdagradBuilder": ("cpu_adagrad", "DS_BUILD_CPU_ADAGRAD"),
    "CPUAdamBuilder": ("cpu_adam", "DS_BUILD_CPU_ADAM"),
    "CPULionBuilder": ("cpu_lion", "DS_BUILD_CPU_LION"),
    "PinMemoryBuilder": ("pin_memory", "DS_BUILD_PIN_MEMORY"),
}
CPU = HOST | {
    "CCLCommBuilder": ("deepspeed_ccl_comm", "DS_BUILD_CCL_COMM"),
    "FusedAdamBuilder": ("fused_adam", "DS_BUILD_FUSED_ADAM"),
    "FusedLionBuilder": ("fused_lion", "DS_BUILD_FUSED_LION"),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", "DS_BUILD_SHM_COMM"),
}


@pytest.mark.parametrize("module, expected", [("host", HOST), ("cpu", CPU)])
def test_builders_of_a_package(module, expected):
    found = builders_in(f"anyaccel.ops.builders.{module}")
    assert list(found) == sorted(expected)
    assert {name: (builder.NAME, builder.BUILD_VAR) for name, builder in found.items()} == expected


def test_what_there_is_no_op_for_says_so(caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))  # no oneCCL
    builder = builders_in("anyaccel.ops.builders.cpu")["CCLCommBuilder"]()
    reason = builder.why_not()
    assert "pip install" in reason
    assert "\n" not in reason
    assert builder.absolute_name() == f"anyaccel.ops.prebuilt.{builder.NAME}"
    assert not builder.is_compatible(verbose=True)
    assert reason in caplog.text
    assert builder.status() == ("unavailable", reason, None)
    for load in (builder.load, builder.jit_load):
        with pytest.raises(CapabilityError) as error:
            load(verbose=True)
        assert str(error.value).endswith(reason)


def test_importing_the_package_is_light():
    script = "import sys, anyaccel.ops.builders.cpu; print('torch' in sys.modules, 'setuptools' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
    script = "import sys, anyaccel.ops; print('anyaccel.ops.builder' in sys.modules, dir(anyaccel.ops)[:3])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("False ['CPUOpBuilder', 'OpBuilder'")


def test_missing_attribute():
    import anyaccel.ops

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        anyaccel.ops.nothing  # noqa: B018


def test_builders_do_not_import_torch_for_a_plain_op(sources, compiler: Compiler):
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from toy_ops import ScaleBuilder
ScaleBuilder(Path({str(sources)!r})).load()
print('torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False"]
    assert compiler.runs() == 2
