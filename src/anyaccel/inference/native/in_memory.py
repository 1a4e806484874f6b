# SPDX-License-Identifier: Apache-2.0
"""A model in memory as a checkpoint, once it is known to compute what its configuration says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import ModuleSource
from anyaccel.inference.native.checkpoint import Checkpoint
from anyaccel.inference.spec.mapping import Unsupported


def checkpoint_in_memory(model: Any, config: Mapping[str, Any] | None, release: bool) -> Checkpoint:
    """The checkpoint of a Hugging Face model in memory, or of a TensorSource with a config.

    Raises:
        Unsupported: the model is not what its configuration says, or computes something else.
    """
    if hasattr(model, "tensor"):
        if config is None:
            raise ModelError("a TensorSource needs a config")
        return Checkpoint(model, dict(config), {})
    own = config or getattr(model, "config", None)
    if own is None:
        raise Unsupported("model without a config")
    rounded = _rounded(model)
    if config is None and not isinstance(own, Mapping):
        from anyaccel.inference.modules.check import check_structure
        from anyaccel.inference.native.module_probe import check_computes_the_same

        check_structure(model)
        try:
            check_computes_the_same(model, own.to_dict(), rounded)
        except Unsupported:
            raise
        except ModelError as error:  # the model's own code may run all the same
            raise Unsupported(f"code for this model's weights ({error})") from error
    values = dict(own) if isinstance(own, Mapping) else own.to_dict()
    generation = getattr(model, "generation_config", None)
    generation_values = generation.to_dict() if generation is not None else {}
    return Checkpoint(ModuleSource(model, release), values, generation_values, rounded=rounded)


def encoder_in_memory(model: Any) -> Checkpoint:
    """The checkpoint of a Hugging Face encoder in memory, which keeps its weights: its head reads some of them.

    Raises:
        Unsupported: it has no configuration, or its modules are not those of its class.
    """
    from anyaccel.inference.modules.check import check_structure

    config = getattr(model, "config", None)
    if config is None:
        raise Unsupported("model without a config")
    check_structure(model, encoder=True)
    values = {**config.to_dict(), "architectures": [type(model).__name__]}
    return Checkpoint(ModuleSource(model, False), values, {}, rounded=_rounded(model), encoder=True)


def _rounded(model: Any) -> Callable[[Sequence[float]], tuple[float, ...]] | None:
    """What `model.to(torch.bfloat16)` has done to the frequencies of rotary positions, which are no weights.

    Raises:
        Unsupported: to some of them only.
    """
    import torch

    kept = [each for name, each in model.named_buffers() if name.endswith("inv_freq") and not each.is_meta]
    for kind in (torch.bfloat16, torch.float16):
        rounded = [torch.equal(each.to(kind).to(each.dtype), each) for each in kept]
        if rounded and all(rounded):
            return lambda values: tuple(torch.tensor(values, dtype=torch.float32).to(kind).double().tolist())
        if any(each.dtype is kind for each in kept):
            raise Unsupported(f"code for frequencies of rotary positions of which some are {kind}")
    return None
