# SPDX-License-Identifier: Apache-2.0
"""A rank of `anyaccel serve --tp`: every rank computes the same steps, and rank 0 sends the results to the engine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anyaccel.inference.ranks.rank import main
from anyaccel.inference.spec.decoder import PAGE
from anyaccel.serve.engine.facts import lacking, shares_prefixes
from anyaccel.serve.engine.slots import Slots
from anyaccel.serve.engine.step import StepInput

if TYPE_CHECKING:
    from anyaccel.inference.ranks.channel import Channel
    from anyaccel.inference.ranks.rank import Model


def serve(channel: Channel, rank: int, backend: Model) -> None:
    """Compute steps until the engine closes the channel."""
    native = backend.native  # type: ignore[union-attr]
    page_bytes = native.model.cache_bytes_per_token() * PAGE
    channel.send(
        kind="ready",
        context=native.spec.max_tokens,
        vocabulary=native.whole_spec.vocab,
        hidden=native.whole_spec.hidden,
        ends=backend.ends,
        page_bytes=page_bytes,
        cache_pages=native.model.cache_limit_bytes // page_bytes,
        state_pages=native.model.cache_bytes_per_state() // page_bytes,
        shares=shares_prefixes(native),
        threads=native.model.threads,
        weight_bytes=native.resident_bytes,
        cache_bytes=native.model.cache_limit_bytes,
    )
    slots = Slots(native.model)
    while True:
        output = slots.apply(StepInput.from_message(channel.receive()["step"]))
        if rank == 0:
            channel.send(kind="output", output=output.to_message())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], serve, lacking))
