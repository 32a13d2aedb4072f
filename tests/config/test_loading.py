"""Order of merging, forms of a value, and what is refused with which words."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from depthbench.config.load import load_run, parse_yaml
from depthbench.config.schema import Precision
from depthbench.errors import UserError

SAMPLE = Path(__file__).with_name("sample_run.yaml")


def run_file(tmp_path: Path, **changes: Any) -> str:
    """A copy of the sample with other top-level settings; None leaves one out."""
    settings = parse_yaml(SAMPLE.read_text(), "sample") | changes
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return str(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-3", 2e-3), ("2.e-3", 2e-3), ("2.0e-3", 2e-3), ("-1E5", -1e5), ("+1e+2", 100.0), ("1_0e0", 10.0), (".5", 0.5)],
)
def test_numbers_are_what_everybody_means(text: str, value: float) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert isinstance(parsed, float)


def test_words_with_digits_stay_words() -> None:
    for text in ("e5", "2e", "1e5x", "v2e-3", "2e-3 times"):
        assert parse_yaml(text, "here") == text


def test_a_base_with_changes() -> None:
    run = load_run(str(SAMPLE), [])
    assert run.architecture == "block_attnres"
    assert run.residual.num_blocks == 4
    assert run.name == "sample_run"
    assert run.folder == "runs/sample_run"
    assert load_run(str(SAMPLE), ["name=other", "run_dir=elsewhere"]).folder == "elsewhere"


def test_a_group_chosen_on_the_command_line_replaces_the_runs_section(tmp_path: Path) -> None:
    file = run_file(tmp_path, parallel={"base": "tp2", "recompute": "full"})
    assert load_run(file, []).parallel.tensor == 2
    run = load_run(file, ["parallel=single", "residual=hc", "residual.num_streams=2"])
    assert run.parallel == load_run(str(SAMPLE), []).parallel
    assert (run.architecture, run.residual.num_streams) == ("hc", 2)
    assert load_run(file, ["residual=block_attnres"]).residual.num_blocks == 8  # the file's, not the run's 4


def test_by_residual_comes_after_the_run_and_before_the_command_line(tmp_path: Path) -> None:
    special = {"hc": {"train": {"micro_batch": 8}}, "full_attnres": {"train": {"micro_batch": 4}}, "later": {"seed": 3}}
    file = run_file(tmp_path, by_residual=special)
    assert load_run(file, []).train.micro_batch == 16
    assert load_run(file, ["residual=hc"]).train.micro_batch == 8
    assert load_run(file, ["residual=hc"]).train.steps == 300
    assert load_run(file, ["train.micro_batch=2", "residual=hc"]).train.micro_batch == 2
    # The key is the file's name, not the architecture's: full and block AttnRes are one architecture.
    assert load_run(file, ["residual=full_attnres"]).train.micro_batch == 4
    assert load_run(run_file(tmp_path, residual="hc", by_residual=special), []).train.micro_batch == 8


def test_the_last_override_wins() -> None:
    run = load_run(str(SAMPLE), ["seed=1", "train.steps=5", "seed=2", "model=400m_L24", "model=400m_L32"])
    assert (run.seed, run.train.steps, run.model.num_layers) == (2, 5, 32)


def test_a_path_is_a_choice(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("architecture: hc\nnum_streams: 3\n")
    run = load_run(run_file(tmp_path, by_residual={"mine": {"seed": 9}}), [f"residual={own}"])
    assert (run.residual.num_streams, run.seed) == (3, 9)


def test_enums_are_written_by_value() -> None:
    assert load_run(str(SAMPLE), ["train.precision=fp64"]).train.precision is Precision.FP64


REFUSED = [
    # unknown names, with the nearest
    ("trian.steps=3", "unknown key trian; nearest is train"),
    ("train.stepss=3", "unknown key train.stepss; nearest is steps"),
    ("model.rope_scaling={kind: ntk, factr: 2, factor: 2}", "unknown key model.rope_scaling.factr; nearest is factor"),
    ("data.train=[{prefix: a, wieght: 2}]", "unknown key data.train.0.wieght; nearest is weight"),
    ("residual.num_block=3", "unknown key residual.num_block; nearest is num_blocks"),
    ("residual.architecture=moba", "no residual architecture 'moba'; nearest is 'moda'"),
    ("architecture=hc", "unknown key architecture; nearest is residual.architecture"),
    ("residual=full_atnres", "no 'full_atnres' in configs/residual; nearest is 'full_attnres'"),
    ("model=400m_L23", "no '400m_L23' in configs/model; nearest is '400m_L"),
    ("paralel=tp2", "unknown key paralel; nearest is parallel"),
    ("parallel=", "no '' in configs/parallel"),
    ("residual=nowhere.yaml", "cannot read nowhere.yaml: No such file"),
    # wrong types
    ("train.steps=many", "train.steps='many': Input should be a valid integer"),
    ("train.steps=1.5", "train.steps=1.5: Input should be a valid integer"),
    ("train.steps=null", "train.steps=None: Input should be a valid integer"),
    ("train.steps=[1]", r"train.steps=\[1\]: Input should be a valid integer"),
    ("train.steps=true", "train.steps=True must be of type int"),
    ("residual.key_norm_eps=true", "residual.key_norm_eps=True must be of type float"),
    ("parallel.sequence=1", "parallel.sequence=1 must be true or false"),
    ("parallel.sequence=2", "parallel.sequence=2: Input should be a valid boolean"),
    ("optimizer.lr=fast", "optimizer.lr='fast': Input should be a valid number"),
    ("train.precision=bf17", "train.precision='bf17': Input should be 'bf16', 'reference', 'fp32' or 'fp64'"),
    ("model.rope_scaling.kind=cubic", "model.rope_scaling.kind='cubic': Input should be 'linear', 'ntk', 'yarn' or "),
    ("residual.num_blocks=few", "residual.num_blocks='few': Input should be a valid integer"),
    ("residual.architecture=3", "residual.architecture: no residual architecture '3'"),
    ("data.train=corpus", "data.train='corpus': Input should be a valid list"),
    ("train=fast", "train='fast': Input should be a dictionary"),
    ("name=2024", "name=2024: Input should be a valid string"),
    # missing and malformed
    ("model.rope_scaling.kind=ntk", "model.rope_scaling.factor is required"),
    ("train.steps", "'train.steps' is not of the form key=value"),
    ("train.steps=[", r"train.steps=\[ is not valid YAML"),
    # the model's own checks, with both numbers
    ("model.hidden_size=100", "model.hidden_size=100 is not divisible by model.num_attention_heads=6"),
    ("model.num_kv_heads=4", "model.num_attention_heads=6 is not a multiple of model.num_kv_heads=4"),
]


@pytest.mark.parametrize(("word", "message"), REFUSED, ids=[word for word, _ in REFUSED])
def test_what_is_refused(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_run(str(SAMPLE), [word])


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_run(str(SAMPLE), ["train.steps=x", "seed=y", "logg.every=1"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": None}, "train is required"),
        ({"residual": None}, "residual.architecture is required; choose one with residual=NAME"),
        ({"residual": {"num_blocks": 4}}, "residual.architecture is required"),
        ({"parallel": 2}, "parallel=2 must be the name of one of configs/parallel/ or a mapping"),
        ({"model": ["quickstart"]}, r"model=\['quickstart'\] must be the name"),
        ({"residual": {"base": 8}}, "residual.base=8 must be the name of one of configs/residual/"),
        ({"by_residual": ["hc"]}, r"by_residual=\['hc'\] must map names"),
        ({"by_residual": {"block_attnres": 3}}, "by_residual.block_attnres=3 must be a mapping"),
    ],
)
def test_what_is_refused_in_a_run_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_run(run_file(tmp_path, **changes), [])


def test_an_unknown_run() -> None:
    with pytest.raises(UserError, match="no 'quikstart' in configs/runs; nearest is 'quickstart'; there are "):
        load_run("quikstart", [])


def test_a_file_that_is_no_mapping(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- a\n")
    with pytest.raises(UserError, match=r"list\.yaml must hold a mapping of settings, not list"):
        load_run(str(path), [])
