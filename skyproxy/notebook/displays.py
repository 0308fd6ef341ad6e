"""Errors of remote values that a notebook was to show: once, and without the frames of IPython and skyproxy."""

from __future__ import annotations

from typing import Any, Protocol

from skyproxy.errors import SkyproxyError
from skyproxy.notebook.tracebacks import chain

_MODULE, _CLASS = "torch.sky", "RemoteTensor"


class Shown(Protocol):
    """A remote tensor, as far as a notebook shows it."""

    def _repr_mimebundle_(self) -> dict[str, str]:
        """Return its forms, which waits for its values."""


class Displays:
    """Displays of remote tensors in a shell.

    IPython shows an error of each form of a value, with all frames below it, and goes on with the next form: two long
    tracebacks for a cell that ends with a tensor. Here the value is fetched before the first form, by what IPython asks
    whether a value shows itself; one that fails does, with its error.
    """

    def __init__(self, shell: Any) -> None:
        """Make displays for one shell.

        Args:
            shell: IPython's `InteractiveShell`.
        """
        self._shell = shell
        self._fetched: tuple[object, dict[str, str]] | None = None

    def install(self) -> None:
        """Have the shell ask here; loads neither torch nor the tensor's class."""
        formatter = self._shell.display_formatter
        formatter.ipython_display_formatter.for_type_by_name(_MODULE, _CLASS, self._fetch)
        formatter.mimebundle_formatter.for_type_by_name(_MODULE, _CLASS, self._take)

    def _fetch(self, tensor: Shown) -> None:
        """Fetch what is shown, or show the error.

        Raises:
            NotImplementedError: there is no error; IPython goes on with the other forms.
        """
        try:
            self._fetched = (tensor, tensor._repr_mimebundle_())
        except SkyproxyError as error:
            for each in chain(error):
                each.__traceback__ = None  # all below the cell; the line that recorded the operation is in the text
            self._shell.showtraceback((type(error), error, None))
        else:
            raise NotImplementedError

    def _take(self, tensor: Shown) -> dict[str, str]:
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[0] is tensor:
            return fetched[1]
        return tensor._repr_mimebundle_()


def uninstall(shell: Any) -> None:
    """Have the shell show remote tensors as it shows everything."""
    formatter = shell.display_formatter
    for each in (formatter.ipython_display_formatter, formatter.mimebundle_formatter):
        each.pop(f"{_MODULE}.{_CLASS}", None)
