"""Views that reach beyond the memory of their tensor are refused at their line, also after others of the same look."""

from __future__ import annotations

import pytest
import torch


def test_a_view_beyond_the_memory_is_refused_at_its_line(sky: str) -> None:
    with pytest.raises(RuntimeError) as expected:
        torch.zeros(3).as_strided((2, 2), (2, 2))
    whole = torch.arange(9.0, device=sky)
    for _ in range(2):
        assert whole[:3].as_strided((2, 2), (2, 2)).tolist() == [[0, 2], [2, 4]]
        with pytest.raises(RuntimeError) as found:
            torch.zeros(3, device=sky).as_strided((2, 2), (2, 2))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
    torch.sky.synchronize()


def test_a_view_of_a_memory_that_has_grown_asks_for_nothing_twice(sky: str) -> None:
    x = torch.zeros(3, device=sky)
    x.resize_(9).fill_(2)
    x.resize_(3)
    x.as_strided((2, 2), (4, 4))
    torch.sky.synchronize()
    trips = torch.sky.stats()["round_trips"]
    view = x.as_strided((2, 2), (4, 4))
    assert torch.sky.stats()["round_trips"] == trips
    assert view.tolist() == [[2, 2], [2, 2]]
