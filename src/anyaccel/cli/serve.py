# SPDX-License-Identifier: Apache-2.0
"""`anyaccel serve`: serve a local model through OpenAI's, Anthropic's and Ollama's APIs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel.cli._model_options import (
    add_chat_template_option,
    add_draft_option,
    add_lora_option,
    add_model_options,
    add_tp_option,
    check_at_least,
    check_chat_template,
    model_of,
    model_path,
    naming_options,
    set_chat_template,
    usual_dtype,
)
from anyaccel.cli._parser import Parser, size
from anyaccel.cli._screen import Screen
from anyaccel.env import ANYACCEL_API_KEY
from anyaccel.errors import AnyAccelError, UsageError
from anyaccel.inference.checkpoints.hub import PREFIX, HubName
from anyaccel.inference.checkpoints.identity import size_of
from anyaccel.inference.checkpoints.model_path import check_decoder_only, models_in
from anyaccel.inference.encoders.opening import reads_whole_texts
from anyaccel.inference.ranks.background import BackgroundTask
from anyaccel.inference.text.tokenizer import load_text_tokenizer
from anyaccel.serve import listening
from anyaccel.serve.engine.turns import Turns
from anyaccel.serve.listening import ServerSettings
from anyaccel.serve.requests.reasoning import REASONING_FORMATS
from anyaccel.serve.requests.tools.formats import FORMATS
from anyaccel.terminal import marked

if TYPE_CHECKING:
    from anyaccel.inference.ranks.backends import Reporter
    from anyaccel.serve.api.models import Models
    from anyaccel.serve.interface import Engine
    from anyaccel.serve.requests.frontend import Frontend

_EXAMPLES = """\
  anyaccel serve
  anyaccel serve ~/models/Qwen3-0.6B --dtype int8 --port 9000
  anyaccel serve model.gguf --dtype auto --tp 2 --served-model-name qwen
  anyaccel serve ~/models/Qwen3-8B ~/models/SmolLM2-135M --alias gpt-4o=Qwen3-8B --idle-seconds 600
  ANYACCEL_API_KEY=... anyaccel serve --host 0.0.0.0 --ssl-keyfile key.pem --ssl-certfile cert.pem
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once"}'"""
_LEVELS = ("debug", "info", "warning", "error", "critical")
_LONGEST_S = 1e6
_PACKAGES = ("starlette", "uvicorn", "uvloop", "httptools", "pydantic")


