# SPDX-License-Identifier: Apache-2.0
"""examples/extension as a user installs it, and the guide that shows it."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anyaccel
from warm import WarmPython, checked

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "extension"
GUIDE = REPOSITORY / "docs" / "add-a-backend.md"
# Also those by which the running environment would leak into the new one.
_NOT_INHERITED = ("DS_ACCELERATOR", "SIMD0_VISIBLE_DEVICES", "SIMD0_BUILD_SCALE_ADD", "PYTHONHOME", "VIRTUAL_ENV")

# Of examples/porting/train_cuda.py at steps 0, 10, 20 and 30, on every device.
PORTED_LOSSES = [1.3558, 0.6263, 0.1510, 0.0192]
# Of tests/data/port, every 10 steps and every 2 epochs, as unported on a CPU without autocast.
MORE_PORTED_LOSSES = {
    "gpt_cuda.py": [3.1265, 0.0398, 0.0005, 0.0001],
    "images_cuda.py": [0.6807, 0.4977, 0.4905, 0.3732],
}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _checked(command: list[str], timeout: float, env: dict[str, str], cwd: Path) -> None:
    done = subprocess.run(command, env=env, cwd=cwd, text=True, capture_output=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)} failed\n{done.stdout}\n{done.stderr}"


def _environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    # ninja, which halves the time of the build, is beside the running Python. One thread: the tensors are tiny.
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs Python in a new environment with the example installed: that of these tests, and the package."""
    folder = tmp_path_factory.mktemp("extension")
    compiler = folder / "quick-c++"  # optimizing takes a third of the time of the build, which takes half a minute
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    env = _environment(ANYACCEL_CACHE_DIR=str(folder / "cache"), CXX=str(compiler))
    source = folder / "source"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so"))
    # Neither pip nor setuptools: those of the running environment are used, and torch needs setuptools anyway.
    _checked([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], 60, env, folder)
    python = folder / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "venv" / "lib" / version / "site-packages"
    # addsitedir, since .pth files make editable installs importable; anyaccel may also be found by a path only.
    lines = [f"import site; site.addsitedir({place!r})" for place in site.getsitepackages()]
    lines.append(str(Path(anyaccel.__file__).parents[1]))
    (packages / "running.pth").write_text("\n".join(lines) + "\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-build-isolation", "--no-deps"]
    _checked([*pip, str(source)], 300, env, folder)

    with WarmPython(env, folder, str(python), preload="torch, anyaccel, anyaccel.accelerator") as warm:
        yield warm.run


def _python(run: Run, code: str, **changes: str) -> str:
    return checked(run("-c", textwrap.dedent(code), **changes))


def installed(test: Callable[..., None]) -> Callable[..., None]:
    """For a test that needs the package: its build takes half a minute, and is part of the first one's time."""
    return pytest.mark.slow(pytest.mark.timeout(420)(test))


@installed
def test_it_is_chosen_without_a_context(run: Run) -> None:
    out = _python(
        run,
        """
        from anyaccel import get_accelerator
        from anyaccel.accelerator import describe_choice
        accelerator = get_accelerator()
        from anyaccel_simd0 import _C
        print([accelerator._name, accelerator.device_name(1), accelerator.device_count(), accelerator.is_available()])
        print([_C.has_context(0), _C.has_context(1)])
        import torch
        torch.zeros(1, device=accelerator.device_name(1))
        print([_C.has_context(0), _C.has_context(1)])
        print(describe_choice())
        """,
    )
    chosen, before, after, choice = out.splitlines()
    assert chosen == "['simd0', 'simd:1', 2, True]"
    assert (before, after) == ("[False, False]", "[False, True]")
    assert choice.startswith("simd0, the first that is available in detection order")


@installed
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"DS_ACCELERATOR": "cpu"}, "cpu, DS_ACCELERATOR=cpu is set"),
        ({"DS_ACCELERATOR": "simd0"}, "simd0, DS_ACCELERATOR=simd0 is set"),
    ],
)
def test_the_user_decides(run: Run, changes: dict[str, str], expected: str) -> None:
    code = "from anyaccel.accelerator import describe_choice; print(describe_choice())"
    assert _python(run, code, **changes).strip() == expected


