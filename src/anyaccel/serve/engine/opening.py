# SPDX-License-Identifier: Apache-2.0
"""Opens the engine of a server: one, or a replica on each part of the machine. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyaccel import host_memory
from anyaccel.inference.encoders.opening import reads_whole_texts
from anyaccel.serve.engine.decoders import open_decoder
from anyaccel.serve.engine.encoder import EncoderEngine
from anyaccel.serve.engine.engine import ServingEngine
from anyaccel.serve.engine.facts import StepDecoder
from anyaccel.serve.engine.grammar import GrammarCompiler
from anyaccel.serve.engine.replicas import Replicas
from anyaccel.serve.engine.settings import EngineSettings
from anyaccel.serve.engine.turns import Turns

if TYPE_CHECKING:
    from anyaccel.inference.options import ModelOptions
    from anyaccel.inference.ranks.backends import Reporter


def open_engine(
    path: Path,
    options: ModelOptions,
    screen: Reporter,
    settings: EngineSettings | None = None,
    tokenizer: Any = None,
    *,
    turns: Turns | None = None,
    check: Callable[[], object] | None = None,
) -> ServingEngine | Replicas | EncoderEngine:
    """Load a model and begin to serve it.

    Args:
        tokenizer: of the model (`load_text_tokenizer`), where the caller has it already; for grammars.
        turns: those of all engines on these cores, where there are several.
        check: called now and then while the model loads; what it raises ends that.

    Raises:
        UsageError: the native runtime does not have this model, or settings are wrong.
        AnyAccelError: the model cannot be read.
    """
    chosen = settings or EngineSettings()
    if reads_whole_texts(path):
        return EncoderEngine(path, options, screen, chosen)
    if chosen.replicas == 0:
        from anyaccel.topology import read_machine

        chosen = replace(chosen, replicas=len(read_machine().nodes_with_cores()))

    def one(replica: int) -> ServingEngine:
        watcher = screen if replica == 0 else _Silent()

        def load(engine_check: Callable[[], object]) -> StepDecoder:
            def both() -> None:
                engine_check()
                if check is not None:
                    check()

            return open_decoder(path, options, watcher, chosen, tokenizer, both, replica)

        turn = None if turns is None else turns.of(replica)
        return ServingEngine(load, chosen, GrammarCompiler(str(path), tokenizer), turn)

    if chosen.replicas == 1:
        return one(0)
    engines: list[ServingEngine] = []
    try:
        while len(engines) < chosen.replicas:
            engines.append(one(len(engines)))
    except BaseException:
        for engine in engines:
            engine.shut_down()
        raise
    return Replicas(engines, chosen.prefix_cache, chosen.timeout_s)


def free_memory() -> int:
    """Bytes that models may take now."""
    return host_memory.available()


class _Silent:
    """A reporter that shows nothing, for the replicas after the first, which would repeat its lines."""

    def line(self, text: str) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass
