"""Python environments on this machine: made once for every content, found again by its hash."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from skyproxy.errors import ConfigurationError
from skyproxy.providers.commands import run_command
from skyproxy.providers.image import Image, requirement_name
from skyproxy.providers.locked_requirements import LOCK_FILE, locked_step
from skyproxy.runtime.requirements import is_satisfied

WORKER_REQUIREMENTS = ("cloudpickle>=3", "msgpack>=1.0.8", "numpy", "packaging>=23", "psutil>=5.9", "websockets>=14")
"""The packages that a worker needs beside torch, where it does not share the client's environment."""

_FINISHED = "finished"
_OTHER_INDEXES = ("PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX")
"""Options that go before `--index-url`, or beside it."""
_LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Environment:
    """An interpreter that can run a worker.

    Attributes:
        python: its path.
        search_path: what must be on PYTHONPATH for it to find skyproxy, or None where the client's own path does.
    """

    python: str
    search_path: str | None = None


def own_environment_satisfies(image: Image) -> bool:
    """Return whether the interpreter that runs this program has all that an image asks for."""
    if image.requirements is not None:
        return False  # nobody knows the hashes of what is installed
    if image.python is not None:
        wanted = image.python.split(".")
        if platform.python_version_tuple()[: len(wanted)] != tuple(wanted):
            return False
    return not missing_requirements(image.pip)


def missing_requirements(requirements: Sequence[str]) -> list[str]:
    """Those that the interpreter which runs this does not satisfy; pools call it on workers too."""
    return [requirement for requirement in requirements if not is_satisfied(requirement)]


