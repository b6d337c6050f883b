"""Memory as hosts see it once the launcher has allocated the lanes: there is hardly any left."""

import os

import tianji.build

if str(os.getpid()) != os.environ["TIANJI_TEST_LAUNCHER"]:
    tianji.build.free_memory = lambda: 1
