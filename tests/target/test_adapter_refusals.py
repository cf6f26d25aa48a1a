"""What the adapter refuses, and that each refusal says why."""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from adapter_zoo import VOCAB, randomised, write
from dspark.checkpoint import inspect_checkpoint
from dspark.draft import load_draft
from dspark.errors import CheckpointError, ConfigError
from dspark.serve.models import Models
from dspark.target import load_target
from dspark.target.adapter import states
from dspark.target.adapter.cache import AdaptedCache
from dspark.target.adapter.model import TransformersTarget
from places import TINY
from random_pair import HIDDEN, LAYERS, write_draft

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
POSITIONS = {"max_position_embeddings": 64, "num_hidden_layers": LAYERS}


def edit(path: Path, **changes: Any) -> Path:
    """Changes config.json; None removes a key."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def write_model(path: Path, name: str, **sizes: Any) -> Path:
    randomised(getattr(transformers, name), {**SMALL, **sizes}).save_pretrained(path)
    return path


RECURRENT = {
    "MambaForCausalLM": {"state_size": 4, "conv_kernel": 3},
    "Mamba2ForCausalLM": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3, "lru_width": HIDDEN, "attention_window_size": 8},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_are_refused_by_name(name: str, tmp_path: Path) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    path = write_model(tmp_path, name, **RECURRENT[name])
    with pytest.raises(ConfigError, match=f"{name} cannot be a target: .*roll") as caught:
        load_target(path)
    assert "\n" not in str(caught.value)


def test_a_model_that_sees_the_future_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path, "BertLMHeadModel", is_decoder=False)
    with pytest.raises(ConfigError, match="BertLMHeadModel cannot be a target"):
        load_target(path)


def wrapped_forward(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    plain = transformers.GPT2LMHeadModel.forward

    @functools.wraps(plain)
    def forward(self: Any, input_ids: Tensor, **options: Any) -> Any:
        return change(self, input_ids, plain(self, input_ids, **options))

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", forward)


def test_a_state_outside_of_the_cache_is_found_by_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that remembers the last token of the pass before, whatever the cache is cut to."""

    def remembers(model: Any, ids: Tensor, output: Any) -> Any:
        output.logits = output.logits + getattr(model, "remembered", 0)
        model.remembered = 0.01 * float(ids[0, -1])
        return output

    wrapped_forward(monkeypatch, remembers)
    with pytest.raises(ConfigError, match="rejected tokens still change its logits"):
        load_target(write(tmp_path, "gpt2"))


def test_rows_that_read_later_rows_are_found_by_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blurs(model: Any, ids: Tensor, output: Any) -> Any:
        output.logits = output.logits + 0.1 * output.logits.mean(dim=1, keepdim=True)
        return output

    wrapped_forward(monkeypatch, blurs)
    with pytest.raises(ConfigError, match="a text has other logits in two passes than in one"):
        load_target(write(tmp_path, "gpt2"))


def test_hidden_states_that_are_not_those_of_the_layers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(model: Any, ids: Tensor, output: Any) -> Any:
        if output.hidden_states is not None:
            output.hidden_states = output.hidden_states[1:]
        return output

    wrapped_forward(monkeypatch, forgets)
    with pytest.raises(ConfigError, match=r"expected 4 hidden states of shape \[1, 4, 16\], found 3"):
        load_target(write(tmp_path, "gpt2"))


