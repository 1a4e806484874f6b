# SPDX-License-Identifier: Apache-2.0
"""Ours beside llama.cpp and ik_llama.cpp on the shapes that people run: the same GGUF file, in turn, in one run.

Models have random weights in the shape of a real one, with fewer layers. They are written once in bf16, quantised by
llama.cpp's own llama-quantize, and removed after use unless --keep is given. A cell is the median of all rounds; in
brackets our rate over the best peer's. Rates are tokens a second. `make bench-champions` builds the peers.

  make bench-champions ARGS="--shapes llama-1.2b llama-8b --formats Q4_0 Q4_K_M"
  python benchmarks/champions.py --shapes qwen3-30b-a3b --formats Q4_K_M --prompts 512 --batches 1 8 --depths 4096
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _common import emit_json, machine, note, table

_FOLDER = Path.home() / ".cache" / "anyaccel-champions"
_TIMEOUT = 1800


# --- the models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A model's sizes, under the names of GGUF's metadata.

    Attributes:
        experts: and how many of them a token uses; 0: a dense MLP.
        latent: of multi-head latent attention (DeepSeek): the rank of keys and values, the dimensions with rotary
            positions and those without; `head` is then a value's, and `q_rank` the rank of queries.
        dense: the first layers with a dense MLP of `feed_forward`, the others having experts of `expert`.
        sinks: attention sinks, biases and a window of 128 in every second layer (gpt-oss).
        normed: RMS norms of each head's queries and keys (Qwen3).
        interval: every so many-th layer has attention, the others a recurrent mixer.
        state: its heads of values and values of one, and its heads of keys and values of one; none: it is a short
            convolution (LFM2).
    """

    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    experts: int = 0
    used: int = 0
    expert: int = 0
    shared: int = 0
    latent: tuple[int, int, int] = (0, 0, 0)
    q_rank: int = 0
    dense: int = 0
    sinks: bool = False
    normed: bool = False
    interval: int = 1
    state: tuple[int, ...] = ()

    def has_attention(self, layer: int) -> bool:
        return layer % self.interval == self.interval - 1


SHAPES = {
    "llama-1.2b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 32000),
    "llama-8b": Shape("llama", 4, 4096, 14336, 32, 8, 128, 128256),
    "llama-8b-8": Shape("llama", 8, 4096, 14336, 32, 8, 128, 128256),
    "qwen3-8b": Shape("qwen3", 4, 4096, 12288, 32, 8, 128, 151936, normed=True),
    "llama-70b": Shape("llama", 2, 8192, 28672, 64, 8, 128, 32000),
    "qwen3-30b-a3b": Shape("qwen3moe", 8, 2048, 6144, 32, 4, 128, 32000, 128, 8, 768, normed=True),
    "gpt-oss-20b": Shape("gpt-oss", 6, 2880, 2880, 64, 8, 64, 32000, 32, 4, 2880, sinks=True),
    "glm-4.7-flash": Shape(
        "deepseek2", 4, 2048, 10240, 20, 20, 256, 32000, 64, 4, 1536, 1, latent=(512, 64, 192), q_rank=768, dense=1
    ),
    "qwen3.5-4b": Shape("qwen35", 12, 2560, 9216, 16, 4, 256, 32000, normed=True, interval=4, state=(32, 128, 16, 128)),
    "lfm2-1.2b": Shape("lfm2", 15, 2048, 8192, 32, 8, 64, 32000, normed=True, interval=3),
    "granite-4-h-micro": Shape("granitehybrid", 20, 2048, 8192, 32, 8, 64, 32000, interval=10, state=(64, 64, 1, 128)),
}


# What converters leave in floats: routers, biases, and what is small of recurrent mixers.
_SMALL = re.compile(r"_inp\.weight|\.bias|\.ssm_(a|d|conv1d|norm)\b|\.shortconv\.conv")


