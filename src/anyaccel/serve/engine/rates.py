# SPDX-License-Identifier: Apache-2.0
"""The measured speed of this machine with this model, and the number of prompt tokens that a step may compute."""

from __future__ import annotations

_NEWEST_WEIGHT = 0.2  # of the newest step in the moving averages
_CHUNK_UNIT = 16  # a chunk of a prompt is a multiple of this; so few tokens cost little more than one
# Smaller chunks are slower per token, as each step reads all weights. A chunk has at least the first of these lengths
# that takes at most `_LEAST_CHUNK_S`.
_LEAST_CHUNKS, _LEAST_CHUNK_S = (64, 32), 0.5
_INITIAL_RATE = 200.0  # prompt tokens a second, before the first measurement


class Rates:
    """Measured rates.

    Args:
        longest_step_s: the longest step while answers run; 0: four times a step without prompts, and at least 0.1 s.
        most: prompt tokens of a step while no answer runs.
    """

    def __init__(self, longest_step_s: float = 0.0, most: int = 1024) -> None:
        self._longest = longest_step_s
        self._most = most
        self._prompt_rate = _INITIAL_RATE
        self._measured = False
        self._decode: dict[int, float] = {}  # number of answers in a step without prompts -> its seconds
        self._estimate = (0, 0.0)  # such a pair, from a step that had prompts too and more answers than any of those

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return self._prompt_rate

    def decode_seconds(self, answers: int) -> float:
        """The duration of a step without prompts; 0.0 before the first one was measured."""
        if answers == 0 or not self._decode:
            return 0.0
        known, seconds = self._estimate
        if answers > max(self._decode) and known > max(self._decode):
            return seconds * max(1.0, answers / known)
        return self._upper_bound(answers)

    def _upper_bound(self, answers: int) -> float:
        """The measured duration; for more answers than were ever measured, a bound in proportion to their number."""
        nearest = min(self._decode, key=lambda known: (abs(known - answers), known))
        return self._decode[nearest] * max(1.0, answers / nearest)

    def add(self, prompt_tokens: int, answers: int, seconds: float) -> None:
        """Learn from a step."""
        if seconds <= 0:
            return
        if prompt_tokens == 0:
            before = self._decode.get(answers, seconds)
            self._decode[answers] = before + _NEWEST_WEIGHT * (seconds - before)
            return
        if self._measured and self._decode and answers > (known := max(self._decode)):
            # No step without prompts had so many answers yet: subtract what the prompts' rate explains.
            rest = seconds - prompt_tokens / self._prompt_rate
            self._estimate = answers, min(max(rest, self._decode[known]), self._upper_bound(answers))
            return
        left = seconds - self.decode_seconds(answers)
        if left <= seconds / 10 or prompt_tokens < self._least:  # too little of the step is the prompts' to measure it
            return
        rate = prompt_tokens / left
        self._prompt_rate += (rate - self._prompt_rate) * (_NEWEST_WEIGHT if self._measured else 1.0)
        self._measured = True

    def prompt_tokens(self, answers: int) -> int:
        """The number of prompt tokens that a step with this number of answers may compute."""
        if answers == 0:
            return self._most
        decode = self.decode_seconds(answers)
        longest = self._longest or max(0.1, 4 * decode)
        wanted = int((longest - decode) * self._prompt_rate) // _CHUNK_UNIT * _CHUNK_UNIT
        return max(self._least, min(wanted, self._most))

    @property
    def _least(self) -> int:
        return next((each for each in _LEAST_CHUNKS if self._prompt_rate * _LEAST_CHUNK_S >= each), _CHUNK_UNIT)
