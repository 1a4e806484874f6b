# SPDX-License-Identifier: Apache-2.0
"""What programs for CUDA do, each a function: test_as_cuda.py runs them all in one process that is in the mode.

`python as_cuda_cases.py` prints one JSON object: name -> "ok" or the error.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import anyaccel.cuda  # noqa: F401  the mode

CASES: dict[str, Callable[[], object]] = {}


def case(function: Callable[[], object]) -> Callable[[], object]:
    CASES[function.__name__] = function
    return function


def raises(kind: Any, call: Callable[[], object], text: str = "") -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind}")


@case
def questions_about_the_device() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() >= 1
    assert torch.cuda.is_initialized()
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name != ""
    assert torch.cuda.get_device_properties("cuda:0").total_memory > 1 << 20
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert torch.cuda.get_device_capability() == (0, 0)  # older than any GPU: programs take their plainest way
    assert torch.cuda.get_device_properties(0).major == 0
    assert isinstance(torch.cuda.memory_summary(), str)
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


@case
def devices_stay_what_the_program_has_written() -> None:
    device = torch.device("cuda:0")
    assert device.type == "cuda"
    assert device.index == 0
    assert type(device) is torch.device
    assert isinstance(device, torch.device)
    assert torch.device("cuda", 1) == torch.device("cuda:1")


@case
def tensors_are_made_and_moved() -> None:
    for device in ("cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0):
        made = (torch.zeros(2, device=device), torch.tensor([1.0], device=device), torch.arange(3, device=device))
        made += (torch.empty_like(made[0], device=device), made[0].new_ones(2, device=device), torch.eye(2).to(device))
        made += (torch.ones(2).to(device=device, dtype=torch.float64), torch.ones(2).cuda(device))
        made += (
            torch.randn(2, 2, device=device),
            torch.randint(0, 2, (2,), device=device),
            torch.full((2,), 1.0, device=device),
        )
        made += (torch.as_tensor([1], device=device), torch.from_numpy(made[1].numpy()).to(device, non_blocking=True))
        assert all(each.is_cuda for each in made)
    assert torch.ones(2).to("cuda", torch.bfloat16).dtype == torch.bfloat16
    assert torch.ones(2).to("cuda", torch.float16, True).dtype == torch.float16
    assert torch.cuda.FloatTensor([1, 2]).sum() == 3
    assert torch.cuda.LongTensor(3).dtype == torch.int64
    assert isinstance(torch.ones(2).cuda(), torch.cuda.FloatTensor)
    assert torch.ones(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.ones(2).type(torch.cuda.IntTensor).dtype == torch.int32
    assert torch.ones(2).pin_memory().cuda(non_blocking=True).sum() == 2
    assert torch.empty(2, pin_memory=True).shape == (2,)


@case
def copies_stay_copies() -> None:
    host = torch.zeros(3)
    device = host.cuda()
    device += 1
    assert host.sum() == 0
    snapshot = device.cpu()
    device += 1
    assert snapshot.sum() == 3
    again = device.to("cpu")
    device += 1
    assert again.sum() == 6
    moved = host.to("cuda")
    host += 5
    assert moved.sum() == 0
    model = nn.Linear(2, 2)
    kept = dict(model.state_dict())
    parameter = model.weight
    model.cuda()
    assert model.weight is parameter  # an optimizer that has it goes on working
    with torch.no_grad():
        model.weight += 1
    assert not torch.equal(kept["weight"], model.weight)
    best = {name: each.cpu() for name, each in model.state_dict().items()}
    with torch.no_grad():
        model.weight += 1
    assert not torch.equal(best["weight"], model.weight)
    same = torch.ones(2)
    assert same.to(torch.float32) is same  # no copy where a GPU makes none


@case
def modules() -> None:
    for make in (
        lambda m: m.cuda(),
        lambda m: m.to("cuda"),
        lambda m: m.to(device=torch.device("cuda:0")),
        lambda m: m.to(0),
    ):
        model = make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        assert model(torch.randn(3, 4, device="cuda")).shape == (3, 4)
        assert next(model.parameters()).is_cuda
    assert nn.Linear(2, 2, device="cuda").weight.is_cuda
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.is_cuda
    torch.nn.DataParallel(nn.Linear(2, 2).cuda(), device_ids=[0])(torch.ones(1, 2).cuda()).sum().backward()
    copy.deepcopy(nn.Linear(2, 2).cuda())
    nn.Linear(2, 2, device="meta").to_empty(device="cuda")


@case
def default_devices() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.ones(2).is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("meta"):
        assert torch.ones(2).is_meta
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    torch.set_default_tensor_type(torch.cuda.DoubleTensor)
    assert torch.ones(2).dtype == torch.float64
    torch.set_default_tensor_type(torch.FloatTensor)


@case
def random_numbers() -> None:
    torch.manual_seed(3)
    first = torch.randn(2, device="cuda")
    torch.cuda.manual_seed(3)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.randn(2, device="cuda"), first)
    state = torch.cuda.get_rng_state()
    second = torch.rand(2, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(2, device="cuda"), second)
    states = torch.cuda.get_rng_state_all()
    torch.cuda.set_rng_state_all(states)
    generator = torch.Generator(device="cuda").manual_seed(5)
    assert isinstance(generator, torch.Generator)
    assert torch.randn(2, generator=generator, device="cuda").shape == (2,)
    assert isinstance(torch.cuda.initial_seed(), int)


@case
def streams_events_and_memory() -> None:
    stream = torch.cuda.Stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(2, device="cuda")
        x.record_stream(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    torch.cuda.synchronize(device=torch.device("cuda:0"))
    assert start.elapsed_time(end) >= 0
    assert isinstance(stream, torch.cuda.Stream)
    for call in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        assert getattr(torch.cuda, call)(0) > 0
        assert getattr(torch.cuda.memory, call)() > 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    torch.cuda.ipc_collect()
    torch.cuda.nvtx.range_push("part")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("part {}", 1):
        pass


@case
def mixed_precision() -> None:
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.cuda.amp", FutureWarning)
        for scaler in (torch.cuda.amp.GradScaler(), torch.amp.GradScaler("cuda"), torch.GradScaler()):
            for context in (
                torch.cuda.amp.autocast(),
                torch.autocast("cuda", dtype=torch.float16),
                torch.autocast(device_type="cuda"),
                torch.amp.autocast("cuda", torch.bfloat16),
            ):
                with context:
                    loss = model(torch.ones(2, 4, device="cuda")).sum()
                assert loss.dtype == torch.float32  # off on a CPU unless asked for
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


@case
def checkpoints() -> None:
    model = nn.Linear(2, 2).cuda()
    state = {"model": model.state_dict(), "step": 3}
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save(state, file, **options)
        for location in (
            "cuda",
            "cuda:0",
            torch.device("cuda"),
            {"cuda:0": "cpu"},
            lambda s, _l: s.cuda(),
            lambda s, _l: s,
            None,
        ):
            file.seek(0)
            loaded = torch.load(file, map_location=location)
            assert torch.equal(loaded["model"]["weight"], model.weight)
    # As a checkpoint that was saved on a GPU says where its tensors were.
    file = io.BytesIO()
    tag = torch.serialization.location_tag
    torch.serialization.location_tag = lambda _storage: "cuda:0"
    try:
        torch.save(state, file)
    finally:
        torch.serialization.location_tag = tag
    for location in (None, "cpu", "cuda", {"cuda:0": "cuda:0"}, lambda s, _l: s):
        file.seek(0)
        assert torch.equal(torch.load(file, map_location=location)["model"]["weight"], model.weight)


@case
def torch_keeps_the_truth() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2, pin_memory=True):
            assert batch[0].cuda().sum() == 4
    assert not torch.accelerator.is_available()
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, device="cuda"))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()


@case
def optimizers_that_torchscript_compiles() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    assert ZeroRedundancyOptimizer.__name__


@case
def libraries_with_code_of_their_own_for_cuda_get_the_truth() -> None:
    """faiss refuses tensors of CUDA for an index on the CPU, and would give their memory to CUDA's code for others."""
    x = torch.ones(2).cuda()
    assert x.is_cuda
    assert not eval("x.is_cuda", {"__name__": "faiss.contrib.torch_utils", "x": x})


