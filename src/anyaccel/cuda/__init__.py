# SPDX-License-Identifier: Apache-2.0
"""Runs code that names CUDA, unchanged, on the accelerator of this machine.

    import anyaccel.cuda  # the first line of a program, before torch is used

or without touching it: `python -m anyaccel.cuda script.py`, `anyaccel run --as-cuda script.py`. Where CUDA is the
accelerator nothing changes at all. See docs/as-cuda.md.
"""

from anyaccel.cuda.mode import install

install()
