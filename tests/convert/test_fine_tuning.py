"""Exports in the hands of transformers' Trainer, peft and accelerate's placement over devices and disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.corpora import Corpus
from tests.harness import run_workers

from .checkpoints import CASES, Case, export, run_of, saved

pytest.importorskip("accelerate")
pytest.importorskip("peft")

# once, so that forked workers need not
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

NAMES = ("pre_ln", "block_attnres", "moda")
VOCABULARY = 515


@pytest.fixture(scope="module")
def exports(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    for name in NAMES:
        run = saved(run_of(corpus, folder / "runs" / name, Case(CASES[name].residual, CASES[name].model, {})))
        assert export(run, folder / name, "--no-verify").code == 0
    return folder


def load(folder: Path, **options: Any) -> Any:
    remote = {"trust_remote_code": True} if (folder / "modeling_depthbench.py").is_file() else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **remote, **options)


def examples(count: int = 8) -> list[dict[str, Tensor]]:
    drawn = torch.randint(3, VOCABULARY, (count, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def fine_tune(model: Any, folder: Path, **options: Any) -> list[float]:
    """Losses of a few steps of transformers' Trainer on the same batch."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):  # of the tests' own workers; it would start a process group
        os.environ.pop(name, None)
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        max_steps=5,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=examples())
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(torch.stack([each["input_ids"] for each in examples(2)])).logits
    return found


def apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def with_trainer(
    rank: int, world_size: int, store: str, folder: Path, scratch: Path
) -> tuple[list[float], bool, float]:
    model = load(folder)
    losses = fine_tune(model, scratch / "trainer", gradient_checkpointing=True)
    checkpointed = logits(model)
    model.gradient_checkpointing_disable()
    model.save_pretrained(scratch / f"tuned_{folder.name}")
    tuned = logits(model)
    return losses, torch.equal(logits(load(scratch / f"tuned_{folder.name}")), tuned), apart(checkpointed, tuned)


@pytest.mark.parametrize("name", NAMES)
def test_trainer(exports: Path, tmp_path: Path, name: str) -> None:
    """With gradient checkpointing; what it leaves is saved and loaded again, bit by bit. While gradients are
    checkpointed, reads of depth share less, which may round otherwise."""
    ((losses, same, rounding),) = run_workers(1, with_trainer, exports / name, tmp_path)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert same
    assert rounding < 1e-5


def with_lora(rank: int, world_size: int, store: str, folder: Path, scratch: Path) -> tuple[list[float], float, bool]:
    before = logits(load(folder))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(load(folder), config)
    losses = fine_tune(model, scratch / "trainer")
    tuned = logits(model)
    model.save_pretrained(str(scratch / "adapter"))
    again = PeftModel.from_pretrained(load(folder), str(scratch / "adapter"))
    return losses, apart(tuned, before), torch.equal(logits(again), tuned)


@pytest.mark.parametrize("name", NAMES)
def test_lora(exports: Path, tmp_path: Path, name: str) -> None:
    ((losses, change, same),) = run_workers(1, with_lora, exports / name, tmp_path)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert change > 1e-3
    assert same


def placed(rank: int, world_size: int, store: str, folder: Path, scratch: Path) -> dict[str, tuple[float, list[str]]]:
    """How far logits are off under some maps, and the places that the map names."""
    expected = logits(load(folder))
    whole = load(folder)
    ends = [f"model.{name}" for name, _ in whole.model.named_children() if name != "layers"] + ["lm_head"]
    split = {**dict.fromkeys(ends, "cpu"), "model.layers.0": "cpu"}
    split |= {f"model.layers.{number}": "disk" for number in range(1, len(whole.model.layers))}
    found = {}
    for label, devices in {"auto": "auto", "cpu": {"": "cpu"}, "disk": split}.items():
        model = load(folder, device_map=devices, offload_folder=str(scratch / label))
        held = [str(parameter.device) for parameter in model.model.layers[1].parameters()]
        found[label] = (apart(logits(model), expected), sorted(set(held)))
        if label == "disk":
            short = model.generate(examples(1)[0]["input_ids"][None], max_new_tokens=3, do_sample=False)
            long = whole.generate(examples(1)[0]["input_ids"][None], max_new_tokens=3, do_sample=False)
            assert torch.equal(short, long)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_device_map(exports: Path, tmp_path: Path, name: str) -> None:
    """Layers on disk come in while they run; one whose weights other layers' reads share, too."""
    (found,) = run_workers(1, placed, exports / name, tmp_path)
    assert {label: held for label, (_, held) in found.items()} == {"auto": ["cpu"], "cpu": ["cpu"], "disk": ["meta"]}
    assert max(error for error, _ in found.values()) < 1e-6


def with_flash(rank: int, world_size: int, store: str, folder: Path) -> str:
    try:
        load(folder, attn_implementation="flash_attention_2")
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_flash_attention(exports: Path, name: str) -> None:
    """Only the package is missing; where depth is in the softmax it would be of no use."""
    (said,) = run_workers(1, with_flash, exports / name)
    if name == "moda":
        assert "DepthBenchForCausalLM does not support Flash Attention 2" in said
    else:
        assert "not support" not in said and "installed" in said
