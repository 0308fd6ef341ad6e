"""Storage identity: who shares memory with whom, addresses, sizes, and replacing one storage by another."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import skyproxy  # noqa: F401  (registers the device)
from tests.integration.programs import run_program


def test_a_view_lies_inside_the_storage_of_its_base(sky1: str) -> None:
    x = torch.zeros(4, device=sky1)
    view = x[1:]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert view.data_ptr() == x.data_ptr() + 4
    assert view.storage_offset() == 1
    assert view.untyped_storage().nbytes() == 16


def test_a_view_keeps_its_storage_when_its_base_is_gone(sky1: str) -> None:
    x = torch.arange(4, device=sky1)
    address, view = x.data_ptr(), x[2:]
    del x
    assert view.untyped_storage().data_ptr() == address
    assert torch.zeros(4, device=sky1).data_ptr() != address
    assert view.tolist() == [2, 3]


def test_living_storages_have_addresses_of_their_own(sky: str, sky1: str) -> None:
    tensors = [torch.zeros(1000, device=device) for device in (sky, sky1) for _ in range(50)]
    starts = sorted(t.data_ptr() for t in tensors)
    assert all(b - a >= 4000 for a, b in itertools.pairwise(starts))
    assert all(start % 512 == 0 for start in starts)


def test_addresses_are_stable_and_cost_no_round_trip(sky1: str) -> None:
    x = torch.zeros(3, device=sky1)
    before = torch.sky.stats()["round_trips"]  # type: ignore[attr-defined]
    assert x.data_ptr() == x.data_ptr() == x.detach().data_ptr() != 0
    x.add_(1)
    assert x.untyped_storage().nbytes() == 12
    assert torch.sky.stats()["round_trips"] == before  # type: ignore[attr-defined]


def test_an_empty_tensor_has_no_address(sky1: str) -> None:
    assert torch.empty(0, device=sky1).data_ptr() == 0
    assert torch.zeros(4, device=sky1)[4:].data_ptr() == torch.zeros(4)[4:].data_ptr() == 0
    assert torch.empty(0, device=sky1).untyped_storage().data_ptr() == 0


STEPS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.resize_(2, 2),
    lambda x: x.t_(),
    lambda x: x.unsqueeze_(0),
    lambda x: x.squeeze_(),
    lambda x: x.transpose_(0, 1),
    lambda x: x.swapaxes_(0, 1),
    lambda x: x.resize_(8),
    lambda x: x.unsqueeze_(1),
    lambda x: x.resize_(3),
    lambda x: x.as_strided_((2,), (2,)),
    lambda x: x.resize_(0),
]


def test_the_size_of_a_storage_follows_changes_in_place(sky1: str) -> None:
    local, remote = torch.arange(4.0), torch.arange(4.0, device=sky1)
    for step in STEPS:
        step(local)
        step(remote)
        assert (remote.shape, remote.stride()) == (local.shape, local.stride())
        assert remote.untyped_storage().nbytes() == local.untyped_storage().nbytes()
        assert remote._version == local._version
    worker = remote._sky  # type: ignore[attr-defined]
    assert worker.device.session.call("storage_bytes", worker.slot) == remote.untyped_storage().nbytes()


def test_a_storage_moves_when_it_grows_as_on_every_device(sky1: str) -> None:
    x = torch.zeros(4, device=sky1)
    key, address = x.untyped_storage()._cdata, x.data_ptr()
    x.resize_(100)
    assert x.data_ptr() != address
    assert x.untyped_storage()._cdata == key


def test_storages_can_be_resized_copied_filled_and_read(sky1: str) -> None:
    x = torch.arange(4, dtype=torch.uint8, device=sky1)
    storage = x.untyped_storage()
    assert storage.tolist() == [0, 1, 2, 3]
    assert storage[2] == 2
    storage[2] = 9
    assert x.tolist() == [0, 1, 9, 3]
    storage.fill_(5)
    assert storage.cpu().tolist() == [5, 5, 5, 5]
    clone = storage.clone()
    clone.copy_(torch.tensor([1, 2, 3, 4], dtype=torch.uint8).untyped_storage())
    assert (clone.tolist(), x.tolist()) == ([1, 2, 3, 4], [5, 5, 5, 5])
    storage.resize_(0)
    assert storage.nbytes() == 0
    assert repr(storage) == "[torch.storage.UntypedStorage(device=sky:1) of size 0]"


def test_the_typed_storage_of_old_code_works(sky1: str) -> None:
    x = torch.arange(3.0, device=sky1)
    with warnings.catch_warnings():  # PyTorch warns once a process
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        storage = x.storage()
    assert (storage._size(), storage.dtype, str(storage.device)) == (3, torch.float32, "sky:1")


def test_set_takes_over_the_storage_of_another_tensor(sky1: str) -> None:
    a, b = torch.randn(4, device=sky1), torch.arange(6.0, device=sky1).view(2, 3)
    version = a._version
    assert a.set_(b) is a
    b.add_(1)
    assert a.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert a.is_set_to(b)
    assert not a.is_set_to(b.clone())
    assert a._version == version + 1


def test_set_leaves_views_of_the_old_storage_alone(sky1: str) -> None:
    a = torch.arange(4, device=sky1)
    view = a[1:]
    a.set_(torch.zeros(2, dtype=torch.int64, device=sky1))
    a.fill_(7)
    assert (view.tolist(), a.tolist()) == ([1, 2, 3], [7, 7])


def test_set_takes_a_place_in_a_storage(sky1: str) -> None:
    base = torch.arange(6.0, device=sky1)
    x = torch.empty(0, device=sky1).set_(base.untyped_storage(), 1, (2, 2), (2, 1))
    assert x.tolist() == [[1, 2], [3, 4]]
    x.mul_(10)
    assert base.tolist() == [0, 10, 20, 30, 40, 5]
    assert x.is_set_to(base.as_strided((2, 2), (2, 1), 1))
    assert x.set_().shape == (0,)


def test_set_refuses_a_storage_of_another_device(sky: str, sky1: str) -> None:
    x = torch.zeros(2, device=sky1)
    for device in ("cpu", sky):
        with pytest.raises(RuntimeError, match='on device "sky:1" to a storage on different device'):
            x.set_(torch.zeros(2, device=device).untyped_storage())
    with pytest.raises(RuntimeError, match="Could not set tensor"):
        x.set_(torch.zeros(2, dtype=torch.int64, device=sky1))


def test_remote_memory_is_neither_pinned_nor_shared(sky1: str) -> None:
    x = torch.zeros(2, device=sky1)
    assert not x.is_pinned()
    assert not x.is_shared()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()
    with pytest.raises(RuntimeError, match=r"x\.cpu\(\)\.share_memory_"):
        x.share_memory_()
    with pytest.raises(TypeError, match="only CPU memory can be pinned"):
        x.untyped_storage().pin_memory()


def test_a_sparse_tensor_has_no_storage(sky1: str) -> None:
    x = torch.eye(2).to_sparse().to(sky1)
    with pytest.raises(NotImplementedError, match="Cannot access storage"):
        x.untyped_storage()
    with pytest.raises(NotImplementedError, match="Cannot access storage"):
        torch.eye(2).to_sparse().untyped_storage()


def test_in_place_changes_reach_every_view(sky1: str) -> None:
    x = torch.zeros(4, device=sky1)
    view = x.view(2, 2)
    view[0].add_(1)
    assert x.tolist() == [1, 1, 0, 0]
    assert view._base is x
    assert view._version == x._version == 1


@pytest.mark.parametrize("target", ["sky:0", "sky:1", "cpu", "meta"])
def test_tensors_like_another_can_be_made_on_another_device(target: str, sky: str, sky1: str) -> None:
    x = torch.ones(3, 2, device=sky1).t()
    for made in (
        torch.zeros_like(x, device=target),
        torch.empty_like(x, device=target).zero_(),
        torch.full_like(x, 0, device=target),
        x.new_zeros(2, 3, device=target).as_strided((2, 3), x.stride()),
        x.new_full((2, 3), 0, device=target).as_strided((2, 3), x.stride()),
        x.new_empty_strided((2, 3), (1, 2), device=target).zero_(),
    ):
        assert (made.device, made.dtype, made.stride()) == (torch.device(target), x.dtype, x.stride())
        if target != "meta":
            assert not made.cpu().any()
    assert torch.randn_like(x, device=target).device == torch.device(target)


_SET: dict[str, Callable[[str], Any]] = {
    "an untyped storage of other values": lambda d: _zeros(d).set_(_ones(d, torch.int32).untyped_storage()),
    "a typed storage of the same dtype": lambda d: _zeros(d).set_(_ones(d).storage(), 1, (2,), (1,)),
    "a typed storage of another dtype": lambda d: _zeros(d).set_(_ones(d, torch.int32).storage()),
    "a place in a typed storage of another dtype": lambda d: _zeros(d).set_(_ones(d, torch.int64).storage(), 0, (2,)),
    "a tensor of another dtype": lambda d: _zeros(d).set_(_ones(d, torch.int32)),
    "a place in a tensor of another dtype": lambda d: _zeros(d).set_(_ones(d, torch.int32), 0, (2,), (1,)),
    "keywords": lambda d: _zeros(d).set_(source=_ones(d).untyped_storage(), storage_offset=1, size=(2,), stride=(1,)),
    "a storage that grows": lambda d: _zeros(d).set_(_ones(d).untyped_storage(), 2, (2, 3)).shape,
    "a storage that is too small": lambda d: _zeros(d).set_(_ones(d).untyped_storage(), 2, (4,), (1,)),
    "a negative offset": lambda d: _zeros(d).set_(_ones(d).untyped_storage(), -2, (4,), (1,)),
    "a negative stride": lambda d: _zeros(d).set_(_ones(d).untyped_storage(), 0, (4,), (-1,)),
    "strides that do not fit": lambda d: _zeros(d).set_(_ones(d).untyped_storage(), 0, (4,), (1, 1)),
    "bytes left over": lambda d: _zeros(d).set_(torch.ones(7, dtype=torch.uint8, device=d).untyped_storage()).shape,
    "nothing": lambda d: _zeros(d).set_().shape,
    "from C++": lambda d: torch.ops.aten.set_(_zeros(d), _ones(d)),
    "a place from C++": lambda d: torch.ops.aten.set_(_zeros(d), _ones(d), 1, (2,), (1,)),
    "a leaf that requires a gradient": lambda d: _zeros(d).requires_grad_().set_(_ones(d)),
    "what was computed of one": lambda d: (_zeros(d).requires_grad_() * 2).set_(_ones(d)),
}


def _zeros(device: str) -> torch.Tensor:
    return torch.zeros(4, device=device)


def _ones(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, dtype=dtype, device=device)


@pytest.mark.parametrize("compute", _SET.values(), ids=_SET)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_set_takes_and_refuses_what_it_does_on_the_cpu(sky1: str, compute: Callable[[str], Any]) -> None:
    refused: list[str] = []
    results = []
    for place in ("cpu", sky1):
        try:
            results.append(compute(place))
        except RuntimeError as error:
            refused.append(str(error))
    if refused:
        assert refused == refused[:1] * 2
        return
    expected, result = results
    if isinstance(expected, torch.Tensor):
        assert result.dtype is expected.dtype
        assert torch.equal(result.cpu(), expected)
    else:
        assert result == expected


_BITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "conjugate": torch.Tensor.conj,
    "negative": torch._neg_view,
    "both": lambda t: torch._neg_view(t.conj()),
}
_SOURCES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tensor": lambda x, y: x.set_(y),
    "place in a tensor": lambda x, y: x.set_(y, 1, (1,), (1,)),
    "storage": lambda x, y: x.set_(y.untyped_storage(), 0, (2,), (1,)),
    "nothing": lambda x, y: x.set_(),
    "from C++": lambda x, y: torch.ops.aten.set_(x, y),
}


@pytest.mark.parametrize("target", _BITS)
@pytest.mark.parametrize("source", _BITS)
@pytest.mark.parametrize("form", _SOURCES)
def test_set_leaves_a_tensor_its_own_bits(sky1: str, target: str, source: str, form: str) -> None:
    results = []
    for device in ("cpu", sky1):
        x = _BITS[target](torch.tensor([1 + 2j, 3 + 4j, 5], device=device))
        y = _BITS[source](torch.tensor([5 + 6j, 7 - 1j], device=device))
        _SOURCES[form](x, y)
        x.add_(1)
        results.append((x.tolist(), x.is_conj(), x.is_neg(), (x * 2).tolist(), y.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_numbers_on_one_storage_change_together(sky1: str, dtype: torch.dtype) -> None:
    x = torch.zeros((), dtype=dtype, device=sky1)
    for set_ in (lambda t: t.set_(x), lambda t: t.set_(x, 0, (), ()), lambda t: torch.ops.aten.set_(t, x)):
        before = int(x.item())
        y = set_(torch.empty(0, dtype=dtype, device=sky1))
        y.add_(1)
        assert (x.item(), y.item()) == (before + 1, before + 1)
        x.add_(1)
        assert (x.item(), y.item()) == (before + 2, before + 2)


def test_memory_of_dead_tensors_is_not_counted(sky1: str) -> None:
    gc.collect()  # else what other tests left may die in the middle
    before = torch.sky.memory_allocated(sky1)
    small = [torch.empty(10, 10, device=sky1) for _ in range(100)]
    assert torch.sky.memory_allocated(sky1) - before == 100 * 400
    del small
    assert torch.sky.memory_allocated(sky1) == before
    large = torch.empty(1000, 1000, device=sky1)
    row = large[0]
    del large
    assert torch.sky.memory_allocated(sky1) - before == 4_000_000
    del row
    assert torch.sky.memory_allocated(sky1) == before
    torch.sky.reset_peak_memory_stats(sky1)
    assert torch.sky.max_memory_allocated(sky1) == before


EVERY_METHOD = """
import signal, sys, torch, skyproxy, warnings
warnings.simplefilter("ignore")
device = sys.argv[1]
x = torch.arange(4.0, device=device)
cpu = torch.UntypedStorage([1, 2, 3, 4])
path = sys.argv[2]
# Of what is private, what PyTorch's own Python code calls; some others believe any address, on every device.
private = {"_byteswap", "_fix_weakref", "_get_filename", "_new_shared", "_share_cuda_", "_share_fd_cpu_"}
private |= {"_share_filename_cpu_", "_shared_decref", "_shared_incref", "_swap_data_ptr_", "_weak_ref"}
private |= {"_new_wrapped_storage", "__getitem__", "__setitem__", "__copy__", "__deepcopy__", "__iter__", "__len__"}
private |= {"__repr__", "__reduce__", "__sizeof__"}
makers = {
    "untyped storage": lambda: torch.arange(4.0, device=device).untyped_storage(),
    "typed storage": lambda: torch.arange(4.0, device=device).storage(),
    "slice": lambda: torch.arange(4.0, device=device).untyped_storage()[4:12],
    "cpu storage": lambda: torch.UntypedStorage([1, 2, 3, 4]),
    "cpu typed storage": lambda: torch.arange(4.0).storage(),
}
places = [(), (0,), (4,), (-1,), ([1, 2],), (x,), (x.untyped_storage(),), (x.storage(),), (cpu,), (slice(0, 2),)]
places += [(slice(0, 2), 1), (0, 1), (torch.float,), ({},), (path, True, 4), (path, False, 4), ("torch.FloatStorage",)]
for what, make in makers.items():
    for name in [name for name in dir(make()) if name[0] != "_" or name in private]:
        for arguments in places:
            for keywords in ({}, {"device": device}):
                print(what, name, [type(a).__name__ for a in arguments], keywords, flush=True)
                try:
                    member = getattr(make(), name)
                    result = member(*arguments, **keywords)
                except Exception:
                    continue
