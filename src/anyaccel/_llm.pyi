# SPDX-License-Identifier: Apache-2.0
"""The native decoder (csrc/llm, bindings in csrc/bindings/llm.cpp)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from anyaccel.inference.spec.decoder import DecoderSpec, Layer

def isa() -> str: ...
def end_transports() -> None: ...  # at the end of the process, see csrc/comm/transport.h

# What a decoder wants, as (name, rows, cols), cols 0 for vectors (csrc/llm/decoder/weights.h): weights beside those of
# layers, of a DecoderSpec; those of one layer, without "layers.N." and of its first expert only.
def outer_weights(spec: DecoderSpec) -> list[tuple[str, int, int]]: ...
def layer_weights(layer: Layer, hidden: int) -> list[tuple[str, int, int]]: ...

class Request:
    """One answer under way: its tokens, its sampling, its place in the cache (freed when this object goes)."""

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        options: Mapping[str, Any],  # fields of csrc/llm/model/sampling.h SamplingOptions, and those below
        # seed: int, max_new_tokens: int, min_new_tokens: int, end_tokens: list[int], ignore_end: bool,
        # bias: dict[int, float], logprobs: int, prompt_logprobs: int, draft_tokens: int (the most of a pass; 0: none),
        # draft_model: bool (who guesses: the draft model; False: the text), draft_always: bool (also where it costs),
        # draft_end: bool (with it: the draft model knows only the end of the text),
        # goal: "answer", "scores" (of the prompt only), "mean", "last" (hidden states, pooled)
        prefix: Request | None = None,  # shares the cache of the longest common prefix with it
        keep_logits: bool = False,
    ) -> None: ...
    @property
    def tokens(self) -> list[int]: ...  # generated since the prompt or extend(), an end token among them
    @property
    def prompt_length(self) -> int: ...
    @property
    def drafts(self) -> tuple[int, int]: ...  # how many tokens have been drafted, and how many of them were right
    @property
    def finished(self) -> str: ...  # "", "end" (an end token), "length", "stopped" (finish() was called before)
    def finish(self) -> None: ...  # no more steps; frees its cache
    # Goes on after `finished` with more prompt (a chat's next turn): `tokens` and `prompt_length` are of this turn
    # then, and `max_new_tokens` counts anew (0: the number that it was).
    def extend(self, tokens: Sequence[int], max_new_tokens: int = 0) -> None: ...
    # For callers that share caches themselves: begin with the first tokens of another request's cache, before the first
    # step; forget what is in the cache from token `tokens` on (it is computed again); how many tokens are in it.
    def share(self, other: Request, tokens: int) -> None: ...
    def shrink(self, tokens: int) -> None: ...
    # Addresses of whole pages in the cache, until the next step or change; and, before the first step, take the first
    # tokens as computed: the caller fills the pages, whose addresses are returned.
    def pages(self, first: int, count: int) -> list[int]: ...
    def restore(self, tokens: int) -> list[int]: ...
    # Of a model with recurrent states: keep the state behind the first tokens, to go on from there later.
    def keep(self, tokens: int) -> None: ...
    @property
    def cached(self) -> int: ...
    def set_mask(self, mask: bytes) -> None: ...  # uint32 [(vocab + 31) / 32]: tokens that may come in the next step
    # (token, log-probability, the likeliest ones), of the answer's tokens since the last call, and of the prompt's.
    def take_scores(self) -> list[tuple[int, float, list[tuple[int, float]]]]: ...
    def prompt_scores(self) -> list[tuple[int, float, list[tuple[int, float]]]]: ...
    def embedding(self, normalize: bool = True) -> list[float]: ...  # once the prompt has been processed
    def copy_logits(self, address: int) -> None: ...  # [vocab] float32 of the last step, before sampling changed them

class Model:
    """Requests and steps, whatever computes them: DecoderModel in C++, ExternalModel in Python."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def threads(self) -> int: ...
    # Tensor parallelism: each rank makes its segment, the names and pids of all go to connect(), then unlink().
    # `anonymous`: memory that is in no file system, for ranks that see each other's process ids.
    # `hosts`: each rank's, numbered as they come; `addresses`: where others' ranks reach this one; `wire_dtype`:
    # f32, bf16 or i8, the form of what is summed when it goes between hosts; `transport`: what carries
    # it, "" for TCP, mpi:LIBRARY or ccl:LIBRARY, which connect() starts; `socket`: that all threads of this rank run
    # on, -1 where that is not one: ranks that share a socket add what prompts need there first.
    def create_segment(
        self,
        timeout_s: float,
        anonymous: bool = False,
        hosts: Sequence[int] = (),
        addresses: Sequence[str] = (),
        wire_dtype: str = "f32",
        transport: str = "",
        socket: int = -1,
    ) -> str: ...
    def connect(self, names: Sequence[str], pids: Sequence[int]) -> None: ...
    def unlink(self) -> None: ...
    def shared(self, value: int) -> int: ...  # rank 0's, 64 bits without a sign; every rank calls it, between steps
    # The model that guesses for requests with draft_model; None: none. Where its tokens are others, `to_draft` makes
    # them of this model's, and from_draft(tokens, before, said) makes this model's of what it says behind `before`.
    def set_draft(
        self,
        draft: Model | None,
        to_draft: Callable[[list[int]], list[int]] | None = None,
        from_draft: Callable[[list[int], list[int], list[int]], list[int]] | None = None,
    ) -> None: ...
    # The bytes of weights that the draft model's passes read for a token, over those that this model's do (None without
    # one); whether its drafts could pay if all were right, without which there are none; and how many tokens draft
    # models have read here, in how many passes.
    @property
    def draft_cost(self) -> float | None: ...
    @property
    def draft_can_pay(self) -> bool: ...
    @property
    def draft_work(self) -> tuple[int, int]: ...
    # Generation: one call a step. Prompts not yet in the cache are processed (in chunks), the others decode one token;
    # returns the new token of each request, -1 for one that had finished, -2 for one whose prompt goes on.
    # `limits`: the most tokens of each request's prompt in this step, 0: all. `exact`: see csrc/llm/model/model.h.
    def step(self, requests: Sequence[Request], limits: Sequence[int] = (), exact: bool = False) -> list[int]: ...
    # At most `most` steps of answers (`exact`): the tokens of each step, and how many of these are in the feed, where
    # those of all steps but the last go, with `tag`. Ends early when a request does, or the feed is told to stop.
    def steps(
        self, requests: Sequence[Request], most: int, feed: TokenFeed, tag: int
    ) -> tuple[list[list[int]], int]: ...
    # Below: for Hugging Face's own loops. Sequences are numbers; tokens int64.
    def create(self) -> int: ...
    def fork(self, sequence: int, tokens: int) -> int: ...
    def truncate(self, sequence: int, tokens: int) -> None: ...
    def destroy(self, sequence: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def forward(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],  # new tokens of each sequence
        tokens: int,  # address of sum(counts) int64
        logits: int,  # address of float32 [rows, vocab]; 0: none wanted, or the executor keeps them
        rows: Sequence[int],  # of the concatenated tokens, ascending: those whose logits are wanted
    ) -> None: ...
    # Memory.
    def cache_bytes_per_token(self) -> int: ...
    def cache_bytes_per_state(self) -> int: ...  # of the recurrent mixers of a sequence; 0 without any
    @property
    def cache_used_bytes(self) -> int: ...
    @property
    def cache_reserved_bytes(self) -> int: ...
    @property
    def cache_limit_bytes(self) -> int: ...
    # Seconds and calls by kind of work since the last reset (thread 0), for `bench llm --profile`.
    def profile(self, enabled: bool) -> dict[str, tuple[float, int]]: ...

