# SPDX-License-Identifier: Apache-2.0
"""Adam's own: states from and to torch's AdamW, the fused optimizer on other devices, DeepSpeed's functions."""

from __future__ import annotations

import io

import pytest
import torch
from optimizer_cases import BF16, CASES, moments, new_gradients, parameters

from anyaccel.errors import UsageError
from anyaccel.ops import adam
from anyaccel.ops.adam import CPUAdam, FusedAdam, from_torch, to_torch
from anyaccel.ops.builders.cpu import (
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLionBuilder,
)
from anyaccel.ops.lion import CPULion

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}


def ours(params):
    return CPUAdam(params, **SETTINGS)


def torchs(params):
    return torch.optim.AdamW(params, **SETTINGS)


def steps(optimizer, params, numbers) -> None:
    for number in numbers:
        new_gradients(params, number)
        optimizer.step()


@pytest.mark.parametrize("convert", [True, False])
@pytest.mark.parametrize("first, second", [(ours, torchs), (torchs, ours)])
def test_50_steps_in_one_and_50_in_the_other_are_100_in_one(first, second, convert):
    params, only = parameters(seed=3), parameters(seed=3)
    begun = first(params)
    steps(begun, params, range(50))
    state = begun.state_dict()
    if convert:
        state = from_torch(state) if second is ours else to_torch(state)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    other = second(params)
    other.load_state_dict(state)
    steps(other, params, range(50, 100))
    steps(torchs(only), only, range(100))
    for param, wanted in zip(params, only, strict=True):
        torch.testing.assert_close(param, wanted, rtol=2e-6, atol=2e-6)


def test_conversion_of_what_the_other_side_lacks():
    params = parameters((4,), BF16)
    optimizer = CPUAdam(params, master_weights=True)
    optimizer.step()
    converted = to_torch(optimizer.state_dict())
    assert set(converted["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(converted)
    theirs.step()
    again = CPUAdam(params, master_weights=True)
    again.load_state_dict(theirs.state_dict())
    assert torch.equal(again.state[params[0]]["master"], params[0].float())
    assert again.state[params[0]]["exp_avg"].dtype == torch.float32
    with pytest.raises(UsageError, match="always corrects the bias"):
        to_torch(CPUAdam(params, bias_correction=False).state_dict())
    with pytest.raises(UsageError, match="amsgrad"):
        from_torch(torch.optim.AdamW(params, amsgrad=True).state_dict())


def test_the_mode_goes_along():
    params = parameters((4,))
    adam = CPUAdam(params)
    adam.load_state_dict(torch.optim.Adam(params).state_dict())
    assert adam.param_groups[0]["decoupled_weight_decay"] is False


def test_fused_adam_on_the_cpu_is_ours():
    params, twins = parameters(), parameters()
    fused = FusedAdam(params, adam_w_mode=False, **SETTINGS)
    steps(fused, params, range(5))
    steps(CPUAdam(twins, adamw_mode=False, **SETTINGS), twins, range(5))
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))
    fused.zero_grad()
    assert params[0].grad is None
    keeps = FusedAdam(parameters((3,)), set_grad_none=False)
    keeps.zero_grad()
    assert keeps.param_groups[0]["params"][0].grad.tolist() == [0.0] * 3


def test_fused_adam_on_a_device_is_torchs(monkeypatch):
    """The device's way, walked on the CPU with torch's fused kernels there."""
    params, twins = parameters((30, 40)), parameters((30, 40))
    fused, theirs = FusedAdam(params, **SETTINGS), torch.optim.AdamW(twins, fused=True, **SETTINGS)
    for number in range(3):
        new_gradients(params, number)
        new_gradients(twins, number)
        fused._step_on_device(fused.param_groups[0], params)
        theirs.step()
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


def test_fused_adam_on_two_kinds_of_memory(monkeypatch):
    on_device, on_host = torch.nn.Parameter(torch.ones(3, device="meta", dtype=BF16)), parameters((3,))[0]
    on_device.grad = torch.ones_like(on_device)
    both = FusedAdam([on_device, on_host])
    seen = []
    monkeypatch.setattr(both, "_step_on_device", lambda group, params: seen.append((group["lr"], params)))
    before = on_host.detach().clone()
    both.step()
    assert [(lr, len(params), params[0] is on_device) for lr, params in seen] == [(1e-3, 1, True)]
    assert not torch.equal(on_host, before)
    state = both._converted(on_device, {"step": 3, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)})
    assert state["step"].is_meta
    assert state["exp_avg"].dtype == BF16
    assert not adam._has_fused(torch.device("meta"))
    with pytest.raises(UsageError, match="bias_correction=True"):
        FusedAdam([on_device], bias_correction=False)


