# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and other errors while a model loads end the command with its own exit code, at whatever moment they come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from anyaccel.cli import _interrupts, main
from anyaccel.cli._interrupts import careful_interrupts
from anyaccel.inference.ranks.background import Abandoned, BackgroundTask

# Runs one command in many forks of itself; in each something happens in the main thread once the thread that loads has
# come to the moment of that fork. What is said about a fork is its exit status, after Python has wound itself up.
DRIVER = textwrap.dedent(
    """
    import json, os, signal, sys, threading
    from anyaccel import _llm
    from anyaccel.cli import _screen, chat, generate, main
    from anyaccel.inference.ranks import backends
    from anyaccel.inference import generate as _
    from anyaccel.inference.text import tokenizer
    from anyaccel.inference.native import checkpoint, packed_cache, packing, runtime

    folder, what, moments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

    def arm(moment):
        reached, seen = threading.Event(), [0]

        def event(name):
            if name == "progress":
                seen[0] += 1
                name = seen[0]
            if name == moment:
                if what == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    reached.set()

        def after(owner, attribute, name):
            inner = getattr(owner, attribute)

            def call(*arguments, **options):
                event(name)
                return inner(*arguments, **options)

            setattr(owner, attribute, call)

        after(_screen.Screen, "progress", "progress")
        after(checkpoint, "read_checkpoint", "open")
        after(packing.Plan, "shapes", "plan")
        after(packed_cache.PackedModel, "save", "save")
        load = tokenizer.load_text_tokenizer

        def load_text_tokenizer(path, announce):
            if what != "interrupt":
                assert reached.wait(60)
                raise {"OSError": OSError(27, "File too large"), "MemoryError": MemoryError()}[what]
            return load(path, announce)

        tokenizer.load_text_tokenizer = load_text_tokenizer

    codes = []
    for number, moment in enumerate(moments):
        child = os.fork()
        if child == 0:
            os.environ["ANYACCEL_CACHE_DIR"] = f"{folder}/cache-{what}-{number}"
            arm(moment)
            command = ["generate", "hello"] if number % 2 == 0 else ["chat"]
            sys.exit(main([*command, "--model", folder, "--dtype", "int8", "--max-new-tokens", "1"]))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(codes))
    """
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that packs in a fraction of a second, in some dozens of steps."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder = tmp_path_factory.mktemp("interrupted")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 2048,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": (2048, 512), "model.norm.weight": (512,)}
    for layer in range(4):
        for name in "qkvo":
            weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (512, 512)
        for name, shape in {"gate": (2048, 512), "up": (2048, 512), "down": (512, 2048)}.items():
            weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] = shape
        for name in ("input", "post_attention"):
            weights[f"model.layers.{layer}.{name}_layernorm.weight"] = (512,)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in weights.items()}
    save_file(values, str(folder / "model.safetensors"))
    Tokenizer(WordLevel({"hello": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[-1].content }}"}))
    return folder


def exit_codes(model: Path, what: str, moments: list[object]) -> dict[object, int]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(model), what, json.dumps(moments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(moments, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_ctrl_c_at_any_moment_of_loading_ends_with_130(model: Path) -> None:
    moments: list[object] = ["open", "plan", *range(1, 24), "save"]
    codes = exit_codes(model, "interrupt", moments)
    assert codes == dict.fromkeys(moments, 130)


@pytest.mark.parametrize("error", ["OSError", "MemoryError"])
def test_another_error_while_weights_are_packed_ends_with_1(model: Path, error: str) -> None:
    moments: list[object] = ["open", 1, 2, 5, 12]
    codes = exit_codes(model, error, moments)
    assert codes == dict.fromkeys(moments, 1)


def test_work_beside_has_ended_when_the_block_has() -> None:
    steps = threading.Event()
    ended: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                beside.check()
                steps.set()
        except BaseException as error:
            ended.append(error)
            raise

    with pytest.raises(ZeroDivisionError), BackgroundTask() as beside:
        beside.start(work)
        assert steps.wait(60)
        raise ZeroDivisionError
    assert [type(each) for each in ended] == [Abandoned]


def test_work_beside_gives_its_value_or_its_error() -> None:
    with BackgroundTask() as beside:
        beside.start(lambda: 5)
        assert beside.result() == 5
    with pytest.raises(ZeroDivisionError), BackgroundTask() as beside:
        beside.start(lambda: 1 // 0)
        beside.result()


def test_waiting_for_another_process_that_packs_can_be_given_up(tmp_path: Path) -> None:
    from anyaccel.inference.checkpoints.cache_lock import locked

    def check() -> None:
        raise Abandoned

    lock = tmp_path / "lock"
    with locked(lock), pytest.raises(Abandoned), locked(lock, check):
        pass


# ---- Ctrl-C and what Python does with it


def a_module(folder: Path, name: str, text: str, patch: pytest.MonkeyPatch) -> None:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    patch.syspath_prepend(folder)


def test_ctrl_c_during_an_import_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            whole = True
        except BaseException:  # as a package may: that KeyboardInterrupt was lost
            whole = False
        """
    a_module(tmp_path, "interrupted_module", text, monkeypatch)
    with pytest.raises(KeyboardInterrupt), careful_interrupts():
        import interrupted_module  # type: ignore[import-not-found]

        threading.Event().wait(60)
    assert interrupted_module.whole


def test_an_import_that_hangs_is_interrupted_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        import os, signal, threading
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(60)
        """
    a_module(tmp_path, "hanging_module", text, monkeypatch)
    monkeypatch.setattr(_interrupts, "_LONGEST_DEFERRAL_S", 0.2)
    with pytest.raises(KeyboardInterrupt), careful_interrupts():
        import hanging_module  # type: ignore[import-not-found]  # noqa: F401


def test_ctrl_c_that_python_can_only_drop_comes_again() -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass

    with pytest.raises(KeyboardInterrupt), careful_interrupts():
        Finalized()
        threading.Event().wait(60)


def test_ctrl_c_in_the_last_import_of_a_command_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_module(tmp_path, "last_module", "import os, signal\nos.kill(os.getpid(), signal.SIGINT)", monkeypatch)

    def command(_argv: list[str]) -> int:
        __import__("last_module")
        return 0

    monkeypatch.setattr("anyaccel.cli._dispatch", command)
    before: Any = signal.getsignal(signal.SIGINT)
    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "anyaccel: interrupted\n"


def test_ctrl_c_is_left_to_whoever_handles_it_already() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with careful_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with careful_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_probe_is_waited_for() -> None:
    from anyaccel.accelerator import deadline

    ended = threading.Event()
    main_thread = threading.main_thread().ident or 0

    def work() -> None:
        threading.Event().wait(0.1)  # until the caller waits, most likely
        signal.pthread_kill(main_thread, signal.SIGINT)
        threading.Event().wait(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        deadline.run(work, 60)
    assert ended.is_set()
