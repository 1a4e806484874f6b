# SPDX-License-Identifier: Apache-2.0
"""`anyaccel generate`: text from a local model, on one process or on workers that it starts itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._llm import (
    DTYPES,
    Screen,
    Stream,
    add_model_options,
    add_sampling_options,
    check_numbers,
    default_model_file,
    model_path,
    open_backend,
    sampling_of,
    show,
)
from anyaccel.cli._parser import Parser
from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel.cli._llm import Backend
    from anyaccel.inference.generate import Generation

__all__ = ["DTYPES", "build_parser", "default_model_file", "main"]

_WORKER = "--worker-options"  # followed by the file in which `_launch` hands its options to the workers
_EXAMPLES = """\
  anyaccel generate "Why is the sky blue?"
  anyaccel generate "Why is the sky blue?" --tp 2 --dtype bf16 --model ~/models/SmolLM2-1.7B-Instruct
  anyaccel generate "Once upon a time" --model story.gguf --no-chat-template --temperature 0.8 --seed 7
  anyaccel generate "List three colours." --dtype int4 --system "Answer in French." --stop "3."
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
    add_model_options(parser)
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="workers that share the model, each bound to its own cores",
    )
    add_sampling_options(parser, max_new_tokens=128)
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
    if options.tp < 1:
        raise UsageError(f"--tp {options.tp}: must be at least 1")
    check_numbers(options)
    if options.system is not None and options.no_chat_template:
        raise UsageError("--system is part of the chat template: leave out --no-chat-template")
    options.prompt = _prompt(options.prompt)
    options.model = str(model_path(options.model))
    if options.tp > 1 and os.environ.get("WORLD_SIZE") != str(options.tp):
        return _launch(options)
    return _generate(options)


def _prompt(text: str) -> str:
    if text == "-":
        text = sys.stdin.read()
    if not text.strip():
        raise UsageError("the prompt is empty")
    return text


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


def _generate(options: argparse.Namespace) -> int:
    """Load and generate in this process, as one of `--tp` ranks or alone."""
    from anyaccel.inference.generate import Generation

    screen = Screen(shown=os.environ.get("RANK", "0") == "0" and not options.quiet)
    backend = open_backend(options, screen, options.tp, options.launch_summary)
    result = Generation()
    stream = Stream(backend.tokenizer.decode, options.stop, show if backend.first and not options.json else None)
    ids = _encode(backend, options)
    for token in backend.tokens(ids, options.max_new_tokens, sampling_of(options), result):
        stream.add(token)
        if stream.ended:  # on every rank: they have the same tokens
            break
    stream.finish()
    if backend.first and not options.json:
        show("\n")
    summary = _summary(options, backend, result, stream.text)
    if backend.first:
        if options.json:
            print(json.dumps(summary))
        screen.line(
            f"prompt {result.prompt_tokens} tokens, {result.prompt_tokens_per_second:.1f} tokens/s; "
            f"generated {len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s; "
            f"peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB" + (" in all ranks" if options.tp > 1 else "")
        )
    return 0


def _encode(backend: Backend, options: argparse.Namespace) -> list[int]:
    tokenizer = backend.tokenizer
    if options.no_chat_template or not tokenizer.has_chat_template:
        if options.system is not None:
            raise UsageError("--system: this model has no chat template")
        return tokenizer.encode(options.prompt)
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return tokenizer.chat([*system, {"role": "user", "content": options.prompt}])


def _summary(options: argparse.Namespace, backend: Backend, result: Generation, text: str) -> dict[str, Any]:
    peaks = backend.peaks()
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
        "accelerator": backend.accelerator,
        "runtime": backend.runtime,
        "model": options.model,
        "dtype": options.dtype,
        "tp": options.tp,
    }
