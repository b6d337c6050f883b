"""One thread for each process, as a run has it, since spinning threads make tests slow; and the
processes that runs share, since imports do."""

import contextlib
import functools
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

import pytest
import torch
from hypothesis import settings
from servers import Servers

from tianji.record import Recorder

torch.set_num_threads(1)

# A shell that runs the tests in the background ignores these, and so would every run in them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples every time, and no deadline on a busy machine; HYPOTHESIS_PROFILE=all has more
# of them where they take long, and HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("all", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(autouse=True)
def _one_thread():
    """A run of a test may have set more of them."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def servers():
    with contextlib.closing(Servers()) as servers:
        yield servers


@pytest.fixture(scope="module")
def one_server(servers):
    """The runs of a module share the process that hosts are forked from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tianji.run.ForkServer", servers)
        yield servers


@pytest.fixture(scope="module")
def told_soon():
    """The runs of a module write rows and tables of hosts more often, as its tests wait for
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tianji.run.Recorder", functools.partial(Recorder, interval=0.2))
        patch.setattr("tianji.engines.hosts.TABLE", 0.1)
        yield
