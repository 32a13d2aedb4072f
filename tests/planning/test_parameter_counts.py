"""Parameter counts against the DepthBench paper's totals (shapes of its table, vocabulary 50280, not padded)."""

import dataclasses
import json

import pytest

from depthbench.cli import main
from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.planning.parameters import count_parameters
from tests.reference import Shape, parameter_shapes

TOTALS = {
    "400m_L16": 406_534_336,
    "400m_L20": 414_087_520,
    "400m_L24": 405_406_720,
    "400m_L26": 407_661_408,
    "400m_L28": 406_249_920,
    "400m_L30": 403_847_968,
    "400m_L32": 399_358_848,
    "400m_L42": 404_151_200,
    "400m_L70": 409_229_440,
    "300m_backbone_L16": 424_580_832,
    "300m_backbone_L24": 405_406_720,
    "300m_backbone_L32": 399_358_848,
    "300m_backbone_L42": 374_566_656,
    "300m_backbone_L70": 373_105_888,
    "300m_backbone_L84": 353_831_200,
    "1600m_L28": 1_615_349_760,
    "1600m_L40": 1_607_179_968,
    "1600m_L54": 1_617_192_544,
}
MILLIONS = {
    "200m_L12": "206.07",
    "200m_L18": "204.66",
    "200m_L24": "197.67",
    "300m_L14": "293.56",
    "300m_L21": "293.05",
    "300m_L28": "296.25",
    "500m_L17": "503.69",
    "500m_L26": "504.53",
    "500m_L34": "502.40",
}
RESIDUALS = {
    "pre_ln": 405_406_720,
    "lns": 405_406_720,
    "deepnorm": 405_406_720,
    "sandwich_ln": 405_455_872,
    "keel": 405_454_848,
    "full_attnres": 405_505_024,
    "block_attnres": 405_505_024,
    "hc": 405_702_880,
    "mhc": 410_126_608,
    "moda": 453_641_216,
}


def run_of(model: str, residual: str = "pre_ln", *words: str) -> RunConfig:
    return load_run("depthbench_400m", [f"model={model}", f"residual={residual}", *words])


@pytest.mark.parametrize(("model", "total"), TOTALS.items())
def test_pre_ln_totals(model: str, total: int) -> None:
    assert count_parameters(run_of(model)).total == total


@pytest.mark.parametrize(("model", "millions"), MILLIONS.items())
def test_pre_ln_totals_printed_in_millions(model: str, millions: str) -> None:
    assert f"{count_parameters(run_of(model)).total / 1e6:.2f}" == millions


@pytest.mark.parametrize(("residual", "total"), RESIDUALS.items())
def test_totals_of_the_architectures(residual: str, total: int) -> None:
    parameters = count_parameters(run_of("400m_L24", residual))
    assert parameters.total == total
    assert parameters.backbone == 24 * (4 * 1024**2 + 3 * 1024 * 2736)
    assert parameters.embedding == 2 * 50280 * 1024


SHAPES = ("1600m_L28", "1600m_L40", "1600m_L54")


@pytest.mark.parametrize(
    ("model", "residual", "total"),
    [*(("400m_L24", *each) for each in RESIDUALS.items()), *((name, "pre_ln", TOTALS[name]) for name in SHAPES)],
)
def test_the_command_prints_them(model: str, residual: str, total: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "depthbench_400m", f"model={model}", f"residual={residual}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == total


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_the_reference_is_counted(residual: str, tied: bool) -> None:
    """GQA, a head dimension of its own and tied tables, against the naive models' list of weights."""
    words = (
        "num_layers=4 hidden_size=24 ffn_hidden_size=40 num_attention_heads=6 num_kv_heads=2 head_dim=8 vocab_size=9"
    )
    run = run_of("400m_L24", residual, *(f"model.{word}" for word in words.split()), f"model.tie_embeddings={tied}")
    shape = Shape(4, 24, 40, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=9, tied=tied)
    weights = parameter_shapes(shape, run.architecture)
    sizes = dict.fromkeys(("backbone", "embedding", "residual"), 0)
    for name, size in weights.items():
        part = "embedding" if name.startswith(("embedding.", "head.")) else "backbone"
        part = "residual" if "_residual." in name or name.startswith("readout.") else part
        count = 1
        for length in size:
            count *= length
        sizes[part] += count
    assert dataclasses.asdict(count_parameters(run)) == sizes
