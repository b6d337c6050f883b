"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tianji.result import Result

SHIPPED, FOLDER = "the name of a shipped one", "a run folder"
OVERRIDES = "dotted keys of the config and their values, such as seed=3 algorithm.gamma=0.98"

EXITS = """exit codes:
  0    a stop condition holds        1    failed after the first step
  2    refused before the first step 75   stopped by SIGTERM or SIGUSR1, with a checkpoint
  130  Ctrl-C, with a checkpoint
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    _use_one_thread()
    from tianji.errors import Failure, Refusal

    if not hasattr(arguments, "command"):
        parser().print_help()
        return 2
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except Refusal as error:
        return _ended(arguments, "refused", error, 2)
    except Failure as error:
        return _ended(arguments, "failed", error, 1)
    except KeyboardInterrupt:
        kept = (
            "; the last checkpoint, if there is one, is kept"
            if command in (_train, _resume)
            else ""
        )
        print(f"interrupted at once{kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:  # of the terminal or the disk: nothing that a traceback would explain
        return _ended(arguments, "failed", error, 1)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """Overrides may also stand behind options, where argparse alone would not take them."""
    top = parser()
    arguments, rest = top.parse_known_args(argv)
    misplaced = [word for word in rest if word.startswith("-") or "=" not in word]
    if rest and (misplaced or not hasattr(arguments, "overrides")):
        top.error(f"unrecognized arguments: {' '.join(misplaced or rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def parser() -> argparse.ArgumentParser:
    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30)

    top = argparse.ArgumentParser(
        prog="tianji",
        description="Train reinforcement-learning agents from config files.",
        epilog="start here:\n  tianji train ppo_cartpole\n  tianji list\n\n" + EXITS,
        formatter_class=formatter,
    )
    top.add_argument("--version", action=_Version, help="print the version and end")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=False)

    def add(
        name: str,
        command: Callable[[argparse.Namespace], int],
        about: str,
        more: str = "",
        config: str = "",
        run: str = "",
    ) -> argparse.ArgumentParser:
        """`config`, `run`: what is to be named as such."""
        sub = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=more,
            formatter_class=formatter,
        )
        sub.set_defaults(command=command, json=False)
        if config:
            sub.add_argument("config", metavar="CONFIG", help=f"a TOML file, or {config}")
            sub.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
        if run:
            sub.add_argument("run", metavar="RUN", help=run)
        return sub

    train = add(
        "train",
        _train,
        "train from a config file",
        "examples:\n"
        "  tianji train configs/ppo_cartpole.toml\n"
        "  tianji train ppo_cartpole seed=3 stop.return=300 --name first\n\n" + EXITS,
        config=SHIPPED,
    )
    train.add_argument("--name", help="the run folder's name (default: config, time and seed)")
    train.add_argument("--runs", default="runs", help="where run folders are made (default: runs)")
    train.add_argument("--plan", metavar="FILE", help="spread the roles as this plan.json says")

    resume = add(
        "resume",
        _resume,
        "go on with a run from its checkpoint",
        "examples:\n"
        "  tianji resume runs/first\n  tianji resume runs/first stop.steps=2000000\n\n" + EXITS,
        run=FOLDER,
    )
    resume.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="of [stop], [eval], [checkpoint], [faults], and of [scale] engine, pin, env_threads, "
        "rebalance: when it ends, what it keeps, where it runs",
    )
    _add_checkpoint(resume)

    profile = add(
        "profile",
        _profile,
        "measure what this machine does with a config, in at most 45 s",
        "examples:\n  tianji profile ppo_pong\n\nThe result is kept, and `tianji plan` uses it.\n",
        config="a shipped one's name",
    )

    plan = add(
        "plan",
        _plan,
        "say how many actors and learner cores are best, what they will do, and why",
        "examples:\n"
        "  tianji plan ppo_pong\n"
        "  tianji plan ppo_pong --what-if actors=16\n"
        "  tianji plan ppo_pong --save plan.json; tianji train ppo_pong --plan plan.json\n\n"
        "Without a profile it measures one first, in at most 45 s.\n",
        config=SHIPPED,
    )
    plan.add_argument("--cores", type=_count, help="use so many (default: all that there are)")
    plan.add_argument("--gpus", type=int, choices=(0, 1), help="0: learn on a CPU; 1: on a GPU")
    plan.add_argument(
        "--groups",
        type=_count,
        help="choose up to so many groups, each with batches of its own to learn from (default: as "
        "many as the config has)",
    )
    plan.add_argument(
        "--what-if", action="append", default=[], metavar="K=V",
        help="only predict, with this of the config changed: actors, envs (of each actor), "
        "rollout_length, cores, learners, groups, engine; once for each",
    )  # fmt: skip
    plan.add_argument("--profile", type=Path, metavar="FILE", help="plan from this profile")
    plan.add_argument("--again", action="store_true", help="measure anew")
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan, for train --plan")
    plan.add_argument("--json", action="store_true", help="print one JSON object, last")

    about = "play whole episodes greedily and report their returns"
    evaluate = add("eval", _eval, about, run=FOLDER)
    evaluate.add_argument("--episodes", type=_count, default=10, help="how many (default: 10)")
    evaluate.add_argument("--seed", type=_whole, default=0, help="of the episodes (default: 0)")
    _add_checkpoint(evaluate)

    play = add("play", _play, "show one episode: in a window, or as a GIF or MP4", run=FOLDER)
    play.add_argument("--video", metavar="FILE", type=Path, help="write FILE, .gif or .mp4")
    play.add_argument("--seed", type=_whole, default=0, help="of the episode (default: 0)")
    _add_checkpoint(play)

    explain = add(
        "explain",
        _explain,
        "explain a run on one page: where its time went, what bounded it, what to change",
        "examples:\n"
        "  tianji explain runs/first\n  tianji explain runs/first --html first.html --open\n",
        run="a run folder, in whatever state it is",
    )
    explain.add_argument(
        "--html", metavar="FILE", type=Path, help="write the page here (default: RUN/report.html)"
    )
    explain.add_argument(
        "--markdown", metavar="FILE", type=Path, help="the same as text (default: RUN/report.md)"
    )

    compare = add(
        "compare",
        _compare,
        "train with several presets, one after the other, and show them side by side",
        "examples:\n"
        "  tianji compare ppo_cartpole scale.actors=2 --presets sync,periodic,tianji\n"
        "  tianji compare dqn_cartpole scale.actors=2 algorithm.warmup=2048 --presets "
        "sync,tianji,apex --seeds 3\n\n" + EXITS,
        config="a shipped one's name",
    )
    compare.add_argument(
        "--presets",
        required=True,
        metavar="A,B,...",
        help="values of scale.relax, and serial: one process (`tianji list` names them)",
    )
    compare.add_argument(
        "--seconds", type=float, help="of each run, at most (default: the config's [stop])"
    )
    compare.add_argument("--seeds", type=_count, default=1, help="runs of each (default: 1)")
    compare.add_argument(
        "--runs", default="runs", help="where the folder of the comparison is made (default: runs)"
    )
    compare.add_argument("--name", help="that folder's name (default: config and time)")
    compare.add_argument(
        "--skip", action="store_true", help="leave presets out that cannot be, and say why"
    )

    about = "print the resolved config: each key, its value, origin, meaning"
    show = add("show", _show, about, config=SHIPPED)

    listing = add("list", _list, "list algorithms, presets, shipped configs and environments")

    ps = add(
        "ps",
        _ps,
        "list the processes of running runs: role, pid, cores, state, steps/s, CPU, memory",
        "examples:\n  tianji ps\n  tianji ps runs/first --json\n",
    )
    ps.add_argument("run", metavar="RUN", nargs="?", help="a run folder (default: all in --runs)")
    ps.add_argument("--runs", default="runs", help="where to look for runs (default: runs)")
    ps.add_argument("--json", action="store_true", help="print one JSON list")

    trace = add(
        "trace",
        _trace,
        "draw a run's timeline: what every role did and whom it waited for, as a page and for "
        "Perfetto",
        "examples:\n"
        "  tianji trace runs/first\n"
        "  tianji trace runs/first --html timeline.html --open\n\n"
        "RUN/trace.html opens in any browser, RUN/trace.json at https://ui.perfetto.dev. They hold "
        "the\nnewest events of every process, also of a run that is still going on.\n",
        run=FOLDER,
    )
    trace.add_argument(
        "--html", metavar="FILE", type=Path, help="where the page goes (default: RUN/trace.html)"
    )
    trace.add_argument(
        "--perfetto",
        metavar="FILE",
        type=Path,
        help="where the events go; compressed if it ends with .gz (default: RUN/trace.json)",
    )

    doctor = add("doctor", _doctor, "say what works on this machine and what to install")

    for sub in (explain, compare, trace):
        sub.add_argument("--open", action="store_true", help="show the page in a browser")
    for sub in (train, resume, compare):
        sub.add_argument(
            "--json", action="store_true", help="print one JSON object as the last line of stdout"
        )
        sub.add_argument(
            "--plain", action="store_true", help="plain lines instead of the live view"
        )
    for sub in (profile, evaluate, explain, show, listing, trace, doctor):
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    return top


class _Version(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        import tianji

        print(f"tianji {tianji.__version__}")
        parser.exit()


def _add_checkpoint(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--checkpoint",
        default="latest",
        metavar="WHICH",
        help="latest (default), best, or a folder's name such as step_000000004096",
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def _train(arguments: argparse.Namespace) -> int:
    return _run(
        arguments,
        lambda view, age: _module("run").train(
            arguments.config,
            arguments.overrides,
            name=arguments.name,
            runs=arguments.runs,
            plan=arguments.plan,
            view=view,
            age=age,
        ),
    )


def _resume(arguments: argparse.Namespace) -> int:
    return _run(
        arguments,
        lambda view, age: _module("run").resume(
            arguments.run, arguments.overrides, checkpoint=arguments.checkpoint, view=view, age=age
        ),
    )


def _use_one_thread() -> None:
    """Before numpy and torch are imported: pools that spin on shared cores cost 3 to 18 times.
    torch's own threads are set later, from scale.cores."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _run(arguments: argparse.Namespace, go: Callable[[Any, Any], Result]) -> int:
    from tianji.machine import process_age
    from tianji.view.status import SilentView
    from tianji.view.terminal import choose_view

    # With --json, stdout is for the one object: the view goes to stderr.
    stream = sys.stderr if arguments.json else sys.stdout
    view = choose_view(stream, arguments.plain) if stream is not None else SilentView()
    result = go(view, process_age)
    _print(arguments, result.tree(), lambda: _told(result))
    return result.exit_code


