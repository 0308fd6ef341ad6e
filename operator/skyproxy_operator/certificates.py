"""Each Compute's own certificate, and the authority that signed it and nothing else.

The authority's key is forgotten as soon as it has signed: whoever trusts the authority trusts this one certificate, and
nobody can make another.
"""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skyproxy_operator.names import nodes_service, server_name

_VALID_DAYS = 1825
_RENEW_DAYS = 365
_CLOCK_SKEW = datetime.timedelta(hours=1)
_MAX_COMMON_NAME = 64
_PEM_BEGIN, _PEM_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


@dataclass(frozen=True)
class KeyPair:
    """A certificate with its key and the authority, all PEM."""

    certificate: str
    key: str = field(repr=False)
    authority: str


def alternative_names(compute: str, namespace: str) -> list[str]:
    """The names under which a worker is reached."""
    service = server_name(compute, namespace)
    return [
        service,
        f"{service}.cluster.local",
        f"{compute}.{namespace}",
        compute,
        f"*.{nodes_service(compute)}.{namespace}.svc",
        f"*.{nodes_service(compute)}.{namespace}.svc.cluster.local",
        "localhost",
    ]


def issue(compute: str, namespace: str, now: datetime.datetime) -> KeyPair:
    """A new certificate for the workers of a Compute.

    Args:
        compute: its name.
        namespace: its namespace.
        now: the time, with a zone.
    """
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"skyproxy {compute}.{namespace}")
    begin, end = now - _CLOCK_SKEW, now + datetime.timedelta(days=_VALID_DAYS)
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    names = [x509.DNSName(item) for item in alternative_names(compute, namespace)]
    local = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
    certificate = (
        _builder(_name(compute), authority_name, key.public_key(), begin, end)
        .add_extension(x509.SubjectAlternativeName([*names, local]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return KeyPair(
        certificate=certificate.public_bytes(serialization.Encoding.PEM).decode(),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
        authority=authority.public_bytes(serialization.Encoding.PEM).decode(),
    )


def is_usable(certificate: str, compute: str, namespace: str, now: datetime.datetime) -> bool:
    """Return whether a certificate (PEM) vouches for the workers of a Compute and will do so for a while."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate.encode())
        extension = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound):
        return False
    names = extension.value.get_values_for_type(x509.DNSName)
    lasts = parsed.not_valid_after_utc - now >= datetime.timedelta(days=_RENEW_DAYS)
    return lasts and server_name(compute, namespace) in names


def is_pair(certificate: str, key: str, authority: str) -> bool:
    """Return whether a certificate, a key and the first of some authorities (all PEM) belong together."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate.encode())
        private = serialization.load_pem_private_key(key.encode(), None)
        parsed.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.encode()))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return bool(private.public_key() == parsed.public_key())


def first_certificate(text: str) -> str:
    """The first certificate of a PEM text; nothing where there is none."""
    begin, end = text.find(_PEM_BEGIN), text.find(_PEM_END)
    return text[begin : end + len(_PEM_END)] + "\n" if 0 <= begin < end else ""


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
