# SPDX-License-Identifier: Apache-2.0
"""Which layers each stage of pipeline parallelism has. Pure functions.

Embedding and position embedding are the first stage's, the last norm and the head the last one's; a head that is the
embedding's matrix is on both. Ranks are numbered stage by stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from anyaccel.errors import UsageError
from anyaccel.inference.spec.decoder import DecoderSpec

_LAYER = re.compile(r"layers\.(\d+)\.")
_OF_THE_LAST = ("final_norm.", "head")


def bytes_by_layer(spec: DecoderSpec, weights: Iterable[tuple[str, int]]) -> tuple[list[int], int, int]:
    """The bytes of each layer, and those that the first and the last stage have beside their layers.

    Args:
        weights: name and bytes of each weight of the whole decoder.
    """
    layers, first, last = [0] * len(spec.layers), 0, 0
    for name, size in weights:
        if found := _LAYER.match(name):
            layers[int(found[1])] += size
        elif name.startswith(_OF_THE_LAST):
            last += size
        else:
            first += size
            if name == "embed" and spec.tied:
                last += size
    return layers, first, last


def split_layers(layers: Sequence[int], first: int, last: int, stages: int) -> list[range]:
    """The layers of each stage, one stage after the other, so that the largest stage is as small as it can be.

    Of divisions that are equal in this, the one whose stages' sizes have the smallest sum of squares, then the one with
    more layers in earlier stages.

    Args:
        layers: the bytes of each.
        first, last: bytes that the first and the last stage have beside.

    Raises:
        UsageError: there are fewer layers than stages.
    """
    count = len(layers)
    if stages > count:
        raise UsageError(f"pipeline_parallel size={stages}: the model has only {count} layers; use a smaller size")
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)
    never: tuple[float, float, list[int]] = (float("inf"), 0.0, [])
    # best[n]: for the first n layers on so many stages: the largest stage, the sum of squares, where each stage begins.
    best = [(0.0, 0.0, list[int]()), *[never] * count]
    for stage in range(stages):
        longer = [never] * (count + 1)
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        for end in range(stage + 1, count - (stages - 1 - stage) + 1):
            for begin in range(end - 1, stage - 1, -1):
                largest, squares, cuts = best[begin]
                held = float(sums[end] - sums[begin] + extra)
                found = (max(largest, held), squares + held * held, [*cuts, begin])
                if found[:2] < longer[end][:2]:
                    longer[end] = found
        best = longer
    cuts = [*best[count][2], count]
    return [range(cuts[stage], cuts[stage + 1]) for stage in range(stages)]


def stage_of(spec: DecoderSpec, layers: Sequence[range], stage: int) -> DecoderSpec:
    """The decoder of one stage, from one that has all layers."""
    own = layers[stage]
    return replace(
        spec,
        layers=spec.layers[own.start : own.stop],
        stage=stage,
        stages=len(layers),
        first_layer=own.start,
    )
