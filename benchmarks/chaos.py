"""What is promised of a run whose processes are killed, stopped or told to end, and what is seen.

    python benchmarks/chaos.py [--only TEXT] [--promises]

Every case of tests/processes/chaos.py, one after the other: a real `tianji train` with two actors
and an evaluator. Seconds to recover are from the deed (of SIGSTOP, from its end) to the first
update of a run that is whole again; where the run ends by it, to the end of its last process.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from measure import RESULTS, ROOT, save, table

sys.path.insert(0, str(ROOT / "tests" / "processes"))

from chaos import INJECTED, MATRIX, happen, promise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases that have this in them; others are kept")
    parser.add_argument("--promises", action="store_true", help="print what is promised, and end")
    arguments = parser.parse_args()
    cases = [case for case in (*MATRIX, *INJECTED) if arguments.only in str(case)]
    if arguments.promises:
        promises = [(case, promise(case.deed, case.role, case.phase)) for case in cases]
        print(table(("case", "exit code", ""), [(c, p.code, p.says) for c, p in promises]))
        return
    path = RESULTS / "chaos.json"
    earlier = json.loads(path.read_text())["cases"] if arguments.only and path.exists() else []
    rows = {(r["deed"], r["role"], r["phase"]): r for r in earlier}
    for case in cases:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            row = happen(case, Path(place)).row()
        rows[case.deed, case.role, case.phase] = row
        took = time.monotonic() - begun
        print(f"{'ok ' if row['ok'] else 'BAD'} {case}: {row['seen']} ({took:.1f} s)", flush=True)
    order = [(c.deed, c.role, c.phase) for c in (*MATRIX, *INJECTED)]
    results = [rows[key] for key in order if key in rows]
    kept = sum(row["ok"] for row in results)
    print(f"{kept} of {len(results)} promises are kept")
    print(save("chaos", {"cases": results}))
    if kept < len(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
