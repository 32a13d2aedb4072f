"""Run as a script, in an interpreter of its own: what a consumer of exports, without depthbench, Megatron and network,
finds. `fresh.py ANSWERS FOLDER...`; ANSWERS gets one dictionary an export, by the folder's name (torch.save): long ones
of exports in float32, short ones of others."""

import copy
import importlib.util
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any

ALLOWED = ("torch", "transformers", "safetensors")


def reach(packages: Iterable[str]) -> set[str]:
    """Top-level modules of `packages` and of all that they require."""
    wanted, modules = list(packages), set(sys.stdlib_module_names)
    provided = metadata.packages_distributions()
    seen: set[str] = set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        modules |= {
            top for top, owners in provided.items() if name in (re.sub(r"[-_.]+", "-", o).lower() for o in owners)
        }
        wanted += [match[0] for line in required if "extra ==" not in line and (match := re.match(r"[\w.-]+", line))]
    return modules


class Allowed(PathFinder):
    """What else lies in the environment is as if it were not installed."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        top = name.partition(".")[0]
        if path is None and top not in MODULES and not top.startswith("_sysconfigdata"):
            return None
        return PathFinder.find_spec(name, path, target)


def no_network(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        attempts.append(f"{event} {args[1:]}")
        raise OSError("the network must not be used here")


modules = tempfile.TemporaryDirectory()
MODULES = {*reach(ALLOWED), "transformers_modules"}
sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Allowed]
attempts: list[str] = []
sys.addaudithook(no_network)
os.environ.update(HF_MODULES_CACHE=modules.name, HF_HOME=modules.name)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, __version__  # noqa: E402

TEXT = "The  `with` statement\n    wraps: a block's execution. Größe 1234 🙂"
VOCABULARY = 515
MODELING = "modeling_depthbench.py"


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def trust(folder: Path) -> dict[str, bool]:
    return {"trust_remote_code": True} if (folder / MODELING).exists() else {}


def load(folder: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=(folder / MODELING).exists(), **options
    ).eval()


def generated(model: Any, prompt: Tensor, **options: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    found: list[list[int]] = model.generate(prompt, **settings)[:, -6:].tolist()
    return found


def padding(model: Any) -> dict[str, Any]:
    """A batch of two lengths, padded on either side, against each sequence alone."""
    long, short = tokens(1, 11, seed=1), tokens(1, 7, seed=2)
    filler = torch.zeros(1, 4, dtype=torch.long)
    found = {}
    for side in ("left", "right"):
        pieces = (filler, short) if side == "left" else (short, filler)
        batch = torch.cat([long, torch.cat(pieces, 1)])
        mask = torch.cat([torch.ones_like(long), torch.cat([(p if p is short else filler) > 0 for p in pieces], 1)])
        logits = model(batch, attention_mask=mask.long()).logits
        own = logits[1:, 4:] if side == "left" else logits[1:, :7]
        found[side] = max(apart(logits[:1], model(long).logits), apart(own, model(short).logits))
        if side == "left":
            together = generated(model, batch, attention_mask=mask.long())
            alone = [generated(model, one, attention_mask=torch.ones_like(one))[0] for one in (long, short)]
            found["padded generation"] = together == alone
    return found


def gradients(model: Any, batch: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch, labels=batch).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def training(model: Any, folder: Path) -> dict[str, Any]:
    """Loss, gradient checkpointing, a few updates, and the result saved and loaded again."""
    batch = tokens(2, 12, seed=3)
    output = model(batch, labels=batch)
    by_hand = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    model = copy.deepcopy(model).train()
    plain = gradients(model, batch)
    model.gradient_checkpointing_enable()
    checkpointed = gradients(model, batch)
    model.gradient_checkpointing_disable()
    largest = max(float(grad.abs().max()) for grad in plain.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    with tempfile.TemporaryDirectory() as saved:
        again = Path(saved) / f"tuned_{folder.name}"
        model.save_pretrained(again)
        reloaded = load(again)
        same = torch.equal(reloaded(batch).logits, model.eval()(batch).logits)
    return {
        "loss": abs(float(output.loss) - float(by_hand)),
        "checkpointed": max(float((plain[n] - checkpointed[n]).abs().max()) for n in plain) / largest,
        "losses": losses,
        "saved again": same,
    }


def initial(folder: Path) -> dict[str, list[float]]:
    """Smallest and largest value, by its last name, of each parameter of a model that no weights were loaded into."""
    config = AutoConfig.from_pretrained(folder, **trust(folder))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **trust(folder))
    pickle.dumps(model)
    values: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        short = name.removesuffix(".weight").rpartition(".")[2]
        low, high = values.get(short, [float("inf"), -float("inf")])
        values[short] = [min(low, float(parameter.min())), max(high, float(parameter.max()))]
    return values


@torch.no_grad()
def answers(folder: Path) -> dict[str, Any]:
    model = load(folder)
    batch = tokens(2, 24)
    logits = model(batch).logits
    first = model(batch[:, :10], use_cache=True)
    cache = {name: first[name] for name in ("cache", "past_key_values") if name in first}
    states = model(batch, output_hidden_states=True).hidden_states
    base = AutoModel.from_pretrained(folder, **trust(folder), dtype=torch.float32)
    half = load(folder, dtype=torch.bfloat16)
    with torch.enable_grad():
        trained = training(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust(folder))
    prompt = tokens(2, 8, seed=4)
    mask = torch.ones_like(prompt)
    return {
        "version": __version__,
        "class": type(model).__name__,
        "tokens": batch,
        "logits": logits,
        "eager": apart(load(folder, attn_implementation="eager")(batch).logits, logits),
        "split": apart(model(batch[:, 10:], **cache).logits, logits[:, 10:]),
        "kept": apart(model(batch, logits_to_keep=3).logits, logits[:, -3:]),
        "states": states,
        "last state": apart(model.get_output_embeddings()(states[-1]), logits),
        "base": apart(model.get_output_embeddings()(base(batch).last_hidden_state), logits),
        "cached": generated(model, prompt, attention_mask=mask)
        == generated(model, prompt, attention_mask=mask, use_cache=False),
        "beams": generated(model, prompt, attention_mask=mask, num_beams=3)
        == generated(model, prompt, attention_mask=mask, num_beams=3, use_cache=False),
        "static": generated(model, prompt, attention_mask=mask, cache_implementation="static", disable_compile=True)
        == generated(model, prompt, attention_mask=mask),
        "backend": model.is_backend_compatible(),
        "bf16": apart(half(batch).logits.float(), logits),
        "float32 in bf16": sorted(n for n, p in half.named_parameters() if p.dtype is torch.float32),
        "ids": tokenizer(TEXT, add_special_tokens=False).input_ids,
        "text": tokenizer.decode(tokenizer(TEXT, add_special_tokens=False).input_ids),
        "eos": (tokenizer.eos_token_id, model.generation_config.eos_token_id, model.config.eos_token_id),
        "initial": initial(folder),
        **padding(model),
        **trained,
        "importable": [
            name for name in ("depthbench", "megatron", "datasets", "pytest") if importlib.util.find_spec(name)
        ],
        "network": attempts,
    }


@torch.no_grad()
def as_stored(folder: Path) -> dict[str, Any]:
    """In the type that the export is stored in."""
    model = load(folder, dtype="auto")
    batch = tokens(2, 24)
    return {
        "tokens": batch,
        "logits": model(batch).logits,
        "types": sorted({str(parameter.dtype) for parameter in model.parameters()}),
        "cached": generated(model, batch) == generated(model, batch, use_cache=False),
    }


def find(folder: Path) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(folder, **trust(folder))
    return answers(folder) if config.dtype is torch.float32 else as_stored(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({Path(folder).name: find(Path(folder)) for folder in sys.argv[2:]}, sys.argv[1])
