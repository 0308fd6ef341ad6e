"""A token and a self-signed certificate for `skyproxy serve --tls`, made once and kept for their owner alone."""

from __future__ import annotations

import datetime
import secrets
import socket
from pathlib import Path

from skyproxy.contexts import kept_text, state_folder
from skyproxy.errors import ConfigurationError
from skyproxy.extras import install_command

_VALID_DAYS = 3650
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
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"--tls needs the package cryptography, which is not installed: {install_command('server')}. Or "
            "give a certificate of your own: --tls-cert, --tls-key"
        ) from error
    now, key = datetime.datetime.now(datetime.UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyproxy worker")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode("ascii") + certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
