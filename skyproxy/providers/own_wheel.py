"""The wheel of this very skyproxy, made from the files that are imported: for hosts that get it from us."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from skyproxy.errors import ConfigurationError

_PACKAGES = ("skyproxy", "skyproxy_server")
_WHEEL = "Wheel-Version: 1.0\nGenerator: skyproxy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class OwnWheel:
    """A wheel.

    Attributes:
        name: of the file.
        content: of the file; the same files give the same bytes.
        requirements: what it needs, without extras.
    """

    name: str
    content: bytes = field(repr=False)
    requirements: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()


def own_wheel() -> OwnWheel:
    """Return the wheel of what this process imports.

    Raises:
        ConfigurationError: skyproxy is not installed here, so nobody knows its version and its requirements.
    """
    try:
        known = importlib.metadata.distribution("skyproxy")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            "skyproxy is not installed here, only on the path: install it, so that it can be copied to other machines."
        ) from None
    metadata = known.read_text("METADATA") or ""
    folder = f"skyproxy-{known.version}.dist-info"
    rows, content = [], io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        texts = {f"{folder}/METADATA": metadata.encode(), f"{folder}/WHEEL": _WHEEL.encode()}
        for name, data in sorted({**dict(_files()), **texts}.items()):
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{name},sha256={digest},{len(data)}\n")
            archive.writestr(_member(name), data)
        archive.writestr(_member(f"{folder}/RECORD"), "".join([*rows, f"{folder}/RECORD,,\n"]))
    needed = tuple(text for text in known.requires or () if "extra ==" not in text)
    return OwnWheel(f"skyproxy-{known.version}-py3-none-any.whl", content.getvalue(), needed)


def _files() -> Iterator[tuple[str, bytes]]:
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _member(name: str) -> zipfile.ZipInfo:
    made = zipfile.ZipInfo(name, _EPOCH)
    made.compress_type = zipfile.ZIP_DEFLATED
    made.external_attr = 0o644 << 16
    return made
