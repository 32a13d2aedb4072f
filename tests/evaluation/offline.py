"""Run as a script, in an interpreter of its own without a network: `offline.py JOBS ANSWERS`, both JSON.

JOBS is a list; each answer is at its job's place.
- {"evaluate": WORDS}: the command. Answer: its code, out and err.
- {"likelihoods": FOLDER, "pairs": [[context, target], ...], "max_length": N}: of each pair, by a plain loop over the
  model's logits ("naive") and by the product, at once and one at a time ("ours", "alone"), with its counts.
- {"rolling": FOLDER, "texts": [...]}: the same of whole texts after the end-of-text token.
"""

import contextlib
import io
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any


def no_network(*args: Any, **kwargs: Any) -> None:
    raise OSError("the network must not be used here")


socket.getaddrinfo = no_network  # type: ignore[assignment]
socket.socket.connect = no_network  # type: ignore[method-assign]
home = tempfile.TemporaryDirectory()
os.environ.update(
    HF_HOME=home.name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", COLUMNS="200", CUDA_VISIBLE_DEVICES=""
)

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from depthbench import cli  # noqa: E402
from depthbench.evaluation.export import load  # noqa: E402
from depthbench.evaluation.nll import Sample, make_sample, score  # noqa: E402


def evaluate(words: list[str]) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["evaluate", *words])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


class Naive:
    """Logits of one sequence at a time, a token's probability from them in float64."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    @torch.no_grad()
    def nll(self, context: list[int], target: list[int]) -> float:
        logits = self.model(torch.tensor([context + target])).logits[0].double()
        total = 0.0
        for place, token in enumerate(target, start=len(context)):
            before = logits[place - 1]
            total += float(torch.log(torch.exp(before - before.max()).sum()) + before.max() - before[token])
        return total

    def pair(self, context: str, target: str, max_length: int) -> tuple[float, int]:
        """Its likelihood, and the number of tokens scored."""
        moved = ""
        while context[-1:].isspace():
            context, moved = context[:-1], context[-1] + moved
        ids = self.tokenizer(context)["input_ids"]
        scored = self.tokenizer(context + moved + target)["input_ids"][len(ids) :][:max_length]
        given = ids
        while len(given) + len(scored) > max_length + 1:
            given = given[1:]
        return self.nll(given, scored), len(scored)


def compared(model: Any, samples: list[Sample], naive: list[tuple[float, int]]) -> dict[str, Any]:
    return {
        "naive": [nll for nll, _ in naive],
        "naive tokens": [tokens for _, tokens in naive],
        "ours": score(model.model, samples, 3),
        "alone": [score(model.model, [sample], 1)[0] for sample in samples],
        "tokens": [len(sample.target) for sample in samples],
        "bytes": [sample.size for sample in samples],
        "context cut": [sample.context_cut for sample in samples],
        "target cut": [sample.target_cut for sample in samples],
    }


def likelihoods(folder: str, pairs: list[list[str]], max_length: int) -> dict[str, Any]:
    model, naive = load(Path(folder), "cpu", None, max_length), Naive(folder)
    samples = [make_sample(model.tokenizer, context, target, max_length) for context, target in pairs]
    return compared(model, samples, [naive.pair(context, target, max_length) for context, target in pairs])


def rolling(folder: str, texts: list[str]) -> dict[str, Any]:
    model, naive = load(Path(folder), "cpu", None, None), Naive(folder)
    ids = [naive.tokenizer(text)["input_ids"] for text in texts]
    start = [naive.tokenizer.eos_token_id]
    samples = [Sample(start, tokens, len(text.encode())) for tokens, text in zip(ids, texts, strict=True)]
    return compared(model, samples, [(naive.nll(start, tokens), len(tokens)) for tokens in ids])


def answer(job: dict[str, Any]) -> dict[str, Any]:
    if "evaluate" in job:
        return evaluate(job["evaluate"])
    if "rolling" in job:
        return rolling(job["rolling"], job["texts"])
    return likelihoods(job["likelihoods"], job["pairs"], job["max_length"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(job) for job in jobs]))