class DecoderModel(Model):
    """The decoder of csrc/llm, with its weights and its KV cache."""

    def __init__(
        self,
        spec: DecoderSpec,  # of this rank
        # As MatrixShape: name, rows, cols, format, group, minimum, scales.
        matrices: Sequence[tuple[str, int, int, str, int, bool, bool]],
        vectors: Sequence[tuple[str, int]],
        threads: int,  # 0: the CPUs of this process
        cache_format: str,  # f32, bf16, i8, i4
        cache_limit_bytes: int,
        # Bytes that weights may take, 0: all. Experts that do not fit stay in the file that they are read from.
        memory: int = 0,
    ) -> None: ...
    @property
    def resident_bytes(self) -> int: ...  # of weight_bytes, those in memory
    # Packing. Addresses are of memory that stays as it is during the call; the GIL is released. Types: f32 f16 bf16 f64
    # q8_0 q4_0 q4_1, blocks of one format: q5_0 q5_1 iq4_nl mxfp4, and superblocks: q2_k q3_k q4_k q5_k q6_k iq4_xs.
    # Strides in bytes. `order`: row i comes from source row order[i].
    def set_rows(
        self,
        name: str,
        first: int,
        count: int,
        address: int,
        type: str,
        row_stride: int,
        col_stride: int = 0,
        order: Sequence[int] | None = None,
    ) -> None: ...
    def set_quantised_rows(self, name: str, first: int, count: int, q: int, scales: int, minima: int = 0) -> None: ...
    def set_vector(
        self, name: str, first: int, count: int, address: int, type: str, stride: int = 0, plus: float = 0.0
    ) -> None: ...  # `plus` is added to each value: Gemma's 1 + weight
    # The packed weights as one block, for the cache file: exactly weight_bytes at the file's position `offset`.
    # Checksums are of what every token needs, and of each expert (csrc/llm/decoder/weight_file.h); `read` says whether
    # they are those. Where experts stay in the file, they go there as they are packed, from `stream_to` on.
    def stream_to(self, fd: int, offset: int) -> None: ...
    def write(self, fd: int, offset: int, progress: Callable[[int], object] | None = None) -> list[int]: ...
    def read(
        self, fd: int, offset: int, checksums: Sequence[int], progress: Callable[[int], object] | None = None
    ) -> bool: ...
    # Of experts that stay in a file: used and missed, ahead (read) and ahead_used, bytes, slot_bytes, waited_seconds.
    # None: all are in memory.
    def expert_stats(self) -> dict[str, float] | None: ...
    def finish(self) -> None: ...  # after the last weight; ModelError names what is missing
    # Of a head that drafts: takes that model's embedding, and its head where it has none of its own, whose rows are of
    # these tokens.
    def borrow(self, model: DecoderModel, tokens: Sequence[int] = ()) -> None: ...
    # Of an encoder: float32 [all tokens, hidden] at `hidden` from int64 tokens of whole sequences, counts[i] of them
    # one after another. `types`: int64 too, 0 where all are 0.
    def encode(self, counts: Sequence[int], tokens: int, types: int, hidden: int) -> None: ...

