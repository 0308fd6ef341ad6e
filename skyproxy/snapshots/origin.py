"""The worker that a snapshot needs: its torch, its devices, and a skyproxy that reads the format."""

from __future__ import annotations

from collections.abc import Collection

from skyproxy.errors import SnapshotError
from skyproxy.snapshots.documents import FORMAT, Table, entry, rows, text, whole_number


def check_origin(document: Table, torch_version: str, devices: Collection[tuple[str, int]]) -> None:
    """Refuse a snapshot that a worker cannot continue.

    Args:
        document: what it says of itself; nothing in it is believed.
        torch_version: the worker's torch.
        devices: the worker's devices, each type and index.

    Raises:
        SnapshotError: it is of a newer format, another torch, or other devices.
    """
    version = whole_number(entry(document, "format"), "its format", least=1)
    if version > FORMAT:
        raise SnapshotError(
            f"this snapshot has the format {version}, and this worker reads up to {FORMAT}. Nothing was changed; "
            f"update skyproxy on the worker ({text(document.get('skyproxy', ''), 'a version', 100)} wrote it)"
        )
    theirs = text(entry(document, "torch"), "its version of torch", 100)
    if _series(theirs) != _series(torch_version):
        raise SnapshotError(
            f"this snapshot was written with torch {theirs}, and this worker has {torch_version}: results would "
            "differ. The snapshot is untouched; load it on a worker with that torch"
        )
    for kind, index in rows(entry(document, "devices"), "its devices", 2):
        if (text(kind, "a device", 10), whole_number(index, "the number of a device")) not in devices:
            raise SnapshotError(
                f"this snapshot needs the device {kind!s:.20}:{index!s:.20}, and this worker has "
                f"{', '.join(f'{k}:{i}' for k, i in sorted(devices))}. The snapshot is untouched; load it on a "
                "worker with such devices"
            )


def _series(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])
