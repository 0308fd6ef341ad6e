"""Strides, those of dimensions of size one included: what this side says, what the worker has, what local PyTorch does.

PyTorch reads memory formats from strides that address nothing, and picks kernels by them, so they are part of a value.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import skyproxy
from skyproxy.protocol import commands
from skyproxy.tensor.core.devices import DEVICES
from skyproxy.tensor.core.metadata import meta_of
from skyproxy.tensor.shapes.elementwise import elementwise, is_contiguous, preserved_stride
from skyproxy.tensor.shapes.strides import reshaped_stride
from skyproxy.tensor.shapes.views import VIEW_RULES
from skyproxy.torch_codec import Description, decode_description

Step = Callable[[torch.Tensor, random.Random], torch.Tensor]
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def on_worker(tensor: Any) -> Description:
    """What the worker says that the tensor looks like."""
    handle = tensor._sky
    ((fields, _),) = handle.device.session.request(
        "describe", lambda number: (commands.DESCRIBE, number, [handle.slot], [])
    )
    return decode_description(fields)


def assert_twins(ours: torch.Tensor, theirs: torch.Tensor, what: object = "") -> None:
    """Holds a remote tensor, and what the worker has of it, against a local one, strides and all."""
    assert ours.shape == theirs.shape, what
    assert ours.stride() == theirs.stride(), (what, tuple(theirs.shape))
    assert torch._prims_common.suggest_memory_format(ours) == torch._prims_common.suggest_memory_format(theirs), what
    for memory_format in _FORMATS:
        if memory_format is torch.contiguous_format or theirs.dim() == (
            4 if memory_format is torch.channels_last else 5
        ):
            expected = theirs.is_contiguous(memory_format=memory_format)
            assert ours.is_contiguous(memory_format=memory_format) == expected, (what, memory_format)
    assert on_worker(ours) == ours._sky.meta.description, (what, tuple(theirs.shape))


def _dim(x: torch.Tensor, r: random.Random, extra: int = 0) -> int:
    return r.randrange(-(x.dim() + extra), x.dim() + extra)


def _regrouped(x: torch.Tensor, r: random.Random) -> list[int]:
    """Another size with as many elements: neighbours joined or split, ones put in and left out."""
    size: list[int] = []
    for n in x.shape:
        if size and r.random() < 0.4:
            size[-1] *= n
        elif n % 2 == 0 and n and r.random() < 0.3:
            size += [2, n // 2]
        elif n != 1 or r.random() < 0.6:
            size.append(n)
        if len(size) < 5 and r.random() < 0.3:
            size.insert(r.randint(0, len(size)), 1)
    return size


def _expanded(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    size = [r.choice((n, 2)) if n == 1 else r.choice((n, -1)) for n in x.shape]
    return x.expand(*[1] * r.randint(0, 1), *size) if size else x.expand(r.randint(1, 2))


def _odd(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    return x.as_strided(x.shape, [r.choice((1, 3, 64, s)) if n == 1 else s for n, s in zip(x.shape, x.stride())])


def _permuted(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    return x.permute(r.sample(range(x.dim()), x.dim()))


def _formatted(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return getattr(x, r.choice(("contiguous", "clone")))(memory_format=memory_format)


def _in_place(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    fresh = x.clone()
    match r.choice(("squeeze_", "unsqueeze_", "transpose_")):
        case "squeeze_":
            return fresh.squeeze_()
        case "unsqueeze_":
            return fresh.unsqueeze_(_dim(x, r, 1))
        case _:
            return fresh.transpose_(_dim(x, r), _dim(x, r))


STEPS: dict[str, Step] = {
    "view": lambda x, r: x.view(_regrouped(x, r)),
    "reshape": lambda x, r: x.reshape(_regrouped(x, r)),
    "flatten": lambda x, r: x.flatten(_dim(x, r)),
    "transpose": lambda x, r: x.transpose(_dim(x, r), _dim(x, r)),
    "permute": _permuted,
    "unsqueeze": lambda x, r: x.unsqueeze(_dim(x, r, 1)),
    "squeeze": lambda x, r: x.squeeze(_dim(x, r)),
    "squeeze all": lambda x, r: x.squeeze(),
    "select": lambda x, r: x.select(_dim(x, r), 0),
    "narrow": lambda x, r: x.narrow(_dim(x, r), 0, 1),
    "nothing left": lambda x, r: x.narrow(_dim(x, r), 0, 0),
    "slice": lambda x, r: x[..., :: r.randint(1, 2)],
    "expand": _expanded,
    "unfold": lambda x, r: x.unfold(_dim(x, r), 1, 1),
    "diagonal": lambda x, r: x.diagonal(dim1=0, dim2=1),
    "as_strided": _odd,
    "split": lambda x, r: x.split(1, _dim(x, r))[0],
    "unbind": lambda x, r: x.unbind(_dim(x, r))[0],
    "movedim": lambda x, r: x.movedim(_dim(x, r), _dim(x, r)),
    "as bytes": lambda x, r: x.view(torch.int32).view(torch.float32),
    "detach": lambda x, r: x.detach(),
    "contiguous": lambda x, r: x.contiguous(),
    "format": _formatted,
    "clone": lambda x, r: x.clone(),
    "double": lambda x, r: x.double().float(),
    "empty_like": lambda x, r: torch.zeros_like(x) + x,
    "relu": lambda x, r: F.relu(x),
    "add": lambda x, r: x + x,
    "add broadcast": lambda x, r: x + x.narrow(_dim(x, r), 0, 1),
    "add odd": lambda x, r: x + _odd(x, r),
    "where": lambda x, r: torch.where(x > 0, x, 0.0),
    "sum": lambda x, r: x.sum(_dim(x, r), keepdim=True),
    "softmax": lambda x, r: x.softmax(_dim(x, r)),
    "cat": lambda x, r: torch.cat([x, x], _dim(x, r)),
    "stack": lambda x, r: torch.stack([x, x], _dim(x, r, 1)),
    "matmul": lambda x, r: x @ x.transpose(-1, -2),
    "flip": lambda x, r: x.flip(_dim(x, r)),
    "max": lambda x, r: x.max(_dim(x, r), keepdim=True).values,
    "in place": _in_place,
}


def _start(r: random.Random) -> torch.Tensor:
    size = [r.choice((1, 1, 2, 4)) for _ in range(r.randint(1, 5))]
    start = torch.randn(size, generator=torch.Generator().manual_seed(r.randrange(1 << 30)))
    start = _permuted(_permuted(start, r).contiguous(), r) if r.random() < 0.5 else start
    return _odd(start, r) if r.random() < 0.5 else start


@pytest.mark.parametrize("seed", range(8))
def test_a_chain_of_views_and_elementwise_ops_has_local_pytorchs_strides_here_and_on_the_worker(
    seed: int, sky1: str
) -> None:
    r = random.Random(seed)
    for number in range(15):
        theirs = _start(r)
        ours = theirs.to(sky1)
        assert_twins(ours, theirs, "upload")
        chain = ["upload"]
        for _ in range(10):
            name = r.choice(list(STEPS))
            state = r.getstate()
            try:
                following = STEPS[name](theirs, r)
            except (RuntimeError, IndexError, ValueError):
                continue
            if following.numel() > 512 or following.dim() > 5:
                continue
            after = r.getstate()
            r.setstate(state)
            before = tuple(theirs.shape), theirs.stride()
            ours, theirs = STEPS[name](ours, r), following
            assert r.getstate() == after
            chain.append(name)
            assert_twins(ours, theirs, f"{number}: {chr(32).join(chain)}, of {before}")
        back = ours.cpu()
        assert torch.equal(back, theirs), chain
        assert back.stride() == theirs.to(torch.device("cpu"), copy=True).stride(), chain


def _sizes_and_strides(r: random.Random) -> tuple[torch.Tensor, list[int]]:
    start = _start(r)
    if r.random() < 0.2:
        start = start.narrow(r.randrange(start.dim()), 0, 0)
    return start, _regrouped(start, r)


def test_the_strides_of_a_view_are_atens() -> None:
    r = random.Random(0)
    compared = 0
    for _ in range(3000):
        start, size = _sizes_and_strides(r)
        try:
            expected = start.view(size).stride()
        except RuntimeError:
            expected = None
        if 0 not in size:
            assert reshaped_stride(tuple(start.shape), start.stride(), tuple(size)) == expected
        answer = VIEW_RULES["aten::view"](meta_of(start), size)
        assert (answer[0][0].stride if answer else None) == expected
        compared += expected is not None
    assert compared > 2000


def test_the_strides_of_an_elementwise_result_are_tensor_iterators() -> None:
    r = random.Random(0)
    for _ in range(2000):
        tensors = [_start(r)]
        for _ in range(r.randint(0, 2)):
            like = tensors[0]
            size = [n if r.random() < 0.8 else 1 for n in like.shape][r.choice((0, 0, 1)) :]
            order = r.sample(range(len(size)), len(size))
            fresh = torch.zeros([size[d] for d in order]).permute(sorted(range(len(size)), key=order.__getitem__))
            tensors.append(_odd(fresh, r) if r.random() < 0.3 else fresh)
        op = {1: torch.exp, 2: torch.add, 3: torch.addcmul}[len(tensors)]
        expected = op(*tensors)
        operands = [meta_of(t) for t in tensors]
        assert elementwise(operands) == (tuple(expected.shape), expected.stride()), operands
        if len(tensors) == 1:
            place = operands[0].size, operands[0].stride
            assert preserved_stride(*place) == tensors[0].clone().stride()
            assert is_contiguous(*place) == tensors[0].is_contiguous()


def _tokens(batch: int = 1) -> torch.Tensor:
    """A feature map as vision transformers carry it: (N, H*W, C)."""
    return torch.randn(batch, 64, 32, generator=torch.Generator().manual_seed(3))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tokens reshaped": lambda x: x.transpose(1, 2).reshape(1, 32, 8, 8),
    "row-major": lambda x: (
        x.transpose(1, 2)
        .reshape(1, 32, 8, 8)
        .contiguous(memory_format=torch.contiguous_format)
        .clone(memory_format=torch.contiguous_format)
    ),
    "channels last": lambda x: x.transpose(1, 2).reshape(1, 32, 8, 8).clone(memory_format=torch.channels_last),
    "permuted": lambda x: x.view(1, 8, 8, 32).permute(0, 3, 1, 2),
    "one of two": lambda x: torch.cat([x, x]).view(2, 8, 8, 32).permute(0, 3, 1, 2)[:1],
    "selected": lambda x: torch.cat([x, x]).view(2, 8, 8, 32).permute(0, 3, 1, 2)[1].unsqueeze(0),
    "odd": lambda x: x.view(1, 8, 8, 32).permute(0, 3, 1, 2).as_strided((1, 32, 8, 8), (5, 1, 256, 32)),
    "odd row-major": lambda x: x.transpose(1, 2).contiguous().as_strided((1, 32, 8, 8), (1, 64, 8, 1)),
}
"""The same batch of one, in strides that differ in the first dimension only, or in the format."""


class _Layers(torch.nn.Module):
    """One layer of each kind that picks its kernel by the memory format, and what models put around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(32, 32, 3, padding=1)
        self.depthwise = torch.nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.point = torch.nn.Conv2d(32, 32, 1)
        self.up = torch.nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.batch_norm = torch.nn.BatchNorm2d(32)
        self.group_norm = torch.nn.GroupNorm(4, 32)
        self.prelu = torch.nn.PReLU(32)

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        match kind:
            case "conv" | "depthwise" | "point" | "up" | "batch_norm" | "group_norm" | "prelu":
                return getattr(self, kind)(x)
            case "pool":
                return F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)
            case "adaptive":
                return F.adaptive_avg_pool2d(x, 2) + F.adaptive_max_pool2d(x, 2)
            case "interpolate":
                return F.interpolate(x, scale_factor=2.0, mode="bilinear") + F.interpolate(x, scale_factor=2.0)
            case "pad":
                return F.pixel_shuffle(F.pad(x, (1, 1, 1, 1), mode="reflect"), 2)
            case "attention":
                tokens = x.flatten(2).transpose(1, 2)
                mixed = F.scaled_dot_product_attention(tokens, tokens, tokens)
                return x + mixed.transpose(1, 2).reshape(x.shape)
            case _:  # CvT: tokens become a map, and the map tokens
                tokens = self.group_norm(self.depthwise(x)).flatten(2).transpose(1, 2)
                return self.batch_norm(self.conv(tokens.transpose(1, 2).reshape(x.shape)))