@case
def compiled_functions() -> None:
    device = torch.device("cuda")
    table: dict[str, Callable[[Any], Any]] = {
        "zeros": lambda x: x + torch.zeros(3, device="cuda"),
        "arange": lambda x: x + torch.arange(3, device=device),
        "to": lambda x: x.to("cuda") + 1,
        "to device": lambda x: x.to(device) + 1,
        "cuda": lambda x: x.cuda() + 1,
        "new": lambda x: x.new_zeros(3, device="cuda") + x,
        "like": lambda x: torch.ones_like(x, device="cuda") + x,
        "device": lambda x: x + torch.zeros(3, device=torch.device("cuda")),
        "available": lambda x: x + 1 if torch.cuda.is_available() else x,
    }
    for name, function in table.items():
        want = function(torch.ones(3))
        assert torch.equal(torch.compile(function, fullgraph=True, backend="eager")(torch.ones(3)), want), name
        torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).cuda(), backend="aot_eager")
    with torch.autocast("cuda", dtype=torch.float16):
        model(torch.ones(2, 4, device="cuda")).sum().backward()


@case
def torchscript() -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3) + torch.arange(3)

    assert scripted(torch.ones(3).cuda()).sum() == 6
    traced = torch.jit.trace(nn.Linear(2, 2).cuda(), torch.ones(1, 2).cuda())
    with tempfile.TemporaryDirectory() as folder:
        torch.jit.save(traced, Path(folder) / "m.pt")
        torch.jit.load(Path(folder) / "m.pt", map_location="cuda")(torch.ones(1, 2))


