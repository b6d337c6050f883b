"""What is documented is executed: snippets, commands, links, tables, names in README and docs."""

import ast
import contextlib
import importlib.util
import re
import shlex
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from servers import Servers

import tianji.algorithm
import tianji.env
from tianji.__main__ import EXITS, main, parser
from tianji.build import build
from tianji.config import load_config
from tianji.relax import PRESETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NOT_RUN_AT_MOST = 3
"""blocks that a comment marks as not run: activating a shell, a server that does not end, a profile
of 45 s"""

BLOCK = re.compile(
    r"(?:<!-- (?P<kind>not run|from|file): (?P<note>[^\n]*) -->\n)?"
    r"^```(?P<language>[a-z]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
KEY = re.compile(
    r"`((?:env|algorithm|network|scale|relax|reuse|join|stop|eval|checkpoint|faults)\.[a-z_.]+)"
)
NOT_KEYS = {"env.step", "env.py", "algorithm.py", "relax.py", "join.py", "faults.jsonl"}


@dataclass(frozen=True)
class Block:
    where: str
    language: str
    text: str
    kind: str
    note: str


def blocks(page):
    text = page.read_text()
    return [
        Block(
            f"{page.name}:{text[: match.start('text')].count(chr(10)) + 1}",
            match["language"], match["text"], match["kind"] or "", match["note"] or "",
        )
        for match in BLOCK.finditer(text)
    ]  # fmt: skip


def pages(condition):
    found = [page for page in PAGES if any(condition(block) for block in blocks(page))]
    return pytest.mark.parametrize("page", found, ids=lambda page: page.name)


def runs(block):
    return block.language in ("python", "console", "bash") and not block.kind


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder like the repository's to run in, and nothing left behind in this process. The runs
    of a page share the process that hosts are forked from, which is in that folder, too."""
    for name in ("configs", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    servers = Servers()
    monkeypatch.setattr("tianji.run.ForkServer", servers)
    registries = (tianji.algorithm.ALGORITHMS, tianji.env._FACTORIES)
    before, modules = [dict(registry) for registry in registries], set(sys.modules)
    with contextlib.closing(servers):
        yield tmp_path
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)
    for name in {"corridor", "reinforce", "td0", "snippets", "tianji.testing.faults"} - modules:
        sys.modules.pop(name, None)


@pages(runs)
def test_the_snippets_of_a_page_run_in_their_order(page, checkout, capsys, monkeypatch):
    module = types.ModuleType("snippets")
    sys.modules["snippets"] = module
    for block in filter(runs, blocks(page)):
        if block.language == "python":
            exec(compile(block.text, block.where, "exec"), module.__dict__)
        else:
            for line, output in commands(block):
                run_command(line, output, block.where, capsys, monkeypatch)


def commands(block):
    """Each command of a console block, and the lines that are shown under it."""
    found = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"{block.where}: a console block begins with a command: $ ..."
            found[-1][1].append(line)
    assert found, f"{block.where}: no command"
    return found


def run_command(line, output, where, capsys, monkeypatch):
    words = shlex.split(line)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        assert name == "PYTHONPATH", f"{where}: {name} is not known here"
        monkeypatch.syspath_prepend(value)
    if words[0] == "make":
        for target in words[1:]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
        return
    if words[:2] == ["git", "clone"]:
        return
    assert words[0] == "tianji", f"{where}: `{line}` is not checked. Mark the block as not run."
    capsys.readouterr()
    code = main(words[1:])
    told = "\n".join(capsys.readouterr())
    expected = 2 if any(shown.startswith("refused: ") for shown in output) else 0
    assert code == expected, f"{where}: `{line}` ended with {code}: {told}"
    lines = [general(real) for real in told.splitlines()]
    for shown in output:
        assert any(real.startswith(general(shown)) for real in lines), (
            f"{where}: `{line}` does not print `{shown}`, but: {told}"
        )


def general(line):
    """A line of output with its numbers left open."""
    return re.sub(r"\d[\d.]*( [kMG])?", "#", line).rstrip()


@pages(lambda block: block.language == "toml")
def test_the_configs_of_a_page_can_be_built(page):
    for block in blocks(page):
        if block.language == "toml":
            build(load_config(tomllib.loads(block.text))).close()


@pages(lambda block: block.kind in ("from", "file"))
def test_excerpts_are_what_the_files_hold(page):
    for block in blocks(page):
        if block.kind in ("from", "file"):
            content = (ROOT / block.note).read_text()
            same = block.text == content if block.kind == "file" else block.text in content
            assert same, f"{block.where}: {block.note} has changed. Copy the excerpt again."


def test_what_is_not_run_is_counted():
    marked = [block for page in PAGES for block in blocks(page) if block.kind == "not run"]
    assert len(marked) <= NOT_RUN_AT_MOST, [block.where for block in marked]
    assert all(len(block.note) > 10 for block in marked), "a block that is not run says why"


def test_every_block_is_of_a_kind_that_is_checked():
    for page in PAGES:
        assert page.read_text().count("\n```") == 2 * len(blocks(page)), page.name
        for block in blocks(page):
            assert block.language in ("python", "toml", "console", "bash", ""), block.where


def headings(page):
    """The anchors of a page, as they are made from its headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", BLOCK.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert ROOT in target.parents, f"{page.name}: {link} leads out of the repository"
        assert not anchor or anchor in headings(target), f"{page.name}: {link}"


def test_every_page_is_linked_from_the_readme():
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(links)


def test_every_command_and_exit_code_is_in_the_readme():
    text = (ROOT / "README.md").read_text()
    choices = next(action.choices for action in parser()._actions if action.choices)
    assert len(choices) >= 7
    for command in choices:
        assert f"`tianji {command}" in text, command
    codes = re.findall(r"\b\d+\b(?=  )", EXITS) + re.findall(r"\b75\b", EXITS)
    assert len(codes) >= 5
    for code in codes:
        assert f"\n| {code} |" in text, code


def script(name):
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tables():
    return script("tables")


def test_pictures_are_in_step_with_the_code(capsys):
    assert script("pictures").main(check=True) == 0, capsys.readouterr().out


def test_every_preset_has_a_section_a_picture_and_a_row():
    text = (ROOT / "docs" / "architectures.md").read_text()
    for preset in ("serial", *PRESETS):
        assert f"\n## {preset}\n" in text, preset
        assert f"(architectures/{preset}.svg)" in text, preset
    for preset in PRESETS:
        assert f"\n| `{preset}` |" in text, preset


def test_every_picture_is_shown_on_a_page():
    shown = {
        link for page in PAGES for link in re.findall(r"architectures/\w+\.svg", page.read_text())
    }
    assert shown == {f"architectures/{p.name}" for p in (ROOT / "docs/architectures").glob("*.svg")}


def test_generated_tables_are_in_step_with_the_code(capsys):
    assert tables().main(check=True) == 0, capsys.readouterr().out


def test_the_walk_names_seven_files_and_what_lies_under_them():
    module, text = tables(), (ROOT / "docs" / "walk.md").read_text()
    assert len({path for path, _, _ in module.WALK}) == 7
    for path, owner, names in (*module.WALK, *module.BESIDE):
        assert f"`{path}`" in text, path
        module.lines_of(path, owner, names)


def test_every_method_that_a_page_names_exists():
    known = set()
    for path in (ROOT / "src" / "tianji").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef):
                        known.add(f"{node.name}.{inner.name}")
                    elif isinstance(inner, ast.AnnAssign):
                        known.add(f"{node.name}.{inner.target.id}")
    for page in PAGES:
        if page.name != "migrate.md":  # names of other libraries
            for name in re.findall(r"`([A-Z]\w+\.\w+)", page.read_text()):
                if not name.endswith((".md", ".toml", ".json")):
                    assert name in known, f"{page.name}: {name}"


def test_every_config_key_that_a_page_names_exists():
    known = {"seed"}
    shipped = [name for name, at in tianji.algorithm.ALGORITHMS.items() if isinstance(at, str)]
    for name in shipped:
        tree = {"env": {"id": "CartPole-v1"}, "algorithm": {"name": name}, "stop": {"updates": 1}}
        known |= {row[0] for row in load_config(tree).rows()}
    for page in PAGES:
        for key in KEY.findall(page.read_text()):
            if key not in NOT_KEYS and not key.startswith("env.kwargs."):
                assert key.rstrip(".") in known, f"{page.name}: {key} is no key of a config"
    text = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    listed = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+|seed)` \|", text, re.M))
    assert known <= listed


def test_pages_name_no_place_on_a_machine():
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(home|tmp|root|work|Users|usr)/", page.read_text()), page
