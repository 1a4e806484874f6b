# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.inference.config import InferenceConfig, TensorParallelConfig, parse_dtype, parse_precision


@pytest.mark.parametrize("text", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_names(text: str | torch.dtype) -> None:
    assert parse_dtype(text) is torch.bfloat16


@pytest.mark.parametrize("value", ["int3", "", torch.int16, torch.float64])
def test_dtypes_that_inference_does_not_have(value: str | torch.dtype) -> None:
    for parse in (parse_dtype, parse_precision):
        with pytest.raises(UsageError, match="bf16, fp16, fp32, int8, int4"):
            parse(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [("int8", "int8"), (torch.int8, "int8"), ("int4", "int4"), (torch.half, "fp16"), ("auto", "auto")],
)
def test_precisions_beyond_torch_s_dtypes(value: str | torch.dtype, name: str) -> None:
    settings = InferenceConfig.from_options({"dtype": value})
    assert settings.dtype == name
    assert settings.torch_dtype == (torch.float16 if name == "fp16" else torch.float32)


def test_cache_precision_follows_the_dtype() -> None:
    assert InferenceConfig().cache_dtype == "bf16"
    assert InferenceConfig("fp32").cache_dtype == "fp32"
    assert InferenceConfig("int4", kv_cache="int8").cache_dtype == "int8"
    assert InferenceConfig(kv_cache="int4").cache_dtype == "int4"
    assert InferenceConfig(kv_cache="torch.bfloat16").cache_dtype == "bf16"


def test_deepspeed_spellings() -> None:
    assert InferenceConfig.from_options({"tensor_parallel": {"tp_size": 2}}).tensor_parallel.tp_size == 2
    assert InferenceConfig.from_options({"tp": TensorParallelConfig(3)}).tensor_parallel.tp_size == 3
    assert InferenceConfig.from_options({"mp_size": 4, "dtype": torch.half}).tensor_parallel.tp_size == 4
    for inject in (True, False):  # native kernels are used wherever they fit
        assert InferenceConfig.from_options({"replace_with_kernel_inject": inject}) == InferenceConfig()


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
        ({"cache_bytes": 2**70}, f"cache_bytes={2**70}: must be a whole number from 0 to {2**63 - 1}"),
        ({"threads": 2**31}, f"threads={2**31}: must be a whole number from 0 to {2**31 - 1}"),
        ({"threads": 1.5}, r"threads=1\.5"),
        ({"dtype": "int8", "runtime": "plain"}, "packed weights"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        InferenceConfig.from_options(options)


@pytest.mark.parametrize("name", ["top_k", "no_repeat_ngram_size"])
def test_counts_that_no_kernel_can_hold_are_named(name: str) -> None:
    from anyaccel.inference.generate import Sampling
    from anyaccel.inference.hf.generate_checks import sampling_options

    for number in (2**31, 10**40):
        with pytest.raises(UsageError, match=rf"{name}={number}: must be 0 \(off\) or above, and below 2\*\*31"):
            sampling_options(do_sample=True, **{name: number})
    with pytest.raises(UsageError, match=rf"top_k={2**31}"):
        Sampling(top_k=2**31)
    assert Sampling(top_k=2**31 - 1).native()["top_k"] == 2**31 - 1


def test_a_limit_of_the_cache_that_no_machine_has_is_refused_before_anything_is_read() -> None:
    from anyaccel.inference.native.runtime import load_native

    for limit in (2**63, 2**70, -1):
        with pytest.raises(UsageError, match=f"cache_limit={limit}"):
            load_native("no such model", cache_limit=limit)
