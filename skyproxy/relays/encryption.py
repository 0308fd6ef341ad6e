"""The certificate by which the next process knows this one: made by the process, never written to a disk."""

from __future__ import annotations

import datetime
import functools
import os
import ssl

from skyproxy.transport.trust import fingerprint_of

_CLOCK_SKEW = datetime.timedelta(days=1)
_VALID = datetime.timedelta(days=3650)


@functools.cache
def own_certificate() -> tuple[ssl.SSLContext, str]:
    """The context for those who connect to us, and the fingerprint by which they know us; one for each process.

    Raises:
        ImportError: the package cryptography is not here.
        OSError: this system has no files in memory.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now, key = datetime.datetime.now(datetime.UTC), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "skyproxy relay")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory")
    # OpenSSL reads keys from files only.
    descriptor = os.memfd_create("skyproxy-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, private + pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, fingerprint_of(pem.decode("ascii"))
