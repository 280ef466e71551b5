"""Names of dtypes, and what numpy has for them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from raddle._tensors.kinds import kind_of

#: What numpy makes new tensors of.
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int32": np.int32}

#: What numpy cannot export, as what it is viewed, and its name, which numpy is slow to tell.
VIEWED = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, "bfloat16"),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, "float8_e4m3fn"),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, "float8_e5m2"),
}

_ALIASES = {
    "bf16": "bfloat16",
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    **{alias: "float8_e4m3fn" for alias in ("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3")},
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any, name: str = "dtype") -> str:
    """"float32" for that string, for "fp32", and for the dtype as numpy, torch, JAX and ml_dtypes have it."""
    if isinstance(dtype, str) or type(dtype).__module__ == "torch":
        found = str(dtype).removeprefix("torch.")
        return _ALIASES.get(found, found)
    try:
        if dtype is not None:  # which numpy takes for float64
            return np.dtype(dtype).name
    except TypeError:
        pass
    expected = "'float32', 'float16' or 'bfloat16'" if name == "dtype" else "'float8_e4m3fn', 'float8_e5m2', 'int8' or None"
    raise TypeError(f"{name} is {kind_of(dtype)}; expected {expected}")
