# SPDX-License-Identifier: Apache-2.0
"""What requests of several APIs share, as pydantic models; errors, and bounds on what a client sends."""
