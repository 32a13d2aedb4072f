"""Tokenizer files of an export. A SentencePiece model comes along as it is, and as a tokenizer.json of the same ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from depthbench.data.tokenizers import SentencePieceTokenizer, Tokenizer

_SPACE = "\u2581"  # SentencePiece's sign for a space
_SAMPLES = (
    "The quick brown fox, 1234567890 times.",
    " leading,  two spaces\tand a tab \n\n    def f(x):\n\treturn x ** 2  # end \n",
    "Größe, naïve café; 你好 世界; привет; 🙂🙃; a\u0301 \u00a0 \u200b\r\n",
    "",
    "\n",
    "    ",
)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> str | None:
    """Write the tokenizer's files into `folder`. Returns what is wrong with them, if anything."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
        token: str | None = processor.id_to_piece(tokenizer.eod)
        converted = from_sentencepiece(processor)
        if converted is None:
            return (
                f"{tokenizer.path} has no equal tokenizer.json: the export has tokenizer.model alone, which "
                "sentencepiece reads and AutoTokenizer may not"
            )
        (folder / "tokenizer.json").write_text(converted.to_str(pretty=True))  # its own `save` hides what went wrong
    else:
        shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
        token = tokenizers.Tokenizer.from_file(str(tokenizer.path)).id_to_token(tokenizer.eod)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": token,
        "pad_token": token,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return None


def from_sentencepiece(processor: Any) -> tokenizers.Tokenizer | None:
    """A BPE model with byte fallback, no normalisation and no added space, as `prepare --train-tokenizer` makes it.

    None where the model is of another kind: where ids differ on samples.
    """
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    ids = {piece: i for i, piece in enumerate(pieces)}
    # SentencePiece joins the pair whose piece comes first in the vocabulary
    merges = []
    for piece in pieces:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    own = [i for i in range(len(pieces)) if processor.is_control(i) or processor.is_unknown(i)]
    unknown = next((pieces[i] for i in own if processor.is_unknown(i)), None)
    special = [AddedToken(pieces[i], special=True, normalized=False) for i in own]
    defined = _user_defined(processor, own)
    try:
        model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception:  # the library's own; a unigram model may have no merges that make sense
        return None
    found = tokenizers.Tokenizer(model)
    found.normalizer = normalizers.Replace(" ", _SPACE)
    found.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    found.add_special_tokens(special)
    found.add_tokens([AddedToken(pieces[i], normalized=False) for i in defined])
    same = all(found.encode(text, add_special_tokens=False).ids == processor.encode(text) for text in _SAMPLES)
    return found if same else None


def _user_defined(processor: Any, own: list[int]) -> list[int]:
    """Pieces that SentencePiece cuts out of a text before anything else. The wrapper does not tell them: of the
    pieces between the control pieces and the first byte or merge, those that are neither."""
    first = next((i for i in range(processor.vocab_size()) if processor.is_byte(i)), 0)
    return [i for i in range(first) if i not in own]
