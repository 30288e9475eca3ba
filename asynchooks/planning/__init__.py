"""Record a real run, and plan others in virtual time: rate, staleness and cost, with intervals.

    with record("run.pftrace", settings={"concurrency": 16}):
        anyio.run(main, 16)

    print(Plan.read("run.pftrace").predict(main, concurrency=64))

What takes time outside of the program is `timed`: a plan draws its duration from the record.
"""

from typing import TYPE_CHECKING

from .._errors import PlanError, TraceError
from .._later import later
from ._timed import span, timed

if TYPE_CHECKING:
    from ._plan import Plan as Plan
    from ._plot import plot_plan as plot_plan
    from ._prediction import Check as Check
    from ._prediction import Estimate as Estimate
    from ._prediction import Prediction as Prediction
    from ._record import record as record
    from ._service import Dependence as Dependence
    from ._service import Service as Service
    from ._service import SizeLaw as SizeLaw
    from ._spans import Spans as Spans
    from ._station import Drawn as Drawn
    from ._trace import Figures as Figures
    from ._trace import Marks as Marks
    from ._trace import Trace as Trace

_PLACES = {
    "Check": "_prediction",
    "Dependence": "_service",
    "Drawn": "_station",
    "Estimate": "_prediction",
    "Figures": "_trace",
    "Marks": "_trace",
    "Plan": "_plan",
    "Prediction": "_prediction",
    "Service": "_service",
    "SizeLaw": "_service",
    "Spans": "_spans",
    "Trace": "_trace",
    "plot_plan": "_plot",
    "record": "_record",
}

__all__ = ["PlanError", "TraceError", "span", "timed", *_PLACES]
__getattr__, __dir__ = later(__name__, _PLACES)
