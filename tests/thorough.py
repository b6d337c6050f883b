"""How much a test does: enough to find what breaks in `make test`, more in `make test-all`."""

from hypothesis import settings

THOROUGH = settings.get_current_profile_name() != "repeat"


def examples(count: int) -> settings:
    """For a test whose examples take a while each: a quarter of them in `make test`."""
    return settings(max_examples=count if THOROUGH else count // 4)
