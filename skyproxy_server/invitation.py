"""The text that a worker prints for those who are to connect to it from another machine."""

from __future__ import annotations

import sys
from pathlib import Path

from skyproxy.errors import ConfigurationError
from skyproxy.transport.links import link_to
from skyproxy.transport.trust import fingerprint_of


def invite(host: str, port: int, certificate: Path | None, token_file: Path | None) -> None:
    """Print the command that connects to this worker, and where its token is; the token itself on a terminal only.

    Args:
        host: this machine, as clients reach it.
        port: where the worker listens.
        certificate: the file with its certificate.
        token_file: the file with its token, or the folder with several; None where it came from the environment.

    Raises:
        ConfigurationError: there is no certificate.
    """
    try:
        fingerprint = fingerprint_of(certificate.read_text(encoding="ascii") if certificate else "")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--invite tells clients of a certificate, which --tls-cert has to name: {error}"
        ) from None
    where = str(token_file) if token_file is not None else "SKYPROXY_TOKEN"
    # Output that is not a terminal is a log, which others may read.
    if token_file is not None and token_file.is_file() and sys.stderr.isatty():
        where = token_file.read_text(encoding="ascii").split("\n", 1)[0].strip()
    command = f"skyproxy connect {link_to(host, port, fingerprint)}"
    print(f"\nOn the other machine:\n\n  {command}\n\nIt asks for the token: {where}\n", file=sys.stderr, flush=True)