@case
def what_there_is_not_is_one_error_that_names_it() -> None:
    from anyaccel.errors import CapabilityError

    for call in (
        lambda: torch.cuda.temperature(),
        lambda: torch.cuda.utilization(),
        lambda: torch.cuda.CUDAGraph(),
        lambda: torch.cuda.cudart(),
    ):
        raises(CapabilityError, call, "torch.cuda.")
    from torch.utils.cpp_extension import CUDAExtension, load

    raises(ImportError, lambda: CUDAExtension("fast_ops", ["fast.cu"]), "fast_ops")
    raises(ImportError, lambda: load(name="fused", sources=["a.cpp", "a.cu"]), "fused")


@case
def process_groups() -> None:
    import torch.distributed as dist

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            assert dist.is_nccl_available()
            x = torch.ones(2, device="cuda")
            dist.all_reduce(x)
            dist.barrier(device_ids=[0])
            model = nn.parallel.DistributedDataParallel(
                nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))).cuda(),
                device_ids=[0],
                output_device=0,
            )
            model(torch.randn(4, 2).cuda()).sum().backward()
            group = dist.new_group([0], backend="nccl")
            dist.all_reduce(x, group=group)
            mesh = dist.init_device_mesh("cuda", (1,))
            assert mesh.size() == 1
        finally:
            dist.destroy_process_group()


@case
def copies_of_what_lies_in_host_memory() -> None:
    import numpy

    for make in (torch.as_tensor, torch.asarray):
        for data in (numpy.ones(3), torch.ones(3)):
            made = make(data, device="cuda")
            made += 1
            assert data.sum() == 3, make
    leaf = torch.zeros(3, device="cuda", requires_grad=True)
    leaf.to("cuda").sum().backward()
    assert leaf.grad is not None
    assert leaf.cuda().is_leaf
    assert leaf.to("cuda:0").is_leaf
    assert not leaf.detach().cuda().data_ptr() == leaf.data_ptr() != leaf.detach().cpu().data_ptr()


@case
def indices_of_devices_wherever_torch_parses_them() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), [3, 2])
    assert packed.to(0).is_cuda
    assert nn.Linear(2, 2, device="meta").to_empty(device=0).weight.is_cuda
    assert nn.Linear(2, 2).to(0, torch.float64).weight.dtype == torch.float64


@case
def random_states_are_kept() -> None:
    for options in ({"devices": [0]}, {}, {"device_type": "cuda"}, {"devices": ["cuda:0"]}):
        torch.manual_seed(1)
        with torch.random.fork_rng(**options):
            torch.randn(2, device="cuda")
        after = torch.randn(2, device="cuda")
        torch.manual_seed(1)
        assert torch.equal(after, torch.randn(2, device="cuda"))


