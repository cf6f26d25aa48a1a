"""A target, its draft and its tokenizer, loaded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, Self

import torch

from dspark.attention.workers import parallel_region
from dspark.checkpoint.calibration import FILE_NAME, Entry
from dspark.cpus import warn_of_idle_threads
from dspark.devices import parse_device, parse_dtype
from dspark.draft import DSparkDraftModel, load_draft
from dspark.errors import CheckpointError, RequestError, shown
from dspark.kernels import ROLES, Choice, choose
from dspark.kernels.sampler import Sampler, sampling_role
from dspark.pretrained import resolve
from dspark.sampling import SamplingParams
from dspark.serve.calibration import draft_calibrations
from dspark.serve.heads import heads_to_core, heads_to_device
from dspark.serve.runner import Runner
from dspark.target import load_target
from dspark.target.protocol import OURS, Target, TargetCache
from dspark.text import Tokenizer
from dspark.text.files import eos_token_ids, read_object


@dataclass(frozen=True, slots=True)
class Models:
    """What a decoder decodes with."""

    target: Target
    draft: DSparkDraftModel | None
    tokenizer: Tokenizer | None
    generation_config: Mapping[str, Any]
    end_token_ids: tuple[int, ...]
    """The ids that end a text."""
    paths: tuple[Path, Path | None]
    calibrations: tuple[Entry, ...] = ()
    """The entries of the draft's `calibration.json`."""
    switched_off: list[str] = field(default_factory=list)
    kernels: Choice = field(default_factory=lambda: Choice(None, "nobody chose"))
    """The CUDA kernels of the models' device."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """For each role that kernels could have: what does it, and why; the draft's own roles as "draft ..."."""
    position_bytes: int = 0
    """Bytes of a position in the caches of target and draft; 0 if the target does not know."""
    state_bytes: int = 0
    """Bytes that each of the target's caches takes whatever its length; its mark takes as many again."""

    @classmethod
    def load(
        cls,
        target: str | PathLike[str],
        draft: str | PathLike[str] | None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        block_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Loads target, draft and tokenizer; raises `CheckpointError` or `ConfigError`."""
        where, what = parse_device(device), parse_dtype(dtype)
        if where.type == "cpu":
            warn_of_idle_threads(torch.get_num_threads())
        target_path = resolve(target, "target")
        draft_path = None if draft is None else resolve(draft, "draft")
        model = load_target(target_path, device=where, dtype=what, progress=progress)
        draft_model = None
        if draft_path is not None:
            draft_model = load_draft(
                draft_path,
                target=model,
                device=where,
                dtype=what,
                block_size=block_size,
                progress=progress,
            )
        choice = choose(where)
        roles = model.use_kernels(choice)
        dtypes, rank, gamma = {model.dtype}, 0, 0
        if draft_model is not None:
            roles |= {f"draft {role}": how for role, how in draft_model.use_kernels(choice).items()}
            dtypes.add(draft_model.dtype)
            rank, gamma = draft_model.config.markov_rank, draft_model.config.gamma
        vocabulary = model.config.vocab_size
        roles["sampling"] = sampling_role(choice, dtypes, rank=rank, vocabulary=vocabulary, gamma=gamma)
        calibrations: tuple[Entry, ...] = ()
        if draft_path is not None and draft_model is not None:
            calibrations = draft_calibrations(draft_path / FILE_NAME, draft_model.config, block_size)
        switched_off: list[str] = []
        if model.unforkable is not None:
            switched_off.append(f"prefix reuse: {model.unforkable}")
        tokenizer = None
        if (target_path / "tokenizer.json").exists():  # a damaged one is an error
            tokenizer = Tokenizer.from_directory(target_path)
        else:
            switched_off.append(f"text: {_without_tokenizer(target_path)}")
        position_bytes, state_bytes = _cache_bytes(model, draft_model)
        return cls(
            target=model,
            draft=draft_model,
            tokenizer=tokenizer,
            generation_config=read_generation_config(target_path),
            end_token_ids=eos_token_ids(target_path),
            paths=(target_path, draft_path),
            calibrations=calibrations,
            switched_off=switched_off,
            kernels=choice,
            roles=roles,
            position_bytes=position_bytes,
            state_bytes=state_bytes,
        )

    @property
    def window(self) -> int:
        """The target's context window, in positions."""
        return self.target.config.max_position_embeddings

    @property
    def gamma(self) -> int:
        """Tokens that one draft pass proposes; 0 without a draft."""
        return 0 if self.draft is None else self.draft.config.gamma

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has a confidence head."""
        return self.draft is not None and self.draft.confidence_head is not None

    @property
    def speculation(self) -> str:
        """What a result says about drafting."""
        return "on" if self.draft is not None else "off: no draft"

    def drafted_per_round(self, block_size: int | None) -> int:
        """Drafted tokens to keep of each block."""
        return self.gamma if block_size is None else min(block_size, self.gamma)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `RequestError` if the target has none."""
        if self.tokenizer is None:
            raise RequestError(_without_tokenizer(self.paths[0]))
        return self.tokenizer

    def tokens(self, prompt: Any) -> tuple[int, ...]:
        """The prompt's token ids, checked; raises `RequestError`."""
        tokens: Sequence[int]
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            tokens = self.require_tokenizer().encode(prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
            tokens = prompt
        else:
            raise RequestError(f"a prompt is a string or a list of token ids, not {type(prompt).__name__}")
        if not tokens:
            raise RequestError("the prompt is empty: at least one token is needed to begin from")
        vocabulary = self.target.config.vocab_size
        for position, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocabulary:
                raise RequestError(
                    f"prompt token {position} is {shown(token)}, "
                    f"outside of the ids from 0 to {vocabulary - 1}"
                )
        return tuple(map(int, tokens))

    def runner(self) -> Runner:
        """Torch's side of the engine."""
        return Runner(self.target, self.draft, self._sampler())

    def _sampler(self) -> Sampler | None:
        """What makes the decisions on the models' device, if kernels do."""
        if self.kernels.kernels is None or not self.roles.get("sampling", "").startswith("kernel"):
            return None
        heads = {} if self.draft is None else heads_to_device(self.draft, self.target.config.vocab_size)
        return Sampler(self.kernels.kernels, self.target.device, heads)

    def heads(self) -> dict[str, Any]:
        """The draft's heads as the core reads them."""
        return {} if self.draft is None else heads_to_core(self.draft)

    def _attention(self) -> str:
        """What computes the target's attention, and on how many threads."""
        if self.target.runs_through != OURS:
            return f"that of {self.target.runs_through}"
        if self.target.device.type != "cpu":
            return self.roles.get("attention", "torch")
        threads = (
            "torch's threads" if parallel_region() else "one thread: torch's OpenMP library was not found"
        )
        return f"the core's, on {threads}, for a few rows of float32 or bfloat16; torch's for the rest"

    def _decisions(self) -> str:
        """Who chooses tokens, and where."""
        if self.roles.get("sampling", "").startswith("kernel"):
            return "the kernels, where the logits are, and Rust on the CPU for what they do not serve"
        if self.target.device.type == "cpu":
            return "Rust on the CPU, reading logits in place"
        return "Rust on the CPU, logits copied to the host"

    def _kernels(self) -> dict[str, str]:
        """What the CUDA kernels are compiled for, and what does the work of each role."""
        core, reason = self.kernels.kernels, self.kernels.reason
        where = (
            f"none: {reason}" if core is None else f"{core.architecture} by NVRTC {core.nvrtc}: {core.name}"
        )
        nobody = f"no kernels: {reason}" if core is None else "this model does not use kernels"
        return {"compiled for": where, **dict.fromkeys(ROLES, nobody), **self.roles}

    def info(self) -> dict[str, Any]:
        """What was loaded, and how it runs."""
        target, draft = self.paths
        return {
            "target": str(target),
            "draft": None if draft is None else str(draft),
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "draft_dtype": None if self.draft is None else str(self.draft.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "decisions": self._decisions(),
            "attention": self._attention(),
            "kernels": self._kernels(),
            "target_runs_through": self.target.runs_through,
            "speculation": self.speculation,
            "switched_off": list(self.switched_off),
        }


def _cache_bytes(target: Target, draft: DSparkDraftModel | None) -> tuple[int, int]:
    """`position_bytes` and `state_bytes` of `Models`."""
    cache: TargetCache = target.new_cache()  # only one: even empty, a hybrid's has its whole recurrent state
    own = 0 if draft is None else draft.new_context().position_bytes
    return cache.position_bytes + own if cache.position_bytes else 0, cache.state_bytes


def _without_tokenizer(target: Path) -> str:
    return f"{target} has no tokenizer.json: only prompts given as token ids can be used"


def read_generation_config(target: Path) -> dict[str, Any]:
    """The target's own sampling parameters, empty without the file; raises `CheckpointError`."""
    path = target / "generation_config.json"
    config = read_object(path)
    for key, value in config.items():
        try:
            SamplingParams().with_defaults({key: value})
        except RequestError as error:
            raise CheckpointError(f"{path}: {error}") from error
    return config
