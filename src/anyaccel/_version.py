# SPDX-License-Identifier: Apache-2.0
"""The version: that of the git tag which the package was built from, or the next one's `.devN`; docs/releasing.md."""

__all__ = ["__version__"]

try:
    from anyaccel._built import version as __version__
except ModuleNotFoundError:  # the source tree itself, which nobody has built
    __version__ = "0.0.0"
