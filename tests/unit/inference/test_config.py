# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from anyaccel.errors import UsageError
from anyaccel.inference.config import InferenceConfig, TensorParallelConfig, parse_dtype


@pytest.mark.parametrize("text", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_names(text: str | torch.dtype) -> None:
    assert parse_dtype(text) is torch.bfloat16


@pytest.mark.parametrize("value", ["int8", "", torch.int8, torch.float64])
def test_dtypes_that_inference_does_not_have(value: str | torch.dtype) -> None:
    with pytest.raises(UsageError, match="bf16, fp16, fp32"):
        parse_dtype(value)


def test_deepspeed_spellings() -> None:
    assert InferenceConfig.from_options({"tensor_parallel": {"tp_size": 2}}).tensor_parallel.tp_size == 2
    assert InferenceConfig.from_options({"tp": TensorParallelConfig(3)}).tensor_parallel.tp_size == 3
    assert InferenceConfig.from_options({"mp_size": 4, "dtype": torch.half}).tensor_parallel.tp_size == 4
    assert InferenceConfig.from_options({"replace_with_kernel_inject": False}) == InferenceConfig()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tp_size": 2}, "'tp_size'"),
        ({"tensor_parallel": {"size": 2}}, "tp_size"),
        ({"tensor_parallel": 2}, "needs a dict"),
        ({"tensor_parallel": {"tp_size": 0}}, "at least 1"),
        ({"tensor_parallel": {"tp_size": "2"}}, "'2'"),
        ({"replace_with_kernel_inject": True}, "leave it out"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        InferenceConfig.from_options(options)
