"""Rewrites the tables of docs/configuration.md from the config classes and their comments.

python docs/make_reference.py            # rewrite
python docs/make_reference.py --check    # exit with 1 if the page is not up to date
"""

import ast
import dataclasses
import enum
import inspect
import io
import re
import sys
import textwrap
import tokenize
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from depthbench.config.schema import RunConfig
from depthbench.residual import Residual

PAGE = Path(__file__).with_name("configuration.md")
BEGIN = "<!-- begin generated: python docs/make_reference.py -->"
END = "<!-- end generated -->"
WIDTH = 120
FROM_THE_LOADER: dict[tuple[type, str], str] = {(RunConfig, "name"): "the run file's name"}


def comments(cls: type) -> dict[str, str]:
    """Each field's trailing comment, with those of the comment lines that follow on it."""
    source = textwrap.dedent(inspect.getsource(cls))
    at_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: at_line.get(node.end_lineno or 0, "")
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def type_text(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return ", ".join(type_text(argument) for argument in arguments if argument is not type(None))
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return ", ".join(str(member.value) for member in hint)
    return "mapping" if dataclasses.is_dataclass(hint) else str(hint.__name__)


def default_text(field: "dataclasses.Field[Any]") -> str:
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default.value if isinstance(field.default, enum.Enum) else field.default
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else format(value, "g" if value == 0 else "")


def inner_classes(hint: Any) -> Iterator[type]:
    """Config classes and enumerations that a field's type is made of."""
    for part in (hint, *get_args(hint)):
        if inspect.isclass(part) and (dataclasses.is_dataclass(part) or issubclass(part, enum.Enum)):
            yield part


_NAMED = re.compile(r"(^|\n|\. )([a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*):(?= )")


def paragraphs(text: str) -> str:
    """A docstring's text as Markdown: `name:` at a line's or sentence's start set in code, refilled."""
    blocks = []
    for block in text.split("\n\n"):
        named = _NAMED.sub(lambda found: found[1] + ", ".join(f"`{n}`" for n in found[2].split(", ")) + ":", block)
        blocks.append(textwrap.fill(" ".join(named.split()), WIDTH, break_long_words=False, break_on_hyphens=False))
    return "\n\n".join(blocks)


def own_docstring(cls: type) -> str:
    text = cls.__doc__ or ""
    return "" if text.startswith(f"{cls.__name__}(") else inspect.cleandoc(text)  # "": dataclass made it up


def section(title: str, cls: type, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    hints, said = get_type_hints(cls), comments(cls)
    yield f"### {title}"
    if text := own_docstring(cls):
        yield paragraphs(text)
    cells = [["field", "type", "default", "meaning"], ["---"] * 4]
    nested: list[tuple[str, type]] = []
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        meaning = said[field.name].replace("|", "\\|").replace("<", "&lt;")
        default = FROM_THE_LOADER.get((cls, field.name)) or default_text(field)
        cells.append([f"`{field.name}`", type_text(hints[field.name]), default, meaning])
        nested += [(field.name, inner) for inner in inner_classes(hints[field.name])]
    if not any(row[3] for row in cells[2:]):
        cells = [row[:3] for row in cells]
    yield "\n".join(f"| {' | '.join(row)} |".replace(" |  |", " | |").replace("| --- ", "|---") for row in cells)
    for inner in dict.fromkeys(inner for _, inner in nested):
        names = [f"`{name}`" for name, found in nested if found is inner]
        if issubclass(inner, enum.Enum):
            yield paragraphs(f"{' and '.join(names)}:\n{own_docstring(inner)}")
        else:
            yield from section(f"{' and '.join(names)} in {title}", inner)


SECTIONS = ("model", "parallel", "pipeline", "data", "optimizer", "train", "checkpoint", "log", "profile")


def reference() -> str:
    hints = get_type_hints(RunConfig)
    parts = list(section("Top level", RunConfig, frozenset((*SECTIONS, "architecture", "residual"))))
    for name in SECTIONS:
        parts += section(f"`{name}`", hints[name])
        if name == "model":
            for architecture, cls in sorted(Residual.registry.items()):
                parts += section(f"`residual` with `architecture: {architecture}`", cls.Config)
    return "\n\n".join(parts)


def replaced(text: str, begin: str, generated: str, where: str) -> str:
    """`text` with what stands between its markers, `begin` and END, replaced."""
    before, _, rest = text.partition(begin)
    _, end, after = rest.partition(END)
    assert end, f"{where} has lost its markers {begin} and {END}"
    return f"{before}{begin}\n\n{generated}\n\n{END}{after}"


def settle(file: Path, new: str) -> int:
    """Write `new` to `file`; with --check only say whether that would change it. Returns the exit status."""
    if "--check" not in sys.argv[1:]:
        file.write_text(new)
        return 0
    if stale := not file.is_file() or file.read_text() != new:
        print(f"{file} is not up to date: run python docs/{Path(sys.argv[0]).name}", file=sys.stderr)
    return int(stale)


def updated(page: str) -> str:
    """The whole of `page`, up to date."""
    return replaced(page, BEGIN, reference(), PAGE.name)


def main() -> int:
    return settle(PAGE, updated(PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(main())
