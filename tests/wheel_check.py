"""Run with an installed wheel and no compiler on PATH: every shipped variant against the fp64 reference."""

import shutil
import sys
from pathlib import Path

import numpy as np
import raddle

sys.path.insert(0, str(Path(__file__).parent / "python"))
from draws import VARIANTS, draw  # noqa: E402
from engine import Engine, hold_to_budgets_of  # noqa: E402

assert not any(map(shutil.which, ("c++", "g++", "cc", "gcc", "clang"))), "a compiler is on PATH"
assert "site-packages" in raddle.__file__, f"not the installed wheel: {raddle.__file__}"

hold_to_budgets_of("cpu")
engine = Engine("cpu")
for variant in VARIANTS:
    for dtype in ("float32", "float16", "bfloat16"):
        worst = engine.check(draw(np.random.default_rng(0), layout="paged", variant=variant, dtype=dtype))
        print(f"{variant:14} {dtype:9} worst error / budget {worst:.2f}")
print("raddle", raddle.__version__, "works from the wheel:", raddle.__file__)
