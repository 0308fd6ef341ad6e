"""From what a user writes to what a provider is asked for."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat

from skyproxy.errors import ConfigurationError
from skyproxy.providers.accelerators import Accelerator
from skyproxy.providers.base import Volume, WorkerSpec
from skyproxy.providers.image import Image
from skyproxy.runtime.instance import count_accelerators
from skyproxy.runtime.plugin import HOOKS, Plugin, reporting
from skyproxy.units import duration_seconds, limit_seconds

_GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class PlannedPool:
    """The pool to be made, as plugins' `transform` sees it.

    Attributes:
        spec: what the provider will be asked for, as far as it is known.
    """

    spec: WorkerSpec


def worker_spec(
    *,
    name: str | None,
    nodes: int,
    procs_per_node: int | str,
    accelerator: Accelerator | str | None,
    vcpus: float | None,
    memory_gb: float | None,
    resources: Mapping[str, object] | None,
    image: Image | str | None,
    volumes: Sequence[Volume | Mapping[str, object]],
    env: Mapping[str, object] | None,
    timeout: float | str,
    idle_timeout: float | str | None,
    max_lifetime: float | str | None,
    keep: bool,
    options: Mapping[str, object],
    local: bool,
) -> WorkerSpec:
    """Checks what was written and brings it into one form.

    Raises:
        ConfigurationError: an argument cannot work; names it.
    """
    if type(nodes) is not int or nodes < 1:
        raise ConfigurationError(f"nodes={nodes!r}: a pool has at least one node. Use 1 or more.")
    _check_kind("resources", resources, Mapping, "a dict: {'cpu': '4', 'memory': '8Gi'}")
    _check_kind("env", env, Mapping, "a dict: {'NAME': 'value'}")
    _check_kind("image", image, Image | str, "an Image, or the name of a container image")
    _check_kind("volumes", volumes, Sequence, "a list: [{'name': 'cache', 'storage': '10Gi', 'path': '/cache'}]")
    for volume in volumes:
        _check_kind("volumes: an element", volume, Volume | Mapping, "a Volume, or a dict with name, storage and path")
    if env is not None and (unset := [key for key, value in env.items() if value is None]):
        raise ConfigurationError(f"env={{{unset[0]!r:.80}: None}}: a variable of a worker has a text. Leave it out.")
    _check_kind("name", name, str, "a text")
    if name is not None and not name.strip():
        raise ConfigurationError(f"name={name!r:.80}: use a text, or leave it out and one is made up.")
    if not isinstance(keep, bool):
        raise ConfigurationError(f"keep={keep!r:.80}: use True or False.")
    kind = Accelerator.parse(accelerator)
    amounts = {str(key): str(value) for key, value in (resources or {}).items()}
    _amount(amounts, "cpu", "vcpus", vcpus, "")
    _amount(amounts, "memory", "memory_gb", memory_gb, "Gi")
    if keep and name is None:
        raise ConfigurationError(
            "keep=True leaves workers behind that can be found again only by name. Give one: name='dev'."
        )
    return WorkerSpec(
        name=name if name is not None else f"compute-{secrets.token_hex(3)}",
        nodes=nodes,
        procs_per_node=_procs(procs_per_node, kind, amounts, nodes, local),
        image=image,
        resources=amounts,
        accelerator=kind,
        volumes=tuple(Volume.parse(volume) for volume in volumes),
        env={str(key): str(value) for key, value in (env or {}).items()},
        idle_timeout_seconds=limit_seconds(idle_timeout, "idle_timeout"),
        max_lifetime_seconds=limit_seconds(max_lifetime, "max_lifetime"),
        timeout_seconds=duration_seconds(timeout, "timeout"),
        keep=keep,
        options=dict(options),
    )


def transformed(spec: WorkerSpec, plugins: Sequence[Plugin]) -> WorkerSpec:
    """The spec with the image as the plugins want it, one after the other.

    Raises:
        ConfigurationError: there are plugins with wishes, and the image is one that cannot be added to.
    """
    with_wishes = [plugin for plugin in plugins if callable(getattr(plugin, "transform", None))]
    if not with_wishes:
        return spec
    image = Image(base=spec.image) if isinstance(spec.image, str) else spec.image or Image()
    before = image
    for plugin in with_wishes:
        with reporting(plugin, "transform"):
            image = plugin.transform(image, PlannedPool(replace(spec, image=image)))
        if not isinstance(image, Image):
            raise ConfigurationError(
                f"the plugin {type(plugin).__name__} returned a {type(image).__name__} from transform; it must "
                "return an Image. Use image.replace(...)."
            )
    return spec if image == before else replace(spec, image=image)


def check_plugins(plugins: Sequence[object]) -> None:
    """Check that plugins are a list of objects with hooks.

    Raises:
        ConfigurationError: they are something else.
    """
    _check_kind("plugins", plugins, Sequence, "a list: [skyproxy.plugins.torch()]")
    for plugin in plugins:
        if isinstance(plugin, type) or not any(callable(getattr(plugin, hook, None)) for hook in HOOKS):
            raise ConfigurationError(
                f"plugins: {plugin!r:.80} is no plugin. Make one: plugins=[skyproxy.plugins.torch()]."
            )


def check_provider(provider: object) -> None:
    """Check that a provider is one, not its name or its class.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(provider, type) or not (provider is None or callable(getattr(provider, "launch", None))):
        raise ConfigurationError(f"provider={provider!r:.80} is no provider. Make one: provider=skyproxy.Local().")


def _check_kind(name: str, value: object, kind: Any, wanted: str) -> None:
    if value is not None and (not isinstance(value, kind) or (kind is Sequence and isinstance(value, str))):
        raise ConfigurationError(f"{name}={value!r:.80} is {type(value).__name__}. Give {wanted}.")


def _amount(amounts: dict[str, str], key: str, name: str, value: object, unit: str) -> None:
    if value is None:
        return
    if key in amounts:
        raise ConfigurationError(
            f"{name}={value} and resources[{key!r}]={amounts[key]!r} say the same thing twice. Give one."
        )
    number = float(value) if isinstance(value, SupportsFloat) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ConfigurationError(f"{name}={value!r:.80}: use a number above 0.")
    amounts[key] = f"{number:g}{unit}"


def _procs(given: int | str, kind: Accelerator | None, amounts: Mapping[str, str], nodes: int, local: bool) -> int:
    if given == "gpu":
        count = kind.count if kind is not None else int(amounts.get(_GPU, 0))
        if count == 0 and local:
            count = count_accelerators() // nodes
        if count == 0:
            raise ConfigurationError(
                "procs_per_node='gpu' is one process for each GPU of a node, and none was asked for. Say which: "
                "accelerator='A100:8'; or give a number."
            )
        return count
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ConfigurationError(f"procs_per_node={given!r}: use a number from 1, or 'gpu' for one process a GPU.")
    return given
