# SPDX-License-Identifier: Apache-2.0
"""Embeddings of texts, and how well texts answer a query: by encoders, and by causal models that were trained for it.

Torch-free, but for models that run their own code.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from anyaccel.errors import ModelError, UsageError
from anyaccel.inference.encoders.model import Encoder
from anyaccel.inference.encoders.opening import config_of, is_encoder, is_of_own_code, reads_whole_texts
from anyaccel.inference.encoders.pooling import POOLINGS, Pooling, read_pooling
from anyaccel.inference.encoders.tokens import EncoderTokenizer, Tokens
from anyaccel.inference.native.runtime import Callbacks, Progress, load_native
from anyaccel.inference.options import DEFAULTS, ModelOptions
from anyaccel.inference.spec.mapping import Unsupported
from anyaccel.validation import Fields, read_json

if TYPE_CHECKING:
    from anyaccel.inference.encoders.own_code import OwnCode

logger = logging.getLogger(__name__)

Array = numpy.ndarray[Any, Any]

_TEXTS_AT_ONCE = 64  # of a causal model, whose texts are scheduled here
# What Qwen3-Reranker was trained with; others' models have templates of their own.
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_JUDGEMENT = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Embedder:
    """Makes embeddings of texts as sentence-transformers does with the same folder.

    Args:
        folder: of a Hugging Face encoder or causal LM, with or without sentence-transformers' files.
        pooling: instead of what modules.json says; without either it is the mean of an encoder's hidden states, and a
            causal model's last one.
        normalize: likewise: whether embeddings have length 1.

    Attributes:
        states: the model.
        prompts: names of texts that are put before those to embed, such as "query".

    Raises:
        Unsupported, ModelError: the model cannot be read or run. UsageError: an option is wrong.
    """

    def __init__(
        self,
        folder: str | Path,
        options: ModelOptions = DEFAULTS,
        pooling: str | None = None,
        normalize: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        folder = Path(folder).expanduser()
        if pooling is not None and pooling not in POOLINGS:
            raise UsageError(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
        self.states = states_of(folder, options, progress)
        said = read_pooling(folder) or self.states.usual
        self.pooling = replace(
            said,
            modes=said.modes if pooling is None else (pooling,),
            normalize=said.normalize if normalize is None else normalize,
        )
        self.states.check(self.pooling)
        self.tokenizer = EncoderTokenizer(folder, self.states.max_tokens)
        file = folder / "config_sentence_transformers.json"
        config = Fields(read_json(file) if file.is_file() else {}, f"{file}: ")
        given = config.mapping("prompts")
        self.prompts = {name: given.text(name, "") for name in given.known()}
        self.default_prompt = config.text("default_prompt_name", "")

    @property
    def size(self) -> int:
        """Values of an embedding."""
        if self.pooling.layers:
            return int(self.pooling.layers[-1].weight.shape[0])
        return self.states.hidden * len(self.pooling.modes)

    def prompt(self, name: str | None) -> str:
        """The text of a named prompt; the folder's default one for None.

        Raises:
            UsageError: the folder has no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if not name:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "it has none"
            raise UsageError(f"prompt {name!r}: the model has no such prompt; known are: {known}")
        return self.prompts[name]

    def embed(self, texts: Sequence[str], prompt: str = "") -> Array:
        """Embeddings [texts, size] in float32; `prompt` is put before each text."""
        return self.embed_tokens(*self.tokenizer.texts([prompt + text for text in texts]))

    def embed_tokens(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Array:
        """As `embed`, of tokens."""
        return self.states.embed(texts, types, self.pooling)

    def embed_each(self, texts: Sequence[Sequence[int]]) -> list[Array]:
        """The hidden states of each text's tokens, [tokens, values].

        Raises:
            UsageError: the model is no encoder.
        """
        encoder = getattr(self.states, "encoder", None)
        if encoder is None:
            raise UsageError("embeddings of tokens are an encoder's; a causal model has those of texts")
        counts = [len(text) for text in texts]
        return numpy.split(encoder.encode(texts), numpy.cumsum(counts)[:-1])


def embedding_cuts(folder: Path, size: int) -> Sequence[int]:
    """The numbers of first values that are embeddings as well, as a folder's config.json says (Matryoshka)."""
    config = config_of(folder)
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list):
        return [each for each in given if isinstance(each, int) and 0 < each < size]
    return range(1, size) if config.get("is_matryoshka") is True else ()


class HiddenStates(Protocol):
    """A model whose hidden states are pooled."""

    usual: Pooling  # where nothing says another one
    hidden: int  # values of each
    max_tokens: int  # of a text; 0: no limit
    vocabulary: int
    threads: int
    weight_bytes: int

    def check(self, pooling: Pooling) -> None:
        """Raise UsageError for a pooling that it has not."""

    def embed(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, pooling: Pooling) -> Array:
        """Embeddings of tokens."""


def states_of(folder: Path, options: ModelOptions, progress: Progress | None = None) -> HiddenStates:
    """The encoder or causal model of a folder, on its own code where there is no native family."""
    if not is_encoder(folder) and not is_of_own_code(folder):
        return _CausalStates(folder, options, progress)
    encoder = _encoder(folder, options, False, progress)
    return _EncoderStates(encoder) if isinstance(encoder, Encoder) else encoder


