# SPDX-License-Identifier: Apache-2.0
"""Makes the small data sets, checkpoints and environments that the programs of programs.toml read."""

from __future__ import annotations

import gzip
import random
import wave
from pathlib import Path

import numpy

Generator = numpy.random.RandomState


def images(place: str, count: int = 8, size: int = 32, classes: int = 0) -> None:
    """PNG files of noise; with classes, in a folder each."""
    from PIL import Image

    made_by = Generator(0)
    for number in range(count):
        folder = Path(place, f"class{number % classes}") if classes else Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(made_by.randint(0, 256, (size, size, 3)).astype("uint8")).save(folder / f"{number:03}.png")


def sounds(place: str, count: int = 4, rate: int = 22050, seconds: float = 1.0) -> list[str]:
    """WAV files of 16 bits, and their names."""
    folder, made_by = Path(place), Generator(0)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(count):
        samples = (made_by.uniform(-0.5, 0.5, int(rate * seconds)) * 32767).astype("<i2")
        with wave.open(str(folder / f"{number:03}.wav"), "wb") as file:
            file.setparams((1, 2, rate, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
        names.append(str(folder / f"{number:03}.wav"))
    return names


def words(count: int, seed: int = 0) -> str:
    """A text of few words, lines of ten."""
    choose = random.Random(seed)
    chosen = [choose.choice(("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog")) for _ in range(count)]
    return "\n".join(" ".join(chosen[at : at + 10]) for at in range(0, count, 10)) + "\n"


def compressed(path: str, size: int) -> None:
    """A gzip file of text, of at least so many bytes when it is unpacked."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") as file:
        file.write(words(size // 3).encode()[:size])


def tokens(path: str, count: int, high: int) -> None:
    """A file of token numbers in two bytes each."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Generator(0).randint(0, high, count).astype("<u2").tofile(path)