def build_parser() -> Parser:
    """The options of the command."""
    parser = Parser(
        "serve",
        "Serve a model with the HTTP APIs of OpenAI, Anthropic and Ollama, and a chat page. Many requests are answered "
        "at once. SIGTERM and Ctrl-C let open requests end first.",
        _EXAMPLES,
    )
    parser.add_argument(
        "given",
        metavar="MODEL",
        nargs="*",
        default=[],
        help="the same as --model; of several, the first is loaded at once, and others when a request names them",
    )
    add_model_options(parser)
    add_tp_option(parser)
    add_draft_option(parser)
    add_lora_option(parser)
    add = parser.group("several models")
    add("--models-dir", metavar="DIR", help="serve the models in this folder too, each loaded when a request names it")
    add(
        "--alias",
        action="append",
        default=[],
        metavar="NAME[=MODEL]",
        help="a further name of a model, the first by default; may be given several times",
    )
    add(
        "--lora-modules",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve the first model with this LoRA adapter too, as a further model of this name; may be given several "
        "times",
    )
    add(
        "--memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="most that all loaded models may take, such as 64GiB; those unused for longest are unloaded, and of a "
        "model that is too large experts stay on the disk (default: the free memory)",
    )
    add(
        "--idle-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="unload a model that no request has used for so long (default: 0, never)",
    )
    add = parser.group("engine")
    add(
        "--replicas",
        type=_parse_replicas,
        default=1,
        metavar="N|auto",
        help="copies of the model, each on its own cores; auto: one on each NUMA node (default: 1)",
    )
    add("--max-batch", type=int, default=32, metavar="N", help="requests that are computed at once (default: 32)")
    add(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="requests that may wait; further ones get 429 (default: 256)",
    )
    add(
        "--max-context",
        type=int,
        default=0,
        metavar="N",
        help="most tokens of prompt and answer together (default: the model's)",
    )
    add(
        "--cache-bytes",
        type=size,
        default=0,
        metavar="SIZE",
        help="memory for keys and values (default: a quarter of the free memory)",
    )
    add(
        "--no-prefix-cache",
        action="store_true",
        help="compute each prompt from its beginning, even if requests have a common beginning",
    )
    add("--cache-dir", metavar="DIR", help="keep the prefixes of prompts in this folder too, over restarts")
    add(
        "--cache-disk-bytes",
        type=size,
        default=16 << 30,
        metavar="SIZE",
        help="most that --cache-dir may have; what was used longest ago is deleted (default: 16 GiB)",
    )
    add(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that an answer may take (default: 600)",
    )
    add = parser.group("API")
    add(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of the model in requests; may be given several times",
    )
    add(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: temperature, top-p and so on are what the model recommends, unless a request sets them "
        "(default: auto)",
    )
    add_chat_template_option(add)
    add(
        "--tool-format",
        choices=("auto", *FORMATS),
        default="auto",
        help="format of tool calls (default: by the chat template)",
    )
    add(
        "--reasoning-format",
        choices=("auto", "none", *REASONING_FORMATS),
        default="auto",
        help="format of the model's thoughts; none: they stay in the text (default: by the chat template)",
    )
    add("--pooling", choices=("mean", "last"), default="mean", help="pooling of embeddings (default: mean)")
    add("--files-dir", metavar="DIR", help="keep files that clients upload here: /v1/files and /v1/batches")
    add("--no-page", action="store_true", help="serve no chat page at /")
    add = parser.group("server")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen at, or path of a Unix socket (default: 127.0.0.1, this machine only)",
    )
    add("--port", type=int, default=8000, help="TCP port; 0 takes a free one (default: 8000)")
    add("--uds", metavar="PATH", help="listen at this Unix socket instead of --host and --port")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests have to bring; may be given several times; ps shows it, but not ANYACCEL_API_KEY",
    )
    add(
        "--allowed-origins",
        action="append",
        default=[],
        metavar="URL",
        help="a site whose pages may send requests; *: all",
    )
    add(
        "--allowed-hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which browsers reach this server, such as that of a proxy; not needed with a key",
    )
    add("--root-path", default="", metavar="PATH", help="path under which a proxy serves it, such as /llm")
    add("--ssl-keyfile", metavar="FILE", help="key for HTTPS")
    add("--ssl-certfile", metavar="FILE", help="certificate for HTTPS")
    add(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="time for open requests at the end (default: 30)"
    )
    add(
        "--log-level",
        choices=_LEVELS,
        default="info",
        help="how much is logged; info has one line for each request (default: info)",
    )
    add("--json-logs", action="store_true", help="log one JSON object on each line")
    add(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, as in http://127.0.0.1:4318",
    )
    add("-q", "--quiet", action="store_true", help="print no topology, plan, address and hints")
    return parser


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    options = build_parser().parse_args(argv)
    _check(options)
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise AnyAccelError(f"serving needs more packages: pip install 'anyaccel[serve]' (no {', '.join(missing)})")
    settings = _settings(options)
    listening.check(settings)
    choices = _choices(options)
    for choice in choices:
        if not reads_whole_texts(choice.path):
            check_decoder_only(choice.path)
    screen = Screen(shown=not options.quiet)
    for warning in listening.warnings_of(settings):
        print(f"anyaccel: {marked(warning, sys.stderr)}", file=sys.stderr, flush=True)
    with listening.bound_socket(settings) as taken, BackgroundTask() as importing:
        importing.start(lambda: importlib.import_module("anyaccel.serve.server"))
        models = _open_models(options, choices, screen, importing)
        # From here on the server owns the engines, and closes them.
        port = 0 if settings.uds is not None else taken.getsockname()[1]
        chats = all(each.tokenizer.has_chat_template for each in models.frontends())
        server = importing.result()
        server.run(models, settings, taken, lambda: _announce(settings, screen, chats, port))
    return 0


