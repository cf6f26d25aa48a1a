"""The configuration of a draft, whichever packaging it came in."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.checkpoint.rope import RopeConfig

MARKOV_HEADS = ("vanilla", "gated", "rnn")

WINDOW_RULES = ("sliding", "anchored", "anchored, bidirectional")
"""What row i of a block, at position p + i, sees in a layer with window w. Sliding (SpecForge): the last w
positions, its own included. Anchored (speculators): the context from position p - w on, whatever i is, and
the block up to row i; or, bidirectional, all of the block."""


@dataclass(frozen=True)
class DraftConfig:
    """One description for every packaging; read it with `dspark.draft.packaging.read_draft`.

    Attributes:
        packaging: "flat", "nested", "speculators", "dflash" or "gemma4".
        architecture: the entry of `architectures`, or what it was recognised as.
        block_size: inputs of a block at serving time; equal to gamma unless slot 0 is dropped.
        training_block_size: the widest block that the weights have seen.
        drop_anchor_slot: the anchor's own slot predicts nothing (z-lab's DFlash).
        target_layer_ids: taps, in the order of the projection's columns; -1 is the embeddings.
        num_target_layers: layers of the target it was made for, or None if the checkpoint does not say.
        target_hidden_size: width of one tap.
        markov_rank: 0 means that there is no Markov head; then `markov_head_type` is None.
        own_embeddings, own_head: whether the checkpoint holds them; else they are the target's.
        vocab_size: tokens of the target, which embeddings, W1 and all token ids refer to.
        draft_vocab_size: tokens that can be drafted; fewer where the checkpoint has a map (see
            `dspark.draft.vocabulary`). Output head and W2 have as many rows.
        windows: each layer's sliding window, or None for full attention.
        window_rule: what a sliding layer sees, see `WINDOW_RULES`.
        causal: in every layer no row of a block sees a later one; else only where the window rule says so.
        notes: what the checkpoint does not say and its format implies, for `inspect`.
    """

    packaging: str
    architecture: str
    vocab_size: int
    draft_vocab_size: int
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
    window_rule: str = "sliding"
    causal: bool = False
    notes: tuple[str, ...] = ()

    @property
    def gamma(self) -> int:
        """Tokens drafted per block."""
        return self.block_size - 1 if self.drop_anchor_slot else self.block_size

    @property
    def reduced(self) -> bool:
        """Whether some tokens of the target cannot be drafted."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def state_rows(self) -> int:
        """Hidden states per block that the heads read: gamma, preceded by that of the anchor's own slot where
        a recurrent head steps over that slot although nothing is drafted from it."""
        through_anchor = self.drop_anchor_slot and self.markov_head_type == "rnn"
        return self.gamma + 1 if through_anchor else self.gamma
