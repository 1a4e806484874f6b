# SPDX-License-Identifier: Apache-2.0
"""`runtime="device"` beside Hugging Face: how many kernels a token costs, and on a device how fast tokens come.

Kernels are the operators that torch dispatches in a step of one token, without those that only make views, of models
with four and with two layers: half the difference is a layer's. They stand for speed where no device is at hand, since
at batch 1 most accelerators wait for launches. With --speed, decoding is timed on `get_accelerator()`, in turns, beside
Hugging Face as it is, with a static cache, and compiled (mode reduce-overhead), with the share of the memory bandwidth
that reading all weights for each token takes. On a GPU with 80 GB:

    benchmarks/device.py --speed 8b --quantised int8 int4 --bandwidth 3350

device_all.py runs this and all else that a device is needed for.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _common import emit_json, machine, median, note, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CONTEXT = 40
# "eager": as transformers runs it when nothing is said, with torch's own attention; the second has theirs in Python.
CONTENDERS = ("eager", "eager attention", "static cache", "device")
MODELS = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", {"head_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "phi": ("PhiConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PROMPT, ROUNDS = 128, 3
SIZES = {  # of --speed: hidden, intermediate, layers, heads, key/value heads, vocabulary
    "tiny": (64, 128, 2, 4, 2, 1024),  # says nothing of speed, but whether this script runs
    "small": (576, 1536, 30, 9, 3, 49152),
    "1.2b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}


class Kernels(TorchDispatchMode):
    """Counts operators that compute or copy: whose result is not a view of what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        made = [each for each in tree_leaves(out) if torch.is_tensor(each)]
        views = all(each.untyped_storage().data_ptr() in given for each in made)
        self.count += op._schema.is_mutable or not views
        return out


def config(kind: str, layers: int) -> Any:
    import transformers

    name, more = MODELS[kind]
    common = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return getattr(transformers, name)(**common, **more)


def counted(step: Any) -> int:
    step()
    with torch.inference_mode(), Kernels() as kernels:
        step()
    return kernels.count


def kernels_of(kind: str, layers: int, dtype: str) -> dict[str, int]:
    """Kernels of a step of one token of each contender."""
    import transformers

    import anyaccel
    from anyaccel._llm import Request

    device = anyaccel.get_accelerator().device()
    model = transformers.AutoModelForCausalLM.from_config(config(kind, layers), dtype=DTYPES[dtype]).eval()
    model.to(device)
    chosen = model.config._attn_implementation
    ids = torch.randint(3, 1000, (1, CONTEXT), device=device)
    found = {}
    for name, kept, attention in (
        ("eager", None, chosen),
        ("eager attention", None, "eager"),
        ("static cache", transformers.StaticCache(config=model.config, max_cache_len=64), chosen),
    ):
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            past = model(ids, past_key_values=kept, use_cache=True).past_key_values

        def step(past: Any = past) -> None:
            with torch.inference_mode():
                model(ids[:, :1], past_key_values=past, use_cache=True).logits[:, -1].argmax(-1)

        found[name] = counted(step)
    model.set_attn_implementation(chosen)
    engine = anyaccel.init_inference(model.cpu(), dtype=dtype, runtime="device")
    request = Request(engine.native.model, ids[0].tolist(), {})
    engine.native.model.step([request])
    found["device"] = counted(lambda: engine.native.model.step([request]))
    return found


def launches(dtype: str, as_json: bool) -> int:
    rows, worst, results = [], 0.0, {}
    for kind in MODELS:
        small, large = kernels_of(kind, 2, dtype), kernels_of(kind, 4, dtype)
        a_layer = {name: (large[name] - small[name]) / 2 for name in large}
        worst = max(worst, a_layer["device"] / a_layer["eager"])
        results[kind] = a_layer
        rows.append([kind, *(f"{a_layer[name]:g} ({large[name]})" for name in CONTENDERS)])
        rows[-1].append(f"{a_layer['device'] / a_layer['eager']:.2f}")
    if as_json:
        emit_json({"kernels a layer a token": results, "dtype": dtype})
    else:
        print(table([f"kernels a layer in {dtype} (a step of 4 layers)", *CONTENDERS, "of eager"], rows))
    note(f"the most that a layer has of eager's kernels: {worst:.2f}")
    return 0


