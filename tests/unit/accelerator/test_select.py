# SPDX-License-Identifier: Apache-2.0
"""Detection: order, reasons, DS_ACCELERATOR, extensions, broken packages, threads and fork."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import anyaccel
from anyaccel import accelerator as package
from anyaccel._registry import Registry
from anyaccel.accelerator import (
    describe_choice,
    detection_report,
    get_accelerator,
    is_current_accelerator_supported,
    select,
    set_accelerator,
)
from anyaccel.accelerator.backends.cpu import CpuAccelerator
from anyaccel.errors import AcceleratorUnavailableError, AnyAccelError, UsageError
from anyaccel.topology import details
from anyaccel.topology.details import PciDevice

pytestmark = pytest.mark.usefixtures("undecided")

EXTENSION = """
import torch
from anyaccel.accelerator import Accelerator, BackendSpec, Unavailable

class Simd(Accelerator):
    spec = BackendSpec(name={name!r}, device_type="meta", torch_module="torch.simd", order={order},
                       install="pip install simd0", api_version={api}, {extra})
    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        {constructor}

    def device_count(self):
        {count}

    def current_device(self):
        return 0

    def set_device(self, device_index):
        return

    def synchronize(self, device_index=None):
        return
"""


class Extensions:
    """Modules on the path that hold an accelerator each, registered as if they were installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.registered = dict(select.REGISTRY._entries)
        monkeypatch.syspath_prepend(folder)

    def add(
        self,
        name: str,
        order: int = 0,
        api: int = 1,
        count: str = "return 1",
        constructor: str = "pass",
        extra: str = "",
        source: str | None = None,
        target: str = "Simd",
    ) -> None:
        module = f"extension_{self.folder.name}_{name}".replace("-", "_")
        text = EXTENSION.format(name=name, order=order, api=api, count=count, constructor=constructor, extra=extra)
        (self.folder / f"{module}.py").write_text(text if source is None else textwrap.dedent(source))
        entries = {entry.name: entry.target for entry in select.REGISTRY}
        entries[name] = f"{module}:{target}"
        self.monkeypatch.setattr(select, "REGISTRY", Registry("anyaccel.accelerators.none", entries))


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extensions:
    return Extensions(tmp_path, monkeypatch)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about machines without a GPU, wherever they run."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


PAGE = Path(__file__).parents[3] / "docs" / "accelerator.md"
OURS = re.findall(r"^\| \d+ \| `([\w.]+)`", PAGE.read_text(), re.MULTILINE)  # the documented order


def rows() -> dict[str, select.Candidate]:
    return {row.name: row for row in detection_report().candidates}


# What is chosen, and why -----------------------------------------------------------------------------------


