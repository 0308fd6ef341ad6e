"""Asking a worker what it is and does; providers and programs know it by this name."""

from __future__ import annotations

from skyproxy.transport.worker_report import ask_worker

__all__ = ["ask_worker"]
