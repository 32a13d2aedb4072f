"""From a run's YAML, group choices and `key=value` overrides to a checked `RunConfig`.

Order, later wins: the run file's groups (`model: NAME` reads configs/model/NAME.yaml), the run file's own keys, its
`by_residual` entry for the chosen architecture's file, overrides from the command line.
"""

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any

import yaml

from depthbench.errors import UserError
from depthbench.paths import CONFIGS
from depthbench.residual import architecture

from .build import build, nearest
from .schema import RunConfig

GROUPS = ("model", "residual", "parallel", "data")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `2e-3` as a string; this one reads it as the number that everybody means."""


class _Dumper(yaml.SafeDumper):
    """Knows what `_Loader` reads as a number, and quotes such strings."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {error}") from error


def dump_yaml(content: Any) -> str:
    """As `parse_yaml` reads it back, mappings in their own order."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(path.read_text(), str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of settings, not {type(content).__name__}")
    return content


def group_file(group: str, name: str) -> Path:
    """The YAML of a named choice: a path, or a name under configs/<group>/."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    path = CONFIGS / group / f"{name}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in (CONFIGS / group).glob("*.yaml"))
        raise UserError(
            f"no {name!r} in configs/{group}; nearest is {nearest(name, names)!r}; there are {', '.join(names)}"
        )
    return path


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, mapping by mapping; lists and scalars are replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def parse_overrides(words: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """`residual=hc model.num_layers=8` -> (chosen groups, nested settings)."""
    chosen: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is not of the form key=value")
        if key in GROUPS:
            chosen[key] = text
            continue
        value = parse_yaml(text, word)
        for part in reversed(key.split(".")):
            value = {part: value}
        settings = merge(settings, value)
    return chosen, settings


def _section(group: str, choice: Any) -> tuple[dict[str, Any], str]:
    """A group's settings, and the name or path of the file under them ("" if there is none).

    choice: a name or path, or a mapping that may have one as `base`.
    """
    own = {"base": choice} if isinstance(choice, str) else choice
    if not isinstance(own, dict):
        raise UserError(f"{group}={choice!r} must be the name of one of configs/{group}/ or a mapping of settings")
    file = own.get("base", "")
    if not isinstance(file, str):
        raise UserError(f"{group}.base={file!r} must be the name of one of configs/{group}/")
    base = read_yaml(group_file(group, file)) if "base" in own else {}
    return merge(base, {key: value for key, value in own.items() if key != "base"}), file


def load_settings(run: str, words: list[str]) -> dict[str, Any]:
    """The merged plain settings of a run, before typing."""
    path = Path(run) if run.endswith((".yaml", ".yml")) else group_file("runs", run)
    own = read_yaml(path)
    chosen, overrides = parse_overrides(words)
    conditional = own.pop("by_residual", None) or {}
    if not isinstance(conditional, dict):
        raise UserError(f"by_residual={conditional!r} must map names of configs/residual/ to settings")
    settings: dict[str, Any] = {"name": path.stem}
    residual_file = ""
    for group in GROUPS:
        choice = chosen.get(group, own.pop(group, None))
        if choice is None:
            continue
        settings[group], file = _section(group, choice)
        if group == "residual":
            residual_file = Path(file).stem
    settings = merge(settings, own)
    special = conditional.get(residual_file) or {}
    if not isinstance(special, dict):
        raise UserError(f"by_residual.{residual_file}={special!r} must be a mapping of settings")
    return merge(merge(settings, special), overrides)


def typed(settings: dict[str, Any]) -> RunConfig:
    """A RunConfig from plain settings (also from a run folder's resolved YAML)."""
    if "architecture" in settings:
        raise UserError("unknown key architecture; nearest is residual.architecture, or choose one with residual=NAME")
    residual = settings.get("residual") or {}
    if not isinstance(residual, dict) or "architecture" not in residual:
        raise UserError("residual.architecture is required; choose one with residual=NAME")
    residual = dict(residual)
    name = str(residual.pop("architecture"))
    try:
        config_class = architecture(name).Config
    except ValueError as error:
        raise UserError(f"residual.architecture: {error}") from error
    parallel = settings.get("parallel") or {}
    values = {**settings, "parallel": parallel, "architecture": name}
    values["residual"] = build(config_class, residual, "residual")
    config: RunConfig = build(RunConfig, values)
    return config


def load_run(run: str, words: list[str]) -> RunConfig:
    """The run called `run` (a name under configs/runs/ or a YAML file) with command-line overrides.

    Raises UserError for anything that cannot be read, is unknown, or has the wrong type.
    """
    return typed(load_settings(run, words))


def plain(config: RunConfig) -> dict[str, Any]:
    """The resolved settings as plain data, in the form that `typed` reads back."""

    def simple(value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return value.value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: simple(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, list | tuple):
            return [simple(item) for item in value]
        return value

    settings: dict[str, Any] = simple(config)
    settings["residual"] = {"architecture": settings.pop("architecture"), **settings["residual"]}
    return settings
