"""What cannot work is refused before any process group exists, with the numbers and the way out, and loses nothing."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from depthbench.config.load import plain
from depthbench.config.schema import RunConfig
from depthbench.data.tokenizers import train_sentencepiece
from depthbench.errors import UserError
from depthbench.parallel import startup
from depthbench.training import trainer
from depthbench.training.preflight import preflight
from tests.corpora import VOCAB, Corpus, snapshot, trainable_run, write_documents
from tests.harness import run_workers


@pytest.fixture
def refuses(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunConfig, str, int], None]:
    """Start training as one of `world_size` processes: refused with `message`, and nothing has happened."""

    def check(run: RunConfig, message: str, world_size: int = 1) -> None:
        def started(run: RunConfig) -> None:
            raise AssertionError("a process group would have been started")

        monkeypatch.setattr(startup, "start", started)
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("LOCAL_RANK", "0")
        before = snapshot(Path(run.folder))
        with pytest.raises(UserError, match=message) as caught:
            trainer.train(run)
        assert "\n" not in str(caught.value)
        assert not dist.is_initialized()
        assert snapshot(Path(run.folder)) == before

    return check


Refuses = Callable[..., None]

# -- settings ---------------------------------------------------------------------------------------------------------
SETTINGS: list[tuple[str, int, dict[str, Any], str]] = [
    ("heads", 3, {"parallel": {"tensor": 3}}, r"num_attention_heads=2 is not divisible by parallel.tensor=3"),
    ("ranks", 3, {"parallel": {"tensor": 2}}, r"3 processes cannot hold parallel.tensor=2 .* start a multiple of 2"),
    ("batch", 1, {"train": {"global_batch": 5}}, r"global_batch=5 is not a multiple of train.micro_batch=2 x 1 .* = 2"),
    ("batch over ranks", 4, {}, r"global_batch=4 is not a multiple of train.micro_batch=2 x 4 data-parallel ranks = 8"),
    ("block", 1, {"residual": {"architecture": "block_attnres", "sublayers_per_block": 5}}, r"per_block=5 .* 1\.\.4"),
    ("no block", 1, {"residual": {"architecture": "block_attnres"}}, r"give residual.sublayers_per_block or"),
    ("context", 2, {"parallel": {"context": 2}}, r"context=2: context parallelism is not supported.*parallel.sequence"),
    ("pipeline", 2, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}, r"num_layers=2: a chunk would hold no block"),
    ("no validation", 1, {"data": {"valid": []}}, r"set data.valid or data.valid_fraction, or train.eval_every=0"),
    ("no corpus", 1, {"data": {"train": [{"prefix": "/nowhere/c"}]}}, r"/nowhere/c.idx does not exist.*prepare"),
    ("no tokenizer", 1, {"data": {"tokenizer": "/nowhere/t.model"}}, r"no tokenizer at /nowhere/t.model"),
    ("vocabulary", 1, {"model": {"vocab_size": 300}}, r"has 512 ids, more than model.vocab_size=300; set .*=512"),
    (
        "train split",
        1,
        {"model": {"sequence_length": 10**6}},
        r"train split of .* tokens in 72 documents.*=1000000 \+ 1",
    ),
    (
        "valid split",
        1,
        {"model": {"sequence_length": 50_000}},
        r"valid split of .*topics_valid has \d+ tokens in 7 documents, too few .*=50000 \+ 1",
    ),
    (
        "empty valid split",
        1,
        {"data": {"valid": [], "valid_fraction": 0.001}},
        r"topics_train has 72 documents: data.valid_fraction=0.001 leaves 72 to train on and 0 to validate on",
    ),
    (
        "empty train split",
        1,
        {"data": {"valid": [], "valid_fraction": 0.999}},
        r"72 documents: data.valid_fraction=0.999 leaves 0 to train on and 72 to validate on; both must be at least 1",
    ),
]


@pytest.mark.parametrize(
    ("world_size", "sections", "message"), [case[1:] for case in SETTINGS], ids=[case[0] for case in SETTINGS]
)
def test_settings(
    world_size: int, sections: dict[str, Any], message: str, corpus: Corpus, tmp_path: Path, refuses: Refuses
) -> None:
    refuses(trainable_run(corpus, tmp_path / "run", **sections), message, world_size)


# -- data -------------------------------------------------------------------------------------------------------------
def own(corpus: Corpus, folder: Path) -> Path:
    """A copy of the training corpus to break."""
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus.train}{suffix}", f"{folder}/own{suffix}")
    return folder / "own"


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def beyond(prefix: Path) -> None:
    """As another program's: without the sidecar that says the ids were checked."""
    prefix.with_suffix(".json").unlink()
    write_documents(prefix, [[1, 2], [3] * 50, [4, 5, 512, 6]])


