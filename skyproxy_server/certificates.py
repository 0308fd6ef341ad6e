"""The worker's certificate: read again when its files change, so that a renewed one needs no restart."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.transport.trust import fingerprint_of

logger = logging.getLogger("skyproxy.server")


class Certificate:
    """A certificate and its key, in files; connections that are open keep the one that they began with."""

    def __init__(self, certificate: Path, key: Path | None = None) -> None:
        """Read the files.

        Args:
            certificate: the chain, as PEM.
            key: the private key, as PEM; by default in the same file.

        Raises:
            ConfigurationError: they cannot be used.
        """
        self._certificate = certificate
        self._key = key
        self._lock = threading.Lock()
        self._seen = self._marks()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection. Files that cannot be used leave it as it was."""
        with self._lock:
            seen = self._marks()
            if seen != self._seen:
                self._seen = seen
                try:
                    fingerprint = fingerprint_of(self._certificate.read_text(encoding="ascii"))
                    self._context = self._load()
                except (ConfigurationError, OSError, ValueError) as error:
                    # Perhaps only one of the two files is new: the other will change the marks once more.
                    logger.error("%s The previous one stays in use.", error)
                else:
                    # Clients that pinned the old one need it: skyproxy connect NAME --certificate sha256:...
                    logger.info(
                        "the certificate %s was reloaded; its fingerprint is %s", self._certificate, fingerprint
                    )
            return self._context

    def _marks(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in (self._certificate, self._key) if path is not None]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigurationError(
                f"The certificate {self._certificate} cannot be used: {exc.strerror or exc}."
            ) from exc
        return context


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
