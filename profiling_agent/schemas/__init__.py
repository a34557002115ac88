"""Records that stages exchange and store: frozen, typed and without tensors.

Ratios and accuracies are fractions in [0, 1]; units are in the names; `macs` are multiply-accumulates of one image.
"""

from profiling_agent.schemas.measurement import *
from profiling_agent.schemas.plan import *
from profiling_agent.schemas.profile import *
from profiling_agent.schemas.search import *
