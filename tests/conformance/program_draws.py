"""What a call of a drawn program is given besides tensors of the pool: the same on either side, for the same seed."""

from __future__ import annotations

import random
from typing import Any

import torch

DTYPES = {
    torch.float32: 12,
    torch.float64: 3,
    torch.int64: 4,
    torch.bool: 3,
    torch.bfloat16: 3,
    torch.float16: 2,
    torch.complex64: 3,
    torch.complex128: 1,
    torch.int32: 2,
    torch.uint8: 2,
    torch.int16: 1,
    torch.int8: 1,
    torch.uint16: 1,
    torch.uint32: 1,
    torch.uint64: 1,
    torch.complex32: 1,
}
_NUMBERS = (0, 1, 2, -1, 3, 0.5, -1.5, True, False, 2.0, 1e10, float("nan"), float("inf"), 1j, 2**31, -7, 0.1)


class Draws:
    """Draws parameters of one call. Two with one seed draw the same if the tensors that they see look the same.

    Args:
        seed: of the call.
        device: where the program runs: "cpu" or "sky:k".
    """

    def __init__(self, seed: int, device: str) -> None:
        self._random = random.Random(seed)
        self.device = torch.device(device)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def one(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def int(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return self._random.randint(low, high)

    def dim(self, x: torch.Tensor) -> int:
        return self._random.randrange(-x.dim(), x.dim()) if x.dim() else 0

    def number(self) -> Any:
        return self._random.choice(_NUMBERS)

    def number_or_scalar(self) -> Any:
        """A number, or a tensor of the CPU without dimensions, which operations take beside those of any device."""
        number = self.number()
        if self.chance(0.4):
            dtype = self.one(None, None, torch.float64, torch.bfloat16, torch.complex64)
            return torch.tensor(number, dtype=torch.complex64 if isinstance(number, complex) else dtype, device="cpu")
        return number

    def note(self, value: Any) -> torch.Tensor:
        """What was read, as a tensor that can be compared."""
        return torch.tensor(value, device=self.device)

    def dtype(self) -> torch.dtype:
        return self._random.choices(list(DTYPES), list(DTYPES.values()))[0]

    def order(self, x: torch.Tensor) -> list[int]:
        return self._random.sample(range(x.dim()), x.dim())

    def size(self) -> list[int]:
        rank = self._random.choices([0, 1, 2, 3, 4, 5], [2, 4, 6, 4, 4, 1])[0]
        return [self._random.choices([0, 1, 2, 3, 4, 5], [1, 6, 5, 5, 3, 1])[0] for _ in range(rank)]

    def sizes_of(self, elements: int) -> list[int]:
        """Sizes with as many elements, in up to four dimensions."""
        found, left = [], elements
        for _ in range(self.int(0, 3)):
            found.append(self.one(*(n for n in range(1, 7) if n == 1 or (left and left % n == 0))))
            left //= found[-1]
        found.append(left)
        self._random.shuffle(found)
        if self.chance(0.2):
            found[self.int(0, len(found) - 1)] = -1
        return found

    def values(self, size: list[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor on the program's device, in row-major order."""
        generator = torch.Generator().manual_seed(self.int(0, 10**9))
        if dtype is torch.bool:
            made = torch.randint(0, 2, size, generator=generator, device="cpu").bool()
        elif dtype.is_complex or dtype.is_floating_point:
            drawn = torch.complex64 if dtype.is_complex else torch.float32
            made = torch.randn(size, generator=generator, dtype=drawn, device="cpu")
        else:
            made = torch.randint(-5 if dtype.is_signed else 0, 6, size, generator=generator, device="cpu")
        return made.to(dtype).to(self.device)

    def tensor(self) -> torch.Tensor:
        """A new tensor in some order of memory, with some dtype and bits."""
        size, dtype = self.size(), self.dtype()
        look = self.one("plain", "plain", "plain", "permuted", "last", "expanded", "gapped", "offset", "bit", "idle")
        if look == "expanded" and size:
            whole, dim = list(size), self.int(0, len(size) - 1)
            whole[dim] = 1
            return self.values(whole, dtype).expand(size)
        if look == "gapped" and size:
            size[-1] = size[-1] * 2
            return self.values(size, dtype)[..., :: self.one(1, 2)]
        x = self.values(size, dtype)
        if look == "permuted":
            return x.permute(self.order(x))
        if look == "last" and x.dim() in (4, 5):
            return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        if look == "offset" and x.dim():
            return x[1:]
        if look == "idle" and x.numel():
            return x.as_strided(x.shape, [self.one(1, 7, s) if n == 1 else s for n, s in zip(x.shape, x.stride())])
        if look == "bit" and dtype.is_complex:
            return x.conj() if self.chance(0.6) else x.conj().imag
        return x

    def floats(self, *size: int) -> torch.Tensor:
        return self.values(list(size), self.one(torch.float32, torch.float32, torch.float64, torch.bfloat16))

    def positions(self, count: int, size: int) -> torch.Tensor:
        """Whole numbers that are valid as an index, nearly always; of the CPU, or of the program's device."""
        count = count if size else 0
        beyond = self.chance(0.02)
        numbers = [self.int(-size, size - 1) if size else 0 for _ in range(count)]
        if beyond and numbers:
            numbers[0] = size + 3
        made = torch.tensor(numbers, dtype=self.one(torch.int64, torch.int64, torch.int32), device="cpu")
        return made.to(self.device) if self.chance(0.6) else made

    def places(self, count: int, size: int) -> torch.Tensor:
        """The same, not negative and on the program's device."""
        return self.positions(count, size).abs().clamp(max=max(size - 1, 0)).to(self.device)

    def index(self, x: torch.Tensor) -> Any:
        """Something to put in brackets: any mixture of what PyTorch takes there."""
        found: list[Any] = []
        dim, length = 0, self.int(1, 3)
        while dim < x.dim():
            n = x.shape[dim]
            kind = self._random.choices(
                ["all", "slice", "int", "none", "rest", "list", "tensor", "mask", "wide", "stop", "bool", "zero"],
                [5, 5, 4, 1, 1, 2, 3, 2, 1, 2, 0.5, 1],
            )[0]
            if kind == "stop":
                break
            if kind == "rest":
                found.append(...)
                break
            if kind == "none":
                found.append(None)
                continue
            if kind == "bool":
                found.append(self.chance(0.5))
                continue
            if kind == "wide" and dim + 1 < x.dim():
                mask = self.values([n, x.shape[dim + 1]], torch.bool)
                found.append(mask if self.chance(0.5) else mask.cpu())
                dim += 2
                continue
            found.append(self._of_one_dim(kind, n, length))
            dim += 1
        return found[0] if len(found) == 1 and self.chance(0.7) else tuple(found)

    def _of_one_dim(self, kind: str, n: int, length: int) -> Any:
        if kind == "slice":
            return slice(
                self.one(None, self.int(-n - 1, n)), self.one(None, self.int(-n - 1, n + 1)), self.one(None, 1, 2)
            )
        if kind == "int" and n:
            return self.int(-n, n - 1)
        if kind == "list" and n:
            return [self.int(-n, n - 1) for _ in range(self.one(1, length))]
        if kind == "tensor" and n:
            made = self.positions(self.one(1, length), n)
            return made.reshape(-1, 1) if self.chance(0.2) else made
        if kind == "zero" and n:
            made = torch.tensor(self.int(-n, n - 1), device="cpu")
            return made.to(self.device) if self.chance(0.5) else made
        if kind == "mask":
            mask = self.values([n], torch.bool)
            return self.one(mask, mask.cpu(), mask.tolist())
        return slice(None)
