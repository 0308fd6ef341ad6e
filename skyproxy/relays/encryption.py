"""The certificate by which the next process knows this one: made by the process, never written to a disk."""

from __future__ import annotations

import datetime
import functools
import os
import ssl

from skyproxy.transport.trust import fingerprint_of, self_signed_certificate

_CLOCK_SKEW = datetime.timedelta(days=1)


@functools.cache
def own_certificate() -> tuple[ssl.SSLContext, str]:
    """The context for those who connect to us, and the fingerprint by which they know us; one for each process.

    Raises:
        ImportError: the package cryptography is not here.
        OSError: this system has no files in memory.
    """
    private, certificate = self_signed_certificate("skyproxy relay", _CLOCK_SKEW)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no files in memory")
    # OpenSSL reads keys from files only.
    descriptor = os.memfd_create("skyproxy-key", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, (private + certificate).encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context, fingerprint_of(certificate)
