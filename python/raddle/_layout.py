"""What all layouts have in common."""

from __future__ import annotations

from typing import Any

import tvm_ffi

from raddle import _library
from raddle._tensors import lend, lend_index, plain, restorable
from raddle._tensors.kinds import TorchTensor

_layout_info = _library.function("raddle.layout_info")
_state = _library.function("raddle.layout.state")
_restore = _library.function("raddle.layout.restore")

#: Types of arguments that cross as they are.
CROSSING = _library.PLAIN | {TorchTensor}


@tvm_ffi.register_object("raddle.Layout")
class Layout(_library.Handle):
    """What attends to what: immutable, and made by its subclasses."""

    __slots__ = ("_reason",)

    def explain(self) -> str:
        """Returns why it is as it is, where Raddle chose it (`Cascade.from_page_tables`, `from_radix`); else ""."""
        _library.refuse_unmade(self, "self")
        return getattr(self, "_reason", "")

    def _init(self, make: Any, **args: Any) -> None:
        """Makes the object of arguments in the order in which ``make`` takes them, a `_library.function_in_order`."""
        if CROSSING.issuperset(map(type, args.values())):
            try:
                return self.__init_handle_by_constructor__(make, *args.values())
            except (BufferError, TypeError, RuntimeError):
                # Read-only arrays do not cross as they are. Converting every argument costs more than planning a small
                # batch, so it is done only when needed.
                pass
        self.__init_handle_by_constructor__(make, *(_converted(x, name) for name, x in args.items()))

    @property
    def num_requests(self) -> int:
        """Requests of the batch; for a page table on a GPU the entries of kv_len."""
        return _layout_info(self)["num_requests"]

    @property
    def num_rows(self) -> int | None:
        """Rows of the query tensor; None where only a GPU knows."""
        return _layout_info(self).get("num_rows")

    @property
    def num_levels(self) -> int:
        """Levels; 1 but for a cascade, and 2 where prefixes are discovered."""
        return _layout_info(self)["num_levels"]

    def __reduce__(self) -> Any:
        return _restored, (type(self), plain(_state(self)), self._extras())

    def _extras(self) -> dict[str, Any]:
        """What the object has beside the layout."""
        return {"_reason": self._reason} if hasattr(self, "_reason") else {}

    def _text(self) -> str:
        info = _layout_info(self)
        rest = f"on {info['device']}" if "device" in info else f"{info['num_rows']} rows"
        return f"{type(self).__name__}({info['num_requests']} requests, {rest})"


def _restored(kind: type[Layout], state: dict[str, Any], extras: dict[str, Any]) -> Layout:
    layout = kind.__new__(kind)
    layout.__move_handle_from__(_restore(restorable(state)))
    for name, value in extras.items():
        setattr(layout, name, value)
    return layout


def _converted(x: Any, name: str) -> Any:
    if isinstance(x, (list, tuple)):
        return lend_index(x, name)
    if hasattr(x, "__dlpack__"):
        return lend(x, name)
    _library.refuse_unmade(x, name)
    return x
