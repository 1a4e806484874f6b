# SPDX-License-Identifier: Apache-2.0
"""comm.log_summary(): what is counted, with which sizes, and who was late."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from anyaccel import comm
from anyaccel.comm import log


@pytest.fixture(autouse=True)
def _clean() -> Any:
    log.configure(enabled=False)
    log.reset()
    yield
    log.configure(enabled=False)
    log.reset()


def test_bandwidths_are_those_of_nccls_tests() -> None:
    # 1 MB in 1 ms is 8.39 Gbit/s; on 4 ranks an all-reduce moves 2 * 3/4 of it over each link.
    algorithm, bus = log.bandwidths("all_reduce", 1 << 20, 1e-3, 4)
    assert algorithm == pytest.approx(8.388608)
    assert bus == pytest.approx(8.388608 * 1.5)
    assert log.bandwidths("all_gather", 1 << 20, 1e-3, 4) == pytest.approx((4 * 8.388608, 3 * 8.388608))
    assert log.bandwidths("reduce_scatter", 1 << 20, 1e-3, 4)[1] == pytest.approx(0.75 * 8.388608)
    assert log.bandwidths("broadcast", 1 << 20, 1e-3, 4) == pytest.approx((8.388608, 8.388608))
    assert log.bandwidths("barrier", 0, 0.0, 4) == (0.0, 0.0)


class _Group:
    group_name = "0"

    def size(self) -> int:
        return 4


def test_an_entry_keeps_a_sample_of_many_calls() -> None:
    log.configure()
    for call in range(10_000):
        log.record("all_reduce", 64, float(call), _Group())
    (entry,) = log.entries()
    assert entry.count == 10_000
    assert entry.seconds == sum(range(10_000))
    assert 400 <= len(entry.samples) <= 1000
    assert sum(entry.samples) / len(entry.samples) == pytest.approx(5000, rel=0.05)  # of all, not of the first


def test_a_summary_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    for seconds in (1e-3, 1e-3, 1e-3):
        log.record("all_reduce", 65536, seconds, _Group())
    found = comm.log_summary(show_straggler=True, return_dict=True)
    assert found is not None
    figure = found["summary"]["all_reduce"][65536]
    assert figure["count"] == 3
    assert figure["total_latency_ms"] == pytest.approx(3)
    assert figure["avg_latency_ms"] == pytest.approx(1)
    assert figure["tput_avg_gbps"] == pytest.approx(65536 * 8e-9 / 1e-3)
    assert figure["msg_size_str"] == "64 KB"
    assert figure["straggler_rank"] is None  # of one rank
    assert found["straggler_analysis"]["all_reduce"][65536]["total_straggler_ms"] == pytest.approx(0)
    assert found["metadata"]["world_size"] == 1
    text = capsys.readouterr().out
    assert text.startswith("Comm. Op            Message Size        Count               Total Latency(ms)")
    assert "64 KB               3                   3" in text
    assert "Breakdown with straggler effect" in text
    assert comm.log_summary() is None


def use(backend: str) -> tuple[dict[str, Any], list[tuple[str, int, int]]]:
    group = dist.new_group(backend=backend)
    tensor = torch.ones(4096)
    dist.all_reduce(tensor, group=group)  # not recorded: it is off
    assert log.entries() == []
    log.configure()
    store = dist.distributed_c10d._get_default_store()
    for step in range(5):
        if dist.get_rank() == 1:
            store.wait([f"rank 0 begins {step}"])
            time.sleep(0.15)
        else:
            store.set(f"rank 0 begins {step}", "")
        dist.all_reduce(tensor, group=group)
    dist.all_gather_into_tensor(torch.zeros(2 * 4096), tensor, group=group)
    work = dist.broadcast(tensor[:16], src=0, group=group, async_op=True)
    work.wait()
    if backend == "shm":
        comm.inference_all_reduce(tensor[:100], group=group)
    dist.barrier(group=group)
    found = comm.log_summary(show_straggler=True, return_dict=True)
    log.configure(enabled=False)
    dist.all_reduce(tensor, group=group)
    return found or {}, [(entry.op, entry.size, entry.count) for entry in log.entries()]


def test_a_real_group_and_its_straggler() -> None:
    (first, entries), (second, _) = ranks.run(use, 2, "shm")
    assert [entry for entry in entries if entry[0] != "barrier"] == [
        ("all_gather", 16384, 1),
        ("all_reduce", 400, 1),
        ("all_reduce", 16384, 5),
        ("broadcast", 64, 1),
    ]
    assert first["summary"] == second["summary"]  # on every rank
    figure = first["summary"]["all_reduce"][16384]
    assert figure["count"] == 5
    assert figure["straggler_rank"] == 1  # it slept
    assert figure["avg_latency_ms"] > 90  # rank 0 waited for it
    late = first["straggler_analysis"]["all_reduce"][16384]
    assert late["total_straggler_ms"] > 450
    assert late["total_comm_lat_ms"] < figure["total_latency_ms"]


def switched_on() -> int:
    group = dist.new_group(backend="shm")
    dist.all_reduce(torch.ones(4), group=group)
    return sum(entry.count for entry in log.entries() if entry.op == "all_reduce")


def test_the_environment_switches_it_on() -> None:
    assert ranks.run(switched_on, 2, ANYACCEL_COMMS_LOG="1") == [1, 1]
