"""Parts of a model have their weights while they run, and only then."""

import pytest
import torch
from torch import Tensor, nn

from depthbench.convert.layerwise import Layerwise, parameters_on_meta


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Buffer(torch.tensor(2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.norm(self.table(tokens)) * self.scale))


def test_layerwise() -> None:
    torch.manual_seed(0)
    whole = Model()
    weights = dict(whole.named_parameters(remove_duplicate=False))
    read: list[str] = []
    with parameters_on_meta():
        model = Model()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.table.weight and model.scale == 2

    def reader(name: str) -> Tensor:
        read.append(name)
        return weights[name].detach()

    parts = [model.table, model.inner, model.head]
    Layerwise(model, parts, reader).hook(parts)
    assert read == ["norm.weight", "norm.bias"]
    present: list[bool] = []
    model.inner[1].register_forward_hook(lambda *_: present.append(bool(model.inner[0].weight.is_meta)))
    tokens = torch.arange(5)
    assert torch.equal(model(tokens), whole(tokens))
    assert present == [False]
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())
    with pytest.raises(RuntimeError):
        model.inner(torch.ones(3))
    assert all(parameter.is_meta for parameter in model.inner.parameters())
    assert not nn.Linear(2, 2).weight.is_meta
