"""How hypothesis draws in every run of the suite: the same examples, and nothing decided by time.

A run that decides whether a change lands must end the same way twice. To look for new examples:
`HYPOTHESIS_PROFILE=explore python -m pytest tests/property --hypothesis-seed=N`.
"""

import os

from hypothesis import HealthCheck, settings

UNTIMED = [HealthCheck.too_slow]  # it measures the machine, as a deadline does
settings.register_profile(
    "same", derandomize=True, database=None, deadline=None, suppress_health_check=UNTIMED
)
settings.register_profile(
    "explore",
    derandomize=False,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=UNTIMED,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
