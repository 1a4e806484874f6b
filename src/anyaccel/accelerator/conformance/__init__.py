# SPDX-License-Identifier: Apache-2.0
"""The conformance kit: runs every method of the accelerator interface on a live device and says what is wrong.

`anyaccel conformance` and `pytest --pyargs anyaccel.accelerator.conformance` run it; `run.run_checks` is for code.
One file a subject; `checks.py` is the list of them all. Nothing here needs pytest but `test_conformance.py`.
"""
