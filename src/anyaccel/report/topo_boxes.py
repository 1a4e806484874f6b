# SPDX-License-Identifier: Apache-2.0
"""Boxes that know their size, put beside and below one another and written as SVG; and colours."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

INK, MUTED, LINE = "#1f2933", "#616e7c", "#9aa5b1"
# Paul Tol's "bright" and more of its lightness: told apart by most people who do not see all colours.
_RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#44bb99")
_PAD, _TEXT = 12.0, 12.0
# Widths of characters at size 1, of DejaVu Sans, which is wider than most; others take 0.64.
_WIDTHS = {
    **dict.fromkeys("ijlI", 0.3),
    **dict.fromkeys(" ,.:;|'()-ft/[]!", 0.37),
    **dict.fromkeys("rJszcxkvy", 0.55),
    **dict.fromkeys("mwMW%@", 0.95),
    **dict.fromkeys("ABCDGHKNOPQRUVX×", 0.74),
}


@dataclass
class Box:
    """A drawn part: its size, and what puts it at a place."""

    width: float
    height: float
    children: list[tuple[float, float, Box]] = field(default_factory=list)
    shapes: list[tuple[str, dict[str, str], str]] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: str) -> None:
        place = {"x": num(x), "y": num(y), "width": num(width), "height": num(height), "fill": fill}
        title = more.pop("title", "")
        self.shapes.append(("rect", {**place, **{k.replace("_", "-"): v for k, v in more.items()}}, title))

    def text(self, x: float, y: float, text: str, size: float = _TEXT, fill: str = INK, **more: str) -> None:
        place = {"x": num(x), "y": num(y), "font-size": num(size), "fill": fill}
        self.shapes.append(("text", {**place, **{k.replace("_", "-"): v for k, v in more.items()}}, text))


def grid(
    boxes: Sequence[Box], gap: float, aspect: float, limit: float = math.inf, room: float = 0, stretch: bool = False
) -> Box:
    """Boxes in rows and columns of one size, in the shape that is closest to `aspect` and leaves few holes.

    Args:
        limit: the most that it may be wide.
        room: width that is there in any case, to be filled.
        stretch: make the frames of all boxes as large as the largest.
    """
    wide, high = max(box.width for box in boxes) + gap, max(box.height for box in boxes) + gap

    def badness(columns: int) -> float:
        rows = math.ceil(len(boxes) / columns)
        holes = (rows * columns - len(boxes)) / (rows * columns)
        narrow = max(aspect, room / (rows * high))
        return abs(math.log(columns * wide / (rows * high) / narrow)) + 12 * holes

    for box in boxes if stretch else ():
        box.shapes[0][1].update(width=num(wide - gap), height=num(high - gap))

    fitting = [n for n in range(1, len(boxes) + 1) if n * wide - gap <= limit] or [1]
    columns = min(fitting, key=badness)
    rows = math.ceil(len(boxes) / columns)
    outer = Box(columns * wide - gap, rows * high - gap)
    outer.children = [(n % columns * wide, n // columns * high, box) for n, box in enumerate(boxes)]
    return outer


def stack(boxes: Sequence[Box], gap: float) -> Box:
    outer = Box(max((box.width for box in boxes), default=0), 0)
    for box in boxes:
        outer.children.append((0, outer.height, box))
        outer.height += box.height + gap
    outer.height = max(0.0, outer.height - gap)
    return outer


def flow(boxes: Sequence[Box], gap: float, width: float) -> Box:
    """Boxes one after the other, in lines as words are."""
    outer, x, y = Box(0, 0), 0.0, 0.0
    for box in boxes:
        if x and x + box.width > width:
            x, y = 0.0, outer.height + 8
        outer.children.append((x, y, box))
        x += box.width + gap
        outer.width, outer.height = max(outer.width, x - gap), max(outer.height, y + box.height)
    return outer


def framed(name: str, inside: Box, fill: str, size: float, radius: float) -> Box:
    width = max(inside.width, text_width(name, size)) + 2 * _PAD
    box = Box(width, inside.height + size + 2 * _PAD + 4)
    box.rect(0, 0, box.width, box.height, fill, rx=num(radius), stroke=LINE)
    box.text(_PAD, _PAD + size - 3, name, size, font_weight="600")
    box.children = [(_PAD, _PAD + size + 4, inside)]
    return box


def line(text: str, size: float, fill: str) -> Box:
    box = Box(text_width(text, size), size + 3)
    box.text(0, size, text, size, fill)
    return box


def badge(text: str) -> Box:
    box = Box(text_width(text, 10) + 14, 18)
    box.rect(0, 0, box.width, 18, "#fff4d6", rx="4", stroke="#d9b44a")
    box.text(7, 12.5, text, 10)
    return box


def swatch(fill: str, text: str, dashed: bool = False, radius: str = "3") -> Box:
    box = Box(22 + text_width(text, 11), 16)
    dashes = {"stroke_dasharray": "2 2"} if dashed else {}
    box.rect(0.5, 0.5, 15, 15, fill, rx=radius, stroke=LINE, stroke_width="0.6", **dashes)
    box.text(22, 12, text, 11)
    return box


def emit(parent: ET.Element, box: Box, x: float, y: float) -> None:
    target = parent
    if x or y:
        target = ET.SubElement(parent, "g", {"transform": f"translate({num(x)} {num(y)})"})
    for tag, attributes, text in box.shapes:
        element = ET.SubElement(target, tag, attributes)
        if tag == "text":
            element.text = clean(text)
        elif text:
            ET.SubElement(element, "title").text = clean(text)
    for left, top, child in box.children:
        emit(target, child, left, top)


def rank_colour(rank: int) -> str:
    """A colour for a rank; the first eight are easy to tell apart, the others go round the colour wheel."""
    if rank < len(_RANKS):
        return _RANKS[rank]
    red, green, blue = colorsys.hls_to_rgb(rank * 0.618034 % 1, (0.42, 0.56, 0.7)[rank % 3], 0.55)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def ink_on(fill: str) -> str:
    red, green, blue = _channels(fill)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def tint(colour: str) -> str:
    return "#" + "".join(f"{round(255 - (255 - channel) * 0.28):02x}" for channel in _channels(colour))


def text_width(text: str, size: float) -> float:
    """About what a sans-serif font takes: no font is at hand to measure with."""
    return size * sum(_WIDTHS.get(character, 0.64) for character in text)


def shortened(text: str, limit: int = 120) -> str:
    """The text, cut where it would make the picture wide."""
    return text if len(text) <= limit else f"{text[: limit - 1].rstrip(' ,')}…"


def num(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def clean(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return "".join(character if character.isprintable() else " " for character in text)
