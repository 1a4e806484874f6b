# SPDX-License-Identifier: Apache-2.0
"""`anyaccel models`: list, show, pull and remove models that have names of the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from anyaccel.cli._model_options import model_path
from anyaccel.cli._parser import Parser
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.checkpoints import hub
from anyaccel.inference.checkpoints.identity import size_of
from anyaccel.terminal import table, table_width

_ACTIONS = ("list", "show", "pull", "remove")


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "models",
        "List, show, pull or remove models of the Hugging Face Hub. All commands take their names in place "
        "of a path.\n\n"
        "  list    what is here\n"
        "  show    what is known of a model; also of a folder or file\n"
        "  pull    download a model, or what is missing of it, and check it\n"
        "  remove  delete it\n\n"
        "hf:ORGANISATION/NAME is a folder of weights, hf:ORGANISATION/NAME:QUANTISATION a GGUF file. They are kept in "
        "the hub's own cache (HF_HOME), which other programs share.",
        "  anyaccel models pull hf:Qwen/Qwen3-0.6B\n  anyaccel models pull hf:unsloth/Qwen3-0.6B-GGUF:Q4_K_M\n"
        "  anyaccel serve hf:Qwen/Qwen3-0.6B --dtype int8\n  anyaccel models remove hf:Qwen/Qwen3-0.6B",
    )
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="list", help="default: list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="hf:ORGANISATION/NAME[:QUANTISATION]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_intermixed_args(argv)  # names may follow flags
    if options.action == "list":
        if options.names:
            raise UsageError(f"anyaccel models list {options.names[0]}: lists all that is here, and takes no names")
        return _list(options.json)
    if not options.names:
        raise UsageError(f"anyaccel models {options.action}: which model? For example hf:Qwen/Qwen3-0.6B")
    act = {"show": _show, "pull": _pull, "remove": _remove}[options.action]
    done = [act(name, options) for name in options.names]
    if options.json:
        print(json.dumps(done[0] if len(done) == 1 else done, ensure_ascii=False))
    return 0


def _list(as_json: bool) -> int:
    found = hub.local_models()
    if as_json:
        print(json.dumps({"models": [_entry(each) for each in found]}, ensure_ascii=False))
        return 0
    rows = [
        [str(each.name), _size(each.size), _day(each.pulled), "" if each.complete else "in parts"] for each in found
    ]
    if not rows:
        print(f"no models in {hub.cache_folder()}: anyaccel models pull hf:Qwen/Qwen3-0.6B")
        return 0
    print(table([["name", "size", "pulled", ""], *rows], table_width(sys.stdout)))
    return 0


def _pull(name: str, options: Any) -> dict[str, Any]:
    found = hub.pull(name, options.quiet or options.json)
    if not options.json:
        print(f"{found.name}: {_size(found.size)} in {found.path}")
    return _entry(found)


def _remove(name: str, options: Any) -> dict[str, Any]:
    freed = hub.remove(name)
    if not options.json:
        print(f"{name}: removed, {_size(freed)}")
    return {"name": name, "removed_bytes": freed}


def _show(name: str, options: Any) -> dict[str, Any]:
    path = model_path(name)
    about: dict[str, Any] = {"name": name, "path": str(path), "size": size_of(path), **_facts(path)}
    with contextlib.suppress(AnyAccelError):  # of a model without a tokenizer that can be read
        about |= _text_facts(path)
    if not options.json:
        shown = {**about, "size": _size(about["size"])}
        rows = [[key.replace("_", " "), _text(value)] for key, value in shown.items() if value not in (None, "", {})]
        print(table(rows, table_width(sys.stdout)))
    return about


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _facts(path: Path) -> dict[str, Any]:
    """What its configuration says."""
    if path.is_file():
        from anyaccel.inference.checkpoints.gguf_file import GgufFile

        file = GgufFile(path)
        kind = file.metadata.get("general.architecture", "")
        types: dict[str, int] = {}
        for info in file.infos.values():
            types[info.type] = types.get(info.type, 0) + 1
        context = file.metadata.get(f"{kind}.context_length")
        return {"architecture": kind, "context": context, "tensors": types}
    from anyaccel.validation import read_json

    config = read_json(path / "config.json")
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    quantised = config.get("quantization_config")
    return {
        "architecture": ", ".join(map(str, config.get("architectures") or [config.get("model_type", "")])),
        "context": text.get("max_position_embeddings"),
        "quantised": quantised.get("quant_method", "") if isinstance(quantised, dict) else "",
    }


def _text_facts(path: Path) -> dict[str, Any]:
    """What its tokenizer, its chat template and its recommendations say."""
    from anyaccel.inference.text.tokenizer import load_text_tokenizer
    from anyaccel.serve.requests.defaults import read_defaults
    from anyaccel.serve.requests.reasoning import detect_reasoning
    from anyaccel.serve.requests.tools.formats import detect_format

    tokenizer = load_text_tokenizer(path, lambda line: None)
    if not tokenizer.has_chat_template:
        return {"chat_template": False, "sampling": read_defaults(path).describe()}
    reasoning = detect_reasoning(tokenizer.template())
    return {
        "chat_template": True,
        "tool_format": detect_format(tokenizer.template(tools=True)).name,
        "reasoning_format": reasoning.name if reasoning is not None else "none",
        "sampling": read_defaults(path).describe(),
    }


def _entry(model: hub.LocalModel) -> dict[str, Any]:
    return {
        "name": str(model.name),
        "path": str(model.path),
        "size": model.size,
        "pulled": model.pulled,
        "complete": model.complete,
    }


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
