# SPDX-License-Identifier: Apache-2.0
"""The simulated device `simd`, by torch's PrivateUse1 mechanism. Importing this makes `torch.simd` and `device="simd"`.

Nothing is opened at import; torch itself does not load this by itself.
"""

# [register]
import torch
from torch.utils import backend_registration

# Device strings of torch are letters and "_" only, so the device type of the accelerator simd0 is simd.
torch.utils.rename_privateuse1_backend("simd")

from anyaccel_simd0 import device  # noqa: E402  (its C++ part registers the device under that name)

torch._register_device_module("simd", device)
backend_registration.generate_methods_for_privateuse1_backend(
    unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
)
# [/register]
