"""How the newest params come into a policy: by a copy, or from where they lie."""

import numpy as np
import pytest

from tianji.channel import Conduit
from tianji.newest import MOST_TORN, Newest
from tianji.testing.items import params_of
from tianji.transports import shm
from tianji.transports.memory import Memory
from tianji.transports.shm import Shm
from tianji.types import floats

SNAPSHOTS = Conduit("snapshots", "newest", floats({"w": (4,)}))


class Views:
    """Keeps views of what it loads."""

    def load(self, params):
        self.w = params["w"]


class Copies:
    """Copies what it loads; `meanwhile` happens in the middle of it, as often as it says."""

    copies = True

    def __init__(self, meanwhile=lambda: None, times=1):
        self.loads, self._meanwhile, self._times = 0, meanwhile, times

    def load(self, params):
        self.loads += 1
        first = params["w"][:2].copy()
        if self.loads <= self._times:
            self._meanwhile()
        self.w = np.concatenate([first, params["w"][2:]])


@pytest.fixture(params=[Memory, Shm])
def transport(request):
    made = request.param()
    yield made
    made.close()


@pytest.mark.parametrize("policy", [Views, Copies])
def test_each_version_is_loaded_once(transport, policy):
    newest, publisher = Newest(transport.subscriber(SNAPSHOTS), policy()), None
    publisher = transport.publisher(SNAPSHOTS)
    assert not newest.take()
    assert newest.version == -1
    for version in (0, 1, 5):
        publisher.push(version, params_of(SNAPSHOTS, version))
        assert newest.take()
        assert not newest.take()
        assert (newest.version, newest._policy.w.tolist()) == (version, [version] * 4)


def test_a_policy_that_copies_has_the_only_copy(transport):
    newest = Newest(transport.subscriber(SNAPSHOTS), Copies())
    transport.publisher(SNAPSHOTS).push(0, params_of(SNAPSHOTS, 0))
    assert newest.take()
    assert newest.leases
    assert newest._params is None


@pytest.mark.parametrize("times", [1, 2, MOST_TORN, MOST_TORN + 1])
def test_what_was_torn_is_loaded_again(transport, times):
    versions = iter(range(1, 100))

    def overwritten():
        for _ in range(shm.PLACES):
            publisher.push(version := next(versions), params_of(SNAPSHOTS, version))

    policy = Copies(overwritten, times)
    newest = Newest(transport.subscriber(SNAPSHOTS), policy)
    publisher = transport.publisher(SNAPSHOTS)
    publisher.push(0, params_of(SNAPSHOTS, 0))
    assert newest.take()
    assert policy.w.tolist() == [newest.version] * 4
    assert policy.loads == min(times, MOST_TORN) + 1


def test_where_stores_pass_each_other_nothing_is_leased(monkeypatch):
    monkeypatch.setattr(shm, "ORDERED", False)
    transport = Shm()
    newest = Newest(transport.subscriber(SNAPSHOTS), Copies())
    transport.publisher(SNAPSHOTS).push(3, params_of(SNAPSHOTS, 3))
    assert newest._snapshots.lease(-1) is None
    assert newest.take()
    assert newest._policy.w.tolist() == [3] * 4
    transport.close()


def test_without_snapshots_nothing_is_ever_newer():
    newest = Newest(None, Views())
    assert not newest.take()
    assert newest.params.buffer.size == 0
