"""One small interface over SentencePiece and Hugging Face ``tokenizers``.

Text is only text: a document that happens to contain the letters ``<|endoftext|>`` or ``</s>`` is encoded as those
letters, never as the control token, so a document cannot end itself early.
"""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from depthbench.errors import UserError

_EOD_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
# SentencePiece drops training sentences longer than its limit (in bytes), so lines are cut well below it.
_LINE_CHARACTERS = 4096
_SENTENCE_BYTES = 4 * _LINE_CHARACTERS + 1


class Tokenizer(ABC):
    """Text to ids and back. Pickles as its path and is read again on the other side.

    Attributes:
        path: the model file.
        fingerprint: first 16 hex digits of the SHA-256 of that file's content.
        vocab_size: one more than the largest id, added tokens included.
        eod: id of the end-of-document token.
    """

    vocab_size: int
    eod: int

    def __init__(self, path: Path, eod_token: str | None) -> None:
        self.path = path
        self._eod_token = eod_token
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()[:16]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without any token added around it."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; control tokens are shown where the model can show them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return load_tokenizer, (self.path, self._eod_token)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``."""

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        super().__init__(path, eod_token)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare Exception class
            raise UserError(f"{path} cannot be read as a Hugging Face tokenizer.json: {error}") from error
        self._model.no_truncation()  # a length limit saved with the model would cut documents silently
        self._model.no_padding()
        self._model.encode_special_tokens = True
        ids = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # ids may have holes
        wanted = (eod_token,) if eod_token is not None else _EOD_NAMES
        eod = next((ids[name] for name in wanted if name in ids), None)
        if eod is None:
            raise _no_eod(path, wanted)
        self.eod = eod

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._model.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids), skip_special_tokens=False))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece ``.model``."""

    def __init__(self, path: Path, eod_token: str | None = None) -> None:
        super().__init__(path, eod_token)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise UserError(f"{path} cannot be read as a SentencePiece model: {error}") from error
        self.vocab_size = self._model.vocab_size()
        if eod_token is None:
            self.eod = self._model.eos_id()
            if self.eod < 0:
                raise _no_eod(path, ("the model's own eos",))
        else:
            self.eod = self._model.piece_to_id(eod_token)
            if self._model.id_to_piece(self.eod) != eod_token:  # an unknown piece maps to the unk id
                raise _no_eod(path, (eod_token,))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._model.encode(list(texts), out_type=int, num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([int(i) for i in ids]))


def load_tokenizer(path: str | Path, eod_token: str | None = None) -> Tokenizer:
    """Load a SentencePiece ``.model``, a Hugging Face tokenizer ``.json``, or the folder that holds one.

    Args:
        path: the file or folder.
        eod_token: text of the end-of-document token; by default ``<|endoftext|>``, ``</s>``, ``<|end_of_text|>`` or
            ``<eos>``, whichever the vocabulary has first (SentencePiece: the model's eos).

    Raises:
        UserError: no such file, an unknown kind, an unreadable model, or no end-of-document token.
    """
    file = _model_file(Path(path))
    if file.suffix == ".model":
        return SentencePieceTokenizer(file, eod_token)
    if file.suffix == ".json":
        return HuggingFaceTokenizer(file, eod_token)
    raise UserError(f"{file} is no tokenizer: give a SentencePiece .model, a tokenizer.json, or a folder with one")


def train_sentencepiece(texts: Iterable[str], output_prefix: Path, vocab_size: int) -> Path:
    """Train a BPE model with byte fallback on ``texts`` and write ``<output_prefix>.model``.

    The model keeps text as it is (no normalization, spaces and newlines kept), so every text round-trips, save that
    U+2581, SentencePiece's own sign for a space, comes back as a space. The same texts give the same file.

    Raises:
        UserError: there is no text, or ``vocab_size`` is out of the range the texts allow.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,  # with a model_prefix the path would become part of the file and of its fingerprint
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            max_sentence_length=_SENTENCE_BYTES,
            num_threads=1,  # written into the model file: a machine's core count must not change the fingerprint
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(
            f"a SentencePiece vocabulary of {vocab_size} cannot be trained on this text: {error}. "
            "Give more text or another vocabulary size"
        ) from error
    path = Path(f"{output_prefix}.model")
    temporary = Path(f"{path}.tmp")
    temporary.write_bytes(model.getvalue())
    os.replace(temporary, path)
    return path


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LINE_CHARACTERS):
                yield line[start : start + _LINE_CHARACTERS]


def _model_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(f"no tokenizer at {path}: the file or folder does not exist")
    if (path / "tokenizer.json").is_file():
        return path / "tokenizer.json"
    models = sorted(path.glob("*.model"))
    if len(models) != 1:
        found = ", ".join(m.name for m in models) or "neither"
        raise UserError(f"folder {path} must hold a tokenizer.json or exactly one .model; it holds {found}")
    return models[0]


def _no_eod(path: Path, wanted: Sequence[str]) -> UserError:
    return UserError(
        f"{path} has no end-of-document token (looked for {', '.join(wanted)}): name one of its tokens with --eod-token"
    )
