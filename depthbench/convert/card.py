"""README.md of an export: what the model is, what it was trained on, how far, and with what code."""

import json
from pathlib import Path
from typing import Any

import yaml

from depthbench import __version__
from depthbench.config.load import plain
from depthbench.planning.parameters import count_parameters

from .output import EXPORTED
from .reading import Weights

_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH"{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})
```"""


def model_card(weights: Weights, dtype: str, remote_code: bool) -> str:
    """The card's text. The run folder's own files are used where the checkpoint still lies in it."""
    run, manifest = weights.run, weights.manifest
    model = run.model
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["depthbench", run.architecture],
    }
    shape = {
        "residual architecture": run.architecture,
        "parameters": f"{count_parameters(run).total:,}",
        "layers": model.num_layers,
        "hidden size": model.hidden_size,
        "inner size of the MLP": model.ffn_hidden_size,
        "heads": f"{model.num_attention_heads} of {model.head_size}, {model.kv_heads} key/value heads",
        "vocabulary": f"{model.vocab_size}{', tied' if model.tie_embeddings else ''}",
        "context in training": model.sequence_length,
        "stored as": dtype,
    }
    weights_only = manifest.get("weights_only", False)
    came = "import" if weights_only else f"step {weights.checkpoint.step} of the run"
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {run.name}",
        f"{EXPORTED} {__version__} from {came} `{run.name}`.",
        _USE.format(trust=", trust_remote_code=True" if remote_code else ""),
        f"## Model\n\n{_table(shape)}",
        *(_imported(manifest) if weights_only else _trained(weights)),
    ]
    return "\n\n".join(parts) + "\n"


def _imported(manifest: dict[str, Any]) -> list[str]:
    """Of weights that were not trained here."""
    origin = {
        name.replace("_", " "): f"`{json.dumps(value)}`" if isinstance(value, dict | list) else value
        for name, value in manifest["origin"].items()
    }
    return [f"## Provenance\n\nImported, not trained here, from:\n\n{_table(origin)}"]


def _trained(weights: Weights) -> list[str]:
    run, manifest = weights.run, weights.manifest
    folder = weights.checkpoint.path.resolve().parents[1]
    tokens = manifest["consumed_samples"] * run.model.sequence_length
    training = {
        "step": f"{weights.checkpoint.step} of {run.train.steps}",
        "tokens": f"{tokens:,}",
        "precision": run.train.precision.value,
        "seed": run.seed,
        "data": ", ".join(f"{Path(source.prefix).name} x {source.weight:g}" for source in run.data.train),
        **_metrics(folder, weights.checkpoint.step),
    }
    return [
        f"## Training\n\n{_table(training)}",
        f"## Provenance\n\n{_table(_provenance(folder, manifest))}",
        f"All settings of the run:\n\n```yaml\n{yaml.safe_dump(plain(run), sort_keys=False)}```",
    ]


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _metrics(folder: Path, step: int) -> dict[str, str]:
    """Losses at the exported step, where the run's metrics have them."""
    try:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return {}
    names = {"loss": "training loss", "eval/loss": "validation loss"}
    return {
        names[key]: f"{line[key]:.4f}" for line in lines if line.get("step") == step for key in names if key in line
    }


def _provenance(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Fingerprints of the data, and the code that trained."""
    found = {"training data": f"`{json.dumps(manifest.get('data'))}`"}
    try:
        code = json.loads((folder / "environment.json").read_text())
    except (OSError, ValueError):
        return found
    changed = " with uncommitted changes" if code.get("uncommitted_changes") else ""
    found["trained by"] = f"depthbench {code.get('depthbench')}, commit {code.get('commit')}{changed}"
    found["packages"] = ", ".join(f"{name} {version}" for name, version in code.get("packages", {}).items())
    found["processes"] = f"{code.get('world_size')} on {code.get('device')}"
    return found
