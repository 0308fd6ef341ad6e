"""Brings a Compute's children to what they should be, its pods aside: those come and go by decisions."""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import json
import time
import zlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from skyproxy_operator import children
from skyproxy_operator.causes import Cause
from skyproxy_operator.certificates import first_certificate, is_pair, is_usable, issue
from skyproxy_operator.cluster import ApiError, ClusterConnection
from skyproxy_operator.cluster_view import ClusterView
from skyproxy_operator.compute_spec import ComputeSpec
from skyproxy_operator.device_claims import CLAIM_TEMPLATE, CLAIM_VERSIONS, DEVICE_GROUP, claims_unavailable
from skyproxy_operator.disruption import BUDGET, POLICY_GROUP, is_protected
from skyproxy_operator.gangs import gang_of, is_served
from skyproxy_operator.gangs import unavailable as gang_unavailable
from skyproxy_operator.names import APPLIED, ISSUER, server_name, tls_secret, token_secret
from skyproxy_operator.options import Options
from skyproxy_operator.ownership import (
    foreign,
    is_other_compute,
    is_ours,
    is_owned,
    issuer_of,
    leftover,
    may_use,
    name_taken,
)
from skyproxy_operator.probing import ProbeCredentials
from skyproxy_operator.queueing import KUEUE_GROUP, WORKLOAD, unavailable

Object = dict[str, Any]

_GATEWAY_GROUP = "gateway.networking.k8s.io"
_GATEWAY_VERSIONS = {"HTTPRoute": ("v1",), "BackendTLSPolicy": ("v1", "v1alpha3")}
"""The kinds that a way in is made of, and their versions of the form that we write."""
_KINDS_SECONDS = 300.0


@dataclass
class _Read:
    """Children that are not watched, as they were read; they are read anew now and then, and with another spec.

    Attributes:
        fingerprint: of the Compute.
        until: when it is read anew, in the time of `time.monotonic`.
        found: the objects by kind and name, without private keys.
        has_no_way_in: it was seen that no route is left.
        has_no_budget: it was seen that there is no PodDisruptionBudget.
    """

    fingerprint: str
    until: float
    found: dict[tuple[str, str], Object] = field(default_factory=dict, repr=False)
    has_no_way_in: bool = False
    has_no_budget: bool = False


@dataclass
class ChildStatus:
    """The state of a Compute's children.

    Attributes:
        access: how its workers are asked; None as long as there is no token or no certificate.
        blocking: why no pod can be made yet; None when all is there that a pod needs.
        refusals: what the API server refused, or a person has to see to.
        former_token: the one before the token, after a rotation.
    """

    access: ProbeCredentials | None = None
    blocking: Cause | None = None
    refusals: list[Cause] = field(default_factory=list)
    former_token: str = field(default="", repr=False)