@dataclass(frozen=True)
class Run:
    """What --speed measures. `cases`: (sequences, tokens of each one's prompt, tokens of its answer)."""

    size: str
    dtype: str
    forms: Sequence[str]
    cases: Sequence[tuple[int, int, int]]
    bandwidth: float  # GB/s; 0: what a copy of the device's memory reads and writes
    record: Path | None  # JSON lines, a line a measurement; those that are there are not measured again


def random_llama(size: str, dtype: str) -> Any:
    """On the accelerator: a host draws 8 B random numbers for minutes."""
    import transformers

    import anyaccel

    hidden, wide, layers, heads, kv_heads, vocabulary = SIZES[size]
    values = {"hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers, "vocab_size": vocabulary}
    values |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 16384}
    with torch.device(anyaccel.get_accelerator().current_device_name()):
        config = transformers.LlamaConfig(**values)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()


def copy_bandwidth(accelerator: Any) -> float:
    """Bytes a second that a copy within the device's memory reads and writes; the best of ten."""
    count = (1 << 30) if accelerator.device_name() != "cpu" else (1 << 26)
    source = torch.ones(count, dtype=torch.uint8, device=accelerator.device())
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(10):
        accelerator.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        accelerator.synchronize()
        best = max(best, 2 * count / (time.perf_counter() - begin))
    return best


def speed(run: Run, as_json: bool) -> None:
    import anyaccel

    accelerator = anyaccel.get_accelerator()
    results = recorded(run)
    done = {each["case"] for each in results}
    if missing := [case for case in run.cases if repr(list(case)) not in done]:
        measure_speed(run, missing, results, accelerator)
    if as_json:
        emit_json({"size": run.size, "dtype": run.dtype, "device": accelerator.device_name(), "results": results})
        return
    rows = [
        [
            f"{each['contender']}, {each['batch']} x {each['prompt']}",
            *(f"{each[name]:.1f}" for name in ("prompt tokens/s", "tokens/s")),
            f"{each['ms a step']:.2f}",
            f"{each['of bandwidth']:.0%}",
            f"{each['memory GB']:.2f}",
        ]
        for each in results
    ]
    head = [f"{run.size} {run.dtype} on {accelerator.device_name()}, sequences x prompt", "prompts: tokens/s"]
    print(table([*head, "answers: tokens/s", "ms a step", "of bandwidth", "memory, GB"], rows))


def recorded(run: Run) -> list[dict[str, Any]]:
    if run.record is None or not run.record.exists():
        return []
    told = [json.loads(line) for line in run.record.read_text().splitlines()]
    return [each for each in told if (each.get("size"), each.get("dtype")) == (run.size, run.dtype)]


