"""Trust in a worker's certificate: the system's authorities, those of a PEM text or file, or one pinned certificate."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import ssl
from pathlib import Path

from skyproxy.errors import ConfigurationError

FINGERPRINT_PREFIX = "sha256:"
_VALID = datetime.timedelta(days=3650)
_PEM_MARK = "-----BEGIN"
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")


class WrongCertificateError(ssl.SSLError):
    """The peer presented another certificate than the pinned one."""

    def __init__(self, presented: str, pinned: str) -> None:
        super().__init__(
            ssl.SSL_ERROR_SSL,
            f"its certificate has the fingerprint {presented}, and {pinned} was pinned: somebody may be intercepting "
            "the connection, or the worker has a new certificate. If its log names that fingerprint as its own, trust "
            f"it: skyproxy connect NAME --certificate {presented}",
        )


class _PinnedObject(ssl.SSLObject):
    """TLS over memory buffers; the handshake fails unless the peer has the pinned certificate."""

    def do_handshake(self) -> None:
        super().do_handshake()
        _check(self.context, self.getpeercert(binary_form=True))


class _PinnedSocket(ssl.SSLSocket):
    """TLS over a socket; the handshake fails unless the peer has the pinned certificate."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check(self.context, self.getpeercert(binary_form=True))


class PinnedContext(ssl.SSLContext):
    """Trust in the one certificate of a fingerprint, whatever its names, dates and issuer.

    Attributes:
        fingerprint: of the certificate.
    """

    # In the handshake itself, so that no user of the context can send anything before the check.
    sslobject_class = _PinnedObject
    sslsocket_class = _PinnedSocket
    fingerprint: str

    def __new__(cls, fingerprint: str) -> PinnedContext:
        made = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
        made.fingerprint = fingerprint
        return made


def client_context(certificate: str | Path | None = None) -> ssl.SSLContext:
    """Return the context for a connection to a worker.

    Args:
        certificate: the only certificates to trust: PEM text, the path of a PEM file, or the fingerprint of the
            worker's own certificate, as "sha256:" and 64 hexadecimal digits. None: the system's authorities.

    Raises:
        ConfigurationError: it is none of these, or the file cannot be read.
    """
    if certificate is None:
        return ssl.create_default_context()
    if is_fingerprint(certificate):
        return PinnedContext(normal_fingerprint(str(certificate)))
    text = pem_text(certificate)
    try:
        return ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        where = "certificate=" if text == certificate else f"the file {certificate}"
        raise ConfigurationError(
            f"the certificate to trust cannot be read ({error}). Is {where} the complete PEM text?"
        ) from error


def is_fingerprint(certificate: str | Path) -> bool:
    """Return whether a certificate was given by its fingerprint."""
    return isinstance(certificate, str) and certificate.strip().lower().startswith(FINGERPRINT_PREFIX)


def normal_fingerprint(text: str) -> str:
    """Return a fingerprint in lower case and without colons between its digits.

    Raises:
        ConfigurationError: it is none.
    """
    digits = text.strip().lower().removeprefix(FINGERPRINT_PREFIX).replace(":", "")
    if not _FINGERPRINT.fullmatch(FINGERPRINT_PREFIX + digits):
        raise ConfigurationError(
            f"{text!r} is not the fingerprint of a certificate: it has to be sha256: and 64 hexadecimal digits, as "
            "`skyproxy serve --tls` prints it."
        )
    return FINGERPRINT_PREFIX + digits


def pem_text(certificate: str | Path) -> str:
    """Return PEM text, reading it where a path was given.

    Raises:
        ConfigurationError: the file cannot be read, or holds no PEM text.
    """
    if isinstance(certificate, str) and _PEM_MARK in certificate:
        return certificate
    path = Path(certificate).expanduser()
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "it is not PEM text"
        raise ConfigurationError(
            f"the certificate {str(certificate)!r} cannot be read as a file: {reason}. Give the path of a PEM "
            "file, PEM text, or a fingerprint (sha256:...)."
        ) from error
    if _PEM_MARK not in text:
        raise ConfigurationError(f"the file {path} holds no certificate: PEM text has lines with -----BEGIN.")
    return text


def self_signed_certificate(common_name: str, clock_skew: datetime.timedelta) -> tuple[str, str]:
    """Make a private key and a certificate of it, both as PEM, for ten years; peers know it by its fingerprint.

    Args:
        common_name: what it is for; peers look at nothing in it.
        clock_skew: by how much a peer's clock may be behind.

    Raises:
        ImportError: the package cryptography is not installed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, key = datetime.datetime.now(datetime.UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - clock_skew)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private.decode("ascii"), certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")


def fingerprint_of(pem: str) -> str:
    """Return the fingerprint of the first certificate in a PEM text, as `openssl x509 -fingerprint -sha256` has it.

    Raises:
        ValueError: there is none.
    """
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    _, found, rest = pem.partition(begin)
    body, ended, _ = rest.partition(end)
    if not found or not ended:
        raise ValueError("no certificate in the PEM text")
    return _fingerprint(ssl.PEM_cert_to_DER_cert(f"{begin}{body}{end}\n"))


def _fingerprint(der: bytes) -> str:
    return FINGERPRINT_PREFIX + hashlib.sha256(der).hexdigest()


def _check(context: ssl.SSLContext, presented: bytes | None) -> None:
    assert isinstance(context, PinnedContext)
    found = _fingerprint(presented or b"")
    if found != context.fingerprint:
        raise WrongCertificateError(found, context.fingerprint)
