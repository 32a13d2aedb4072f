"""DepthBench's config.json, a tree of settings with `_CLASS_` tags, to a model's settings and back.

Whatever could change what the model computes is read or must have the one value that depthbench computes. A key that
is not known here stops the import unless it is off (null or false): a later revision may have given it a meaning.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual
from depthbench.residual.olmo import OlmoFormat, OlmoSetting

SEQUENCE = 2048  # of every published run; where the config does not say it
LAYER_NORM = "olmo_core.nn.layer_norm.LayerNormConfig"

# dotted keys under `model` -> the values that we can follow (None: absent), the first of which is written
FIXED: Mapping[str, tuple[Any, ...]] = {
    "_CLASS_": ("olmo_core.nn.transformer.config.TransformerConfig", None),
    "name": ("default", None),
    "embedding_norm": (None,),
    "embed_scale": (None, 1.0),
    "block_pattern": (None,),
    "block._CLASS_": ("olmo_core.nn.transformer.config.TransformerBlockConfig", None),
    "block.dropout": (None, 0.0),
    "block.attention_residual_alpha": (None, 1.0),
    "block.feed_forward_residual_alpha": (None, 1.0),
    "block.residual_scaling_base_depth": (None,),
    "block.feed_forward_moe": (None,),
    "block.sequence_mixer._CLASS_": ("olmo_core.nn.attention.AttentionConfig", None),
    "block.sequence_mixer.type": ("attention", None),
    "block.sequence_mixer.name": ("default", None),
    "block.sequence_mixer.bias": (False,),
    "block.sequence_mixer.gate": (None,),
    "block.sequence_mixer.clip_qkv": (None,),
    "block.sequence_mixer.qk_norm": (None,),
    "block.sequence_mixer.dropout": (None, 0.0),
    "block.sequence_mixer.softmax_scale": (None,),
    "block.sequence_mixer.sliding_window": (None,),
    "block.sequence_mixer.rope._CLASS_": ("olmo_core.nn.rope.RoPEConfig", None),
    "block.sequence_mixer.rope.name": ("default", None),
    "block.sequence_mixer.rope.scaling": (None,),
    "block.feed_forward._CLASS_": ("olmo_core.nn.feed_forward.FeedForwardConfig", None),
    "block.feed_forward.name": ("default", None),
    "block.feed_forward.bias": (False,),
    "block.feed_forward.activation": ("silu", None),
    "block.layer_norm._CLASS_": (LAYER_NORM, None),
    "block.layer_norm.bias": (False,),
    "block.layer_norm.elementwise_affine": (None, True),
    "lm_head._CLASS_": ("olmo_core.nn.lm_head.LMHeadConfig", None),
    "lm_head.name": ("default", None),
    "lm_head.bias": (False,),
    "lm_head.layer_norm._CLASS_": (LAYER_NORM, None),
    "lm_head.layer_norm.name": ("rms",),
    "lm_head.layer_norm.bias": (False,),
    "lm_head.layer_norm.elementwise_affine": (None, True),
}
# ours -> theirs
SHAPE = {
    "num_layers": "n_layers",
    "hidden_size": "d_model",
    "vocab_size": "vocab_size",
    "ffn_hidden_size": "block.feed_forward.hidden_size",
    "num_attention_heads": "block.sequence_mixer.n_heads",
    "num_kv_heads": "block.sequence_mixer.n_kv_heads",
    "head_dim": "block.sequence_mixer.head_dim",
    "rope_theta": "block.sequence_mixer.rope.theta",
    "init_std": "init_std",
}
OPTIONAL = {"num_kv_heads", "head_dim", "init_std"}
EPS = ("block.layer_norm.eps", "lm_head.layer_norm.eps")
DEFAULT_EPS = 1e-5
# how it was trained and how fast it runs
FREE = {
    *("dtype", "init_method", "init_seed", "embedding_init_std", "freeze_params", "lm_head.loss_implementation"),
    *("block.sequence_mixer.backend", "block.sequence_mixer.use_flash", "block.moda_skip_ffn_kv"),
}
FREE_ENDS = (".dtype", ".full_precision")


class OlmoModel(NamedTuple):
    """What a config says. residual: settings of the architecture's config, those in `unsaid` apart."""

    model: ModelConfig
    architecture: type[Residual]
    residual: dict[str, Any]
    unsaid: Mapping[str, tuple[Any, ...]]


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings under dotted keys."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *path, last = key.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def formats() -> dict[str, tuple[type[Residual], OlmoFormat]]:
    """By name of the block type, the architectures that DepthBench's code has."""
    known = ((cls, cls.olmo) for cls in Residual.registry.values())
    return {block: (cls, form) for cls, form in known if form for block in form.blocks}


