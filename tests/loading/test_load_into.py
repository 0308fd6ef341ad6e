"""Models on the meta device, filled with weights that are on a worker: none of them comes here."""

from __future__ import annotations

import pytest
import torch

import skyproxy
from skyproxy.errors import ConfigurationError

MIB = 1 << 20


class Tied(torch.nn.Module):
    """Tied weights, a buffer that is saved and one that is not."""

    def __init__(self, width: int = 8, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, width, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(width, dtype=dtype)
        self.head = torch.nn.Linear(width, 10, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("angles", torch.arange(width, dtype=dtype), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)) * self.angles)


class Computing(torch.nn.Module):
    """A module that can compute its unsaved buffer anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.arange(4.0) / 4)


def skeleton(kind: type = Tied, **options: object) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = kind(**options)
    return model


def moved() -> int:
    stats = torch.sky.stats()
    return stats["bytes_sent"] + stats["bytes_received"]


def test_a_remote_module_fills_a_skeleton(node: skyproxy.Node, sky: str) -> None:
    source = node.run(Tied)
    model = skeleton()
    result = source.load_into(model)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, torch.nn.Parameter)
    assert model.angles.tolist() == list(range(8))
    assert "angles" not in model.state_dict()
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {torch.device(sky)}
    x = torch.arange(10, device=sky)
    assert torch.equal(model(x).cpu(), source(x).cpu())


def test_a_remote_state_dict_fills_a_skeleton_whose_buffers_can_be_computed(node: skyproxy.Node, sky: str) -> None:
    state = node.run(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), Computing()).state_dict())
    assert isinstance(state, skyproxy.RemoteStateDict)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), Computing())
    state.load_into(model)
    assert model[1].frequencies.device == torch.device(sky)
    assert model[1].frequencies.tolist() == [0, 0.25, 0.5, 0.75]
    assert torch.equal(model[0].weight.cpu(), state["0.weight"].cpu())


def test_buffers_that_nobody_can_compute_are_an_error_and_not_garbage(node: skyproxy.Node) -> None:
    state = node.run(lambda: Tied().state_dict())
    with pytest.raises(ConfigurationError, match=r"angles.*Return the module itself"):
        state.load_into(skeleton())


def test_a_file_names_only_one_of_tied_weights(node: skyproxy.Node) -> None:
    source = node.run(Tied)
    state = dict(source.state_dict())
    del state["head.weight"]
    model = skeleton()
    model.register_buffer("angles", torch.zeros(8), persistent=False)
    result = skyproxy.load_into(model, state)
    assert result.missing_keys == []
    assert model.head.weight is model.embed.weight


def test_names_and_shapes_are_held_against_the_model(node: skyproxy.Node) -> None:
    state = node.run(lambda: {"weight": torch.ones(3, 4), "other": torch.ones(1)})
    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key.*"bias".*Unexpected key.*"other"|(?s:Unexpected.*Missing)'
    ):
        state.load_into(model)
    with torch.device("meta"):
        model = torch.nn.Linear(4, 3)
    result = state.load_into(model, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["other"])
    assert model.bias.is_meta
    with torch.device("meta"):
        model = torch.nn.Linear(5, 3)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        state.load_into(model, strict=False)


def test_the_dtype_and_the_gradients_of_the_model_stay(node: skyproxy.Node, sky: str) -> None:
    source = node.run(torch.nn.Linear, 4, 4)
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    model.weight.requires_grad_(False)
    source.load_into(model)
    assert (model.weight.dtype, model.weight.requires_grad) == (torch.bfloat16, False)
    assert (model.bias.dtype, model.bias.requires_grad) == (torch.bfloat16, True)
    assert torch.equal(model.weight.cpu(), source.weight.detach().cpu().bfloat16())


def test_a_skeleton_takes_the_tensors_and_no_copies(node: skyproxy.Node) -> None:
    source = node.run(torch.nn.Linear, 4, 4)
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    source.load_into(model)
    assert model.weight.untyped_storage()._cdata == source.weight.untyped_storage()._cdata


def test_a_model_with_memory_gets_the_values(node: skyproxy.Node, sky: str) -> None:
    source = node.run(torch.nn.Linear, 4, 4)
    model = torch.nn.Linear(4, 4).to(sky)
    weight = model.weight
    source.load_into(model)
    assert model.weight is weight
    assert torch.equal(model.weight.cpu(), source.weight.cpu())
    assert model.weight.untyped_storage()._cdata != source.weight.untyped_storage()._cdata


def check_volume(node: skyproxy.Node, mebibytes: int) -> None:
    width, count = 1024, mebibytes // 4

    def make() -> dict[str, torch.Tensor]:
        return {f"{number}.weight": torch.full((width, width), float(number)) for number in range(count)}

    before = moved()
    state = node.run(make)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    state.load_into(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total == mebibytes * MIB
    assert model[count - 1].weight[5, 5].item() == count - 1
    assert moved() - before < MIB


def test_256_mebibytes_move_less_than_one(node: skyproxy.Node) -> None:
    check_volume(node, 256)


@pytest.mark.slow
def test_a_gibibyte_moves_less_than_a_mebibyte(node: skyproxy.Node) -> None:
    check_volume(node, 1024)


def test_the_name_of_a_file_is_no_source() -> None:
    with pytest.raises(skyproxy.errors.ConfigurationError, match="takes a state dict or a module, not 'weights'"):
        skyproxy.load_into(torch.nn.Linear(2, 2), "weights")  # type: ignore[arg-type]
