"""Whom a connection trusts: a PEM file, PEM text or one pinned certificate; and what links to workers say."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from skyproxy.errors import ConfigurationError, ConnectError
from skyproxy.protocol.messages import Hello
from skyproxy.protocol.versions import SUPPORTED
from skyproxy.transport.links import is_link, link_to, read_link
from skyproxy.transport.trust import PinnedContext, client_context, fingerprint_of, normal_fingerprint, pem_text
from skyproxy.transport.websocket import connect_websocket
from skyproxy.transport.worker_report import ask_worker

OTHER = "sha256:" + "0" * 64
HELLO = Hello(list(SUPPORTED), "operations", "", {})


class Identity:
    """A certificate for another name than the one that clients use, and the authority that issued it."""

    def __init__(self) -> None:
        authority = trustme.CA()
        self.issued = authority.issue_cert("elsewhere.example")
        self.pem = self.issued.cert_chain_pems[0].bytes().decode()
        self.authority = authority.cert_pem.bytes().decode()
        self.fingerprint = fingerprint_of(self.pem)


class Peer:
    """A TLS server for one connection; it keeps what the client sends after the handshake."""

    def __init__(self, identity: Identity) -> None:
        self.fingerprint = identity.fingerprint
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        identity.issued.configure_cert(self._context)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"wss://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(30)
        try:
            with self._context.wrap_socket(connection, server_side=True) as secured:
                while data := secured.recv(4096):
                    self.received.append(data)
        except OSError:
            pass
        finally:
            connection.close()

    def all_received(self) -> bytes:
        """What came until the client went."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return b"".join(self.received)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture(scope="module")
def identity() -> Identity:
    return Identity()


@pytest.fixture
def peer(identity: Identity) -> Iterator[Peer]:
    """For tests that connect: the server waits for a client."""
    made = Peer(identity)
    yield made
    made.all_received()
    made.close()


def test_a_wrong_certificate_is_an_error_with_both_fingerprints_before_anything_is_sent(peer: Peer) -> None:
    with pytest.raises(ConnectError, match=f"{peer.fingerprint}.*{OTHER} was pinned"):
        connect_websocket(peer.url, "t0ken", HELLO, ssl_context=client_context(OTHER))
    assert peer.all_received() == b""


def test_asking_a_worker_with_a_wrong_certificate_sends_nothing(peer: Peer) -> None:
    with pytest.raises(ConnectError, match=f"{peer.fingerprint}.*{OTHER} was pinned"):
        ask_worker(peer.url, "t0ken", certificate=OTHER)
    assert peer.all_received() == b""


def test_the_pinned_certificate_needs_no_name_and_no_authority(peer: Peer) -> None:
    with socket.create_connection(("127.0.0.1", int(peer.url.rpartition(":")[2])), 30) as plain:
        with client_context(peer.fingerprint).wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            secured.sendall(b"hello")
    assert peer.all_received() == b"hello"


def test_the_fingerprint_is_that_of_openssl(identity: Identity, tmp_path: Path) -> None:
    path = tmp_path / "certificate.pem"
    path.write_text(identity.pem)
    command = ["openssl", "x509", "-in", str(path), "-noout", "-fingerprint", "-sha256"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    shown = told.strip().partition("=")[2]
    assert normal_fingerprint("sha256:" + shown) == identity.fingerprint
    assert (
        fingerprint_of("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n" + identity.pem)
        == identity.fingerprint
    )


def test_pem_text_a_file_and_a_path_mean_the_same(identity: Identity, tmp_path: Path) -> None:
    path = tmp_path / "authority.pem"
    path.write_text(identity.authority)
    for given in (identity.authority, str(path), path):
        assert pem_text(given) == identity.authority
        context = client_context(given)
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert len(context.get_ca_certs()) == 1


def test_without_a_certificate_the_authorities_of_the_system_count() -> None:
    context = client_context()
    assert not isinstance(context, PinnedContext)
    assert context.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    "given", ["no-such-file.pem", "sha256:12", "sha256:" + "g" * 64, "-----BEGIN CERTIFICATE-----", "", "/"]
)
def test_what_is_no_certificate_is_an_error_of_the_configuration(given: str) -> None:
    with pytest.raises(ConfigurationError):
        client_context(given)


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    with pytest.raises(ConfigurationError, match=r"notes\.txt holds no certificate"):
        client_context(path)


@pytest.mark.parametrize(("host", "url"), [("gpu-box", "wss://gpu-box:9"), ("fd00::1", "wss://[fd00::1]:9")])
def test_a_link_says_where_and_with_which_certificate(host: str, url: str) -> None:
    link = link_to(host, 9, OTHER)
    assert is_link(link)
    assert read_link(link) == (url, OTHER)


def test_a_link_without_a_port_means_the_usual_one() -> None:
    assert read_link(f"sky://gpu-box#{OTHER}")[0] == "wss://gpu-box:8765"


@pytest.mark.parametrize(
    "text",
    [
        "sky://gpu-box:9",
        "sky://gpu-box:9#sha256:12",
        f"sky://#{OTHER}",
        f"sky://me:secret@gpu-box#{OTHER}",
        f"sky://gpu-box:port#{OTHER}",
        f"sky://gpu-box/path#{OTHER}",
        f"wss://gpu-box:9#{OTHER}",
        f"sky://gpu-box:9#{OTHER}:secret",
        f"sky://gpu-box:9#{OTHER}secret",
    ],
)
def test_what_is_no_link_is_refused_without_showing_a_secret(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_link(text)
    assert "secret" not in str(caught.value)
