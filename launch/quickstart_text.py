"""Shakespeare's works as JSON lines: each work cut at blank lines into documents of about 8,000 characters, so that a
few percent of documents can be held out for validation."""

import json
import sys
from pathlib import Path


def documents(text: str, size: int = 8000) -> list[str]:
    found: list[str] = []
    current = ""
    for paragraph in text.split("\n\n"):
        current += paragraph + "\n\n"
        if len(current) >= size:
            found.append(current)
            current = ""
    return [*found, current] if current.strip() else found


def main(folder: str, output: str) -> None:
    works = sorted(Path(folder).glob("*_gut.txt"))
    if not works:
        sys.exit(f"{folder} holds no *_gut.txt")
    partial = Path(output + ".tmp")
    with open(partial, "w") as file:
        for work in works:
            for document in documents(work.read_text(encoding="utf-8", errors="replace")):
                file.write(json.dumps({"work": work.stem, "text": document}) + "\n")
    partial.replace(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
