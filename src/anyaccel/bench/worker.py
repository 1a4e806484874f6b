# SPDX-License-Identifier: Apache-2.0
"""Measures one engine on one model in this process and writes one JSON object.

Run as a file by the Python of the engine's own environment, where anyaccel need not be installed: it imports nothing of
ours but what the engine "anyaccel" is.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# generate(prompts, new): exactly `new` tokens for each prompt, greedy, ends ignored.
Generate = Callable[[list[list[int]], int], object]


def process_start() -> float:
    """Seconds since the epoch at which this process, or the launcher above it, started."""
    if os.environ.get("ANYACCEL_BENCH_START"):
        return float(os.environ["ANYACCEL_BENCH_START"])
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens: nothing that a prefix cache could know."""
    source = random.Random(seed)
    return [source.randrange(min(100, vocabulary // 2), min(vocabulary, 20000)) for _ in range(length)]


# --- engines: each takes the settings and returns its `generate` -----------------------------------------------------


def anyaccel(settings: dict[str, Any]) -> Generate:
    import torch

    from anyaccel.inference import init_inference
    from anyaccel.inference.native.saving import finish_all

    options = {name: settings[name] for name in ("group_size", "kv_cache", "threads") if settings.get(name)}
    engine = init_inference(
        settings["model"], dtype=settings["dtype"], tensor_parallel={"tp_size": settings["tp"]}, **options
    )
    calls = 0

    def run(prompts: list[list[int]], new: int) -> object:
        nonlocal calls
        if calls == 1:  # the first is a cold start; what is written to the cache beside it is no part of the rates
            finish_all()
        calls += 1
        return engine.generate(torch.tensor(prompts), max_new_tokens=new, min_new_tokens=new, do_sample=False)

    return run


def _through_transformers(model: Any) -> Generate:
    import torch

    model.generation_config.eos_token_id = None  # a fixed length without the processor that forbids the end

    def run(prompts: list[list[int]], new: int) -> object:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            return model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
            )

    return run


def _torch_dtype(name: str) -> Any:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in kinds:
        raise SystemExit(f"does not run in {name}")
    return kinds[name]


def hf(settings: dict[str, Any]) -> Generate:
    from transformers import AutoModelForCausalLM

    dtype = _torch_dtype(settings["dtype"])
    return _through_transformers(AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval())


def deepspeed(settings: dict[str, Any]) -> Generate:
    import deepspeed as peer
    from transformers import AutoModelForCausalLM

    dtype = _torch_dtype(settings["dtype"])
    peer.init_distributed("gloo", verbose=False)
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    engine = peer.init_inference(
        model, dtype=dtype, tensor_parallel={"tp_size": settings["tp"]}, replace_with_kernel_inject=False
    )
    engine.module.generation_config.eos_token_id = None
    return _through_transformers(engine.module)


def vllm(settings: dict[str, Any]) -> Generate:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(settings["dtype"])
    if dtype is None:
        raise SystemExit(f"does not run in {settings['dtype']}")
    longest = max(settings["long"] + 8, settings["prompt"] + settings["new"] + 8)
    engine = LLM(
        settings["model"],
        dtype=dtype,
        max_model_len=longest,
        enable_prefix_caching=False,
        max_num_seqs=max(settings["batch"], 1),
    )

    def run(prompts: list[list[int]], new: int) -> object:
        options = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        return engine.generate([{"prompt_token_ids": ids} for ids in prompts], options, use_tqdm=False)

    return run


def openvino(settings: dict[str, Any]) -> Generate:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1  # GiB
    pipeline = genai.LLMPipeline(settings["model"], "CPU", scheduler_config=scheduler)

    def run(prompts: list[list[int]], new: int) -> object:
        ids = np.array(prompts, dtype=np.int64)
        options = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
        return pipeline.generate(genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids))), options)

    return run


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "anyaccel": anyaccel,
    "hf": hf,
    "deepspeed": deepspeed,
    "vllm": vllm,
    "openvino": openvino,
}


# --- measuring -------------------------------------------------------------------------------------------------------


def _seconds(generate: Generate, prompts: list[list[int]], new: int) -> float:
    start = time.perf_counter()
    generate(prompts, new)
    return time.perf_counter() - start


