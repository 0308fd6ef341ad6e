"""The page's own files: nothing from elsewhere, nothing that makes markup of a text, and all of them in the package."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from skyproxy.webpage import page_file

NAMES = ["", "page.css", "page.js", "plot.js"]
FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|DOMParser|"
    r"createContextualFragment|javascript:|\.cookie\b|localStorage"
)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_becomes_markup_and_nothing_comes_from_elsewhere(name: str) -> None:
    found = page_file(name)
    assert found is not None
    assert re.search(FORBIDDEN, found.text) is None
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"')]*", found.text))
    assert urls <= {"http://www.w3.org/2000/svg"}  # the name of a vocabulary; nobody loads it


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    found = page_file("")
    assert found is not None
    assert re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=\"[\w.]+\" defer></script>)", found.text) is None


def test_every_file_is_served_and_no_other() -> None:
    folder = files("skyproxy.webpage").joinpath("static")
    assert {item.name for item in folder.iterdir()} == {"index.html", *NAMES[1:]}
    for name in ("index.html", "../__init__.py", "static/page.js", "page.js/", "PAGE.JS"):
        assert page_file(name) is None
