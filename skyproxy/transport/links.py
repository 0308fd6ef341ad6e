"""Links to workers: "sky://host:port#sha256:FINGERPRINT", as `skyproxy serve --tls` prints them.

The part behind "#" is the fingerprint of the worker's certificate. It is no secret: whoever knows it can tell the
worker from others, and needs the token all the same.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from skyproxy.errors import ConfigurationError
from skyproxy.transport.trust import FINGERPRINT_PREFIX, normal_fingerprint

DEFAULT_PORT = 8765
_SCHEME = "sky://"
_LENGTH = len(FINGERPRINT_PREFIX) + 64


def is_link(text: str) -> bool:
    """Return whether a text is meant as a link."""
    return text.startswith(_SCHEME)


def link_to(host: str, port: int, fingerprint: str) -> str:
    """Return the link to a worker.

    Args:
        host: as clients reach it; an IPv6 address without brackets.
        port: where it listens.
        fingerprint: of its certificate.
    """
    return f"{_SCHEME}[{host}]:{port}#{fingerprint}" if ":" in host else f"{_SCHEME}{host}:{port}#{fingerprint}"


def read_link(text: str) -> tuple[str, str]:
    """Return the url, "wss://host:port", and the fingerprint that a link stands for.

    Raises:
        ConfigurationError: it cannot be one. The message shows nothing from behind the "#": a token may be there.
    """
    address, _, rest = text.strip().partition("#")
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise ConfigurationError(f"the link to a worker cannot be read: {error}.") from None
    if not is_link(address) or not host or "@" in parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigurationError("this is not a link to a worker. Example: sky://gpu-box:8765#sha256:...")
    if not rest.startswith(FINGERPRINT_PREFIX) or len(rest) < _LENGTH:
        raise ConfigurationError(
            f"the link {address} lacks the fingerprint of the worker's certificate: copy the whole line that `skyproxy "
            "serve --tls` prints, with #sha256: and 64 digits."
        )
    if len(rest) > _LENGTH:
        raise ConfigurationError(
            f"the link {address}#sha256:... has more text after the fingerprint. Remove it; if it is the token, others "
            "may have read it from the command line: make a new one, and give it when you are asked for it."
        )
    shown = f"[{host}]" if ":" in host else host
    return f"wss://{shown}:{port}", normal_fingerprint(rest)


def read_url(url: str, certificate: object) -> tuple[str, str]:
    """Return the url and the fingerprint of a link that was given as a worker's url.

    Args:
        url: the link.
        certificate: what was given beside it.

    Raises:
        ConfigurationError: it cannot be one, or a certificate was given as well.
    """
    if certificate is not None:
        raise ConfigurationError("a sky:// link says which certificate to trust; leave certificate= out.")
    return read_link(url)
