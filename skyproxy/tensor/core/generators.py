"""`torch.Generator(device="sky:0")`: a generator of its own, on the worker."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

import torch

from skyproxy import patching
from skyproxy.tensor.core.devices import DEVICES, Handle, SkyDevice
from skyproxy.tensor.core.torch_private import PlainGenerator

_DEFAULT_SEED = 67280421310721  # what PyTorch gives a new generator
_METHODS = ("manual_seed", "seed", "initial_seed", "get_state", "set_state", "clone_state", "_cdata")
_plain_generator = PlainGenerator


class SkyGenerator(PlainGenerator):
    """A random generator on a worker. To PyTorch's C++ it is a generator of the CPU, whose state nobody uses.

    Seeding and drawing are commands in order with the operations around them; only reading the state waits.
    """

    sky_device: SkyDevice
    _cdata: int
    _handle: Handle
    _seed: int | None

    def __new__(cls, device: torch.device | str | int | None = "sky") -> SkyGenerator:
        generator: SkyGenerator = _plain_generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        return generator

    def __init__(self, device: torch.device | str | int | None = "sky") -> None:
        self.sky_device = DEVICES.of(device)
        self._handle = self.sky_device.new_handle(None)
        self._seed = _DEFAULT_SEED
        self._do("new_generator", self.sky_device.place)
        _by_address[self._cdata] = self

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.sky_device.torch_device

    def _do(self, name: str, *arguments: object) -> None:
        self.sky_device.session.do(name, self._handle.slot, *arguments)

    def manual_seed(self, seed: int) -> SkyGenerator:
        value = as_seed(seed)
        self._seed = value % (1 << 64)
        # C++ takes it for a generator of the CPU: a CPU op should at least draw the same numbers from it each time.
        super().manual_seed(self._seed)
        self._do("seed_generator", value)
        return self

    def seed(self) -> int:
        seed = int.from_bytes(os.urandom(7), "little")
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        if self._seed is None:
            self._seed = int(self.sky_device.session.call("generator_seed", self._handle.slot))
        return self._seed

    def get_state(self) -> torch.Tensor:
        """The state as a ByteTensor on the CPU. Waits."""
        state = self.sky_device.session.call("generator_state", self._handle.slot)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> SkyGenerator:
        self._do("set_generator_state", bytes_of_state(new_state))
        self._seed = None
        return self

    def clone_state(self) -> SkyGenerator:
        """A new generator in the same state."""
        clone = SkyGenerator(self.device)
        clone._do("copy_generator_state", self._handle.slot)
        clone._seed = self._seed
        return clone

    def graphsafe_get_state(self) -> NoReturn:
        raise NotImplementedError(f"graphsafe_get_state is for CUDA graphs; a generator on {self.device} has get_state")

    def graphsafe_set_state(self, state: object) -> NoReturn:
        raise NotImplementedError(f"graphsafe_set_state is for CUDA graphs; a generator on {self.device} has set_state")

    def __reduce__(self) -> tuple[object, ...]:  # type: ignore[override]
        return _rebuild, (str(self.device), self.get_state())

    def __deepcopy__(self, memo: dict[int, object]) -> SkyGenerator:
        return self.clone_state()

    def __repr__(self) -> str:
        return f"<torch.Generator device={self.device}>"


class DefaultGenerator(SkyGenerator):
    """The generator that a device's operations draw from unless they are given another one.

    On the worker it is the session's own state and no value, so an operation that is given it is given none.
    """

    def __init__(self, device: torch.device | str | int | None = "sky") -> None:
        self.sky_device = DEVICES.of(device)
        _by_address[self._cdata] = self

    def manual_seed(self, seed: int) -> DefaultGenerator:
        value = as_seed(seed)
        self.sky_device.change_random_state("manual_seed", self.sky_device.place, value)
        return self

    def initial_seed(self) -> int:
        return int(self.sky_device.session.call("initial_seed", self.sky_device.place))

    def get_state(self) -> torch.Tensor:
        """The state as a ByteTensor on the CPU. Waits."""
        state = self.sky_device.session.call("random_state", self.sky_device.place)
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> DefaultGenerator:
        self.sky_device.change_random_state("set_random_state", self.sky_device.place, bytes_of_state(new_state))
        return self

    def clone_state(self) -> SkyGenerator:
        """A generator of its own in the same state. Waits."""
        return SkyGenerator(self.device).set_state(self.get_state())


class KeptRandomState:
    """The state of a device's default generator at this point of the program, kept on the worker. Never waits."""

    def __init__(self, device: SkyDevice) -> None:
        self._handle = device.new_handle(None)
        device.session.do("keep_random_state", self._handle.slot, device.place)

    def restore(self, device: SkyDevice | None = None) -> None:
        """The default generator goes on from here.

        Args:
            device: whose generator, if not that of the device that the state is of.

        Raises:
            RuntimeError: it is another worker's.
        """
        own = self._handle.device
        device = own if device is None else device
        if device.session is not own.session:
            raise RuntimeError(
                f"a state of {own.torch_device}'s generator that stays on its worker cannot be given to "
                f"{device.torch_device}. Read it there: torch.sky.get_rng_state({own.index})"
            )
        device.change_random_state("restore_random_state", self._handle.slot, device.place)


