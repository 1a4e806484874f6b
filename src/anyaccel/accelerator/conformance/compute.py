# SPDX-License-Identifier: Apache-2.0
"""The data types that are claimed compute, and tensors of each type can be made by their old names."""

from __future__ import annotations

import torch

from anyaccel.accelerator.base import HOST, Accelerator
from anyaccel.accelerator.conformance.checking import check, expect, expect_equal, expect_type
from anyaccel.accelerator.spec import Capability

_CLAIMS = {
    torch.bfloat16: "is_bf16_supported",
    torch.float16: "is_fp16_supported",
    torch.float64: "is_fp64_supported",
}
# Error relative to the sum of the absolute products. Devices round float32 factors to TF32, that is to 10 bits.
_TOLERANCE = {torch.float64: 2.0**-40, torch.float32: 2.0**-10}
_SIZE = 64

_TYPED = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


@check("data types", "supported_dtypes", *_CLAIMS.values())
def check_dtypes_are_claimed_consistently(accelerator: Accelerator) -> None:
    """A list with float32 first, which agrees with the three questions."""
    dtypes = accelerator.supported_dtypes()
    expect_type("supported_dtypes()", dtypes, list)
    expect(all(isinstance(item, torch.dtype) for item in dtypes), "supported_dtypes() of torch.dtype", dtypes)
    expect_equal("supported_dtypes() to start with", dtypes[:1], [torch.float32])
    expect(len(set(dtypes)) == len(dtypes), "each dtype once", dtypes)
    for dtype, question in _CLAIMS.items():
        answer = getattr(accelerator, question)()
        expect_type(f"{question}()", answer, bool)
        expect_equal(f"{question}(), with supported_dtypes() {dtypes},", answer, dtype in dtypes)
    expect_equal("is_fp64_supported() as has('fp64'),", accelerator.is_fp64_supported(), accelerator.has("fp64"))


@check("data types", "supported_dtypes")
def check_every_claimed_dtype_computes(accelerator: Accelerator) -> str:
    """A sum and a matrix product, compared with float64 on the host."""
    device = accelerator.current_device_name()
    generator = torch.Generator(HOST).manual_seed(0)
    for dtype in accelerator.supported_dtypes():
        a, b = (torch.randn(_SIZE, _SIZE, generator=generator, device=HOST).to(dtype) for _ in range(2))
        x, y = a.double(), b.double()
        on_device = a.to(device), b.to(device)
        tolerance = _TOLERANCE.get(dtype, 2 * torch.finfo(dtype).eps)
        cases = {
            "add": (torch.add(*on_device), x + y, x.abs() + y.abs()),
            "matmul": (torch.matmul(*on_device), x @ y, x.abs() @ y.abs()),
        }
        for name, (result, exact, scale) in cases.items():
            expect_equal(f"{name} in {dtype} to give", result.dtype, dtype)
            expect_equal(f"{name} in {dtype} to stay on", result.device.type, accelerator.spec.device_type)
            error = float(((result.to(HOST).double() - exact).abs() / scale.clamp_min(1e-6)).max())
            expect(error <= tolerance, f"{name} in {dtype} with a relative error up to {tolerance:.2g}", error)
    return " ".join(str(dtype).removeprefix("torch.") for dtype in accelerator.supported_dtypes())


@check("data types", *_TYPED)
def check_typed_tensors_are_made_on_the_device(accelerator: Accelerator) -> None:
    """By shape and from values; isinstance knows them."""
    kind = accelerator.spec.device_type
    for name, dtype in _TYPED.items():
        if dtype is torch.float64 and not accelerator.has(Capability.FP64):
            continue
        maker = getattr(accelerator, name)
        for what, tensor, shape in (
            (f"{name}(2, 3)", maker(2, 3), (2, 3)),
            (f"{name}([1, 2])", maker([1, 2]), (2,)),
            (f"{name}()", maker(), (0,)),
        ):
            expect(isinstance(tensor, torch.Tensor), f"{what} a tensor", tensor)
            expect_equal(f"{what} of dtype", tensor.dtype, dtype)
            expect_equal(f"{what} of shape", tuple(tensor.shape), shape)
            expect_equal(f"{what} on", tensor.device.type, kind)
            expect(isinstance(tensor, maker), f"isinstance({what}, {name}) True", False)
        expect_equal(f"{name}([1, 2]) with values", maker([1, 2]).to(HOST).tolist(), [1, 2])
        other = torch.zeros(1, dtype=torch.int8, device=accelerator.current_device_name())
        expect(not isinstance(other, maker), f"isinstance(an int8 tensor, {name}) False", True)


@check("data types", "is_triton_supported", "prefer_triton_grouped_mm")
def check_triton_answers_are_bools(accelerator: Accelerator) -> None:
    """Triton cannot be preferred where it does not run."""
    supported, preferred = accelerator.is_triton_supported(), accelerator.prefer_triton_grouped_mm()
    expect_type("is_triton_supported()", supported, bool)
    expect_type("prefer_triton_grouped_mm()", preferred, bool)
    expect(supported or not preferred, "prefer_triton_grouped_mm() False without Triton", preferred)
