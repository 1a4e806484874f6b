# SPDX-License-Identifier: Apache-2.0
"""The engine: requests in token ids, scheduled in steps of a decoder. It knows nothing of HTTP."""
