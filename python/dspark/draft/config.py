"""What a draft is, whichever packaging it came in."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.checkpoint.rope import RopeConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftConfig:
    """One description for every packaging; read it with `dspark.draft.packaging.read_draft`.

    Attributes:
        packaging: "flat" or "nested".
        architecture: the entry of `architectures`, or what it was recognised as.
        block_size: drafted inputs per block at serving time; gamma unless slot 0 is dropped.
        training_block_size: the widest block that the weights have seen.
        drop_anchor_slot: the anchor's own slot predicts nothing (z-lab's DFlash).
        target_layer_ids: taps, in the order of the projection's columns; -1 is the embeddings.
        num_target_layers: layers of the target it was made for, or None if the checkpoint does not say.
        target_hidden_size: width of one tap.
        markov_rank: 0 means that there is no Markov head; then `markov_head_type` is None.
        own_embeddings, own_head: whether the checkpoint holds them; else they are the target's.
        windows: each layer's sliding window, or None for full attention.
        notes: what was not said by the checkpoint and follows from its format, for `inspect`.
    """

    packaging: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    block_size: int
    training_block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    markov_rank: int
    markov_head_type: str | None
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    own_embeddings: bool
    own_head: bool
    drop_anchor_slot: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gamma(self) -> int:
        """Tokens drafted per block."""
        return self.block_size - 1 if self.drop_anchor_slot else self.block_size
