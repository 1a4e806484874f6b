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
from anyaccel.inference.families.model_config import Config
from anyaccel.inference.spec.decoder import Rope
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import Fields, short_repr

DEFAULT_THETA = 10000.0
_WHERE = "config: rope_parameters: "
_MOST_VALUES = 1 << 16  # of a head, so that a damaged config does not fill the memory


def _f32(value: float) -> float:
    return ctypes.c_float(value).value


def rope_parameters(config: Config) -> dict[str, Any]:
    """The config's `rope_parameters`, completed from the places where older configs have them.

    transformers 5 writes one object; before it, there were `rope_theta`, `rope_scaling` (with "type" for "rope_type")
    and `partial_rotary_factor` beside it.
    """
    return _completed(config, _object(config, "rope_scaling") or _object(config, "rope_parameters"))


def rope_parameters_of(config: Config, layer_type: str, theta: float, scaled: bool) -> dict[str, Any]:
    """As `rope_parameters`, for models that have one object for each layer type (Gemma 3, OLMo 3).

    Args:
        theta: when the object has none.
        scaled: an older config's `rope_scaling` is of this layer type.
    """
    given = config.mapping("rope_parameters").mapping(layer_type).known()
    if scaled:
        given.update(_object(config, "rope_scaling"))
    given.setdefault("rope_theta", theta)
    return _completed(config, given)


def _object(config: Config, name: str) -> dict[str, Any]:
    return config.mapping(name).known()


def _completed(config: Config, parameters: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise Unsupported("rope_parameters by layer type in this family")
    given = Fields(parameters, _WHERE)
    parameters["rope_type"] = given.text("rope_type", "") or given.text("type", "") or "default"
    for name, default in (("rope_theta", DEFAULT_THETA), ("partial_rotary_factor", 1.0)):
        if not given.has(name):
            parameters[name] = config.number(name, default)
    if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
        if config.has("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = config.integer("original_max_position_embeddings")
        elif not given.has("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = config.integer("max_position_embeddings")
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
    given = Fields(rope_parameters(config) if parameters is None else parameters, _WHERE)
    kind = given.text("rope_type")
    factor = 1.0
    if partial and kind != "proportional":
        factor = given.number("partial_rotary_factor")
    elif kind not in ("default", "proportional") and given.number("partial_rotary_factor") != 1.0:
        raise Unsupported(f"partial_rotary_factor={given.number('partial_rotary_factor')} in this family")
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
    if kind not in variants:
        raise Unsupported(f"rope_type {short_repr(kind)}")
    values = variants[kind](config, given, dim)
    for name in ("inv_freq", "long_inv_freq"):
        if not all(map(math.isfinite, values.get(name, ()))):
            raise ModelError(f"config: rope_parameters={short_repr(given.known())} give infinite frequencies")
    return Rope(**values, interleaved=interleaved, first=first)


def check_whole(parameters: Mapping[str, Any]) -> None:
    """Of families whose own code rotates whole heads, though its angles may be of a part of them.

    Raises:
        Unsupported: they are.
    """
    factor = Fields(parameters, _WHERE).number("partial_rotary_factor")
    if factor != 1.0:
        raise Unsupported(f"partial_rotary_factor={factor} in this family")


def _powers(theta: float, dim: int, over: int | None = None) -> list[float]:
    """theta^(2i / dim) in float32."""
    return [_f32(math.pow(_f32(theta), _f32(i / (over or dim)))) for i in range(0, dim, 2)]


def _frequencies(parameters: Fields, dim: int) -> list[float]:
    return [_f32(1.0 / power) for power in _powers(parameters.number("rope_theta", above=0.0), dim)]


def _default(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    return {"inv_freq": tuple(_frequencies(parameters, dim))}


def _linear(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    factor = _f32(parameters.number("factor", above=0.0))
    return {"inv_freq": tuple(_f32(frequency / factor) for frequency in _frequencies(parameters, dim))}


def _proportional(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    """Gemma 4: the frequencies of a full rotation, all but the first ones zero."""
    factor = _f32(parameters.number("factor", 1.0, above=0.0))
    rotated = int(parameters.number("partial_rotary_factor", above=0.0, maximum=1.0) * dim // 2)
    powers = _powers(parameters.number("rope_theta", above=0.0), 2 * rotated, dim)
    frequencies = [_f32(_f32(1.0 / power) / factor) for power in powers]
    return {"inv_freq": tuple(frequencies + [0.0] * (dim // 2 - rotated))}


def _dynamic(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    if dim < 4:
        raise ModelError(f"config: rope_type 'dynamic' needs more than {dim} rotated values")
    return {
        "inv_freq": tuple(_frequencies(parameters, dim)),
        "dynamic_base": parameters.number("rope_theta", above=0.0),
        "dynamic_factor": parameters.number("factor", above=0.0),
        "dynamic_from": config.integer("max_position_embeddings"),
    }


def _context_ratio(config: Config, parameters: Fields) -> float:
    """`factor`, or how much longer the context is than the one of the pretraining."""
    if parameters.has("factor"):
        return parameters.number("factor", above=0.0)
    return config.integer("max_position_embeddings") / _original(parameters)


def _original(parameters: Fields) -> int:
    """The context of the pretraining."""
    return parameters.get_int("original_max_position_embeddings", minimum=1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    """Peng et al., "YaRN", 2023."""
    factor = _context_ratio(config, parameters)
    if parameters.has("attention_factor"):
        scale = parameters.number("attention_factor")
    else:
        mscale, all_dim = (parameters.number(name, 0.0, minimum=0.0) for name in ("mscale", "mscale_all_dim"))
        scale = (
            yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim) if mscale and all_dim else yarn_mscale(factor)
        )
    theta = parameters.number("rope_theta", above=1.0)
    original = _original(parameters)

    def boundary(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = boundary(parameters.number("beta_fast", 0.0, minimum=0.0) or 32)
    high = boundary(parameters.number("beta_slow", 0.0, minimum=0.0) or 1)
    if parameters.get_bool("truncate", True):
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
    return {"inv_freq": tuple(frequencies), "scale": scale}


def _longrope(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    """Ding et al., "LongRoPE", 2024."""
    factor = _context_ratio(config, parameters)
    original = _original(parameters)
    if parameters.has("attention_factor"):
        scale = parameters.number("attention_factor")
    else:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(max(original, 2)))
    powers = _powers(parameters.number("rope_theta", above=0.0), dim)
    frequencies = {}
    for name in ("short_factor", "long_factor"):
        factors = parameters.numbers(name, dim // 2, above=0.0)
        frequencies[name] = tuple(
            _f32(1.0 / _f32(_f32(each) * power)) for each, power in zip(factors, powers, strict=True)
        )
    return {
        "inv_freq": frequencies["short_factor"],
        "scale": scale,
        "long_inv_freq": frequencies["long_factor"],
        "long_scale": scale,
        "long_from": original,
    }


def _llama3(config: Config, parameters: Fields, dim: int) -> dict[str, Any]:
    """Llama 3.1: long wavelengths are stretched, short ones are not, those between a part of it."""
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (parameters.number(name, above=0.0) for name in names)
    if low == high:
        raise ModelError(f"config: rope_parameters: low_freq_factor and high_freq_factor are both {low:g}")
    original = _original(parameters)
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