class PagedAttention:
    """Attention over a cache in pages, for models whose other code is transformers': csrc/llm/attention."""

    def __init__(
        self,
        layers: Sequence[tuple[int, int, int, int]],  # heads, kv_heads, head_dim, value_dim
        cache_format: str,  # f32, bf16, i8, i4
        limit_bytes: int,
        threads: int,  # 0: the CPUs of this process
    ) -> None: ...
    def create(self) -> int: ...
    def destroy(self, sequence: int) -> None: ...
    def fork(self, sequence: int, tokens: int) -> int: ...
    def truncate(self, sequence: int, tokens: int) -> None: ...
    def length(self, sequence: int) -> int: ...
    def extend_bytes(self, sequence: int, tokens: int) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    # (sequence, start, count) of a run; then each layer, with addresses of dense float32 [tokens, heads, head_dim].
    def begin(self, segments: Sequence[tuple[int, int, int]]) -> None: ...
    def attend(
        self,
        layer: int,
        q: int,
        k: int,
        v: int,
        out: int,
        scale: float,
        softcap: float,
        window: int,
        chunk: int,
        sinks: int,
    ) -> None: ...

class Executor(Protocol):
    """What ExternalModel calls, in one thread at a time. ModelError: there is no memory, or the model is at fault."""

    weight_bytes: int
    most_tokens: int  # of a run
    # Of the memory of sequences: that a token takes, that sequences have, taken from the system, the most.
    @property
    def token_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    # What has become of a sequence since the last run: it is new (`of` -1), has the first tokens of `of` (itself: it
    # forgets the others), or is gone (`length` -1). Said again after a call that an exception has ended. A recurrent
    # state is kept by a sequence that nobody goes on with: `of` has all the tokens that are taken of it then.
    def change(self, sequence: int, of: int, length: int) -> None: ...
    # Room for more tokens of sequences, as (sequence, count), before the runs that compute them.
    def reserve(self, wanted: list[tuple[int, int]]) -> None: ...
    # New tokens of sequences, as (sequence, position of the first, tokens, length that rotary positions are of). Writes
    # the logits and the last hidden states of some rows of them, float32 [rows, vocab] and [rows, hidden], to addresses
    # (0: the executor keeps the logits). Returns the next token of other rows, -1 for logits that are no numbers; these
    # are given as (row, temperature, top_k, top_p, min_p, a random number in [0, 1), that of the token behind it),
    # temperature 0: the likeliest one.
    def run(
        self,
        segments: list[tuple[int, int, list[int], int]],
        picks: list[tuple[int, float, int, float, float, float, float]],
        logits_rows: list[int],
        logits: int,
        hidden_rows: list[int],
        hidden: int,
    ) -> list[int]: ...
    # The logits of a sequence were no numbers: whoever gets its memory next must not see what is there.
    def clear(self, sequence: int) -> None: ...
    # Of ranks that share the model: before the first step on each of them, and rank 0's value on all of them.
    def connect(self) -> None: ...
    def shared(self, value: int) -> int: ...

