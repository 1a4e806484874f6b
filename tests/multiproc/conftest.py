# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture(scope="session", autouse=True)
def _server(rank_server: None) -> None:
    """Every test here starts ranks."""