KINDS = (
    "cvt",
    "group_norm",
    "conv",
    "depthwise",
    "point",
    "up",
    "batch_norm",
    "prelu",
    "pool",
    "adaptive",
    "interpolate",
    "pad",
    "attention",
)


@pytest.mark.parametrize("order", ["forwards", "shuffled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_at_batch_one_takes_every_layout_in_every_order(kind: str, order: str, sky1: str) -> None:
    torch.manual_seed(0)
    layers = _Layers()
    remote = _Layers()
    remote.load_state_dict(layers.state_dict())
    remote.to(sky1)
    names = list(LAYOUTS) if order == "forwards" else random.Random(5).sample([*LAYOUTS] * 2, 2 * len(LAYOUTS))
    for name in names:
        results = []
        for module, place in ((layers, "cpu"), (remote, sky1)):
            tokens = _tokens().to(place).requires_grad_()
            x = LAYOUTS[name](tokens)
            result = module(x, kind)
            (gradient,) = torch.autograd.grad(result.square().mean(), tokens)
            results.append((x, result, gradient))
        (x0, result0, gradient0), (x1, result1, gradient1) = results
        assert_twins(x1, x0, name)
        assert_twins(result1, result0, name)
        assert torch.equal(result1.cpu(), result0), name
        assert torch.equal(gradient1.cpu(), gradient0), name


@pytest.mark.parametrize("kind", ["group_norm", "conv"])
def test_strides_of_an_upload_are_kept(kind: str, sky1: str) -> None:
    torch.manual_seed(0)
    layers = _Layers()
    remote = _Layers()
    remote.load_state_dict(layers.state_dict())
    remote.to(sky1)
    for first, second in itertools.permutations(list(LAYOUTS)[::2], 2):
        for name in (first, second):
            x = LAYOUTS[name](_tokens())
            ours = x.to(sky1)
            assert_twins(ours, x.to("cpu", copy=True), name)
            assert torch.equal(remote(ours, kind).cpu(), layers(x, kind)), (first, second, name)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:, :2].to(memory_format=torch.channels_last)[:, :1],
        lambda x: x.to(memory_format=torch.channels_last)[:, :2],
        lambda x: x[:1].expand(4, *x.shape[1:]),
        lambda x: x.permute(3, 1, 0, 2)[::2],
    ],
)
def test_an_upload_closes_gaps_as_pytorchs_copies_do(make: Callable[[torch.Tensor], torch.Tensor], sky1: str) -> None:
    x = make(torch.randn(4, 4, 4, 4))
    ours = x.to(sky1)
    assert_twins(ours, x.clone())
    assert torch.equal(ours.cpu(), x)