def as_seed(seed: int) -> int:
    """Return a seed as a signed number of 64 bits, which is how it travels.

    Raises:
        RuntimeError, ValueError: it has more bits; which of the two depends on PyTorch's version.
    """
    seed = int(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        torch.Generator().manual_seed(seed)  # PyTorch says no in its own words
    return seed if seed < 1 << 63 else seed - (1 << 64)


def bytes_of_state(state: object) -> bytes:
    """Bytes of a generator's state, as they travel.

    Raises:
        TypeError: it is no tensor of bytes.
    """
    if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8:
        raise TypeError("RNG state must be a torch.ByteTensor")
    return bytes(state.cpu().contiguous().numpy())


def _rebuild(device: str, state: torch.Tensor) -> SkyGenerator:
    return SkyGenerator(device).set_state(state)


# A generator that passes through C++ loses its Python object, but keeps its address.
_by_address: weakref.WeakValueDictionary[int, SkyGenerator] = weakref.WeakValueDictionary()


def slot_of(generator: torch.Generator, device: SkyDevice) -> int:
    """Return the slot of any generator, for an op on `device`; 0, which is None, for the device's default one.

    Raises:
        RuntimeError: the generator is on another device.
    """
    known = _by_address.get(generator._cdata)  # type: ignore[attr-defined]
    if known is None or known.sky_device is not device:
        raise _wrong_device(device, known or generator)
    return 0 if isinstance(known, DefaultGenerator) else known._handle.slot


def device_of(generator: torch.Generator) -> SkyDevice | None:
    """The device of a generator; None if it is not ours."""
    known = _by_address.get(generator._cdata)  # type: ignore[attr-defined]
    return known.sky_device if known is not None else None


def _wrong_device(device: SkyDevice, generator: torch.Generator) -> RuntimeError:
    """PyTorch's error for a generator of another device than the op's."""
    expected, found = device.torch_device, generator.device
    if found.type != "sky":
        expected, found = torch.device("sky"), torch.device(found.type)
    return RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")


class _GeneratorMeta(type(_plain_generator)):  # type: ignore[misc]
    """The class of the stand-in: what is a generator to PyTorch's own class is one to it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _plain_generator) if cls is Generator else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _plain_generator) if cls is Generator else type.__subclasscheck__(cls, subclass)


class Generator(_plain_generator, metaclass=_GeneratorMeta):
    """Stands in for `torch.Generator`, which a Python class cannot extend to a new device by itself."""

    __doc__ = _plain_generator.__doc__

    def __new__(cls, device: torch.device | str | int | None = "cpu") -> Any:
        if cls is not Generator:  # somebody's own subclass
            return _plain_generator.__new__(cls, device)  # type: ignore[call-arg]
        if device is not None and torch.device(device).type == "sky":
            return SkyGenerator(device)
        return _plain_generator(device)


def install() -> None:
    """Puts our factory in the place of `torch.Generator`; generators of other devices are made as before.

    Raises:
        ConfigurationError: this torch's generators lack a method that ours have.
    """
    patching.require(_plain_generator, *_METHODS)
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    patching.replace(
        torch,
        "Generator",
        Generator,
        why="`torch.Generator('sky')` would ask for a generator that each device must have in C++",
        test="tests/tensor/core/test_generators.py::test_a_seeded_generator_draws_what_the_worker_draws_locally",
    )
