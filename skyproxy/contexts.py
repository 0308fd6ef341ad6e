"""Saved contexts: which worker `sky:0` means on this machine, as `skyproxy up` and `skyproxy connect` left it.

A context says how to find a worker again and holds no token: that is read again from where the worker keeps it. One
file a context, so that two commands at once lose nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyproxy.errors import ConfigurationError

CONTEXT_VARIABLE = "SKYPROXY_CONTEXT"
PROVIDERS = ("local", "container", "kubernetes", "ssh", "remote")
MAX_NAME_LENGTH = 50
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class Context:
    """A way to find one worker again.

    Attributes:
        name: of the context and of the worker.
        provider: who runs the worker: one of `PROVIDERS`.
        options: what that provider needs besides the name: a namespace, a url, paths; never a secret.
    """

    name: str
    provider: str
    options: dict[str, str] = field(default_factory=dict)


class ContextStore:
    """The contexts in a folder, and which of them is the current one.

    Attributes:
        folder: where the files are; made when something is saved, for its owner only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else config_folder()

    def names(self) -> list[str]:
        """The names of all contexts, sorted."""
        return sorted(path.stem for path in self._contexts.glob("*.json"))

    def get(self, name: str) -> Context | None:
        """The context of that name; None where there is none.

        Raises:
            ConfigurationError: its file cannot be read, or the name cannot be one.
        """
        path = self._path(name)
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            context = Context(row["name"], row["provider"], dict(row["options"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"the saved context {path} cannot be read: {error!r}. Remove it: skyproxy context remove {name}"
            ) from error
        if context.name != name or context.provider not in PROVIDERS:
            raise ConfigurationError(f"the saved context {path} is not a context of skyproxy. Remove that file.")
        return context

    def save(self, context: Context, *, make_current: bool = True) -> None:
        """Keeps a context, in place of an older one of that name.

        Raises:
            ConfigurationError: its name cannot be one, or the folder cannot be written.
        """
        write_private(self._path(context.name), json.dumps(asdict(context), indent=2) + "\n")
        if make_current:
            self.use(context.name)

    def remove(self, name: str) -> bool:
        """Forgets a context; whether there was one."""
        if self.current_name() == name:
            self.use(None)
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def use(self, name: str | None) -> None:
        """Makes a context the current one, or none.

        Raises:
            ConfigurationError: there is no such context.
        """
        if name is None:
            self._current_file.unlink(missing_ok=True)
        elif not self._path(name).exists():
            known = ", ".join(self.names()) or "none"
            raise ConfigurationError(f"there is no context {name!r}. Saved are: {known}. See: skyproxy context list")
        else:
            write_private(self._current_file, name + "\n")

    def current_name(self) -> str | None:
        """The name of the current context; None where there is none."""
        try:
            return self._current_file.read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def chosen(self, environ: Mapping[str, str] | None = None) -> Context | None:
        """The context that `sky:0` means: SKYPROXY_CONTEXT, where it is set, else the current one.

        Raises:
            ConfigurationError: the variable names a context that does not exist.
        """
        asked = (os.environ if environ is None else environ).get(CONTEXT_VARIABLE)
        name = asked if asked is not None else self.current_name()
        if not name:
            return None
        context = self.get(name)
        if context is None and asked is not None:
            known = ", ".join(self.names()) or "none"
            raise ConfigurationError(f"{CONTEXT_VARIABLE}={name!r} is not a saved context. Saved are: {known}.")
        return context

    @property
    def _contexts(self) -> Path:
        return self.folder / "contexts"

    @property
    def _current_file(self) -> Path:
        return self.folder / "current-context"

    def _path(self, name: str) -> Path:
        return self._contexts / f"{checked_name(name)}.json"


@dataclass(frozen=True)
class RemoteAddress:
    """The address of the worker of a context with the provider "remote".

    Attributes:
        url: of the worker.
        token: what it wants to hear.
        certificate: whom to trust: PEM text or a fingerprint; None for the system's authorities.
        server_name: the name in its certificate, where the url says another.
    """

    url: str
    token: str = field(repr=False)
    certificate: str | None = field(default=None, repr=False)
    server_name: str | None = None


def remote_address(context: Context) -> RemoteAddress:
    """Return what a context with the provider "remote" leads to.

    Raises:
        ConfigurationError: its token or certificate cannot be read.
    """
    options = context.options
    try:
        token = Path(options["token_file"]).read_text(encoding="ascii").strip()
        path = options.get("certificate_file")
        certificate = Path(path).read_text(encoding="ascii") if path else options.get("certificate")
        return RemoteAddress(options["url"], token, certificate, options.get("server_name"))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"the context {context.name!r} cannot be used: {error}. Save it again: skyproxy connect URL"
        ) from error


def connection_files(name: str) -> tuple[Path, Path]:
    """Return where token and certificate of a context are kept that stand in no other file; both may be missing."""
    folder = state_folder() / "connections"
    return folder / f"{name}.token", folder / f"{name}.pem"


def checked_name(name: str) -> str:
    """`name`, if a worker can be called so: it becomes the name of files and of Kubernetes objects.

    Raises:
        ConfigurationError: it cannot.
    """
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        meant = ""
        if any(mark in name for mark in ":/@."):
            meant = (
                ". If it is the address of a worker, begin it with wss://, ws:// or sky://; a host to log in to, with "
                "ssh://, for skyproxy up"
            )
        raise ConfigurationError(
            f"{name!r} cannot name a worker: use up to {MAX_NAME_LENGTH} small letters, digits and hyphens, a letter "
            f"first and no hyphen last. Example: dev-1{meant}"
        )
    return name


def config_folder() -> Path:
    """Return the folder of contexts: `$XDG_CONFIG_HOME/skyproxy`, ~/.config/skyproxy, or %APPDATA% on Windows."""
    return _folder("XDG_CONFIG_HOME", ".config", "APPDATA")


def state_folder() -> Path:
    """Return the folder in which workers that outlive a command leave their traces: `$XDG_STATE_HOME/skyproxy`,
    ~/.local/state/skyproxy.
    """
    return _folder("XDG_STATE_HOME", ".local/state", "LOCALAPPDATA")


def installation_id() -> str:
    """Return what tells this user on this machine from all others: 32 random hexadecimal digits, made once and kept.

    A host name does not: many machines are called `laptop`.

    Raises:
        ConfigurationError: it cannot be read or written.
    """
    return kept_text(state_folder() / "installation-id", lambda: secrets.token_hex(16)).strip()


def kept_text(path: Path, make: Callable[[], str]) -> str:
    """Return the text of a file that is made once, readable by its owner alone, and kept.

    Args:
        path: of the file.
        make: called where there is no such file. Of several processes at once, one wins, and all return its text.

    Raises:
        ConfigurationError: it cannot be read or written.
    """
    try:
        if path.exists():
            return path.read_text(encoding="ascii")
        _make_private(path.parent)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        partial.touch(mode=0o600, exist_ok=False)
        try:
            partial.write_text(make(), encoding="ascii")
            with contextlib.suppress(FileExistsError):
                os.link(partial, path)  # unlike a rename, it keeps what another process has just put there
        finally:
            partial.unlink()
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be used: {error.strerror}. Choose another place with XDG_STATE_HOME."
        ) from error


def _folder(variable: str, below_home: str, on_windows: str) -> Path:
    chosen = os.environ.get(variable) or (os.environ.get(on_windows) if os.name == "nt" else None)
    return (Path(chosen) if chosen else Path.home() / below_home) / "skyproxy"


def write_private(path: Path, text: str) -> None:
    """Writes a file whole or not at all, readable by its owner alone from its very beginning.

    Raises:
        ConfigurationError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _make_private(path.parent)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigurationError(
            f"{path} cannot be written: {error.strerror}. Choose another place with XDG_CONFIG_HOME or XDG_STATE_HOME."
        ) from error


def _make_private(folder: Path) -> None:
    """Makes a folder and those above it, each for its owner alone: `mkdir(parents=True)` would not."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