def test_a_head_that_cannot_be_lent_is_refused_when_a_draft_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target alone is served: its own logits are right."""

    def scales(model: Any, ids: Tensor, output: Any) -> Any:
        output.logits = output.logits * 3
        return output

    wrapped_forward(monkeypatch, scales)
    target = load_target(write(tmp_path / "target", "gpt2"))
    with pytest.raises(ConfigError, match="GPT2LMHeadModel: its logits are not its output head"):
        load_draft(write_draft(tmp_path / "draft", VOCAB), target=target)


def test_a_target_with_narrow_embeddings_lends_nothing(tmp_path: Path) -> None:
    """Alone, or with a draft that has its own embeddings and head, it is a target like any other."""
    narrow = write_model(tmp_path / "t", "OPTForCausalLM", ffn_dim=24, word_embed_proj_dim=8, **POSITIONS)
    target = load_target(narrow)
    assert target.refuses_to_lend == {
        "embeddings": "OPTForCausalLM embeds in 8 dimensions, not in 16",
        "output head": "OPTForCausalLM: its output head reads 8 dimensions, not 16",
    }
    draft = write_draft(tmp_path / "draft", VOCAB)
    with pytest.raises(
        ConfigError, match="the draft has no embeddings of its own, and OPTForCausalLM embeds"
    ):
        load_draft(draft, target=target)
    logits, taps = target(torch.arange(4), [(target.new_cache(), 4)], (-1, 0))
    assert (logits.shape, taps.shape) == ((4, VOCAB), (4, 2 * HIDDEN))


def test_a_cut_that_does_not_cut_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate = states.truncate
    monkeypatch.setattr(states, "truncate", lambda cache, length: truncate(cache, length + 1))
    with pytest.raises(ConfigError, match="keeps 3 positions of 2 in layer 0: it cannot be rolled back"):
        load_target(write(tmp_path, "gpt2"))


def test_a_ring_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that transformers itself takes for a model with windows, since 4.56."""
    if "config" not in inspect.signature(transformers.DynamicCache).parameters:
        pytest.skip(f"DynamicCache of transformers {transformers.__version__} never is a ring")
    path = write(tmp_path, "mistral-window")
    target = load_target(path)
    ring = functools.partial(transformers.DynamicCache, config=target.model.config)
    cache = AdaptedCache(ring())
    with pytest.raises(ConfigError, match="keeps 4 positions of 8 in layer 0: it cannot be rolled back"):
        target(torch.arange(8), [(cache, 8)])
    monkeypatch.setattr(TransformersTarget, "new_cache", lambda _: AdaptedCache(ring()))
    with pytest.raises(
        ConfigError, match=r"MistralForCausalLM .* keeps only a window of positions in layer 0"
    ):
        load_target(path)


class Counting:
    """A cache that counts apart from its tensors."""

    def __init__(self, length: int) -> None:
        shape = 1, 2, length, 4
        self.layers = [
            SimpleNamespace(keys=torch.randn(shape), values=torch.randn(shape)) for _ in range(LAYERS)
        ]
        self.counted = length

    def get_seq_length(self) -> int:
        return self.counted


def test_tensors_are_cut_and_the_count_is_compared() -> None:
    cache = Counting(9)
    before = [layer.keys.clone() for layer in cache.layers]
    assert states.fault(cache, 9) is None and states.foreign_state(cache) is None
    copy = states.copied(cache, 4)
    copy.counted = 4
    assert states.fault(copy, 4) is None and states.fault(cache, 9) is None
    copy.layers[0].keys.zero_()
    states.truncate(cache, 6)
    assert states.fault(cache, 6) == "counts 9 positions where 6 are kept"
    assert states.fault(cache, 9) == "keeps 6 positions of 9 in layer 0"
    for layer, whole in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, whole[:, :, :6])


def test_a_state_beside_keys_and_values_is_named() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), 0)
    assert states.foreign_state(cache) is None
    if hasattr(cache, "layers"):
        cache.layers[0].conv_states = {0: torch.zeros(2)}
        assert states.foreign_state(cache) == "keeps conv_states beside keys and values in layer 0"


