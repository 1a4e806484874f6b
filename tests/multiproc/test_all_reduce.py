# SPDX-License-Identifier: Apache-2.0
"""inference_all_reduce on real ranks: results, layouts, groups, failures."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

import ranks
from anyaccel import _native, comm, errors
from anyaccel.env import ISA_NAMES

SHM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Around the thresholds of csrc/comm: one element, vector tails, the small path's limit, several chunks.
SIZES = (1, 2, 7, 64, 1000, 8191, 16384, 16385, 100_003, 1_000_001)


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What rank `rank` contributes; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-1000, 1000, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator).to(dtype)


def expected_sum(members: list[int], count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The documented result: fp32 accumulation in rank order, rounded once; exact for integers."""
    wide = torch.float32 if dtype in SHM_DTYPES else dtype
    total = values(members[0], count, dtype, seed).to(wide)
    for rank in members[1:]:
        total = total + values(rank, count, dtype, seed).to(wide)
    return total.to(dtype)


def same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype in (torch.bfloat16, torch.float16):
        got, want = got.view(torch.int16), want.view(torch.int16)
    assert torch.equal(got, want), f"{what}: {int((got != want).sum())} of {got.numel()} elements differ"


def check_results(sizes: tuple[int, ...], large: int) -> None:
    world, rank = comm.get_world_size(), comm.get_rank()
    everyone = list(range(world))
    for dtype in (*SHM_DTYPES, torch.int64):
        for seed, count in enumerate((*sizes, large)):
            tensor = values(rank, count, dtype, seed)
            returned = comm.inference_all_reduce(tensor)
            assert returned is tensor
            same_bits(tensor, expected_sum(everyone, count, dtype, seed), f"{dtype} x {count}")
        # Strided: every second column of a transposed matrix, and nothing beside it changes.
        whole = torch.full((40, 26), 7, dtype=dtype)
        view = whole.t()[:, ::2]
        view.copy_(values(rank, view.numel(), dtype).view_as(view))
        comm.inference_all_reduce(view)
        want = expected_sum(everyone, view.numel(), dtype).view_as(view)
        same_bits(view.contiguous(), want, f"strided {dtype}")
        assert bool((whole.t()[:, 1::2] == 7).all())
        # One rank's tensor is dense and the others' are not.
        mixed = values(rank, 64, dtype)
        if rank != 0:
            spread = torch.zeros(128, dtype=dtype)
            spread[::2] = mixed
            mixed = spread[::2]
        comm.inference_all_reduce(mixed)
        same_bits(mixed.contiguous(), expected_sum(everyone, 64, dtype), f"mixed layouts {dtype}")
        empty = torch.empty(0, 3, dtype=dtype)
        assert comm.inference_all_reduce(empty) is empty


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sum_is_right_for_each_dtype_layout_and_size(world_size: int) -> None:
    ranks.run(check_results, world_size, SIZES, 10_000_000 if world_size == 2 else 300_000)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sum_is_right_up_to_ten_million_elements(world_size: int) -> None:
    ranks.run(check_results, world_size, SIZES, 10_000_000)


def check_other_operations() -> None:
    world, rank = comm.get_world_size(), comm.get_rank()
    tensor = torch.tensor([float(rank), -float(rank)])
    assert comm.inference_all_reduce(tensor.clone(), op=comm.ReduceOp.MAX).tolist() == [world - 1.0, 0.0]
    assert comm.inference_all_reduce(tensor.clone(), op=comm.ReduceOp.MIN).tolist() == [0.0, 1.0 - world]
    mean = sum(range(world)) / world
    assert comm.inference_all_reduce(tensor.clone(), op=comm.ReduceOp.AVG).tolist() == [mean, -mean]
    factors = torch.tensor([2.0, rank + 1.0])
    product = comm.inference_all_reduce(factors, op=comm.ReduceOp.PRODUCT)
    assert product.tolist() == [2.0**world, float(torch.arange(1, world + 1).prod())]
    double = values(rank, 1000, torch.float64)
    comm.inference_all_reduce(double)
    torch.testing.assert_close(double, expected_sum(list(range(world)), 1000, torch.float64))
    received = torch.full((70_001,), rank, dtype=torch.int16)
    comm.inference_broadcast(received, src=world - 1)
    assert bool((received == world - 1).all())
    columns = torch.full((8, 6), rank).t()[:, ::2]
    comm.inference_broadcast(columns, src=0)
    assert bool((columns == 0).all())


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_operations_and_dtypes(world_size: int) -> None:
    ranks.run(check_other_operations, world_size)


