"""The decisions of dspark, compiled from Rust. `dspark.core` is the public face of this module."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

from dspark.errors import NumericsError
from dspark.sampling import SamplingParams

__all__ = [
    "Attention",
    "Calibration",
    "ChainPlan",
    "CostTable",
    "Engine",
    "HalfProduct",
    "KernelAttention",
    "KernelDelta",
    "Kernels",
    "Noise",
    "SmallProduct",
    "Ticket",
    "Uniforms",
    "VerifyPlan",
    "__version__",
    "accept_batch",
    "compile_kernels",
    "draft_chain",
    "kernel_architecture",
    "kernel_units",
    "plan",
    "step_logits",
    "threshold_prefix",
]
__version__: Final[str]

# (token_ids, text, logprobs, finish): what arrived since the last call; the last one has `finish`.
_Update: TypeAlias = tuple[list[int], str | None, list[dict[int, float]], dict[str, Any] | None]

@final
class Noise:
    """The counted noise of one round: a function of seed, position of the round's anchor, and sample."""

    def __new__(cls, seed: int, position: int, sample: int = 0) -> Noise: ...

@final
class Uniforms:
    """Uniform numbers in [0, 1) given by the caller, one for each slot, in place of `Noise`."""

    def __new__(
        cls, *, draft: Sequence[float] = ..., accept: Sequence[float] = ..., resample: Sequence[float] = ...
    ) -> Uniforms: ...

@final
class CostTable:
    """Seconds of a round by what it does: target pass, draft pass, chain, context feed."""

    def __new__(
        cls,
        points: Sequence[tuple[int, float]],
        *,
        round_seconds: float = 0.0,
        request_seconds: float = 0.0,
        draft: Sequence[tuple[int, float]] = ...,
    ) -> CostTable: ...
    @staticmethod
    def fit(
        passes: Sequence[tuple[int, int, float]],
        *,
        draft: Sequence[tuple[int, float]] = ...,
        token_seconds: float = 0.0,
        round_seconds: float = 0.0,
    ) -> CostTable: ...
    def seconds(self, tokens: int, requests: int = 0) -> float: ...
    def steps_per_second(self, tokens: int) -> float: ...

@final
class Calibration:
    """One temperature per position of the block, dividing the logit of the confidence there. `acceptance`
    says how often positions are kept if the ones before them are; the throughput policy starts from it."""

    def __new__(
        cls, temperatures: Sequence[float], block_size: int, acceptance: Sequence[float] = ...
    ) -> Calibration: ...
    @property
    def acceptance(self) -> list[float]: ...
    @property
    def temperatures(self) -> list[float]: ...
    def apply(self, confidences: Sequence[float]) -> list[float]: ...

@final
class Attention:
    """Attention of one pass: rows of several requests over their caches, a call per layer; by address."""

    def __new__(
        cls,
        dtype: str,
        key_heads: int,
        query_heads: int,
        head_dim: int,
        segments: list[tuple[int, int, int, int]],
        reaches: list[tuple[bool, int, bool]],
        workers: int,
        threads: int,
    ) -> Attention: ...
    def layer(self, index: int, reach: int, input: int, row_stride: int, output: int) -> None: ...

@final
class SmallProduct:
    """A small float32 weight `[cols, inner]`, packed for products of a few rows; `run` works by address."""

    def __new__(cls, weight: Any) -> SmallProduct: ...
    def run(self, x: int, rows: int, start: int, out: int) -> None: ...

@final
class HalfProduct:
    """A weight `[cols, inner]` in 16 bits, for products of a few rows; `run` works by address."""

    def __new__(cls, weight: Any, workers: int) -> HalfProduct: ...
    def run(self, x: int, rows: int, start: int, out: int) -> None: ...

