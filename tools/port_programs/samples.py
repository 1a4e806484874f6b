# SPDX-License-Identifier: Apache-2.0
"""Makes the small data sets, checkpoints and environments that the programs of programs.toml read."""

from __future__ import annotations

import gzip
import json
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


def monotonic_align(path: str) -> None:
    """A module with the alignment that speech synthesis compiles from Cython: the best path through each matrix."""
    Path(path).write_text("""
def maximum_path_c(paths, values, heights, widths):
    for path, value, height, width in zip(paths, values, heights, widths):
        best = value.copy()
        for row in range(1, height):
            for column in range(max(0, width + row - height), min(width, row + 1)):
                stay = best[row - 1, column] if column < row else -1e9
                best[row, column] += max(stay, best[row - 1, column - 1] if column else -1e9)
        column = width - 1
        for row in range(height - 1, -1, -1):
            path[row, column] = 1
            if column and (column == row or best[row - 1, column] < best[row - 1, column - 1]):
                column -= 1
""")


def tacotron_layers(folder: str) -> None:
    """The package beside WaveGlow that turns sound into mel spectra."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, "layers.py").write_text("""
import librosa, torch
class STFT(torch.nn.Module):
    def __init__(self, filter_length=1024, hop_length=256, win_length=1024):
        super().__init__()
        self.size = dict(n_fft=filter_length, hop_length=hop_length, win_length=win_length)
        self.register_buffer("window", torch.hann_window(win_length))
    def transform(self, sound):
        spectrum = torch.stft(sound, **self.size, window=self.window, return_complex=True)
        return spectrum.abs(), spectrum.angle()
    def inverse(self, magnitude, phase):
        return torch.istft(torch.polar(magnitude, phase), **self.size, window=self.window)[:, None]
class TacotronSTFT(torch.nn.Module):
    def __init__(self, filter_length, hop_length, win_length, sampling_rate, mel_fmin, mel_fmax):
        super().__init__()
        self.stft = STFT(filter_length, hop_length, win_length)
        mel = librosa.filters.mel(sr=sampling_rate, n_fft=filter_length, n_mels=80, fmin=mel_fmin, fmax=mel_fmax)
        self.register_buffer("mel", torch.from_numpy(mel).float())
    def mel_spectrogram(self, sound):
        return torch.log(torch.clamp(self.mel @ self.stft.transform(sound)[0], min=1e-5))
""")
    Path(folder, "stft.py").write_text("from layers import STFT\n")


def texts(path: str, count: int) -> None:
    """Records of a text and of a conversation, a line each."""
    with Path(path).open("w") as file:
        for number in range(count):
            said = words(10, number).strip()
            talk = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"text": said, "conversations": talk}) + "\n")


def json_datasets(path: str) -> None:
    """A module in the place of Hugging Face's datasets, which reads records of a line each."""
    Path(path).write_text("""
import json
class Features(dict): pass
def Value(*args): return args
Sequence = Value
def load_dataset(kind, data_files, split, **options):
    with open(data_files) as file:
        return [json.loads(line) for line in file]
""")


def cora(folder: str, nodes: int) -> None:
    """A graph of papers in the files of Cora: words and a class of each, and who cites whom."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    made_by = Generator(0)
    with Path(folder, "cora.content").open("w") as file:
        for node in range(nodes):
            present = " ".join(map(str, made_by.randint(0, 2, 20)))
            file.write(f"{node} {present} class{node % 7}\n")
    numpy.savetxt(Path(folder, "cora.cites"), made_by.randint(0, nodes, (4 * nodes, 2)), fmt="%d")