def _print(
    arguments: argparse.Namespace, tree: object, told: Callable[[], str | Iterable[str]]
) -> None:
    """What a command found: as JSON where that is asked for, else in words or lines."""
    if arguments.json:
        print(json.dumps(tree))
        return
    found = told()
    for line in [found] if isinstance(found, str) else found:
        print(line)


def _told(result: Result) -> list[str]:
    from tianji.view.status import human

    against, explain = _module("against"), _module("explain")
    folder = Path(result.run_dir)

    mean = "no episode has ended"
    if result.return_mean is not None:
        last = min(result.episodes, 100)
        mean = f"{result.return_mean:.4g} (mean of the last {last} episodes of {result.episodes})"
    words = {"done": "done", "interrupted": "interrupted, saved", "stopped": "stopped, saved"}
    lines = [
        f"{words[result.status]}: {result.stop_reason}",
        f"  return      {mean}",
        f"  steps       {human(result.steps)} in {result.updates} updates",
        f"  time        {result.wall_s:.1f} s, of which {result.start_s:.1f} s to the first step",
        f"  steps/s     {human(result.steps_per_s['received'])} received, "
        f"{human(result.steps_per_s['consumed'])} consumed",
        f"  run folder  {result.run_dir}",
    ]
    if result.win_rate is not None:
        lines.insert(2, f"  won         {result.win_rate:.0%} of them")
    if predicted := against.predicted_speed(folder):
        received = result.steps_per_s["received"]
        measured = against.new_speed(received, result.filtered, result.steps)
        error = f" (error {predicted / measured - 1:+.0%})".replace("%", " %") if measured else ""
        lines.insert(-1, f"  plan        {human(predicted)} new steps/s predicted, "
                         f"{human(measured)} measured{error}")  # fmt: skip
    if result.verdict:
        lines.insert(-1, f"  bottleneck  {result.verdict}")
    if result.filtered:
        lines.insert(-1, f"  filtered    {human(result.filtered)} steps, too stale to be consumed")
    if explain.has_report(folder):
        lines.append(f"  report      {folder / explain.REPORT_HTML}")
    if result.resumed:
        lines.append(f"  resumed     {result.resumed}")
    lines += [f"  {name.replace('_', ' ')}: {value}" for name, value in result.notes.items()]
    run = shlex.quote(result.run_dir)
    if not (folder / "checkpoints" / "latest").exists():
        lines.append("nothing was saved: there is no checkpoint to go on from")
    elif result.status == "done":
        lines.append(f"next: tianji eval {run}")
    else:
        lines.append(f"go on with: tianji resume {run}")
    return lines