def write_bf16(shape: Shape, path: Path) -> None:
    """The model with random weights. Rows repeat after some millions of weights: drawing all would take minutes."""
    import gguf
    import numpy as np

    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, shape.architecture)
    for name, value in _metadata(shape).items():
        add = {float: writer.add_float32, list: writer.add_array}.get(type(value), writer.add_uint32)
        add(f"{shape.architecture}.{name}", value)
    writer.add_name("random")
    writer.add_string("tokenizer.ggml.model", "none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    drawn = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * 0.02
    halves = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    for name, size in tensors(shape):
        if len(size) == 1 or _SMALL.search(name):
            values = np.ones(size, np.float32) if "norm" in name else np.resize(drawn, size)
            writer.add_tensor(name, -np.ones(size, np.float32) if name.endswith("ssm_a") else values)
        else:
            writer.add_tensor(name, np.resize(halves, size).view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _metadata(shape: Shape) -> dict[str, int | float | list[int]]:
    found: dict[str, int | float | list[int]] = {
        "context_length": 32768,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head,
        "attention.value_length": shape.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": shape.head,
        "rope.freq_base": 500000.0,
        "vocab_size": shape.vocab,
    }
    if shape.experts:
        found |= {
            "expert_count": shape.experts,
            "expert_used_count": shape.used,
            "expert_feed_forward_length": shape.expert,
        }
    if shape.sinks:
        found |= {"attention.sliding_window": 128}
    if any(shape.latent):
        rank, rotary, plain = shape.latent
        found |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": shape.q_rank,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotary,
            "attention.value_length": rank,
            "attention.key_length_mla": plain + rotary,
            "attention.value_length_mla": shape.head,
            "rope.dimension_count": rotary,
            "leading_dense_block_count": shape.dense,
            "expert_shared_count": shape.shared,
            "expert_weights_scale": 1.0,
        }
    if shape.architecture == "qwen35":
        found |= {"full_attention_interval": shape.interval, "rope.dimension_count": shape.head // 4}
        found["rope.dimension_sections"] = [11, 11, 10, 0]
    elif shape.interval > 1:
        kv_heads = [shape.kv_heads if shape.has_attention(layer) else 0 for layer in range(shape.layers)]
        found |= {"attention.head_count_kv": kv_heads, "shortconv.l_cache": 3}
    if shape.state:
        heads, values, key_heads, keys = shape.state
        found |= {
            "ssm.conv_kernel": 4,
            "ssm.state_size": keys,
            "ssm.group_count": key_heads,
            "ssm.inner_size": heads * values,
            "ssm.time_step_rank": heads,
        }
    if shape.architecture == "granitehybrid":
        found |= {"expert_shared_feed_forward_length": shape.feed_forward, "attention.scale": shape.head**-0.5}
        found |= {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0}
    return found


def tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor's name and size, the rows first."""
    yield "token_embd.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        mixer = _attention(shape) if shape.has_attention(layer) else _recurrent(shape)
        for name, size in (("attn_norm.weight", (shape.hidden,)), *mixer, *_mlp(shape, layer)):
            yield f"blk.{layer}.{name}", size
    yield "token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight", (shape.hidden,)
    yield "output.weight", (shape.vocab, shape.hidden)


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    if any(shape.latent):
        rank, rotary, plain = shape.latent
        yield "attn_q_a.weight", (shape.q_rank, shape.hidden)
        yield "attn_q_a_norm.weight", (shape.q_rank,)
        yield "attn_q_b.weight", (shape.heads * (plain + rotary), shape.q_rank)
        yield "attn_kv_a_mqa.weight", (rank + rotary, shape.hidden)
        yield "attn_kv_a_norm.weight", (rank,)
        yield "attn_k_b.weight", (shape.heads, rank, plain)
        yield "attn_v_b.weight", (shape.heads, shape.head, rank)
    else:
        gates = queries if shape.architecture == "qwen35" else 0
        for name, rows in (("q", queries + gates), ("k", keys), ("v", keys)):
            yield f"attn_{name}.weight", (rows, shape.hidden)
            if shape.sinks:
                yield f"attn_{name}.bias", (rows,)
    yield "attn_output.weight", (shape.hidden, queries)
    if shape.sinks:
        yield "attn_output.bias", (shape.hidden,)
        yield "attn_sinks.weight", (shape.heads,)
    if shape.normed:
        yield "attn_q_norm.weight", (shape.head,)
        yield "attn_k_norm.weight", (shape.head,)


def _recurrent(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    if not shape.state:
        yield "shortconv.in_proj.weight", (3 * shape.hidden, shape.hidden)
        yield "shortconv.conv.weight", (shape.hidden, 3)
        yield "shortconv.out_proj.weight", (shape.hidden, shape.hidden)
        return
    heads, values, key_heads, keys = shape.state
    inner = heads * values
    convolved = inner + 2 * key_heads * keys
    yield "ssm_conv1d.weight", (convolved, 4)
    yield "ssm_dt.bias", (heads,)
    if shape.architecture == "qwen35":
        yield "attn_qkv.weight", (convolved, shape.hidden)
        yield "attn_gate.weight", (inner, shape.hidden)
        yield "ssm_a", (heads,)
        for name in ("alpha", "beta"):
            yield f"ssm_{name}.weight", (heads, shape.hidden)
        yield "ssm_norm.weight", (values,)
    else:
        yield "ssm_in.weight", (inner + convolved + heads, shape.hidden)
        yield "ssm_conv1d.bias", (convolved,)
        for name in ("a", "d"):
            yield f"ssm_{name}", (heads, 1)
        yield "ssm_norm.weight", (key_heads, inner // key_heads)
    yield "ssm_out.weight", (shape.hidden, inner)


def _mlp(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    later = shape.sinks or shape.architecture == "qwen35"
    yield "post_attention_norm.weight" if later else "ffn_norm.weight", (shape.hidden,)
    parts = ("gate", (1, 0)), ("up", (1, 0)), ("down", (0, 1))
    if not shape.experts or layer < shape.dense:
        for name, order in parts:
            sizes = (shape.hidden, shape.feed_forward)
            yield f"ffn_{name}.weight", (sizes[order[0]], sizes[order[1]])
        return
    yield "ffn_gate_inp.weight", (shape.experts, shape.hidden)
    if shape.sinks:
        yield "ffn_gate_inp.bias", (shape.experts,)
    for name, order in parts:
        sizes = (shape.hidden, shape.expert)
        yield f"ffn_{name}_exps.weight", (shape.experts, sizes[order[0]], sizes[order[1]])
        if shape.sinks:
            yield f"ffn_{name}_exps.bias", (shape.experts, sizes[order[0]])
    for name, order in parts if shape.shared else ():
        sizes = (shape.hidden, shape.shared * shape.expert)
        yield f"ffn_{name}_shexp.weight", (sizes[order[0]], sizes[order[1]])


def model_file(name: str, shape: Shape, kind: str, folder: Path, quantize: Path) -> Path:
    """The file of a shape in a format, made when it is not there."""
    path = folder / f"{name}-{kind}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    original = folder / f"{name}-BF16.gguf"
    if not original.exists():
        note(f"writing {original}")
        # In a process of its own: the most memory of programs that this one starts is never less than what it had.
        writer = multiprocessing.get_context("spawn").Process(target=write_bf16, args=(shape, original))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"{original} was not written")
    if path != original:
        note(f"writing {path}")
        part = path.with_suffix(".part")
        done = subprocess.run([quantize, original, part, kind], capture_output=True, text=True, timeout=_TIMEOUT)
        if done.returncode:
            raise SystemExit(f"{quantize} ended with {done.returncode}: {done.stderr[-500:]}")
        part.rename(path)
    return path


# --- the engines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """What is measured: lengths of prompts, numbers of sequences that decode at once, depths at which one decodes."""

    prompts: tuple[int, ...] = (512,)
    batches: tuple[int, ...] = (1,)
    depths: tuple[int, ...] = ()
    new: int = 32
    threads: int = 1


Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Done:
    """What a program printed, how long it took, and the most memory that it had, mapped pages of the model too."""

    out: str
    errors: str
    seconds: float
    peak_mb: float


def run(command: Sequence[Any], **settings: Any) -> Done:
    """Raises RuntimeError when the program fails, or takes longer than _TIMEOUT."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, **settings)
        timer = threading.Timer(_TIMEOUT, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        out.seek(0)
        errors.seek(0)
        done = Done(out.read(), errors.read(), seconds, usage.ru_maxrss / 1024)
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: {done.errors.strip()[-300:]}")
    return done


@dataclass(frozen=True)
class Peer:
    """llama.cpp, or a fork whose programs have the same names: where they are, and the options that make it fastest."""

    name: str
    folder: Path
    options: tuple[str, ...] = ()
    bench_options: tuple[str, ...] = ()
    batched_options: tuple[str, ...] = ()
    depth_option: str = "-d"
    cold_options: tuple[str, ...] = ("--no-warmup",)

    def rates(self, file: Path, points: Points) -> Rates:
        found: Rates = {}
        lengths = ",".join(map(str, points.prompts))
        for row in self._bench(file, points, "-p", lengths, "-n", "0") if lengths else ():
            found[f"prompt {row['n_prompt']}"] = row["samples_ts"]
        if 1 in points.batches:
            for row in self._bench(file, points, "-p", "0", "-n", str(points.new)):
                found["decode 1"] = row["samples_ts"]
        for depth in points.depths:
            if self.depth_option == "-d":
                rows = self._bench(file, points, "-p", "0", "-n", str(points.new), "-d", str(depth))
            else:
                rows = self._bench(file, points, "-p", "0", "-n", "0", "-gp", f"{depth},{points.new}")
            found[f"decode 1 at {depth}"] = rows[-1]["samples_ts"]
        many = [count for count in points.batches if count > 1]
        if many:
            found |= self._batched(file, points, many)
        return found

    def _run(self, program: str, file: Path, points: Points, *words: str) -> Done:
        command = [self.folder.resolve() / program, "-m", file.resolve(), "-t", str(points.threads)]
        # ik_llama.cpp writes a log to where it is started.
        return run([*command, *self.options, *words], cwd=file.parent)

    def _bench(self, file: Path, points: Points, *words: str) -> list[dict[str, Any]]:
        out = self._run("llama-bench", file, points, "-r", "2", "-o", "json", *self.bench_options, *words).out
        found, _ = json.JSONDecoder().raw_decode(out, out.index("[\n"))
        return list(found)

    def _batched(self, file: Path, points: Points, counts: Sequence[int]) -> Rates:
        prompt = 16
        words = ["-c", str(max(counts) * (prompt + points.new) + 256), "-npp", str(prompt), "-ntg", str(points.new)]
        words += ["-npl", ",".join(map(str, counts)), *self.batched_options]
        done = self._run("llama-batched-bench", file, points, *words)
        out = done.out + done.errors  # ik_llama.cpp prints its table among errors
        rows = re.findall(r"^\|\s*\d+ \|\s*\d+ \|\s*(\d+) \|(?:[^|]*\|){4}\s*([\d.]+) \|", out, re.MULTILINE)
        return {f"decode {count}": [float(rate)] for count, rate in rows}

    def load(self, file: Path, points: Points) -> Done:
        return self._run("llama-bench", file, points, "-r", "1", "-p", "1", "-n", "0", *self.cold_options)


class Ours:
    name = "anyaccel"

    def rates(self, file: Path, points: Points) -> Rates:
        return dict(json.loads(self._worker(file, points, "rates").out))

    def load(self, file: Path, points: Points) -> Done:
        return self._worker(file, points, "load")

    def _worker(self, file: Path, points: Points, what: str) -> Done:
        settings = json.dumps({"what": what, "file": str(file), **vars(points)})
        # Packed weights that are written to the cache take a part of the cores from the first seconds of decoding.
        environment = os.environ | {"ANYACCEL_PACKED_CACHE_BYTES": "0"}
        return run([sys.executable, __file__, "--worker", settings], env=environment)


def work(settings: Mapping[str, Any]) -> None:
    """Measures our runtime in this process, as llama-bench does its own: tokens are random and nothing is sampled."""
    from anyaccel.inference.native.runtime import load_native  # without torch, as `anyaccel generate`
    from anyaccel.inference.options import ModelOptions

    native = load_native(settings["file"], ModelOptions("auto", threads=settings["threads"]))
    model, vocab = native.model, native.spec.vocab
    draws = random.Random(0)

    def forward(sequences: list[int], tokens: int) -> float:
        count = len(sequences) * tokens
        ids = (ctypes.c_int64 * count)(*(draws.randrange(3, vocab) for _ in range(count)))
        rows = [(at + 1) * tokens - 1 for at in range(len(sequences))]
        logits = (ctypes.c_float * (len(rows) * vocab))()
        begin = time.perf_counter()
        model.forward(sequences, [tokens] * len(sequences), ctypes.addressof(ids), ctypes.addressof(logits), rows)
        return time.perf_counter() - begin

    def decode(count: int, depth: int) -> list[float]:
        sequences = [model.create() for _ in range(count)]
        for begin in range(0, depth, 512):
            forward(sequences, min(512, depth - begin))
        forward(sequences, 1)
        found = []
        for _ in range(2):
            seconds = sum(forward(sequences, 1) for _ in range(settings["new"]))
            found.append(count * settings["new"] / seconds)
        for sequence in sequences:
            model.destroy(sequence)
        return found

    def prompt(length: int) -> float:
        sequence = model.create()
        seconds = sum(forward([sequence], min(512, length - begin)) for begin in range(0, length, 512))
        model.destroy(sequence)
        return length / seconds

    prompt(1)
    if settings["what"] == "load":
        return
    prompt(64)
    found: Rates = {f"prompt {length}": [prompt(length) for _ in range(2)] for length in settings["prompts"]}
    found |= {f"decode {count}": decode(count, 16 if count > 1 else 0) for count in settings["batches"]}
    found |= {f"decode 1 at {depth}": decode(1, depth) for depth in settings["depths"]}
    print(json.dumps(found))


def drop_from_cache(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- the run ---------------------------------------------------------------------------------------------------------


def measure(engines: Sequence[Any], file: Path, points: Points, rounds: int, load: bool) -> dict[str, Rates]:
    """Figures of each engine: all take turns within a round."""
    found: dict[str, Rates] = {}
    failed: set[str] = set()
    for turn in range(rounds):
        for engine in engines:
            if engine.name in failed:
                continue
            note(f"{file.stem}, round {turn + 1} of {rounds}: {engine.name}")
            try:
                figures = engine.rates(file, points)
                if load:
                    warm = engine.load(file, points)
                    drop_from_cache(file)
                    figures["load, warm: s"] = [warm.seconds]
                    figures["load, cold: s"] = [engine.load(file, points).seconds]
                    figures["peak memory: MB"] = [warm.peak_mb]
            except (RuntimeError, ValueError) as error:
                failed.add(engine.name)
                note(f"left out: {engine.name}: {error}")
                continue
            for name, values in figures.items():
                found.setdefault(engine.name, {}).setdefault(name, []).extend(values)
    return found


def rows(found: Mapping[str, Rates], engines: Sequence[str]) -> list[list[str]]:
    """A point a row: each engine's median and spread, and ours over the best of theirs."""
    ours = found.get(engines[0], {})
    result = []
    for point in ours:
        cells = [point]
        for name in engines:
            values = found.get(name, {}).get(point)
            cells.append(f"{statistics.median(values):.4g} ±{_spread(values):.0%}" if values else "-")
        theirs = [statistics.median(found[name][point]) for name in engines[1:] if point in found.get(name, {})]
        mine = statistics.median(ours[point])
        if theirs:
            cells.append(f"{min(theirs) / mine:.2f}" if ": " in point else f"{mine / max(theirs):.2f}")
        else:
            cells.append("-")
        result.append(cells)
    return result


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2 / statistics.median(values)


def peers(options: argparse.Namespace) -> list[Peer]:
    found = []
    for text in options.peer:
        name, _, folder = text.partition("=")
        if not (Path(folder) / "llama-bench").exists():
            raise SystemExit(f"--peer {text}: no llama-bench in {folder!r}")
        if name.startswith("ik"):  # repacks weights as it loads them, which it leaves to the user to ask for
            found.append(
                Peer(name, Path(folder), ("-fa", "1"), ("-rtr", "1", "-fmoe", "1"), ("-rtr",), "-gp", ("-w", "0"))
            )
        else:
            found.append(Peer(name, Path(folder), ("-fa", "1")))
    return found


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--shapes",
        nargs="*",
        default=["llama-1.2b", "llama-8b", "qwen3-30b-a3b"],
        choices=SHAPES,
        metavar="SHAPE",
        help="of " + ", ".join(SHAPES),
    )
    add("--layers", type=int, default=0, help="so many layers instead of the shape's")
    add("--formats", nargs="*", default=["Q4_0", "Q4_K_M"], help="BF16, or as llama-quantize names them")
    add("--prompts", nargs="*", type=int, default=[512])
    add("--batches", nargs="*", type=int, default=[1, 8])
    add("--depths", nargs="*", type=int, default=[])
    add("--new", type=int, default=32)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--rounds", type=int, default=2)
    add(
        "--load",
        action="store_true",
        help="also the time of loading the model and one token, warm and cold, and the most memory",
    )
    add("--peer", action="append", default=[], metavar="NAME=FOLDER", help="of its programs; NAME ik…: ik_llama.cpp")
    add("--quantize", type=Path, metavar="PROGRAM", help="llama-quantize; default: the first peer's")
    add("--folder", type=Path, default=_FOLDER, help="for the models")
    add("--keep", action="store_true", help="the models, for another run")
    add("--json", action="store_true")
    options = parser.parse_args()
    others = peers(options)
    quantize = options.quantize or (others[0].folder / "llama-quantize" if others else Path("llama-quantize"))
    engines = [Ours(), *others]
    points = Points(tuple(options.prompts), tuple(options.batches), tuple(options.depths), options.new, options.threads)
    names = [engine.name for engine in engines]
    results: dict[str, dict[str, Rates]] = {}
    if not options.json:
        print(f"{machine()}; {options.threads} threads", flush=True)
    for name in options.shapes:
        shape = replace(SHAPES[name], layers=options.layers or SHAPES[name].layers)
        for kind in options.formats:
            file = model_file(name, shape, kind, options.folder, quantize)
            found = measure(engines, file, points, options.rounds, options.load)
            results[file.stem] = found
            if not options.json:
                print(f"\n{name}, {shape.layers} layers, {kind}: {file.stat().st_size / 1e9:.2f} GB\n")
                print(table([kind, *names, "ours over the best"], rows(found, names)), flush=True)
            if not options.keep and kind != "BF16":
                file.unlink()
        if not options.keep:
            (options.folder / f"{name}-BF16.gguf").unlink(missing_ok=True)
    if options.json:
        emit_json({"machine": machine(), "threads": options.threads, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
