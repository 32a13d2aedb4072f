"""Every YAML under configs/ loads, alone and in combination, and survives the way into a run folder and back."""

from pathlib import Path

import pytest
import yaml

from depthbench.config.load import GROUPS, load_run, parse_yaml, plain, typed
from depthbench.config.validate import check_run
from depthbench.paths import CONFIGS
from depthbench.residual import Residual


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


CHOICES = [(group, name) for group in GROUPS for name in names(group)]
RUNS = names("runs")
GPUS = {"quickstart": 2}  # processes; the others fill a node of eight


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_comment_says_what_the_file_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_every_choice_loads(group: str, name: str) -> None:
    run = load_run("depthbench_400m", [f"{group}={name}"])
    assert typed(plain(run)) == run


@pytest.mark.parametrize("residual", names("residual"))
@pytest.mark.parametrize("name", RUNS)
def test_every_run_can_start_with_every_architecture(name: str, residual: str) -> None:
    run = load_run(name, [f"residual={residual}"])
    check_run(run, GPUS.get(name, 8))
    resolved = yaml.safe_dump(plain(run))  # as the run folder keeps it
    assert typed(parse_yaml(resolved, "resolved")) == run


@pytest.mark.parametrize("name", RUNS)
def test_the_resolved_settings_are_a_run_themselves(name: str, tmp_path: Path) -> None:
    run = load_run(name, ["residual=hc", "optimizer.lr=7e-4"])
    file = tmp_path / "anything.yaml"
    file.write_text(yaml.safe_dump(plain(run)))
    assert load_run(str(file), []) == run


def test_every_architecture_has_a_file() -> None:
    shipped = {load_run("depthbench_400m", [f"residual={name}"]).architecture for name in names("residual")}
    assert shipped == set(Residual.registry)


def test_the_recipe_differs_by_architecture() -> None:
    batch = {name: load_run("depthbench_400m", [f"residual={name}"]).train.micro_batch for name in names("residual")}
    assert [batch[name] for name in ("pre_ln", "block_attnres", "full_attnres", "hc", "moda")] == [16, 16, 16, 8, 4]