def _eval(arguments: argparse.Namespace) -> int:
    trained = _module("trained").load(arguments.run, arguments.checkpoint)
    episodes = trained.evaluate(arguments.episodes, arguments.seed)
    returns, lengths = episodes["return"].tolist(), episodes["length"].tolist()
    mean = sum(returns) / len(returns)
    spread = (sum((r - mean) ** 2 for r in returns) / len(returns)) ** 0.5
    wins = [win for win in episodes["win"].tolist() if win >= 0]
    found = {
        "run_dir": str(trained.run),
        "version": trained.version,
        "episodes": len(returns),
        "return_mean": mean,
        "return_std": spread,
        "return_min": min(returns),
        "return_max": max(returns),
        "length_mean": sum(lengths) / len(lengths),
        "returns": returns,
        "lengths": lengths,
    }
    told = [
        f"{len(returns)} episodes of {trained.config.env.id}, version {trained.version}",
        f"  return {mean:.4g} ± {spread:.3g} (from {min(returns):.4g} to {max(returns):.4g})",
        f"  length {found['length_mean']:.1f} steps",
    ]
    if wins:
        found["win_rate"] = sum(wins) / len(wins)
        told.append(f"  won {found['win_rate']:.0%}")
    _print(arguments, found, lambda: told)
    return 0


