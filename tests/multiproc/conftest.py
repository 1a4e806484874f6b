# SPDX-License-Identifier: Apache-2.0
import pytest

import ranks


@pytest.fixture(scope="session", autouse=True)
def _rank_server() -> None:
    """The server must be there before the first test looks at its children."""
    ranks.start_server()
