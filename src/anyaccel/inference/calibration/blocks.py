# SPDX-License-Identifier: Apache-2.0
"""A model's decoder blocks one at a time, as transformers has them, with a text's activations going through them."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.stored_values import floats_of
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import error_text

Each = Callable[[str, Tensor], object]


class _Seen(Exception):
    """What was looked for has been seen: what comes after it is not computed."""


class _Recorder(nn.Module):
    """Stands in for a block: lets the hidden states through and keeps what else the block is given."""

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__()
        self._last = last
        self.instead: Tensor | None = None
        self.options: dict[str, Any] = {}
        self.hidden: Tensor | None = None
        for name in ("attention_type", "layer_type", "is_sliding"):  # models ask their blocks for the kind of mask
            if hasattr(block, name):
                setattr(self, name, getattr(block, name))

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        if args:
            raise Unsupported("calibration of a model whose blocks take arguments by position")
        if self.instead is not None:
            return self.instead
        self.hidden, self.options = hidden, options
        if self._last:
            raise _Seen
        return hidden


@dataclass
class Block:
    """One block with its weights.

    Attributes:
        name: of its tensors: "model.layers.0".
        module: on the CPU, float32.
        linears: the nn.Linear of it by the names of their weights in the checkpoint.
        run: the block's output for the hidden states of one window.
    """

    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]
    run: Callable[[Tensor], Tensor]

    def vector(self, name: str) -> Tensor:
        """One of its parameters by its name in the checkpoint."""
        return self.module.get_parameter(name.removeprefix(f"{self.name}."))

    def inputs(self, name: str, hidden: Tensor) -> Tensor:
        """What one of the linear layers is given for the hidden states of one window: [tokens, columns], float32."""
        found = _seen_by(self.linears[name], self.run, hidden)
        if found is None:
            raise ModelError(f"{name}: not computed for each window of the calibration text")
        return found


def _seen_by(linear: nn.Linear, run: Callable[[Tensor], object], hidden: Tensor) -> Tensor | None:
    """What a layer is given, [tokens, columns], float32, when `run` gets these hidden states; None: nothing."""
    found: list[Tensor] = []

    def seen(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0].reshape(-1, args[0].shape[-1]).float())
        raise _Seen

    handle = linear.register_forward_pre_hook(seen)
    try:
        run(hidden)
    except _Seen:
        return found[0]
    finally:
        handle.remove()
    return None


@dataclass
class Head:
    """What comes after the blocks.

    Attributes:
        logits: [tokens, vocabulary] for the last block's output of one window.
        linear: makes them, after the last norm.
        embedding: of the tokens; with the weights of `linear` when they are tied.
    """

    logits: Callable[[Tensor], Tensor]
    linear: nn.Linear
    embedding: nn.Embedding

    def inputs(self, hidden: list[Tensor]) -> list[Tensor]:
        """What `linear` is given for the last block's output of each window, [tokens, cols]."""
        found = (_seen_by(self.linear, self.logits, each) for each in hidden)
        return [each for each in found if each is not None]