def read_model(config: Mapping[str, Any], where: str) -> OlmoModel:
    """The model that a config describes. where: its path, for messages.

    Raises UserError naming the keys that say something which depthbench does not compute.
    """
    if not isinstance(config.get("model"), Mapping):
        raise UserError(f"{where} has no section `model`: it is not the config.json of a DepthBench checkpoint")
    tree = dict(config["model"])
    if not isinstance(tree.get("block"), Mapping):
        raise UserError(f"{where}: model.block must be one mapping of settings, the same for all blocks")
    overrides = tree.pop("block_overrides", None) or {}
    found = dict(flat(tree))
    found = {key.replace("block.attention.", "block.sequence_mixer.", 1): value for key, value in found.items()}
    cls, form = _architecture(found, where)
    keys = {f"block.{key}" for key in (*form.free, *(s.key for s in form.settings.values()))}
    _check(found, _fixed(form), {"block.name", *SHAPE.values(), *EPS, *FREE, *keys}, where)
    _check_overrides(tree["block"], overrides, where)
    shape: dict[str, Any] = {ours: found[theirs] for ours, theirs in SHAPE.items() if found.get(theirs) is not None}
    missing = [f"model.{theirs}" for ours, theirs in SHAPE.items() if ours not in shape and ours not in OPTIONAL]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}")
    eps, final = (found.get(key, DEFAULT_EPS) for key in EPS)
    if eps != final and form.final_eps is None:
        raise UserError(f"{where}: model.{EPS[0]}={eps} but model.{EPS[1]}={final}; depthbench has one eps for both")
    residual = {**form.constants, **dict.fromkeys(form.eps, eps)}
    if eps != final and form.final_eps:
        residual[form.final_eps] = final
    for name, setting in form.settings.items():
        residual[name] = _value(found.get(f"block.{setting.key}", setting.default), setting, where)
    model = ModelConfig(sequence_length=_sequence(config), **shape)
    return OlmoModel(model, cls, residual, form.unsaid)


def _architecture(found: Mapping[str, Any], where: str) -> tuple[type[Residual], OlmoFormat]:
    known, block = formats(), found.get("block.name", "default")
    if block == "default":
        for cls, form in known.values():
            key, values = form.former or ("", None)
            value = found.get(f"block.{key}")
            if value is not None and (values is None or value in values):
                return cls, form
    if block not in known:
        raise UserError(f"{where}: the block type {block!r} is not supported; there are {', '.join(known)}")
    return known[block]


def _fixed(form: OlmoFormat) -> dict[str, tuple[Any, ...]]:
    own = {f"block.{key}": values for key, values in form.fixed.items()}
    return {**FIXED, "block.layer_norm.name": (form.norm,), **own}


def _check(found: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], known: set[str], where: str) -> None:
    faults = []
    for key, values in fixed.items():
        value = found.get(key)
        if key.endswith("_CLASS_") and value is not None:  # modules have moved
            value, values = str(value).rpartition(".")[2], tuple(str(v).rpartition(".")[2] for v in values)
        if value not in values:
            wanted = " or ".join("absent" if v is None else repr(v) for v in values)
            faults.append(f"model.{key} is {'absent' if value is None else repr(value)}, must be {wanted}")
    for key, value in found.items():
        if key not in fixed and key not in known and not key.endswith(FREE_ENDS) and value not in (None, False, {}):
            faults.append(f"model.{key}={value!r} is not known")
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise UserError(f"{where} describes a model that depthbench does not compute: {'; '.join(faults[:5])}{more}")