DATA: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no data", lambda p: p.with_suffix(".bin").unlink(), r"own.bin does not exist"),
    ("truncated data", lambda p: cut(p.with_suffix(".bin"), 1001), r"own.bin has 1001 bytes but its index says \d+ \("),
    ("truncated index", lambda p: cut(p.with_suffix(".idx"), 200), r"own.idx has 200 bytes but its header says \d+"),
    ("empty index", lambda p: p.with_suffix(".idx").write_bytes(b""), r"own.idx is no Megatron index"),
    ("foreign index", lambda p: p.with_suffix(".idx").write_bytes(b"x" * 99), r"own.idx is no Megatron index.*b'xxxx"),
    ("foreign sidecar", lambda p: p.with_suffix(".json").write_text("{}"), r"own.json is not what depthbench prepare"),
    ("no document", lambda p: write_documents(p, []), r"own.idx holds no document"),
    (
        "ids beyond the vocabulary",
        beyond,
        r"own.bin: document 2 has id 512 \(token 54\), outside the vocabulary of 512",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in DATA], ids=[case[0] for case in DATA])
@pytest.mark.parametrize("split", ["train", "valid"])
def test_data(
    split: str, damage: Callable[[Path], Any], message: str, corpus: Corpus, tmp_path: Path, refuses: Refuses
) -> None:
    prefix = own(corpus, tmp_path)
    damage(prefix)
    refuses(trainable_run(corpus, tmp_path / "run", data={split: [{"prefix": str(prefix)}]}), message)


def test_a_tokenizer_that_is_not_the_datas(corpus: Corpus, tmp_path: Path, refuses: Refuses) -> None:
    other = train_sentencepiece(["another text " * 20, "of other words"], tmp_path / "other", 280)
    run = trainable_run(corpus, tmp_path / "run", data={"tokenizer": str(other)})
    refuses(
        run, r"prepared with tokenizer .*topics.model \(\w{16}\), but .* uses .*other.model \(\w{16}\): use the same"
    )


# -- folders ----------------------------------------------------------------------------------------------------------
def test_folders_that_cannot_be_written(corpus: Corpus, tmp_path: Path, refuses: Refuses) -> None:
    (tmp_path / "file").write_text("not a folder")
    run = trainable_run(corpus, tmp_path / "file" / "run")
    refuses(run, r"cannot write to the run folder .*/file/run: Not a directory; set run_dir=FOLDER")
    run = trainable_run(corpus, tmp_path / "run", data={"index_cache": f"{tmp_path}/file/cache"})
    refuses(run, r"cannot write to the sample-index cache .*/file/cache: Not a directory; set data.index_cache=FOLDER")


# -- resuming ---------------------------------------------------------------------------------------------------------
def trained(rank: int, world_size: int, store: str, run: RunConfig) -> int:
    return trainer.train(run)


@pytest.fixture(scope="module")
def two_steps(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps that was stopped after two."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert run_workers(1, trained, trainable_run(corpus, folder, train={"stop_at": 2})) == [0]
    return folder


@pytest.fixture
def stopped(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "run"))


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints" / "step_00000002").glob("*.distcp"))


RESUMED: list[tuple[str, dict[str, Any], str]] = [
    ("seed", {"seed": 1}, r"seed = 0, the run has 1\. Restore that, or start another run with run_dir=FOLDER"),
    ("length", {"model": {"sequence_length": 64}}, r"model.sequence_length = 32, the run has 64"),
    ("documents", {"data": {"valid": [], "valid_fraction": 0.5}}, r"data.train documents = \['\w+'\], the run has \["),
    ("architecture", {"residual": {"architecture": "hc"}}, r"residual.architecture = block_attnres, the run has hc"),
    ("precision", {"train": {"precision": "bf16"}}, r"train.precision.*fp32, the run has bf16"),
    ("width", {"model": {"hidden_size": 64}}, r"model.hidden_size = 32, the run has 64"),
    ("depth", {"model": {"num_layers": 3}}, r"model.num_layers = 2, the run has 3"),
    ("rope", {"model": {"rope_theta": 5e5}}, r"model.rope_theta = 10000.0, the run has 500000.0"),
    (
        "block length",  # no tensor's shape would show it
        {"residual": {"architecture": "block_attnres", "sublayers_per_block": 4}},
        r"residual.sublayers_per_block = 2, the run has 4",
    ),
]