@installed
def test_visible_devices(run: Run) -> None:
    code = """
    from anyaccel.accelerator import detection_report, get_accelerator
    [row] = [row for row in detection_report().candidates if row.name == "simd0"]
    print(row.available, row.reason)
    if row.chosen:
        import torch
        print(get_accelerator().device_count(), torch.simd.get_device_properties(0).physical_device)
    """
    assert _python(run, code, SIMD0_VISIBLE_DEVICES="1").splitlines() == ["True ", "1 1"]
    assert _python(run, code, SIMD0_VISIBLE_DEVICES="").strip() == "False torch.simd is there but sees no device"
    forced = run("-c", textwrap.dedent(code), SIMD0_VISIBLE_DEVICES="", DS_ACCELERATOR="simd0")
    assert forced.returncode == 1
    assert "AcceleratorUnavailableError: DS_ACCELERATOR=simd0: torch.simd is there but sees no device" in forced.stderr


@installed
@pytest.mark.parametrize(("name", "device"), [("simd0", "simd:0"), ("cpu", "cpu")])
def test_the_same_script_trains_on_simd0_and_on_the_cpu(run: Run, name: str, device: str) -> None:
    done = run(str(EXAMPLE / "train_transformer.py"), DS_ACCELERATOR=name)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert {line[-1] for line in lines} == {device}
    losses = [float(line[3]) for line in lines]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2, done.stdout


@installed
@pytest.mark.parametrize("name", ["simd0", "cpu"])  # on the CPU: test_port.py
def test_ported_cuda_scripts_run_on_it(run: Run, name: str, tmp_path: Path) -> None:
    """examples/porting, through `anyaccel port --write`: the losses are the CPU's."""
    pytest.importorskip("libcst", reason="anyaccel port needs LibCST: pip install 'anyaccel[port]'")
    for script in (REPOSITORY / "examples" / "porting").glob("*_cuda.py"):
        shutil.copy(script, tmp_path)
    ported = run("-m", "anyaccel", "port", str(tmp_path), "--write")
    assert ported.returncode == 0, ported.stderr
    assert "0 left to you" in ported.stdout
    here = f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.path.insert(0, '.'); sys.argv = sys.argv[:1]; "
    outputs = []
    for script in ("train_cuda.py", "infer_cuda.py"):
        done = run("-c", f"{here}runpy.run_path({script!r}, run_name='__main__')", DS_ACCELERATOR=name)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    device = {"simd0": "simd", "cpu": "cpu"}[name]
    steps = [line.split() for line in outputs[0] if line.startswith("step")]
    assert {words[-1] for words in steps} == {device}
    assert [float(words[3]) for words in steps] == pytest.approx(PORTED_LOSSES, abs=2e-3)
    assert outputs[1][-1].startswith("4 classes, 256 of 256 right")
    assert outputs[1][-1].endswith(f"on {device}")


@installed
@pytest.mark.parametrize("name", ["simd0", "cpu"])
def test_more_ported_scripts_train_to_the_same_losses(run: Run, name: str, tmp_path: Path) -> None:
    """A transformer whose kind of device comes from a name, and a convolution with flags and ways for the CPU."""
    pytest.importorskip("libcst", reason="anyaccel port needs LibCST: pip install 'anyaccel[port]'")
    for script in MORE_PORTED_LOSSES:
        shutil.copy(REPOSITORY / "tests" / "data" / "port" / script, tmp_path)
    ported = run("-m", "anyaccel", "port", str(tmp_path), "--write")
    assert ported.returncode == 0, ported.stderr
    here = f"import os, runpy, sys; os.chdir({str(tmp_path)!r}); sys.argv = sys.argv[:1]; "
    for script, losses in MORE_PORTED_LOSSES.items():
        done = run("-c", f"{here}runpy.run_path({script!r}, run_name='__main__')", DS_ACCELERATOR=name)
        assert done.returncode == 0, done.stderr
        steps = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
        assert {words[5] for words in steps} == {{"simd0": "simd", "cpu": "cpu"}[name]}
        assert [float(words[3]) for words in steps] == pytest.approx(losses, abs=2e-3)


@installed
def test_tensors_are_not_the_cpus(run: Run) -> None:
    out = _python(
        run,
        """
        import torch
        from anyaccel import get_accelerator
        get_accelerator()
        x = torch.arange(4.0, device="simd")
        for refused in (lambda: x.numpy(), lambda: x + torch.ones(4)):
            try:
                refused()
            except (TypeError, RuntimeError) as error:
                print(error)
        print(x.cpu().tolist(), x.to("simd:1").device, torch.equal(x.cpu(), x.to("simd:1").cpu()))
        print(torch.view_as_complex(x.view(2, 2)).conj().cpu().tolist())
        """,
    ).splitlines()
    assert "can't convert simd:0 device type tensor to numpy" in out[0]
    assert "same device" in out[1]
    assert out[2:] == ["[0.0, 1.0, 2.0, 3.0] simd:1 True", "[-1j, (2-3j)]"]


