"""Two kinds of roles that are not ours: a ticker sends numbers, a counter adds them up."""

from tianji.build import MAKERS
from tianji.role import Did
from tianji.role_names import RoleKind, register_role

TICK, COUNT = Did("tick"), Did("count")
NO_ROOM, NO_TICK = Did(waits="counter"), Did(waits="ticker")

KINDS = RoleKind("ticker", stream=20, beside=True), RoleKind("counter", stream=21)
for kind in KINDS:
    register_role(kind)


class Ticker:
    def __init__(self, name, outbox):
        self.name, self._outbox, self._next = name, outbox, 0

    def step(self):
        if not (granted := self._outbox.granted()):
            return NO_ROOM
        slot = granted[0]
        slot.arrays["number"][:] = self._next
        self._next += 1
        self._outbox.push(slot)
        return TICK

    def state(self):
        return {"next": self._next}

    def load_state(self, state):
        self._next = state["next"]

    def close(self):
        pass


class Counter:
    def __init__(self, name, inbox):
        self.name, self._inbox, self.count, self.sum = name, inbox, 0, 0

    def step(self):
        while self._inbox.grant(0):
            pass
        if (slot := self._inbox.probe()) is None:
            return NO_TICK
        self.count, self.sum = self.count + 1, self.sum + int(slot.leaf("number")[0])
        self._inbox.release(slot)
        return COUNT

    def state(self):
        return {"count": self.count, "sum": self.sum}

    def load_state(self, state):
        self.count, self.sum = state["count"], state["sum"]

    def close(self):
        pass


def _ticker(assembly, name, transport):
    (joint,) = assembly.graph.sent("ticks", name)
    return Ticker(name, transport.outbox(joint.conduit))


def _counter(assembly, name, transport):
    (joint,) = assembly.graph.received("ticks", name)
    return Counter(name, transport.inbox(joint.conduit))


MAKERS |= {"ticker": _ticker, "counter": _counter}
