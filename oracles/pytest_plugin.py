"""Conformance tests inside a kernel author's own suite; a pytest plugin that installs with the package.

``pytest --mla-backend pkg.module:NAME`` adds one test for each problem, oracle and stage of that backend's
matrix; so does ``@pytest.mark.mla_conformance(backend=...)`` on a test function, which is then called after
each claim that held. Such a test is run alone by its id, ``pytest mla-verify::pkg.module:NAME/…``. Nothing of
the package is imported, and nothing changes, unless one of them is used.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from oracles.claims import Claim, Selection
    from oracles.verdict import Verdict

MARKER = "mla_conformance"
ARGUMENT = "mla_claim"  # the parameter that marked functions are given
PROPERTY = "mla_backend"  # of a test's report: whose claim it held
FILE = "mla-verify"  # where tests are that no file holds

NAMES = ("problem", "preset", "format", "oracle")

# What of ``FILE`` was asked for by name.
_NAMED = pytest.StashKey[list[str]]()

# By what is judged together: the oracles that were chosen, and the verdicts so far.
_WANTED = pytest.StashKey[dict[tuple["Selection", str, str], list[str]]]()
_JUDGED = pytest.StashKey[dict[tuple["Selection", str, str], list["Verdict"]]]()


class Known(NamedTuple):
    """A failure that the kernel's author expects: a pattern of claims, why, and where it is written."""

    pattern: str
    reason: str
    where: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, and the same in a configuration file, which they take precedence of."""
    group = parser.getgroup("mla-verify", "conformance of attention kernels")
    group.addoption(
        "--mla-backend",
        action="append",
        metavar="MODULE:NAME",
        help="hold this Backend to every claim; repeatable",
    )
    for name in NAMES:
        group.addoption(f"--mla-{name}", action="append", help=f"only this {name}; repeatable")
    group.addoption(
        "--mla-case", action="append", metavar="FILE", help="a recording or a case besides; repeatable"
    )
    group.addoption("--mla-device", help="where kernels run: cpu, cuda, cuda:1 (default: cpu)")
    group.addoption("--mla-seed", type=int, help="everything random follows from it (default: 0)")
    group.addoption(
        "--mla-cases", type=int, metavar="N", help="so many drawn cases besides the matrix (default: 0)"
    )
    group.addoption(
        "--mla-timeout",
        metavar="TIME",
        help="most for one function on one case, such as 60s, in a process of its own; 0: in this one "
        "(default: 10m on a GPU, 0 on a CPU)",
    )
    group.addoption(
        "--mla-full", action="store_true", default=None, help="variants and oracles take no turns"
    )
    group.addoption(
        "--mla-require", action="store_true", default=None, help="fail where a backend is unavailable"
    )
    group.addoption("--mla-xfail", metavar="FILE", help="claims that are known to fail, and why")
    for name in ("backend", "case", *NAMES):
        parser.addini(f"mla_{name}", f"as --mla-{name}", type="args", default=[])
    for name in ("device", "seed", "cases", "timeout", "xfail"):
        parser.addini(f"mla_{name}", f"as --mla-{name}", default="")
    for name in ("full", "require"):
        parser.addini(f"mla_{name}", f"as --mla-{name}", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """The marker is known in every suite, and ``FILE`` is no path to look for."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(backend, problem, preset, format, oracle, case, device, seed, full, cases, require, "
        "timeout): hold a backend of mla-verify to every claim, one test each",
    )
    config.pluginmanager.register(Tally(), "mla-verify-tally")
    ours = [arg for arg in config.args if arg.partition("::")[0] == FILE]
    config.stash[_NAMED] = [arg.partition("::")[2] for arg in ours]
    if not _only_hands_out(config):  # whoever does passes the words on
        config.args[:] = [arg for arg in config.args if arg not in ours]


def _only_hands_out(config: pytest.Config) -> bool:
    return config.getoption("dist", "no") != "no" and not _is_worker(config)


