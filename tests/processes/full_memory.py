"""Memory as hosts see it once the launcher has allocated the lanes: there is hardly any left."""

import sys

import tianji.build

if sys.argv[0] == "-c":  # as the process that hosts are forked from was started
    tianji.build.free_memory = lambda: 1
