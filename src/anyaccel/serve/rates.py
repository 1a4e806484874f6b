# SPDX-License-Identifier: Apache-2.0
"""How fast this machine is with this model, from the steps that were made; and how much a step may do."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest step
_FEW = 16  # tokens of a prompt in a step: what costs little more than one does
# Of fewer tokens the rate is lower, as all weights are read for them: the least is the first of these that takes no
# longer than so many seconds.
_ENOUGH, _ENOUGH_S = (64, 32), 0.5
_START = 200.0  # prompt tokens a second, before any were measured


class Rates:
    """Measured rates.

    Args:
        longest_step_s: what a running answer should wait for its next token at most; 0: four times what it waits when
            no prompt is processed, and 0.1 s at least.
        most: tokens of a prompt in a step, when nobody waits for a next token.
    """

    def __init__(self, longest_step_s: float = 0.0, most: int = 1024) -> None:
        self._longest = longest_step_s
        self._most = most
        self._prompt_rate = _START
        self._measured = False
        self._decode: dict[int, float] = {}  # answers in a step -> its seconds
        self._guess = (0, 0.0)  # the same of the last step that had prompts and more answers than any of those

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second."""
        return self._prompt_rate

    def decode_seconds(self, answers: int) -> float:
        """Of a step without prompts; 0.0 as long as none was measured."""
        if answers == 0 or not self._decode:
            return 0.0
        known, seconds = self._guess
        if answers > max(self._decode) and known > max(self._decode):
            return seconds * max(1.0, answers / known)
        return self._at_most(answers)

    def _at_most(self, answers: int) -> float:
        """What a step takes, or, of more answers than were ever measured, what it takes at most."""
        nearest = min(self._decode, key=lambda known: (abs(known - answers), known))
        return self._decode[nearest] * max(1.0, answers / nearest)

    def add(self, prompt_tokens: int, answers: int, seconds: float) -> None:
        """A step was made."""
        if seconds <= 0:
            return
        if prompt_tokens == 0:
            before = self._decode.get(answers, seconds)
            self._decode[answers] = before + _WEIGHT * (seconds - before)
            return
        if self._measured and self._decode and answers > (known := max(self._decode)):
            # No step without prompts had so many answers yet: what the prompts' rate leaves of this one is theirs.
            rest = seconds - prompt_tokens / self._prompt_rate
            self._guess = answers, min(max(rest, self._decode[known]), self._at_most(answers))
            return
        left = seconds - self.decode_seconds(answers)
        if left <= seconds / 10 or prompt_tokens < self._least:  # says nothing about prompts
            return
        rate = prompt_tokens / left
        self._prompt_rate += (rate - self._prompt_rate) * (_WEIGHT if self._measured else 1.0)
        self._measured = True

    def prompt_tokens(self, answers: int) -> int:
        """How many tokens of prompts a step may take that has so many answers under way."""
        if answers == 0:
            return self._most
        decode = self.decode_seconds(answers)
        longest = self._longest or max(0.1, 4 * decode)
        wanted = int((longest - decode) * self._prompt_rate) // _FEW * _FEW
        return max(self._least, min(wanted, self._most))

    @property
    def _least(self) -> int:
        return next((each for each in _ENOUGH if self._prompt_rate * _ENOUGH_S >= each), _FEW)
