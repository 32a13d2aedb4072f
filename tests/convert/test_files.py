"""What an export's files are, whatever layout saved the checkpoint; and what is refused."""

import errno
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from depthbench.config.load import typed
from depthbench.convert import shards
from depthbench.convert.export import export as export_here
from depthbench.convert.names import Exported
from depthbench.convert.shards import into_shards, parse_size
from depthbench.errors import UserError
from tests.corpora import Corpus, snapshot
from tests.harness import run_workers

from .checkpoints import CASES, Case, all_saved, export, run_of, saved
from .importing import import_

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2_tp2": (4, {"tensor": 2, "distributed_optimizer": True}),
    "tp2_pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    "pp2_vp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}


def silent(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture(scope="module")
def everywhere(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders LAYOUT/ARCHITECTURE of all ten, saved under every layout."""
    folder = tmp_path_factory.mktemp("everywhere")
    for layout, (processes, parallel) in LAYOUTS.items():
        cases = {n: Case(c.residual, {**c.model, "num_layers": 4}, parallel) for n, c in CASES.items()}
        all_saved([run_of(corpus, folder / layout / name, case) for name, case in cases.items()], processes)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_any_layout_gives_the_same_bytes(everywhere: Path, tmp_path: Path, name: str) -> None:
    """All files but the card, which tells the layout."""
    found = {}
    for layout in LAYOUTS:
        export_here(everywhere / layout / name, tmp_path / layout, warn=silent)
        found[layout] = snapshot(tmp_path / layout)
        found[layout].pop("README.md")
    assert all(files == found["one"] for files in found.values())


@pytest.fixture(scope="module")
def run(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with one checkpoint, not to be changed."""
    return saved(run_of(corpus, tmp_path_factory.mktemp("files") / "run", CASES["mhc"]))


@pytest.fixture
def own(run: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_shards(run: Path, tmp_path: Path) -> None:
    export_here(run, tmp_path / "one", warn=silent)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    limit = 60_000
    export_here(run, tmp_path / "many", max_shard_bytes=limit, warn=silent)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    files = sorted(path.name for path in (tmp_path / "many").glob("model-*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    for file in files:
        with safe_open(tmp_path / "many" / file, "pt") as held:
            assert held.metadata() == {"format": "pt"}
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
        assert all(torch.equal(values, whole[name]) for name, values in tensors.items())


def test_half_precision_keeps_what_training_keeps(run: Path, tmp_path: Path) -> None:
    export_here(run, tmp_path / "out", dtype=torch.bfloat16, warn=silent)
    found = load_file(tmp_path / "out" / "model.safetensors")
    wide = {name.rpartition(".")[2] for name, values in found.items() if values.dtype is torch.float32}
    assert wide == {"bias", "scale_pre", "scale_post", "scale_res"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_sizes() -> None:
    assert [parse_size(text) for text in ("12", "1.5KB", "2mb", "5 GB")] == [12, 1500, 2_000_000, 5_000_000_000]
    for text in ("0", "-1", "5TB", "lots", ""):
        with pytest.raises(UserError, match="--max-shard-size="):
            parse_size(text)
    parts = [Exported(str(n), str(n), (n,), torch.float32) for n in (5, 3, 2, 20, 1)]
    assert [[t.shape[0] for t in shard] for shard in into_shards(parts, 32)] == [[5, 3], [2], [20], [1]]


def test_a_folder_that_is_in_the_way(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_here(run, out, warn=silent)  # empty: fine
    before = snapshot(out)
    with pytest.raises(UserError, match=r"is not empty .* or --overwrite"):
        export_here(run, out, warn=silent)
    assert snapshot(out) == before
    (out / "stray").write_text("")
    export_here(run, out, overwrite=True, warn=silent)
    assert snapshot(out) == before
    (out / "README.md").unlink()
    with pytest.raises(UserError, match="was not written by this command"):
        export_here(run, out, overwrite=True, warn=silent)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export_here(run, tmp_path / "file", overwrite=True, warn=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "file"}


def no_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def no_data(checkpoint: Path) -> None:
    next(checkpoint.glob("*.distcp")).unlink()


def settings_changed(checkpoint: Path, **model: Any) -> None:
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["settings"]["model"].update(model)
    file.write_text(json.dumps(manifest))


def another_depth(checkpoint: Path) -> None:
    settings_changed(checkpoint, num_layers=4)


def another_vocabulary(checkpoint: Path) -> None:
    settings_changed(checkpoint, vocab_size=514)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_manifest, "no complete checkpoint"),
        (no_data, r"\.distcp is missing"),
        (another_depth, r"does not fit the settings .* blocks\.3\.\S+ is missing"),
        (another_vocabulary, r"embedding\.weight has shape \(515, 48\), the settings make it \(514, 48\)"),
    ],
)
def test_broken_checkpoints(own: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    (checkpoint,) = (own / "checkpoints").iterdir()
    damage(checkpoint)
    with pytest.raises(UserError, match=message):
        export_here(own, tmp_path / "out", warn=silent)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10))
    save = shards.save_file

    def full(*args: Any, **kwargs: Any) -> None:
        if next(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(UserError, match="No space left on device; nothing is left there"):
        export_here(run, tmp_path / "out", max_shard_bytes=60_000, warn=silent)
    assert not list(tmp_path.iterdir())


def _in_little_room(rank: int, world_size: int, store: str, run: Path, out: Path) -> str:
    """The system refuses files above 100 kB, as a full disk would."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        export_here(run, out, warn=silent)
    except UserError as error:
        return str(error)
    return ""


def test_a_file_that_cannot_be_finished(run: Path, tmp_path: Path) -> None:
    (said,) = run_workers(1, _in_little_room, run, tmp_path / "out")
    assert said.startswith(f"cannot write the export to {tmp_path / 'out'}: ") and "nothing is left there" in said
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_is_gone(own: Path, tmp_path: Path) -> None:
    (checkpoint,) = (own / "checkpoints").iterdir()
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["settings"]["data"]["tokenizer"] = "/nowhere/spm.model"
    assert typed(manifest["settings"])
    file.write_text(json.dumps(manifest))
    lines: list[str] = []
    export_here(own, tmp_path / "out", warn=lines.append)
    assert len(lines) == 1 and "/nowhere/spm.model" in lines[0]
    assert not list((tmp_path / "out").glob("token*"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None


def test_the_command_says_what_is_wrong(own: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "something").write_text("")
    assert export(own, tmp_path / "out").code == 2
    said = export(own, tmp_path / "other", "--max-shard-size", "much")
    assert said.code == 2 and "--max-shard-size=much" in said.err
    said = export(own, tmp_path / "other", "--format", "olmo", "--max-shard-size", "5GB")
    assert said.code == 2 and "--max-shard-size=5GB: --format olmo writes no safetensors" in said.err
    said = export(own, tmp_path / "other", "--no-verify")
    assert said.code == 0 and "mhc, step 1" in said.out and "verified" not in said.out


def without_transformers() -> None:
    sys.modules["transformers"] = None  # type: ignore[assignment]


def test_what_verification_needs_is_asked_for_first(own: Path, tmp_path: Path) -> None:
    """Not when everything has been written, and OUT is in the way of the next try."""
    advice = 'pip install "depthbench[convert]", or give --no-verify'
    for command, source, out in ((export, own, tmp_path / "out"), (import_, tmp_path / "out", tmp_path / "in")):
        said = command(source, out, before=without_transformers)
        assert said.code == 2 and advice in said.err and not out.exists()
        assert command(source, out, "--no-verify", before=without_transformers).code == 0


def test_somebody_elses_model_is_not_replaced(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "README.md").write_text("# Another model\n")
    with pytest.raises(UserError, match="was not written by this command: --overwrite does not remove it"):
        export_here(run, out, overwrite=True, warn=silent)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json"]


def test_a_link_stays_one(run: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        export_here(run, tmp_path / "out", overwrite=True, warn=silent)
        assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def _architectures(rank: int, world_size: int, store: str, folders: list[Path]) -> list[str]:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) for folder in folders]
    return [type(model.model.residual).__name__ for model in models]


def test_two_architectures_under_one_folder_name(corpus: Corpus, tmp_path: Path) -> None:
    """transformers keeps classes by the name of the folder, and the first one's are not the second's."""
    folders = [tmp_path / name / "model" for name in ("moda", "hc")]
    for folder in folders:
        name = folder.parent.name
        case = Case(CASES[name].residual, CASES[name].model, {})
        run = run_of(corpus, tmp_path / "runs" / name, case)
        assert export(saved(run), folder, "--no-verify").code == 0
    (found,) = run_workers(1, _architectures, folders)
    assert found == ["MoDA", "HC"]
