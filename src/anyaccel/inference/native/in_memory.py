# SPDX-License-Identifier: Apache-2.0
"""A model in memory as a checkpoint, once it is known to be what its configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.checkpoints.sources import ModuleSource
from anyaccel.inference.native.checkpoint import Checkpoint
from anyaccel.inference.spec.mapping import Unsupported


def checkpoint_in_memory(model: Any, config: Mapping[str, Any] | None, release: bool) -> Checkpoint:
    """The same for a Hugging Face model in memory, or a TensorSource with a config."""
    if hasattr(model, "tensor"):
        if config is None:
            raise ModelError("a TensorSource needs a config")
        return Checkpoint(model, dict(config), {})
    own = config or getattr(model, "config", None)
    if own is None:
        raise Unsupported("model without a config")
    if config is None and not isinstance(own, Mapping):
        from anyaccel.inference.modules.check import check_unmodified
        from anyaccel.inference.native.module_probe import check_computes_the_same

        check_unmodified(model)
        try:
            check_computes_the_same(model, own.to_dict())
        except Unsupported:
            raise
        except ModelError as error:  # the model's own code may run all the same
            raise Unsupported(f"code for this model's weights ({error})") from error
    values = dict(own) if isinstance(own, Mapping) else own.to_dict()
    generation = getattr(model, "generation_config", None)
    return Checkpoint(ModuleSource(model, release), values, generation.to_dict() if generation is not None else {})
