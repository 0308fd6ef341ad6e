"""Brings a Compute's children to what they should be, its pods aside: those come and go by decisions."""

from __future__ import annotations

import base64
import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from skyproxy_operator import children
from skyproxy_operator.causes import Cause
from skyproxy_operator.certificates import first_certificate, is_usable, issue
from skyproxy_operator.cluster import ApiError, Cluster
from skyproxy_operator.names import COMPUTE_LABEL, ISSUER, server_name, tls_secret, token_secret
from skyproxy_operator.options import Options
from skyproxy_operator.probing import Access
from skyproxy_operator.worker_spec import WorkerSpec

Object = dict[str, Any]

_GATEWAY_GROUP = "gateway.networking.k8s.io"
_GATEWAY_VERSIONS = {"HTTPRoute": ("v1",), "BackendTLSPolicy": ("v1", "v1alpha3")}
"""The kinds that a way in is made of, and their versions of the form that we write."""
_KINDS_SECONDS = 300.0


@dataclass
class Family:
    """How the children of a Compute are.

    Attributes:
        access: how its workers are asked; None as long as there is no token or no certificate.
        blocking: why no pod can be made yet; None when all is there that a pod needs.
        refusals: what the API server refused, or a person has to see to.
        former_token: the one before the token, after a rotation.
    """

    access: Access | None = None
    blocking: Cause | None = None
    refusals: list[Cause] = field(default_factory=list)
    former_token: str = field(default="", repr=False)


