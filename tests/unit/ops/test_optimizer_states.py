# SPDX-License-Identifier: Apache-2.0
"""What somebody puts into the states and groups of an optimizer: used as it is, or refused, never read as another."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizer_cases import BF16, F16, F32, parameters

from anyaccel.errors import UsageError
from anyaccel.ops.adagrad import CPUAdagrad
from anyaccel.ops.adam import CPUAdam, FusedAdam
from anyaccel.ops.builders.cpu import FusedAdamBuilder
from anyaccel.ops.builders.host import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
from anyaccel.ops.lion import CPULion

PARAM = 64
KINDS = (CPUAdam, CPUAdagrad, CPULion)


def stepped(kind, **settings):
    params = parameters((PARAM,))
    optimizer = kind(params, **settings)
    optimizer.step()
    return params[0], optimizer


def refused(optimizer, param, match):
    before = param.detach().clone()
    with pytest.raises(UsageError, match=match):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong, match",
    [
        (torch.zeros(3), r"shape \(3,\), its parameter \(64,\)"),
        (torch.zeros(2, 32), r"shape \(2, 32\), its parameter \(64,\)"),
        (torch.zeros(64, dtype=torch.float64), r"torch.float64 on cpu; it must be in torch.float32 or torch.bfloat16"),
        (torch.zeros(64, dtype=torch.int8), "torch.int8 on cpu"),
        (torch.zeros(64, dtype=F16), "torch.float16 on cpu"),
        (torch.zeros(64, dtype=torch.complex64), "real numbers, not torch.complex64"),
        (torch.zeros(64, device="meta"), "on meta"),
        (torch.zeros(64).to_sparse(), "torch.sparse_coo"),
        ([0.0] * 64, "dense tensor of real numbers, not list"),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")) or None,
)
def test_a_state_that_does_not_fit_its_parameter_is_refused(kind, wrong, match):
    for name in kind.MOMENTS:
        param, optimizer = stepped(kind)
        optimizer.state[param][name] = wrong
        refused(optimizer, param, match)


def test_moments_of_two_dtypes_are_refused():
    param, optimizer = stepped(CPUAdam)
    optimizer.state[param]["exp_avg_sq"] = torch.zeros(PARAM, dtype=BF16)
    refused(optimizer, param, "one dtype.*torch.float32 and torch.bfloat16")


def test_a_master_that_does_not_fit_is_refused():
    for wrong, match in (
        (torch.zeros(PARAM * 4), "master has shape"),
        (torch.zeros(PARAM, dtype=BF16), "master .* torch.bfloat16"),
    ):
        params = parameters((PARAM,), dtype=BF16)
        optimizer = CPUAdam(params, master_weights=True)
        optimizer.step()
        optimizer.state[params[0]]["master"] = wrong
        refused(optimizer, params[0], match)


def test_a_second_buffer_that_was_cut_off_later_is_refused():
    param, optimizer = stepped(CPUAdam)
    buffer = torch.zeros(PARAM, dtype=BF16)
    optimizer.write_copies({param: buffer})
    optimizer.step()
    buffer.data = torch.zeros(PARAM // 2, dtype=BF16)
    refused(optimizer, param, "different numbers of elements")


def test_a_master_beside_a_second_buffer_of_another_parameter():
    half, single = torch.nn.Parameter(torch.ones(8, dtype=BF16)), torch.nn.Parameter(torch.ones(8))
    optimizer = CPUAdam([half, single], lr=0.5, master_weights=True)
    half.grad, single.grad = torch.ones_like(half), torch.ones_like(single)
    copied = torch.zeros(8, dtype=F16)
    optimizer.write_copies({single: copied})
    optimizer.step()
    assert torch.equal(copied, single.detach().half())
    assert torch.equal(half.float(), single)


@pytest.mark.parametrize(
    "value", [7, 7.0, torch.tensor(7), torch.tensor([7], dtype=torch.int32), torch.tensor(7.0).double()]
)
@pytest.mark.parametrize("how", ["put", "loaded"])
def test_steps_of_any_dtype_count_on(value, how):
    twin = torch.nn.Parameter(torch.ones(PARAM))
    param = torch.nn.Parameter(torch.ones(PARAM))
    ours, theirs = CPUAdam([param], lr=0.1), torch.optim.AdamW([twin], lr=0.1, weight_decay=0.0)
    state = {"exp_avg": torch.full((PARAM,), 0.5), "exp_avg_sq": torch.full((PARAM,), 2.0)}
    theirs.state[twin] = {"step": torch.tensor(7.0), **copy.deepcopy(state)}
    if how == "put":
        ours.state[param] = {"step": value, **state}
    else:
        saved = ours.state_dict()
        ours.load_state_dict({**saved, "state": {0: {"step": value, **state}}})
    param.grad, twin.grad = torch.ones(PARAM), torch.ones(PARAM)
    for _ in range(2):
        ours.step()
        theirs.step()
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)
    assert ours.state[param]["step"] == 9


@pytest.mark.parametrize("value", [torch.zeros(2), "seven", None])
def test_a_step_that_is_no_number_is_refused(value):
    param, optimizer = stepped(CPUAdam)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = value
    before = optimizer.state[param]
    with pytest.raises(UsageError, match="step of a parameter must be one number"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[param] is before
    optimizer.state[param]["step"] = value
    refused(optimizer, param, "step of a parameter must be one number")


def test_part_of_a_state_is_refused_and_notes_beside_it_stay():
    param, optimizer = stepped(CPUAdam)
    del optimizer.state[param]["exp_avg"]
    refused(optimizer, param, "exp_avg is missing")
    params = parameters((4,))
    optimizer = CPUAdam(params)
    optimizer.state[params[0]]["note"] = "mine"
    optimizer.step()
    assert optimizer.state[params[0]]["note"] == "mine"
    assert optimizer.state[params[0]]["step"] == 1


def test_deepspeeds_functions_refuse_what_does_not_fit():
    def tensors(**others):
        return [others.get(name, torch.zeros(PARAM)) for name in ("params", "grads", "m", "v")]

    half, short = torch.zeros(PARAM, dtype=BF16), torch.zeros(3)
    adam, adagrad, lion = CPUAdamBuilder().load(), CPUAdagradBuilder().load(), CPULionBuilder().load()
    fused = FusedAdamBuilder().load()
    hyper = 1e-3, 0.9, 0.999, 1e-8, 0.0, True
    for op, create in ((adam, "adam"), (adagrad, "adagrad"), (lion, "lion")):
        getattr(op, f"create_{create}")(77)
    for wrong in ({"v": half}, {"m": half}, {"m": short}, {"v": short}, {"grads": short}, {"params": short}):
        found = tensors(**wrong)
        with pytest.raises(UsageError, match=r"elements|one dtype"):
            adam.adam_update(77, 1, *hyper, *found)
        with pytest.raises(UsageError, match=r"elements|one dtype"):
            lists = [[found[1]], [found[0]], [found[2]], [found[3]]]
            fused.multi_tensor_adam(1, None, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    with pytest.raises(UsageError, match="2 gradients or states"):
        lists = [[torch.zeros(2)] * 2, [torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2)]]
        fused.multi_tensor_adam(1, None, lists, 1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    with pytest.raises(UsageError, match="elements"):
        adam.adam_update_copy(77, 1, *hyper, *tensors(), half[:10])
    with pytest.raises(UsageError, match="elements"):
        adagrad.adagrad_update(77, 1, 1e-3, 1e-8, 0.0, *tensors(m=short)[:3])
    with pytest.raises(UsageError, match="elements"):
        lion.lion_update(77, 1, 1e-3, 0.9, 0.99, 0.0, *tensors(m=short)[:3])
    with pytest.raises(UsageError, match="steps count from 1, and this is 0"):
        adam.adam_update(77, 0, *hyper, *tensors())
    for op, create in ((adam, "adam"), (adagrad, "adagrad"), (lion, "lion")):
        getattr(op, f"destroy_{create}")(77)


# Groups -----------------------------------------------------------------------------------------------------


def change(group, index):
    """What schedulers and people do to a group between steps."""
    [
        lambda: group.update(lr=0.05),
        lambda: group.update(lr=torch.tensor(0.2)),
        lambda: group["lr"].mul_(0.5),
        lambda: group.update(weight_decay=0.3),
        lambda: group.update(weight_decay=0.0, eps=1e-3),
        lambda: group.update(betas=(0.5, 0.6)),
        lambda: group.update(betas=[0.8, 0.9], lr=-0.01),
        lambda: group["betas"].__setitem__(0, 0.4),  # the list stays the same object
        lambda: group.update(betas=(0.7, 0.99)),
        lambda: None,  # as it was in the last step
    ][index]()


def test_options_that_change_between_steps_count_as_in_torch():
    params, twins = parameters((50, 7)), parameters((50, 7))
    ours, theirs = CPUAdam(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0)
    for index in range(10):
        for optimizer in (ours, theirs):
            change(optimizer.param_groups[0], index)
            optimizer.step()
        for param, twin in zip(params, twins, strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)
    for optimizer, own in ((ours, params), (theirs, twins)):
        more = torch.nn.Parameter(torch.ones(9))
        more.grad = torch.full((9,), 0.5)
        own.append(more)
        optimizer.add_param_group({"params": [more], "lr": 0.3, "weight_decay": 0.1})
        optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_options_of_other_kinds(kind):
    param, optimizer = stepped(kind, weight_decay=0.25)
    twin, other = stepped(kind, weight_decay=0.25)
    group = optimizer.param_groups[0]
    group.update({name: torch.tensor(group[name]).double() for name in ("lr", "eps", "weight_decay") if name in group})
    optimizer.step()
    other.step()
    torch.testing.assert_close(param, twin)
    for name in tuple(group):
        if name != "params":
            del group[name]  # the optimizer's own count then
    other.param_groups[0]["lr"] = optimizer.defaults["lr"]
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)
    for name, value in (("lr", "fast"), ("weight_decay", None), ("lr", torch.ones(2))):
        group[name] = value
        refused(optimizer, param, f"{name} must be one number")
        del group[name]
    for option in ("amsgrad", "maximize", "differentiable"):
        group[option] = True
        refused(optimizer, param, f"does not have {option}")
        group[option] = False
    if kind is not CPUAdagrad:
        for betas, match in (
            ((0.9, 1.0), "beta2 must be from 0 to below 1"),
            (0.9, "two numbers"),
            ((0.9,), "two numbers"),
        ):
            group["betas"] = betas
            refused(optimizer, param, match)


def test_options_of_groups_that_are_of_the_optimizer():
    for option in ("state_dtype", "master_weights", "fp32_optimizer_states"):
        with pytest.raises(UsageError, match=f"{option} is for all groups"):
            CPUAdam([{"params": parameters((4,)), option: None}])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, moments", [(F32, F32), (BF16, BF16), (F16, BF16)])
def test_without_fp32_optimizer_states_moments_have_the_dtype_of_their_parameter(kind, dtype, moments):
    params = parameters((PARAM,), dtype)
    optimizer = copy.deepcopy(kind(params, fp32_optimizer_states=False))
    optimizer.param_groups[0]["params"][0].grad = params[0].grad
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    (state,) = optimizer.state.values()
    assert {state[name].dtype for name in kind.MOMENTS} == {moments}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_in_a_group_twice_is_refused(kind):
    (param,) = parameters((PARAM,))
    with pytest.raises(UsageError, match="in a group twice"):
        kind([param, param])


@pytest.mark.parametrize("size", [1, PARAM])
@pytest.mark.parametrize("kind", KINDS)
def test_values_whose_memory_has_the_other_sign(kind, size):
    """Views such as z.conj().imag; of one element they are contiguous."""
    params, twins = parameters((size,)), parameters((size,))
    ours, other = kind(params), kind(twins)
    z = torch.randn(size, dtype=torch.complex64)
    for grad in (z.imag, z.conj().imag, torch._neg_view(z.real.clone()), z.imag):
        params[0].grad, twins[0].grad = grad, grad.clone().resolve_neg()
        ours.step()
        other.step()
        assert torch.equal(params[0], twins[0])
    (param,), (twin,) = parameters((size,)), parameters((size,))
    param.data = torch._neg_view(-param.data)
    assert torch.equal(param, twin)
    kind([param]).step()
    kind([twin]).step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize("kind, name", [(CPUAdam, "adamw_mode"), (FusedAdam, "adam_w_mode")])
def test_the_mode_may_differ_between_groups(kind, name):
    (param,), (twin,) = parameters((4,)), parameters((4,))
    mixed = kind([{"params": [param], name: False}], weight_decay=0.5)
    CPUAdam([twin], weight_decay=0.5, adamw_mode=False).step()
    mixed.step()
    assert torch.equal(param, twin)
    assert param.dtype == F32


@pytest.mark.parametrize(
    "option",
    [{"lr": "1"}, {"lr": None}, {"lr": torch.ones(2)}, {"betas": 0.9}, {"betas": ("a", 0.9)}, {"eps": None}],
)
def test_options_of_other_types_are_named(option):
    with pytest.raises(UsageError, match=r"CPUAdam: (beta1|betas|lr|eps) must be"):
        CPUAdam(parameters((4,)), **option)


@pytest.mark.parametrize("state", [5, [1], "abc"])
def test_states_that_are_no_dicts(state):
    params = parameters((4,))
    optimizer = CPUAdam(params)
    saved = optimizer.state_dict()
    with pytest.raises(UsageError, match="must be a dict, not"):
        optimizer.load_state_dict({**saved, "state": {0: state}})


class Interrupted(BaseException):
    """Ctrl-C."""


def test_a_first_step_that_is_interrupted_can_be_made_again(monkeypatch):
    (param,), (twin,) = parameters((4,)), parameters((4,))
    optimizer = CPUAdam([param])
    zeros, left = torch.zeros_like, [1]

    def interrupted(*args, **options):
        if not left.pop():
            raise Interrupted
        left.append(0)
        return zeros(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", interrupted)  # comes between the first moment and the second
        with pytest.raises(Interrupted):
            optimizer.step()
    assert not optimizer.state[param]
    optimizer.step()
    CPUAdam([twin]).step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize("kind", [CPUAdam, CPUAdagrad])
def test_what_others_write_into_a_parameter_reaches_its_master(kind):
    """Such as a checkpoint that is loaded into the model; what they leave alone keeps the master's finer value."""
    param = torch.nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = kind([param], lr=1e-4, master_weights=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.step()
    before = optimizer.state[param]["master"].clone()
    with torch.no_grad():
        param[:4] = 3.0
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert optimizer.state[param]["master"].tolist() == [3.0] * 4 + before[4:].tolist()
    assert before[4] != before[4].to(BF16).float()
    assert param.tolist() == [3.0] * 4 + before[4:].to(BF16).tolist()


@pytest.mark.parametrize("which", ["param", "grad", "exp_avg", "step"])
def test_memory_that_somebody_took_away_is_noticed(which):
    param, optimizer = stepped(CPUAdam)
    tensor = {"param": param, "grad": param.grad}.get(which)
    tensor = optimizer.state[param][which] if tensor is None else tensor
    tensor.untyped_storage().resize_(0 if which in ("step", "grad") else 40)
    with pytest.raises(
        UsageError, match=r"has no memory of its own: it is without its memory: its storage has \d+ bytes"
    ):
        optimizer.step()
