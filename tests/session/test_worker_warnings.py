"""Warnings of a worker on the client: shown at the lines that recorded the operations, as often as Python's."""

from __future__ import annotations

import sys
import warnings
from types import CodeType

import pytest
import torch  # noqa: F401  # before skyproxy's modules, which import each other otherwise

from skyproxy.session.worker_warnings import WorkerWarnings


def here() -> CodeType:
    return sys._getframe(1).f_code


@pytest.fixture
def shown() -> WorkerWarnings:
    globals().get("__warningregistry__", {}).clear()
    return WorkerWarnings()


def test_a_warning_is_shown_at_its_line(shown: WorkerWarnings) -> None:
    shown.add("DeprecationWarning", "old", (here(), 7))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        shown.show()
    assert [(w.category, str(w.message), w.filename, w.lineno) for w in seen] == [
        (DeprecationWarning, "old", __file__, 7)
    ]
    assert not shown.pending


def test_the_same_warning_is_shown_once_a_line(shown: WorkerWarnings) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for number in (7, 7, 8, 7):
            shown.add("UserWarning", "again", (here(), number))
            shown.show()
    assert [w.lineno for w in seen] == [7, 8]


def test_filters_by_module_and_by_text_hold(shown: WorkerWarnings) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="quiet")
        warnings.filterwarnings("ignore", category=FutureWarning, module=__name__.replace(".", r"\."))
        for category, text in (("UserWarning", "quiet please"), ("FutureWarning", "later"), ("UserWarning", "heard")):
            shown.add(category, text, (here(), 1))
        shown.show()
    assert [str(w.message) for w in seen] == ["heard"]


def test_a_filter_that_makes_errors_raises_one_and_keeps_the_rest(shown: WorkerWarnings) -> None:
    for text in ("first", "second"):
        shown.add("UserWarning", text, (here(), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for text in ("first", "second"):
            with pytest.raises(UserWarning, match=text):
                shown.show()
        shown.show()


def test_strange_categories_and_unknown_lines_are_warnings_too(shown: WorkerWarnings) -> None:
    for category in ("KeyboardInterrupt", "NoSuchWarning"):
        shown.add(category, category, None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        shown.show()
    assert [(w.category, str(w.message)) for w in seen] == [
        (UserWarning, "KeyboardInterrupt"),
        (UserWarning, "NoSuchWarning"),
    ]
