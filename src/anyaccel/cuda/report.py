# SPDX-License-Identifier: Apache-2.0
"""The table of what was redirected: counted while the program runs, printed when it ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter

MATCHED, CHANGED, ABSENT = "matched", "changed", "not possible"


class Recorder:
    """Counts uses by what they are, what became of them and the line that has them."""

    def __init__(self, accelerator: str, as_json: bool) -> None:
        self.accelerator = accelerator
        self.as_json = as_json
        self.counts: Counter[tuple[str, str, str, str]] = Counter()
        atexit.register(self.show)

    def add(self, name: str, outcome: str, how: str = "") -> None:
        """Note one use; the place is the nearest frame that is neither torch's nor of this package."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "anyaccel"):
            frame = frame.f_back
        place = f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        self.counts[name, outcome, how, place] += 1

    def show(self) -> None:
        """Print the table on standard error."""
        order = (ABSENT, CHANGED, MATCHED)
        rows = sorted(self.counts.items(), key=lambda item: (order.index(item[0][1]), item[0]))
        if self.as_json:
            uses = [
                {"name": name, "outcome": outcome, "how": how, "place": place, "count": count}
                for (name, outcome, how, place), count in rows
            ]
            text = json.dumps({"accelerator": self.accelerator, "uses": uses})
        else:
            lines = [f"CUDA on {self.accelerator}: {sum(self.counts.values())} uses in {len(rows)} places"]
            width = max((len(name) for (name, *_), _ in rows), default=0)
            for (name, outcome, how, place), count in rows:
                lines.append(f"  {outcome:12}  {name:{width}}  {count:6}  {place}{f'  {how}' if how else ''}")
            text = "\n".join(lines)
        sys.stderr.write(f"{text}\n")


recorder: Recorder | None = None


def note(name: str, outcome: str, how: str = "") -> None:
    """Count a use, where a report was asked for."""
    if recorder is not None:
        recorder.add(name, outcome, how)