class Blocks:
    """The blocks of a checkpoint; weights are read as they are needed and given up again.

    Args:
        source: tensors under Hugging Face's names.
        windows: tokens [count, length].
        where: for messages.

    Attributes:
        count: how many blocks. hidden: of each window, before the first one.

    Raises:
        Unsupported: the model is not made of one list of blocks with the checkpoint's tensors.
    """

    def __init__(self, source: Any, config: dict[str, Any], windows: Tensor, where: str) -> None:
        self._source = source
        self.where = where
        self.windows = windows
        self._model = _structure(config, where)
        self._list, self._blocks = self._found()
        self.count = len(self._blocks)

    @property
    def hidden(self) -> list[Tensor]:
        return self._start[1]

    @functools.cached_property
    def _start(self) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """Made when it is first needed: what is wrong with the options is said before."""
        return self._embedded(self.windows)

    def _found(self) -> tuple[str, list[nn.Module]]:
        config = self._model.config.get_text_config(decoder=True)
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
                return name, list(module)
        raise Unsupported(f"calibration of {type(self._model).__name__}: it has no list of decoder blocks")

    def linears(self) -> dict[str, int]:
        """How many weights each linear layer of the blocks has, by their names."""
        return {
            f"{self._list}.{number}.{name}.weight": module.weight.numel()
            for number, block in enumerate(self._blocks)
            for name, module in block.named_modules()
            if type(module) is nn.Linear
        }

    def place(self, name: str) -> int:
        """Which block a tensor belongs to, from 1; 0 for none."""
        number = name.removeprefix(f"{self._list}.").partition(".")[0]
        return int(number) + 1 if name.startswith(f"{self._list}.") and number.isdecimal() else 0

    def _read(self, module: nn.Module, prefix: str) -> None:
        """Real weights for a module, from the checkpoint."""
        for name, parameter in list(module.named_parameters()):
            full = prefix + name
            if full not in self._source:
                raise Unsupported(
                    f"calibration of {type(self._model).__name__}: the checkpoint has no tensor {full!r}, which "
                    "transformers' module is made of (stacked experts are such; quantise without --calibrate)"
                )
            values = torch.from_numpy(floats_of(self._source.tensor(full)))
            if values.shape != parameter.shape:
                raise ModelError(
                    f"{self.where}: tensor {full!r} is {tuple(values.shape)}, not {tuple(parameter.shape)}"
                )
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Parameter(values, requires_grad=False))
            self._source.release(full)

    def _embedded(self, windows: Tensor) -> tuple[list[dict[str, Any]], list[Tensor]]:
        """What each block is given beside hidden states, and the hidden states of each window before the first."""
        owner, _, last = self._list.rpartition(".")
        holder: Any = self._model.get_submodule(owner)
        recorders = [_Recorder(block, number + 1 == self.count) for number, block in enumerate(self._blocks)]
        setattr(holder, last, nn.ModuleList(recorders))
        self._recorders = recorders
        self._read_outside()
        hidden = []
        for window in windows:
            try:
                with torch.no_grad():
                    self._model(input_ids=window[None], use_cache=False)
            except _Seen:
                pass
            except (RuntimeError, NotImplementedError) as error:
                raise Unsupported(f"calibration of {type(self._model).__name__} ({error_text(error)})") from error
            first = recorders[0].hidden
            assert first is not None
            hidden.append(first.float().clone())
        _forget(self._model)
        return [each.options for each in recorders], hidden

    def _read_outside(self, with_head: bool = False) -> None:
        """Weights of what stands beside the blocks; what comes after them is computed with the head only."""
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            own = list(module.named_parameters(recurse=False))
            if own and module is not head and all(f"{name}.{each}" in self._source for each, _ in own):
                self._read(module, f"{name}.")
            elif module is head and with_head:
                if f"{name}.weight" in self._source:
                    self._read(module, f"{name}.")
                else:  # tied
                    head.weight = self._model.get_input_embeddings().weight

    def __iter__(self) -> Iterator[Block]:
        for number in range(self.count):
            with self.block(number) as block:
                yield block

    @contextlib.contextmanager
    def block(self, number: int) -> Iterator[Block]:
        """One block; its weights are there until the end of the context."""
        module = self._blocks[number]
        name = f"{self._list}.{number}"
        self._read(module, f"{name}.")
        linears = {f"{name}.{n}.weight": m for n, m in module.named_modules() if type(m) is nn.Linear}
        try:
            yield Block(name, module, linears, self._runner(module, number))
        finally:
            _forget(module)

    def _runner(self, module: nn.Module, number: int) -> Callable[[Tensor], Tensor]:
        options = self._start[0][number]

        def run(hidden: Tensor) -> Tensor:
            # With gradients for inputs that want them; the weights want none.
            with torch.set_grad_enabled(hidden.requires_grad):
                found = module(hidden, **options)
            hidden_after: Tensor = found[0] if isinstance(found, tuple) else found
            return hidden_after

        return run

    @contextlib.contextmanager
    def head(self) -> Iterator[Head]:
        """What is computed after the blocks; its weights are there until the end of the context."""
        self._read_outside(with_head=True)
        last = self._recorders[-1]

        def logits(hidden: Tensor) -> Tensor:
            last.instead = hidden
            with torch.set_grad_enabled(hidden.requires_grad):
                found: Tensor = self._model(input_ids=self.windows[:1], use_cache=False).logits[0]
            return found

        try:
            yield Head(logits, self._model.get_output_embeddings(), self._model.get_input_embeddings())
        finally:
            last.instead = None
            _forget(self._model)


