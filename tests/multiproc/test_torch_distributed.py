# SPDX-License-Identifier: Apache-2.0
"""torch's own DistributedTest on `shm`: what passes on gloo passes here, or a reason is given below."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Tests of torch that pass on gloo at 2 or 4 ranks, and why each does not here.
REASONS = {
    "test_monitored_barrier_gloo": "torch.distributed.monitored_barrier refuses all but gloo, by name",
    "test_monitored_barrier_gloo_subgroup": "torch.distributed.monitored_barrier refuses all but gloo, by name",
    "test_monitored_barrier_gloo_rank_0_timeout": "asks for gloo's wording of an error; ours names the ranks that lack",
}


def outcomes(backend: str, world: int) -> dict[str, tuple[str, str]]:
    program = Path(__file__).with_name("torch_distributed_test.py")
    done = subprocess.run(
        [sys.executable, str(program), backend, str(world)], capture_output=True, text=True, timeout=1500, check=False
    )
    lines = [line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith("TEST ")]
    assert lines, done.stderr[-2000:]
    return {name: (outcome, why) for _, name, outcome, why in lines}


@pytest.mark.slow
@pytest.mark.timeout(3200)
@pytest.mark.parametrize("world", [2, 4])
def test_what_passes_on_gloo_passes(world: int) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need expecttest: pip install expecttest")
    gloo = {name for name, (outcome, _) in outcomes("gloo", world).items() if outcome == "ok"}
    assert len(gloo) > 80  # they did run
    ours = outcomes("shm", world)
    worse = {name: ours[name] for name in gloo if ours[name][0] != "ok" and name not in REASONS}
    assert not worse
    unneeded = {name for name in REASONS if name in gloo and ours[name][0] == "ok"}
    assert not unneeded, "these pass: take them out of REASONS"
    unknown = REASONS.keys() - gloo
    assert not unknown, "gloo does not pass these: take them out of REASONS"
