# SPDX-License-Identifier: Apache-2.0
"""Calibrated quantisation: levels that readers give back, errors that are made up for, files as a whole."""

from __future__ import annotations

import errno
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.calibration import compensation
from anyaccel.inference.calibration.blocks import Blocks, Replay
from anyaccel.inference.calibration.compensation import Inputs, compensated, nearest
from anyaccel.inference.calibration.folds import folds_of, storable
from anyaccel.inference.calibration.gguf_grids import GRIDS, packed
from anyaccel.inference.calibration.grids import Grid, IntGrid
from anyaccel.inference.calibration.mixed import Outside, damages, spent
from anyaccel.inference.calibration.text import builtin_text, spread_text
from anyaccel.inference.checkpoints.gguf_file import GgufSource
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.families.registry import family_of
from anyaccel.inference.native.checkpoint import read_checkpoint
from anyaccel.inference.quantize import quantize

INTS = [IntGrid(4, 32, True), IntGrid(4, 64, False), IntGrid(4, 128, True), IntGrid(8, 256, False)]

INTS_OF_4 = [IntGrid(4, 32, True), IntGrid(4, 64, True)]


def correlated(cols: int, count: int) -> torch.Tensor:
    """Inputs whose features depend on each other, as those of a model do."""
    torch.manual_seed(1)
    return torch.randn(count, cols // 4) @ torch.randn(cols // 4, cols) + 0.3 * torch.randn(count, cols)


@pytest.mark.parametrize("grid", [*INTS, *GRIDS.values()], ids=lambda grid: grid.name)
def test_errors_are_made_up_for(grid: Grid) -> None:
    x = correlated(256, 512)
    torch.manual_seed(0)
    w = torch.randn(16, 256)
    plain, made_up = nearest(w, grid), compensated(w, grid, Inputs(x.T @ x, grid.width))
    errors = [float(((each.values() - w) @ x.T).square().mean().sqrt()) for each in (plain, made_up)]
    assert errors[1] < 0.75 * errors[0]
    size = float((w @ x.T).square().mean().sqrt())
    assert errors[0] / size < 0.2 * 2.0 ** (4 - math.floor(grid.bits))


@pytest.mark.parametrize("kind", GRIDS)
def test_blocks_are_read_as_the_same_values(kind: str) -> None:
    from gguf import GGMLQuantizationType, dequantize

    torch.manual_seed(0)
    w = torch.randn(8, 512) * torch.rand(8, 1)
    w[3] = 0.0
    w[4, :300] = 0.0
    w[5] = w[5].abs()
    rounded = nearest(w, GRIDS[kind])
    found = dequantize(packed(rounded), GGMLQuantizationType[kind.upper()])
    np.testing.assert_allclose(found, rounded.values().numpy(), rtol=0, atol=1e-6)


def test_inputs_that_are_always_zero() -> None:
    x = correlated(64, 256)
    x[:, 5:40] = 0.0
    w = torch.randn(8, 64)
    values = compensated(w, INTS[0], Inputs(x.T @ x, 32)).values()
    assert torch.isfinite(values).all()
    assert float(((values - w) @ x.T).norm() / (w @ x.T).norm()) < 0.1


def test_inputs_that_rounding_has_moved_are_made_up_for() -> None:
    """What counts is nearness to the products with the inputs of the model that nothing was rounded of."""
    x = correlated(256, 512)
    torch.manual_seed(2)
    wanted = x + 0.3 * x @ torch.randn(256, 256) / 16  # moved alike for each token, as by a matrix that was rounded
    w = torch.randn(16, 256)
    without = compensated(w, INTS[0], Inputs(x.T @ x, 32))
    made_up = compensated(w, INTS[0], Inputs(x.T @ x, 32, (wanted - x).T @ x))
    errors = [float((each.values() @ x.T - w @ wanted.T).norm()) for each in (without, made_up)]
    assert errors[1] < 0.5 * errors[0]
    aimed = Inputs(x.T @ x, 1, (wanted - x).T @ x).aimed(w)  # what 8 bits are rounded to
    assert float((nearest(aimed, GRIDS["q8_0"]).values() @ x.T - w @ wanted.T).norm()) < 0.9 * errors[1]


@pytest.mark.parametrize("grid", [INTS[0], GRIDS["q5_0"], GRIDS["q4_k"]], ids=lambda grid: grid.name)
def test_parts_of_the_rows_are_rounded_as_the_whole(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several threads too, and apart again."""
    x = correlated(256, 512)
    w = torch.randn(24, 256)
    inputs = Inputs(x.T @ x, grid.width)
    whole = compensated(w, grid, inputs)
    threads = torch.get_num_threads()
    monkeypatch.setattr(compensation, "_ROWS", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = compensated(w, grid, inputs)
    torch.set_num_threads(threads)
    # Sums can be of another order, and one value that is rounded the other way changes what follows it in its row.
    assert int((found.q == whole.q).flatten(1).all(dim=1).sum()) >= 20
    errors = [float(((each.values() - w) @ x.T).norm()) for each in (found, whole)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
    for part, rows in zip(found.split([4, 20]), (slice(4), slice(4, 24)), strict=True):
        torch.testing.assert_close(part.values(), found.values()[rows])
        for name, codes in found.fitted[0].codes.items():
            torch.testing.assert_close(part.codes(name)[:1, :1], codes[:1, rows.start or 0 : (rows.start or 0) + 1])


def test_a_block_that_is_run_again_computes_only_what_has_changed(model: Path) -> None:
    source: Any = read_checkpoint(model)
    blocks = Blocks(source.source, source.config, torch.tensor(list(bytes(512))).view(1, 512), "test")
    with blocks.block(0) as block:
        wanted = block.run(blocks.hidden[0])
        replay = Replay(block.linears)
        first = next(iter(block.linears))
        replay.final.add(first)
        before = block.run(blocks.hidden[0])
        block.linears[first].weight.data.zero_()
        torch.testing.assert_close(block.run(blocks.hidden[0]), wanted)
        replay.window = 1  # nothing is known of it
        other = block.run(blocks.hidden[0])
        replay.close()
        torch.testing.assert_close(before, wanted)
        assert not torch.allclose(other, wanted)
        torch.testing.assert_close(block.run(blocks.hidden[0]), other)


@pytest.mark.parametrize("grid", [INTS[0], INTS[1], GRIDS["q4_k"], GRIDS["q6_k"]], ids=lambda grid: grid.name)
def test_levels_chosen_again_are_closer(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    x = correlated(256, 512)
    torch.manual_seed(3)
    w = torch.randn(16, 256)
    errors = []
    for passes in (0, 1, 2):
        monkeypatch.setattr(compensation, "_AGAIN", passes)
        found = compensated(w, grid, Inputs(x.T @ x, grid.width))
        assert int(found.q.min()) >= grid.low
        assert int(found.q.max()) <= grid.high
        errors.append(float(((found.values() - w) @ x.T).norm()))
    assert errors[2] < errors[1] < 0.97 * errors[0]


@pytest.mark.parametrize("kind", [*INTS[:2], *(GRIDS[name] for name in ("q4_0", "q4_1", "q4_k", "q6_k"))], ids=str)
def test_levels_fitted_again_are_closer(kind: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what the columns have become, by all that is known of the inputs."""
    x = correlated(256, 512)
    torch.manual_seed(3)
    w = torch.randn(16, 256)
    again = compensated(w, kind, Inputs(x.T @ x, kind.width))
    monkeypatch.setattr(compensation, "_fit_again", lambda *_: None)
    once = compensated(w, kind, Inputs(x.T @ x, kind.width))
    errors = [float(((each.values() - w) @ x.T).norm()) for each in (once, again)]
    assert errors[1] < 0.985 * errors[0]


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Of the next token, in nats, the mean over all tokens."""
    a, b = torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def test_damage_is_what_rounding_does_to_the_next_token(model: Path) -> None:
    """Against the divergence that there is when only the matrices of one set are rounded, and all else computed."""
    source: Any = read_checkpoint(model)
    text = builtin_text()[:2048].encode("ascii", "replace")
    blocks = Blocks(source.source, source.config, torch.tensor(list(text)).view(4, 512), "test")
    outside = Outside("model.embed_tokens.weight", "lm_head.weight", 256 * 64)
    names = [*blocks.linears(), outside.embedding, outside.head]
    squares: dict[str, torch.Tensor] = {}
    found = damages(blocks, dict.fromkeys(names, INTS_OF_4), outside, squares)[0]
    assert len(found) == 10  # four of each block, embedding and head
    whole = whole_model(model)
    with torch.no_grad():
        wanted = whole(blocks.windows).logits
        weights = dict(whole.named_parameters())
        ratios = []
        for each, (first, second) in found.items():
            kept = {name: weights[name].clone() for name in each}
            for name, weight in kept.items():
                grid = INTS_OF_4[0]
                outside_too = name in squares  # errors are made up for
                rounded = (
                    compensated(weight, grid, Inputs(squares[name].clone(), 32))
                    if outside_too
                    else nearest(weight, grid)
                )
                weights[name].copy_(rounded.values())
            ratios.append(first / divergence(wanted, whole(blocks.windows).logits))
            for name, weight in kept.items():
                weights[name].copy_(weight)
            assert first < second
    assert min(ratios) > 0.4, ratios
    assert max(ratios) < 2.5, ratios


def test_embedding_and_head_are_rounded_by_what_their_errors_do(model: Path) -> None:
    source: Any = read_checkpoint(model)
    text = builtin_text()[:2048].encode("ascii", "replace")
    blocks = Blocks(source.source, source.config, torch.tensor(list(text)).view(4, 512), "test")
    outside = Outside("model.embed_tokens.weight", "lm_head.weight", 256 * 64)
    squares: dict[str, torch.Tensor] = {}
    damages(blocks, dict.fromkeys([*blocks.linears(), outside.embedding, outside.head], INTS_OF_4), outside, squares)
    whole = whole_model(model)
    weights = dict(whole.named_parameters())
    with torch.no_grad():
        wanted = whole(blocks.windows).logits
        for name in (outside.embedding, outside.head):
            kept = weights[name].clone()
            found = []
            for rounded in (nearest(kept, INTS[0]), compensated(kept, INTS[0], Inputs(squares[name], 32))):
                weights[name].copy_(rounded.values())
                found.append(divergence(wanted, whole(blocks.windows).logits))
            weights[name].copy_(kept)
            assert found[1] < 0.9 * found[0], (name, found)


def test_of_a_large_text_pieces_from_all_over_it_are_read(tmp_path: Path) -> None:
    file = tmp_path / "text"
    lines = [f"{number:06} größer 日本\n" for number in range(40_000)]
    file.write_text("".join(lines))
    assert spread_text(file, 1 << 24) == "".join(lines)
    found = spread_text(file, 100_000)
    assert 90_000 < len(found.encode()) <= 100_200
    numbers = [int(line[:6]) for line in found.split("\n") if len(line) == len(lines[0]) - 1]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert numbers[-1] == 39_999
    assert max(b - a for a, b in itertools.pairwise(numbers)) < 40_000 / 50
    file.write_bytes(b"a" * 999_000 + b"\xff" * 1000)
    with pytest.raises(ModelError, match="not a text in UTF-8"):
        spread_text(file, 100_000)


def byte_model(folder: Path) -> Path:
    """A small random Llama whose tokens are bytes; features that are correlated, as those of real models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mixing = torch.randn(12, 64)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(256, 12) @ mixing + 0.1 * torch.randn(256, 64))
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("calibration") / "model")


