"""The checks of tensors on several devices find what is put there on purpose."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conformance import mixed_sweep
from tests.conformance.mixed_checks import check_mixed


def _entry(function: Any, **forms: Any) -> Any:
    """An entry of the operator database with one sample of two tensors."""
    sample = SimpleNamespace(input=torch.ones(2), args=(torch.full((2,), 3.0),), kwargs={})
    variants = dict.fromkeys(("method_variant", "operator_variant", "inplace_variant", "inplace_operator_variant"))

    class Entry(SimpleNamespace):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Entry(
        name="lie",
        variant_test_name="",
        supports_out=forms.pop("supports_out", False),
        sample_inputs=lambda *_, **__: [sample],
        supports_dtype=lambda *_: True,
        **{**variants, **forms},
    )


def _copied(x: torch.Tensor, place: torch.device) -> torch.Tensor:
    return x.detach().cpu().to(place)


def _refuse(*tensors: torch.Tensor) -> None:
    if len({x.device for x in tensors}) > 1:
        raise RuntimeError("Expected all tensors to be on the same device")


def _right(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    _refuse(x, y, *([] if out is None else [out]))
    return torch.add(x, y) if out is None else torch.add(x, y, out=out)


def _lost_write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.device != y.device:
        return x  # as if it had been changed
    return x.add_(y)


def _refused_too_late(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(_copied(y, x.device))
    _refuse(x, y)
    return x


def _rounded_otherwise(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y + 2.0**-21 if x.device != y.device else x + y


def _right_in_half_precision(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    _refuse(x, y, *([] if out is None else [out]))
    return torch.complex(x.half(), y.half()) if out is None else torch.complex(x.half(), y.half(), out=out)


def _kwargs_taken_for_numbers(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None and out.device != x.device:
        return out
    return _right(x, y, out)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        (_entry(_right, supports_out=True), ""),
        (_entry(_right, inplace_variant=_lost_write), "wrong"),
        (_entry(_right, inplace_variant=_refused_too_late), "refused, and changed all the same"),
        (_entry(_kwargs_taken_for_numbers, supports_out=True), "wrong"),
        (_entry(_right_in_half_precision, supports_out=True), ""),
        (_entry(_rounded_otherwise), "wrong"),
        (_entry(lambda x, y: x * 2 if x.device != y.device else x + y), "wrong"),
        (_entry(lambda x, y: x + y if x.device == y.device else 1 // 0), "ZeroDivisionError"),
    ],
    ids=[
        *("right", "lost write", "late refusal", "lost result", "complex numbers of half precision", "last bit"),
        *("wrong value", "another error"),
    ],
)
def test_a_difference_is_found(entry: Any, found: str, sky_devices: tuple[str, str]) -> None:
    tally = check_mixed(entry, sky_devices[1], sky_devices[0])
    assert tally.ran
    assert any(found in problem for problem in tally.problems) if found else not tally.problems


def test_each_tensor_in_turn_is_elsewhere(sky_devices: tuple[str, str]) -> None:
    seen: set[tuple[str, ...]] = set()

    def note(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add((f"{x.device.type}{x.dim()}", f"{y.device.type}{y.dim()}"))
        return _right(x, y)

    check_mixed(_entry(note), sky_devices[1], sky_devices[0])
    crossed = {pair for pair in seen if pair[0][:3] != pair[1][:3]}
    assert crossed == {
        *(("cpu1", "sky1"), ("sky1", "cpu1"), ("cpu0", "sky1"), ("sky1", "cpu0")),
        *(("cpu0", "sky0"), ("sky0", "cpu0")),
    }


def test_parts_of_the_database_are_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"entry{i}" for i in range(7)]
    entries = [SimpleNamespace(name=name, variant_test_name="") for name in names]
    monkeypatch.setattr(mixed_sweep, "op_db", entries)
    asked: list[str] = []

    def sweep(operators: Any, **_: Any) -> Any:
        asked.extend(op.name for op in operators)
        return iter(())

    monkeypatch.setattr(mixed_sweep, "sweep", sweep)
    for part in range(3):
        assert mixed_sweep.main(["--part", f"{part}/3"]) == 1  # nothing ran
    assert sorted(asked) == names
    assert "0 calls of 0 entries" in capsys.readouterr().out
