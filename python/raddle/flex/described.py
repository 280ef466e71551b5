"""What torch.compile knows of a function that is made inside of a compiled one, as a function that can be traced.

Such a function has no object yet, and what it captures may be tensors and numbers of the graph. While torch.compile
runs through `describe`, it tells the function's code, and of each captured value the kind; `stand_in` makes a function
of that, with values of these kinds in their places. What is an object already is taken as it is.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.variables import ConstantVariable, NestedUserFunctionVariable, TupleVariable
from torch.fx.experimental.symbolic_shapes import has_static_value

#: In the place of numbers that the graph computes, and of sizes. A trace that depends on one of them has to know it.
PLACEHOLDERS = NUMBER, SIZE = 13, 1021

_noted: dict[int, Any] = {}  # objects, as long as torch.compile looks at the function

# What may capture variables of the function that is compiled: described, not noted.
_MADE_INSIDE = ("NestedUserFunctionVariable", "UserMethodVariable", "FunctoolsPartialVariable")


def _variable(context: Any) -> Any:
    """What torch.compile knows of ``x`` of the calling function."""
    found = context.get_local("x")._i_will_not_complain_if_bc_breaks_VariableTracker()
    return found.realize() if hasattr(found, "realize") else found


def _note(context: Any) -> None:
    """Notes the object ``x`` of the calling function, if it is one by now."""
    found = _variable(context)
    _noted.pop(0, None)
    if type(found).__name__ in _MADE_INSIDE:
        return
    if hasattr(found, "evaluate_expr"):  # a number of the graph, which is guarded from now on
        _noted[0] = found.evaluate_expr()
        return
    try:
        value = found.as_python_constant()
    except Exception:  # noqa: BLE001: an object of the user's has one all the same
        if not hasattr(found, "value"):
            return
        value = found.value
    _noted[0] = value


@torch._dynamo.assume_constant_result
def _number_of_noted() -> int:
    """Of the object that was noted last; 0: none was."""
    if 0 not in _noted:
        return 0
    number = max(_noted) + 1
    _noted[number] = _noted.pop(0)
    return number


def _note_code(context: Any) -> None:
    """Notes code, globals and name of ``x`` of the calling function, which has no object yet."""
    found = _variable(context)
    _noted.pop(0, None)
    if isinstance(found, NestedUserFunctionVariable):
        _noted[0] = found.get_code(), found.get_globals(), found.get_name()


def _find_bound(context: Any) -> None:
    """Sets ``found`` of the calling function to what is bound to its ``x``, if that has no object yet."""
    function, nothing = _variable(context), ConstantVariable.create(None)
    if not isinstance(function, NestedUserFunctionVariable):
        return
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    cells = function.closure.items if function.closure else []
    contents = TupleVariable([translator.output.side_effects.load_cell(each) for each in cells])
    bound = [contents, function.defaults or nothing, function.kwdefaults or nothing]
    translator.symbolic_locals["found"] = TupleVariable(bound)


def _bound(x: Any) -> Any:
    """Of a function that is made inside of the compiled one: (contents of cells, defaults, defaults by name).

    As code of Python, torch.compile reads these attributes from torch 2.14 on. It holds them in earlier ones as well.
    None for a function that has an object: its attributes can be read, and are guarded where they are.
    """
    found = None
    comptime(_find_bound)
    return found


def cell(x: Any, i: int) -> Any:
    """What a function captures; torch.compile runs through this."""
    bound = _bound(x)
    return x.__closure__[i].cell_contents if bound is None else bound[0][i]


def default(x: Any, name: Any) -> Any:
    """A default of a function, by its place or its name; torch.compile runs through this."""
    bound = _bound(x)
    if type(name) is int:
        return (x.__defaults__ if bound is None else bound[1])[name]
    return (x.__kwdefaults__ if bound is None else bound[2])[name]


def describe(x: Any, with_numbers: bool) -> Any:
    """A tuple of constants. ``with_numbers``: numbers and sizes of the graph as they are; torch.compile guards them."""
    if isinstance(x, torch.Tensor):
        return "tensor", x.dtype, tuple(describe(n, with_numbers) for n in x.shape), x.requires_grad
    if type(x) in (list, tuple):
        return "list" if type(x) is list else "tuple", tuple(describe(each, with_numbers) for each in x)
    if type(x) is dict:
        return "dict", tuple((key, describe(each, with_numbers)) for key, each in x.items())
    changes = type(x) in (int, float) and not has_static_value(x)
    if changes and not with_numbers:
        return "number", type(x) is int
    if not changes and (type(x) in (int, float, bool, str) or x is None):
        return "constant", x
    comptime(_note)
    number = _number_of_noted()
    if number:
        return "object", number
    if isinstance(x, types.MethodType):
        return "method", describe(x.__func__, with_numbers), describe(x.__self__, with_numbers)
    if isinstance(x, functools.partial):
        given = describe(x.args, with_numbers), describe(x.keywords, with_numbers)
        return "partial", describe(x.func, with_numbers), *given
    if isinstance(x, types.FunctionType):
        comptime(_note_code)
        number = _number_of_noted()
        if number:
            return "function", number, describe(_bound(x), with_numbers)
    raise TypeError("a function for flex_attention captures what torch.compile cannot tell; expected tensors and numbers")


def stand_in(described: Any) -> Any:
    """What was described, with placeholders for what the graph computes."""
    kind, *parts = described
    if kind == "constant":
        return parts[0]
    if kind == "object":
        return _noted[parts[0]]
    if kind == "number":
        return NUMBER if parts[0] else float(NUMBER)
    if kind == "tensor":
        dtype, shape, requires_grad = parts
        sizes = [SIZE if size[0] == "number" else stand_in(size) for size in shape]
        return torch.zeros((), dtype=dtype).expand(sizes).requires_grad_(requires_grad and torch.is_grad_enabled())
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(map(stand_in, parts[0]))
    if kind == "dict":
        return {key: stand_in(each) for key, each in parts[0]}
    if kind == "method":
        return types.MethodType(*map(stand_in, parts))
    if kind == "partial":
        function, args, keywords = map(stand_in, parts)
        return functools.partial(function, *args, **keywords)
    return _function(*_noted[parts[0]], *stand_in(parts[1]))


def _function(code: Any, scope: dict[str, Any], name: str, contents: Any, defaults: Any, by_name: Any) -> Any:
    cells = tuple(map(types.CellType, contents))
    made = types.FunctionType(code, scope, name, defaults, cells or None)
    made.__kwdefaults__ = by_name
    return made


def forget() -> None:
    """Lets go of what was noted."""
    _noted.clear()