def test_cpu_is_chosen_where_nothing_else_is(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    integrated = PciDevice("0000:00:02.0", "0x8086", "0x46a6", "display", None)
    console = PciDevice("0000:02:00.0", "0x1a03", "0x2000", "display", None)
    monkeypatch.setattr(details, "read_devices", lambda: (integrated, console))
    started = time.monotonic()
    with caplog.at_level(logging.INFO, "anyaccel"):
        assert type(get_accelerator()) is CpuAccelerator
        assert get_accelerator() is get_accelerator() is anyaccel.get_accelerator()
    passed = time.monotonic() - started
    report = detection_report()
    assert (report.chosen, [row.name for row in report.candidates]) == ("cpu", OURS)
    cuda, _, cpu = report.candidates[-3:]
    assert (cuda.available, cuda.chosen, cpu.available, cpu.chosen) == (False, False, True, True)
    assert "CUDA_Accelerator requires a CUDA or ROCm build of torch" in cuda.reason
    assert all(0 <= row.probe_s <= passed and row.why and row.origin == "anyaccel" for row in report.candidates)
    assert is_current_accelerator_supported()
    (record,) = [record for record in caplog.records if "Setting accelerator" in record.message]
    assert record.levelno == logging.INFO  # there is nothing that the user could have meant
    assert record.message.startswith("Setting accelerator to CPU. Passed over: nothing is installed for xpu.external, ")


H100 = PciDevice("0000:11:00.0", "0x10de", "0x2330", "display", 0)


def test_a_device_without_its_package_is_a_warning(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(details, "read_devices", lambda: (H100, replace(H100, address="0000:12:00.0")))
    get_accelerator()
    (record,) = [record for record in caplog.records if "Setting accelerator" in record.message]
    assert record.levelno == logging.WARNING
    assert "Passed over: NVIDIA 2330 is in this machine; nothing is installed for xpu.external, " in record.message


def test_other_processes_of_a_job_do_not_repeat_the_warning(
    no_cuda: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(details, "read_devices", lambda: (H100,))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with caplog.at_level(logging.INFO, "anyaccel"):
        get_accelerator()
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_a_gpu_build_without_a_gpu_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    get_accelerator()
    get_accelerator()
    (record,) = [record for record in caplog.records if "Setting accelerator to CPU" in record.message]
    assert record.levelno == logging.WARNING
    assert "torch.cuda is there but sees no device" in record.message


def test_describe_choice_is_one_line(no_cuda: None) -> None:
    line = describe_choice()
    assert "\n" not in line
    assert line.startswith("cpu, the first that is available in detection order (nothing is installed for any other)")


def test_cuda_wins_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("is_available", "_lazy_init", "init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: pytest.fail(f"torch.cuda.{name}() was called"))
    assert get_accelerator()._name == "cuda"
    assert rows()["cpu"].reason == "not probed: cuda comes first"
    assert rows()["cpu"].available is None
    full = {row.name: row for row in detection_report(probe_all=True).candidates}
    assert (full["cpu"].available, full["cpu"].chosen, full["cuda"].chosen) == (True, False, True)
    assert get_accelerator()._name == "cuda"


def test_extensions_come_in_declared_order(no_cuda: None, extensions: Extensions) -> None:
    extensions.add("late", order=2000)
    extensions.add("second", order=5)
    extensions.add("first", order=1)
    assert get_accelerator()._name == "first"
    assert [row.name for row in detection_report().candidates] == ["first", "second", *OURS, "late"]
    assert is_current_accelerator_supported()


def test_a_function_can_be_registered(no_cuda: None, extensions: Extensions) -> None:
    source = EXTENSION.format(name="made", order=0, api=1, count="return 1", constructor="pass", extra="")
    extensions.add("made", source=source + "\ndef make():\n    return Simd()\n", target="make")
    assert get_accelerator()._name == "made"


# What does not work is a reason ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("import no_such_vendor_package", "ModuleNotFoundError: No module named 'no_such_vendor_package'"),
        ("raise ImportError('undefined symbol: aclrtGetDevice')", "ImportError: undefined symbol"),
        ("raise OSError('libascendcl.so: cannot open shared object file')", "OSError: libascendcl.so"),
        ("raise RuntimeError('driver 12 is too old')", "RuntimeError: driver 12 is too old"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("this is no Python", "SyntaxError"),
        ("class Other: pass", "AttributeError"),
        ("Simd = dict", "no Accelerator"),
        ("def Simd(): return 7", "no Accelerator"),
    ],
)
def test_a_broken_extension(
    no_cuda: None, extensions: Extensions, caplog: pytest.LogCaptureFixture, problem: str, reason: str
) -> None:
    extensions.add("broken", source=problem)
    assert get_accelerator()._name == "cpu"
    assert reason in rows()["broken"].reason
    assert rows()["broken"].available is False
    assert [record.levelno for record in caplog.records if reason in record.message] == [logging.WARNING]


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ({"count": "return 0"}, "sees no device"),
        ({"count": "raise RuntimeError('ioctl failed')"}, "its probe raised RuntimeError: ioctl failed"),
        ({"constructor": "raise OSError('no firmware')"}, "OSError: no firmware"),
        ({"constructor": "if self.made > 1: raise OSError('busy')"}, "its constructor raised OSError: busy"),
        ({"api": 99}, "needs version 99 of the interface, this anyaccel has 1; upgrade anyaccel"),
        (
            {"constructor": "__import__('anyaccel').get_accelerator()"},
            "while the accelerator is being detected",
        ),
    ],
)
def test_a_device_that_is_not_there(
    no_cuda: None, extensions: Extensions, details: dict[str, str], reason: str
) -> None:
    extensions.add("simd", **details)
    assert get_accelerator()._name == "cpu"
    assert reason in rows()["simd"].reason


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "REGISTRY", Registry("none", {"gone": "no_such_module:Gone"}))
    with pytest.raises(AcceleratorUnavailableError, match=r"gone: import of no_such_module:Gone raised"):
        get_accelerator()