def _forget(module: nn.Module) -> None:
    """Give up the weights, not their shapes: another pass reads them again."""
    for name, parameter in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        nothing = nn.Parameter(torch.empty(parameter.shape, device="meta"), requires_grad=False)
        setattr(module.get_submodule(owner), last, nothing)


def _structure(config: dict[str, Any], where: str) -> Any:
    """The model without weights; buffers (rotary frequencies) are real: no checkpoint has them."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with tempfile.TemporaryDirectory(prefix="anyaccel-") as folder:  # transformers takes files only
            (Path(folder) / "config.json").write_text(json.dumps(config))
            known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(known, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # a configuration can be wrong in any way
        raise ModelError(f"{where}: transformers cannot build this model ({error_text(error)})") from error
    return model.eval()


class Replay:
    """Computes linear layers once: a block that is run again takes what those have made whose weights are final.

    Attributes:
        final: names of the layers that will not change any more. window: whose hidden states the block is run for.
    """

    def __init__(self, linears: dict[str, nn.Linear]) -> None:
        self.final: set[str] = set()
        self.window = 0
        self._made: dict[tuple[str, int], Tensor] = {}
        self._linears = linears
        for name, each in linears.items():
            vars(each)["forward"] = functools.partial(self._forward, name, each.forward)

    def _forward(self, name: str, compute: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        if name not in self.final:
            return compute(given)
        made = self._made.get((name, self.window))
        if made is None:
            made = self._made[name, self.window] = compute(given)
        return made

    def close(self) -> None:
        for each in self._linears.values():
            del vars(each)["forward"]
        self._made.clear()


class Watch:
    """The inputs of a block's linear layers, and which layers have the same ones, in the order of computation.

    Attributes:
        moments: the summed squares [cols] of each set's inputs.
        kept: with `keep` the inputs themselves, of each set and window, in 16 bits.
    """

    def __init__(self, linears: dict[str, nn.Linear], keep: bool = False) -> None:
        self.sets: list[list[str]] = []
        self.moments: list[Tensor] = []
        self.kept: list[list[Tensor]] = []
        self._keep = keep
        self._first: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._handles = [
            each.register_forward_pre_hook(lambda _, args, name=name: self._saw(name, args[0]))
            for name, each in linears.items()
        ]

    def _saw(self, name: str, given: Tensor) -> None:
        known = next((number for number, names in enumerate(self.sets) if name in names), None)
        if known is None:
            same = self._first.get((given.data_ptr(), given.shape[-1]))
            if same is not None:
                self.sets[same[0]].append(name)
                return
            known = len(self.sets)
            self.sets.append([name])
            self.kept.append([])
            self.moments.append(torch.zeros(given.shape[-1]))
            self._first[given.data_ptr(), given.shape[-1]] = known, given  # kept: its memory is nobody else's
        if self.sets[known][0] == name:
            flat = given.reshape(-1, given.shape[-1])
            if self._keep:
                self.kept[known].append(flat.bfloat16())
            self.moments[known] += flat.float().square().sum(0)

    def next_window(self) -> None:
        """Forget the inputs of the first window, which were kept to tell them apart."""
        self._first.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
