# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests and answers as pydantic models, errors, and bounds on what a client sends."""