class ChildReconciler:
    """Applies children, and remembers which ones it need not look at again for a while."""

    def __init__(self, cluster: ClusterConnection, view: ClusterView, options: Options) -> None:
        self._cluster = cluster
        self._view = view
        self._options = options
        self._known: dict[str, tuple[str, float, ChildStatus]] = {}
        self._read: dict[str, _Read] = {}
        self._kinds: dict[str, tuple[float, Mapping[str, str]]] = {}

    def recheck(self, uid: str) -> None:
        """Look again at the children of a Compute that are watched: something happened to one."""
        self._known.pop(uid, None)

    def forget(self, uid: str) -> None:
        """Ask again for everything: the Compute is gone, or what was read is not true any more."""
        self._known.pop(uid, None)
        self._read.pop(uid, None)

    def has_read(self, uid: str) -> bool:
        """Tell whether a Compute's Secrets were read before: they may have been replaced since."""
        return any(kind == "Secret" for kind, _ in self._read[uid].found) if uid in self._read else False

    def reread_secrets(self, uid: str) -> None:
        """Read a Compute's Secrets at the next look."""
        self.recheck(uid)
        if uid in self._read:
            found = self._read[uid].found
            self._read[uid].found = {place: item for place, item in found.items() if place[0] != "Secret"}

    async def reconcile(self, compute: Object, spec: ComputeSpec, now: datetime.datetime) -> ChildStatus:
        """Applies everything that is not as it should be.

        Raises:
            ApiError: the API server does not answer, so that nothing can be said.
        """
        uid = compute["metadata"]["uid"]
        wanted = _fingerprint(compute)
        known, protected = self._known.get(uid), is_protected(compute.get("status") or {}, self._options)
        mark = f"{wanted}/{protected}"
        if known is not None and known[0] == mark and time.monotonic() < known[1]:
            return known[2]
        self._open(uid, wanted)
        objects = [children.service(compute, spec), children.network_policy(compute, spec, self._options)]
        if spec.nodes > 1:
            objects.append(children.headless_service(compute, spec))
        # Side by side: somebody waits for the first look, and none of these needs another.
        parts = [ChildStatus() for _ in range(2 + len(objects))]
        # Where the installation limits whom workers reach, no worker runs without that limit.
        needed = ("Service", "NetworkPolicy") if children.is_limited(self._options) else ("Service",)
        applied = (
            self._apply(compute, item, part, blocks=item["kind"] in needed)
            for item, part in zip(objects, parts[2:], strict=True)
        )
        token, pair, *_ = await _all_of(
            self._token(compute, parts[0]), self._certificate(compute, spec, parts[1], now), *applied
        )
        status = _put_together(parts)
        await self._claims(compute, spec, status)
        await self._budget(compute, spec, status, protected=protected)
        await self._gang(compute, spec, status)
        await self._device_claims(compute, spec, status)
        if spec.queue is not None and WORKLOAD not in await self.served_kinds(KUEUE_GROUP):
            status.blocking = unavailable(spec.queue)
        if spec.gateway is None:
            await self._close_gateway(compute)
        elif pair is not None:
            await self._gateway(compute, spec, pair.get("ca.crt", ""), status)
        if token is not None and pair is not None:
            metadata = compute["metadata"]
            name = server_name(metadata["name"], metadata["namespace"])
            status.access = ProbeCredentials(
                token, pair.get("ca.crt", ""), name, status.former_token, metadata["namespace"]
            )
        if status.blocking is None and not status.refusals:
            self._known[uid] = (mark, time.monotonic() + self._options.resync_seconds, status)
        else:
            self.forget(uid) if status.blocking else self.recheck(uid)
        return status

    # --- what is there -----------------------------------------------------------------------------------------------

    def _open(self, uid: str, fingerprint: str) -> None:
        read = self._read.get(uid)
        if read is None or read.fingerprint != fingerprint or time.monotonic() >= read.until:
            # Not for all Computes at the same time: those of one start would be read again together for ever.
            spread = 0.5 + 0.5 * zlib.crc32(uid.encode()) / (1 << 32)
            self._read[uid] = _Read(fingerprint, time.monotonic() + spread * self._options.secrets_seconds)

    async def _find_existing(self, compute: Object, api_version: str, kind: str, name: str) -> Object | None:
        """A child as it is; None where there is none."""
        namespace, watched = compute["metadata"]["namespace"], self._view.watches(kind)
        if watched:
            found = self._view.child(kind, namespace, name)
        else:
            found = self._read[compute["metadata"]["uid"]].found.get((kind, name))
        if found is not None:
            return found
        if kind == "Secret" and not compute.get("status") and not issuer_of(compute):
            # A new Compute: it is made at once, and read where that fails.
            return None
        # A child without our label is not seen by the watch.
        found = await self._cluster.read(api_version, kind, namespace, name)
        if found is not None and not watched:
            self._keep(compute, found)
        return found

    def _keep(self, compute: Object, item: Object) -> None:
        if self._view.watches(item["kind"]):
            return
        if "tls.key" in (item.get("data") or {}):
            item = {**item, "data": {key: value for key, value in item["data"].items() if key != "tls.key"}}
        self._read[compute["metadata"]["uid"]].found[item["kind"], item["metadata"]["name"]] = item

    # --- secrets -----------------------------------------------------------------------------------------------------

    async def _token(self, compute: Object, status: ChildStatus) -> str | None:
        name = token_secret(compute["metadata"]["name"])
        secret = await self._find_existing(compute, "v1", "Secret", name)
        if secret is None:
            secret = children.new_token(compute)
            if not await self._create(compute, secret, status):
                return None
        # A Secret without an owner is one that somebody made before: the token is theirs to choose.
        if is_other_compute(compute, secret):
            status.blocking = leftover(f"Secret {name}")
            return None
        if not may_use(compute, secret, self._options):
            status.blocking = foreign(compute, name)
            return None
        data = _decode(secret)
        token, status.former_token = data.get("token", "").strip(), data.get("former", "").strip()
        if not token:
            status.blocking = Cause("TokenMissing", f"Secret {name} has no key 'token'. Delete it for a new one.", True)
            return None
        return token

    async def _certificate(
        self, compute: Object, spec: ComputeSpec, status: ChildStatus, now: datetime.datetime
    ) -> Mapping[str, str] | None:
        metadata = compute["metadata"]
        name, namespace = tls_secret(metadata["name"]), metadata["namespace"]
        issuer = issuer_of(compute)
        # The key is not kept.
        has_key = ("Secret", name) not in self._read[metadata["uid"]].found
        secret = await self._find_existing(compute, "v1", "Secret", name)
        if secret is not None and is_other_compute(compute, secret):
            status.blocking = leftover(f"Secret {name}")
            return None
        if secret is not None and not may_use(compute, secret, self._options):
            status.blocking = foreign(compute, name)
            return None
        if issuer:
            try:
                await self._apply(compute, children.certificate_request(compute, issuer), status, blocks=True)
            except ValueError as exc:
                status.blocking = Cause("InvalidIssuer", f"The annotation {ISSUER}: {exc}.", actionable=True)
                return None
            if secret is None:
                waits = Cause("IssuingCertificate", f"cert-manager has not made {name} yet.")
                status.blocking = status.blocking or waits
                return None
            return _decode(secret)
        data = _decode(secret) if secret is not None else {}
        ours = secret is None or is_owned(compute, secret)
        fits = is_usable(data.get("tls.crt", ""), metadata["name"], namespace, now)
        if has_key:
            fits = fits and is_pair(data.get("tls.crt", ""), data.get("tls.key", ""), data.get("ca.crt", ""))
        if ours and not fits:
            pair = issue(metadata["name"], namespace, now)
            if data.get("ca.crt"):
                # Until the kubelet has brought the new certificate to the worker, it shows the one before.
                pair = replace(pair, authority=pair.authority + first_certificate(data["ca.crt"]))
            fresh = children.certificate_secret(compute, pair)
            if secret is None and not await self._create(compute, fresh, status):
                return None
            if secret is not None:
                await self._apply(compute, fresh, status, blocks=True, existing=secret)
            data = _decode(fresh)
        return data

    async def _create(self, compute: Object, wanted: Object, status: ChildStatus) -> bool:
        try:
            if await self._cluster.create(wanted):
                self._keep(compute, wanted)
                return True
            # Somebody else made it a moment ago; the next look finds it.
            status.blocking = Cause(
                "CreatingChildren", f"{wanted['kind']} {wanted['metadata']['name']} is being created."
            )
        except ApiError as exc:
            _note(status, exc, blocks=True)
        return False

    # --- others ------------------------------------------------------------------------------------------------------

    async def _apply(
        self,
        compute: Object,
        wanted: Object,
        status: ChildStatus,
        *,
        blocks: bool = False,
        existing: Object | None = None,
    ) -> None:
        metadata = wanted["metadata"]
        try:
            if existing is None:
                existing = await self._find_existing(compute, wanted["apiVersion"], wanted["kind"], metadata["name"])
            if existing is not None and is_other_compute(compute, existing):
                status.blocking = leftover(f"{wanted['kind']} {metadata['name']}")
            elif existing is not None and not is_ours(compute, existing):
                cause = name_taken(f"{wanted['kind']} {metadata['name']}")
                status.refusals.append(cause)
                if blocks:
                    status.blocking = cause
            else:
                wanted = _mark(wanted)
                if existing is None or not _is_as_applied(existing, wanted):
                    self._keep(compute, await self._cluster.apply(wanted))
        except ApiError as exc:
            _note(status, exc, blocks=blocks)

    async def _claims(self, compute: Object, spec: ComputeSpec, status: ChildStatus) -> None:
        for volume in spec.volumes:
            wanted = children.claim(compute, volume, None)
            existing = await self._find_existing(compute, "v1", wanted["kind"], wanted["metadata"]["name"])
            if existing is not None:
                wanted = children.claim(compute, volume, existing)
                if volume.access_mode not in wanted["spec"]["accessModes"]:
                    modes = ", ".join(wanted["spec"]["accessModes"])
                    text = f"Volume {volume.name} is {modes}, and cannot become {volume.access_mode}. Use another name."
                    status.refusals.append(Cause("VolumeImmutable", text, actionable=True))
            # A claim of ours that cannot grow still works; there may be no claim, or one of somebody else's data.
            blocks = existing is None or not is_ours(compute, existing)
            await self._apply(compute, wanted, status, blocks=blocks, existing=existing)

    async def _budget(self, compute: Object, spec: ComputeSpec, status: ChildStatus, *, protected: bool) -> None:
        """Makes the PodDisruptionBudget when it is needed for the first time; later it allows what it has to."""
        read = self._read[compute["metadata"]["uid"]]
        if not protected and (read.has_no_budget or "inUse" not in (compute.get("status") or {})):
            return
        version = (await self.served_kinds(POLICY_GROUP)).get(BUDGET)
        if version is None:
            return
        wanted = children.disruption_budget(compute, spec, version, protected=protected)
        existing = await self._find_existing(compute, wanted["apiVersion"], BUDGET, wanted["metadata"]["name"])
        read.has_no_budget = not protected and existing is None
        if not read.has_no_budget:
            await self._apply(compute, wanted, status, existing=existing)

    async def _gang(self, compute: Object, spec: ComputeSpec, status: ChildStatus) -> None:
        """Makes the PodGroup before the pods that name it."""
        gang = gang_of(spec)
        if gang is None:
            return
        if not is_served(gang, await self.served_kinds(gang.group)):
            status.blocking = gang_unavailable(spec, gang)
            return
        await self._apply(compute, children.pod_group(compute, spec, gang.api_version), status, blocks=True)

    async def _device_claims(self, compute: Object, spec: ComputeSpec, status: ChildStatus) -> None:
        """Makes the templates of claims before the pods that name them."""
        if not spec.claims:
            return
        kinds = await self.served_kinds(DEVICE_GROUP)
        version = kinds.get(CLAIM_TEMPLATE, "")
        if version not in CLAIM_VERSIONS:
            status.blocking = claims_unavailable(kinds)
            return
        for claim in spec.claims:
            if claim.device_class is not None:
                await self._apply(compute, children.claim_template(compute, claim, version), status, blocks=True)

    async def _gateway(self, compute: Object, spec: ComputeSpec, authority: str, status: ChildStatus) -> None:
        host = children.gateway_host(compute, spec, self._options)
        parent = children.gateway_parent(spec, self._options)
        if children.is_foreign_host(compute, spec, self._options):
            own = f"{compute['metadata']['namespace']}.{self._options.gateway_domain}"
            text = f"spec.gateway.hostname belongs to another namespace. Use a name in {own}, or none."
            status.refusals.append(Cause("HostnameNotOwn", text, actionable=True))
            return
        if host is None or parent is None:
            lacking = "hostname" if host is None else "parentRef"
            text = f"spec.gateway.{lacking} is missing, and this installation has no default for it."
            status.refusals.append(Cause("GatewayIncomplete", text, actionable=True))
            return
        kinds = await self.served_kinds(_GATEWAY_GROUP)
        lacking = next((kind for kind, good in _GATEWAY_VERSIONS.items() if kinds.get(kind) not in good), "")
        if lacking:
            text = (
                f"The cluster does not know {lacking} of {_GATEWAY_GROUP} ({' or '.join(_GATEWAY_VERSIONS[lacking])}), "
                "so there is no way in through a gateway. `skyproxy connect` works without one."
            )
            status.refusals.append(Cause("GatewayUnavailable", text, actionable=True))
            return
        await self._apply(compute, children.ca_bundle(compute, authority), status)
        await self._apply(compute, children.backend_policy(compute, kinds["BackendTLSPolicy"]), status)
        await self._apply(compute, children.route(compute, spec, host, parent), status)

    async def _close_gateway(self, compute: Object) -> None:
        """Takes away a way in that is not wanted any more. What else it was made of leads nowhere by itself."""
        read = self._read[compute["metadata"]["uid"]]
        if (
            read.has_no_way_in
            or not compute.get("status")
            or "HTTPRoute" not in await self.served_kinds(_GATEWAY_GROUP)
        ):
            return
        existing = await self._find_existing(compute, children.ROUTE_API, "HTTPRoute", compute["metadata"]["name"])
        if existing is not None and is_owned(compute, existing):
            await self._cluster.delete(existing)
        read.has_no_way_in = True

    async def served_kinds(self, group: str) -> Mapping[str, str]:
        """Return the kinds of an API group that the cluster serves, as they were some minutes ago at most."""
        until, kinds = self._kinds.get(group, (0.0, {}))
        if time.monotonic() >= until:
            kinds = await self._cluster.served_kinds(group)
            self._kinds[group] = (time.monotonic() + _KINDS_SECONDS, kinds)
        return kinds


