# SPDX-License-Identifier: Apache-2.0
"""Damaged model files: one line that names the value, with an amount of work that the damage does not decide about."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fuzz_models
from anyaccel.errors import ModelError
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.families.registry import FAMILIES
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.native.formats import Precision
from anyaccel.inference.native.packing import Plan
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.inference.text.gguf_tokenizer import write_tokenizer
from anyaccel.inference.text.tokenizer import TextTokenizer, end_tokens, load_text_tokenizer
from fuzz_models import ARRAY, F32, I32, TEXT, U32, U64

MOST_CALLS = 100_000  # of functions, to read a tiny file: a healthy one takes about ten thousand


@contextlib.contextmanager
def bounded_work() -> Iterator[None]:
    """Count calls of functions, also of those in C; more than MOST_CALLS fail the test."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > MOST_CALLS:
            sys.setprofile(None)
            raise AssertionError(f"more than {MOST_CALLS} calls, now in {frame.f_code.co_qualname}")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def refused(path: Path) -> str:
    """What is said of a model that cannot be read."""
    with bounded_work(), pytest.raises(ModelError) as error:
        Plan(read_checkpoint(path), Precision(None), 0, 1)
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < fuzz_models.LONGEST
    return said


@pytest.mark.parametrize("kind", fuzz_models.KINDS)
def test_healthy_files_are_read(kind: str, tmp_path: Path) -> None:
    """Else the tests below would test nothing."""
    file = tmp_path / "model.gguf"
    file.write_bytes(fuzz_models.healthy_gguf(kind).content())
    with bounded_work():
        Plan(read_checkpoint(file), Precision(None), 0, 1)
    fuzz_models.read(file, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gptq", "compressed", "sharded"])
def test_healthy_folders_are_read(kind: str, tmp_path: Path) -> None:
    fuzz_models.healthy_folder(tmp_path / "model", kind)
    Plan(read_checkpoint(tmp_path / "model"), Precision(None), 0, 1)
    fuzz_models.read(tmp_path / "model", tmp_path)


# Kind of file, key, what is there instead, what is said.
METADATA: list[tuple[str, str, tuple[int, Any], str]] = [
    # One flipped bit in a count.
    ("gpt2", "block_count", (U32, (1 << 24) + 2), "block_count=16777218, but the file has no tensor of layer 16777217"),
    ("llama", "block_count", (U32, (1 << 32) - 1), "block_count=4294967295 is not a whole number of 1 to"),
    ("llama", "block_count", (U64, 1 << 63), "block_count=9223372036854775808 is not"),
    ("gemma3", "block_count", (U32, (1 << 32) - 1), "block_count=4294967295 is not"),
    ("llama", "block_count", (U32, 3), "block_count=3, but the file has no tensor of layer 2"),
    ("llama", "attention.head_count", (U32, (1 << 32) - 1), "head_count=4294967295 is not a whole number of 1 to "),
    ("llama", "attention.key_length", (U64, 1 << 33), "key_length=8589934592 is not a whole number of 1 to "),
    ("llama", "attention.head_count_kv", (U32, 1 << 31), "head_count_kv=2147483648 is not"),
    ("llama", "embedding_length", (U64, 1 << 40), "embedding_length=1099511627776 is not a whole number of 32 to 32"),
    ("llama", "feed_forward_length", (U64, 1 << 62), "feed_forward_length=4611686018427387904 is not"),
    ("qwen3moe", "expert_count", (U32, 1 << 30), "expert_count=1073741824 is not a whole number of 1 to "),
    ("qwen3moe", "expert_count", (U32, 5), "is not one of 5 experts"),
    ("llama", "context_length", (U64, 1 << 60), "context_length=1152921504606846976 is not"),
    # Other types, zeros, what is no number.
    ("gemma3", "attention.sliding_window_pattern", (U32, 0), "sliding_window_pattern=0 is not a whole number of 1 to"),
    ("gemma3", "attention.sliding_window_pattern", (TEXT, "x"), "sliding_window_pattern='x' is not"),
    ("gemma3", "attention.sliding_window_pattern", (F32, float("inf")), "sliding_window_pattern=inf is not"),
    ("gemma3", "attention.sliding_window_pattern", (ARRAY, (TEXT, ["x"])), "pattern=an array of 1 texts is not"),
    ("gemma3", "attention.sliding_window_pattern", (ARRAY, (I32, [7, 7])), "pattern=7 is neither true nor false"),
    ("phi3", "attention.key_length", (U32, 0), "key_length=0 is not a whole number of 1 to"),
    ("granite", "attention.key_length", (U32, 0), "key_length=0 is not a whole number of 1 to"),
    ("phi3", "rope.scaling.attn_factor", (TEXT, "x"), "attn_factor='x' is not a number"),
    ("gemma3", "rope.scaling.type", (ARRAY, (I32, [1, 2])), r"scaling.type=[1, 2] is not a text"),
    ("gemma3", "rope.scaling.factor", (F32, 0.0), "scaling.factor=0.0 is not a number above 0"),
    ("llama", "rope.freq_base", (F32, float("nan")), "freq_base=nan is not a number above 0"),
    ("llama", "attention.layer_norm_rms_epsilon", (TEXT, "x"), "epsilon='x' is not a number"),
    ("llama", "attention.head_count", (ARRAY, (I32, [4, 4])), ""),  # one for each layer, all alike: right
]


@pytest.mark.parametrize(("kind", "key", "value", "said"), METADATA)
def test_metadata_are_checked(kind: str, key: str, value: tuple[int, Any], said: str, tmp_path: Path) -> None:
    healthy = fuzz_models.healthy_gguf(kind)
    healthy.pairs[f"{kind}.{key}"] = value
    file = tmp_path / "model.gguf"
    file.write_bytes(healthy.content())
    if not said:
        Plan(read_checkpoint(file), Precision(None), 0, 1)
        return
    assert said in refused(file)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(("kind", "name"), [("llama", "rope_freqs"), ("phi3", "rope_factors_short")])
def test_factors_of_rotary_positions_are_checked(kind: str, name: str, factor: float, tmp_path: Path) -> None:
    healthy = fuzz_models.healthy_gguf(kind)
    healthy.tensor(name, fuzz_models.HEAD_DIM // 2, value=factor)
    (tmp_path / "model.gguf").write_bytes(healthy.content())
    assert f"tensor '{name}.weight': factor={factor} is not a number above 0" in refused(tmp_path / "model.gguf")


def test_counts_of_the_format_are_checked(tmp_path: Path) -> None:
    """A hole of zeros would otherwise be read as values without a name, one after another, to the end of the file."""
    content = bytearray(fuzz_models.healthy_gguf("llama").content())
    file = tmp_path / "model.gguf"
    for place, count in ((8, 1 << 20), (16, 1 << 16), (8, 1 << 63), (16, 1 << 63)):
        damaged = content[:]
        damaged[place : place + 8] = count.to_bytes(8, "little")
        damaged[24:] = bytes(1 << 22)
        file.write_bytes(damaged)
        said = refused(file)
        assert "twice" in said or "metadata values in" in said


def test_a_token_without_end_is_refused(tmp_path: Path) -> None:
    """All ways to cut a token in two are looked at: of one of a megabyte that would be for ever."""
    healthy = fuzz_models.healthy_gguf("llama")
    tokens = [*fuzz_models.TOKENS[:-1], "a" * (1 << 20)]
    healthy.pairs["tokenizer.ggml.tokens"] = (ARRAY, (TEXT, tokens))
    (tmp_path / "model.gguf").write_bytes(healthy.content())
    with bounded_work(), pytest.raises(ModelError, match="a token of 1048576 characters"):
        write_tokenizer(tmp_path / "model.gguf", tmp_path)


# Model folders.

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("content", [DEEP, f'{{"chat_template": {DEEP}}}', '"text"', '{"eos_token": 5', "\xff"])
def test_tokenizer_files_are_checked(name: str, content: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    if name == "chat_template.json":
        (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).write_text(content, encoding="latin-1")
    with pytest.raises(ModelError, match=rf"{name}: not .*(deeply|object|delimiter|UTF-8)") as error:
        load_text_tokenizer(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"\xff{{", b"{{ " + b"(" * 50_000, b"{% if x %}" * 200, b"{{ 1" + b"+1" * 50_000])
def test_templates_are_checked(content: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    (folder / "chat_template.jinja").write_bytes(content)
    said = r"chat_template\.jinja: not a text in UTF-8|chat template cannot be read"
    with pytest.raises(ModelError, match=said) as error:
        TextTokenizer(folder).chat([{"role": "user", "content": "a"}])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("architectures", 1e308, "architectures=1e+308 is not a list"),
        ("architectures", [5], "architectures=5 is not a text"),
        ("num_hidden_layers", "2", "num_hidden_layers='2' is not a whole number"),
        ("num_hidden_layers", 240, "no tensor 'model.layers.2."),
        ("hidden_size", 10**400, "hidden_size=100000"),
        ("tie_word_embeddings", "false", "tie_word_embeddings='false' is neither true nor false"),
        ("text_config", [1], "text_config=[1] is not an object"),
        ("quantization_config", "x" * 5000, "quantization_config='xxx"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 0}, "rope_parameters: factor=0 is not a number above 0"),
        ("rope_scaling", {"rope_type": ["x"]}, "rope_type=['x'] is not a text"),
    ],
)
def test_configs_are_checked(name: str, value: Any, said: str, tmp_path: Path) -> None:
    from anyaccel.inference.native.runtime import load_native
    from anyaccel.inference.options import ModelOptions

    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: value}))
    with bounded_work(), pytest.raises(ModelError) as error:
        load_native(folder, ModelOptions("auto"))
    assert said in str(error.value)
    assert len(str(error.value)) < fuzz_models.LONGEST


