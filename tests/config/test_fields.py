"""Every field of the schema, set in YAML and on the command line, gives equal objects."""

import dataclasses
import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml

from depthbench.config.load import load_run, plain, typed
from depthbench.config.schema import DataSource, RunConfig
from depthbench.model.rope_scaling import RopeScaling
from depthbench.residual import Residual, architecture

# Doubling any one of its numbers leaves a valid model.
BASE = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 8,
        "vocab_size": 50,
        "rope_scaling": {"kind": "linear", "factor": 2.0},
    },
    "residual": {"architecture": "pre_ln"},
    "data": {"train": [{"prefix": "corpus"}], "tokenizer": "tokenizer.json"},
    "optimizer": {"lr": 1e-3},
    "train": {"steps": 10, "global_batch": 8, "micro_batch": 2},
}


def fields(cls: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, type) of every leaf field."""
    for name, hint in get_type_hints(cls).items():
        path = (*prefix, name)
        inner = next((h for h in (hint, *get_args(hint)) if dataclasses.is_dataclass(h)), None)
        if path in (("architecture",), ("residual",)):
            continue
        if inner is None or get_origin(hint) is list:
            yield path, hint
        else:
            yield from fields(inner, path)


def other_value(hint: Any, value: Any) -> Any:
    """A plain value of type `hint` that is not `value`."""
    options = [option for option in get_args(hint) if option is not type(None)]
    kind = options[0] if options and type(None) in get_args(hint) else hint
    if get_origin(kind) is Literal:
        return next(option for option in get_args(kind) if option != value)
    if kind == list[DataSource]:
        return [{"prefix": "other", "weight": 0.25}, {"prefix": "more"}]
    if kind == list[int]:
        return [2, 1, 1]
    if issubclass(kind, enum.Enum):
        return next(member.value for member in kind if member is not value)
    if kind is bool:
        return not value
    if kind is str:
        return "other"
    return kind(2 * value if value else 8)


def value_at(config: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        config = getattr(config, step)
    return config


def with_value(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    inner = with_value(settings.get(first) or {}, tuple(rest), value) if rest else value
    return {**settings, first: inner}


CASES = [("pre_ln", path, hint) for path, hint in fields(RunConfig)]
CASES += [
    (name, ("residual", *path), hint)
    for name in sorted(Residual.registry)
    for path, hint in fields(architecture(name).Config)
]


def test_the_walk_finds_the_schema() -> None:
    paths = {path for _, path, _ in CASES}
    for path in ("seed", "model.rope_scaling.beta_fast", "data.train", "parallel.recompute", "residual.num_blocks"):
        assert tuple(path.split(".")) in paths


@pytest.mark.parametrize(("name", "path", "hint"), CASES, ids=lambda part: part if isinstance(part, str) else None)
def test_yaml_and_command_line_agree(name: str, path: tuple[str, ...], hint: Any, tmp_path: Path) -> None:
    start = with_value(BASE, ("residual", "architecture"), name)
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(start))
    base = load_run(str(file), [])
    value = other_value(hint, value_at(base, path))
    overridden = load_run(str(file), [f"{'.'.join(path)}={json.dumps(value)}"])
    file.write_text(yaml.safe_dump(with_value(start, path, value)))
    assert load_run(str(file), []) == overridden
    assert value_at(overridden, path) != value_at(base, path)
    assert typed(plain(overridden)) == overridden
    assert any(type(value_at(overridden, path)) in (kind, get_origin(kind)) for kind in (hint, *get_args(hint))) or (
        get_origin(hint) is Literal
    )


def test_null_is_a_value(tmp_path: Path) -> None:
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(BASE))
    assert load_run(str(file), ["model.rope_scaling=null"]).model.rope_scaling is None
    scaling = load_run(str(file), ["model.rope_scaling.kind=yarn"]).model.rope_scaling
    assert scaling == RopeScaling("yarn", 2.0)