def check_groups() -> None:
    rank = comm.get_rank()
    memberships = [[0, 1], [2, 3], [1, 3], [0, 2, 3]]
    groups = [comm.new_group(members) for members in memberships]
    for seed in range(50):
        for group, members in zip(groups, memberships, strict=True):
            if rank in members:
                count = 1 + 997 * seed
                tensor = values(rank, count, torch.bfloat16, seed)
                comm.inference_all_reduce(tensor, group=group)
                same_bits(tensor, expected_sum(members, count, torch.bfloat16, seed), f"group {members}")


def test_subgroups_do_not_disturb_one_another() -> None:
    ranks.run(check_groups, 4)


def check_random_order(repetitions: int, largest: int) -> int:
    """All ranks draw the same sizes; the sum of ones is known without computing it."""
    order = random.Random(5)
    world = comm.get_world_size()
    for _ in range(repetitions):
        dtype = order.choice(SHM_DTYPES)
        count = int(largest ** order.random())
        tensor = torch.ones(count, dtype=dtype)
        tensor[order.randrange(count)] = comm.get_rank()
        marked = tensor.float().sum()
        comm.inference_all_reduce(tensor)
        low, high = tensor.float().min(), tensor.float().max()
        assert low >= min(world, world * (world - 1) // 2)
        assert high <= max(world, world * (world - 1) // 2)
        assert (tensor != world).sum() <= 1, (count, dtype, marked)
    return repetitions


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_two_thousand_repetitions_in_random_order_of_sizes(world_size: int) -> None:
    assert ranks.run(check_random_order, world_size, 2000, 300_000) == [2000] * world_size


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ten_thousand_repetitions_up_to_ten_million_elements(world_size: int) -> None:
    assert ranks.run(check_random_order, world_size, 10_000, 10_000_000, timeout=850) == [10_000] * world_size


def sums_of_special_values() -> bytes:
    """Subnormals, infinities, NaNs, ties and overflow, for each dtype."""
    collected = b""
    for dtype in SHM_DTYPES:
        bits = torch.randint(
            -(2**31),
            2**31,
            (40_000,),
            generator=torch.Generator().manual_seed(7 + comm.get_rank()),
            dtype=torch.int64,
        )
        raw = bits.to(torch.int32) if dtype == torch.float32 else bits.to(torch.int16)
        tensor = raw.view(dtype).clone()
        comm.inference_all_reduce(tensor)
        collected += tensor.view(raw.dtype).numpy().tobytes()
    return collected


def test_every_instruction_set_gives_the_same_bits() -> None:
    best = _native.isa()
    variants = ISA_NAMES
    usable = variants[: variants.index(best) + 1]
    results = {isa: ranks.run(sums_of_special_values, 2, ANYACCEL_ISA=isa) for isa in usable}
    for isa, (first, second) in results.items():
        assert first == second, f"ranks differ with {isa}"
        assert first == results["scalar"][0], f"{isa} differs from scalar"


def mapped_bytes() -> tuple[int, list[str]]:
    comm.inference_all_reduce(torch.ones(1_000_000))
    comm.barrier()
    size, names = 0, []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:anyaccel" in line or "/dev/shm/anyaccel" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            size += end - begin
            names.append(line.split(maxsplit=5)[5])
    return size, names


@pytest.mark.parametrize("world_size", [2, 4])
def test_footprint_is_small_and_has_no_name(world_size: int) -> None:
    for size, names in ranks.run(mapped_bytes, world_size):
        assert len(names) == world_size
        assert 0 < size < 16 << 20
        assert all(name.endswith("(deleted)") for name in names)


# --- failures: every one is an error within a deadline, and nothing stays behind ----------------------------------


def reduce_until_error(victim: int, how: str, folder: Path) -> tuple[str, str, float]:
    """Reduce for ever; `victim` kills, stops or misbehaves after a while. Returns the error the others get."""
    rank = comm.get_rank()
    tensor = torch.ones(50_000)
    for step in range(1_000_000):
        if rank == victim and step == 200:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                ranks.wait_for_marks(folder, 1 - rank)  # past the deadline of the other one, which is 2 s
            elif how == "size":
                tensor = torch.ones(49_999)
            elif how == "dtype":
                tensor = torch.ones(50_000, dtype=torch.bfloat16)
        try:
            comm.inference_all_reduce(tensor)
        except errors.CommError as error:
            with pytest.raises(errors.CommError, match="broken by an earlier error"):
                comm.inference_all_reduce(tensor)
            os.write(1, f"{type(error).__name__}|{error}\n".encode())
            ranks.mark(folder)
            os._exit(17)  # the group is gone, so the usual barrier at the end would hang
        tensor.fill_(1)
    raise AssertionError("no error came")


def failure(how: str, world_size: int, victim: int, tmp_path: Path, **env: str) -> list[tuple[int, str]]:
    processes = ranks.start(reduce_until_error, world_size, (victim, how, tmp_path), tmp_path, **env)
    return ranks.finish(processes, tmp_path, timeout=60)


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_killed_rank_is_an_error_on_the_others(world_size: int, victim: int, tmp_path: Path) -> None:
    outcome = failure("kill", world_size, victim, tmp_path)
    assert outcome[victim][0] == -signal.SIGKILL
    for rank, (code, output) in enumerate(outcome):
        if rank == victim:
            continue
        assert code == 17, output
        name, text = output.strip().splitlines()[-1].split("|", 1)
        assert name in ("PeerLostError", "CommError"), output
        assert f"rank {victim}" in text or "has given up" in text
        assert "all_reduce of 50000 float32" in text


def test_rank_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    outcome = failure("stop", 2, 1, tmp_path, ANYACCEL_COMM_TIMEOUT="2")
    name, text = outcome[0][1].strip().splitlines()[-1].split("|", 1)
    assert (outcome[0][0], name) == (17, "CommTimeoutError"), outcome
    assert "did not come within the timeout of 2 s" in text
    # The late rank is told that the other one has given up.
    assert outcome[1][0] == 17, outcome
    assert "rank 0" in outcome[1][1]


@pytest.mark.parametrize("how", ["size", "dtype"])
def test_calls_that_differ_are_named(how: str, tmp_path: Path) -> None:
    for code, output in failure(how, 2, 1, tmp_path):
        assert code == 17, output
        assert "ranks disagree" in output
        assert "all_reduce of 50000 float32" in output
        assert ("49999 float32" if how == "size" else "50000 bfloat16") in output


def wait_for_ctrl_c(folder: Path) -> str:
    comm.inference_all_reduce(torch.ones(4))
    if comm.get_rank() == 1:
        ranks.wait_for_marks(folder, 0)
        os._exit(0)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        comm.inference_all_reduce(torch.ones(4))
    except KeyboardInterrupt:
        os.write(1, b"interrupted")
        ranks.mark(folder)
        os._exit(0)
    return "no interrupt"


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(wait_for_ctrl_c, 2, (tmp_path,), tmp_path), tmp_path)
    assert [code for code, _ in outcome] == [0, 0], outcome
    assert outcome[0][1].endswith("interrupted")  # while the other rank was still there: it waits for this


def reduce_without_room() -> float:
    tensor = torch.full((1000,), 2.0)
    comm.inference_all_reduce(tensor)
    return float(tensor.mean())


def test_full_shared_memory_falls_back_to_torch() -> None:
    assert ranks.run(reduce_without_room, 2, ANYACCEL_SHM_BYTES=str(1 << 50)) == [4.0, 4.0]


def test_no_group_is_a_clear_error() -> None:
    with pytest.raises(errors.UsageError, match="init_distributed"):
        comm.inference_all_reduce(torch.ones(1))


def test_buffers_of_a_few_lines() -> None:
    """A chunk is smaller than the least the large path would like to use."""
    ranks.run(check_results, 2, (1, 1000, 40_000), 100_003, ANYACCEL_SHM_BYTES="4096")


def without_local_size() -> tuple[float, list[str]]:
    for name in ("LOCAL_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    tensor = torch.full((1000,), 2.0)
    comm.inference_all_reduce(tensor)
    _, names = mapped_bytes()
    return float(tensor.mean()), [name for name in names if not name.endswith("(deleted)")]


def test_no_variable_of_a_launcher_is_needed_and_nothing_is_left() -> None:
    assert ranks.run(without_local_size, 2) == [(4.0, [])] * 2


def leave_the_group(folder: Path) -> str:
    comm.inference_all_reduce(torch.ones(4))
    if comm.get_rank() == 1:
        comm.destroy_process_group()
        ranks.wait_for_marks(folder, 0)
        os._exit(0)
    try:
        comm.inference_all_reduce(torch.ones(4))
    except errors.CommError as error:
        os.write(1, str(error).encode())
        ranks.mark(folder)
        os._exit(0)
    return "no error"


def test_a_rank_that_leaves_the_group_is_noticed(tmp_path: Path) -> None:
    outcome = ranks.finish(ranks.start(leave_the_group, 2, (tmp_path,), tmp_path), tmp_path)
    assert [code for code, _ in outcome] == [0, 0], outcome
    text = outcome[0][1]  # told while that process was still there: it waits for this
    assert "rank 1" in text
    assert "left the group" in text


def broadcast_views() -> tuple[complex, float]:
    conjugate = torch.full((4,), complex(1, comm.get_rank() + 1)).conj()
    comm.inference_broadcast(conjugate, src=1)
    negative = torch.full((4,), complex(0, comm.get_rank() + 1.0)).conj().imag
    comm.inference_all_reduce(negative)
    return complex(conjugate.resolve_conj()[0]), float(negative[0])


def test_conjugate_and_negative_views_are_their_values() -> None:
    assert ranks.run(broadcast_views, 2) == [(complex(1, -2), -3.0)] * 2


def start_with(**wrong: str) -> str:
    comm.destroy_process_group()
    os.environ.update(wrong)
    try:
        comm.init_distributed("gloo")
    except errors.AnyAccelError as error:
        message = f"{type(error).__name__}: {error}"
    else:
        message = "accepted"
    os.write(1, message.encode())
    os._exit(0)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("WORLD_SIZE", "0", "UsageError: RANK=0, WORLD_SIZE=0"),
        ("MASTER_PORT", "99999", "MASTER_PORT=99999"),
        ("RANK", "one", "UsageError: RANK='one' is not a whole number"),
        ("MASTER_ADDR", "", "UsageError: MASTER_ADDR not set"),
        ("ANYACCEL_ISA", "sse9", "UsageError: ANYACCEL_ISA='sse9'"),
        ("ANYACCEL_COMM_TIMEOUT", "inf", "UsageError: ANYACCEL_COMM_TIMEOUT='inf'"),
    ],
)
def test_wrong_environment_is_one_clear_error(name: str, value: str, text: str, tmp_path: Path) -> None:
    ((code, output),) = ranks.finish(ranks.start(start_with_one, 1, (name, value), tmp_path), tmp_path)
    assert code == 0, output
    assert text in output


def start_with_one(name: str, value: str) -> str:
    return start_with(**{name: value})


def start_on_ipv6() -> str:
    comm.destroy_process_group()
    os.environ["MASTER_ADDR"] = "::1"
    comm.init_distributed("gloo")
    return str(float(comm.inference_all_reduce(torch.ones(2))[0]))


def test_ipv6_loopback() -> None:
    if not Path("/proc/net/if_inet6").exists() or "lo" not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no IPv6 loopback address")
    assert ranks.run(start_on_ipv6, 2) == ["2.0", "2.0"]
