"""The selectable policies, one file per family; design section 8 and prior-art.md have the formulas.

Must never hold state: a policy is a pure function of the candidates, the request and its settings.
"""

from gateway.core.policies.affinity import AFFINITY, CHWBL, PREBLE, SMG
from gateway.core.policies.base import Policy, pick
from gateway.core.policies.seconds import COST
from gateway.core.policies.simple import LEAST_REQUESTS, POWER_OF_TWO, RANDOM, ROUND_ROBIN
from gateway.core.policies.tokens import DYNAMO, LMETRIC
from gateway.core.policies.weighted import WEIGHTS

__all__ = ["POLICIES", "Policy", "pick", "policy_named"]

_ALL = (
    COST,
    WEIGHTS,
    AFFINITY,
    SMG,
    DYNAMO,
    LMETRIC,
    PREBLE,
    CHWBL,
    LEAST_REQUESTS,
    POWER_OF_TWO,
    ROUND_ROBIN,
    RANDOM,
)
POLICIES = {policy.name: policy for policy in _ALL}


def policy_named(name: str) -> Policy:
    """Return the policy called `name`; ValueError lists the known ones."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(f"unknown policy {name!r}: one of {', '.join(POLICIES)}") from None