# DeepSpeed's functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_deepspeeds_functions_do_the_same(case):
    (param,), (twin,) = parameters((1000,)), parameters((1000,))
    settings = {**case.settings, "lr_decay": 0.0} if case.kind.__name__ == "CPUAdagrad" else case.settings
    optimizer = case.kind([param], **settings)
    op = {"CPUAdam": CPUAdamBuilder, "CPUAdagrad": CPUAdagradBuilder, "CPULion": CPULionBuilder}[
        case.kind.__name__
    ]().load()
    group = optimizer.param_groups[0]
    name = case.kind.__name__[3:].lower()
    state = [torch.zeros(1000) for _ in optimizer.MOMENTS]
    if name == "adam":
        op.create_adam(3, 1e-3, 0.9, 0.999, 1e-8, 0.0, group["decoupled_weight_decay"], True)
        rest = (*group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    elif name == "adagrad":
        op.create_adagrad(3)
        rest = (group["eps"], group["weight_decay"])
    else:
        op.create_lion(3)
        rest = (*group["betas"], group["weight_decay"])
    update = getattr(op, f"{name}_update")
    for step in (1, 2, 3):
        new_gradients([param], step)
        optimizer.step()
        assert update(3, step, group["lr"], *rest, twin.data, param.grad, *state) == 0
    assert torch.equal(param, twin)
    assert all(torch.equal(a, b) for a, b in zip(moments(optimizer, param), state, strict=True))
    assert getattr(op, f"destroy_{name}")(3) == 0
    with pytest.raises(UsageError, match=rf"no {name} optimizer 3: call create_{name}\(3, \.\.\.\) first"):
        update(3, 4, group["lr"], *rest, twin.data, param.grad, *state)


def test_adam_update_copy_and_rollback():
    op = CPUAdamBuilder().load()
    op.create_adam(0, weight_decay=0.1)
    param, grad = torch.randn(1000), torch.randn(1000)
    before, state = param.clone(), [torch.zeros(1000), torch.zeros(1000)]
    hyper = (1e-2, 0.9, 0.999, 1e-8, 0.1, True)
    for dtype in (BF16, torch.float32):
        copy = torch.zeros(1000, dtype=dtype)
        op.adam_update_copy(0, 1, *hyper, param, grad, *state, copy)
        assert torch.equal(copy, param.to(dtype))
        assert op.adam_rollback(0, 1, *hyper, param, grad, *state) == 0
        torch.testing.assert_close(param, before, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state[0], torch.zeros(1000), rtol=0, atol=1e-6)
    half, start = param.to(BF16), param.to(BF16)
    op.adam_update(0, 1, *hyper, half, grad.to(BF16), *state)
    assert not torch.equal(half, start)
    op.adam_rollback(0, 1, *hyper, half, grad.to(BF16), *state)  # ZeRO's offload of bf16 parameters
    torch.testing.assert_close(half, start, rtol=0.02, atol=0.01)
    with pytest.raises(UsageError, match="float32, bfloat16 or float16"):
        op.adam_rollback(0, 1, *hyper, param.double(), grad, *state)
    op.create_adam(1, adamw_mode=False)
    with pytest.raises(UsageError, match="AdamW only"):
        op.adam_rollback(1, 1, *hyper, param, grad, *state)


def test_multi_tensor_adam():
    params, twins = parameters((100, 200)), parameters((100, 200))
    CPUAdam(params, **SETTINGS).step()
    op = FusedAdamBuilder().load()
    zeros = [[torch.zeros_like(twin) for twin in twins] for _ in range(2)]
    lists = [[twin.grad for twin in twins], [twin.data for twin in twins], *zeros]
    before = twins[0].detach().clone()
    op.multi_tensor_adam(65536, torch.ones(1, dtype=torch.int32), lists, 1e-2, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)
    assert torch.equal(twins[0], before)
    op.multi_tensor_adam(65536, torch.zeros(1, dtype=torch.int32), lists, 1e-2, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1)
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


def test_multi_tensor_lion():
    params, twins = parameters((100, 200)), parameters((100, 200))
    CPULion(params, **SETTINGS).step()
    op = FusedLionBuilder().load()
    lists = [[twin.grad for twin in twins], [twin.data for twin in twins], [torch.zeros_like(twin) for twin in twins]]
    before = twins[0].detach().clone()
    op.multi_tensor_lion(65536, torch.ones(1, dtype=torch.int32), lists, 1e-2, 0.9, 0.999, 1, 0.1)
    assert torch.equal(twins[0], before)
    op.multi_tensor_lion(65536, torch.zeros(1, dtype=torch.int32), lists, 1e-2, 0.9, 0.999, 1, 0.1)
    assert all(torch.equal(param, twin) for param, twin in zip(params, twins, strict=True))


def test_loading_twice_gives_the_same_op():
    assert CPUAdamBuilder().load() is CPUAdamBuilder().load()