@installed
def test_memory(run: Run) -> None:
    out = _python(
        run,
        """
        import torch
        from anyaccel import get_accelerator
        a = get_accelerator()
        x = torch.empty(1 << 20, dtype=torch.uint8, device="simd:1")
        y = torch.empty(1 << 18, dtype=torch.uint8, device="simd:1")
        del x
        print(a.memory_allocated(1), a.max_memory_allocated(1), a.memory_allocated(0), a.memory_reserved(1))
        a.reset_peak_memory_stats(1)
        print(a.max_memory_allocated(1), a.total_memory(1), a.available_memory(1))
        print(a.memory_stats(1)["allocated_bytes.all.current"], a.memory_stats(1)["allocation.all.current"])
        try:
            torch.empty(5 << 30, dtype=torch.uint8, device="simd:1")
        except torch.OutOfMemoryError as error:
            print(error)
        print(a.memory_allocated(1), a.memory_stats(1)["num_ooms"])
        print(a.pin_memory(torch.ones(3)).is_pinned(), torch.ones(3).is_pinned())
        """,
    ).splitlines()
    mib, quarter, total = 1 << 20, 1 << 18, 4 << 30
    assert out == [
        f"{quarter} {mib + quarter} 0 {quarter}",
        f"{quarter} {total} {total - quarter}",
        f"{quarter} 1",
        f"simd:1 is out of memory: {5 << 30} bytes were asked for, {total - quarter} of {total} are free",
        f"{quarter} 1",
        "True False",
    ]


@installed
def test_random_numbers(run: Run) -> None:
    out = _python(
        run,
        """
        import torch
        from anyaccel import get_accelerator
        a = get_accelerator()
        draws = {
            "randn": lambda: torch.randn(64, device="simd"),
            "rand": lambda: torch.rand(64, device="simd"),
            "randint": lambda: torch.randint(1000, (64,), device="simd"),
            "randperm": lambda: torch.randperm(64, device="simd"),
            "bernoulli": lambda: torch.full((64,), 0.5, device="simd").bernoulli(),
            "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device="simd")),
            "multinomial": lambda: torch.ones(64, device="simd").multinomial(32),
        }
        of_cpu = torch.get_rng_state()
        for name, draw in draws.items():
            a.manual_seed(3)
            first = draw()
            state = a.get_rng_state()
            second = draw()
            a.set_rng_state(state)
            assert torch.equal(draw(), second), name
            a.manual_seed(3)
            assert torch.equal(draw(), first), name
            assert not torch.equal(first, second), name
        assert torch.equal(torch.get_rng_state(), of_cpu)
        torch.manual_seed(7)
        assert a.initial_seed() == 7 and a.default_generator(1).initial_seed() == 7
        generator = torch.Generator("simd:1").manual_seed(5)
        assert torch.randn(8, device="simd:1", generator=generator).device.index == 1
        try:
            torch.randn(8, device="simd", generator=torch.Generator())
        except RuntimeError as error:
            print(error)
        """,
    )
    assert out.strip() == "aten::normal_: a tensor on simd needs a generator of simd, not of cpu"


@installed
def test_streams_and_events(run: Run) -> None:
    _python(
        run,
        """
        import time, torch
        from anyaccel import get_accelerator
        a = get_accelerator()
        stream, other = a.Stream(), a.Stream("simd:1")
        assert stream != a.default_stream() and isinstance(a.current_stream(), a.Stream)
        with a.stream(stream):
            assert a.current_stream() == stream
        with a.stream(other):
            assert a.current_stream() == other and a.current_device() == 1
        assert a.current_stream() == a.default_stream() and a.current_device() == 0
        start, end = a.Event(enable_timing=True), a.Event(enable_timing=True)
        begin = time.perf_counter()
        start.record()
        time.sleep(0.02)
        end.record(stream)
        stream.wait_event(start)
        stream.wait_stream(other)
        stream.synchronize()
        end.synchronize()
        assert start.query() and stream.query() and isinstance(start, a.Event)
        assert 20 <= start.elapsed_time(end) <= 1e3 * (time.perf_counter() - begin), start.elapsed_time(end)
        a.synchronize()
        """,
    )


