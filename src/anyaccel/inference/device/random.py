# SPDX-License-Identifier: Apache-2.0
"""The generator of csrc/llm/model/sampling.h: the same seed draws the same numbers whatever executes the model."""

from __future__ import annotations

_WORD = (1 << 64) - 1


class Random:
    """xoshiro256** (Blackman and Vigna, 2018), seeded by splitmix64."""

    def __init__(self, seed: int) -> None:
        self._state = []
        for _ in range(4):
            seed = (seed + 0x9E3779B97F4A7C15) & _WORD
            z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
            self._state.append(z ^ (z >> 31))

    def uniform(self) -> float:
        """In [0, 1)."""
        s = self._state
        result = (_rotate((s[1] * 5) & _WORD, 7) * 9) & _WORD
        shifted = (s[1] << 17) & _WORD
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = _rotate(s[3], 45)
        return (result >> 11) * 2.0**-53


def _rotate(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (64 - bits))) & _WORD
