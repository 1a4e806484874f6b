# SPDX-License-Identifier: Apache-2.0
"""Adam, Adagrad and Lion: each step against float64, 100 steps against torch, and torch's Optimizer contract."""

from __future__ import annotations

import copy
import os
import pickle
import weakref

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from optimizer_cases import BF16, CASES, DTYPES, F16, F32, SIZES, moments, new_gradients, parameters

from anyaccel.errors import UsageError
from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam, FusedAdam
from anyaccel.ops.lion import CPULion, FusedLion

ALL = (CPUAdam, CPUAdagrad, CPULion, FusedAdam)


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance to the next number of `dtype`, in float64."""
    info = torch.finfo(dtype)
    return value.abs().clamp(min=info.smallest_normal).log2().floor().exp2() * info.eps


# Results ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param_dtype, state_dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_step_equals_float64_to_rounding(case, param_dtype, state_dtype):
    params = parameters(dtype=param_dtype)
    optimizer = case.kind(params, state_dtype=state_dtype, **case.settings)
    for step in range(1, 6):
        new_gradients(params, step)
        before = []
        for param in params:
            state = moments(optimizer, param) if step > 1 else [torch.zeros_like(param)] * len(optimizer.MOMENTS)
            before.append([tensor.detach().double() for tensor in (param, param.grad, *state)])
        optimizer.step()
        for param, values in zip(params, before, strict=True):
            wanted = case.formula(*values, step=step, **case.settings)
            found = [param.detach(), *moments(optimizer, param)]
            # Calculating in fp32 rounds every term, and cancelling terms leave that; then there is one rounding more.
            terms = torch.stack([*(value.abs() for value in values), (wanted[0] - values[0]).abs()]).amax(0)
            for got, exact, dtype in zip(found, wanted, [param_dtype] + [state_dtype] * 2, strict=False):
                assert got.dtype == dtype
                bound = 0.51 * ulp(exact, dtype) + 8 * ulp(torch.maximum(exact.abs(), terms), F32)
                wrong = (got.double() - exact).abs() > bound
                if case.name == "lion" and got is found[0]:  # where the direction is nothing but rounding
                    wrong &= (0.9 * values[2] + 0.1 * values[1]).abs() > 1e-6 * values[2].abs()
                assert not wrong.any(), (got[wrong][:3], exact[wrong][:3], [value[wrong][:3] for value in values])
            assert optimizer.state[param]["step"] == step


@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_100_steps_of_adam_equal_torch_in_float64(adamw, weight_decay):
    params, exact, single = (parameters(seed=1) for _ in range(3))
    exact = [torch.nn.Parameter(param.detach().double()) for param in exact]
    theirs = torch.optim.AdamW if adamw else torch.optim.Adam
    settings = {"lr": 1e-2, "weight_decay": weight_decay}
    optimizers = [
        CPUAdam(params, adamw_mode=adamw, **settings), theirs(exact, **settings), theirs(single, **settings, fused=True)
    ]  # fmt: skip
    scheduled = [torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.3) for optimizer in optimizers]
    for step in range(100):
        for group in (params, exact, single):
            new_gradients(params, step)
            for param, source in zip(group, params, strict=True):
                param.grad = source.grad.to(param.dtype)
        for optimizer, scheduler in zip(optimizers, scheduled, strict=True):
            optimizer.step()
            scheduler.step()
    ours = max((param - other).abs().max().item() for param, other in zip(params, exact, strict=True))
    torchs = max((param - other).abs().max().item() for param, other in zip(single, exact, strict=True))
    assert ours <= max(1.5 * torchs, 1e-6)


def test_100_steps_of_adagrad_equal_torch_in_float64():
    params = parameters(seed=2)
    exact = [torch.nn.Parameter(param.detach().double()) for param in params]
    settings = {"lr": 1e-2, "weight_decay": 0.01, "lr_decay": 0.01, "initial_accumulator_value": 0.1}
    ours, theirs = CPUAdagrad(params, **settings), torch.optim.Adagrad(exact, **settings)
    for step in range(100):
        new_gradients(params, step)
        for param, other in zip(params, exact, strict=True):
            other.grad = param.grad.double()
        ours.step()
        theirs.step()
    assert max((param - other).abs().max().item() for param, other in zip(params, exact, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype, state_dtype", [(BF16, F32), (F16, BF16)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_master_weights(case, dtype, state_dtype):
    params = parameters(dtype=dtype)
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    ours = case.kind(params, state_dtype=state_dtype, master_weights=True, **case.settings)
    alone = case.kind(masters, state_dtype=state_dtype, **case.settings)
    for step in range(10):
        new_gradients(params, step)
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
        ours.step()
        alone.step()
    for param, master in zip(params, masters, strict=True):
        assert torch.equal(ours.state[param]["master"], master)
        assert torch.equal(param, master.to(dtype))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype, copy_dtype", [(F32, BF16), (F32, F16), (BF16, BF16), (F16, F16)])
def test_a_copy_of_the_parameters_in_the_same_pass(case, dtype, copy_dtype):
    # Together more than what is written past the caches.
    params = parameters((*SIZES, 2_200_000), dtype=dtype)
    plain = [torch.nn.Parameter(param.detach().clone()) for param in params]
    copies = {param: torch.full_like(param, torch.nan, dtype=copy_dtype) for param in params[:3] + params[4:]}
    optimizer, other = case.kind(params, **case.settings), case.kind(plain, **case.settings)
    optimizer.write_copies(copies)
    for step in range(3):
        new_gradients(params, step)
        for param, twin in zip(params, plain, strict=True):
            twin.grad = param.grad.clone()
        optimizer.step()
        other.step()
    for param, twin in zip(params, plain, strict=True):
        assert torch.equal(param, twin)
    for param, written in copies.items():
        assert torch.equal(param.detach().to(copy_dtype), written)
    last = {param: written.clone() for param, written in copies.items()}
    optimizer.write_copies(None)
    optimizer.step()
    assert all(torch.equal(last[param], copies[param]) for param in copies)


def test_copies_that_cannot_be():
    params = parameters((8,))
    optimizer = CPUAdam(params)
    for copies, words in [
        ({torch.zeros(8): torch.zeros(8, dtype=BF16)}, "not a parameter"),
        ({params[0]: torch.zeros(7, dtype=BF16)}, r"shape \(8,\)"),
        ({params[0]: torch.zeros(8)}, "bfloat16 or torch.float16, not torch.float32"),
    ]:
        with pytest.raises(UsageError, match=words):
            optimizer.write_copies(copies)
    half = parameters((8,), BF16)
    with pytest.raises(UsageError, match="second buffer already"):
        CPUAdam(half, master_weights=True).write_copies({half[0]: torch.zeros(8, dtype=BF16)})


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_tensors_at_once_are_as_each_alone(threads):
    sizes = [0, *range(1, 200, 7), 100_003, 0, 12_345, 4096, 0]
    together, alone = parameters(sizes), parameters(sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        CPUAdam(together, lr=0.1).step()
    finally:
        torch.set_num_threads(before)
    for param, twin in zip(together, alone, strict=True):
        CPUAdam([twin], lr=0.1).step()
        assert torch.equal(param, twin)


@hypothesis.given(
    sizes=strategies.lists(strategies.integers(0, 9000), min_size=1, max_size=12),
    offset=strategies.integers(0, 3),
    dtype=strategies.sampled_from((F32, BF16, F16)),
    threads=strategies.integers(1, 4),
)
@hypothesis.settings(max_examples=40)
def test_nothing_outside_a_parameter_is_written(sizes, offset, dtype, threads):
    """Parameters and moments that are windows of larger tensors, whatever their alignment."""
    guard = 7.0

    def window(size, values):
        whole = torch.full((size + 16,), guard, dtype=dtype)
        whole[offset : offset + size] = values
        return whole, whole[offset : offset + size]

    wholes, params = zip(*(window(size, torch.randn(size)) for size in sizes), strict=True)
    params = [torch.nn.Parameter(param) for param in params]
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for param, other in zip(params, copies, strict=True):
        param.grad = torch.ones_like(param)
        other.grad = torch.ones_like(param)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        CPUAdam(params).step()
        CPUAdam(copies).step()
    finally:
        torch.set_num_threads(before)
    for whole, param, other in zip(wholes, params, copies, strict=True):
        outside = torch.cat([whole[:offset], whole[offset + param.numel() :]])
        assert torch.equal(outside, torch.full_like(outside, guard))
        assert torch.equal(param, other)


def test_nan_infinity_and_huge_values_go_as_in_torch():
    values = torch.tensor(
        [0.0, -0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e19, 1e20, 3e38, float("inf"), -float("inf"), float("nan")]
    )
    param, grad = (tensor.flatten() for tensor in torch.meshgrid(values, values, indexing="ij"))
    ours, theirs = (torch.nn.Parameter(param.clone()) for _ in range(2))
    ours.grad, theirs.grad = grad.clone(), grad.clone()
    mine, other = CPUAdam([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.0, fused=True)
    for _ in range(3):
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for name in mine.MOMENTS:
        torch.testing.assert_close(mine.state[ours][name], other.state[theirs][name], equal_nan=True)


def test_lion_keeps_its_direction_after_infinite_gradients():
    """Its moment is infinite then, which is no reason for NaN as long as the sign stays."""
    grad = torch.tensor([float("inf"), -float("inf"), 3e38, 0.0] * 40)
    for dtype in (F32, BF16):
        param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=dtype))
        param.grad = grad.to(dtype)
        optimizer = CPULion([param], lr=0.5, betas=(0.9, 0.99))
        for _ in range(3):
            optimizer.step()
        assert param[:4].tolist() == [-1.5, 1.5, -1.5, 0.0] and bool((param.view(-1, 4) == param[:4]).all())
        assert not optimizer.state[param]["exp_avg"].isnan().any()
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param[:4].tolist() == [-2.0, 2.0, -2.0, -0.5]


# Gradients of embeddings ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_adagrad_takes_sparse_gradients_as_torch_does(dtype):
    torch.manual_seed(0)
    embeddings = [torch.nn.EmbeddingBag(50, 7, mode="sum", sparse=True, dtype=dtype) for _ in range(2)]
    linears = [torch.nn.Linear(7, 1, dtype=dtype) for _ in range(2)]
    for pair in (embeddings, linears):
        pair[1].load_state_dict(pair[0].state_dict())
    params = [[*one.parameters(), *other.parameters()] for one, other in zip(embeddings, linears, strict=True)]
    ours, theirs = CPUAdagrad(params[0], lr=0.1, lr_decay=0.1), torch.optim.Adagrad(params[1], lr=0.1, lr_decay=0.1)
    for turn in range(4):
        rows = torch.randint(0, 20, (8, 4))  # some twice, most never
        for embedding, linear, optimizer in zip(embeddings, linears, (ours, theirs), strict=True):
            optimizer.zero_grad(set_to_none=turn % 2 == 0)
            linear(embedding(rows)).pow(2).sum().backward()
            optimizer.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 0.1, "atol": 0.05}
    for mine, other in zip(*params, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)
        assert float(ours.state[mine]["step"]) == 4
    assert ours.state[params[0][0]]["sum"].count_nonzero(dim=1).gt(0).sum() <= 20
    assert bool((ours.state[params[0][0]]["sum"][20:] == 0).all())


def test_a_sparse_gradient_reaches_master_and_copy():
    weights = torch.arange(12, dtype=F32).view(4, 3)
    plain, half = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.to(BF16))
    copy = torch.zeros(4, 3, dtype=BF16)
    for param, optimizer in (
        (plain, CPUAdagrad([plain], lr=0.5, weight_decay=0.1)),
        (half, CPUAdagrad([half], lr=0.5, weight_decay=0.1, master_weights=True)),
    ):
        if param is plain:
            optimizer.write_copies({plain: copy})
        param.grad = torch.sparse_coo_tensor(
            [[1, 1, 3]], torch.ones(3, 3, dtype=param.dtype), (4, 3), check_invariants=True
        )
        for _ in range(3):
            optimizer.step()
    assert torch.equal(plain[::2], weights[::2]) and bool((plain[1::2] < weights[1::2]).all())
    assert torch.equal(copy[1::2], plain[1::2].to(BF16)) and not copy[::2].any()
    torch.testing.assert_close(optimizer.state[half]["master"], plain.detach())
    assert torch.equal(half, plain.to(BF16))
    half.grad = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 3, dtype=BF16), (4, 3), check_invariants=True)
    optimizer.step()
    assert torch.equal(half, plain.to(BF16)) and float(optimizer.state[half]["step"]) == 4


def test_lion_on_a_device_calculates_what_it_does_on_the_host():
    """Its operations are torch's: here they run on host memory."""
    host, device = parameters(), parameters()
    ours = CPULion(host, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    fused = FusedLion(device, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for turn in range(3):
        new_gradients(host, turn)
        new_gradients(device, turn)
        ours.step()
        fused._step_on_device(fused.param_groups[0], device)
    for mine, other in zip(host, device, strict=True):
        torch.testing.assert_close(mine, other)
        torch.testing.assert_close(moments(ours, mine), moments(fused, other))
        assert float(fused.state[other]["step"]) == 3
    FusedLion(device).step()
    fused.zero_grad()
    assert device[0].grad is None


# torch's contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ALL)
def test_closures_groups_and_missing_gradients(kind):
    first, second, third = parameters((5, 6, 7))
    optimizer = kind([{"params": [first]}, {"params": [second], "lr": 0.5}, {"params": [third]}], lr=0.0)
    third.grad = None
    before = [param.detach().clone() for param in (first, second, third)]

    def closure():
        assert torch.is_grad_enabled()
        loss = second.square().sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss == before[1].square().sum()
    assert torch.equal(first, before[0])
    assert torch.equal(third, before[2])
    assert not torch.equal(second, before[1])
    assert third not in optimizer.state
    assert optimizer.step() is None


@pytest.mark.parametrize("kind", [CPUAdam, CPULion, FusedAdam, FusedLion])
def test_sparse_gradients_are_refused(kind):
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = kind(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(UsageError, match=r"dense.*SparseAdam"):
        optimizer.step()
    assert torch.equal(embedding.weight, before)


@pytest.mark.parametrize("kind", ALL)
def test_what_the_kernels_cannot_take_is_refused(kind):
    name = kind.__name__
    with pytest.raises(UsageError, match=rf"{name} .*float32, bfloat16 or float16.*float64"):
        kind([torch.zeros(3, dtype=torch.float64)])
    with pytest.raises(UsageError, match=f"{name}: lr must be 0 or more, not -1"):
        kind(parameters((3,)), lr=-1)
    if kind is not FusedAdam:
        with pytest.raises(UsageError, match=r"host memory.*meta"):
            kind([torch.zeros(3, device="meta")])
        with pytest.raises(UsageError, match="state_dtype"):
            kind(parameters((3,)), state_dtype=F16)
    if kind is not CPULion:
        with pytest.raises(UsageError, match=f"{name} does not have amsgrad"):
            kind(parameters((3,)), amsgrad=True)
    optimizer = kind(parameters((3,)))
    with pytest.raises(UsageError):
        optimizer.add_param_group({"params": [torch.zeros(3, dtype=torch.complex64)]})
    assert len(optimizer.param_groups) == 1


def test_betas():
    with pytest.raises(UsageError, match="beta2 must be from 0 to below 1, not 1"):
        CPUAdam(parameters((3,)), betas=(0.9, 1.0))


@pytest.mark.parametrize("arrange", ["transposed", "channels_last", "gaps", "expanded gradient"])
@pytest.mark.parametrize("kind", [CPUAdam, CPULion])
def test_tensors_that_are_not_contiguous(kind, arrange):
    base = torch.randn(4, 6, 5, 8)
    if arrange == "transposed":
        param = base.transpose(0, 3)
    elif arrange == "channels_last":
        param = base.to(memory_format=torch.channels_last)
    elif arrange == "gaps":
        param = base[:, ::2, :, 1:5]
    else:
        param = base
    grad = torch.randn(param.shape) if arrange != "expanded gradient" else torch.randn(()).expand(param.shape)
    param = torch.nn.Parameter(param)
    twin = torch.nn.Parameter(param.detach().contiguous().clone())
    ours, other = kind([param], lr=0.1), kind([twin], lr=0.1)
    for _ in range(3):
        param.grad, twin.grad = grad, grad.contiguous()
        ours.step()
        other.step()
        assert torch.equal(param, twin)
    for name in ours.MOMENTS:
        assert torch.equal(ours.state[param][name], other.state[twin][name])


def test_what_moves_between_steps_is_found():
    """Everything that a step remembers for the next one may be exchanged by the user."""
    params, twins = parameters((100, 200)), parameters((100, 200))
    ours, theirs = CPUAdam(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)

    def step():
        for optimizer in (ours, theirs):
            optimizer.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)

    step()
    for pair in (params, twins):
        for param in pair:
            param.data = param.data * 2  # elsewhere
            param.grad = param.grad + 1
    step()
    for optimizer, pair in ((ours, params), (theirs, twins)):
        optimizer.state[pair[0]]["exp_avg"] = torch.ones(100)
        optimizer.state[pair[1]]["exp_avg_sq"].data = torch.ones(200)
    step()
    for optimizer, pair in ((ours, params), (theirs, twins)):
        optimizer.state[pair[0]] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.zeros(100),
            "exp_avg_sq": torch.ones(100),
        }
        pair[1].grad = None
    step()
    for optimizer in (ours, theirs):
        optimizer.state.clear()
    step()
    for pair in (params, twins):
        for param in pair:
            param.grad = torch.linspace(-1, 1, param.numel() * 2)[::2]
    step()
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["params"].reverse()
    step()


def test_a_square_parameter_that_is_transposed_where_it_lies():
    """Its address stays."""
    param, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6)) for _ in range(2))
    ours, theirs = CPUAdam([param], lr=0.1), torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    for _ in range(2):
        for each, optimizer in ((param, ours), (twin, theirs)):
            each.grad = torch.linspace(3, -2, 36).view(6, 6)
            optimizer.step()
            each.data = each.data.t()
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strided", [False, True])
def test_a_gradient_is_not_kept_after_the_step(strided):
    """It would be there beside the next one."""
    param = torch.nn.Parameter(torch.ones(100))
    optimizer = CPUAdam([param])
    for _ in range(2):
        memory = numpy.ones(200 if strided else 100, dtype=numpy.float32)
        gone = weakref.ref(memory)
        param.grad = torch.from_numpy(memory)[:: 2 if strided else 1]
        del memory
        optimizer.step()
        assert gone() is not None
        optimizer.zero_grad()
        assert gone() is None