@installed
def test_the_op_is_built_when_it_is_first_used(run: Run) -> None:
    code = """
    import torch
    from anyaccel import get_accelerator
    from anyaccel_simd0.ops import scale_add
    a = get_accelerator()
    x = torch.arange(1000.0, device="simd")
    y = torch.ones(1000, device="simd")
    try:
        scale_add(x, y, 0.5)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print(a.op_builder_dir(), torch.equal(y.cpu(), 1 + 0.5 * torch.arange(1000.0)))
    for wrong in (y.cpu(), y.double(), y.view(10, 100).t(), y[:5], y.to("simd:1")):
        try:
            scale_add(x, wrong, 1.0)
        except ValueError as error:
            print(error)
    """
    out = _python(run, code).splitlines()
    assert out[0] == "anyaccel_simd0.op_builder True"
    assert len(out) == 6
    assert "y is torch.float32 on cpu" in out[1]
    off = _python(run, code, SIMD0_BUILD_SCALE_ADD="0").splitlines()[0]
    assert off.startswith("CapabilityError")
    assert "SIMD0_BUILD_SCALE_ADD=0" in off


@installed
def test_what_is_absent_says_why(run: Run) -> None:
    code = """
    from anyaccel import get_accelerator
    try:
        get_accelerator().create_graph()
    except Exception as error:
        print(type(error).__name__, error)
    """
    assert _python(run, code).strip() == (
        "CapabilityError accelerator 'simd0' does not have 'graphs': "
        "operators run as they are called, so there is nothing to capture"
    )


@installed
def test_the_report_shows_it(run: Run) -> None:
    done = run("-m", "anyaccel", "report", "--json")
    assert done.returncode == 0, done.stderr
    accelerator = json.loads(done.stdout)["accelerator"]
    assert (accelerator["name"], accelerator["device_count"]) == ("simd0", 2)
    assert [row["name"] for row in accelerator["candidates"] if row["chosen"]] == ["simd0"]