class FamilyKeeper:
    """Applies children, and remembers which ones it need not look at again for a while."""

    def __init__(self, cluster: Cluster, options: Options) -> None:
        self._cluster = cluster
        self._options = options
        self._known: dict[str, tuple[str, float, Family]] = {}
        self._kinds: dict[str, str] = {}
        self._kinds_until = 0.0

    def forget(self, uid: str) -> None:
        """The Compute is gone, or something happened to its children."""
        self._known.pop(uid, None)

    async def bring_up(self, compute: Object, spec: WorkerSpec, now: datetime.datetime) -> Family:
        """Applies everything that is not as it should be.

        Raises:
            ApiError: the API server does not answer, so that nothing can be said.
        """
        uid = compute["metadata"]["uid"]
        wanted = _fingerprint(compute)
        known = self._known.get(uid)
        if known is not None and known[0] == wanted and time.monotonic() < known[1]:
            return known[2]
        family = Family()
        token = await self._token(compute, family)
        pair = await self._certificate(compute, spec, family, now)
        wanted_objects = [children.service(compute, spec), children.network_policy(compute, spec, self._options)]
        if spec.nodes > 1:
            wanted_objects.append(children.headless_service(compute, spec))
        for item in wanted_objects:
            await self._apply(compute, item, family, blocks=item["kind"] == "Service")
        await self._claims(compute, spec, family)
        if spec.gateway is None:
            await self._close_gateway(compute)
        elif pair is not None:
            await self._gateway(compute, spec, pair.get("ca.crt", ""), family)
        if token is not None and pair is not None:
            metadata = compute["metadata"]
            name = server_name(metadata["name"], metadata["namespace"])
            family.access = Access(token, pair.get("ca.crt", ""), name, family.former_token)
        if family.blocking is None and not family.refusals:
            self._known[uid] = (wanted, time.monotonic() + self._options.resync_seconds, family)
        else:
            self.forget(uid)
        return family

    # --- secrets -----------------------------------------------------------------------------------------------------

    async def _token(self, compute: Object, family: Family) -> str | None:
        name, namespace = token_secret(compute["metadata"]["name"]), compute["metadata"]["namespace"]
        secret = await self._cluster.read("v1", "Secret", namespace, name)
        if secret is None:
            secret = children.new_token(compute)
            if not await self._create(secret, family):
                return None
        # A Secret without an owner is one that somebody made before: the token is theirs to choose.
        if _is_other_compute(compute, secret):
            family.blocking = _leftover(f"Secret {name}")
            return None
        data = _decoded(secret)
        token, family.former_token = data.get("token", "").strip(), data.get("former", "").strip()
        if not token:
            family.blocking = Cause("TokenMissing", f"Secret {name} has no key 'token'. Delete it for a new one.", True)
            return None
        return token

    async def _certificate(
        self, compute: Object, spec: WorkerSpec, family: Family, now: datetime.datetime
    ) -> Mapping[str, str] | None:
        metadata = compute["metadata"]
        name, namespace = tls_secret(metadata["name"]), metadata["namespace"]
        issuer = (metadata.get("annotations") or {}).get(ISSUER)
        secret = await self._cluster.read("v1", "Secret", namespace, name)
        if secret is not None and _is_other_compute(compute, secret):
            family.blocking = _leftover(f"Secret {name}")
            return None
        if issuer:
            try:
                await self._apply(compute, children.certificate_request(compute, issuer), family, blocks=True)
            except ValueError as exc:
                family.blocking = Cause("InvalidIssuer", f"The annotation {ISSUER}: {exc}.", actionable=True)
                return None
            if secret is None:
                waits = Cause("IssuingCertificate", f"cert-manager has not made {name} yet.")
                family.blocking = family.blocking or waits
                return None
            return _decoded(secret)
        data = _decoded(secret) if secret is not None else {}
        ours = secret is None or _is_owned(compute, secret)
        if ours and not is_usable(data.get("tls.crt", ""), metadata["name"], namespace, now):
            pair = issue(metadata["name"], namespace, now)
            if data.get("ca.crt"):
                # Until the kubelet has brought the new certificate to the worker, it shows the one before.
                pair = replace(pair, authority=pair.authority + first_certificate(data["ca.crt"]))
            fresh = children.certificate_secret(compute, pair)
            if secret is None and not await self._create(fresh, family):
                return None
            if secret is not None:
                await self._apply(compute, fresh, family, blocks=True, existing=secret)
            data = _decoded(fresh)
        return data

    async def _create(self, wanted: Object, family: Family) -> bool:
        try:
            if await self._cluster.create(wanted):
                return True
            # Somebody else made it a moment ago; the next look finds it.
            family.blocking = Cause("CreatingChildren", f"{wanted['kind']} {wanted['metadata']['name']} is being made.")
        except ApiError as exc:
            _note(family, exc, blocks=True)
        return False

    # --- others ------------------------------------------------------------------------------------------------------

    async def _apply(
        self, compute: Object, wanted: Object, family: Family, *, blocks: bool = False, existing: Object | None = None
    ) -> None:
        metadata = wanted["metadata"]
        try:
            if existing is None:
                existing = await self._cluster.read(
                    wanted["apiVersion"], wanted["kind"], metadata["namespace"], metadata["name"]
                )
            if existing is not None and _is_other_compute(compute, existing):
                family.blocking = _leftover(f"{wanted['kind']} {metadata['name']}")
            elif existing is not None and not _is_ours(compute, existing):
                text = (
                    f"There is a {wanted['kind']} {metadata['name']} that is not ours. Delete it, or use another name."
                )
                cause = Cause("NameTaken", text, actionable=True)
                family.refusals.append(cause)
                if blocks:
                    family.blocking = cause
            else:
                await self._cluster.apply(wanted)
        except ApiError as exc:
            _note(family, exc, blocks=blocks)

    async def _claims(self, compute: Object, spec: WorkerSpec, family: Family) -> None:
        namespace = compute["metadata"]["namespace"]
        for volume in spec.volumes:
            wanted = children.claim(compute, volume, None)
            existing = await self._cluster.read("v1", wanted["kind"], namespace, wanted["metadata"]["name"])
            if existing is not None:
                wanted = children.claim(compute, volume, existing)
                if volume.access_mode not in wanted["spec"]["accessModes"]:
                    modes = ", ".join(wanted["spec"]["accessModes"])
                    text = f"Volume {volume.name} is {modes}, and cannot become {volume.access_mode}. Use another name."
                    family.refusals.append(Cause("VolumeImmutable", text, actionable=True))
            # Blocks only as long as there is no claim at all: one that cannot grow still works.
            await self._apply(compute, wanted, family, blocks=existing is None, existing=existing)

    async def _gateway(self, compute: Object, spec: WorkerSpec, authority: str, family: Family) -> None:
        host = children.gateway_host(compute, spec, self._options)
        parent = children.gateway_parent(spec, self._options)
        if children.is_foreign_host(compute, spec, self._options):
            own = f"{compute['metadata']['namespace']}.{self._options.gateway_domain}"
            text = f"spec.gateway.hostname belongs to another namespace. Use a name in {own}, or none."
            family.refusals.append(Cause("HostnameNotOwn", text, actionable=True))
            return
        if host is None or parent is None:
            lacking = "hostname" if host is None else "parentRef"
            text = f"spec.gateway.{lacking} is missing, and this installation has no default for it."
            family.refusals.append(Cause("GatewayIncomplete", text, actionable=True))
            return
        kinds = await self._gateway_kinds()
        lacking = next((kind for kind, good in _GATEWAY_VERSIONS.items() if kinds.get(kind) not in good), "")
        if lacking:
            text = (
                f"The cluster does not know {lacking} of {_GATEWAY_GROUP} ({' or '.join(_GATEWAY_VERSIONS[lacking])}), "
                "so there is no way in by a gateway. `skyproxy connect` works without one."
            )
            family.refusals.append(Cause("GatewayUnavailable", text, actionable=True))
            return
        await self._apply(compute, children.ca_bundle(compute, authority), family)
        await self._apply(compute, children.backend_policy(compute, kinds["BackendTLSPolicy"]), family)
        await self._apply(compute, children.route(compute, spec, host, parent), family)

    async def _close_gateway(self, compute: Object) -> None:
        """Takes away a way in that is not wanted any more. What else it was made of leads nowhere by itself."""
        if "HTTPRoute" not in await self._gateway_kinds():
            return
        name, namespace = compute["metadata"]["name"], compute["metadata"]["namespace"]
        existing = await self._cluster.read(children.ROUTE_API, "HTTPRoute", namespace, name)
        if existing is not None and _is_owned(compute, existing):
            await self._cluster.delete(existing)

    async def _gateway_kinds(self) -> Mapping[str, str]:
        if time.monotonic() >= self._kinds_until:
            self._kinds = await self._cluster.served_kinds(_GATEWAY_GROUP)
            self._kinds_until = time.monotonic() + _KINDS_SECONDS
        return self._kinds


