"""Typed config objects from plain values, through pydantic, with messages that name the dotted key."""

import dataclasses
import difflib
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from depthbench.errors import UserError


def nearest(name: str, names: list[str]) -> str:
    match = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return match[0] if match else "nothing"


def _forbid_extra(cls: Any) -> None:
    """Let pydantic refuse unknown keys of a dataclass and of every dataclass among its fields."""
    cls.__pydantic_config__ = {"extra": "forbid"}
    for hint in get_type_hints(cls).values():
        for inner in (hint, *getattr(hint, "__args__", ())):
            if dataclasses.is_dataclass(inner):
                _forbid_extra(inner)


def _fields_at(cls: Any, path: tuple[Any, ...]) -> list[str]:
    """Names of the fields that exist where `path` points into dataclass `cls`."""
    for step in path:
        if isinstance(step, str) and dataclasses.is_dataclass(cls):
            hint = get_type_hints(cls).get(step)
            candidates = [h for h in (hint, *getattr(hint, "__args__", ())) if dataclasses.is_dataclass(h)]
            cls = candidates[0] if candidates else cls
    return [f.name for f in dataclasses.fields(cls)]


def build(cls: Any, values: dict[str, Any], section: str = "") -> Any:
    """Make dataclass `cls` from plain values.

    Raises UserError naming the dotted key, what was wrong and, for an unknown key, the nearest one.
    """
    _forbid_extra(cls)
    try:
        made = TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = tuple(problem["loc"])
            key = ".".join(str(step) for step in ((section, *path) if section else path))
            if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                near = nearest(str(path[-1]), _fields_at(cls, path[:-1]))
                lines.append(f"unknown key {key}; nearest is {near}")
            elif problem["type"] in ("missing", "missing_argument"):
                lines.append(f"{key} is required")
            elif isinstance(cause := problem.get("ctx", {}).get("error"), UserError):
                lines.append(str(cause))
            else:
                lines.append(f"{key}={problem['input']!r}: {problem['msg']}")
        raise UserError("\n".join(lines)) from error
    _refuse_changed_booleans(made, values, section)
    return made


def _refuse_changed_booleans(made: Any, values: dict[str, Any], section: str) -> None:
    """Pydantic takes true for 1, and 1 or "yes" for true: `checkpoint.every: true` would save at every step."""
    for name, value in values.items():
        have, key = getattr(made, name), f"{section}.{name}" if section else name
        if dataclasses.is_dataclass(have) and isinstance(value, dict):
            _refuse_changed_booleans(have, value, key)
        elif isinstance(value, bool) is not isinstance(have, bool):
            wanted = "true or false" if isinstance(have, bool) else f"of type {type(have).__name__}"
            raise UserError(f"{key}={value!r} must be {wanted}")