@pytest.mark.parametrize(("sections", "message"), [case[1:] for case in RESUMED], ids=[case[0] for case in RESUMED])
def test_a_checkpoint_of_another_run(
    sections: dict[str, Any], message: str, corpus: Corpus, stopped: Path, refuses: Refuses
) -> None:
    refuses(trainable_run(corpus, stopped, **sections), rf"cannot resume from .*step_00000002: it .*{message}")


def test_a_checkpoint_of_another_corpus(corpus: Corpus, stopped: Path, refuses: Refuses) -> None:
    run = trainable_run(corpus, stopped, data={"train": [{"prefix": corpus.valid}]})
    refuses(run, r"cannot resume from .*data.train documents = \['\w+'\], the run has \['\w+'\]")
    run = trainable_run(corpus, stopped, data={"train": [{"prefix": p} for p in (corpus.train, corpus.valid)]})
    refuses(run, r"cannot resume from .*data.train weights = \[1.0\], the run has \[1.0, 1.0\]")


def test_the_same_corpus_elsewhere_resumes(corpus: Corpus, stopped: Path, tmp_path: Path) -> None:
    run = trainable_run(corpus, stopped, data={"train": [{"prefix": str(own(corpus, tmp_path))}]})
    ready = preflight(run, 1, first_of_node=True)
    assert ready.resume is not None and ready.resume.step == 2 and not ready.finished


BROKEN: list[tuple[str, Callable[[Path], Any], str]] = [
    ("missing shard", lambda shard: shard.unlink(), r"__0_0.distcp is missing"),
    ("truncated shard", lambda shard: cut(shard, 1000), r"__0_0.distcp has 1000 bytes where \d+ were written"),
    ("missing metadata", lambda shard: shard.with_name(".metadata").unlink(), r"\.metadata"),
    ("truncated metadata", lambda shard: cut(shard.with_name(".metadata"), 50), r"\.metadata"),
    ("truncated manifest", lambda shard: cut(shard.with_name("manifest.json"), 50), r"manifest\.json"),
]


@pytest.mark.parametrize(("damage", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_checkpoint(
    damage: Callable[[Path], Any], message: str, corpus: Corpus, stopped: Path, refuses: Refuses
) -> None:
    damage(shards(stopped)[0])
    refuses(trainable_run(corpus, stopped), rf"checkpoint .*step_00000002: {message}.*move this folder away")


def test_a_broken_checkpoint_moved_away_lets_the_older_one_resume(corpus: Corpus, stopped: Path) -> None:
    newest = stopped / "checkpoints" / "step_00000002"
    shutil.copytree(newest, newest.with_name("step_00000001"))
    shards(stopped)[0].unlink()
    newest.rename(stopped / "broken")
    ready = preflight(trainable_run(corpus, stopped), 1, first_of_node=True)
    assert ready.resume is not None and ready.resume.step == 1


def test_an_unfinished_save_is_no_checkpoint(corpus: Corpus, stopped: Path) -> None:
    newest = stopped / "checkpoints" / "step_00000002"
    newest.rename(newest.with_name(".saving-step_00000002"))
    shutil.copytree(newest.with_name(".saving-step_00000002"), newest.with_name("step_00000003"))
    (newest.with_name("step_00000003") / "manifest.json").unlink()
    assert preflight(trainable_run(corpus, stopped), 1, first_of_node=True).resume is None


def test_a_finished_run_does_nothing(
    corpus: Corpus, stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "start", None)
    before = snapshot(stopped)
    assert trainer.train(trainable_run(corpus, stopped, train={"stop_at": 2})) == 0
    assert "step 2 of 2" in capsys.readouterr().out
    assert snapshot(stopped) == before


# -- the command ------------------------------------------------------------------------------------------------------
def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "depthbench", "train", *words], capture_output=True, text=True)


def test_the_command(corpus: Corpus, tmp_path: Path) -> None:
    """Status 2 and one line for the user's mistake; --dry-run prints and ends with 0."""
    run = trainable_run(corpus, tmp_path / "run")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(plain(run)))
    refused = command(str(file), f"model.sequence_length={VOCAB * VOCAB}")
    assert refused.returncode == 2, refused.stderr
    assert refused.stdout == ""
    (line,) = refused.stderr.splitlines()
    assert line.startswith("depthbench: the train split of ") and str(VOCAB * VOCAB) in line
    dry = command(str(file), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stderr == ""
    assert "settings, data and run folder" in dry.stdout and "are in order for 1 processes" in dry.stdout
    assert "4 steps read 512 (0.00 epochs)" in dry.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["index-cache"]
