# SPDX-License-Identifier: Apache-2.0
"""Beginning an answer, whichever of the two executors of DecoderSpec has the model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyaccel import _llm


def new_request(
    model: _llm.Model,
    prompt: Sequence[int],
    options: Mapping[str, Any],
    prefix: _llm.Request | None = None,
    keep_logits: bool = False,
) -> _llm.Request:
    """As `_llm.Request`, of a model of csrc/llm or of inference/device."""
    own = getattr(model, "request", None)
    if own is not None:
        return own(prompt, options, prefix, keep_logits)  # type: ignore[no-any-return]
    from anyaccel import _llm

    return _llm.Request(model, prompt, options, prefix, keep_logits)