class Tally:
    """Whether anything ran: a suite whose every claim was skipped has shown nothing."""

    def __init__(self) -> None:
        self.ran: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one test, wherever it ran."""
        for name, backend in report.user_properties:
            if name == PROPERTY and report.when in ("setup", "call"):
                skipped = report.when == "setup" or (report.skipped and not hasattr(report, "wasxfail"))
                self.ran[str(backend)] = self.ran.get(str(backend), False) or not skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nothing ran is a failure."""
        if self.idle and session.exitstatus == pytest.ExitCode.OK and not _is_worker(session.config):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def idle(self) -> list[str]:
        """The backends, if not one of them ran."""
        return [] if any(self.ran.values()) else list(self.ran)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say so."""
        for backend in self.idle:
            terminalreporter.write_line(f"mla-verify: {backend}: nothing ran", red=True)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # one of pytest-xdist's


def _option(config: pytest.Config, name: str) -> Any:
    """What the command line says, or else the configuration file."""
    given = config.getoption(f"mla_{name}")
    return config.getini(f"mla_{name}") if given is None else given


def _selection(config: pytest.Config, backend: str, **changed: Any) -> Selection:
    """Raises: ValueError naming a keyword of the marker that does not exist."""
    from oracles.claims import Selection

    if unknown := sorted(set(changed) - set(Selection._fields)):
        known = ", ".join(Selection._fields)
        raise ValueError(f"{MARKER}: {unknown[0]!r} is not one of {known}")
    values = {name: _option(config, name) for name in Selection._fields[1:]} | changed
    for name in ("case", *NAMES):
        values[name] = tuple([values[name]] if isinstance(values[name], str) else values[name])
    values["case"] = tuple(_found(config, name) for name in values["case"])
    values["device"] = values["device"] or "cpu"
    for name in ("seed", "cases"):
        values[name] = _whole(name, values[name])
    return Selection(backend, **values)


def _whole(name: str, value: Any) -> int:
    """Raises: ValueError, of a configuration file's text or a marker's value."""
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        raise ValueError(f"mla_{name} is {value!r}, must be an integer") from None


def _found(config: pytest.Config, name: str) -> str:
    """A file beside the caller, or else beside the configuration."""
    for folder in (config.invocation_params.dir, config.rootpath):
        if not name.startswith("{") and (folder / name).is_file():
            return str(folder / name)
    return name


def _claims(config: pytest.Config, backend: str, **changed: Any) -> list[Claim]:
    """Raises: ValueError in one line."""
    from oracles.claims import claims_of
    from oracles.exits import said

    # Where the command line looks too: a kernel beside the configuration need not be installed.
    for folder in (str(config.rootpath), str(config.invocation_params.dir)):
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        return claims_of(_selection(config, backend, **changed))
    except OSError as error:
        raise ValueError(said(error)) from None


class ConformanceItem(pytest.Item):
    """A claim that no function of the suite stands for."""

    def __init__(self, *, claim: Claim, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.claim = claim
        self.add_marker(MARKER)
        self.extra_keyword_matches.add(FILE)  # -k looks at names, of which the id shows one more

    def runtest(self) -> None:
        """Judge."""
        _hold(self, self.claim)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where it is said to be."""
        return self.config.rootpath, None, self.claim.name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A marked function is a test for each claim of its backends."""
    markers = list(metafunc.definition.iter_markers(MARKER))
    if not markers:
        return
    claims: list[Claim] = []
    for marker in markers:
        named = dict(marker.kwargs)
        backends = named.pop("backend", marker.args[0] if marker.args else None)
        backends = backends or _option(metafunc.config, "backend")
        if not backends:
            raise pytest.Collector.CollectError(f"{MARKER}: names no backend")
        try:
            for backend in [backends] if isinstance(backends, str) else backends:
                claims += _claims(metafunc.config, backend, **named)
        except ValueError as error:
            raise pytest.Collector.CollectError(str(error)) from None
    if ARGUMENT not in metafunc.fixturenames:
        metafunc.fixturenames.append(ARGUMENT)
    metafunc.parametrize(ARGUMENT, claims, ids=[claim.name for claim in claims])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """A marked function is called once its claim held."""
    if (claim := _claim(pyfuncitem)) is not None:
        _hold(pyfuncitem, claim)


def _claim(item: pytest.Item) -> Claim | None:
    if isinstance(item, ConformanceItem):
        return item.claim
    spec = getattr(item, "callspec", None)
    claim: Claim | None = spec.params.get(ARGUMENT) if spec is not None else None
    return claim


def _hold(item: pytest.Item, claim: Claim) -> None:
    """Raises: what pytest takes for a failure or a skip."""
    from oracles.claims import judged, outcome_of

    stash, key = item.session.stash, _together(claim)
    if key not in stash[_JUDGED]:
        stash[_JUDGED][key] = judged(claim, stash[_WANTED][key])
    failed, skipped = outcome_of(claim, stash[_JUDGED][key])
    if failed:
        pytest.fail(failed, pytrace=False)
    if skipped:
        pytest.skip(skipped)


def _together(claim: Claim) -> tuple[Selection, str, str]:
    """Claims that are judged at once, since they look at the same runs."""
    return claim.selection, claim.problem, claim.stage


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A marked test that no claim could be given to must not pass for one."""
    if item.get_closest_marker(MARKER) is not None and _claim(item) is None:
        where = "methods of unittest.TestCase take no parameters" if _of_unittest(item) else "is no function"
        pytest.fail(f"{MARKER}: {item.name} holds no claim: {where}", pytrace=False)