def measure_speed(
    run: Run, cases: Sequence[tuple[int, int, int]], results: list[dict[str, Any]], accelerator: Any
) -> None:
    import anyaccel
    from anyaccel._llm import Request

    device = accelerator.device()
    bandwidth = run.bandwidth * 1e9 or copy_bandwidth(accelerator)
    model = random_llama(run.size, run.dtype)
    weight_bytes = sum(each.nbytes for each in model.parameters())
    own_memory = {"HF": weight_bytes}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.to(device)
        engines = {}
        for form in (run.dtype, *run.forms):
            before = accelerator.memory_allocated() or 0
            engines[form] = anyaccel.init_inference(folder, dtype=form, runtime="device", cache_bytes=4 << 30)
            own_memory[form] = (accelerator.memory_allocated() or 0) - before
        compiled = torch.compile(model, mode="reduce-overhead")
        for batch, prompt, new in cases:
            ids = torch.randint(3, 1000, (batch, prompt))

            def ours(form: str, count: int, ids: torch.Tensor = ids) -> None:
                model = engines[form].native.model
                requests = [Request(model, row.tolist(), {"max_new_tokens": count}) for row in ids]
                while not all(request.finished for request in requests):
                    model.step(requests)

            def theirs(which: Any, more: dict[str, Any], count: int, ids: torch.Tensor = ids) -> None:
                ids = ids.to(device)
                which.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, **more)

            static = {"cache_implementation": "static"}
            contenders = {
                **{f"device {form}": functools.partial(ours, form) for form in engines},
                "HF eager": functools.partial(theirs, model, {}),
                "HF static": functools.partial(theirs, model, static),
            }
            if batch == 1 and prompt == PROMPT:  # each other shape would be compiled for a minute
                contenders["HF compiled"] = functools.partial(theirs, compiled, static)
            for name, (prompt_s, step_s, peak) in measured(contenders, new, accelerator).items():
                of_device = name.startswith("device")
                read = engines[name.split()[1]].native.model.weight_bytes if of_device else weight_bytes
                each = {"size": run.size, "dtype": run.dtype, "case": repr([batch, prompt, new]), "contender": name}
                each |= {"batch": batch, "prompt": prompt, "tokens/s": batch / step_s, "ms a step": step_s * 1e3}
                each["prompt tokens/s"] = batch * prompt / prompt_s
                each["of bandwidth"] = read / step_s / bandwidth
                each["memory GB"] = (own_memory[name.split()[1] if of_device else "HF"] + peak) / 1e9
                results.append(each)
                if run.record is not None:
                    with run.record.open("a") as file:
                        file.write(json.dumps(each) + "\n")


def measured(contenders: dict[str, Any], tokens: int, accelerator: Any) -> dict[str, tuple[float, float, int]]:
    """Seconds that the prompts take with their first token, and those of a step after it, as medians of ROUNDS; and the
    most bytes that a run had beside what was there before.

    The contenders take turns, so that what slows the machine for a while is nobody's alone. A first turn, in which
    graphs are captured and code is compiled, does not count. One that cannot run is named and left out.
    """
    from anyaccel.errors import AnyAccelError

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    peaks = dict.fromkeys(contenders, 0)
    for turn in range(1 + ROUNDS):
        for name in list(times):
            both = []
            accelerator.reset_peak_memory_stats()
            before = accelerator.memory_allocated() or 0
            try:
                for count in (1, tokens + 1):
                    accelerator.synchronize()
                    start = time.perf_counter()
                    contenders[name](count)
                    accelerator.synchronize()
                    both.append(time.perf_counter() - start)
            except (RuntimeError, ImportError, AnyAccelError) as error:
                note(f"{name} does not run here: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                del times[name]
                continue
            peaks[name] = max(peaks[name], (accelerator.max_memory_allocated() or 0) - before)
            if turn:
                times[name].append((both[0], (both[1] - both[0]) / tokens))
    return {
        name: (median([prompt for prompt, _ in each]), median([step for _, step in each]), peaks[name])
        for name, each in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", choices=SIZES, help="time a random model of this size")
    parser.add_argument("--dtype", choices=DTYPES, help="fp32; with --speed bf16")
    parser.add_argument("--quantised", choices=("int8", "int4"), nargs="*", default=[], help="of ours, beside it")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="further prompts, of one sequence")
    parser.add_argument("--bandwidth", type=float, default=0, help="of the device's memory, GB/s (default: a copy's)")
    parser.add_argument("--record", type=Path, help="JSON lines that measurements are added to, and not made again")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    note(machine())
    if options.speed:
        cases = [(batch, PROMPT, options.tokens) for batch in options.batch]
        cases += [(1, prompt, min(options.tokens, 16)) for prompt in options.prompts]
        dtype = options.dtype or "bf16"
        speed(Run(options.speed, dtype, options.quantised, cases, options.bandwidth, options.record), options.json)
        return 0
    return launches(options.dtype or "fp32", options.json)


if __name__ == "__main__":
    sys.exit(main())
