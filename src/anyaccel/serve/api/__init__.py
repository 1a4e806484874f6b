# SPDX-License-Identifier: Apache-2.0
"""The addresses: routing, keys, bodies in and events out, one module an API."""
