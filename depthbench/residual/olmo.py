"""How an architecture lies in the checkpoints of DepthBench's own code, a fork of OLMo-core. `depthbench.convert` reads
and writes them by these declarations alone."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NONE: Mapping[str, Any] = MappingProxyType({})


class OlmoSetting(NamedTuple):
    """Where DepthBench's config has a field of an architecture's config.

    key: dotted, under `model.block`. default: theirs where the config lacks the key.
    values: theirs -> ours, where the same thing is called otherwise.
    in_effect: attribute of the `Residual` with the value that holds, where our field may be null.
    """

    key: str
    default: Any
    values: Mapping[Any, Any] | None = None
    in_effect: str | None = None


class OlmoFormat(NamedTuple):
    """One architecture there. Keys are dotted, under `model.block`; parameters are named without the block's prefix.

    blocks: names of the block type; the first is written. former: a key, and its values (None: any), by which configs
        from before there was such a block type told it, on a `default` block.
    names: parameters of ours -> theirs, beside those that all architectures share. Several of ours under one name are
        its rows, one after the other.
    aliases: prefixes of names under which a tensor may lie a second time -> its first name's prefix.
    rows: theirs that are vectors stored as a matrix of one row. unused: theirs that may be there and are never read.
    settings: fields of our config that the config says. constants: those whose value their code fixes.
    eps: those that are the eps of the block's norms. final_eps: that of the final norm, where it may be another.
    unsaid: those whose value differs between revisions of their code, with the values; no checkpoint tells which.
    fixed: keys that we can follow at these values alone (None: absent); the first is written. free: keys that do not
        matter for what a model computes. last_block: keys in which the last block's config differs.
    attention, feed_forward: the paths of these modules. norm: type of the blocks' norms. init: of the initial weights.
    """

    blocks: tuple[str, ...]
    former: tuple[str, tuple[Any, ...] | None] | None = None
    names: Mapping[str, str] = NONE
    aliases: Mapping[str, str] = NONE
    rows: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    settings: Mapping[str, OlmoSetting] = NONE
    constants: Mapping[str, Any] = NONE
    eps: tuple[str, ...] = ("norm_eps",)
    final_eps: str | None = None
    unsaid: Mapping[str, tuple[Any, ...]] = NONE
    fixed: Mapping[str, tuple[Any, ...]] = NONE
    free: frozenset[str] = frozenset()
    last_block: Mapping[str, Any] = NONE
    attention: str = "attention"
    feed_forward: str = "feed_forward"
    norm: str = "rms"
    init: str = "normal"


POST_NORMS = {
    "attention_residual.post_norm.weight": "post_attention_norm.weight",
    "mlp_residual.post_norm.weight": "post_feed_forward_norm.weight",
}