def _encoder(folder: Path, options: ModelOptions, head: bool, progress: Progress | None) -> Encoder | OwnCode:
    """The native encoder of a folder, with its head for sequence classification if any; else the model's own code."""
    if is_encoder(folder):
        try:
            return Encoder(folder, options, head, progress)
        except Unsupported as lacking:  # a size or an option that its family has elsewhere
            logger.info("%s: %s", folder, lacking)
    from anyaccel.inference.encoders.own_code import OwnCode

    return OwnCode(folder, options, head)


class _EncoderStates:
    usual = Pooling(("mean",))

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.hidden, self.max_tokens, self.vocabulary = encoder.hidden, encoder.max_tokens, encoder.vocabulary
        self.threads, self.weight_bytes = encoder.threads, encoder.weight_bytes

    def check(self, pooling: Pooling) -> None:
        """It has them all."""

    def embed(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, pooling: Pooling) -> Array:
        found: Array | None = None
        for group in self.encoder.groups([len(text) for text in texts]):
            own = [texts[number] for number in group]
            hidden = self.encoder.encode(own, None if types is None else [types[number] for number in group])
            pooled = pooling(hidden, [len(text) for text in own])
            if found is None:
                found = numpy.empty((len(texts), pooled.shape[1]), numpy.float32)
            found[group] = pooled
        return numpy.zeros((0, self.hidden), numpy.float32) if found is None else found


class _CausalStates:
    """The decoder pools as it goes through a text, so that no hidden states but the last ones are kept."""

    usual = Pooling(("last",), normalize=True)

    def __init__(self, folder: Path, options: ModelOptions, progress: Progress | None) -> None:
        if options.ranks > 1:
            raise UsageError(f"{options.rank_options}: embeddings are made in one process; `anyaccel serve` has ranks")
        self.native = load_native(folder, options, callbacks=Callbacks(progress), headless=True)
        spec, model = self.native.spec, self.native.model
        self.hidden, self.max_tokens, self.vocabulary = spec.hidden, spec.max_tokens, spec.vocab
        self.threads, self.weight_bytes = model.threads, model.weight_bytes

    def check(self, pooling: Pooling) -> None:
        if pooling.modes not in (("mean",), ("last",)):
            raise Unsupported(f"pooling {'+'.join(pooling.modes)} of a causal model")

    def embed(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None, pooling: Pooling) -> Array:
        from anyaccel import _llm

        model = self.native.model
        found = numpy.empty((len(texts), self.hidden), numpy.float32)
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            requests = [
                _llm.Request(model, list(text), {"goal": pooling.modes[0]})
                for text in texts[first : first + _TEXTS_AT_ONCE]
            ]
            while left := [each for each in requests if not each.finished]:
                model.step(left)
            for number, request in enumerate(requests, first):
                found[number] = request.embedding(normalize=False)
        return pooling.behind(found)


@dataclass(frozen=True)
class Score:
    """How well a text answers the query.

    Attributes:
        index: of the text among those that were given.
    """

    index: int
    score: float


class TextClassifier:
    """Sorts texts into classes, or scores pairs of texts where it has one class: a cross-encoder.

    Args:
        folder: of a Hugging Face model with a head for sequence classification.

    Attributes:
        encoder: the model.
        labels: names of the classes.

    Raises:
        Unsupported, ModelError: the model cannot be read or run. UsageError: it has no head.
    """

    def __init__(self, folder: Path, options: ModelOptions = DEFAULTS, progress: Progress | None = None) -> None:
        encoder = _encoder(folder, options, True, progress)
        if not encoder.labels:
            raise UsageError(f"{folder}: the model has no head that scores pairs of texts; `anyaccel embed` is for it")
        self.encoder = encoder
        self.tokenizer = EncoderTokenizer(folder, encoder.max_tokens)
        config = config_of(folder)
        self._score = _activation(config)
        self._of_one = encoder.labels == 1 or config.get("problem_type") == "multi_label_classification"
        named = config.get("id2label")
        names = named if isinstance(named, Mapping) else {}
        self.labels = [str(names.get(str(each), f"LABEL_{each}")) for each in range(encoder.labels)]

    def pairs(self, query: str, texts: Sequence[str]) -> Tokens:
        """What is read of a query and each text: tokens, and their types."""
        tokens, types = self.tokenizer.pairs(query, texts)
        if not (self.encoder.marks_texts and self.tokenizer.marks_texts):
            types = [[0] * len(text) for text in tokens]
        return tokens, types

    def logits(self, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]]) -> Array:
        """[texts, classes]."""
        return self.encoder.logits(tokens, types)

    def scores(self, logits: Array) -> Array:
        """The scores of pairs, of their logits."""
        return self._score(logits[:, 0])

    def probabilities(self, logits: Array) -> Array:
        """[texts, classes]: of each by itself where a text may be of several classes, else 1 together."""
        if self._of_one:
            return _sigmoid(logits)
        powers = numpy.exp(logits - logits.max(-1, keepdims=True))
        return numpy.asarray(powers / powers.sum(-1, keepdims=True))


