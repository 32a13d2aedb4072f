"""Cluster files: those that ship, and what is wrong with others."""

from pathlib import Path

import pytest

from depthbench.errors import UserError
from depthbench.logs.hardware import PEAK_TFLOPS
from depthbench.planning.cluster import CLUSTERS, load_cluster

SHIPPED = sorted(file.stem for file in CLUSTERS.glob("*.yaml"))


def test_the_published_runs_devices_ship() -> None:
    assert {"a100-40gb", "a100-80gb", "h100", "h200"} <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_cluster_file_loads(name: str) -> None:
    """Its peak is the one that the trainer's MFU uses, where that knows one; what is reached is less than the data
    sheet's figures."""
    cluster = load_cluster(name)
    assert cluster.device == "CPU" or cluster.peak_tflops == PEAK_TFLOPS[cluster.device.split("-")[0]]
    assert cluster.matmul_flops < cluster.peak_flops == cluster.peak_tflops * 1e12
    assert cluster.hbm < cluster.hbm_gb_s * 1e9 and cluster.network < cluster.nvlink < cluster.hbm
    assert cluster.memory == int(cluster.memory_gib * 2**30)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_value_has_its_source(name: str) -> None:
    """A data sheet, or the word assumption; a share and a latency are never a data sheet's. How jobs are submitted has
    none."""
    machine, _, _ = (CLUSTERS / f"{name}.yaml").read_text().partition("\nslurm:")
    for line in machine.splitlines()[1:]:
        field, _, comment = line.partition("#")
        if field.startswith(("device", "gpus_per_node")):
            continue
        assert "data sheet" in comment or "assumption" in comment, line
        if field.split(":")[0].endswith(("_share", "_us")):
            assert "assumption" in comment, line


def edited(tmp_path: Path, old: str, new: str) -> str:
    """The path of a copy of a cluster file with `old` replaced."""
    text = (CLUSTERS / "h100.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    assert load_cluster(edited(tmp_path, "gpus_per_node: 8", "gpus_per_node: 4")).gpus_per_node == 4


def test_an_unknown_name_tells_which_there_are() -> None:
    with pytest.raises(UserError, match=r"no 'h10' in launch/clusters; nearest is 'h100'; there are .*a100-80gb.*h200"):
        load_cluster("h10")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gb_s:", "hbm_gbs:", r"mine\.yaml: .*unknown key hbm_gbs; nearest is hbm_gb_s"),
        ("hbm_gb_s:", "hbm_gbs:", "hbm_gb_s is required"),
        ("gpus_per_node: 8", "gpus_per_node: many", r"mine\.yaml: gpus_per_node='many'"),
        ("matmul_share: 0.6", "matmul_share: 60", r"mine\.yaml: matmul_share=60.* at most 1"),
        ("network_gb_s: 50", "network_gb_s: 0", r"mine\.yaml: network_gb_s=0.* must be above 0"),
        ("launch_us: 200", "launch_us: -1", r"mine\.yaml: launch_us=-1.* must be at least 0"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_cluster(edited(tmp_path, old, new))
    caught.match(f"(?s){message}")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"cannot read nowhere\.yaml"):
        load_cluster("nowhere.yaml")
