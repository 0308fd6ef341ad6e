"""A token and a self-signed certificate for `skyproxy serve --tls`, made once and kept for their owner alone."""

from __future__ import annotations

import datetime
import secrets
import socket
from pathlib import Path

from skyproxy.contexts import kept_text, state_folder
from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command
from skyproxy.transport.trust import self_signed_certificate

_CLOCK_SKEW = datetime.timedelta(hours=1)
_SOMEWHERE = "192.0.2.1"
"""An address of the block for documentation: there is nobody, and a datagram socket sends nothing to connect."""


def own_token() -> Path:
    """Return the file with this user's token for workers on this machine; made where it is missing."""
    path = _folder() / "token"
    kept_text(path, lambda: secrets.token_urlsafe(32) + "\n")
    return path


def own_certificate() -> Path:
    """Return the file with this user's certificate for workers on this machine, and its key; made where it is missing.

    Raises:
        ConfigurationError: cryptography is not installed, or the file cannot be written.
    """
    path = _folder() / "certificate.pem"
    kept_text(path, _self_signed)
    return path


def own_address() -> str:
    """Return how other machines reach this one: the address that its packets leave with, or else its name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_SOMEWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _folder() -> Path:
    return state_folder() / "serving"


def _self_signed() -> str:
    """Return a key and a certificate of it, as PEM. Clients know it by its fingerprint; nothing in it names us."""
    try:
        return "".join(self_signed_certificate("skyproxy worker", _CLOCK_SKEW))
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--tls needs the package cryptography, which is not installed: {install_command('server')}. Or "
            "give a certificate of your own: --tls-cert, --tls-key"
        ) from error