def test_what_was_only_captured_is_not_taken_for_checked(sky1: str) -> None:
    cache = DEVICES.of(sky1).cache
    x = torch.randn(3, 5, 7, 11, device=sky1)
    before = set(cache)
    with torch.sky.graph(torch.sky.SkyGraph()):
        y = x.mul(2.0).erfinv()
    assert y.shape == x.shape
    assert DEVICES.of(sky1).cache is cache
    assert set(cache) == before


def test_saved_and_loaded_tensors_keep_strides_that_address_nothing(sky1: str, tmp_path: Any) -> None:
    for name, layout in LAYOUTS.items():
        x = layout(_tokens())
        torch.save(x.to(sky1), tmp_path / "x.pt")
        assert_twins(
            torch.load(tmp_path / "x.pt", map_location=sky1), torch.load(tmp_path / "x.pt", map_location="cpu"), name
        )
        torch.save(x, tmp_path / "y.pt")
        assert_twins(torch.load(tmp_path / "y.pt", map_location=sky1), x, name)


def test_results_of_functions_keep_strides_that_address_nothing(sky1: str) -> None:
    session = DEVICES.of(sky1).session
    node = next(node for node in skyproxy.list_nodes() if node._session is session)
    tokens = _tokens()
    remote = tokens.to(sky1)
    for name, layout in LAYOUTS.items():
        assert_twins(node.run(layout, remote), layout(tokens), name)


def test_group_norm_of_channels_last_has_gradients_of_gradients(sky1: str) -> None:
    results = []
    for place in ("cpu", sky1):
        x, w, b = (
            torch.randn(size, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(place)
            for i, size in enumerate([(2, 8, 3, 5), (8,), (8,)])
        )
        x = x.to(memory_format=torch.channels_last)
        inputs = [t.requires_grad_() for t in (x, w, b)]
        first = torch.autograd.grad(F.group_norm(x, 2, w, b).sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        results.append([g.detach().cpu() for g in (*first, *second)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("size", "dim"), [((1, 0), 0), ((0, 2), 1), ((2, 0, 3), 0), ((2, 0, 3), 2)], ids=str)
def test_a_range_of_no_elements_has_the_strides_of_its_kernel(
    size: tuple[int, ...], dim: int, keepdim: bool, sky: str
) -> None:
    local, remote = (torch.empty(size, device=device).aminmax(dim=dim, keepdim=keepdim) for device in ("cpu", sky))
    for ours, theirs in zip(remote, local, strict=True):
        assert_twins(ours, theirs)