@final
class Kernels:
    """The kernels of one device, by address; `dspark.kernels.choose` makes them."""

    def __new__(cls, driver: str, nvrtc: str, cache: str | None, device: int) -> Kernels: ...
    @property
    def architecture(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def nvrtc(self) -> str: ...
    def prepare(self, entries: Sequence[str]) -> None: ...
    def probe(self, out: int, blocks: int, start: int, stream: int) -> None: ...

_Launch = tuple[str, tuple[int, int, int], int, bytes]
_History = Sequence[tuple[Sequence[int], Sequence[int]]]

@final
class VerifyPlan:
    """The acceptance of a batch by kernels: a table and scratch memory, launches, an outcome."""

    def __new__(
        cls,
        target_logits: Any,
        draft_ids: Sequence[Sequence[int]],
        draft_logits: Any | tuple[ChainPlan, int, int, Sequence[int]] | None,
        rule: str,
        params: Sequence[SamplingParams],
        noise: Sequence[Noise],
        history: _History,
    ) -> VerifyPlan: ...
    @property
    def table(self) -> bytes: ...
    @property
    def scratch(self) -> int: ...
    @property
    def result(self) -> tuple[int, int]: ...
    def launches(self, table: int, scratch: int, threads: int | None = None) -> list[_Launch]: ...
    def run(self, kernels: Kernels, table: int, scratch: int, stream: int) -> None: ...
    def read(self, result: bytes) -> list[tuple[int, int, bool]]: ...

@final
class ChainPlan:
    """Markov chains of a batch by kernels, like `VerifyPlan`."""

    def __new__(
        cls,
        anchors: Sequence[int],
        base_logits: Any,
        hidden: Any | None,
        heads: dict[str, Any],
        rule: str,
        params: Sequence[SamplingParams],
        noise: Sequence[Noise],
        history: _History,
        *,
        gamma: int,
        limit: int | None = None,
        threshold: float | None = None,
    ) -> ChainPlan: ...
    @property
    def table(self) -> bytes: ...
    @property
    def scratch(self) -> int: ...
    @property
    def result(self) -> tuple[int, int]: ...
    def launches(self, table: int, scratch: int, threads: int | None = None) -> list[_Launch]: ...
    def run(self, kernels: Kernels, table: int, scratch: int, stream: int) -> None: ...
    def read(self, result: bytes) -> list[tuple[list[int], list[float]]]: ...

@final
class KernelAttention:
    """Attention of one pass by kernel: rows of several requests over their caches; by address."""

    def __new__(
        cls,
        kernels: Kernels,
        dtype: str,
        key_heads: int,
        query_heads: int,
        head_dim: int,
        segments: list[tuple[int, int, int, int, int]],
        reaches: list[tuple[bool, int, bool]],
    ) -> KernelAttention: ...
    @property
    def table(self) -> list[int]: ...
    @property
    def workspace(self) -> int: ...
    def layer(
        self,
        index: int,
        reach: int,
        input: int,
        row_stride: int,
        output: int,
        table: int,
        workspace: int,
        stream: int,
    ) -> None: ...

# Requests, most rows of one, rows; addresses: table, inputs, keys, log decays, updates.
_DeltaBatch: TypeAlias = tuple[int, int, int, int, int, int, int, int]
# Addresses: taps, rate, time bias, head weight or 0; added to squared lengths of keys, of outputs.
_DeltaWeights: TypeAlias = tuple[int, int, int, int, float, float]

@final
class KernelDelta:
    """The gated delta rule of a model's linear layers by kernel; by address."""

    MOST_ROWS: Final[int]
    def __new__(
        cls,
        kernels: Kernels,
        dtype: str,
        key_heads: int,
        groups: int,
        key_dim: int,
        value_dim: int,
        taps: int,
    ) -> KernelDelta: ...
    @property
    def entries(self) -> list[str]: ...
    def rows(
        self, batch: _DeltaBatch, weights: _DeltaWeights, layer: int, mixed: int, out: int, stream: int
    ) -> None: ...
    def carry(
        self, batch: _DeltaBatch, layers: int, first: int, count: int, conv: int, state: int, stream: int
    ) -> None: ...

@final
class Ticket:
    """A submitted request. Dropping it cancels the request."""

    def wait(self, whole: bool = False) -> _Update: ...
    def poll(self) -> _Update | None: ...
    def cancel(self) -> None: ...

@final
class Engine:
    """The engine: runs requests in rounds."""

    def __new__(
        cls,
        runner: Any,
        heads: dict[str, Any],
        *,
        rule: str,
        policy: str,
        gamma: int,
        block_size: int,
        max_batch_size: int,
        max_kv_tokens: int,
        prefill_chunk_size: int = 512,
        max_queue_size: int = 1024,
        confidence_threshold: float | None = None,
        cost_table: CostTable | None = None,
        markov_candidates: int | None = None,
        calibrations: Sequence[tuple[tuple[float, int, float, float] | None, Calibration]] = ...,
        budget_lag: int | None = None,
    ) -> Engine: ...
    def run(self) -> None: ...
    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        sample: int,
        max_tokens: int,
        end_ids: Sequence[int],
        detokenizer: Any | None = None,
        streams: bool = False,
        notify: Callable[[], Any] | None = None,
        waited: float = 0.0,
    ) -> Ticket: ...
    def close(self) -> None: ...
    def set_policy(
        self,
        policy: str,
        *,
        confidence_threshold: float | None = None,
        cost_table: CostTable | None = None,
        budget_lag: int | None = None,
    ) -> None: ...
    def cost_table(self) -> CostTable | None: ...
    def stats(self) -> dict[str, Any]: ...

def accept_batch(
    target_logits: Any,
    draft_ids: Sequence[Sequence[int]],
    draft_logits: Any,
    rule: str,
    params: Sequence[SamplingParams],
    noise: Sequence[Noise | Uniforms],
    history: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[int, int] | NumericsError]: ...
def draft_chain(
    anchor: int,
    base_logits: Any,
    hidden: Any,
    heads: dict[str, Any],
    rule: str,
    params: SamplingParams,
    noise: Noise,
    *,
    limit: int | None = None,
    threshold: float | None = None,
    candidates: int | None = None,
    prompt_ids: Sequence[int] = ...,
    output_ids: Sequence[int] = ...,
) -> tuple[list[int], list[float]]: ...
def step_logits(
    tokens: Sequence[int], base_logits: Any, hidden: Any, heads: dict[str, Any]
) -> list[list[float]]: ...
def kernel_architecture(capability: int) -> str: ...
def kernel_units() -> list[tuple[str, list[str]]]: ...
def compile_kernels(
    nvrtc: str, cache: str | None, unit: str, architecture: str
) -> tuple[bool, list[dict[str, Any]]]: ...
def plan(
    confidences: Sequence[Sequence[float]],
    cost_table: CostTable,
    *,
    limits: Sequence[int] | None = None,
    foresight: bool = False,
    rule: str = "rejection",
    greedy: bool = False,
) -> list[int]: ...
def threshold_prefix(confidences: Sequence[float], threshold: float) -> int: ...