def test_a_change_after_the_forward_pass_is_noticed_by_autograd():
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    loss = (param * param).sum()
    CPUAdam([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_in_a_child_after_fork():
    params = parameters((50_000,))
    optimizer = CPUAdam(params)
    optimizer.step()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# State ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("dtype, state_dtype", [(F32, F32), (BF16, F32), (F16, BF16)])
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[4]], ids=str)
def test_training_goes_on_the_same_after_saving(case, dtype, state_dtype, how):
    params = parameters((100, 33), dtype)
    options = {"state_dtype": state_dtype, "master_weights": dtype == F16}
    optimizer = case.kind(params, **options, **case.settings)
    optimizer.step()
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    if how == "state_dict":
        second = case.kind(others, **options, lr=0.5)
        second.load_state_dict(optimizer.state_dict())
    elif how == "pickle":
        second = pickle.loads(pickle.dumps(optimizer))
    else:
        second = copy.deepcopy(optimizer)
    others = second.param_groups[0]["params"]
    for step in (1, 2):
        new_gradients(params, step)
        new_gradients(others, step)
        optimizer.step()
        second.step()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
        for name, value in optimizer.state[param].items():
            loaded = second.state[other][name]
            assert torch.equal(loaded, value)
            assert loaded.dtype == value.dtype
            assert loaded.data_ptr() != value.data_ptr()