def _check_overrides(block: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> None:
    """Blocks must be alike but for what is free: the last one may leave out a tensor that nobody reads."""
    base = dict(flat(block))
    for number, override in overrides.items():
        own = dict(flat(override))
        wrong = sorted(k for k in base.keys() | own.keys() if base.get(k) != own.get(k) and f"block.{k}" not in FREE)
        if wrong:
            raise UserError(
                f"{where}: model.block_overrides.{number} differs from model.block in {', '.join(wrong[:5])}; "
                "depthbench's blocks are alike"
            )


def _value(value: Any, setting: OlmoSetting, where: str) -> Any:
    if setting.values is None:
        return value
    if value not in setting.values:
        known = ", ".join(map(repr, setting.values))
        raise UserError(f"{where}: model.block.{setting.key}={value!r} must be one of {known}")
    return setting.values[value]


def _sequence(config: Mapping[str, Any]) -> int:
    """Tokens of a training window."""
    places = (("dataset", "sequence_length"), ("train_module", "max_sequence_length"))
    said = ((config.get(section) or {}).get(key) for section, key in places)
    return next((int(length) for length in said if length), SEQUENCE)


def write_model(model: ModelConfig, residual: Residual, dtype: str) -> dict[str, Any]:
    """The section `model` of a config for DepthBench's code.

    Raises UserError where that has no such architecture, or none with these settings.
    """
    form = residual.olmo
    if form is None:
        known = ", ".join(sorted({cls.name for cls, _ in formats().values()}))
        raise UserError(f"DepthBench's code has no {residual.name}; it has {known}")
    wrong = {name: value for name, value in form.constants.items() if getattr(residual.config, name) != value}
    if wrong:
        said = ", ".join(f"residual.{name}={getattr(residual.config, name)}" for name in wrong)
        must = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise UserError(f"DepthBench's code cannot compute {said}: it has {must} and no setting for it")
    if model.rope_scaling is not None:
        raise UserError("model.rope_scaling: depthbench does not write it in DepthBench's form")
    eps = {getattr(residual.config, name) for name in form.eps}
    if len(eps) > 1:
        raise UserError(f"DepthBench's code has one eps for {', '.join(form.eps)}; here they are {sorted(eps)}")
    leaves = {key: values[0] for key, values in _fixed(form).items() if values[0] is not None}
    leaves["block.name"] = form.blocks[0]
    leaves |= {theirs: getattr(model, ours) for ours, theirs in SHAPE.items()}
    leaves |= dict.fromkeys(EPS, eps.pop())
    if form.final_eps and getattr(residual.config, form.final_eps) is not None:
        leaves[EPS[1]] = getattr(residual.config, form.final_eps)
    for name, setting in form.settings.items():
        value = in_effect(residual, name)
        called = (theirs for theirs, ours in (setting.values or {}).items() if ours == value)
        leaves[f"block.{setting.key}"] = next(called, value)
    of = ("", "block.sequence_mixer.", "block.feed_forward.", "block.layer_norm.", "lm_head.", "lm_head.layer_norm.")
    leaves |= {f"{place}dtype": dtype for place in of}
    leaves |= {"init_method": form.init}
    tree = nested({key: value for key, value in leaves.items() if value is not None})
    if form.last_block:
        tree["block_overrides"] = {str(model.num_layers - 1): {**tree["block"], **form.last_block}}
    return tree


def in_effect(residual: Residual, name: str) -> Any:
    """The value that holds of a field of the architecture's config, which may leave it to another field."""
    setting = residual.olmo.settings.get(name) if residual.olmo else None
    return getattr(residual, setting.in_effect) if setting and setting.in_effect else getattr(residual.config, name)