class Reranker:
    """Scores texts by a query: a cross-encoder, or a causal model that answers yes or no (Qwen3-Reranker).

    Args:
        folder: of a Hugging Face model.
        instruction: of a causal model: what makes a text a good answer.

    Raises:
        Unsupported, ModelError: the model cannot be read or run, or does not score pairs of texts.
    """

    def __init__(
        self,
        folder: str | Path,
        options: ModelOptions = DEFAULTS,
        instruction: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        folder = Path(folder).expanduser()
        self._score: Callable[[str, Sequence[str]], Array]
        if reads_whole_texts(folder):
            if instruction is not None:
                raise UsageError("instruction: a cross-encoder takes none")
            classifier = TextClassifier(folder, options, progress)
            if len(classifier.labels) != 1:
                raise UsageError(
                    f"{folder}: the model sorts texts into {len(classifier.labels)} classes, and scores none"
                )
            self._score = lambda query, texts: classifier.scores(classifier.logits(*classifier.pairs(query, texts)))
        else:
            judge = _Judge(folder, options, INSTRUCTION if instruction is None else instruction, progress)
            self._score = judge.scores

    def scores(self, query: str, texts: Sequence[str]) -> Array:
        """The score of each text."""
        return self._score(query, texts) if texts else numpy.zeros(0, numpy.float32)

    def rank(self, query: str, texts: Sequence[str], most: int | None = None) -> list[Score]:
        """The best `most` texts, the best one first."""
        scores = self.scores(query, texts)
        order = numpy.argsort(-scores, kind="stable")[:most]
        return [Score(int(index), float(scores[index])) for index in order]


def _activation(config: Mapping[str, Any]) -> Callable[[Array], Array]:
    """What sentence-transformers' CrossEncoder does with one logit: a sigmoid unless the config says nothing at all."""
    own = config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = str(name or config.get("sbert_ce_default_activation_function") or "Sigmoid").rpartition(".")[2]
    if name == "Identity":
        return lambda x: x
    if name != "Sigmoid":
        raise Unsupported(f"activation_fn {name!r} of a cross-encoder")
    return _sigmoid


def _sigmoid(x: Array) -> Array:
    return numpy.asarray(0.5 + 0.5 * numpy.tanh(0.5 * x))


class _Judge:
    """A causal model that is asked whether a text answers a query; the score is the probability of "yes"."""

    def __init__(self, folder: Path, options: ModelOptions, instruction: str, progress: Progress | None) -> None:
        from anyaccel.inference.text.tokenizer import load_text_tokenizer

        self.tokenizer = load_text_tokenizer(folder)
        answers = [self.tokenizer.token_of(word) for word in ("no", "yes")]
        if None in answers or any(self.tokenizer.token_of(mark) is None for mark in ("<|im_start|>", "<|im_end|>")):
            raise Unsupported("way to score texts with this causal model; Qwen3-Reranker and cross-encoders are known")
        self._answers = [answer for answer in answers if answer is not None]
        self._instruction = instruction
        self.native = load_native(folder, options, callbacks=Callbacks(progress))

    def scores(self, query: str, texts: Sequence[str]) -> Array:
        model, vocab = self.native.model, self.native.spec.vocab
        begin = self.tokenizer.encode(_JUDGE, special=False)
        end = self.tokenizer.encode(_JUDGEMENT, special=False)
        room = self.native.spec.max_tokens - len(begin) - len(end) if self.native.spec.max_tokens else None
        found = numpy.empty(len(texts), numpy.float32)
        shared = model.create()  # all begin with the same tokens, which are computed once
        try:
            _forward(model, [shared], [begin], vocab)
            for first in range(0, len(texts), _TEXTS_AT_ONCE):
                own = texts[first : first + _TEXTS_AT_ONCE]
                asked = [
                    self.tokenizer.encode(
                        f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>: {text}", special=False
                    )[:room]
                    for text in own
                ]
                sequences = [model.fork(shared, len(begin)) for _ in own]
                try:
                    logits = _forward(model, sequences, [each + end for each in asked], vocab)
                finally:
                    for sequence in sequences:
                        model.destroy(sequence)
                no, yes = logits[:, self._answers[0]], logits[:, self._answers[1]]
                found[first : first + len(own)] = _sigmoid(yes - no)
        finally:
            model.destroy(shared)
        return found


def _forward(model: Any, sequences: Sequence[int], tokens: Sequence[Sequence[int]], vocab: int) -> Array:
    """Logits [sequences, vocab] behind the last token of each."""
    counts = [len(each) for each in tokens]
    flat = numpy.fromiter((token for each in tokens for token in each), numpy.int64, sum(counts))
    logits = numpy.empty((len(sequences), vocab), numpy.float32)
    rows = [int(row) for row in numpy.cumsum(counts) - 1]
    model.forward(list(sequences), counts, flat.ctypes.data, logits.ctypes.data, rows)
    if not all(map(math.isfinite, logits[:, :1].ravel())):
        raise ModelError("the model's logits are NaN or infinite; try another dtype, such as fp32")
    return logits
