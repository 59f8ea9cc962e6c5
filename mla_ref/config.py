"""The dimensions and scaling rules of one MLA model, as data."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

YARN = "yarn"
DEFAULT = "default"


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions enter the ``r`` channels of queries and keys.

    theta: base of the geometric frequency ladder, ``theta ** (-2 i / r)``.
    interleaved: pairs are (0, 1), (2, 3), …; otherwise half-split, (0, r/2), (1, r/2 + 1), …
    rotate: False for NoPE models, whose ``r`` channels are cached without a rotation.
    scaling: "default" or "yarn"; the remaining fields belong to YaRN (arXiv 2309.00071, appendix B).
    factor: context extension, new length over ``original_max_position``.
    beta_fast, beta_slow: rotations per original context between which the linear ramp runs.
    mscale, mscale_all_dim: DeepSeek's two magnitude coefficients. The tables are multiplied by
        m(mscale) / m(mscale_all_dim), the softmax scale by m(mscale_all_dim) ** 2, with
        m(x) = 0.1 · x · ln(factor) + 1.
    attention_factor: multiplies the tables in place of that ratio; None where the ratio holds.
    truncate: whether the ends of the ramp are rounded outwards to whole pairs, as DeepSeek does.
    """

    theta: float = 10000.0
    interleaved: bool = True
    rotate: bool = True
    scaling: str = DEFAULT
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in (DEFAULT, YARN):
            raise ValueError(f"rope: scaling {self.scaling!r} is not one of {DEFAULT}, {YARN}")
        if not self.theta > 1.0:
            raise ValueError(f"rope: theta is {self.theta}, must be above 1")
        for field in ("factor", "original_max_position", "beta_fast", "beta_slow"):
            if not getattr(self, field) > 0:
                raise ValueError(f"rope: {field} is {getattr(self, field)}, must be above 0")

    def magnitude(self, coefficient: float) -> float:
        """YaRN's m(coefficient); 1 where positions are not extended."""
        if self.scaling != YARN or self.factor <= 1.0:
            return 1.0
        return 0.1 * coefficient * math.log(self.factor) + 1.0

    @property
    def table_scale(self) -> float:
        """What cosines and sines are multiplied by: 1 for DeepSeek, whose two coefficients are equal."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """One model's attention: names as in a Hugging Face config.json.

    num_layers: attention layers; those of a hybrid model that keep another kind of state are counted too.
    rms_norm_eps: of the two norms inside the layer, which many models fix at 1e-6 whatever their
        config.json says about the norms between layers.
    attention_bias: whether q_a_proj, kv_a_proj_with_mqa and o_proj have biases.
    q_lora_rank: None where the query has one projection, ``q_proj``.
    num_heads: heads in this shard; ``shard(tp)`` divides them, the latent is never divided.
    q_lora_scale, kv_lora_scale: LongCat-Flash multiplies the normalised query and key latents by
        sqrt(hidden_size / rank) before they are used and cached; 1 elsewhere.
    llama4_beta, llama4_max_position: queries are multiplied by
        1 + beta · ln(1 + floor(position / max_position)); beta 0 elsewhere.
    beyond: what the model computes besides: an output gate, a sparse index. Attention over its cache is as
        described here, its whole layer is not; empty where nothing is missing.
    source: where the figures were read.
    """

    name: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig = RopeConfig()
    num_layers: int = 1
    max_position: int = 4096
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    q_lora_scale: float = 1.0
    kv_lora_scale: float = 1.0
    llama4_beta: float = 0.0
    llama4_max_position: int = 8192
    beyond: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_layers")
        for field in (*sizes, "max_position", "q_lora_rank"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} is {getattr(self, field)}, must be at least 1")
        if self.qk_rope_head_dim < 0 or self.qk_rope_head_dim % 2:
            raise ValueError(
                f"{self.name}: qk_rope_head_dim is {self.qk_rope_head_dim}, must be even and not negative"
            )

    @property
    def qk_head_dim(self) -> int:
        """Query and key channels of one head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def entry_width(self) -> int:
        """Channels of one cached token: latent and rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim ** -0.5, times mscale² under YaRN. Never (kv_lora_rank + r) ** -0.5."""
        return self.rope.magnitude(self.rope.mscale_all_dim) ** 2 / math.sqrt(self.qk_head_dim)

    def shard(self, tp: int) -> "MLAConfig":
        """This model's attention on one of ``tp`` tensor-parallel ranks."""
        if tp < 1 or self.num_heads % tp:
            raise ValueError(f"{self.name}: num_heads={self.num_heads} is not divisible by tp={tp}")
        return replace(self, num_heads=self.num_heads // tp)

    @staticmethod
    def from_hf(source: "str | os.PathLike[str] | Mapping[str, object]") -> "MLAConfig":
        """The attention of a Hugging Face config.json; see ``mla_ref.huggingface.from_hf``."""
        from mla_ref.huggingface import from_hf

        return from_hf(source)
