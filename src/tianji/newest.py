"""The newest params that a policy acts with: copied, or loaded from where they lie."""

from __future__ import annotations

from tianji.algorithm import Acting, Copying
from tianji.channel import Subscriber
from tianji.types import Params

MOST_TORN = 3
"""leases in a row that may be torn; then the params are copied, which is quicker than a load"""


class Newest:
    """Takes the newest params into a policy. One that copies what it loads is lent the sender's
    memory, and loads again where that was overwritten meanwhile; for others there is a copy."""

    def __init__(self, snapshots: Subscriber | None, policy: Acting) -> None:
        """`snapshots`: None where the policy is elsewhere and has its own."""
        self.version = -1
        """of the params that the policy has; -1 before the first"""
        self.leases = (
            snapshots is not None
            and snapshots.leases
            and isinstance(policy, Copying)
            and policy.copies
        )
        """is there no copy?"""
        self._snapshots = snapshots
        self._policy = policy
        self._params: Params | None = None

    @property
    def params(self) -> Params:
        """The copy."""
        if self._params is None:
            self._params = Params({} if self._snapshots is None else self._snapshots.layout)
        return self._params

    def take(self) -> bool:
        """Load a newer version, if there is one."""
        if self._snapshots is None:
            return False
        for _ in range(MOST_TORN if self.leases else 0):
            if (lease := self._snapshots.lease(self.version)) is None:
                return False
            self._policy.load(lease.params)
            if lease.give_back():
                self.version = lease.version
                return True
        newest = self._snapshots.probe(self.version, self.params)
        if newest == self.version:
            return False
        self.version = newest
        self._policy.load(self.params)
        return True
