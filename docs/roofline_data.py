"""What docs/js/roofline.js needs of mega_moe/roofline.py that is no formula: devices, layers, passes through memory.

mkdocs_hooks.py makes js/roofline_data.js of it. The formulas are written again in the script of the page, since a
reader may choose any layer; tests/test_viewer.py holds the two equal.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a bare checkout has nothing installed

from mega_moe.ladder import DTYPES
from mega_moe.roofline import BILLED, CEILINGS, PASSES, SIZED_AS
from mega_moe.shapes import PRESETS
from mega_moe.timeline import COLOURS

STEP_OF_RESULT = {
    "gate_up": "gate_up",
    "down": "down",
    "y": "combine",
    "dact": "swiglu",
    "drows": "gate_up",
    "dx": "dispatch",
    "dw_gate_up": "gate_up",
    "dw_down": "down",
}
"""The step that each of `roofline.tiles` belongs to."""


def as_script() -> str:
    """A classic script, for the page."""
    data = {
        "layers": {name: {letter: getattr(p, letter) for letter in "THIEK"} for name, p in PRESETS.items()},
        "bytes_of": {name: dtype.itemsize for name, dtype in DTYPES.items() if dtype.itemsize <= 4},
        "ceilings": [asdict(ceiling) for _, ceiling in CEILINGS],
        "billed": BILLED,
        "passes": PASSES,
        "sized_as": SIZED_AS,
        "colours": COLOURS,
        "step_of_result": STEP_OF_RESULT,
    }
    return f'"use strict";\nconst ROOFLINE = {json.dumps(data)};\n'