def _note(family: Family, error: ApiError, *, blocks: bool) -> None:
    if error.status == 0 or error.status >= 500 or error.status == 429:
        raise error
    cause = error.cause
    family.refusals.append(cause)
    if blocks:
        family.blocking = cause


def _leftover(what: str) -> Cause:
    return Cause("CleaningUp", f"{what} of an earlier Compute of this name has to go first.")


def _owners(item: Object) -> list[Object]:
    owners: list[Object] = item["metadata"].get("ownerReferences") or []
    return owners


def _is_owned(compute: Object, item: Object) -> bool:
    return any(owner["uid"] == compute["metadata"]["uid"] for owner in _owners(item))


def _is_other_compute(compute: Object, item: Object) -> bool:
    """Whether an object belongs to a Compute that had the same name and is gone."""
    kinds = {owner["kind"] for owner in _owners(item)}
    return "Compute" in kinds and not _is_owned(compute, item)


def _is_ours(compute: Object, item: Object) -> bool:
    """Whether we made an object: for this Compute, or as a claim that outlives it."""
    labelled = (item["metadata"].get("labels") or {}).get(COMPUTE_LABEL) == compute["metadata"]["name"]
    return _is_owned(compute, item) or (labelled and not _owners(item))


def _decoded(secret: Object) -> dict[str, str]:
    data = secret.get("data") or {}
    return {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in data.items()}


def _fingerprint(compute: Object) -> str:
    """Names everything that children are made of, the operator's options aside."""
    issuer = (compute["metadata"].get("annotations") or {}).get(ISSUER, "")
    return f"{compute['metadata'].get('generation')}/{issuer}"
