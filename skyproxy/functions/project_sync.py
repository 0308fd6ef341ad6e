"""The program's own modules on one worker: it is told where they lie, or sent what has changed of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skyproxy.payloads.project_files import PROJECT_FILES, read_file
from skyproxy.payloads.projects import project_folders
from skyproxy.runtime.project_code import Folder, pack_files, receive_files, use_folders
from skyproxy.settings import Settings


class ProjectSync:
    """Keeps one session's worker up to date.

    Args:
        call: runs a function of ours there, with these arguments, and waits for its end.
        settings: whether to do it at all.
        shares_files: whether the worker sees this program's folders under the same paths.
    """

    def __init__(self, call: Callable[..., object], settings: Settings, *, shares_files: bool) -> None:
        self._call = call
        self._settings = settings
        self._shares_files = shares_files
        self._lock = threading.Lock()
        self._folders: tuple[Folder, ...] = ()
        self._sent: dict[tuple[str, str], bytes] = {}

    @property
    def is_new(self) -> bool:
        """True if the worker has been told nothing yet, and is to be."""
        return self._settings.sync_project and not self._folders

    def update(self, *, hurry: bool = False) -> None:
        """See to it that functions which begin from now on find the program's modules as they are now.

        Args:
            hurry: whether other calls are under way; see `ProjectFiles.current`.

        Raises:
            SessionLostError: the worker is gone.
            ConfigurationError: the modules are too many.
        """
        if not self._settings.sync_project:
            return
        folders = project_folders()
        if self._shares_files:
            if folders != self._folders:
                with self._lock:
                    self._call(use_folders, list(folders))
                    self._folders = folders
            return
        with self._lock:
            self._send_changes(folders, hurry)

    def _send_changes(self, folders: tuple[Folder, ...], hurry: bool) -> None:
        files = PROJECT_FILES.current(folders, hurry=hurry)
        # Each folder keeps its number on the worker for as long as the list is the same.
        sent = self._sent if folders == self._folders else {}
        now = {key: file.digest for key, file in files.items()}
        if now == sent and folders == self._folders:
            return
        numbers = {path: number for number, (path, _) in enumerate(folders)}
        changed: dict[tuple[int, str], bytes | None] = {}
        for (path, name), digest in now.items():
            if sent.get((path, name)) != digest:
                changed[numbers[path], name] = read_file(path, name)
        for path, name in sent.keys() - now.keys():
            changed[numbers[path], name] = None
        self._call(receive_files, [first for _, first in folders], pack_files(changed))
        self._folders, self._sent = folders, now