def _play(arguments: argparse.Namespace) -> int:
    trained = _module("trained")
    frames, total = trained.load(arguments.run, arguments.checkpoint).frames(arguments.seed)
    if arguments.video is None:
        trained.show_window(frames)
        print(f"return {total:.4g}")
    else:
        trained.write_video(arguments.video, frames)
        print(f"{arguments.video}: {len(frames)} frames, return {total:.4g}")
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    config = _module("config").load_config(arguments.config, arguments.overrides)
    profiles = _module("profile")
    found = _measured(config)
    path = profiles.save(found, config)
    kept = f"kept in {path}\n" if path else ""
    words = shlex.join([arguments.config, *arguments.overrides])
    _print(
        arguments,
        found.tree(),
        lambda: f"{profiles.told(found)}\n\n{kept}next: tianji plan {words}",
    )
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    from tianji.errors import Refusal

    config, profiles, planner = (_module(m) for m in ("config", "profile", "planner"))
    overrides = list(arguments.overrides)
    if arguments.what_if and arguments.save is not None:
        raise Refusal(
            "--what-if asks the model about one way to spread a run, which is no plan, so that "
            "--save would have nothing to keep. Leave one of them out."
        )
    if arguments.what_if and arguments.groups is not None:
        raise Refusal(
            "--groups says how many a plan may choose, and --what-if chooses nothing, so that it "
            f"would do nothing. Ask --what-if groups={arguments.groups}."
        )
    if arguments.again and arguments.profile is not None:
        raise Refusal(
            f"--again measures, and --profile {arguments.profile} was measured, so that one of "
            f"them would do nothing. Leave one of them out."
        )
    if arguments.gpus is not None:
        overrides.append(f"scale.device={'cuda' if arguments.gpus else 'cpu'}")
    loaded = config.load_config(arguments.config, overrides)
    planner.check(loaded, arguments.cores, arguments.what_if, arguments.groups)
    found = None
    if arguments.profile is not None:
        found = profiles.load(arguments.profile, loaded)
    elif not arguments.again:
        found = profiles.cached(loaded)
    if found is None:
        found = _measured(loaded)
        profiles.save(found, loaded)
    if arguments.what_if:
        answer = planner.what_if(loaded, found, arguments.what_if, arguments.cores)
        _print(arguments, planner.tree_of(answer), lambda: planner.told_of(answer, found))
        return 0
    plan = planner.make(loaded, found, arguments.cores, arguments.groups)
    if arguments.save is not None:
        planner.write(arguments.save, planner.tree(plan, found))
    kept = []
    if arguments.save is not None:
        kept = [f"kept        {arguments.save}: tianji train {arguments.config} --plan "
                f"{arguments.save} follows it"]  # fmt: skip
    _print(
        arguments,
        planner.tree(plan, found),
        lambda: [planner.told(plan, found, loaded, arguments.cores), *kept],
    )
    return 0