@installed
def test_it_conforms(run: Run) -> None:
    done = run("-m", "anyaccel", "conformance", "simd0", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@installed
def test_the_decoder_runs_on_it_as_on_the_cpu(run: Run, tmp_path: Path) -> None:
    """A case of each family, unchanged: `runtime="auto"` is its torch operators, with the CPU's logits."""
    pytest.importorskip("transformers")
    tests = [str(REPOSITORY / "tests" / "helpers")]
    code = f"""
    import sys
    sys.path[:0] = {tests!r}
    import logging, torch, anyaccel, family_cases
    logging.disable(logging.ERROR)
    worst = 0.0
    for name in [name for name in family_cases.CASES if "-" not in name]:
        plain, model = family_cases.build(name), family_cases.build(name)
        ids = torch.tensor([[5, 17, 99, 3, 64]])
        with torch.inference_mode():
            expected = plain(ids).logits
        engine = anyaccel.init_inference(model, dtype="fp32")
        assert (engine.runtime, engine.device.type) == ("device", "simd"), (name, engine.runtime, engine.why)
        logits = engine(ids.to(engine.device)).logits
        assert logits.device.type == "simd"
        worst = max(worst, float((logits.cpu() - expected).abs().max() / expected.abs().max()))
        if name in ("llama", "gpt_oss"):
            tokens = engine.generate(ids.to(engine.device), max_new_tokens=8, do_sample=False, eos_token_id=None)
            more = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert tokens.cpu().tolist() == plain.generate(ids, **more).tolist(), name
    print(worst <= 1e-4, worst)
    """
    assert _python(run, code, DS_ACCELERATOR="simd0", TRANSFORMERS_VERBOSITY="error").startswith("True")


@installed
def test_quantised_weights_run_on_it_as_on_the_cpu(run: Run, tmp_path: Path) -> None:
    """It has none of torch's operators for them: each matrix is dequantised for its products."""
    pytest.importorskip("transformers")
    tests = [str(REPOSITORY / "tests" / "helpers")]
    code = f"""
    import sys
    sys.path[:0] = {tests!r}
    import logging, torch, anyaccel, family_cases
    logging.disable(logging.ERROR)
    found = []
    for name in ("llama", "gpt_neox", "mixtral"):
        for dtype in ("int8", "int4"):
            model = family_cases.build(name)
            engine = anyaccel.init_inference(model, dtype=dtype, kv_cache="fp32", runtime="device")
            ids = torch.tensor([[5, 17, 99, 3, 64]], device=engine.device)
            found.append(engine(ids).logits.cpu())
    torch.save(found, {str(tmp_path)!r} + "/" + anyaccel.get_accelerator().device_name())
    print(engine.device.type)
    """
    for name, device in (("simd0", "simd"), ("cpu", "cpu")):
        assert _python(run, code, DS_ACCELERATOR=name, TRANSFORMERS_VERBOSITY="error").strip() == device
    torch = pytest.importorskip("torch")
    simulated, host = (torch.load(tmp_path / name) for name in ("simd", "cpu"))
    assert len(host) == 6
    for actual, expected in zip(simulated, host, strict=True):
        assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4
    code = """
    import anyaccel, transformers
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    try:
        anyaccel.init_inference(transformers.OpenAIGPTLMHeadModel(config), dtype="int8")
    except anyaccel.errors.UsageError as error:
        print(error)
    """
    said = _python(run, code, DS_ACCELERATOR="simd0", TRANSFORMERS_VERBOSITY="error")
    assert "dtype='int8' needs the device runtime, which has no model_type 'openai-gpt'; use bf16" in said


@installed
def test_with_graphs_it_passes_their_checks_and_decodes_through_them(run: Run) -> None:
    """All that a vendor adds: a class, a context and a question in its module, and the class's name in the spec."""
    pytest.importorskip("transformers")
    tests = [str(REPOSITORY / "tests" / "helpers")]
    code = f"""
    import sys
    sys.path[:0] = {tests!r}
    import contextlib, dataclasses, logging, torch, anyaccel, family_cases
    from anyaccel.accelerator import Capability
    from anyaccel.accelerator.conformance.checks import CHECKS
    from anyaccel.accelerator.conformance.run import run_check
    from anyaccel._llm import Request
    from anyaccel_simd0.accelerator import Simd0Accelerator
    from recorded_graph import RecordedGraph
    logging.disable(logging.ERROR)

    capturing = False

    @contextlib.contextmanager
    def graph(simd_graph, pool=None, stream=None):
        global capturing
        with simd_graph.capture():
            capturing = True
            yield
            capturing = False

    torch.simd.SimdGraph, torch.simd.graph = RecordedGraph, graph
    torch.simd.is_current_stream_capturing = lambda: capturing
    absent = {{name: why for name, why in Simd0Accelerator.spec.capabilities.absent.items() if name != "graphs"}}

    class WithGraphs(Simd0Accelerator):
        spec = dataclasses.replace(
            Simd0Accelerator.spec,
            graph_class="SimdGraph",
            capabilities=dataclasses.replace(Simd0Accelerator.spec.capabilities, absent=absent),
        )

    accelerator = WithGraphs()
    assert accelerator.has(Capability.GRAPHS)
    results = [run_check(each, accelerator) for each in CHECKS if each.subject == "graphs"]
    assert len(results) >= 3 and all(each.outcome == "pass" for each in results), results

    anyaccel.set_accelerator(accelerator)
    answers = []
    for runs in (True, False):
        model = anyaccel.init_inference(family_cases.build("llama", positions=512), dtype="fp32").native.model
        graphs = model.executor.graphs
        assert graphs.usable
        graphs.usable = runs
        requests = [Request(model, list(range(3, 3 + n)), {{"max_new_tokens": 9}}) for n in (5, 17)]
        while not all(request.finished for request in requests):
            model.step([request for request in requests if not request.finished])
        answers.append([request.tokens for request in requests])
        assert (graphs.taken > 7) == runs, graphs.taken
    print(answers[0] == answers[1])
    """
    assert _python(run, code, DS_ACCELERATOR="simd0", TRANSFORMERS_VERBOSITY="error").startswith("True")


@installed
def test_the_example_of_generation_runs_unchanged(run: Run, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    script = [str(REPOSITORY / "examples" / "generate_anywhere.py"), str(tmp_path), "--tokens", "6", "--dtype", "fp32"]
    said = [checked(run(*script, DS_ACCELERATOR=name)).splitlines() for name in ("simd0", "cpu")]
    assert [lines[0] for lines in said] == ["runtime: device on simd", "runtime: native on cpu"]
    assert said[0][1:] == said[1][1:]
