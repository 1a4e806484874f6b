# SPDX-License-Identifier: Apache-2.0
"""DeepSeek's markup DSML: functions and their parameters between marks, each said to be a text or JSON."""

from __future__ import annotations

from anyaccel.serve.requests.tools.format import Part
from anyaccel.serve.requests.tools.parts import Name, Parameters


def section(name: str) -> tuple[str, str]:
    """What is around all calls."""
    return f"<｜DSML｜{name}>\n", f"\n</｜DSML｜{name}>"


CALL: tuple[str | Part, ...] = (
    '<｜DSML｜invoke name="',
    Name(),
    '">\n',
    Parameters(
        '<｜DSML｜parameter name="',
        '" string="true">',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>",
        json_middle='" string="false">',
    ),
)
