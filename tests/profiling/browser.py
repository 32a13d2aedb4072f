"""Pages in a headless Chromium that can reach no network."""

import re
import subprocess
from pathlib import Path

import pytest

from docs.browser import CHROMIUM, FLAGS, MISSING

WINDOW = "--window-size=1280,2400"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)


def open_page(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """(standard output, what the page's console said). profile: a new folder."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, WINDOW, f"--user-data-dir={profile}", *flags, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if re.search(r":CONSOLE[:(]", line)]


def run_in(page: Path, script: str, profile: Path) -> str:
    """What `script` returns after the page's own; its console must say nothing."""
    changed = page.with_name(f"scripted-{page.name}")
    tail = f"<script>document.body.dataset.answer = JSON.stringify((() => {{{script}}})())</script></body>"
    changed.write_text(page.read_text(encoding="utf-8").replace("</body>", tail), encoding="utf-8")
    document, said = open_page(changed, profile, "--dump-dom")
    assert not said
    found = re.search(r'<body data-answer="([^"]*)"', document)
    assert found is not None
    return found[1].replace("&quot;", '"')