@dataclass(frozen=True)
class _Choice:
    """A model that was given; `parent`: the one that an adapter of --lora-modules makes it of."""

    path: Path
    names: list[str]
    aliases: list[str]
    lora: str = ""
    parent: str = ""


def _choices(options: argparse.Namespace) -> list[_Choice]:
    """The models of the options; those of --models-dir are looked up by the server.

    Raises:
        UsageError: one is not there, or two have the same name.
        AnyAccelError: a folder of --lora-modules has no adapter that can be added to the model's weights.
    """
    given: list[str | None] = [*options.given] or [options.model]
    if options.models_dir is not None and given == [None]:
        given = []
    choices = []
    for each in given:
        path = model_path(each)
        choices.append(_Choice(path, *names_of(path, each, options.served_model_name), options.lora))
    for module in options.lora_modules:
        name, _, folder = module.partition("=")
        if not (choices and name and folder and Path(folder).expanduser().is_dir()):
            raise UsageError(
                f"--lora-modules {module}: must be NAME=FOLDER of an adapter, beside a model that is given"
            )
        choices.append(_Choice(choices[0].path, [name], [], folder, choices[0].names[0]))
    for alias in options.alias:
        name, _, model = alias.partition("=")
        named = [each for each in choices if model in (*each.names, *each.aliases)] if model else choices
        if not named:
            known = ", ".join(each.names[0] for each in choices) or "none: models of --models-dir have no others"
            raise UsageError(f"--alias {alias}: no model {model!r} is given; there is {known}")
        named[0].names.append(name)
    names = [name for each in choices for name in each.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two models are named {twice!r}; give their folders different names, or start two servers")
    if options.lora_modules:
        from anyaccel.inference.native.runtime import open_checkpoint

        for choice in choices[-len(options.lora_modules) :]:  # loaded for their first request, but refused now
            open_checkpoint(choice.path, lora=choice.lora)
    return choices


def _open_models(
    options: argparse.Namespace, choices: Sequence[_Choice], screen: Screen, importing: BackgroundTask
) -> Models:
    """The models of the server, of which the first is loaded."""
    from anyaccel.inference.native.checkpoint import has_experts
    from anyaccel.serve.engine.opening import free_memory

    several = len(choices) != 1 or options.models_dir is not None or options.memory or options.idle_seconds
    memory = (options.memory or free_memory()) if several else 0
    turns = Turns() if several else None
    frontend = None
    if choices:
        cache_bytes = options.cache_bytes or memory // 4
        frontend = _load(options, choices[0], screen, cache_bytes, turns, None, importing)
    try:
        importing.result()
        from anyaccel.serve.api.models import Models, ServedModel
        from anyaccel.serve.requests.files import FileStore

        def served(choice: _Choice, frontend: Frontend | None = None) -> ServedModel:
            def load(cache_bytes: int, check: Callable[[], None]) -> Frontend:
                return _load(options, choice, _Log(), cache_bytes, turns, check)

            return ServedModel(
                choice.names,
                choice.aliases,
                root=Path(choice.lora).name if choice.parent else choice.path.name,
                parent=choice.parent,
                size=size_of(choice.path),
                load=load if several else None,
                frontend=frontend,
                # So that it shrinks to what it may take.
                has_experts=functools.partial(has_experts, choice.path) if options.memory else None,
            )

        def found() -> Iterator[ServedModel]:
            if options.models_dir is None:
                return
            given = {each.path for each in choices}
            taken = {name for each in choices for name in each.names}
            for name, path in models_in(Path(options.models_dir).expanduser().absolute()).items():
                if path not in given and name not in taken:
                    yield served(_Choice(path, [name], []))

        models = Models(
            [served(each, frontend if place == 0 else None) for place, each in enumerate(choices)],
            found=found,
            memory=memory,
            cache_bytes=options.cache_bytes,
            idle_s=options.idle_seconds,
            wait_s=options.request_timeout,
            files=FileStore(Path(options.files_dir).expanduser()) if options.files_dir else None,
        )
        if several:
            for line in models.plan():
                screen.line(line)
        return models
    except BaseException:
        if frontend is not None:
            asyncio.run(frontend.engine.close())
        raise


class _Log:
    """A reporter for models that are loaded while the server runs."""

    def line(self, text: str) -> None:
        logging.getLogger("anyaccel.serve").info("%s", text)

    def progress(self, done: int, total: int) -> None:
        pass


def _load(
    options: argparse.Namespace,
    choice: _Choice,
    screen: Reporter,
    cache_bytes: int,
    turns: Turns | None,
    check: Callable[[], None] | None,
    importing: BackgroundTask | None = None,
) -> Frontend:
    """Load a model.

    Args:
        importing: imports the server meanwhile.

    Raises:
        AnyAccelError: it cannot be loaded.
    """
    loading = screen.loading if isinstance(screen, Screen) else contextlib.nullcontext
    with loading():
        tokenizer = load_text_tokenizer(choice.path, screen.line)
        set_chat_template(options, tokenizer)
    with loading(), naming_options(options):
        engine = _load_engine(options, choice, screen, tokenizer, cache_bytes, turns, check)
    try:
        for line in engine.facts.plan:
            screen.line(line)
        if importing is not None:
            importing.result()
        return _frontend(options, choice, engine, tokenizer, screen)
    except BaseException:
        asyncio.run(engine.close())
        raise


def _load_engine(
    options: argparse.Namespace,
    choice: _Choice,
    screen: Reporter,
    tokenizer: Any,
    cache_bytes: int,
    turns: Turns | None,
    check: Callable[[], None] | None,
) -> Engine:
    from anyaccel.serve.engine.opening import open_engine
    from anyaccel.serve.engine.settings import EngineSettings

    chosen = EngineSettings(
        max_batch=options.max_batch,
        max_context=options.max_context,
        cache_bytes=cache_bytes,
        max_waiting=options.max_waiting,
        timeout_s=options.request_timeout,
        prefix_cache=not options.no_prefix_cache,
        cache_dir=options.cache_dir or "",
        cache_disk_bytes=options.cache_disk_bytes,
        replicas=options.replicas,
        draft_tokens=options.draft.tokens,
        draft_model=bool(options.draft.model),
    )
    dtype = options.dtype or usual_dtype(choice.path, options.runtime)
    model = replace(model_of(options), lora=choice.lora, dtype=dtype)
    return open_engine(choice.path, model, screen, chosen, tokenizer, turns=turns, check=check)


def _frontend(
    options: argparse.Namespace, choice: _Choice, engine: Engine, tokenizer: Any, screen: Reporter
) -> Frontend:
    from anyaccel.serve.requests.defaults import SamplingDefaults, read_defaults
    from anyaccel.serve.requests.frontend import Frontend
    from anyaccel.serve.requests.tokenizer import ServerTokenizer
    from anyaccel.serve.requests.tools.formats import FORMATS

    defaults = read_defaults(choice.path) if options.generation_config == "auto" else SamplingDefaults()
    if told := defaults.describe():
        screen.line(f"sampling: {told}, where a request does not say it, as the model's configuration does")
    return Frontend(
        engine,
        ServerTokenizer(tokenizer),
        choice.names,
        choice.aliases,
        root=choice.path.name,
        pooling=options.pooling,
        tool_format=FORMATS.get(options.tool_format, "auto"),
        reasoning="auto" if options.reasoning_format == "auto" else REASONING_FORMATS.get(options.reasoning_format),
        defaults=defaults,
    )


def _announce(settings: ServerSettings, screen: Screen, chats: bool, port: int) -> None:
    where = listening.address(settings, port)
    at = f" at the Unix socket {settings.uds}" if settings.uds is not None else ""
    screen.line(f"serving: {where}/v1{at}" + (f", with a page to chat at {where}/" if settings.page else ""))
    screen.line(f"try: {listening.curl(settings, port, chats)}")


def _parse_replicas(text: str) -> int:
    """The number of replicas; 0 stands for one on each NUMA node."""
    if text == "auto":
        return 0
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number from 1 on, or auto")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    """Refuse values that are wrong for every model, before anything is imported or loaded."""
    if options.given and options.model is not None:
        raise UsageError(f"MODEL {options.given[0]} and --model {options.model}: one of them is enough")
    if len(options.given) > 1 or options.models_dir is not None:
        _check_several(options)
    check_at_least(options, {"max_batch": 1, "max_waiting": 1, "max_context": 0, "memory": 0, "cache_disk_bytes": 0})
    if not 0 <= options.idle_seconds <= _LONGEST_S:
        raise UsageError(f"--idle-seconds {options.idle_seconds:g}: must be 0 to {_LONGEST_S:g}")
    with naming_options(options):
        model_of(options)
    if not 0 <= options.drain_seconds <= _LONGEST_S:
        raise UsageError(f"--drain-seconds {options.drain_seconds:g}: must be 0 to {_LONGEST_S:g}")
    if not 0 < options.request_timeout <= _LONGEST_S:
        raise UsageError(f"--request-timeout {options.request_timeout:g}: must be above 0, and at most {_LONGEST_S:g}")
    if not 0 <= options.port < 1 << 16:
        raise UsageError(f"--port {options.port}: must be 0 to 65535")
    check_chat_template(options)
    if not all(options.api_key) or not all(options.served_model_name) or not all(options.alias):
        raise UsageError("--api-key, --served-model-name and --alias: must not be empty")


def _check_several(options: argparse.Namespace) -> None:
    """Refuse options that are about one model where there are several."""
    for option, value in {
        "--served-model-name": options.served_model_name,
        "--chat-template": options.chat_template,
        "--draft": options.draft.model,
        "--lora": options.lora,
    }.items():
        if value:
            hint = "; --alias NAME=MODEL gives one of them a name" if option == "--served-model-name" else ""
            raise UsageError(f"{option}: is for one model, and several are served{hint}")
    if options.models_dir is not None and not Path(options.models_dir).expanduser().is_dir():
        raise UsageError(f"--models-dir {options.models_dir}: no such folder")


def _settings(options: argparse.Namespace) -> ServerSettings:
    given = ANYACCEL_API_KEY.get()
    is_path = "/" in options.host  # as llama.cpp's server takes it
    return ServerSettings(
        host="127.0.0.1" if is_path else options.host,
        port=options.port,
        uds=options.host if is_path and options.uds is None else options.uds,
        keys=(*options.api_key, *([given] if given else [])),
        origins=tuple(map(listening.parse_origin, options.allowed_origins)),
        hosts=tuple(map(listening.parse_host, options.allowed_hosts)),
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        page=not options.no_page,
        drain_seconds=options.drain_seconds,
        log_level=options.log_level,
        json_logs=options.json_logs,
        otlp_endpoint=options.otlp_endpoint,
    )


def names_of(path: Path, given: str | None, served: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names of a model in requests: those that are given, else the name of its file or folder; and its paths.

    The paths are accepted too, since clients of vLLM send them, but are not listed.
    """
    own = path.name.removesuffix(".gguf") if path.is_file() else path.name
    if given is not None and given.startswith(PREFIX) and path.is_dir():  # the folder's name says nothing
        own = HubName.parse(given).repository.partition("/")[2]
    if served:
        return [*served], []
    return [own], list(dict.fromkeys(each for each in (given, str(path)) if each))
