"""The settings under which others published the comparison policies (prior-art.md), by name.

For tables that compare: the names are accepted wherever a simulation takes a policy.
"""

from gateway.core.policies import POLICIES
from gateway.core.settings import RoutingSpec, SmgSpec, WeightsSpec

# What one request had indexed at most in GKE Inference Gateway and llm-d until June 2026.
_INDEX_TOKENS = 4096

PUBLISHED = {
    **{name: RoutingSpec(name) for name in POLICIES},
    "weights-3:3:2": RoutingSpec("weights", weights=WeightsSpec(3, 3, 2)),
    "weights-3:5:2": RoutingSpec("weights", weights=WeightsSpec(3, 5, 2)),
    "weights-3:2:2": RoutingSpec("weights", weights=WeightsSpec(3, 2, 2)),
    "weights-3:3:2-4096": RoutingSpec("weights", weights=WeightsSpec(3, 3, 2, _INDEX_TOKENS)),
    "weights-3:5:2-4096": RoutingSpec("weights", weights=WeightsSpec(3, 5, 2, _INDEX_TOKENS)),
    "smg-0.5/32/1.1": RoutingSpec("smg", smg=SmgSpec(0.5, 32, 1.1)),
    "smg-0.3/64/1.5": RoutingSpec("smg", smg=SmgSpec(0.3, 64, 1.5)),
    "smg-1.13": RoutingSpec("smg", smg=SmgSpec(0.3, 64, 1.5, "backend")),
}
"""Name -> how to route; order of the weights is prefix:queue:kv."""