def test_a_rotation_that_changes_with_the_length_ends_the_window(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    if int(transformers.__version__.split(".")[0]) > 4:
        own = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
        changes = {"rope_parameters": {**rope, **own}}
    else:
        changes = {"rope_scaling": {**rope, "type": "longrope"}}
    path = write(tmp_path, "phi3", original_max_position_embeddings=32, **changes)
    target = load_target(path)
    assert target.config.max_position_embeddings == 32
    assert "window 32 instead of 128: beyond it, longrope" in target.runs_through
    assert inspect_checkpoint(path)["max_position_embeddings"] == 32


def test_missing_and_misshapen_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write(tmp_path, "mistral-window")
    # Copies: some releases of safetensors map the file, which is written to below.
    weights = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    down = weights.pop("model.layers.1.mlp.down_proj.weight")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model.layers.1.mlp.down_proj.weight is missing"):
        load_target(path)
    weights["model.layers.1.mlp.down_proj.weight"] = down[:, 1:].contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    wrong = r"down_proj.weight has the wrong shape, expected \[16, 24\], found \[16, 23\]"
    with pytest.raises(CheckpointError, match=wrong):
        load_target(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantised_weights_that_only_their_dtype_shows_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers converts them and drops their scale: another model, and nothing says so."""
    from safetensors.torch import load_file, save_file

    path = write(tmp_path, "mistral-window")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    name = "model.layers.1.mlp.down_proj.weight"
    weights = load_file(path / "model.safetensors")
    weights[name] = (16 * weights[name]).to(dtype)
    weights["model.layers.1.mlp.down_proj.weight_scale"] = torch.tensor(1 / 16)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    stored = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8", torch.uint8: "U8"}[dtype]
    message = (
        rf"model\.safetensors: tensor {re.escape(name)} has dtype {stored}, expected F64, F32, F16, BF16"
    )
    with pytest.raises(CheckpointError, match=message):
        load_target(path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias"),
        ("mistral-window", "model.mtp.ids"),
    ],
)
def test_what_the_model_does_not_read_may_have_any_dtype(kind: str, name: str, tmp_path: Path) -> None:
    """Masks that older versions stored as bytes, and leftovers."""
    from safetensors.torch import load_file, save_file

    path = write(tmp_path, kind)
    weights = load_file(path / "model.safetensors")
    weights[name] = torch.ones(1, 1, 128, 128, dtype=torch.uint8).tril()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    load_target(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MistralForSequenceClassification"]},
            "'mistral' is a MistralForCausalLM",
        ),
        ({"model_type": "llama"}, "'llama' is a LlamaForCausalLM"),
        ({"model_type": "of-tomorrow"}, "'of-tomorrow' is unknown"),
        (
            {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
            "code that comes with a checkpoint is not run",
        ),
        ({"architectures": None}, "architectures is none, model_type 'mistral'"),
        ({"architectures": ["MistralForCausalLM", "GPT2LMHeadModel"]}, "is MistralForCausalLM, GPT2LMHead"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not supported"),
        ({"num_attention_heads": "two"}, "transformers .* cannot load this MistralForCausalLM"),
        ({"max_position_embeddings": 0}, "names no context window"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = edit(write(tmp_path, "mistral-window"), **changes)
    with pytest.raises(CheckpointError, match=words):
        load_target(path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "gpt2")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled weights, which are not supported"):
        load_target(path)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "mistral-window")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for load in (load_target, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"MistralForCausalLM; .*pip install 'transformers>=5.0'"):
            load(path)


def test_native_targets_never_import_transformers() -> None:
    code = (
        "import sys, dspark\n"
        "from dspark.target import load_target\n"
        "from dspark.checkpoint import inspect_checkpoint\n"
        f"load_target({str(TINY / 'target')!r})\n"
        f"inspect_checkpoint({str(TINY / 'target')!r})\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inspect_tells_what_is_known_without_loading(tmp_path: Path) -> None:
    told = inspect_checkpoint(write(tmp_path, "gpt2"))
    assert (told["role"], told["architecture"], told["layers"]) == ("target", "GPT2LMHeadModel", LAYERS)
    assert told["runs_through"] == f"transformers {transformers.__version__}"
    assert (told["vocab_size"], told["max_position_embeddings"]) == (VOCAB, 128)
    assert "checked by loading" in told["warnings"][0]
    json.dumps(told)


def test_caches_that_share_memory_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe notices, the decoder says so, and a fork is declined."""
    path = write(tmp_path, "gpt2")

    def reuse() -> tuple[list[str], int]:
        models = Models.load(path, None, device="cpu")
        runner = models.runner()
        with torch.inference_mode():
            runner.prefill([1], [[1, 2, 3]], [False])
            taken = runner.fork(2, 1, 2, False)
        return [line for line in models.info()["switched_off"] if line.startswith("prefix reuse")], taken

    assert reuse() == ([], 2)

    def shared(source: Any, length: int) -> Any:
        states.truncate(source, length)
        return source

    monkeypatch.setattr(states, "copied", shared)
    (reason,), taken = reuse()
    assert "a copied cache of GPT2LMHeadModel gives other logits" in reason and taken == 0


def test_caches_that_cannot_be_copied_are_not_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "copied", lambda source, length: source)
    reason = Models.load(write(tmp_path, "gpt2"), None, device="cpu").info()["switched_off"][0]
    assert reason.startswith(
        "prefix reuse: caches of GPT2LMHeadModel cannot be copied (ConfigError: the cache"
    )
