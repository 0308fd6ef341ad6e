"""Certificates and kubeconfigs of one control plane: an authority of its own, a user a component."""

from __future__ import annotations

import json
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa


class Authority:
    """A certificate authority in a directory. Files are readable by their owner only.

    Attributes:
        certificate: the authority's own certificate (PEM).
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA()
        self.certificate = directory / "ca.crt"
        self._ca.cert_pem.write_to_path(str(self.certificate))

    def issue(
        self, name: str, *identities: str, user: str | None = None, group: str | None = None
    ) -> tuple[Path, Path]:
        """Makes a certificate and its key.

        Args:
            name: of the two files.
            identities: host names and addresses, for a server.
            user: what Kubernetes takes for the user's name.
            group: what it takes for the user's group.

        Returns:
            The certificate's file and the key's.
        """
        # Never without any: trustme would write an empty list and mark it critical, which Go's TLS does not accept.
        names = identities or (f"{name}.invalid",)
        leaf = self._ca.issue_cert(*names, common_name=user or name, organization_name=group)
        certificate, key = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        for blob in leaf.cert_chain_pems:
            blob.write_to_path(str(certificate), append=blob is not leaf.cert_chain_pems[0])
        leaf.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
        return certificate, key

    def signing_key(self, name: str) -> Path:
        """Makes a key for service-account tokens."""
        path = self._directory / f"{name}.key"
        path.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )
        path.chmod(0o600)
        return path


def write_kubeconfig(
    path: Path, server: str, authority: Path, user: dict[str, str], namespace: str = "default"
) -> Path:
    """Writes a kubeconfig with one context.

    Args:
        path: the file; readable by its owner only.
        server: the API server's URL.
        authority: the certificate to trust.
        user: its credentials, in the words of a kubeconfig.
    """
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "e2e", "user": user}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e", "namespace": "default"}}],
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path
