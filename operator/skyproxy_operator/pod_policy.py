"""Policy: what a Compute's pods may not have unless the installation allows it. Pure.

The operator makes pods with its own rights, so whoever may make Computes could otherwise get pods that they could not
make themselves. What is refused by default follows the pod security standard "restricted"
(https://kubernetes.io/docs/concepts/security/pod-security-standards/), and holds where no admission controller does.
Capabilities need not be dropped, as there: who is not root and gets no new privileges has none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from skyproxy_operator.options import Options

Object = Mapping[str, object]

_HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
_VOLUME_KINDS = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
"""Everything else gives a way to the machine or to storage that no claim accounts for."""
_CAPABILITIES = {"NET_BIND_SERVICE"}
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_UNCONFINED_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
_CONTAINER_FIELDS = (
    "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resizePolicy "
    "resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce targetContainerName "
    "terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts workingDir"
)
_FIELDS = {
    "V1PodSpec": (
        "activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy enableServiceLinks "
        "ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname hostnameOverride "
        "imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy priority priorityClassName "
        "readinessGates resourceClaims resources restartPolicy runtimeClassName schedulerName schedulingGates "
        "schedulingGroup securityContext serviceAccount serviceAccountName setHostnameAsFQDN shareProcessNamespace "
        "subdomain terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes"
    ),
    "V1Container": _CONTAINER_FIELDS,
    "V1EphemeralContainer": _CONTAINER_FIELDS,
    "V1SecurityContext": (
        "allowPrivilegeEscalation appArmorProfile capabilities privileged procMount readOnlyRootFilesystem runAsGroup "
        "runAsNonRoot runAsUser seLinuxOptions seccompProfile windowsOptions"
    ),
    "V1PodSecurityContext": (
        "appArmorProfile fsGroup fsGroupChangePolicy runAsGroup runAsNonRoot runAsUser seLinuxChangePolicy "
        "seLinuxOptions seccompProfile supplementalGroups supplementalGroupsPolicy sysctls windowsOptions"
    ),
    "V1VolumeProjection": "clusterTrustBundle configMap downwardAPI podCertificate secret serviceAccountToken",
    "V1EnvVarSource": "configMapKeyRef fieldRef fileKeyRef resourceFieldRef secretKeyRef",
    "V1EnvFromSource": "configMapRef prefix secretRef",
}
REVIEWED = {kind: frozenset(names.split()) for kind, names in _FIELDS.items()}
"""The fields of the API's types that were looked at: what each gives is allowed, or has its rule below. A server that
is newer than this list may give anything for the others, so they are refused."""
_RUNTIME_ANNOTATIONS = re.compile(
    r"cdi\.k8s\.io/|io\.kubernetes\.cri-o\.|([^/]*\.)?(crio|cri-o)\.io(/|$)|([^/]*\.)?nri\.io/"
)
"""Annotations by which container runtimes and their plugins give devices and folders of the machine, or take profiles
away, whoever else they are for."""
_SECCOMP = ("RuntimeDefault", "Localhost")
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS = ("postStart", "preStop")


def violations(
    pod: Object,
    options: Options,
    own_secrets: Collection[str] = (),
    own_claims: Collection[str] = (),
    own_volumes: Collection[str] = (),
) -> Iterator[str]:
    """Everything about a pod that the installation does not allow, a line each.

    Args:
        pod: with the spec's podTemplate applied.
        options: those of the installation.
        own_secrets: the Secrets that the operator made for this pod.
        own_claims: the templates of claims that it makes for it.
        own_volumes: the claims of volumes that it makes for it.
    """
    spec = _mapping(pod.get("spec"))
    containers = [
        (f"{key}[{container.get('name', '')}]", container)
        for key in ("containers", "initContainers", "ephemeralContainers")
        for container in _rows(spec.get(key))
    ]
    if not options.allow_host_access:
        yield from _host_access(pod, spec, containers)
    if not options.allow_privilege:
        yield from _privilege(pod, spec, containers)
        yield from _unknown(spec, containers)
    yield from _service_account(pod, spec, options)
    yield from _secrets(spec, containers, options, own_secrets)
    yield from _claims(spec, options, own_claims)
    for volume in _rows(spec.get("volumes")):
        name = _mapping(volume.get("persistentVolumeClaim")).get("claimName")
        if name and name not in own_volumes and not matches(str(name), options.volume_claims):
            yield (
                f"volumes[{volume.get('name', '')}]: this installation does not let workers mount the claim {name}. An "
                f"administrator allows it: SKYPROXY_OPERATOR_VOLUME_CLAIMS={name}"
            )


def _host_access(pod: Object, spec: Object, containers: Sequence[tuple[str, Object]]) -> Iterator[str]:
    allow = "this installation allows no access to its machines (SKYPROXY_OPERATOR_ALLOW_HOST_ACCESS)"
    for key in _HOST_NAMESPACES:
        if spec.get(key):
            yield f"{key}: {allow}"
    for key in _mapping(_mapping(pod.get("metadata")).get("annotations")):
        if _RUNTIME_ANNOTATIONS.match(key):
            yield f"metadata.annotations[{key}]: {allow}; ask for devices by spec.resources or spec.resourceClaims"
    if spec.get("nodeName"):
        yield f"nodeName: the scheduler chooses the machine; use nodeSelector; {allow}"
    for volume in _rows(spec.get("volumes")):
        for kind in sorted(set(volume) - {"name"} - _VOLUME_KINDS):
            yield f"volumes[{volume.get('name', '')}].{kind}: {allow}; use a persistentVolumeClaim"
    for where, container in containers:
        for port in _rows(container.get("ports")):
            if port.get("hostPort"):
                yield f"{where}.ports[{port['hostPort']}].hostPort: {allow}"
        lifecycle = _mapping(container.get("lifecycle"))
        asked = [*((key, container.get(key)) for key in _PROBES), *((key, lifecycle.get(key)) for key in _HOOKS)]
        for key, handler in asked:
            for way in ("httpGet", "tcpSocket"):
                if _mapping(_mapping(handler).get(way)).get("host"):
                    yield f"{where}.{key}.{way}.host: the machine would ask others for the Pod; {allow}"


def _unknown(spec: Object, containers: Sequence[tuple[str, Object]]) -> Iterator[str]:
    """Yield what nobody has looked at, wherever a field can give a right."""
    parts: list[tuple[str, str, Object]] = [("V1PodSpec", "", spec)]
    parts.append(("V1PodSecurityContext", "securityContext.", _mapping(spec.get("securityContext"))))
    for where, item in containers:
        parts.append(("V1Container", f"{where}.", item))
        parts.append(("V1SecurityContext", f"{where}.securityContext.", _mapping(item.get("securityContext"))))
        for variable in _rows(item.get("env")):
            place = f"{where}.env[{variable.get('name', '')}].valueFrom."
            parts.append(("V1EnvVarSource", place, _mapping(variable.get("valueFrom"))))
        parts += [("V1EnvFromSource", f"{where}.envFrom.", source) for source in _rows(item.get("envFrom"))]
    for volume in _rows(spec.get("volumes")):
        for source in _rows(_mapping(volume.get("projected")).get("sources")):
            parts.append(("V1VolumeProjection", f"volumes[{volume.get('name', '')}].projected.", source))
    for kind, where, part in parts:
        for key in sorted(map(str, set(part) - REVIEWED[kind])):
            yield (
                f"{where}{key}: this operator does not know what it gives; this installation allows no privileges "
                "(SKYPROXY_OPERATOR_ALLOW_PRIVILEGE)"
            )


def _privilege(pod: Object, spec: Object, containers: Sequence[tuple[str, Object]]) -> Iterator[str]:
    allow = "this installation allows no privileges (SKYPROXY_OPERATOR_ALLOW_PRIVILEGE)"
    context = _mapping(spec.get("securityContext"))
    if context.get("sysctls"):
        yield f"securityContext.sysctls: {allow}"
    if str(spec.get("priorityClassName") or "").startswith("system-"):
        yield f"priorityClassName: {spec['priorityClassName']} is the system's own; {allow}"
    for key, value in _mapping(_mapping(pod.get("metadata")).get("annotations")).items():
        if key.startswith(_UNCONFINED_ANNOTATIONS) and "unconfined" in str(value):
            yield f"metadata.annotations[{key}]: {allow}"
    for where, held in [
        ("securityContext", context),
        *((f"{where}.securityContext", _mapping(item.get("securityContext"))) for where, item in containers),
    ]:
        for what in _privileges(held):
            yield f"{where}.{what}: {allow}"
    # A pod that says so for all its containers needs no word of each; one that says nothing may run as anybody.
    if context.get("runAsNonRoot") is not True:
        for where, item in containers:
            if _mapping(item.get("securityContext")).get("runAsNonRoot") is not True:
                yield f"{where}.securityContext.runAsNonRoot: it must be true; {allow}"
    if _mapping(context.get("seccompProfile")).get("type") not in _SECCOMP:
        for where, item in containers:
            if _mapping(_mapping(item.get("securityContext")).get("seccompProfile")).get("type") not in _SECCOMP:
                yield f"{where}.securityContext.seccompProfile: it must be {' or '.join(_SECCOMP)}; {allow}"
    for where, item in containers:
        if _mapping(item.get("securityContext")).get("allowPrivilegeEscalation") is not False:
            yield f"{where}.securityContext.allowPrivilegeEscalation: it must be false; {allow}"


def _privileges(context: Object) -> Iterator[str]:
    """Yield the privileges that one security context must not have."""
    if context.get("privileged"):
        yield "privileged"
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if context.get("procMount") not in (None, "Default"):
        yield "procMount"
    if sorted(set(_texts(_mapping(context.get("capabilities")).get("add"))) - _CAPABILITIES):
        yield "capabilities.add"
    for key in ("seccompProfile", "appArmorProfile"):
        if _mapping(context.get(key)).get("type") == "Unconfined":
            yield key
    selinux = _mapping(context.get("seLinuxOptions"))
    if selinux.get("user") or selinux.get("role") or str(selinux.get("type") or "") not in _SELINUX_TYPES:
        yield "seLinuxOptions"
    for key in ("hostProcess", "gmsaCredentialSpec", "gmsaCredentialSpecName"):
        if _mapping(context.get("windowsOptions")).get(key):
            yield f"windowsOptions.{key}"


def _service_account(pod: Object, spec: Object, options: Options) -> Iterator[str]:
    namespace = _mapping(pod.get("metadata")).get("namespace", "")
    # The second name is an old one of the first, which the API server still takes.
    named = {str(spec[key]) for key in ("serviceAccountName", "serviceAccount") if spec.get(key)}
    projected = any(
        not {"serviceAccountToken", "podCertificate"}.isdisjoint(source)
        for volume in _rows(spec.get("volumes"))
        for source in _rows(_mapping(volume.get("projected")).get("sources"))
    )
    if not named and (spec.get("automountServiceAccountToken") is not False or projected):
        named = {"default"}
    for name in sorted(named):
        if not matches(f"{namespace}/{name}", options.service_accounts):
            yield (
                f"serviceAccountName: this installation does not let workers use {namespace}/{name}. An administrator "
                f"allows it: SKYPROXY_OPERATOR_SERVICE_ACCOUNTS={namespace}/{name}"
            )


def _secrets(
    spec: Object, containers: Sequence[tuple[str, Object]], options: Options, own: Collection[str]
) -> Iterator[str]:
    found: dict[str, str] = {}
    for where, container in containers:
        for variable in _rows(container.get("env")):
            name = _mapping(_mapping(variable.get("valueFrom")).get("secretKeyRef")).get("name")
            found |= {str(name): f"{where}.env[{variable.get('name', '')}]"} if name else {}
        for source in _rows(container.get("envFrom")):
            name = _mapping(source.get("secretRef")).get("name")
            found |= {str(name): f"{where}.envFrom"} if name else {}
    for volume in _rows(spec.get("volumes")):
        where = f"volumes[{volume.get('name', '')}]"
        names = [
            _mapping(volume.get("secret")).get("secretName"),
            _mapping(_mapping(volume.get("csi")).get("nodePublishSecretRef")).get("name"),
            *(
                _mapping(source.get("secret")).get("name")
                for source in _rows(_mapping(volume.get("projected")).get("sources"))
            ),
        ]
        found |= {str(name): where for name in names if name}
    for name, where in sorted(found.items()):
        if name not in own and not matches(name, options.secrets):
            yield (
                f"{where}: this installation does not give workers the Secret {name}. An administrator allows it: "
                f"SKYPROXY_OPERATOR_SECRETS={name}"
            )


def _claims(spec: Object, options: Options, own: Collection[str]) -> Iterator[str]:
    for claim in _rows(spec.get("resourceClaims")):
        for name in (claim.get("resourceClaimName"), claim.get("resourceClaimTemplateName")):
            if name and str(name) not in own and not matches(str(name), options.resource_claims):
                yield (
                    f"resourceClaims[{claim.get('name', '')}]: this installation does not let workers use {name}. An "
                    f"administrator allows it: SKYPROXY_OPERATOR_RESOURCE_CLAIMS={name}"
                )


def matches(name: str, patterns: str) -> bool:
    """Return whether one of the patterns of an option, with commas between, is of this name."""
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(",") if pattern.strip())


def _mapping(value: object) -> Object:
    """A part of a pod that a template may have made into anything."""
    return value if isinstance(value, Mapping) else {}


def _rows(value: object) -> list[Object]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []
