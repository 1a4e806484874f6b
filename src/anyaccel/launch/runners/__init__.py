# SPDX-License-Identifier: Apache-2.0
"""How the workers of a plan are started: one module a way, each a pure `build_command`."""
