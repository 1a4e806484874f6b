# SPDX-License-Identifier: Apache-2.0
"""The interface that gym had before gymnasium, for programs of that time: `reset` gives a state, `step` four values."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces  # noqa: F401


class Wrapper:
    """An environment of gymnasium with the old methods."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "_max_episode_steps":
            return self.env.spec.max_episode_steps
        return getattr(self.env, name)

    def seed(self, seed: int | None = None) -> None:
        self.env.reset(seed=seed)

    def reset(self) -> Any:
        return self.env.reset()[0]

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        state, reward, ended, cut, about = self.env.step(action)
        return state, float(reward), ended or cut, about


def make(name: str, **options: Any) -> Wrapper:
    return Wrapper(gymnasium.make(name, **options))
