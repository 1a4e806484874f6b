# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.inference.options import ModelOptions


@pytest.mark.parametrize("value", ["int3", "", torch.int16, torch.float64])
def test_dtypes_that_inference_does_not_have(value: object) -> None:
    with pytest.raises(UsageError, match="bf16, fp16, fp32, int8, int4"):
        ModelOptions.from_arguments({"dtype": value})


@pytest.mark.parametrize(
    ("value", "name", "arithmetic"),
    [
        *((value, "bf16", "bf16") for value in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16)),
        (torch.half, "fp16", "fp16"),
        (torch.int8, "int8", "fp32"),
        ("int8", "int8", "fp32"),
        ("int4", "int4", "fp32"),
        ("auto", "auto", "fp32"),
    ],
)
def test_names_of_dtypes(value: object, name: str, arithmetic: str) -> None:
    options = ModelOptions.from_arguments({"dtype": value})
    assert (options.dtype, options.arithmetic) == (name, arithmetic)


def test_cache_precision_follows_the_dtype() -> None:
    assert ModelOptions().cache_dtype == "bf16"
    assert ModelOptions("fp32").cache_dtype == "fp32"
    assert ModelOptions("int4", kv_cache="int8").cache_dtype == "int8"
    assert ModelOptions(kv_cache="int4").cache_dtype == "int4"
    assert ModelOptions(kv_cache="torch.bfloat16").cache_dtype == "bf16"


def test_deepspeed_spellings() -> None:
    for arguments in ({"tensor_parallel": {"tp_size": 2}}, {"tp": {"tp_size": 2}}, {"mp_size": 2}):
        assert ModelOptions.from_arguments(arguments) == ModelOptions(tp=2)
    assert ModelOptions.from_arguments({"tp": {"enabled": False, "tp_size": 2}}).ranks == 1
    assert ModelOptions.from_arguments({"pipeline_parallel": {"size": 3}, "tp": {"tp_size": 2}}).ranks == 6
    for inject in (True, False):  # native kernels are used wherever they fit
        assert ModelOptions.from_arguments({"replace_with_kernel_inject": inject}) == ModelOptions()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 2}, "'tp_size'"),
        ({"tensor_parallel": {"size": 2}}, "tp_size"),
        ({"tensor_parallel": 2}, "needs a dict"),
        ({"tensor_parallel": {"tp_size": 0}}, "at least 1"),
        ({"tensor_parallel": {"tp_size": 2, "wire_dtype": "fp8"}}, "wire_dtype='fp8'.*fp32, bf16, int8"),
        ({"tensor_parallel": {"tp_size": "2"}}, "'2'"),
        ({"runtime": "fast"}, "runtime='fast'"),
        ({"group_size": 48}, "group_size=48: must be one of 32, 64, 128"),
        ({"kv_cache": "int2"}, "kv_cache='int2'"),
        ({"cache_bytes": -1}, "cache_bytes=-1"),
        ({"memory": "8 gigs"}, "memory='8 gigs': is not a size such as 8GiB"),
        ({"cache_bytes": 2**70}, f"cache_bytes={2**70}: must be a whole number from 0 to {2**63 - 1}"),
        ({"threads": 2**31}, f"threads={2**31}: must be a whole number from 0 to {2**31 - 1}"),
        ({"threads": 1.5}, r"threads=1\.5"),
        ({"dtype": "int8", "runtime": "plain"}, "packed weights"),
        ({"pipeline_parallel": {"size": 2}, "runtime": "torch"}, "pp=2 needs the native runtime, not runtime='torch'"),
        *(({"pipeline_parallel": wrong}, "pipeline_parallel") for wrong in ({"size": 0}, {"size": True}, {"n": 1}, 2)),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ModelOptions.from_arguments(options)


@pytest.mark.parametrize("name", ["top_k", "no_repeat_ngram_size"])
def test_counts_that_no_kernel_can_hold_are_named(name: str) -> None:
    from anyaccel.inference.generate import SamplingOptions
    from anyaccel.inference.hf.generate_checks import sampling_options

    for number in (2**31, 10**40):
        with pytest.raises(UsageError, match=rf"{name}={number}: must be 0 \(off\) or above, and below 2\*\*31"):
            sampling_options(do_sample=True, **{name: number})
    with pytest.raises(UsageError, match=rf"top_k={2**31}"):
        SamplingOptions(top_k=2**31)
    assert SamplingOptions(top_k=2**31 - 1).native()["top_k"] == 2**31 - 1