class ExternalModel(Model):
    """A model whose tokens an executor computes. It has no drafts, and does not keep the promise of `exact`."""

    def __init__(self, spec: DecoderSpec, executor: Executor) -> None: ...
    @property
    def executor(self) -> Any: ...

class TokenFeed:
    """Tokens of several steps on their way to another thread; readable (`fileno`) as long as some were not taken."""

    def fileno(self) -> int: ...
    def take(self) -> list[tuple[int, list[int]]]: ...  # tag and tokens of each step since the last call
    def stop(self, value: bool = True) -> None: ...  # after the step under way; False: not any more

class Linear:
    """One packed matrix for the generic path: y = x Wᵀ + bias."""

    def __init__(
        self, rows: int, cols: int, format: str, group: int = 0, minimum: bool = False, scales: str = "halves"
    ) -> None: ...
    def set_rows(
        self, first: int, count: int, address: int, type: str, row_stride: int, col_stride: int = 0
    ) -> None: ...
    def set_quantised_rows(self, first: int, count: int, q: int, scales: int, minima: int = 0) -> None: ...
    # x, y: dense rows of `type` (f32, f16, bf16); bias: float32 [rows] or 0.
    def multiply(self, x: int, y: int, tokens: int, type: str, bias: int = 0) -> None: ...
    # y: `count` dense rows of the matrix, whose numbers are the int64 at `rows`; UsageError: there is no such row.
    def copy_rows(self, rows: int, count: int, y: int, type: str) -> None: ...
    @property
    def bytes(self) -> int: ...

def rms_norm(x: int, y: int, rows: int, cols: int, type: str, weight: int, eps: float) -> None: ...

# Rows as quantised values (csrc/llm/pack/quantise.h); returns the sum of squared errors and of squares.
def quantise(
    address: int,
    type: str,
    row_stride: int,
    rows: int,
    cols: int,
    format: str,
    group: int,
    minimum: bool,
    q: int,
    scales: int,
    minima: int,
) -> tuple[float, float]: ...

# Bytes a second that the threads (0: all CPUs) read together, the best of `rounds` passes over a buffer of `bytes`.
def read_bandwidth(bytes: int, threads: int = 0, rounds: int = 5) -> float: ...
