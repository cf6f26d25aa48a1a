"""A hybrid target's parameters under the published names. They hold weights; `frozen` computes."""

from __future__ import annotations

import torch
from torch import nn

from dspark.layers.decoder import GatedMLP, LayerShape
from dspark.layers.norm import RMSNorm
from dspark.target.hybrid.config import DeltaSizes, HybridConfig


class GatedAttention(nn.Module):
    """Gated attention; `q_proj` gives, for each head, the query and then the gate on that head's output."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        self.q_proj = nn.Linear(hidden, 2 * queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias)
        self.q_norm = RMSNorm(head, config.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(head, config.rms_norm_eps, offset=1.0)


class GatedDeltaNet(nn.Module):
    """The products and the convolution of a linear layer; its decay and norm are in a `DeltaDecay`."""

    def __init__(self, hidden: int, sizes: DeltaSizes) -> None:
        super().__init__()
        self.in_proj_qkv = nn.Linear(hidden, sizes.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, sizes.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, sizes.value_heads, bias=False)
        self.conv1d = nn.Conv1d(
            sizes.channels, sizes.channels, sizes.kernel, groups=sizes.channels, bias=False
        )
        self.out_proj = nn.Linear(sizes.values, hidden, bias=False)


class DeltaDecay(nn.Module):
    """Parameters that stay in float32 in a 16-bit model, because decays multiply over thousands of tokens."""

    def __init__(self, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(sizes.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(sizes.value_heads))
        self.norm = RMSNorm(sizes.value_dim, eps)


class HybridLayer(nn.Module):
    """One layer: norm, mixer, norm, MLP. It has exactly one of the two mixers."""

    def __init__(self, config: HybridConfig, linear: bool) -> None:
        super().__init__()
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.mlp = GatedMLP(shape)
        if linear:
            self.linear_attn = GatedDeltaNet(config.hidden_size, config.delta)
        else:
            self.self_attn = GatedAttention(config)


class HybridWeights(nn.Module):
    """All parameters that are in the model's dtype."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(config, linear) for linear in config.is_linear)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def layer(self, index: int) -> HybridLayer:
        """Layer `index`, typed."""
        module = self.layers[index]
        if not isinstance(module, HybridLayer):
            raise TypeError(f"layer {index} is a {type(module).__name__}, expected a HybridLayer")
        return module


class HybridDecays(nn.Module):
    """The `DeltaDecay` of each linear layer, by the layer's number."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        decays = {
            str(layer): DeltaDecay(config.delta, config.rms_norm_eps)
            for layer, linear in enumerate(config.is_linear)
            if linear
        }
        self.layers = nn.ModuleDict(decays)

    def of(self, layer: int) -> DeltaDecay:
        """The `DeltaDecay` of layer `layer`, which must be linear."""
        decay = self.layers[str(layer)]
        if not isinstance(decay, DeltaDecay):
            raise TypeError(f"layer {layer} holds a {type(decay).__name__}, expected a DeltaDecay")
        return decay