def test_experts_are_counted_against_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "mixtral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 512, "num_local_experts": 2048}))
    assert "has no tensor" in refused(folder) or "wrong shape" in refused(folder)


@pytest.mark.parametrize("count", [(1 << 31) - 1, 1 << 24])
def test_what_transformers_would_build_is_counted(count: int, tmp_path: Path) -> None:
    """It makes the layers of a model that the native runtime lacks before it looks for their weights."""
    import torch

    from anyaccel.inference.generic.loading import skeleton

    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    with pytest.raises(ModelError, match=rf"num_hidden_layers={count}, but the model has 20 tensors"):
        skeleton(folder, torch.float32)


def test_integers_without_a_meaning_are_refused_by_the_own_code_too(tmp_path: Path) -> None:
    import torch

    from anyaccel.inference import init_inference

    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    for runtime in ("native", "torch"):
        with pytest.raises(ModelError, match=r"q_proj\.weight' has integers .*(quantization_config|configuration)"):
            init_inference(folder, dtype="fp32", runtime=runtime)


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this must not be seen",)


def test_a_bin_file_that_would_run_something_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    folder = tmp_path / "model"
    fuzz_models.healthy_folder(folder, "llama")
    (folder / "model.safetensors").unlink()
    torch.save({"a": _Runs()}, folder / "pytorch_model.bin")
    said = refused(folder)
    assert "pytorch_model.bin: not read, as that would run " in said
    assert "print" in said
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1})[:-3] + b"garbage")
    assert "pytorch_model.bin: cannot be read, truncated or damaged (" in refused(folder)
    assert "weights_only" not in refused(folder)
    assert "seen" not in capsys.readouterr().out


