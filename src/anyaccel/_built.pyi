# SPDX-License-Identifier: Apache-2.0
"""Written by the build (pyproject.toml)."""

version: str