def measure(generate: Generate, settings: dict[str, Any], started: float) -> dict[str, list[float]]:
    """Rates in tokens a second; decode rates are of the difference between a long and a one-token answer."""
    seeds = iter(range(10_000))
    vocabulary = settings["vocabulary"]

    def fresh(length: int, count: int = 1) -> list[list[int]]:
        return [prompt(length, next(seeds), vocabulary) for _ in range(count)]

    def add_rate(name: str, tokens: int, seconds: float) -> None:
        if seconds > 0:  # else the machine was busy with something else meanwhile
            figures[name].append(tokens / seconds)

    # The rate of a batch is a difference of two times, most of which its prompts take: enough tokens make it count.
    new, batch, batch_new = settings["new"], settings["batch"], max(settings["new"] // 2, 16)
    figures: dict[str, list[float]] = {"decode": [], "prefill": [], "batch_decode": []}
    generate(fresh(settings["prompt"]), 1)
    figures["cold_start"] = [time.time() - started]
    generate(fresh(settings["prompt"]), min(new, 16))
    if settings["long"]:
        generate(fresh(settings["long"]), 1)
    if batch > 1:
        generate(fresh(settings["prompt"], batch), 2)
    for _ in range(settings["repeats"]):
        first = _seconds(generate, fresh(settings["prompt"]), 1)
        whole = _seconds(generate, fresh(settings["prompt"]), new)
        add_rate("decode", new - 1, whole - first)
        if settings["long"]:
            figures["prefill"].append(settings["long"] / _seconds(generate, fresh(settings["long"]), 1))
        if batch > 1:
            first = _seconds(generate, fresh(settings["prompt"], batch), 1)
            whole = _seconds(generate, fresh(settings["prompt"], batch), batch_new)
            add_rate("batch_decode", batch * (batch_new - 1), whole - first)
    figures["batch_decode"] = _possible(figures["batch_decode"], batch, figures["decode"])
    figures["peak_memory_mb"] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    return {name: values for name, values in figures.items() if values}


def _possible(rates: list[float], batch: int, alone: list[float]) -> list[float]:
    """The rates of a batch that can be: no step of several sequences takes less time than a step of one."""
    return [rate for rate in rates if not alone or rate <= batch * max(alone)]


def measure_llama_cpp(settings: dict[str, Any]) -> dict[str, list[float]]:
    """Through llama.cpp's own programs; `folder` is where they are."""
    folder, model, threads = Path(settings["folder"]), settings["model"], str(settings["threads"] or os.cpu_count())

    def bench(*arguments: str) -> list[dict[str, Any]]:
        base = [str(folder / "llama-bench"), "-m", model, "-t", threads, "-r", str(settings["repeats"]), "-o"]
        command = [*base, "json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        if done.returncode:
            raise SystemExit(f"llama-bench ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        results: list[dict[str, Any]] = json.loads(done.stdout)
        return results

    figures = {"decode": bench("-p", "0", "-n", str(settings["new"]), "-d", str(settings["prompt"]))[0]["samples_ts"]}
    if settings["long"]:
        figures["prefill"] = bench("-p", str(settings["long"]), "-n", "0")[0]["samples_ts"]
    batched = folder / "llama-batched-bench"
    if settings["batch"] > 1 and batched.exists():
        new, count = str(max(settings["new"] // 2, 16)), str(settings["batch"])
        command = [str(batched), "-m", model, "-t", threads, "-c", "4096", "-npp", str(settings["prompt"])]
        command += ["-ntg", ",".join([new] * settings["repeats"]), "-npl", count, "--output-format", "jsonl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        figures["batch_decode"] = [line["speed_tg"] for line in lines]
    program = next((p for n in ("llama-completion", "llama-cli") if (p := folder / n).exists()), None)
    if program is not None:
        start = time.time()
        command = [str(program), "-m", model, "-t", threads, "-no-cnv", "-n", "1", "-p", "word " * settings["prompt"]]
        ended = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=300)
        if ended.returncode == 0:
            figures["cold_start"] = [time.time() - start]
    figures["peak_memory_mb"] = [resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]
    return {name: values for name, values in figures.items() if values}


def main() -> int:
    started = process_start()
    settings = json.loads(Path(sys.argv[1]).read_text())
    engine = settings["engine"]
    if engine == "llama.cpp":
        figures = measure_llama_cpp(settings)
    else:
        figures = measure(ENGINES[engine](settings), settings, started)
    if os.environ.get("RANK", "0") == "0":
        Path(settings["result"]).write_text(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)  # some engines leave threads that abort a normal exit


if __name__ == "__main__":
    main()
