# SPDX-License-Identifier: Apache-2.0
"""What the programs of programs.toml are run with: Python imports this at the start of each of their processes.

Seeds are fixed; data sets that would be downloaded are small random ones; packages that are named as absent are
stand-ins; and the numbers that are compared are recorded.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock


def after(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with a module once it has been loaded, whoever loads it."""

    class Finder:
        looking = False

        @staticmethod
        def find_spec(wanted: str, path: Any = None, target: Any = None) -> Any:
            if wanted != name or Finder.looking:
                return None
            Finder.looking = True
            try:
                spec = importlib.util.find_spec(name)
            finally:
                Finder.looking = False
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    run(module)
                    sys.meta_path.remove(Finder)  # not before: some ask for a spec only to see what is installed
                    change(module)

                spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Finder)


def record(value: float) -> None:
    """One number of this process: a line is written at once, so that lines of several processes stay whole."""
    descriptor = os.open(os.environ["PORT_NUMBERS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{os.getpid()} {value!r}\n".encode())
    os.close(descriptor)


def record_losses(torch: Any) -> None:
    """Each scalar that is differentiated."""
    backward = torch.Tensor.backward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        record(float(self.detach().double().sum()))
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = recorded


def record_outputs(torch: Any) -> None:
    """The sum of what each outermost module gives."""
    depth = [0]

    def before(_module: Any, _args: Any) -> None:
        depth[0] += 1

    def behind(_module: Any, _args: Any, output: Any) -> None:
        depth[0] -= 1
        if depth[0] == 0:
            parts = output if isinstance(output, (list, tuple)) else [output]
            tensors = [part for part in parts if isinstance(part, torch.Tensor)]
            record(sum(float(tensor.detach().double().sum()) for tensor in tensors))

    torch.nn.modules.module.register_module_forward_pre_hook(before)
    torch.nn.modules.module.register_module_forward_hook(behind)


def start_torch(torch: Any) -> None:
    torch.manual_seed(0)
    recorders = {"losses": record_losses, "outputs": record_outputs}
    if os.environ.get("PORT_KIND") in recorders:
        recorders[os.environ["PORT_KIND"]](torch)


def start_datasets(datasets: Any) -> None:
    """Small random images in the place of those that torchvision downloads."""
    import numpy
    from PIL import Image

    def made(name: str, shape: tuple[int, ...], classes: int) -> type:
        class Fake(datasets.VisionDataset):
            def __init__(
                self, root: Any = None, train: Any = True, transform: Any = None, target_transform: Any = None,
                download: bool = False, split: Any = None, **_rest: Any,
            ) -> None:  # fmt: skip
                super().__init__(root, transform=transform, target_transform=target_transform)
                made_by = numpy.random.RandomState(int(train is True or split == "train"))
                count = int(os.environ.get("PORT_SAMPLES", "64"))
                self.data = made_by.randint(0, 256, (count, *shape)).astype("uint8")
                self.targets = self.labels = [int(label) for label in made_by.randint(0, classes, count)]
                self.classes = [str(label) for label in range(classes)]

            def __len__(self) -> int:
                return len(self.data)

            def __getitem__(self, index: int) -> Any:
                image, label = Image.fromarray(self.data[index]), self.targets[index]
                if self.transform is not None:
                    image = self.transform(image)
                return image, label if self.target_transform is None else self.target_transform(label)

        Fake.__name__ = Fake.__qualname__ = name
        return Fake

    for name, shape, classes in (
        ("MNIST", (28, 28), 10), ("FashionMNIST", (28, 28), 10), ("CIFAR10", (32, 32, 3), 10),
        ("CIFAR100", (32, 32, 3), 100), ("SVHN", (32, 32, 3), 10), ("STL10", (96, 96, 3), 10),
    ):  # fmt: skip
        setattr(datasets, name, made(name, shape, classes))


def stand_in(names: list[str]) -> None:
    """Modules whose every name exists and does nothing: loggers, and packages that are imported but not used."""
    for name in names:
        module = MagicMock(name=name)
        module.__path__, module.__spec__, module.__version__ = [], importlib.machinery.ModuleSpec(name, None), "0"
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


if "PORT_NUMBERS" in os.environ:
    random.seed(0)
    after("numpy", lambda numpy: numpy.random.seed(0))
    after("torch", start_torch)
    after("torchvision.datasets", start_datasets)
    stand_in(os.environ.get("PORT_ABSENT", "").split())