def _measured(config: Any) -> Any:
    """A whole profile, with a line on the terminal that is overwritten and goes away; elsewhere,
    with a line for each measurement."""
    live = sys.stderr.isatty()
    begin, end = ("\r\x1b[K", "") if live else ("", "\n")

    def say(what: str, left: float) -> None:
        told = f"{begin}measuring {what}: at most {left:.0f} s left"
        print(told, end=end, file=sys.stderr, flush=True)

    def end_now(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # as Ctrl-C: nothing is left behind

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, end_now)
    try:
        return _module("profiler").measure(config, say)
    finally:
        if live:
            print(begin, end="", file=sys.stderr, flush=True)


def _explain(arguments: argparse.Namespace) -> int:
    explain, view = _module("explain"), _module("view.markdown")
    run = Path(arguments.run)
    html = arguments.html or run / explain.REPORT_HTML
    markdown = arguments.markdown or run / explain.REPORT_MARKDOWN
    with _two_files(html, markdown, "--markdown", "there would be no page"):
        found = explain.write(run, html, markdown)
    _print(
        arguments,
        found.tree() | {"html": str(html), "markdown": str(markdown)},
        lambda: [*view.summary(found), f"the page is {html}, as text {markdown}"],
    )
    if arguments.open:
        _show_page(html)
    return 0


@contextlib.contextmanager
def _two_files(html: Path, other: Path, option: str, consequence: str) -> Iterator[None]:
    """Meanwhile these are written. Refused where they are one, or the disk does not take them."""
    from tianji.errors import Refusal

    if html.resolve() == other.resolve():
        raise Refusal(
            f"--html and {option} would both be {html}, so that the second would overwrite the "
            f"first. Give each a file of its own."
        )
    try:
        yield
    except OSError as error:
        raise Refusal(
            f"{error.filename} cannot be written ({error.strerror}), so {consequence}. Choose "
            f"other places with --html and {option}."
        ) from error


