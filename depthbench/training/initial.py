"""The checkpoint whose weights a run starts from (`initial`): found, and compared with the run."""

from pathlib import Path
from typing import Any

from depthbench.checkpoint.folder import Published, find
from depthbench.config.load import plain, typed
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError

_FREE = ("sequence_length", "init_std")  # of the model: what its weights compute does not depend on them


def find_initial(run: RunConfig) -> Published | None:
    """The checkpoint that `run.initial` names, or the newest of the run folder that it names.

    Raises UserError where there is none, or with every setting in which its model is not the run's.
    """
    if run.initial is None:
        return None
    checkpoint = find(Path(run.initial))
    settings = checkpoint.manifest().get("settings")
    if not isinstance(settings, dict):
        raise UserError(f"checkpoint {checkpoint.path}: its manifest.json has no settings of the run")
    before = typed(settings)
    theirs, ours = _function(before), _function(run)
    if before.model.rope_scaling is None:  # the run may reach further than its weights did
        ours["model.rope_scaling"] = None
    differences = [
        f"{name} is {theirs.get(name, 'unset')} there and {ours.get(name, 'unset')} here"
        for name in {**theirs, **ours}
        if theirs.get(name) != ours.get(name)
    ]
    if differences:
        raise UserError(
            f"cannot start from initial={run.initial}: {'; '.join(differences)}. Take the settings of the model "
            "there (an import has them in model.yaml and residual.yaml: model=FOLDER/model.yaml "
            "residual=FOLDER/residual.yaml), or another checkpoint"
        )
    return checkpoint


def _function(run: RunConfig) -> dict[str, Any]:
    """What a model's weights depend on, for their shapes or for what they compute."""
    model = {f"model.{name}": value for name, value in run.model.in_effect().items() if name not in _FREE}
    return {**model, **{f"residual.{name}": value for name, value in plain(run)["residual"].items()}}