async def _all_of(*works: Awaitable[Any]) -> list[Any]:
    """Do works side by side, each to its end; what they give, in their order, or the first one's error."""
    done = await asyncio.gather(*works, return_exceptions=True)
    for item in done:
        if isinstance(item, BaseException):
            raise item
    return done


def _put_together(parts: Sequence[ChildStatus]) -> ChildStatus:
    """Make one state of several; what blocks last is named."""
    return ChildStatus(
        blocking=next((part.blocking for part in reversed(parts) if part.blocking), None),
        refusals=[cause for part in parts for cause in part.refusals],
        former_token=next((part.former_token for part in parts if part.former_token), ""),
    )


def _note(status: ChildStatus, error: ApiError, *, blocks: bool) -> None:
    if error.status == 0 or error.status >= 500 or error.status == 429:
        raise error
    cause = error.cause
    status.refusals.append(cause)
    if blocks:
        status.blocking = cause


def _decode(secret: Object) -> dict[str, str]:
    data = secret.get("data") or {}
    return {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in data.items()}


def _mark(wanted: Object) -> Object:
    """A child with the name of what we say of it, so that a field which we say no more is noticed, too."""
    if wanted["kind"] == "Secret":
        # What it holds is read again now and then; and what is made of secrets is nobody's business.
        return wanted
    text = json.dumps(wanted, sort_keys=True)
    mark = {APPLIED: hashlib.sha256(text.encode()).hexdigest()[:16]}
    metadata = wanted["metadata"]
    return {**wanted, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **mark}}}


def _is_as_applied(existing: Object, wanted: Object) -> bool:
    """Return whether applying `wanted` again would change nothing."""
    annotations = existing["metadata"].get("annotations") or {}
    mark = (wanted["metadata"].get("annotations") or {}).get(APPLIED)
    return mark is not None and annotations.get(APPLIED) == mark and _covers(existing, wanted)


def _covers(existing: object, wanted: object) -> bool:
    """Return whether everything that is wanted is there; what the server filled in does not count."""
    if isinstance(wanted, Mapping):
        return isinstance(existing, Mapping) and all(_covers(existing.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(existing, list) and len(existing) == len(wanted) and all(map(_covers, existing, wanted))
    return bool(existing == wanted)


def _fingerprint(compute: Object) -> str:
    """Names everything that children are made of, the operator's options aside."""
    runtime = ((compute.get("status") or {}).get("runtime") or {}).get("template", "")
    filled_in = f"/{zlib.crc32(runtime.encode())}" if runtime else ""
    return f"{compute['metadata'].get('generation')}/{issuer_of(compute) or ''}{filled_in}"