classes = [torch.UntypedStorage, torch.TypedStorage, type(makers["untyped storage"]()), *torch._storage_classes]
classes += [torch.Tensor, torch.FloatTensor, torch.LongTensor, torch.tensor, torch.as_tensor, x.new, x.new_tensor]
for made in classes:
    for arguments in places:
        more = [{"device": 0}, {"device": device, "dtype": torch.int}]
        for keywords in ({}, {"device": device}, {"device": "sky"}, *more):
            print("construct", made, [type(a).__name__ for a in arguments], keywords, flush=True)
            try:
                result = made(*arguments, **keywords)
            except Exception:
                continue
print((torch.ones(3, device=device) + 1).tolist())
"""


@pytest.mark.timeout(280)
def test_no_method_or_constructor_of_a_storage_ends_the_process(tmp_path: Path) -> None:
    """Whatever it is given: PyTorch asks our device for an allocator in many places, without looking for one."""
    head = f"import sys; sys.argv = ['', 'sky:0', {str(tmp_path / 'file')!r}]\n"
    done = run_program(head + EVERY_METHOD, timeout=250)
    assert done.returncode == 0, f"{done.returncode} after {done.stdout.splitlines()[-1:]}\n{done.stderr[-2000:]}"
    assert done.stdout.splitlines()[-1] == "[2.0, 2.0, 2.0]"


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.UntypedStorage([1, 2, 3], device=device),
        lambda device: torch.UntypedStorage(0, device=device),
        lambda device: torch.UntypedStorage(size=3, device=device).fill_(5),
        lambda device: torch.UntypedStorage(sequence=[1, 2, 3], device=device),
        lambda device: torch.UntypedStorage(device=torch.device(device)),
        lambda device: torch.UntypedStorage(4, device=device).fill_(7),
        lambda device: torch.UntypedStorage._new_shared(4, device=device).fill_(7),
        lambda device: torch.UntypedStorage([1, 2, 3]).to(device=device),
        lambda device: torch.TypedStorage([1.0, 2.0], dtype=torch.float, device=device),
        lambda device: torch.TypedStorage(3, dtype=torch.int, device=device).fill_(7),
        lambda device: torch.arange(4.0).storage().to(device=device),
        lambda device: torch.arange(4.0).untyped_storage().to(device=device, non_blocking=True),
        lambda device: copy.copy(torch.arange(4.0, device=device).storage()),
        lambda device: copy.deepcopy(torch.arange(4.0, device=device).storage()),
        lambda device: copy.deepcopy(torch.arange(4.0, device=device).untyped_storage()),
        lambda device: torch.arange(4.0, device=device).untyped_storage()[4:12],
        lambda device: torch.arange(4.0, device=device).untyped_storage()[-4:],
        lambda device: torch.arange(4.0, device=device).untyped_storage()[9:3],
        lambda device: torch.serialization.default_restore_location(torch.UntypedStorage([1, 2]), device),
        lambda device: pickle.loads(pickle.dumps(torch.arange(4.0, device=device).storage())),
        lambda device: torch.arange(4.0, device=device).storage().int(),
        lambda device: torch.arange(4.0, device=device).untyped_storage().short(),
    ],
)
def test_a_storage_is_made_as_on_the_cpu(make: Callable[[str], Any], sky1: str) -> None:
    local, remote = make("cpu"), make(sky1)
    assert remote.device == torch.device(sky1)
    assert torch.typename(remote) == torch.typename(local)
    assert remote.nbytes() == local.nbytes()
    assert list(remote) == remote.cpu().tolist() == list(local)


def test_bytes_go_from_storage_to_storage_whatever_the_device(sky: str, sky1: str) -> None:
    for source in (sky, sky1, "cpu"):
        for target in (sky, sky1, "cpu"):
            copied = torch.UntypedStorage(3, device=target).copy_(torch.UntypedStorage([7, 8, 9], device=source))
            assert (copied.tolist(), copied.device) == ([7, 8, 9], torch.device(target))
            with pytest.raises(RuntimeError, match="self was 3 bytes but src was 2 bytes"):
                copied.copy_(torch.UntypedStorage(2, device=source))


def test_a_slice_of_a_storage_shares_its_memory(sky1: str) -> None:
    x = torch.arange(4.0, device=sky1)
    part = x.untyped_storage()[4:12]
    assert part.data_ptr() == x.data_ptr() + 4
    assert not part.resizable()
    with pytest.raises(RuntimeError, match="not resizable"):
        part.resize_(100)
    y = torch.empty(0, device=sky1).set_(part)
    assert y.tolist() == [1, 2]
    assert y.data_ptr() == part.data_ptr()
    assert part[4:].tolist() == x.untyped_storage()[8:12].tolist() == [0, 0, 0, 64]
    with pytest.raises(RuntimeError, match=r"begins at byte 4 holds no torch\.int64"):
        torch.empty(0, dtype=torch.int64, device=sky1).set_(part)
    y.fill_(9)
    x[2] = 5
    del part
    assert (x.tolist(), y.tolist()) == ([0, 9, 5, 3], [9, 5])
    with pytest.raises(RuntimeError, match="only a step of 1"):
        x.untyped_storage()[::2]


def test_tensors_are_made_of_storages(sky: str) -> None:
    x = torch.arange(4.0, device=sky)
    assert torch.tensor(x.storage()).tolist() == [0, 1, 2, 3]
    assert torch.tensor(x.storage(), device=sky).device == x.device
    assert torch.as_tensor(x.storage()).tolist() == [0, 1, 2, 3]
    assert x.new(x.storage()).data_ptr() == x.data_ptr()
    held = x.storage()
    held.resize_(5)  # PyTorch's C++ still has the former size
    held[4] = 4
    assert torch.tensor(held).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match=r"(?s)device \"cpu\" to a storage on different device \"sky:0\""):
        torch.FloatTensor(x.storage())


def test_bytes_are_swapped_in_place(sky1: str) -> None:
    x = torch.tensor([1, 256], dtype=torch.int16, device=sky1)
    x.untyped_storage().byteswap(torch.int16)
    assert x.tolist() == [256, 1]


def test_a_tensors_storage_is_one_object_while_the_tensor_lives(sky1: str) -> None:
    """Programs that copy state remember storages by `id()`: two of them must never have one number."""
    tensors = [torch.full((3,), float(n), device=sky1) for n in range(20)]
    numbers = [id(tensor.untyped_storage()) for tensor in tensors]
    assert len(set(numbers)) == len(tensors)
    assert [id(tensor.untyped_storage()) for tensor in tensors] == numbers
    assert tensors[0][1:].untyped_storage() is tensors[0].untyped_storage()
    tensors[0].resize_(100)
    assert torch.UntypedStorage.nbytes(tensors[0].untyped_storage()) == 400


def test_a_storage_object_does_not_keep_memory(sky1: str) -> None:
    before = torch.sky.memory_allocated(sky1)
    for _ in range(5):
        torch.zeros(1 << 20, device=sky1).untyped_storage()
    assert torch.sky.memory_allocated(sky1) <= before + (1 << 20)


READ_WITHOUT_MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "values": lambda x: x.tolist(),
    "copy": lambda x: x.cpu(),
    "one value": lambda x: x[0].item(),
    "text": repr,
    "operation": lambda x: (x + 1).tolist(),
    "clone": lambda x: x.clone().cpu(),
    "product": lambda x: (x.view(2, 2) @ x.view(2, 2)).tolist(),
    "view": lambda x: x.view(2, 2)[1].tolist(),
    "two reads": lambda x: [x.sum().item(), x.tolist()],
}


@pytest.mark.parametrize("name", READ_WITHOUT_MEMORY)
def test_reading_what_lost_its_memory_fails_in_words_and_spares_the_session(name: str, sky1: str) -> None:
    x, other = torch.arange(4.0, device=sky1), torch.arange(3.0, device=sky1)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        READ_WITHOUT_MEMORY[name](x)
    assert (other + 1).tolist() == [1, 2, 3]
    x.untyped_storage().resize_(16)
    x.copy_(torch.ones(4))
    assert x.tolist() == [1, 1, 1, 1]
