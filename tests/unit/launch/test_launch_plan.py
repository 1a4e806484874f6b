# SPDX-License-Identifier: Apache-2.0
"""Planning: which rank gets which cores, memory and environment."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyaccel.errors import UsageError
from anyaccel.launch import LaunchOptions
from anyaccel.launch.plan.binding import bind_ranks, divide_core_list
from anyaccel.launch.plan.devices import count_devices
from anyaccel.launch.plan.memory import memory_policy
from anyaccel.launch.plan.options import BindingOptions
from anyaccel.launch.plan.plan import Equipment, HostPlace, build_plan
from anyaccel.launch.plan.planning import free_port, make_plan
from anyaccel.topology import Cpu, Machine, NumaNode


def machine(*cores_per_node, threads=1, allowed=None, memory=None):
    """Nodes with so many cores each; the second threads are numbered after all first ones."""
    total = sum(cores_per_node)
    node_of = [node for node, count in enumerate(cores_per_node) for _ in range(count)]
    cpus = tuple(
        Cpu(i, node=node_of[i % total], siblings=tuple(range(i % total, total * threads, total)))
        for i in range(total * threads)
    )
    nodes = tuple(
        NumaNode(node, tuple(cpu.id for cpu in cpus if cpu.node == node), 1 << 30)
        for node in range(len(cores_per_node))
    )
    return Machine(
        cpus,
        nodes,
        tuple(range(total * threads)) if allowed is None else tuple(allowed),
        tuple(range(len(nodes))) if memory is None else memory,
    )


@pytest.mark.parametrize(
    ("quota", "bound", "ranks", "threads"),
    [(None, True, 2, 4), (8, True, 2, 4), (3, True, 2, 1), (0.5, False, 2, 1), (5.9, False, 1, 5), (2, True, 4, 1)],
)
def test_threads_fit_into_the_time_that_a_cgroup_leaves(quota, bound, ranks, threads):
    limited = dataclasses.replace(machine(8), cpu_quota=quota)
    found = plan(limited, num_accelerators=ranks, bind_cores=bound)
    assert {binding.env["OMP_NUM_THREADS"] for binding in found.ranks} == {str(threads)}
    assert [f"leaves this job {quota:g} CPUs' time" in text for text in found.warnings] == (
        [True] if quota and quota < 8 else []
    )
    users = plan(limited, {"OMP_NUM_THREADS": "3"}, num_accelerators=ranks, bind_cores=bound)
    assert {binding.env["OMP_NUM_THREADS"] for binding in users.ranks} == {"3"}


def plan(machine, environ=None, extra_env=None, has=None, place=None, **options):
    return build_plan(
        LaunchOptions("x.py", **options),
        machine,
        has or Equipment(),
        master_port=1234,
        environ=environ or {},
        extra_env=extra_env,
        place=place or HostPlace(),
    )


def spread_cores(machine, ranks):
    found = bind_ranks(BindingOptions(bind_cores=True), machine, ranks)
    return [share.cores for share in found.ranks], found.left_over


def sizes(shares):
    return [len(share) for share in shares]


# core lists


def test_the_documented_example():
    cores = (*range(28), *range(32, 60))
    shares, left = divide_core_list(machine(32, 32), 4, cores)
    assert shares == [tuple(range(14)), tuple(range(14, 28)), tuple(range(32, 46)), tuple(range(46, 60))]
    assert left == ()


def test_a_list_is_divided_in_the_order_given_and_the_rest_is_named():
    assert divide_core_list(machine(8), 2, (5, 4, 1, 0, 7)) == ([(5, 4), (1, 0)], (7,))


@pytest.mark.parametrize(
    ("cores", "ranks", "message"),
    [
        ((0, 9), 1, r"CPU 9, which this machine does not have.*it has 0-3"),
        ((0, 3), 1, r"CPU 3, which this process may not use.*it may use 0-2"),
        ((0, 1), 3, r"3 workers cannot share the 2 CPUs of --bind_core_list 0-1"),
    ],
)
def test_lists_that_cannot_be(cores, ranks, message):
    with pytest.raises(UsageError, match=message):
        divide_core_list(machine(4, allowed=[0, 1, 2]), ranks, cores)


def test_cpus_that_the_kernel_keeps_apart_have_to_be_asked_for():
    isolated = dataclasses.replace(machine(4, allowed=[0, 1]), isolated_cpus=(2, 3))
    with pytest.raises(UsageError, match=r"names CPU 3,2, .*isolcpus=2-3.*`taskset -c 0,2-3`"):
        divide_core_list(isolated, 1, (0, 3, 2))


@pytest.mark.parametrize(
    ("allowed", "options", "environ", "warned"),
    [
        ((0, 1, 2, 3), {"bind_cores": True}, {}, True),
        ((0, 1, 2, 3), {"bind_cores": True, "num_accelerators": 2}, {}, True),
        ((0, 1, 2, 3), {"bind_cores": True, "num_accelerators": 4}, {}, False),  # a CPU each
        ((0, 1, 2, 3), {"num_accelerators": 2}, {}, True),
        ((0, 1), {"num_accelerators": 1}, {}, False),
        ((1, 2, 3), {"core_list": (2, 3)}, {"OMP_PROC_BIND": "false"}, True),
        ((1, 2, 3), {"core_list": (2, 3)}, {"OMP_PROC_BIND": "close"}, False),
    ],
)
def test_threads_that_stay_where_they_start(allowed, options, environ, warned):
    isolated = dataclasses.replace(machine(4, allowed=allowed), isolated_cpus=(2, 3))
    warnings = plan(isolated, environ, **options).warnings
    assert [text for text in warnings if "isolated" in text] == [text for text in warnings if "CPUs 2-3 are" in text]
    assert any("isolated" in text for text in warnings) == warned


# without a list


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        ((2,), 2, [(0,), (1,)]),
        ((4, 4), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((4, 4), 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ((4, 4), 3, [(0, 1), (2, 3), (4, 5)]),  # no rank straddles, all have the same number
        ((4, 4), 1, [tuple(range(8))]),  # one rank needs more than a node has
        ((2, 2, 2, 2), 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ((4, 4, 4, 4), 3, [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]),
        ((8, 8, 1), 2, [tuple(range(8)), tuple(range(8, 16))]),  # 9 each would straddle for one core more
        ((2, 6), 2, [(2, 3, 4), (5, 6, 7)]),
    ],
)
def test_spread(nodes, ranks, expected):
    assert spread_cores(machine(*nodes), ranks)[0] == expected


def test_spread_uses_one_thread_per_core_and_names_what_is_left():
    shares, left = spread_cores(machine(3, threads=2), 2)
    assert shares == [(0,), (1,)]
    assert left == (2,)


def test_more_ranks_than_cores():
    with pytest.raises(UsageError, match=r"3 workers .* only 2 cores \(CPU 0-3\); start at most 2"):
        spread_cores(machine(2, threads=2), 3)


@st.composite
def machines(draw):
    nodes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    threads = draw(st.sampled_from([1, 2, 4]))
    everything = range(sum(nodes) * threads)
    allowed = draw(st.sets(st.sampled_from(everything), min_size=1))
    return machine(*nodes, threads=threads, allowed=sorted(allowed))


@given(machines(), st.data())
def test_every_spread_plan_keeps_the_rules(found, data):
    cores = found.cores()
    ranks = data.draw(st.integers(1, len(cores)))
    shares, left = spread_cores(found, ranks)
    used = [core for share in shares for core in share]
    assert len(shares) == ranks
    assert len(set(sizes(shares))) == 1 and shares[0]
    assert len(set(used)) == len(used)
    assert set(used) <= set(found.allowed_cpus)
    assert len({found.cpu(core).core for core in used}) == len(used)
    assert sorted([*used, *left]) == [cpu.id for cpu in cores]
    node_of = {cpu.id: cpu.node for cpu in found.cpus}
    biggest = max(map(len, found.nodes_with_cores().values()))
    for share in shares:
        straddles = len({node_of[core] for core in share}) > 1
        assert not (straddles and biggest >= len(share))
    # Spread: nobody gets a second rank on a node while another node has room for one.
    if all(len({node_of[core] for core in share}) == 1 for share in shares):
        counts = dict.fromkeys(found.nodes_with_cores(), 0)
        for share in shares:
            counts[node_of[share[0]]] += 1
        room = {n: len(c) // len(shares[0]) for n, c in found.nodes_with_cores().items()}
        idle = [counts[node] for node in counts if counts[node] < room[node]]
        assert not idle or max(counts.values()) <= min(idle) + 1


@given(machines(), st.data())
def test_every_list_plan_keeps_the_rules(found, data):
    cores = data.draw(st.permutations(found.allowed_cpus))
    ranks = data.draw(st.integers(1, len(cores)))
    shares, left = divide_core_list(found, ranks, cores)
    assert [core for share in shares for core in share] + list(left) == list(cores)
    assert len(set(sizes(shares))) == 1
    assert len(left) < ranks


# memory


def test_memory_of_one_node_several_nodes_and_none():
    two = machine(2, 2)
    assert memory_policy(two, (2, 3)) == ("bind", (1,))
    assert memory_policy(two, (1, 2)) == ("default", ())
    assert memory_policy(machine(2, 2, memory=(0,)), (2, 3)) == ("default", ())


def test_memory_of_a_node_that_was_cut_into_several():
    cpus = (Cpu(0), Cpu(1))
    fake = Machine(cpus, (NumaNode(0, (0, 1), 1), NumaNode(1, (0, 1), 1)), (0, 1), (0, 1))
    assert memory_policy(fake, (0,)) == ("bind", (0, 1))


# the plan


def test_environment():
    found = plan(machine(4, 4), num_accelerators=2, bind_cores=True, extra_env={"MINE": "1", "RANK": "9"})
    assert found.ranks[1].env == {
        "MINE": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_PORT": "1234",
        "OMP_NUM_THREADS": "4",
        "OMP_PLACES": "{4},{5},{6},{7}",
        "OMP_PROC_BIND": "false",
    }


def test_unbound_workers_share_the_cores():
    found = plan(machine(5), num_accelerators=2)
    assert not found.bound
    assert [binding.env["OMP_NUM_THREADS"] for binding in found.ranks] == ["2", "2"]
    assert found.left_over == ()
    crowded = plan(machine(2), num_accelerators=4)
    assert crowded.ranks[0].env["OMP_NUM_THREADS"] == "1"
    assert crowded.notes == ("4 workers share 2 cores",)


@pytest.mark.parametrize("where", ["environ", "extra_env"])
def test_the_users_thread_count_is_kept_and_named(where):
    found = plan(machine(4), bind_cores=True, **{where: {"OMP_NUM_THREADS": "3"}})
    assert found.ranks[0].env["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS=3 is kept" in found.render()


def test_more_threads_than_cores_are_kept_with_a_warning():
    found = plan(machine(4), {"OMP_NUM_THREADS": "3,2"}, num_accelerators=2, bind_cores=True)
    assert found.warnings == ("OMP_NUM_THREADS=3,2 is kept as it was set, though a worker has only 2 CPUs",)
    assert "  warning: OMP_NUM_THREADS=3,2" in found.render()
    assert plan(machine(4), {"OMP_NUM_THREADS": "8"}).warnings == ()
    with pytest.raises(UsageError, match=r"OMP_NUM_THREADS=8 is kept .* that is an error because of --strict"):
        plan(machine(4), {"OMP_NUM_THREADS": "8"}, bind_cores=True, strict=True)


def test_what_the_user_set_for_openmp():
    found = plan(machine(4), {"GOMP_CPU_AFFINITY": "0-3"}, num_accelerators=2, bind_cores=True)
    assert [binding.env["GOMP_CPU_AFFINITY"] for binding in found.ranks] == ["0-1", "2-3"]
    assert "OMP_PLACES" not in found.ranks[0].env
    assert len(found.warnings) == 1
    assert "GOMP_CPU_AFFINITY" not in plan(machine(4), {"GOMP_CPU_AFFINITY": "0-3"}).ranks[0].env


def test_ranks_of_one_node_among_several():
    place = HostPlace(first_rank=3, world_size=5, node=1, nodes=2)
    found = plan(machine(4), num_accelerators=2, bind_cores=True, master_addr="n0", place=place)
    assert found.world_size == 5
    assert [binding.rank for binding in found.ranks] == [3, 4]
    wanted = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CROSS_RANK": "1",
        "CROSS_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "MASTER_ADDR": "n0",
    }
    assert wanted.items() <= found.ranks[1].env.items()
    assert found.render().startswith("plan: 2 of 5 workers here, 2 cores each, master n0:1234\n  rank 3: cores 0-1")


def test_slots_are_visible_devices():
    more = {"place": HostPlace(devices=(0, 2)), "has": Equipment(device_variable="CUDA_VISIBLE_DEVICES")}
    found = plan(machine(4), **more)
    assert [binding.env["CUDA_VISIBLE_DEVICES"] for binding in found.ranks] == ["0,2", "0,2"]
    assert found.notes == ()
    found = plan(machine(4), {"CUDA_VISIBLE_DEVICES": "4,5,6"}, **more)
    assert found.ranks[0].env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert found.notes == ("CUDA_VISIBLE_DEVICES=4,5,6 becomes 4,6 for the slots chosen",)
    assert len(plan(machine(4), place=HostPlace(devices=(0, 2))).ranks) == 2


def test_an_allocator_is_preloaded():
    found = plan(machine(2), {"LD_PRELOAD": "/x.so"}, has=Equipment(allocator="/l/jemalloc.so"))
    assert found.ranks[0].env["LD_PRELOAD"] == "/l/jemalloc.so:/x.so"
    assert found.notes == ("LD_PRELOAD=/x.so comes after /l/jemalloc.so",)


def test_reserved_cores_and_other_policies_are_shown():
    found = plan(machine(4, 4), num_accelerators=2, bind_cores=True, cores_reserved=1, memory_policy="preferred")
    assert found.render() == (
        "plan: 2 workers, 3 cores each, master 127.0.0.1:1234\n"
        "  rank 0: cores 0-2, memory first of node 0, OMP_NUM_THREADS=3\n"
        "  rank 1: cores 4-6, memory first of node 1, OMP_NUM_THREADS=3\n"
        "  reserved cores: 3,7\n"
        "  left-over cores: none"
    )
    assert found.to_dict()["reserved_cores"] == [3, 7]
    unbound = plan(machine(2, 2), memory_policy="interleave").render()
    assert "  rank 0: any core, memory in turn of node 0-1, OMP_NUM_THREADS=4" in unbound


def test_workers_with_different_numbers_of_cores():
    found = plan(machine(4, 4), num_accelerators=3, bind_cores=True, has=Equipment(device_nodes=(0, 0, 1)))
    assert found.render().startswith("plan: 3 workers, 2 to 4 cores each")
    assert [binding.env["OMP_NUM_THREADS"] for binding in found.ranks] == ["2", "2", "4"]


def test_devices_address_and_port():
    found = plan(machine(4), has=Equipment(devices=3), master_addr="10.0.0.1", master_port=555)
    assert found.world_size == 3
    assert (found.master_addr, found.master_port) == ("10.0.0.1", 555)


def test_two_threads_of_a_core_in_a_list_are_named():
    assert "CPUs 1,5 are threads of one physical core" in plan(machine(4, threads=2), core_list=(1, 5)).notes


def test_rendering():
    assert plan(machine(4, 4), num_accelerators=3, bind_cores=True).render() == (
        "plan: 3 workers, 2 cores each, master 127.0.0.1:1234\n"
        "  rank 0: cores 0-1, memory of node 0, OMP_NUM_THREADS=2\n"
        "  rank 1: cores 2-3, memory of node 0, OMP_NUM_THREADS=2\n"
        "  rank 2: cores 4-5, memory of node 1, OMP_NUM_THREADS=2\n"
        "  left-over cores: 6-7"
    )
    assert plan(machine(1, 1), bind_cores=True).render() == (
        "plan: 1 worker, 2 cores each, master 127.0.0.1:1234\n"
        "  rank 0: cores 0-1, memory of any node, OMP_NUM_THREADS=2\n"
        "  left-over cores: none"
    )
    assert plan(machine(2)).render() == (
        "plan: 1 worker, not bound to cores, master 127.0.0.1:1234\n  rank 0: any core, OMP_NUM_THREADS=2"
    )


def test_json_round_trip():
    found = plan(machine(3), num_accelerators=2, bind_cores=True).to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["ranks"][1]["memory"] == {"policy": "bind", "nodes": [0]}
    assert found["left_over_cores"] == [2]


# what the machine is asked for


def device_tree(root, *names):
    (root / "dev").mkdir()
    for name in names:
        (root / "dev" / name).touch()


@pytest.mark.parametrize(
    ("environ", "devices", "count"),
    [
        ({}, 0, 2),
        ({}, 3, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, 4, 3),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, 1),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 0, 2),  # a stray one on a node without devices
        ({"CUDA_VISIBLE_DEVICES": ""}, 1, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, 3, 1),
        ({"HIP_VISIBLE_DEVICES": "0"}, 3, 3),  # means nothing to NVIDIA
        ({"DS_ACCELERATOR": "cpu"}, 3, 2),
        ({"DS_ACCELERATOR": "cuda"}, 1, 1),
        ({"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"}, 0, 2),  # no device files, as in WSL
        ({"DS_ACCELERATOR": "cuda", "HIP_VISIBLE_DEVICES": "0,1"}, 0, 2),
    ],
)
def test_device_count(environ, devices, count, tmp_path):
    device_tree(tmp_path, *(f"nvidia{number}" for number in range(devices)), "nvidiactl", "nvidia-uvm")
    assert count_devices(machine(1, 1), environ, str(tmp_path)) == count


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"HIP_VISIBLE_DEVICES": "0,1,2"}, 2),
        ({"DS_ACCELERATOR": "cpu"}, 3),
    ],
)
def test_device_count_on_rocm(environ, count, tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for node, gpu_id in enumerate(["0", "51110", "", "2842"]):
        (nodes / str(node)).mkdir(parents=True)
        (nodes / str(node) / "gpu_id").write_text(f"{gpu_id}\n")
    (nodes / "4").mkdir()  # its gpu_id cannot be read
    without_driver = count_devices(machine(1, 1, 1), {}, str(tmp_path))
    device_tree(tmp_path, "kfd")
    assert (without_driver, count_devices(machine(1, 1, 1), environ, str(tmp_path))) == (3, count)


def test_device_count_that_nobody_knows(tmp_path):
    with pytest.raises(UsageError, match=r"'mtia': cannot count .* give --num_accelerators"):
        count_devices(machine(1), {"DS_ACCELERATOR": "mtia"}, str(tmp_path))
    with pytest.raises(UsageError, match=r"'cuda': no device visible; check CUDA_VISIBLE_DEVICES"):
        count_devices(machine(1), {"DS_ACCELERATOR": "cuda"}, str(tmp_path / "nothing"))


def test_free_port():
    port = free_port()
    assert 1024 <= port <= 65535
    assert free_port(port) == port


def test_make_plan_asks_for_a_free_port():
    found = make_plan(LaunchOptions("x.py", num_accelerators=2), machine(2), environ={})
    assert found.master_port > 0
    assert found.world_size == 2
