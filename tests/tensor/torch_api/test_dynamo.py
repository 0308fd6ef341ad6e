"""What Dynamo is told of our own code."""

from __future__ import annotations

from types import ModuleType

import pytest

from skyproxy.session import recorder
from skyproxy.tensor.core import remote_tensor
from skyproxy.tensor.dispatch import hot_path, memoized_calls


@pytest.mark.parametrize("module", [hot_path, remote_tensor, recorder])
def test_our_own_frames_are_not_compiled(module: ModuleType, sky: str) -> None:
    from torch._dynamo import trace_rules

    assert trace_rules.check_file(str(module.__file__)).skipped


def test_what_is_put_around_functions_of_the_user_is_looked_through(sky: str) -> None:
    from torch._dynamo import trace_rules

    assert not trace_rules.check_file(str(memoized_calls.__file__), is_inlined_call=True).skipped
    trace_rules.clear_lru_cache()  # as `init_process_group` does
    assert not trace_rules.check_file(str(memoized_calls.__file__), is_inlined_call=True).skipped
