"""Prompts in, text out: what the commands share around a model that knows token ids alone."""

import sys
from collections.abc import Callable
from pathlib import Path

from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

_CONTEXT = 8  # tokens before it, at least, that one is decoded with: some tokenizers drop a first space


def read_file(path: Path) -> str:
    """Raises UserError where it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def read_prompt(prompt: str | None, file: Path | None, processes: int) -> str:
    """The text given, that of a file, or what comes through standard input.

    Raises UserError for two sources, or for standard input where several processes would have to read it.
    """
    if prompt is not None and file is not None:
        raise UserError("give --prompt or --file, one of them")
    if prompt is not None:
        return prompt
    if file is not None:
        return read_file(file)
    if processes > 1:
        raise UserError(f"{processes} processes cannot share standard input: give the prompt with --prompt or --file")
    return sys.stdin.read()


def parse_ids(text: str) -> list[int]:
    """`1 2 3` or `1,2,3`. Raises UserError."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UserError(f"--ids={text!r}: give token ids, with spaces or commas between") from None


class TextStream:
    """Shows tokens as text as soon as they make whole characters; decodes each with a few before it, not with all."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int], write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.ids = prompt[-_CONTEXT:]
        self.shown = len(tokenizer.decode(self.ids))
        self.pieces: list[str] = []

    def add(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):  # else a character of several bytes is not complete
            self._show(text)

    def _show(self, text: str) -> None:
        self.pieces.append(text[self.shown :])
        self.write(self.pieces[-1])
        self.shown = len(text)
        if len(self.ids) > 2 * _CONTEXT:
            del self.ids[:-_CONTEXT]
            self.shown = len(self.tokenizer.decode(self.ids))

    @property
    def text(self) -> str:
        """All that was written."""
        return "".join(self.pieces)

    def finish(self) -> None:
        """Show what is left, whole character or not."""
        self._show(self.tokenizer.decode(self.ids))
