# SPDX-License-Identifier: Apache-2.0
"""`anyaccel generate`: generate text with a local model, in one process or on workers that it starts itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._model_options import (
    add_host_options,
    add_lora_option,
    add_memory_option,
    add_model_options,
    add_sampling_options,
    add_tp_option,
    check_numbers,
    choose_model,
    cluster_of,
    model_of,
    naming_options,
    sampling_of,
    set_chat_template,
    warn_of_unused_drafts,
)
from anyaccel.cli._parser import Parser
from anyaccel.cli._screen import AnswerStream, Screen, keep_bytes, show
from anyaccel.errors import UsageError

if TYPE_CHECKING:
    from anyaccel.inference.generate import Generation
    from anyaccel.inference.ranks.backends import Backend

_EXAMPLES = """\
  anyaccel generate "Why is the sky blue?"
  anyaccel generate "Why is the sky blue?" --tp 2 --dtype bf16 --model ~/models/SmolLM2-1.7B-Instruct
  anyaccel generate "Once upon a time" --model story.gguf --no-chat-template --temperature 0.8 --seed 7
  anyaccel generate "List three colours." --dtype int4 --system "Answer in French." --stop "3."
  anyaccel generate "Why is the sky blue?" --hostfile hosts --tp 2 --pp 2
  echo "Summarise: ..." | anyaccel generate - --json"""


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "generate",
        "Generate text from a prompt. The text goes to standard output as it is generated, all else to standard error.",
        _EXAMPLES,
    )
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help='the prompt; "-" reads it from standard input')
    add_model_options(parser)
    add_memory_option(parser)
    add_lora_option(parser)
    add_tp_option(parser)
    add_sampling_options(parser, max_new_tokens=128)
    add("--no-chat-template", action="store_true", help="pass the prompt to the model unchanged")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    add("-q", "--quiet", action="store_true", help="print no accelerator, plan, progress and speed")
    add_host_options(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    check_numbers(options)
    for name in ("system", "chat_template"):
        if getattr(options, name) is not None and options.no_chat_template:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for conversations: leave out {option} or --no-chat-template")
    options.prompt = _read_prompt(options.prompt)
    choose_model(options)
    screen = Screen(shown=os.environ.get("RANK", "0") == "0" and not options.quiet)
    with screen.loading(), naming_options(options):
        opened = _open(options, screen)
    with contextlib.closing(opened) as backend:
        warn_of_unused_drafts(options, backend, screen)
        set_chat_template(options, backend.tokenizer)
        return _generate(options, screen, backend)


def _read_prompt(text: str) -> str:
    if text == "-":
        text = keep_bytes(sys.stdin).read()
        text = text if text.strip() else ""  # a line break is what `echo` writes of nothing
    if not text:
        raise UsageError("the prompt is empty")
    return text


def _open(options: argparse.Namespace, screen: Screen) -> Backend:
    cluster = cluster_of(options)
    ranks = options.tp * options.pp
    if cluster is None and (ranks == 1 or os.environ.get("WORLD_SIZE") == str(ranks)):
        # One process, or one of the ranks that a launcher started.
        from anyaccel.inference.ranks.backends import open_backend

        return open_backend(Path(options.model), model_of(options), screen)
    from anyaccel.inference.ranks.command import start

    return start(Path(options.model), model_of(options), screen, keep_on_interrupt=False, cluster=cluster)


def _generate(options: argparse.Namespace, screen: Screen, backend: Backend) -> int:
    from anyaccel.inference.generate import Generation

    result = Generation()
    stream = AnswerStream(backend.tokenizer.decode, options.stop, show if backend.first and not options.json else None)
    ids = _encode(backend, options)
    tokens = backend.tokens(ids, options.max_new_tokens, sampling_of(options), result)
    for token in tokens:
        stream.add(token)
        if stream.ended:  # all ranks have the same tokens, so they stop in the same step
            break
    tokens.close()
    stream.finish()
    if backend.first and not options.json:
        show("\n")
    cut = not stream.ended and result.was_cut(options.max_new_tokens, backend.ends)
    summary = _summary(options, backend, result, stream.text) | {"finish_reason": "length" if cut else "stop"}
    drafts = options.draft.tokens and backend.runtime == "native"
    if backend.first:
        if options.json:
            print(json.dumps(summary))
        if cut:
            screen.line(f"the answer ends here: --max-new-tokens {options.max_new_tokens} allows no more")
        where = " in all processes" if options.tp * options.pp > 1 else ""
        screen.line(
            f"prompt {result.prompt_tokens} tokens, {result.prompt_tokens_per_second:.1f} tokens/s; "
            f"generated {len(result.tokens)} tokens, {result.tokens_per_second:.1f} tokens/s; "
            + (f"{result.accepted} of {result.drafted} drafted tokens accepted; " if drafts else "")
            + f"peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB{where}",
            "speed",
        )
    return 0


def _encode(backend: Backend, options: argparse.Namespace) -> list[int]:
    tokenizer = backend.tokenizer
    ids: list[int]
    if options.no_chat_template or not tokenizer.has_chat_template:
        if options.system is not None:
            raise UsageError("--system: this model has no chat template")
        ids = tokenizer.encode(options.prompt)
        return ids
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    ids = tokenizer.chat([*system, {"role": "user", "content": options.prompt}])
    return ids


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
        "drafted_tokens": result.drafted,
        "accepted_tokens": result.accepted,
        "peak_memory_bytes": sum(peaks) + backend.own_peak(),
        "peak_memory_bytes_by_rank": peaks,
        "accelerator": backend.accelerator,
        "runtime": backend.runtime,
        "model": options.model,
        "dtype": options.dtype,
        "tp": options.tp,
        "pp": options.pp,
    }