def _compare(arguments: argparse.Namespace) -> int:
    from tianji.view.terminal import choose_view

    compare = _module("compare")
    stream = sys.stderr if arguments.json else sys.stdout
    found = compare.compare(
        arguments.config,
        arguments.overrides,
        presets=[name.strip() for name in arguments.presets.split(",") if name.strip()],
        seconds=arguments.seconds,
        seeds=arguments.seeds,
        runs=arguments.runs,
        name=arguments.name,
        skip=arguments.skip,
        say=lambda text: print(text, file=stream, flush=True),
        view=lambda: choose_view(stream, arguments.plain),
    )
    _print(arguments, found.tree(), found.told)
    if arguments.open:
        _show_page(found.html)
    code: int = found.exit_code
    return code


def _show_page(path: Path) -> None:
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        print(f"no browser was found; open {path} yourself", file=sys.stderr)


def _show(arguments: argparse.Namespace) -> int:
    config = _module("config").load_config(arguments.config, arguments.overrides)
    rows = config.rows()
    if arguments.json:
        named = ("value", "origin", "meaning")
        print(json.dumps({key: dict(zip(named, rest, strict=True)) for key, *rest in rows}))
        return 0
    shown = [(k, "-" if v is None else json.dumps(v), o, m) for k, v, o, m in rows]
    wide = [max(len(row[i]) for row in shown) for i in range(3)]
    section = ""
    for row in shown:
        head = row[0].rpartition(".")[0]
        if head != section:
            print(f"\n[{head}]")
            section = head
        key, value, origin = (text.ljust(n) for text, n in zip(row, wide, strict=False))
        print(f"{key}  {value}  {origin}  {row[3]}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    catalogue = _module("catalogue")
    listed = catalogue.catalogue()
    _print(arguments, listed, lambda: catalogue.told(listed))
    return 0


def _ps(arguments: argparse.Namespace) -> int:
    ps = _module("ps")
    rows = ps.hosts(arguments.run, arguments.runs)
    _print(arguments, rows, lambda: ps.told(rows))
    return 0


def _trace(arguments: argparse.Namespace) -> int:
    run = _module("folder").find_run(arguments.run)
    html = arguments.html or run / "trace.html"
    perfetto = arguments.perfetto or run / "trace.json"
    with _two_files(html, perfetto, "--perfetto", "the timeline would be in no file"):
        tracks, broken = _module("trace").salvage(run)
        for why in broken.values():
            print(f"left out: {why}", file=sys.stderr)
        title = f"{run.resolve().name}"
        html.write_text(_module("view.timeline").page(tracks, title), encoding="utf-8")
        _module("view.perfetto").write(tracks, title, perfetto)
    whole = max(float(track.end[-1]) for track in tracks)
    rows = [
        {
            "host": track.host,
            "events": len(track.key),
            "begin": float(track.begin[0]),
            "end": float(track.end[-1]),
        }
        for track in tracks
    ]
    wide = max(len(track.host) for track in tracks)
    told = [
        f"{row['host']:{wide}}  {row['events']} events, from {row['begin']:.3f} s to "
        f"{row['end']:.3f} s of {whole:.3f} s"
        for row in rows
    ]
    told.append(f"page      {html}: open it in a browser")
    told.append(f"perfetto  {perfetto}: open it at https://ui.perfetto.dev")
    about = {"html": str(html), "perfetto": str(perfetto), "hosts": rows, "broken": broken}
    _print(arguments, about, lambda: told)
    if arguments.open:
        _show_page(html)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    doctor = _module("doctor")
    findings = doctor.examine()
    _print(arguments, findings, lambda: doctor.told(findings))
    return 0 if all(f["works"] or not f["needed"] for f in findings) else 1


def _ended(arguments: argparse.Namespace, status: str, error: Exception, code: int) -> int:
    print(f"{status}: {error}", file=sys.stderr)
    if getattr(arguments, "json", False):
        print(json.dumps({"status": status, "error": type(error).__name__, "message": str(error)}))
    return code


def _module(name: str) -> Any:
    """Imported when a command needs it: torch takes a second."""
    import importlib

    return importlib.import_module(f"tianji.{name}")


if __name__ == "__main__":
    sys.exit(main())
