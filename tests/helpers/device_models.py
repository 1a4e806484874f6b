# SPDX-License-Identifier: Apache-2.0
"""Models of inference/device on the CPU, with the weights of native_models."""

from __future__ import annotations

from dataclasses import replace

import torch

import native_models
from anyaccel._llm import ExternalModel
from anyaccel.inference.device.executor import DeviceExecutor
from anyaccel.inference.device.weights import DeviceWeights
from anyaccel.inference.spec.decoder import weights


def on_device(name: str, positions: int = 0, cache_limit: int = 1 << 26) -> ExternalModel:
    """The same model as `native_models.native(name, positions)`."""
    _, spec, values = native_models.whole(name, positions)
    matrices, vectors = weights(spec)
    shapes = {
        "matrices": [replace(each, format="f32").entry() for each in matrices],
        "vectors": [(each.name, each.count) for each in vectors],
    }
    filled = native_models.fill(DeviceWeights(spec, shapes, torch.float32, torch.device("cpu")), spec, values)
    return ExternalModel(spec, DeviceExecutor(spec, filled, torch.float32, cache_limit))