class EnvironmentStore:
    """The environments under one folder.

    An environment that is not `isolated` lies over the client's own: it sees the client's packages, and has only what
    is missing or wanted at another version. An isolated one has what its image names and what a worker needs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def environment(self, image: Image, *, isolated: bool, report: Callable[[str], None]) -> Environment:
        """Finds or makes the environment of an image; cancelling the task ends the installer and leaves nothing.

        Args:
            image: what is wanted.
            isolated: whether to leave the client's own packages out.
            report: told what is done.

        Raises:
            ConfigurationError: the interpreter that is wanted needs a tool that is not here.
            WorkerStartError: the installer failed; with the end of its output.
        """
        foreign = not _is_own_version(image.python)
        if not isolated and foreign:
            raise ConfigurationError(
                f"Image(python={image.python!r}): this program runs Python {platform.python_version()}, and another "
                "version cannot share its packages. Use Local(isolated=True)."
            )
        own_site = "" if isolated else sysconfig.get_path("purelib")
        needed = " ".join((_torch_pin(), *WORKER_REQUIREMENTS))
        name = image.content_hash(platform.python_version(), sys.platform, platform.machine(), own_site, needed)
        place = self._folder / name
        self._folder.mkdir(parents=True, exist_ok=True)
        async with _lock(self._folder / f"{name}.lock"):
            if not (place / _FINISHED).exists():
                try:
                    await self._build(place, image, isolated, report)
                except BaseException:
                    shutil.rmtree(place, ignore_errors=True)
                    raise
                (place / _FINISHED).touch()
        python = str(_python_of(place))
        return Environment(python, _source_folder(place) if isolated else None)

    async def _build(self, place: Path, image: Image, isolated: bool, report: Callable[[str], None]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        uv = shutil.which("uv")
        if uv is not None:
            version = image.python or platform.python_version()
            interpreter = sys.executable if _is_own_version(image.python) else version
            await run_command([uv, "venv", "--quiet", "--python", interpreter, str(place)], "make an environment")
            install = [uv, "pip", "install", "--quiet", "--python", str(_python_of(place))]
        elif not _is_own_version(image.python):
            raise ConfigurationError(
                f"Image(python={image.python!r}) needs uv to get that interpreter; this one is Python "
                f"{platform.python_version()}. Install it: pip install uv"
            )
        else:
            await run_command([sys.executable, "-m", "venv", str(place)], "make an environment")
            install = [str(_python_of(place)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if not isolated:
            self._share_own_packages(place)
        if image.requirements is not None:
            (place / LOCK_FILE).write_text(str(image.requirements), encoding="utf-8")
        for arguments in install_steps(image, isolated, uv=uv is not None):
            report("installing " + " ".join(part for part in arguments if not part.startswith(("-", "http"))))
            without: tuple[str, ...] = ()
            variables: dict[str, str] = {}
            if "--index-url" in arguments:
                without = _OTHER_INDEXES
                # Where this is set, pip does not look what its configuration files say of further indexes.
                variables["PIP_EXTRA_INDEX_URL"] = arguments[arguments.index("--index-url") + 1]
            placed = [str(place / LOCK_FILE) if part == LOCK_FILE else part for part in arguments]
            await run_command([*install, *placed], "install the packages of the image", without, variables)

    def _share_own_packages(self, place: Path) -> None:
        # addsitedir, not a bare path: packages that are installed for development are lines in such files themselves.
        folders = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        line = "import site; " + "; ".join(f"site.addsitedir({folder!r})" for folder in folders)
        (_site_packages(place) / "zz-skyproxy-client.pth").write_text(line + "\n", encoding="utf-8")


def install_steps(image: Image, isolated: bool, *, uv: bool = False) -> list[list[str]]:
    """The arguments of the installer, one run after the other.

    An image with locked requirements has one step, which reads `LOCK_FILE`; whoever runs it puts the file there.

    What an index is for is installed first and by itself, without its dependencies: so neither pip nor uv can take
    anything else from there, and the last run finds it in place and adds the dependencies from PyPI.

    Args:
        image: what is wanted.
        isolated: whether a worker's own requirements belong to it.
        uv: whether uv installs; else pip does.

    Raises:
        ConfigurationError: the locked requirements lack what a worker needs.
    """
    if image.requirements is not None:
        own = ("torch", *WORKER_REQUIREMENTS) if isolated else ()
        return [locked_step(str(image.requirements), [index.url for index in image.pip_indexes], own, uv=uv)]
    steps = []
    wanted = {requirement_name(requirement): requirement for requirement in image.pip}
    if isolated and "torch" not in wanted:
        wanted["torch"] = _torch_pin()
    by_index: dict[str, list[str]] = {}
    for index in image.pip_indexes:
        for package in index.packages:
            requirement = wanted.get(requirement_name(package), package)
            if image.index_of(requirement) == index.url:
                by_index.setdefault(index.url, []).append(requirement)
    for url, requirements in by_index.items():
        steps.append(["--no-deps", "--index-url", url, *dict.fromkeys(requirements)])
    needed = list(wanted.values()) + (list(WORKER_REQUIREMENTS) if isolated else [])
    if needed:
        steps.append(needed)
    return steps


def _torch_pin() -> str:
    """The client's torch: tensors that travel by value need the same on both sides."""
    try:
        return "torch==" + importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "torch"


def _is_own_version(wanted: str | None) -> bool:
    return wanted is None or own_environment_satisfies(Image(python=wanted))


def _python_of(place: Path) -> Path:
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _site_packages(place: Path) -> Path:
    (found,) = [*place.glob("lib/python*/site-packages"), *place.glob("Lib/site-packages")]
    return found


def _source_folder(place: Path) -> str:
    """A folder that holds this very skyproxy and nothing else, for an interpreter that knows none."""
    folder = place / "skyproxy-source"
    folder.mkdir(exist_ok=True)
    for package in ("skyproxy", "skyproxy_server"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        source, link = Path(spec.origin).resolve().parent, folder / package
        if link.is_symlink() and link.resolve() == source:
            continue
        if link.is_symlink():
            link.unlink()
        try:
            link.symlink_to(source, target_is_directory=True)
        except OSError:  # Windows, without the right to make links
            shutil.copytree(source, link, dirs_exist_ok=True)
    return str(folder)


@contextlib.asynccontextmanager
async def _lock(path: Path) -> AsyncIterator[None]:
    """One program at a time: two that want the same environment build it once."""
    with path.open("a+b") as file:
        while not _try_to_lock(file):
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        yield  # closing the file unlocks it


def _try_to_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