@case
def attention_with_kernels_of_a_gpu_only() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.randn(1, 2, 8, 16).cuda()
    attend = nn.functional.scaled_dot_product_attention
    for kinds in ([SDPBackend.CUDNN_ATTENTION], [SDPBackend.EFFICIENT_ATTENTION], SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(kinds):
            assert torch.allclose(attend(x, x, x), attend(x.cpu(), x, x))
            attend(x, x, x, dropout_p=0.1)
    torch.backends.cuda.enable_math_sdp(False)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        attend(x, x, x)


@case
def limits_ranges_and_old_names() -> None:
    torch.cuda.set_per_process_memory_fraction(0.5)
    torch.cuda.memory.set_per_process_memory_fraction(0.5, 0)
    with torch.cuda.profiler.profile():
        pass
    places = torch.tensor([[0, 1], [1, 0]])
    assert torch.cuda.sparse.FloatTensor(places, torch.ones(2), torch.Size([2, 2])).to_dense()[0, 1] == 1


@case
def compiled_code_that_asks_torch_cuda() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        return x + torch.cuda.current_device() + torch.cuda.device_count()

    compiled = torch.compile(step, backend="aot_eager")
    x = torch.ones(2).cuda()
    for _ in range(2):
        assert torch.equal(compiled(x), step(x))


@case
def sharded_models() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            for options in ({"device_id": torch.cuda.current_device()}, {"device_id": torch.device("cuda:0")}, {}):
                model: Any = FullyShardedDataParallel(nn.Linear(2, 2).cuda(), **options)
                model(torch.ones(1, 2).cuda()).sum().backward()
            model = nn.Linear(2, 2).cuda()
            fully_shard(model)
            model(torch.ones(1, 2).cuda()).sum().backward()
        finally:
            dist.destroy_process_group()


@case
def wrappers_of_models() -> None:
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    def step(model: Any) -> None:
        model(torch.ones(4, 2, device="cuda")).square().mean().backward()
        assert any(p.grad is not None for p in model.parameters())

    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("nccl", init_method=f"file://{store.name}", rank=0, world_size=1)
        try:
            assert dist.is_backend_available("nccl")
            assert dist.is_backend_available("cpu:gloo,cuda:nccl")
            layers = [nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).cuda() for _ in range(4)]
            step(FSDP(layers[0], device_id=torch.cuda.current_device(), sync_module_states=True))
            step(FSDP(layers[1]))
            hooked: Any = nn.parallel.DistributedDataParallel(layers[2], device_ids=[0])
            hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
            step(hooked)
            # torch asks for NCCL's classes where it is told that NCCL is there.
            step(torch.compile(nn.parallel.DistributedDataParallel(layers[3], device_ids=[0]), backend="aot_eager"))
            world: Any = dist.group.WORLD
            assert dist.distributed_c10d._get_process_group_uid(world) == -1
            dist.distributed_c10d._abort_process_group()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@case
def the_parts_of_data_parallel() -> None:
    """Programs that put them together on their own get what the module alone computes, gradients included."""
    from torch.nn.parallel import gather, parallel_apply, replicate, scatter
    from torch.nn.parallel.scatter_gather import scatter_kwargs

    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.0)).cuda(), torch.rand(4, 3, device="cuda")
    expected = module(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    inputs, named = scatter_kwargs((x,), {}, [0, 1])
    assert [one.shape for (one,) in inputs] == [(2, 3), (2, 3)]
    outputs = parallel_apply(replicate(module, [0, 1]), inputs, named, [0, 1])
    result = gather(outputs, 0)
    assert torch.equal(result, expected)
    result.square().sum().backward()
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    norm = nn.BatchNorm1d(3)
    for replica, part in zip(replicate(norm, ["cuda:0", "cuda:1"]), scatter(x, [0, 1]), strict=True):
        replica(part)
    torch.testing.assert_close(norm.running_mean, 0.1 * x[:2].mean(0), msg="only the first replica shares buffers")
    assert torch.equal(torch.cuda.comm.reduce_add([x, x], 0), 2 * x)
    assert [one.shape for one in torch.cuda.comm.scatter(x, [0, 1], chunk_sizes=[1, 3])] == [(1, 3), (3, 3)]


@case
def generators_nested_tensors_and_capturable_optimizers() -> None:
    torch.cuda.manual_seed(3)
    assert torch.cuda.default_generators[torch.cuda.current_device()].initial_seed() == 3
    assert len(torch.cuda.default_generators) == torch.cuda.device_count()
    assert torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda").is_cuda
    found = []
    for capturable in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.AdamW(linear.parameters(), capturable=capturable)
        for _ in range(3):
            linear(torch.ones(1, 2, device="cuda")).sum().backward()
            optimizer.step()
        found.append(linear.weight.detach())
    torch.testing.assert_close(*found)
    from anyaccel.errors import CapabilityError

    assert torch.cuda.nccl.version() >= (2, 10)  # as torchtune asks before it computes in bfloat16
    raises(CapabilityError, torch.cuda.nccl.unique_id, "nccl.unique_id")


@case
def models_are_placed_by_who_knows_all_accelerators() -> None:
    from accelerate.utils.modeling import get_max_memory, infer_auto_device_map

    assert all(isinstance(device, str) for device in get_max_memory()), "an index is CUDA's to torch.device()"
    assert set(infer_auto_device_map(nn.Sequential(nn.Linear(2, 2))).values()) <= {"cpu", "mps"}


def main() -> None:
    found = {}
    for name, function in CASES.items():
        try:
            function()
            found[name] = "ok"
        except BaseException:  # noqa: BLE001  it is told to the test
            found[name] = traceback.format_exc()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
