"""Certificates that real TLS stacks accept, for the right names and nobody else."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest

from skyproxy_operator.certificates import KeyPair, is_pair, is_usable, issue

NOW = datetime.datetime.now(datetime.UTC)


def shake_hands(pair: KeyPair, authority: str, name: str, folder: Path) -> None:
    """A TLS handshake in memory.

    Raises:
        ssl.SSLError: the client does not accept the certificate.
    """
    (folder / "crt").write_text(pair.certificate)
    (folder / "key").write_text(pair.key)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "crt", folder / "key")
    client_context = ssl.create_default_context(cadata=authority)
    # Newer Pythons check this by themselves.
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    waiting = {client, server}
    for _ in range(10):
        for side in tuple(waiting):
            try:
                side.do_handshake()
                waiting.discard(side)
            except ssl.SSLWantReadError:
                pass
        if not waiting:
            return
    raise AssertionError("no end of the handshake")


@pytest.fixture(scope="module")
def pair() -> KeyPair:
    return issue("dev", "lab", NOW)


@pytest.mark.parametrize(
    "name",
    ["dev.lab.svc", "dev.lab.svc.cluster.local", "dev", "dev-3.dev-nodes.lab.svc", "localhost", "127.0.0.1"],
)
def test_the_worker_is_trusted_under_its_names(name: str, pair: KeyPair, tmp_path: Path) -> None:
    shake_hands(pair, pair.authority, name, tmp_path)


@pytest.mark.parametrize("name", ["other.lab.svc", "dev.other.svc", "lab.svc", "x.dev.lab.svc"])
def test_and_under_no_other(name: str, pair: KeyPair, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLError, match=r"(?i)mismatch"):
        shake_hands(pair, pair.authority, name, tmp_path)


def test_each_compute_has_an_authority_of_its_own(pair: KeyPair, tmp_path: Path) -> None:
    other = issue("dev", "lab", NOW)
    with pytest.raises(ssl.SSLError, match=r"(?i)verify failed"):
        shake_hands(pair, other.authority, "dev.lab.svc", tmp_path)


def test_the_certificate_itself_can_sign_nothing(pair: KeyPair, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLError):
        shake_hands(issue("dev", "lab", NOW), pair.certificate, "dev.lab.svc", tmp_path)


def test_keys_are_not_shown(pair: KeyPair) -> None:
    assert "PRIVATE" not in repr(pair)


def test_a_certificate_is_renewed_in_time(pair: KeyPair) -> None:
    assert is_usable(pair.certificate, "dev", "lab", NOW)
    assert not is_usable(pair.certificate, "other", "lab", NOW)
    assert not is_usable(pair.certificate, "dev", "lab", NOW + datetime.timedelta(days=1500))
    for broken in ("", "x", pair.certificate[:200], pair.authority):
        assert not is_usable(broken, "dev", "lab", NOW)


def test_a_pair_is_a_certificate_its_key_and_its_authority(pair: KeyPair) -> None:
    other = issue("dev", "lab", NOW)
    assert is_pair(pair.certificate, pair.key, pair.authority)
    # After a renewal the former authority follows.
    assert is_pair(pair.certificate, pair.key, pair.authority + other.authority)
    assert not is_pair(pair.certificate, other.key, pair.authority)
    assert not is_pair(pair.certificate, pair.key, other.authority)
    for broken in ("", "x", pair.certificate[:200]):
        assert not is_pair(broken, pair.key, pair.authority)
        assert not is_pair(pair.certificate, broken, pair.authority)
        assert not is_pair(pair.certificate, pair.key, broken)


def test_a_very_long_name_fits(tmp_path: Path) -> None:
    name, namespace = "d" * 50, "n" * 63
    long_pair = issue(name, namespace, NOW)
    shake_hands(long_pair, long_pair.authority, f"{name}.{namespace}.svc", tmp_path)
