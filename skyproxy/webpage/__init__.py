"""The page of the web view: files as they are, without a build step, and the headers that they travel with. No torch.

Both `skyproxy.webview` and a worker serve it. It holds no data: it asks for them with a token, shows them as text, and
loads nothing from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_NAMES = {"": "index.html", "page.css": "page.css", "page.js": "page.js", "plot.js": "plot.js"}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page.

    Attributes:
        text: what it holds.
        type: its media type.
    """

    text: str
    type: str

    def headers(self, frame_ancestors: str) -> dict[str, str]:
        """Return the headers that the file must have.

        Args:
            frame_ancestors: who may show the page in a frame, in the words of a Content-Security-Policy.
        """
        return {"Content-Type": f"{self.type}; charset=utf-8", **security_headers(frame_ancestors)}


def security_headers(frame_ancestors: str = "'none'") -> dict[str, str]:
    """Return what keeps a browser from running, loading or telling anything that is not the page's own.

    Args:
        frame_ancestors: who may show the page in a frame.
    """
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
        f"form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'; "
        f"frame-ancestors {frame_ancestors}"
    )
    return {
        "Content-Security-Policy": policy,
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@lru_cache(maxsize=16)
def page_file(name: str) -> PageFile | None:
    """Return a file of the page; None where it has none of this name.

    Args:
        name: as the page names it; empty for the page itself.
    """
    if name not in _NAMES:
        return None
    path = _NAMES[name]
    text = files("skyproxy.webpage").joinpath("static", path).read_text(encoding="utf-8")
    return PageFile(text, _TYPES[path.rpartition(".")[2]])