def test_a_failure_is_not_remembered(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(AcceleratorUnavailableError):
        get_accelerator()
    monkeypatch.delenv("DS_ACCELERATOR")
    assert get_accelerator()._name == "cpu"


# Hangs until the test is over, or has waited for too long itself.
RELEASE = threading.Event()
HANGS = f"import sys; sys.modules[{__name__!r}].RELEASE.wait(60)"


@pytest.fixture
def hanging() -> Iterator[None]:
    """Code may be HANGS; what still does so at the end of the test ends. A real one stays behind."""
    RELEASE.clear()
    yield
    RELEASE.set()
    for thread in threading.enumerate():
        if thread.name == "anyaccel-probe":
            thread.join(60)


@pytest.mark.parametrize(
    "details",
    [
        {"source": HANGS},
        {"count": HANGS},
        {"constructor": f"if self.made > 1: {HANGS}"},
    ],
)
def test_what_hangs_is_passed_over(
    no_cuda: None, hanging: None, extensions: Extensions, monkeypatch: pytest.MonkeyPatch, details: dict[str, str]
) -> None:
    monkeypatch.setenv("ANYACCEL_PROBE_TIMEOUT", "0.2")
    extensions.add("slow", **details)
    assert get_accelerator()._name == "cpu"
    assert "TimeoutError: no answer within 0.2 s; ANYACCEL_PROBE_TIMEOUT=SECONDS allows more" in rows()["slow"].reason
    assert rows()["slow"].probe_s >= 0.2


def test_a_backend_declares_its_deadline(no_cuda: None, hanging: None, extensions: Extensions) -> None:
    extensions.add("slow", count=f"{HANGS}; return 1", extra="probe_deadline_s=0.1")
    assert get_accelerator()._name == "cpu"
    assert "no answer within 0.1 s" in rows()["slow"].reason


def test_a_package_that_installs_signal_handlers_is_probed_in_the_main_thread(
    no_cuda: None, extensions: Extensions
) -> None:
    extensions.add("handler", count="import signal; signal.signal(signal.SIGUSR2, signal.SIG_DFL); return 1")
    assert get_accelerator()._name == "handler"


def test_a_package_that_asks_for_the_accelerator_while_it_is_imported(no_cuda: None, extensions: Extensions) -> None:
    """It holds the lock of its own import, which a probe in another thread would wait for."""
    name = f"extension_{extensions.folder.name}_eager".replace("-", "_")
    extensions.add("eager")
    source = (extensions.folder / f"{name}.py").read_text()
    (extensions.folder / f"{name}.py").write_text(source + "\nimport anyaccel\nFOUND = anyaccel.get_accelerator()\n")
    assert importlib.import_module(name).FOUND._name == "eager"  # one that waits is passed over after its deadline
    assert not [row.reason for row in rows().values() if "no answer" in row.reason]


def test_one_that_yields_to_another(
    extensions: Extensions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    extensions.add("shy", extra="yields_to=('cuda', 'not-installed')")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert get_accelerator()._name == "cuda"
    assert (rows()["shy"].available, rows()["shy"].chosen) == (True, False)
    assert rows()["shy"].reason == "passed over: cuda has a device and is preferred to it"
    assert "shy: passed over: cuda" in describe_choice()
    monkeypatch.setenv("DS_ACCELERATOR", "shy")
    select._accelerator = None
    assert get_accelerator()._name == "shy"


def test_one_that_yields_wins_where_the_other_has_no_device(no_cuda: None, extensions: Extensions) -> None:
    extensions.add("shy", extra="yields_to=('cuda',)")
    assert get_accelerator()._name == "shy"


# DS_ACCELERATOR and set_accelerator ------------------------------------------------------------------------


def test_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("cuda was probed"))
    assert get_accelerator()._name == "cpu"
    assert describe_choice() == "cpu, DS_ACCELERATOR=cpu is set"
    assert not caplog.records


@pytest.mark.parametrize("name", ["gpu", "CPU", "cuda:0"])
def test_forced_to_an_unknown_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(
        UsageError,
        match=rf"DS_ACCELERATOR='{name}' is not known( \(did you mean .*\))?; known .*: cpu, cuda, hpu, klxpu, m",
    ):
        get_accelerator()
    with pytest.raises(ValueError, match="not known"):  # what DeepSpeed raises
        get_accelerator()


def test_forced_to_what_is_not_installed(no_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(AcceleratorUnavailableError) as caught:
        get_accelerator()
    message = str(caught.value)
    assert message.startswith("DS_ACCELERATOR=cuda: CUDA_Accelerator requires a CUDA or ROCm build of torch")
    assert "; install a CUDA or ROCm build of torch" in message


def test_forced_to_a_broken_extension(extensions: Extensions, monkeypatch: pytest.MonkeyPatch) -> None:
    extensions.add("simd", count="return 0")
    extensions.add("worse", source="raise OSError('libsimd.so')")
    monkeypatch.setenv("DS_ACCELERATOR", "simd")
    with pytest.raises(AcceleratorUnavailableError, match="sees no device; pip install simd0"):
        get_accelerator()
    monkeypatch.setenv("DS_ACCELERATOR", "worse")
    with pytest.raises(AcceleratorUnavailableError, match=r"libsimd\.so"):
        get_accelerator()


def test_set_accelerator(no_cuda: None) -> None:
    chosen = CpuAccelerator()
    set_accelerator(chosen)
    assert get_accelerator() is chosen
    assert describe_choice() == "cpu, set by set_accelerator()"
    assert [row.name for row in detection_report(probe_all=True).candidates] == OURS


@pytest.mark.parametrize("wrong", [None, "cpu", torch.device("cpu"), CpuAccelerator, SimpleNamespace(_name="cpu")])
def test_set_accelerator_checks_the_type(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"takes an anyaccel\.accelerator\.Accelerator"):
        set_accelerator(wrong)


def test_an_accelerator_that_nobody_registered_is_not_supported(extensions: Extensions) -> None:
    extensions.add("simd")
    simd = get_accelerator()
    simd._name = "homemade"
    assert not is_current_accelerator_supported()


# Threads, fork, processes ----------------------------------------------------------------------------------


def test_32_threads_at_once_make_one_accelerator(extensions: Extensions) -> None:
    extensions.add("simd", constructor="import time; time.sleep(0.05)")
    barrier = threading.Barrier(32)
    seen: list[object] = []

    def work() -> None:
        barrier.wait()
        seen.append(get_accelerator())

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 32
    assert set(map(id, seen)) == {id(get_accelerator())}


def run(script: str, *path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder) for folder in (*path, Path(anyaccel.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=env, text=True, capture_output=True, timeout=100
    )


def test_importing_the_package_imports_no_torch() -> None:
    done = run("""
        import sys, anyaccel, anyaccel.accelerator
        from anyaccel.accelerator import get_accelerator, BackendSpec, describe_choice
        import anyaccel.report.render, anyaccel.cli.report
        assert "torch" not in sys.modules, "torch was imported"
    """)
    assert done.returncode == 0, done.stderr


def test_installed_extensions_and_fork_in_a_fresh_process(tmp_path: Path) -> None:
    # Two distributions as pip leaves them: one works, one has a broken driver library.
    simd = EXTENSION.format(name="simd0", order=3, api=1, count="return 1", constructor="pass", extra="")
    (tmp_path / "simd0_accelerator.py").write_text(simd)
    (tmp_path / "broken_accelerator.py").write_text("raise OSError('libbroken.so.1')\n")
    for name, attribute in (("simd0", "simd0_accelerator:Simd"), ("broken", "broken_accelerator:Broken")):
        info = tmp_path / f"{name}_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[anyaccel.accelerators]\n{name} = {attribute}\n")
    done = run(
        """
        import os, threading
        from anyaccel.accelerator import detection_report, get_accelerator, select
        rows = {row.name: row for row in detection_report().candidates}
        assert get_accelerator()._name == "simd0", rows
        assert rows["simd0"].origin == "simd0-plugin"
        assert "OSError: libbroken.so.1" in rows["broken"].reason

        chosen = get_accelerator()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if get_accelerator() is chosen else 1)
        assert os.waitpid(pid, 0)[1] == 0, "the child has another accelerator"

        # A fork while another thread is choosing must not leave the child waiting for that thread.
        select._accelerator = None
        held, release = threading.Event(), threading.Event()
        def hold():
            with select._lock:
                select._detecting = True
                held.set()
                release.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(0 if get_accelerator()._name == "simd0" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        release.set()
        thread.join()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "Setting accelerator to SIMD0. Passed over: broken: " in done.stderr


@pytest.mark.slow  # imports torch twice in new processes
def test_a_broken_autoload_package_is_a_warning_and_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / "torch_broken.py").write_text("raise OSError('libbroken.so.1')\n")
    (tmp_path / "torch_good.py").write_text("LOADED = []\ndef load():\n    LOADED.append(1)\n")
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    entries = "[torch.backends]\ntorch_broken = torch_broken:load\ntorch_good = torch_good:load\n"
    (info / "entry_points.txt").write_text(entries)
    script = """
        import os
        from anyaccel.accelerator import get_accelerator
        assert get_accelerator()._name == "cpu"
        import torch_good
        assert torch_good.LOADED == ([1] if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0" else [])
        print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"))
    """
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert "torch runs without its extension 'torch_broken': OSError: libbroken.so.1" in done.stderr
    done = run(script, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert "torch_broken" not in done.stderr


def test_the_lazy_names_of_the_package() -> None:
    assert set(package.__all__) <= {name for name in package.__all__ if hasattr(package, name)}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = package.nonsense
    assert issubclass(AcceleratorUnavailableError, AnyAccelError)