def text(folder: Path, characters: int = 2100) -> Path:
    file = folder / "text.txt"
    file.write_text(builtin_text()[:characters])
    return file


def whole_model(folder: Path, like: Path | None = None) -> Any:
    """With the values that the checkpoint stands for; of a GGUF file `like` is a folder with its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source: Any = read_checkpoint(folder).source
    config = AutoConfig.from_pretrained(like or folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    values = {name: torch.from_numpy(floats_of(source.tensor(name))) for name in made.state_dict()}
    made.load_state_dict(values)
    return made


def logits(folder: Path) -> torch.Tensor:
    """Of a text that was not calibrated on."""
    made = whole_model(folder)
    window = torch.tensor([ord(each) % 256 for each in "A text that nothing was fitted to; 1, 2, 3 and so on."])
    with torch.inference_mode():
        return made(window[None]).logits[0]


def test_a_calibrated_model_is_closer(model: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    threads = torch.get_num_threads()
    quantize(model, tmp_path / "plain", asymmetric=True)
    made = tmp_path / "calibrated"
    summary = quantize(
        model, made, calibrate=text(tmp_path, 3000), tokens=2048, asymmetric=True,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert summary.calibration == {"text": str(tmp_path / "text.txt"), "tokens": 2048}
    assert torch.get_num_threads() == threads
    assert len(summary.matrices) == 14
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    wanted = logits(model)
    plain, calibrated = (float((logits(tmp_path / name) - wanted).norm()) for name in ("plain", "calibrated"))
    assert calibrated < 0.8 * plain
    assert sorted(each.name for each in tmp_path.iterdir()) == ["calibrated", "plain", "text.txt"]


@pytest.mark.parametrize(
    ("content", "said"), [("", "is empty"), (" \n", "is empty"), ("short", "5 tokens; at least 2048 are needed")]
)
def test_texts_that_are_of_no_use(model: Path, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "text.txt").write_text(content)
    with pytest.raises(UsageError, match=said):
        quantize(model, tmp_path / "out", calibrate=tmp_path / "text.txt")
    with pytest.raises(UsageError, match="no such text file"):
        quantize(model, tmp_path / "out", calibrate=tmp_path / "other.txt")
    for tokens in (0, -5, 10):
        with pytest.raises(UsageError, match=f"--calibration-tokens {tokens}: too few"):
            quantize(model, tmp_path / "out", calibrate="builtin", tokens=tokens)
    with pytest.raises(UsageError, match="int8 loses almost nothing"):
        quantize(model, tmp_path / "out", calibrate="builtin", dtype="int8")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["text.txt"]


def test_no_room(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 10))
    with pytest.raises(UsageError, match=r"0\.0 MiB are free"):
        quantize(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bits_go_where_they_spare_most() -> None:
    damage = {("a",): [9.0, 1.0, 0.5], ("b",): [2.0, 1.9, 0.0], ("c",): [1.0, 0.9, 0.8]}
    bits = {names: [4.0, 5.0, 8.0] for names in damage}
    sizes = dict.fromkeys(damage, 100)
    assert spent(damage, bits, sizes, 4.0) == {("a",): 0, ("b",): 0, ("c",): 0}
    assert spent(damage, bits, sizes, 4.4) == {("a",): 1, ("b",): 0, ("c",): 0}
    assert spent(damage, bits, sizes, 5.7) == {("a",): 1, ("b",): 2, ("c",): 0}
    assert spent(damage, bits, sizes, 99.0) == {("a",): 2, ("b",): 2, ("c",): 2}


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_nothing_is_left_of_what_is_ended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, kind: str
) -> None:
    """By Ctrl-C and by a full disk, when the first block is done and its matrices are being written."""
    monkeypatch.setattr("anyaccel.inference.calibration.text.load_text_tokenizer", lambda *_: Octets())
    source = model if kind == "folder" else gguf_model(model, tmp_path / "model.gguf")
    text(tmp_path)
    before = {each.name for each in tmp_path.iterdir()}

    def ended(*_: object) -> None:
        assert {each.name for each in tmp_path.iterdir()} != before  # something was begun
        raise failure

    where = "session.as_rows" if kind == "folder" else "gguf_copy.packed"
    monkeypatch.setattr(f"anyaccel.inference.calibration.{where}", ended)
    out = tmp_path / ("out" if kind == "folder" else "out.gguf")
    with pytest.raises((KeyboardInterrupt, OSError)):
        quantize(
            source, out, calibrate=tmp_path / "text.txt", format="gguf" if kind == "gguf" else "compressed-tensors"
        )
    assert {each.name for each in tmp_path.iterdir()} == before


def test_mixed_precision_keeps_to_its_target(model: Path, tmp_path: Path) -> None:
    summary = quantize(model, tmp_path / "out", calibrate=text(tmp_path), bits=5.2)
    weights = sum(each.rows * each.cols for each in summary.matrices)
    assert (
        4.8 < 8 * sum(each.bytes - 16 for each in summary.matrices) / weights < 5.3
    )  # scales of rows, zero points padded
    kinds = {each.name: (each.type, each.group) for each in summary.matrices}
    assert {kind for kind, _ in kinds.values()} == {"int4", "int8"}
    for layer in range(2):  # what is one matrix natively is of one kind
        at = f"model.layers.{layer}."
        assert len({kinds[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"}) == 1
        assert len({kinds[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")}) == 1
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["num_bits"] for group in settings.values()} == {4, 8}
    assert float((logits(tmp_path / "out") - logits(model)).norm() / logits(model).norm()) < 0.2


class Octets:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def gguf_model(folder: Path, out: Path) -> Path:
    """The model of a folder as a GGUF file in bfloat16, with rows as llama.cpp orders them."""
    import gguf
    from safetensors.torch import load_file

    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    others = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_custom_alignment(128)
    writer.add_context_length(512)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(16)
    writer.add_array("tokenizer.ggml.tokens", [f"t{number}" for number in range(256)])
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        layer = stem.removeprefix("model.layers.").partition(".")
        stored = others.get(stem) or f"blk.{layer[0]}.{parts[layer[2]]}"
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(stem[-6:])
        if heads:
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        values = tensor.float().contiguous().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(f"{stored}.weight", values)
        else:
            halves = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
            writer.add_tensor(f"{stored}.weight", halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_a_calibrated_gguf_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyaccel.inference.calibration.text.load_text_tokenizer", lambda *_: Octets())
    file = gguf_model(model, tmp_path / "model.gguf")
    text(tmp_path)
    summary = quantize(file, tmp_path / "out.gguf", calibrate=tmp_path / "text.txt", format="gguf")
    assert {each.type for each in summary.matrices} == {"q4_k", "q4_1"}  # down_proj has 256 columns
    before, after = (read_checkpoint(tmp_path / name).source for name in ("model.gguf", "out.gguf"))
    assert sorted(before.names()) == sorted(after.names())
    assert GgufSource(tmp_path / "out.gguf").metadata["llama.block_count"] == 2
    for name in before.names():
        a, b = floats_of(before.tensor(name)), floats_of(after.tensor(name))
        if not name.startswith("model.layers."):  # others may be scaled, and what is before them divided
            assert np.linalg.norm(a - b) <= (0.0 if a.ndim == 1 else 0.15) * np.linalg.norm(a), name
    with torch.no_grad():
        made = [whole_model(tmp_path / name, model) for name in ("model.gguf", "out.gguf")]
        found = [each(torch.arange(64)[None]).logits for each in made]
    assert float((found[1] - found[0]).norm() / found[0].norm()) < 0.15
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.gguf", "out.gguf", "text.txt"]
    with pytest.raises(UsageError, match="exists already"):
        quantize(file, tmp_path / "out.gguf", calibrate=tmp_path / "text.txt", format="gguf")
    with pytest.raises(ModelError, match="quantised already"):
        quantize(tmp_path / "out.gguf", tmp_path / "b.gguf", calibrate=tmp_path / "text.txt", format="gguf")
    with pytest.raises(UsageError, match="copies a GGUF file"):
        quantize(model, tmp_path / "b.gguf", calibrate=tmp_path / "text.txt", format="gguf")


@pytest.mark.parametrize("family", ["Llama", "Gemma", "Qwen2"])
def test_scaled_columns_change_nothing(family: str, tmp_path: Path) -> None:
    """When what is before them is divided: norms (Gemma's multiply by one more), rows of values and of up."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    made = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tensors = made.state_dict()
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            tensor.uniform_(-1, 1)
        else:
            tensor.mul_(5)
    window = torch.arange(32)[None]
    with torch.no_grad():
        wanted = made(window).logits
        of = family_of(config.to_dict())
        folds = folds_of(of.spec(config.to_dict()), of.names, tensors)
        kinds = {name.rsplit(".", 2)[-2] for name in folds}
        assert kinds == {"q_proj", "gate_proj", "down_proj", "o_proj"} - ({"o_proj"} if family == "Qwen2" else set())
        assert len(folds) == 2 * len(kinds)
        for fold in folds.values():
            columns = tensors[fold.readers[0]].shape[1]
            scale = fold.alike(torch.empty(columns).uniform_(0.5, 2))
            if fold.norm:
                norm = tensors[fold.norm] + fold.plus
                scale = storable(scale, norm)
                tensors[fold.norm].copy_(norm / scale - fold.plus)
            else:
                tensors[fold.rows].div_(fold.of_rows(scale)[:, None])
            for name in fold.readers:
                tensors[name].mul_(scale)
        found = made(window).logits
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    assert float(wanted.std()) > 0.1


@pytest.mark.parametrize("kind", [*INTS, *GRIDS.values()], ids=lambda grid: grid.name)
def test_rows_are_divided_as_they_are_stored(kind: Grid) -> None:
    from gguf import GGMLQuantizationType, dequantize

    torch.manual_seed(6)
    rounded = nearest(torch.randn(8, 256), kind)
    scale = torch.empty(8).uniform_(0.3, 3)
    divided = rounded.divided(scale)
    assert divided is not None
    torch.testing.assert_close(divided.values() * scale[:, None], rounded.values(), rtol=0.003, atol=0.003)
    if kind.name in GRIDS:
        read = dequantize(packed(divided), GGMLQuantizationType[kind.name.upper()])
        np.testing.assert_allclose(read, divided.values().numpy(), rtol=0, atol=1e-6)
    scale[0] = 1e9  # a half cannot hold it
    if kind.bits < 8.1:
        assert rounded.divided(scale) is None


def test_impossible_targets_are_refused_before_the_text_is_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anyaccel.inference.calibration.text.load_text_tokenizer", lambda *_: Octets())
    file, given = gguf_model(model, tmp_path / "model.gguf"), text(tmp_path)
    out = tmp_path / "out.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(Blocks, "_embedded", lambda *_: pytest.fail("the text was run"))
        with pytest.raises(UsageError, match=r"--bits 3: the smallest there is has 4\.28 bits a weight"):
            quantize(model, tmp_path / "out", calibrate=given, bits=3)
        with pytest.raises(UsageError, match=r"--size 0\.01MB: too small; the smallest of .* is [0-9.]+ MB") as refused:
            quantize(file, out, calibrate=given, size=10_000, format="gguf")
    least = round(float(str(refused.value).split()[-2]) * 1e6)
    quantize(file, out, calibrate=given, size=least, format="gguf")
    assert least * 0.9 < out.stat().st_size <= least
    with pytest.raises(UsageError, match="too small"):
        quantize(file, tmp_path / "b.gguf", calibrate=given, size=least - 20_000, format="gguf")


def test_embedding_and_head_of_a_gguf_file_of_so_many_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have their usual types, are not counted, and have their errors made up for."""
    monkeypatch.setattr("anyaccel.inference.calibration.text.load_text_tokenizer", lambda *_: Octets())
    file, out = gguf_model(model, tmp_path / "model.gguf"), tmp_path / "out.gguf"
    summary = quantize(file, out, calibrate=text(tmp_path), bits=5.2, format="gguf")
    weights = sum(each.rows * each.cols for each in summary.matrices)
    assert 4.9 < 8 * sum(each.bytes for each in summary.matrices) / weights <= 5.2
    before, after = GgufSource(file), GgufSource(out)
    infos = after.file_of("output.weight").infos
    assert (infos["output.weight"].type, infos["token_embd.weight"].type) == ("q8_0", "q4_1")
    given, found = (torch.from_numpy(floats_of(each.tensor("token_embd.weight"))) for each in (before, after))
    plain = nearest(given, GRIDS["q4_1"]).values()
    assert 1.01 < float((found - given).norm() / (plain - given).norm()) < 2.5


@pytest.mark.parametrize("share", [0.45, 0.5])
def test_a_gguf_file_of_a_size(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Embedding and head get types of their own too, and the file is as large as it may be or a little smaller."""
    monkeypatch.setattr("anyaccel.inference.calibration.text.load_text_tokenizer", lambda *_: Octets())
    file = gguf_model(model, tmp_path / "model.gguf")
    size = int(share * file.stat().st_size)
    out = tmp_path / "out.gguf"
    quantize(file, out, calibrate=text(tmp_path), size=size, format="gguf")
    assert 0.93 * size < out.stat().st_size <= size
    infos = GgufSource(out).file_of("output.weight").infos
    assert {infos[name].type for name in ("output.weight", "token_embd.weight")} <= {
        "q4_0", "q4_1", "q5_0", "q5_1", "q8_0",
    }  # fmt: skip
    for more in ({"group": 64}, {"asymmetric": True}):
        with pytest.raises(UsageError, match="--group-size and --asymmetric are for folders"):
            quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", format="gguf", calibrate="builtin", **more)
    with pytest.raises(UsageError, match="--size is that of a GGUF file"):
        quantize(model, tmp_path / "b", calibrate=tmp_path / "text.txt", size=size)