@pytest.mark.parametrize("value", ["x", [2, "x"], 1e308, {}, [[2]]])
def test_end_tokens_are_checked(value: Any) -> None:
    with pytest.raises(ModelError, match="eos_token_id="):
        end_tokens({"eos_token_id": value}, {})


_LONG = {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "attention_factor": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
}
_OTHERS = {"rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0, "alpha": 10.0, "llama_4_scaling_beta": 0.1}
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64}


def told_by_the_reader(model_type: str, values: dict[str, Any]) -> None:
    family = FAMILIES[model_type]
    try:
        family.spec({"model_type": model_type} | ({family.text: values} if family.text else values))
    except ModelError as error:
        said = str(error)
        # Other errors of Python are caught at last, for safety, but they do not name the value.
        assert "of a wrong kind" not in said, values
        assert "\n" not in said
        assert len(said) < fuzz_models.LONGEST


def least(model_type: str) -> dict[str, Any]:
    layers = FAMILIES[model_type].aliases.get("num_hidden_layers", "num_hidden_layers")
    return {"num_experts_per_tok": 2, "num_local_experts": 4, "num_kv_shared_layers": 0, layers: 2}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_value_that_a_family_reads_is_checked(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = Config._value

    def recorded(self: Config, name: str) -> Any:
        read.add(name)
        return original(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Config, "_value", recorded)
        for option in ({}, {"use_sliding_window": True}, {"topk_method": "group_limited_greedy"}):
            told_by_the_reader(model_type, least(model_type) | option)
    assert len(read) >= 8
    for name in sorted(read):
        for value in fuzz_models.STRANGE:
            told_by_the_reader(model_type, least(model_type) | {name: value})


_OTHER_ROTARY = ("hunyuan_v1_dense", "ministral3", "deepseek_v3", "glm")


@pytest.mark.parametrize(
    "model_type",
    ["llama", "phi3", *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHER_ROTARY)],
)
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "llama3", "default", "proportional", "su"])
def test_every_value_of_rotary_positions_is_checked(model_type: str, kind: str) -> None:
    whole = {"rope_type": kind, **_LONG, **_YARN, **_OTHERS, **_FACTORS}
    for name in whole:
        for value in fuzz_models.STRANGE:
            told_by_the_reader(model_type, least(model_type) | {"rope_scaling": whole | {name: value}})


# Everything else, drawn from a seed: see fuzz_models.


def fuzz(seed: int, count: int) -> None:
    command = [sys.executable, fuzz_models.__file__, "--seed", str(seed), "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    cases, rest = [], []
    for line in done.stdout.splitlines():
        (cases if line.startswith("case ") and line[5:].isdecimal() else rest).append(line)
    assert done.returncode == 0, f"after {cases[-1:]} of {command}:\n" + "\n".join(rest[-60:]) + done.stderr[-2000:]
    assert len(cases) == count


def test_random_damage_is_told() -> None:
    fuzz(seed=0, count=150)


@pytest.mark.slow  # some minutes
@pytest.mark.timeout(1800)
def test_much_random_damage_is_told() -> None:
    fuzz(seed=1, count=10_000)


def test_what_is_unsupported_is_not_taken_for_damage(tmp_path: Path) -> None:
    """It goes to transformers, which may have it."""
    healthy = fuzz_models.healthy_gguf("llama")
    healthy.pairs["general.architecture"] = (TEXT, "rwkv7")
    (tmp_path / "model.gguf").write_bytes(healthy.content())
    with pytest.raises(Unsupported, match="'rwkv7'"):
        read_checkpoint(tmp_path / "model.gguf")