@pytest.mark.parametrize("kind, theirs", [(CPUAdam, torch.optim.AdamW), (CPUAdagrad, torch.optim.Adagrad)])
def test_states_that_cannot_be_loaded(kind, theirs):
    params = parameters((4,))
    optimizer = kind(params)
    optimizer.step()
    saved = theirs(params, maximize=True).state_dict()
    before = optimizer.state_dict()
    with pytest.raises(UsageError, match="does not have maximize"):
        optimizer.load_state_dict(saved)
    sgd = torch.optim.SGD(params, momentum=0.9)
    sgd.step()
    with pytest.raises(UsageError, match=r"has momentum_buffer; .* is missing"):
        optimizer.load_state_dict(sgd.state_dict())
    wrong = copy.deepcopy(before)
    name = kind.MOMENTS[0]
    wrong["state"][0][name] = torch.zeros(5)
    with pytest.raises(UsageError, match=rf"{name} has shape \(5,\), its parameter \(4,\)"):
        optimizer.load_state_dict(wrong)
    assert optimizer.param_groups[0].get("maximize") is not True
    assert torch.equal(optimizer.state[params[0]][name], before["state"][0][name])


def test_hooks_of_load_state_dict_count():
    params = parameters((4,))
    optimizer = CPUAdam(params)
    optimizer.step()
    saved = optimizer.state_dict()

    def hook(_, state_dict):
        return {**state_dict, "state": {0: {**state_dict["state"][0], "exp_avg": torch.full((4,), 3.0)}}}

    handle = optimizer.register_load_state_dict_pre_hook(hook)
    optimizer.load_state_dict(saved)
    handle.remove()
    assert optimizer.state[params[0]]["exp_avg"].tolist() == [3.0] * 4


def test_what_deepspeed_saved_is_understood():
    params = parameters((4,))
    state = {"step": 7, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    group = {
        "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0, "bias_correction": True, "amsgrad": False,
        "params": [0],
    }  # fmt: skip
    adam = CPUAdam(params, adamw_mode=False)
    adam.load_state_dict({"state": {0: state}, "param_groups": [group]})
    adam.step()
    assert adam.state[params[0]]["step"] == 8
    assert adam.param_groups[0]["decoupled_weight_decay"] is False
    adagrad = CPUAdagrad(params)
    group = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0, "amsgrad": False, "params": [0]}
    adagrad.load_state_dict({"state": {0: {"step": 7, "exp_avg_sq": torch.ones(4)}}, "param_groups": [group]})
    adagrad.step()
    assert set(adagrad.state[params[0]]) == {"step", "sum"}
