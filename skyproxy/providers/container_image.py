"""Container images from descriptions: built once for every content, found again by its hash."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import shutil
import tempfile
from pathlib import Path

from skyproxy.errors import WorkerStartError
from skyproxy.providers.commands import run_command
from skyproxy.providers.container_engine import HOME_FOLDER
from skyproxy.providers.environments import install_steps
from skyproxy.providers.image import Image, PipIndex, requirement_name
from skyproxy.providers.locked_requirements import LOCK_FILE

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
_REPOSITORY = "skyproxy-worker"
_SOURCE = "/opt/skyproxy"


async def container_image(cli: str, image: Image, *, gpus: bool) -> str:
    """The name of a container image with what `image` asks for, a worker's needs, and this very skyproxy.

    Args:
        cli: docker or podman.
        image: what is wanted; its `base` by default is the official Python of its version.
        gpus: whether torch is to be one with CUDA, where the image does not say.

    Raises:
        WorkerStartError: the build failed; with the end of its output.
    """
    image = _with_defaults(image, gpus)
    packages = _packages()
    assert image.base is not None, "there is a default"
    text = containerfile(image, await _user_of(cli, image.base))
    sources = hashlib.sha256()
    for folder in packages:
        for path in sorted(folder.rglob("*.py")):
            sources.update(str(path.relative_to(folder.parent)).encode() + b"\0" + path.read_bytes())
    tag = f"{_REPOSITORY}:{image.content_hash(text, sources.hexdigest())}"
    if await run_command([cli, "images", "--quiet", tag], "look for the image"):
        return tag
    with tempfile.TemporaryDirectory(prefix="skyproxy-build-") as context:
        (Path(context) / "Dockerfile").write_text(text, encoding="utf-8")
        if image.requirements is not None:
            (Path(context) / LOCK_FILE).write_text(str(image.requirements), encoding="utf-8")
        for folder in packages:
            copied = Path(context) / "skyproxy-source" / folder.name
            shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("__pycache__"))
        await run_command([cli, "build", "--quiet", "--tag", tag, context], "build the image")
    return tag


def containerfile(image: Image, user: str = "") -> str:
    """Return the steps of the build; those that seldom change come first.

    Args:
        image: what is wanted, with a base.
        user: who runs in containers of the base; "" for root.
    """
    lines = [
        f"FROM {image.base}",
        "USER 0",
        "ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1",
    ]
    if image.apt:
        install = "apt-get update && apt-get install -y --no-install-recommends"
        lines.append(f"RUN {install} {' '.join(sorted(image.apt))} && rm -rf /var/lib/apt/lists/*")
    if image.requirements is not None:
        lines.append(f"COPY {LOCK_FILE} {LOCK_FILE}")
    for arguments in install_steps(image, isolated=True):
        lines.append("RUN " + json.dumps(["python3", "-m", "pip", "install", *arguments]))
    # Whoever the user in the container is: all else is read-only there.
    lines.append(f"RUN mkdir -p -m 1777 {HOME_FOLDER}")
    lines += [f"COPY skyproxy-source {_SOURCE}", f"ENV PYTHONPATH={_SOURCE} PYTHONDONTWRITEBYTECODE=1"]
    lines += [f"USER {user}"] if user else []
    return "\n".join(lines) + "\n"


async def _user_of(cli: str, base: str) -> str:
    """Return the user that an image names, which is pulled where it is not there; "" where it names none."""
    look = [cli, "image", "inspect", "--format", "{{.Config.User}}", base]
    try:
        return await run_command(look, "look at the image's base")
    except WorkerStartError:
        await run_command([cli, "pull", "--quiet", base], "pull the image's base")
        return await run_command(look, "look at the image's base")


def _with_defaults(image: Image, gpus: bool) -> Image:
    if image.base is None:
        version = image.python or ".".join(platform.python_version_tuple()[:2])
        image = image.replace(base=f"docker.io/library/python:{version}-slim")
    scoped = {requirement_name(package) for index in image.pip_indexes for package in index.packages}
    if not gpus and "torch" not in scoped:
        # From PyPI torch brings gigabytes of CUDA, for nothing.
        image = image.replace(pip_indexes=(*image.pip_indexes, PipIndex(CPU_WHEELS, ["torch"])))
    return image


def _packages() -> list[Path]:
    found = []
    for name in ("skyproxy", "skyproxy_server"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found.append(Path(spec.origin).resolve().parent)
    return found
