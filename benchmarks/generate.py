# SPDX-License-Identifier: Apache-2.0
"""Text generation: ours against Hugging Face `generate` and DeepSpeed `init_inference`, on 1 and 2 ranks.

Every contender runs the same prompt on the same cores: one process with all cores, or two ranks bound to half of them
each by our launcher. Contenders take turns, round by round; a figure is the median over the rounds. Prefill is a
1,024-token prompt up to its first token, decode the rate of 128 tokens after a 64-token prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import emit_json, machine, median, note, table

PROMPT, NEW, LONG, REPEATS = 64, 128, 1024, 3
CONTENDERS = ("anyaccel tp1", "hf tp1", "deepspeed tp1", "anyaccel tp2", "deepspeed tp2")


def _measure_hf_like(model: Any, ids: Any, new: int) -> tuple[float, float]:
    """Seconds to the first token and tokens per second after it, through `generate`."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    stamps: list[float] = []

    class Clock(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    start = time.perf_counter()
    model.generate(
        input_ids=ids[None],
        attention_mask=torch.ones_like(ids[None]),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([Clock()]),
    )
    decode = (len(stamps) - 1) / (stamps[-1] - stamps[0]) if new > 1 else 0.0
    return stamps[0] - start, decode


def _contender(name: str, model_path: str, dtype_name: str, tp: int) -> Any:
    """A function (ids, new tokens) -> (seconds to the first token, tokens per second after it)."""

    from anyaccel.inference.config import parse_dtype

    dtype = parse_dtype(dtype_name)
    if name == "anyaccel":
        import anyaccel
        from anyaccel.inference import Generation, generate_tokens

        engine = anyaccel.init_inference(model_path, dtype=dtype, tensor_parallel={"tp_size": tp})
        engine.module.generation_config.eos_token_id = None

        def ours(ids: Any, new: int) -> tuple[float, float]:
            result = Generation()
            for _ in generate_tokens(engine, ids, max_new_tokens=new, result=result):
                pass
            return result.prompt_seconds, result.tokens_per_second

        return ours
    from transformers import AutoModelForCausalLM

    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    if name == "deepspeed":
        model = deepspeed.init_inference(
            model, dtype=dtype, tensor_parallel={"tp_size": tp}, replace_with_kernel_inject=False
        )
    return lambda ids, new: _measure_hf_like(model, ids, new)


def worker(contender: str, model: str, dtype: str, result_file: str) -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    name, _, tp = contender.partition(" tp")
    os.environ.setdefault("LOCAL_SIZE", "1")
    run = _contender(name, model, dtype, int(tp))
    generator = torch.Generator().manual_seed(0)
    short = torch.randint(100, 20000, (PROMPT,), generator=generator)
    long = torch.randint(100, 20000, (LONG,), generator=generator)
    with torch.inference_mode():
        run(short, 4)
        decode = [run(short, NEW)[1] for _ in range(REPEATS)]
        run(long, 1)
        prefill = [LONG / run(long, 1)[0] for _ in range(REPEATS)]
    if os.environ.get("RANK", "0") == "0":
        Path(result_file).write_text(json.dumps({"decode": median(decode), "prefill": median(prefill)}))
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed leaves threads that abort a normal exit


def default_model() -> str:
    from anyaccel.cli.generate import default_model_file
    from anyaccel.inference.loading import model_folder

    return str(model_folder(default_model_file()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    model = options.model or default_model()
    if options.worker:
        worker(options.worker[0], model, options.dtype, options.worker[1])
    from anyaccel import launch

    figures: dict[str, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds):
            for contender in options.only:
                if contender in left_out:
                    continue
                ranks = int(contender[-1])
                result = Path(folder) / "result.json"
                result.unlink(missing_ok=True)
                wanted = launch.LaunchOptions(script=__file__, num_accelerators=ranks, bind_cores=True)
                command = [sys.executable, __file__, "--worker", contender, str(result), "--model", model]
                code = launch.launch_local(launch.make_plan(wanted), [*command, "--dtype", options.dtype])
                if code or not result.exists():
                    left_out[contender] = f"ended with exit code {code}; see above (make bench-peers installs peers)"
                    continue
                for metric, value in json.loads(result.read_text()).items():
                    figures.setdefault(contender, {}).setdefault(metric, []).append(value)
                note(f"round {round_number + 1}: {contender} done")
    middle = {name: {metric: median(values) for metric, values in f.items()} for name, f in figures.items()}
    if options.json:
        emit_json(
            {
                "machine": machine(),
                "model": model,
                "dtype": options.dtype,
                "figures": figures,
                "left_out": left_out,
            }
        )
        return 0
    print(f"generation, {options.dtype}, {Path(model).name}, tokens/s; x = ours at the same TP over it\n{machine()}\n")
    lines = []
    for name, values in middle.items():
        ours = middle.get(f"anyaccel {name[-3:]}", {})
        cells = [name]
        for metric in ("decode", "prefill"):
            ratio = f" {ours[metric] / values[metric]:.2f}x" if ours and not name.startswith("anyaccel") else ""
            cells.append(f"{values[metric]:.1f}{ratio}")
        lines.append(cells)
    print(table(["contender", f"decode {NEW}", f"prefill {LONG}"], lines))
    for name, why in left_out.items():
        print(f"\n{name} left out: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
