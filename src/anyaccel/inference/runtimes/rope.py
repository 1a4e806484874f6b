# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies from a model's config, as transformers' modeling_rope_utils.py computes them. Torch-free.

Angles grow with the position, so a frequency that is one float32 rounding off shows at long contexts: the arithmetic
below rounds to float32 wherever transformers does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from anyaccel.errors import ModelError
from anyaccel.inference.runtimes.mapping import Unsupported
from anyaccel.inference.runtimes.model_config import Config, finite
from anyaccel.inference.runtimes.spec import Rope

DEFAULT_THETA = 10000.0
_MOST_VALUES = 1 << 16  # of a head, so that a damaged config does not fill the memory


def _f32(value: float) -> float:
    return ctypes.c_float(value).value


def rope_parameters(config: Config) -> dict[str, Any]:
    """The config's `rope_parameters`, completed from the places where older configs have them.

    transformers 5 writes one object; before it, there were `rope_theta`, `rope_scaling` (with "type" for "rope_type")
    and `partial_rotary_factor` beside it.
    """
    return _completed(config, _object(config.get("rope_scaling") or config.get("rope_parameters")))


def rope_parameters_of(config: Config, layer_type: str, theta: float, scaled: bool) -> dict[str, Any]:
    """As `rope_parameters`, for models that have one object for each layer type (Gemma 3, OLMo 3).

    Args:
        theta: when the object has none.
        scaled: an older config's `rope_scaling` is of this layer type.
    """
    given = _object(_object(config.get("rope_parameters")).get(layer_type))
    if scaled:
        given.update(_object(config.get("rope_scaling")))
    given.setdefault("rope_theta", theta)
    return _completed(config, given)