def _of_unittest(item: pytest.Item) -> bool:
    unittest = sys.modules.get("unittest")
    return unittest is not None and issubclass(getattr(item, "cls", None) or object, unittest.TestCase)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests of backends that were named before any are chosen, and mark the failures that are known.

    Raises: UsageError in one line; one of pytest-xdist's workers, which may not, says it like a broken file.
    """
    try:
        items += _added(session, config, items)
        ours = [(item, claim) for item in items if (claim := _claim(item)) is not None]
        for item, claim in ours:
            item.user_properties.append((PROPERTY, claim.selection.backend))
            if config.pluginmanager.hasplugin("xdist"):  # whose mark it is
                group = f"{claim.selection.backend}/{claim.problem}/{claim.stage}"
                item.add_marker(pytest.mark.xdist_group(group))
        if ours:
            _expect(config, ours)
    except pytest.UsageError as error:
        if not _is_worker(config):
            raise
        items.clear()
        config.hook.pytest_collectreport(report=pytest.CollectReport(FILE, "failed", str(error), []))


def _added(
    session: pytest.Session, config: pytest.Config, items: Sequence[pytest.Item]
) -> list[ConformanceItem]:
    """Tests of backends that the command line or a configuration file names.

    A claim that a marked function stands for is not added again.
    """
    added: list[ConformanceItem] = []
    taken: set[Claim] = set()
    for backend in _backends(config):
        taken = taken or {claim for item in items if (claim := _claim(item)) is not None}
        chosen = [name for name in config.stash[_NAMED] if name.partition("/")[0] == backend]
        try:
            claims = _claims(config, backend)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        for name in chosen:
            if not any(_below(claim, name) for claim in claims):
                raise pytest.UsageError(f"not found: {FILE}::{name}")
        added += [
            ConformanceItem.from_parent(session, name=claim.name, nodeid=f"{FILE}::{claim.name}", claim=claim)
            for claim in claims
            if claim not in taken and (not chosen or any(_below(claim, name) for name in chosen))
        ]
    if added:
        # For whoever counts what was collected.
        report = pytest.CollectReport(FILE, "passed", None, list(added))
        config.hook.pytest_collectreport(report=report)
    return added


def _below(claim: Claim, name: str) -> bool:
    """Whether a claim has a name, or one that goes on after a "/"."""
    return f"{claim.name}/".startswith(f"{name.rstrip('/')}/")


def _backends(config: pytest.Config) -> list[str]:
    """Whose tests are added.

    Those in a configuration file are part of the suite: where single files or tests of it are asked for,
    they are not.
    """
    ids = config.stash[_NAMED]
    named = [name.partition("/")[0] for name in ids if name]
    given = config.getoption("mla_backend")
    if given is None and len(named) == len(ids) and (ids or _singled_out(config)):
        given = ()
    given = config.getini("mla_backend") if given is None else given
    return list(dict.fromkeys([*given, *named]))


def _singled_out(config: pytest.Config) -> bool:
    """Whether a file or a test was asked for, not folders alone."""
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return False
    words = [arg for arg in config.args if arg not in config.getini("testpaths")]
    return any("::" in arg or (config.invocation_params.dir / arg).is_file() for arg in words)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of claims that are judged together, judge those that were chosen."""
    wanted: dict[tuple[Selection, str, str], list[str]] = {}
    for item in session.items:
        if (claim := _claim(item)) is not None:
            wanted.setdefault(_together(claim), []).append(claim.oracle)
    session.stash[_WANTED] = {key: list(dict.fromkeys(oracles)) for key, oracles in wanted.items()}
    session.stash[_JUDGED] = {}


def _expect(config: pytest.Config, ours: Sequence[tuple[pytest.Item, Claim]]) -> None:
    """Raises: UsageError on an expected failure that no claim of its backend has the name of."""
    name = _option(config, "xfail")
    if not name:
        return
    names = {claim.name: claim for _, claim in ours}
    for known in _read(config.rootpath / _found(config, name)):
        matched = [(item, claim) for item, claim in ours if fnmatch.fnmatchcase(claim.name, known.pattern)]
        for item, _ in matched:
            item.add_marker(pytest.mark.xfail(reason=known.reason, strict=True))
        backend = known.pattern.partition("/")[0]
        whole = [c for c in names.values() if fnmatch.fnmatchcase(c.selection.backend, backend)]
        narrowed = any(c.selection.problem or c.selection.oracle for c in whole)
        if whole and not matched and not narrowed:
            raise pytest.UsageError(f"{known.where}: {known.pattern!r} is the name of no test")


def _read(path: Path) -> Iterator[Known]:
    """Raises: UsageError naming the line that has no reason."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--mla-xfail {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        pattern, _, reason = line.strip().partition(" ")
        if not pattern or pattern.startswith("#"):
            continue
        if not reason.strip():
            raise pytest.UsageError(f"{path}:{number}: {pattern!r} has no reason")
        yield Known(pattern, reason.strip(), f"{path}:{number}")