def _object(value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ModelError(f"config: rope_parameters={value!r} is not an object")
    return dict(value or {})


def _completed(config: Config, parameters: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise Unsupported("rope_parameters by layer type in this family")
    parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
    for name, default in (("rope_theta", DEFAULT_THETA), ("partial_rotary_factor", 1.0)):
        if parameters.get(name) is None:
            parameters[name] = config.get(name) if config.get(name) is not None else default
    if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        outside = config.get("original_max_position_embeddings")
        if outside is not None:
            parameters["original_max_position_embeddings"] = outside
        elif parameters.get("original_max_position_embeddings") is None:
            parameters["original_max_position_embeddings"] = config["max_position_embeddings"]
    return parameters


def rope(
    config: Config,
    head_dim: int,
    *,
    partial: bool = False,
    interleaved: bool = False,
    first: int = 0,
    parameters: Mapping[str, Any] | None = None,
) -> Rope:
    """Rotary positions.

    Args:
        head_dim: values of a head that may rotate.
        partial: the family rotates only `partial_rotary_factor` of them; the others ignore that factor.
        parameters: instead of the config's own.

    Raises:
        Unsupported: a rope type that the runtime lacks.
        ModelError: a parameter is missing or impossible.
    """
    given = rope_parameters(config) if parameters is None else parameters
    kind = given["rope_type"]
    factor = 1.0
    if partial and kind != "proportional":
        factor = _number(given, "partial_rotary_factor")
    elif kind not in ("default", "proportional") and _number(given, "partial_rotary_factor") != 1.0:
        raise Unsupported(f"partial_rotary_factor={given['partial_rotary_factor']!r} in this family")
    dim = int(head_dim * factor) if 0 < factor <= 1 else 0
    if not 2 <= dim <= _MOST_VALUES:
        raise ModelError(f"config: a head of {head_dim} values with partial_rotary_factor={factor} cannot rotate")
    variants = {
        "default": _default,
        "linear": _linear,
        "dynamic": _dynamic,
        "yarn": _yarn,
        "longrope": _longrope,
        "llama3": _llama3,
        "proportional": _proportional,
    }
    if not isinstance(kind, str) or kind not in variants:
        raise Unsupported(f"rope_type {kind!r}")
    values = variants[kind](config, given, dim)
    return Rope(**values, interleaved=interleaved, first=first)


def _number(parameters: Mapping[str, Any], name: str) -> float:
    return finite(parameters.get(name), f"rope_parameters: {name}")


def _powers(theta: float, dim: int, over: int | None = None) -> list[float]:
    """theta^(2i / dim) in float32."""
    return [_f32(math.pow(_f32(theta), _f32(i / (over or dim)))) for i in range(0, dim, 2)]


def _frequencies(parameters: Mapping[str, Any], dim: int) -> list[float]:
    return [_f32(1.0 / power) for power in _powers(_number(parameters, "rope_theta"), dim)]


def _default(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    return {"inv_freq": tuple(_frequencies(parameters, dim))}


def _linear(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    factor = _f32(_number(parameters, "factor"))
    return {"inv_freq": tuple(_f32(frequency / factor) for frequency in _frequencies(parameters, dim))}


def _proportional(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Gemma 4: the frequencies of a full rotation, all but the first ones zero."""
    factor = _f32(parameters.get("factor") or 1.0)
    rotated = int(_number(parameters, "partial_rotary_factor") * dim // 2)
    powers = _powers(_number(parameters, "rope_theta"), 2 * rotated, dim)
    frequencies = [_f32(_f32(1.0 / power) / factor) for power in powers]
    return {"inv_freq": tuple(frequencies + [0.0] * (dim // 2 - rotated))}


def _dynamic(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    if dim < 4:
        raise ModelError(f"config: rope_type 'dynamic' needs more than {dim} rotated values")
    return {
        "inv_freq": tuple(_frequencies(parameters, dim)),
        "dynamic_base": _number(parameters, "rope_theta"),
        "dynamic_factor": _number(parameters, "factor"),
        "dynamic_from": config.integer("max_position_embeddings"),
    }


def _context_ratio(config: Config, parameters: Mapping[str, Any]) -> float:
    """`factor`, or how much longer the context is than the one of the pretraining."""
    if parameters.get("factor") is not None:
        return _number(parameters, "factor")
    return config.integer("max_position_embeddings") / _number(parameters, "original_max_position_embeddings")


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Peng et al., "YaRN", 2023."""
    factor = _context_ratio(config, parameters)
    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = (
            yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor)
        )
    theta = _number(parameters, "rope_theta")
    original = _number(parameters, "original_max_position_embeddings")

    def boundary(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(parameters.get("beta_fast") or 32)
    high = boundary(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i, power in enumerate(_powers(theta, dim)):
        ramp = _f32(_f32(i - _f32(low)) / _f32(high - low))
        kept = _f32(1.0 - min(max(ramp, 0.0), 1.0))
        stretched = _f32(_f32(1.0 / _f32(_f32(factor) * power)) * _f32(1.0 - kept))
        frequencies.append(_f32(stretched + _f32(_f32(1.0 / power) * kept)))
    return {"inv_freq": tuple(frequencies), "scale": float(scale)}


def _longrope(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Ding et al., "LongRoPE", 2024."""
    factor = _context_ratio(config, parameters)
    original = _number(parameters, "original_max_position_embeddings")
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    powers = _powers(_number(parameters, "rope_theta"), dim)
    frequencies = {}
    for name in ("short_factor", "long_factor"):
        factors = parameters.get(name)
        if not isinstance(factors, list | tuple) or len(factors) != dim // 2:
            raise ModelError(f"config: rope_parameters: {name} needs {dim // 2} numbers")
        frequencies[name] = tuple(
            _f32(1.0 / _f32(_f32(float(each)) * power)) for each, power in zip(factors, powers, strict=True)
        )
    return {
        "inv_freq": frequencies["short_factor"],
        "scale": float(scale),
        "long_inv_freq": frequencies["long_factor"],
        "long_scale": float(scale),
        "long_from": int(original),
    }


def _llama3(config: Config, parameters: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Llama 3.1: long wavelengths are stretched, short ones are not, those between a part of it."""
    factor, low, high = (_number(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(parameters, "original_max_position_embeddings")
    frequencies = []
    for frequency in _frequencies(parameters, dim):
        wavelength = _f32(_f32(2 * math.pi) / frequency)
        if wavelength > _f32(original / low):
            frequency = _f32(frequency / _f32(factor))
        elif wavelength >= _f32(original / high):
            smooth = _f32(_f32(_f32(original / wavelength) - _f32(low)) / _f32(high - low))
            stretched = _f32(_f32(_f32(1.0 - smooth) * frequency) / _f32(factor))
            frequency = _f32(stretched + _f32(smooth * frequency))
        frequencies.append(frequency)
    return {"inv_freq": tuple(frequencies)}
