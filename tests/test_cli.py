"""The command line: exit codes, what it prints and writes, and strangers' kernels."""

import importlib.metadata
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from math import inf
from xml.etree import ElementTree

import pytest

from mla_ref.backend import Prepared
from mla_ref.case import Case
from mla_ref.formats import formats
from mla_ref.presets import PRESETS
from mla_ref.problem import problems
from mla_ref.values import REGIMES
from oracles.claims import Claim, Selection, outcome_of
from oracles.command import COMMANDS, main
from oracles.console import describe, distinct, summary
from oracles.exits import WorkersError, printable
from oracles.matrix import OF_ONE_RUN, STAGES, Job, jobs_of, matrix, trials, whose_turn
from oracles.oracle import in_order, rules
from oracles.terminal import to_stdout, write
from oracles.verdict import FAIL, PASS, Pattern, Verdict, Worst
from oracles.verify import backends, judge

SMALL = ["--preset", "a.x-k2", "--format", "bf16", "--jobs", "1"]

# A stranger's kernel: one request and one query at a time, plain loops, none of the house's arithmetic.
STRANGER = """
import torch
from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from mla_ref.problem import AttentionOutput


def decode(ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, softmax_scale,
           cache_format, kv_scale):
    out = torch.zeros_like(ql_nope)
    lse = torch.full(ql_nope.shape[:2], -torch.inf, dtype=torch.float32)
    offsets, size = cu_seqlens_q.tolist(), kv_cache.shape[1]
    for i, length in enumerate(cache_seqlens.tolist()):
        for t in range(offsets[i], offsets[i + 1]):
            seen = length - (offsets[i + 1] - 1 - t){mistake}
            entries = [kv_cache[block_table[i, j // size], j % size] for j in range(seen)]
            if not entries:
                continue
            kv_c, k_pe = cache_format.decode(
                torch.stack(entries), ql_nope.shape[2], q_pe.shape[2], kv_scale, torch.float32
            )
            scores = softmax_scale * (ql_nope[t].float() @ kv_c.T + q_pe[t].float() @ k_pe.T)
            lse[t] = scores.logsumexp(-1)
            out[t] = (scores.softmax(-1) @ kv_c).to(out.dtype)
    return AttentionOutput(out, lse)


def in_16_bits(case):
    return None if case.dtype in ("bfloat16", "float16") else f"computes in float32, not {{case.dtype}}"


KERNEL = Backend("stranger", "latent_attention", decode, Numerics(), supports=in_16_bits)
"""


@pytest.fixture
def stranger(tmp_path, monkeypatch, request):
    """Write modules into a working directory of the test's own; names are unique, as imports are cached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = (f"stranger_{abs(hash(request.node.nodeid))}_{i}" for i in itertools.count())

    def write(source):
        name = next(names)
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    return write


def verdicts_of(path):
    return [Verdict.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_list_shows_every_name(capsys):
    assert main(["list"]) == 0
    words = set(capsys.readouterr().out.split())
    for scan in (problems(), backends(), formats(), PRESETS, rules(), REGIMES):
        assert set(scan) <= words


def test_help_says_of_each_command_in_whole_words_what_it_does(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "  run      Judge backends on the conformance matrix.\n" in out
    assert out.count("...") == 1  # of arguments


def test_what_needs_no_torch_answers_without_it():
    """Where it is broken, too: that is when ``doctor`` is asked."""
    code = (
        "import sys; sys.modules['torch'] = None; from oracles.command import main\n"
        "codes = [main(words.split()) for words in ('', '--help', '--version', 'rnu', 'doctor --help')]\n"
        "import oracles.gate_cli; sys.exit(codes != [0, 0, 0, 2, 0])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "mla-verify: No such command 'rnu'. Did you mean 'run'?\n")
    assert "Explain this machine" in ran.stdout


def test_every_command_is_the_one_of_its_name(capsys):
    """Which its help shows; three have a parser of their own."""
    for name, command in COMMANDS.items():
        if not command.own_parser:
            assert main([name, "--help"]) == 0
            out = capsys.readouterr().out
            assert f"Usage: mla-verify {name} [OPTIONS]" in out
            module, _, function = command.function.partition(":")
            assert getattr(sys.modules[module], function).__doc__[:40] in out


def test_list_says_why_a_backend_is_unavailable(capsys):
    main(["list", "backends"])
    out = capsys.readouterr().out
    for backend in backends().values():
        reason = backend.requires("cpu")
        assert (f"unavailable on cpu: {backend.name}: {reason}" in out) == (reason is not None)


def test_one_table_alone(capsys):
    assert main(["list", "regimes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["regime", "values"]
    assert [line.split()[0] for line in lines[1:] if line] == list(REGIMES)


def test_shapes_are_shown_in_their_brackets(capsys):
    assert main(["list", "shapes"]) == 0
    assert "q_nope [t h p], q_pe [t h r]" in capsys.readouterr().out


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    commands = ("list", "run", "show", "replay", "report", "record", "probe", "doctor")
    assert all(re.search(rf"^  {command}  ", out, re.MULTILINE) for command in commands)


def test_a_right_backend_holds_every_claim_on_every_case(tmp_path, capsys):
    path = tmp_path / "verdicts.jsonl"
    assert main(["run", "--full", "--backend", "mla_ref.merge_states", *SMALL, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    verdicts = verdicts_of(path)
    cases = matrix(problems()["merge_states"], [PRESETS["a.x-k2"]], [formats()["bf16"]])
    claims = [name for name, rule in rules().items() if not rule.problems or "merge_states" in rule.problems]
    assert [(v.case, v.oracle) for v in verdicts] == list(itertools.product(cases, in_order(claims)))
    assert {v.status for v in verdicts} == {"pass"}
    assert re.search(
        rf"^mla_ref\.merge_states +merge_states +{len(verdicts)} +0 +0 +[01]\.\d+ \w+", out, re.M
    )
    assert re.search(rf"^{len(verdicts)} claims held, 0 failed, 0 not run, in [\d.]+ s$", out, re.M)


def test_strangers_right_kernel_is_green_and_broken_one_red(stranger, tmp_path, capsys):
    right, wrong = stranger(STRANGER.format(mistake="")), stranger(STRANGER.format(mistake=" - 1"))
    path, report = tmp_path / "verdicts.jsonl", tmp_path / "junit.xml"
    assert main(["run", "--backend", f"{right}:KERNEL", *SMALL]) == 0
    out = capsys.readouterr().out
    assert f"{right}:KERNEL: unsupported, computes in float32, not float64 (2 cases)" in out

    arguments = ["run", "--backend", f"{wrong}:KERNEL", *SMALL, "--json", str(path), "--junit", str(report)]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    failed = [v for v in verdicts_of(path) if v.status == "fail"]
    assert {v.oracle for v in failed} >= {"value", "lse"}
    assert f"FAIL {wrong}:KERNEL default" in out
    assert re.search(
        r"where out\[\d+, \d+, \d+\] \(request \d+, query \d+, head \d+, channel \d+\): got", out
    )
    suites = {suite.get("name"): suite for suite in ElementTree.parse(report).getroot()}
    assert suites[f"{wrong}:KERNEL"].get("failures") == str(len(failed))
    assert len(suites[f"{wrong}:KERNEL"].findall("testcase/failure")) == len(failed)

    assert main(["show", str(path)]) == 0
    assert f"FAIL {wrong}:KERNEL" in capsys.readouterr().out
    assert main(["replay", str(path)]) == 2
    assert "whose module is only run if you name it: --backend" in capsys.readouterr().err
    assert main(["replay", str(path), "--backend", f"{wrong}:KERNEL"]) == 1
    assert main(["replay", str(path), "--backend", f"{right}:KERNEL"]) == 0


def test_a_failure_is_one_pasteable_line(stranger, capsys):
    wrong = stranger(STRANGER.format(mistake=" - 1"))
    claims = [word for claim in ("value", "lse", "empty_rows") for word in ("--oracle", claim)]
    main(["run", "--backend", f"{wrong}:KERNEL", *SMALL, *claims])
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("  again "))
    words = shlex.split(line)[1:]
    assert words[0] == "mla-verify"
    assert main(words[1:]) == 1
    assert re.search(
        rf"^FAIL {wrong}:KERNEL default (value|lse|empty_rows)$", capsys.readouterr().out, re.MULTILINE
    )


BROKEN_VALUE = Verdict(
    status=FAIL,
    backend="b",
    variant="default",
    oracle="value",
    case=Case(problem="latent_attention", config=PRESETS["a.x-k2"], q_lens=(2,), kv_lens=(9,)),
    device="cpu",
    detail="with the pages elsewhere: out: 2 of 8 elements are not what they may be; worst at head 1",
    worst=Worst(tensor="out", index=(1,), got=1.5, want=0.25, bound=0.5, ratio=2.5, place="head 1"),
    num_bad=2,
    num_checked=8,
    pattern=Pattern(where="every head", guess="heads 0 and 1 are exchanged"),
)


def test_a_failure_says_each_thing_once():
    *lines, again = describe(BROKEN_VALUE)
    assert lines == [
        "FAIL b default value",
        "  case  latent_attention a.x-k2 h=32 q=2 kv=9 bfloat16 bf16 block=64 plain seed=0",
        "  why   with the pages elsewhere",
        "  where out[1] (head 1): got 1.5, want 0.25 ± 0.5 (2.5 × the bound)",
        "  bad   2 of 8 elements: every head",
        "  guess heads 0 and 1 are exchanged",
    ]
    assert len(again) < 600
    unexplained = replace(BROKEN_VALUE, detail="it is odd", pattern=None)
    assert "  why   it is odd" in describe(unexplained)
    assert "  bad   2 of 8 elements" in describe(unexplained)


def test_what_is_wrong_with_every_claim_alike_is_one_kind():
    of = {"worst": None, "pattern": None, "num_bad": 0, "num_checked": 0}
    shapes = [f"out: shape is [{n}, 4, 512], must be [1, 4, 512]" for n in (2, 3)]
    returned = [replace(BROKEN_VALUE, detail=d, oracle=o, **of) for d in shapes for o in ("value", "lse")]
    raised = [replace(v, status="error", detail=f"IndexError: index {i}") for i, v in enumerate(returned)]
    died = [replace(v, status="crash", detail=f"died of signal {i}") for i, v in enumerate(returned)]
    assert [count for _, count in distinct(returned)] == [4]
    assert [count for _, count in distinct(raised)] == [4]
    assert [count for _, count in distinct(died)] == [1] * 4
    assert [count for _, count in distinct([BROKEN_VALUE, replace(BROKEN_VALUE, oracle="lse")])] == [1, 1]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.5, "0.500"),
        (185952.9654, "185952.965"),
        (1e6, "1.00e+06"),
        (sys.float_info.max, "inf"),
        (inf, "inf"),
    ],
)
def test_the_table_is_as_wide_however_large_an_error_is(ratio, text):
    worst = replace(BROKEN_VALUE.worst, ratio=ratio)
    console = to_stdout()
    with console.capture() as capture:
        console.print(summary([replace(BROKEN_VALUE, worst=worst)], "problem"))
    assert capture.get().splitlines()[1].split()[-2:] == [text, "value"]


def test_the_case_that_is_shown_is_ordinary_where_one_is():
    odd = replace(BROKEN_VALUE, case=replace(BROKEN_VALUE.case, q_lens=(2,), kv_lens=(1,)))
    assert distinct([odd, BROKEN_VALUE]) == [(BROKEN_VALUE, 2)]


def test_shown_python_runs_the_same_implementation(stranger, tmp_path, capsys):
    path, wrong = tmp_path / "verdicts.jsonl", stranger(STRANGER.format(mistake=" - 1"))
    main(["run", "--backend", f"{wrong}:KERNEL", *SMALL, "--oracle", "value", "--json", str(path)])
    failed = [i for i, v in enumerate(verdicts_of(path)) if v.status == "fail" and v.oracle == "value"]
    capsys.readouterr()
    assert main(["show", str(path), "--index", str(failed[0])]) == 0
    shown = capsys.readouterr().out
    code, namespace = shown[shown.index("import torch") :], {}
    exec(code, namespace)
    imported = re.findall(r"import (?:\w+ as )?(\w+)$", code, re.MULTILINE)
    assert [name for name in imported if code.count(name) == 1] == []
    assert type(namespace["output"]).__name__ == "AttentionOutput"
    worst = verdicts_of(path)[failed[0]].worst
    assert float(namespace["output"].out[worst.index]) == worst.got


def test_a_required_backend_that_cannot_run_is_a_failure(stranger, capsys):
    never = stranger(
        STRANGER.format(mistake="") + '\nBACKEND = Backend("n", "latent_attention", decode, '
        'requires=lambda device: "needs a device of its own")\n'
    )
    only = ["--problem", "latent_attention", *SMALL]
    assert main(["run", "--backend", never, *only]) == 3
    assert f"{never}: unavailable, needs a device of its own (36 cases)" in capsys.readouterr().out
    assert main(["run", "--backend", never, "--require", never, *only]) == 1
    assert f"required backend {never} did not run" in capsys.readouterr().out
    assert main(["run", "--backend", never, "--require", "mla_ref.latent", *only]) == 0


def test_an_implementation_that_raises_is_an_error_with_its_message(stranger, capsys):
    raising = stranger(
        STRANGER.format(mistake="").replace(
            "    out = torch.zeros", "    raise KeyError('lost')\n    out = torch.zeros"
        )
    )
    assert main(["run", "--backend", f"{raising}:KERNEL", *SMALL]) == 1
    assert re.search(
        rf"^ERROR .*\n.*\n +why +KeyError: 'lost', in decode, {raising}\.py:\d+$",
        capsys.readouterr().out,
        re.MULTILINE,
    )


@pytest.mark.parametrize("question", ["requires", "supports"])
def test_a_backend_that_raises_when_it_is_asked_is_an_error(question, stranger, capsys):
    asked = f"{question}=lambda _: 1 / 0"
    source = STRANGER.format(mistake="") + f'\nASKED = Backend("a", "latent_attention", decode, {asked})\n'
    assert main(["run", "--backend", f"{stranger(source)}:ASKED", *SMALL, "--oracle", "value"]) == 1
    assert re.search(
        rf"^ERROR .*\n.*\n +why +{question} raised ZeroDivisionError: division by zero$",
        capsys.readouterr().out,
        re.M,
    )


def test_a_kernel_that_kills_its_process_is_a_crash_and_the_rest_goes_on(stranger, tmp_path, capsys):
    deadly = "    if ql_nope.shape[1] == 1 and len(cache_seqlens) == 1:\n        os._exit(139)\n"
    source = "import os\n" + STRANGER.format(mistake="").replace(
        "    out = torch.zeros", deadly + "    out = torch.zeros"
    )
    path, name = tmp_path / "verdicts.jsonl", stranger(source)
    arguments = ["run", "--backend", f"{name}:KERNEL", *SMALL[:-1], "2", "--json", str(path)]
    assert main([*arguments, "--oracle", "value"]) == 1
    crashed = [v for v in verdicts_of(path) if v.status == "crash"]
    assert {(v.case.config.num_heads, len(v.case.kv_lens)) for v in crashed} == {(1, 1)}
    cases = matrix(problems()["latent_attention"], [PRESETS["a.x-k2"]], [formats()["bf16"]])
    assert [v.case for v in verdicts_of(path)] == cases
    assert f"CRASH {name}:KERNEL" in capsys.readouterr().out


def test_order_and_verdicts_do_not_depend_on_the_number_of_processes(tmp_path):
    def judged(jobs):
        path = tmp_path / f"{jobs}.jsonl"
        words = ["run", "--backend", "mla_ref.naive", "--backend", "mla_ref.latent", "--oracle", "value"]
        assert main([*words, *SMALL[:-1], jobs, "--json", str(path)]) == 0
        return [json.dumps(dict(json.loads(line), seconds=0)) for line in path.read_text().splitlines()]

    assert judged("1") == judged("2")


def test_a_case_of_ones_own(tmp_path, capsys):
    case = Case(problem="latent_attention", config=PRESETS["a.x-k2"].shard(16), q_lens=(2, 1), kv_lens=(3, 0))
    path = tmp_path / "case.json"
    path.write_text(json.dumps(json.loads(case.to_json()), indent=2), encoding="utf-8")
    for given in (case.to_json(), str(path)):
        assert main(["replay", given, "--backend", "mla_ref.latent", "--oracle", "lse"]) == 0
        assert re.search(
            r"^pass +default lse: worst error is 0\.\d+ of its bound", capsys.readouterr().out, re.MULTILINE
        )


GOOD_CASE = Case(problem="rope", config=PRESETS["a.x-k2"], q_lens=(1,), kv_lens=(1,)).to_json()
HUGE_CASE = Case(
    problem="cache_capacity", config=PRESETS["a.x-k2"], q_lens=(1,), kv_lens=(1,), block_size=2**40
).to_json()

HERE = ["run", "--jobs", "1"]  # strangers are imported in this process
BAD_INPUT = [
    (["nope"], r"No such command 'nope'"),
    (["run", "--nope"], r"No such option: --nope"),
    (["run", "--jobs", "0"], r"0 is not in the range|greater than or equal to 1"),
    (["run", "--seed", "x"], r"--seed.*integer"),
    (["run", "--backend"], r"'--backend' requires an argument"),
    (["list", "nope"], r"table 'nope' is not one of problems, backends, formats"),
    (["list", "--device", "nope"], r"--device 'nope': .*device"),
    (["run", "--device", "cuda:99"], r"--device 'cuda:99': "),
    (["run", "--device", "meta"], r"--device 'meta': holds no values"),
    (["fuzz", "--memory", "1"], r"memory '1': nothing is judged in less than 64 MiB"),
    (["run", "--preset", "deepseek-v33"], r"preset 'deepseek-v33' is not known; did you mean .*deepseek-v3"),
    (["run", "--format", "int3"], r"cache format 'int3' is not one of bf16"),
    (["run", "--problem", "nope"], r"problem 'nope' is not one of attention"),
    (["run", "--oracle", "nope"], r"oracle 'nope' is not one of .*contract, "),
    (["run", "--by", "nope"], r"--by 'nope' is not one of problem, preset, format, oracle"),
    (["run", "--backend", "nope"], r"backend 'nope': "),
    ([*HERE, "--require", "nope"], r"backend 'nope': "),
    ([*HERE, "--backend", "json:NOPE"], r"backend 'json:NOPE': json has no NOPE"),
    (
        [*HERE, "--backend", "json:loads"],
        r"backend 'json:loads': loads is function, not a Backend",
    ),
    (["run", "--backend", "no.such.module:X"], r"backend 'no.such.module:X': cannot import 'no.such.module'"),
    (["run", "--json", "no/such/folder/x"], r"no/such/folder/x"),
    (["run", "--junit", "no/such/folder/x"], r"no/such/folder/x"),
    (["show", "no-such-file"], r"mla-verify: no-such-file: No such file or directory"),
    (["show", "."], r"\.: holds no manifest\.json"),
    (["show", "empty"], r"no verdicts: the file is empty"),
    (["show", "garbage"], r"verdict: "),
    (["show", "binary"], r"binary: .*utf-8"),
    (["show", "deep"], r"deep, line 1: verdict: maximum recursion depth"),
    (["show", "list"], r"list, line 1: verdict: expected an object, got list"),
    (["show", "number"], r"number, line 1: verdict: backend is 7 \(int\), must be str"),
    (["replay", "deep", "--backend", "mla_ref.rope"], r"deep: case: not JSON: maximum recursion depth"),
    (["run", "--case", "deep.jsonl"], r"deep\.jsonl, line 1: maximum recursion depth"),
    (["run", "--json", "same", "--junit", "./same"], r"--json and --junit are one file: same"),
    (
        ["run", *SMALL, "--backend", "mla_ref.rope", "--json", "/dev/full"],
        r"mla-verify: /dev/full: No space left on device",
    ),
    (["mutants", "--mutant", "key_dropped", "--oracle", "stored"], r"no mutant is of these names"),
    (
        ["replay", GOOD_CASE.replace('"q_lens":[1]', f'"q_lens":[{2**62}]'), "--backend", "mla_ref.rope"],
        r"case: its inputs cannot be made: ",
    ),
    (["replay", "no-such-file"], r"no-such-file: No such file or directory"),
    (["run", "--backend", "mla_ref.rope", "--out", "garbage"], r"garbage: is a file, must be a directory"),
    (
        [*HERE, "--backend", "./kernels/mine.py:X"],
        r"mine\.py is a file, .*: say mine:X where it lies",
    ),
    ([*HERE, "--backend", ":X"], r"backend ':X': names no module"),
    (["fuzz", "--budget", "3x"], r"mla-verify: budget '3x' is neither a time"),
    (["plan", "--budget", "3x"], r"mla-verify: size '3x' is no number of bytes"),
    (["probe", "garbage.py:f"], r"garbage\.py is a file, .*: say garbage:f where it lies"),
    (["probe", "unclosed:f"], r"kernel 'unclosed:f': its import raised SyntaxError: '\(' was never closed"),
    (
        ["probe", "mla_ref.latent:latent", "--adapter", "none/a.py"],
        r"--adapter none/a\.py: there is no directory none",
    ),
    (["replay", "garbage", "--backend", "mla_ref.rope"], r"case: not JSON"),
    (["replay", "{", "--backend", "mla_ref.rope"], r"case: not JSON"),
    (["replay", "{}", "--backend", "mla_ref.rope"], r"case: missing .*'problem'"),
    (
        ["replay", '{"proble":1}', "--backend", "mla_ref.rope"],
        r"case: unknown field 'proble'; known are problem",
    ),
    (
        ["replay", HUGE_CASE, "--backend", "mla_ref.capacity"],
        r"block_size is \d+: its entries take \d+ bytes",
    ),
    (["replay", GOOD_CASE], r"a case names no backend: say --backend NAME"),
    (["replay", GOOD_CASE, "--backend", "mla_ref.naive"], r"implements attention, but the case is of rope"),
    (
        ["replay", GOOD_CASE, "--backend", "mla_ref.rope", "--oracle", "lse"],
        r"oracle 'lse' does not judge rope",
    ),
    (
        ["replay", GOOD_CASE.replace('"rope","config"', '"ropes","config"'), "--backend", "mla_ref.rope"],
        r"ropes",
    ),
    (
        ["replay", GOOD_CASE.replace('"plain"', '"odd"'), "--backend", "mla_ref.rope"],
        r"regime 'odd' is not one of plain",
    ),
    (
        ["replay", GOOD_CASE.replace('"q_lens":[1]', '"q_lens":[-1]'), "--backend", "mla_ref.rope"],
        r"q_lens\[0\] is -1",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(a)[:40] for a, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "garbage").write_text("certainly\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list").write_text("[]", encoding="utf-8")
    (tmp_path / "number").write_text(f'{{"case":{GOOD_CASE},"status":"pass","backend":7}}', encoding="utf-8")
    for name in ("deep", "deep.jsonl"):
        (tmp_path / name).write_text("[" * 100_000, encoding="utf-8")
    (tmp_path / "unclosed.py").write_text("x = (", encoding="utf-8")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mla-verify: [^\n]+\n", captured.err), captured.err
    assert re.search(message, captured.err)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch\nnot_defined\n", r"its import raised NameError: name 'not_defined'"),
        ("def f(:\n", r"its import raised SyntaxError: "),
        ("import no_such_package\n", r"No module named 'no_such_package'"),
    ],
)
def test_a_strangers_module_that_does_not_import(source, message, stranger, capsys):
    assert main(["run", "--backend", stranger(source)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_installed_command_is_this_one():
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = ["run", "--backend", "no_such_backend"]
    ran = subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("mla-verify: backend 'no_such_backend'")
    assert "Traceback" not in ran.stderr


def test_the_default_matrix_covers_what_it_promises():
    everything = matrix(problems()["attention"], list(PRESETS.values()), list(formats().values()))
    assert {case.config.name for case in everything} == set(PRESETS)
    stages = list(STAGES)
    met = {(case.cache_format, stages[i % len(stages)]) for i, case in enumerate(everything)}
    assert met == set(itertools.product(formats(), stages))
    assert {case.regime for case in everything} == set(REGIMES)
    assert {case.dtype for case in everything} == {"bfloat16", "float16", "float32", "float64"}
    assert {case.config.num_heads for case in everything} >= {1, 16, 128}
    for block in (16, 64):
        lengths = {n for case in everything if case.block_size == block for n in case.kv_lens}
        assert lengths >= {1, block - 1, block, block + 1}
    assert any(kv < q for case in everything for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    assert any(0 in case.kv_lens for case in everything)
    assert any(0 in case.q_lens for case in everything)
    assert len({case.layout for case in everything}) == 4


def _jobs_of_matrix(backend):
    return jobs_of(
        specs=[backend.name],
        problems=[problems()[backend.problem]],
        configs=list(PRESETS.values()),
        formats=list(formats().values()),
        oracles=None,
        device="cpu",
        seed=0,
    )


def test_every_variant_and_every_claim_has_its_turn():
    """Turns thin the matrix out. What they leave has every variant in every stage, and every claim in each
    stage on some function of every backend."""
    met = {}
    for backend in backends().values():
        for i, job in enumerate(_jobs_of_matrix(backend)):
            stage = i % len(STAGES)
            for variant, oracles in trials(job, tuple(backend.variants)):  # as if it took all of them
                met.setdefault((backend.name, variant), set()).add(stage)
                for oracle in oracles:
                    met.setdefault((backend.name, oracle), set()).add(stage)
        judging = [o.name for o in rules().values() if not o.problems or backend.problem in o.problems]
        for name in ("", *backend.variants, *judging):
            assert len(met[backend.name, name]) == len(STAGES), (backend.name, name)


@pytest.mark.parametrize("name", sorted(backends()))
def test_what_takes_few_cases_meets_every_claim(name):
    """Of the cases of a stage that a backend takes, each claim has one: however few they are."""
    backend = backends()[name]
    todo = _jobs_of_matrix(backend)
    met, tried = {}, set()
    for i, job in enumerate(todo):
        if backend.supports(job.case) is None:
            for variant, oracles in trials(job, tuple(backend.variants), backend.supports):
                met.setdefault(i % len(STAGES), set()).update(oracles)
                tried.add(variant)
    # The matrix has no case of one type throughout, which is all that this one takes.
    if name == "mla_fast.transformers_layer":
        assert not met
        return
    assert met
    assert all(oracles == set(todo[0].oracles) for oracles in met.values())
    assert tried == {"", *backend.variants}


def test_turns_leave_nothing_out():
    for count in range(12):
        names = [str(k) for k in range(count)]
        for of in range(1, 14):
            dealt = [whose_turn(names, at, of) for at in range(of)]
            assert {name for turn in dealt for name in turn} == set(names)


def test_without_turns_everything_is_tried():
    job = Job(None, (), ("value", "poison"), "cpu", None)
    assert trials(job, ("a", "b")) == [("", job.oracles), ("a", job.oracles), ("b", job.oracles)]


@pytest.mark.parametrize("name", sorted(rules()))
def test_oracles_of_one_run_are_those_that_run_once(name):
    """The rest take turns, because they cost more runs."""
    rule = rules()[name]
    backend = next(b for b in backends().values() if not rule.problems or b.problem in rule.problems)
    calls = []

    def counted(*inputs):
        calls.append(1)
        return backend.fn(*inputs)

    case = matrix(problems()[backend.problem], [PRESETS["a.x-k2"]], [formats()["bf16"]])[1]
    prepare = lambda inputs: Prepared(lambda: counted(*inputs), lambda output: output)  # noqa: E731
    judge(replace(backend, fn=counted, variants={}, prepare=prepare), case, oracles=[name])
    assert (len(calls) == 1) == (name in OF_ONE_RUN)


@pytest.mark.parametrize("name", sorted(problems()))
def test_every_problem_has_cases(name):
    cases = matrix(problems()[name], list(PRESETS.values()), list(formats().values()))
    assert len(cases) >= 12
    assert len({case.config.name for case in cases}) >= 8


def test_a_judge_whose_processes_do_not_work_is_no_failed_claim(monkeypatch, capsys):
    def broken(*_):
        raise WorkersError("workers do not start: killed")

    monkeypatch.setattr("oracles.cli.judge_all", broken)
    assert main(["run", "--backend", "mla_ref.rope", "--preset", "a.x-k2"]) == 3
    assert capsys.readouterr().err == "mla-verify: workers do not start: killed\n"


def test_reasons_of_many_backends_take_few_lines(stranger, capsys):
    picky = 'Backend("n", "latent_attention", decode, supports=lambda case: f"not with seed {case.seed}")\n'
    text = STRANGER.format(mistake="") + f"\nBACKEND = {picky}"
    first, second = stranger(text), stranger(text)
    assert main(["run", "--backend", first, "--backend", second, "--problem", "latent_attention"]) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith((first, second))]
    shared = [line for line in lines if line.startswith(f"{first}, {second}: unsupported, not with seed ")]
    assert len(shared) == 3
    assert all(line.endswith(" each)") for line in shared)
    assert [line for line in lines if "other reasons" in line] == [
        f"{backend}: 33 other reasons (33 cases), told by --json" for backend in (first, second)
    ]


ESCAPES = "\x1b]0;owned\x07\x1b[2J\nPASS everything\u202e\x9b1m\r"


def test_what_a_terminal_would_obey_is_shown_escaped():
    shown = printable(ESCAPES)
    assert shown.isprintable()
    assert shown == r"\x1b]0;owned\x07\x1b[2J\nPASS everything\u202e\x9b1m\r"
    plain = "ratio 0.5 ≤ µ, 'déjà vu' …"
    assert printable(plain) == plain
    assert printable("\ud800") == r"\ud800"


@pytest.fixture
def hostile():
    """A verdict every text of which is a stranger's."""
    case = Case(problem="rope", config=replace(PRESETS["a.x-k2"], name=ESCAPES), q_lens=(1,), kv_lens=(1,))
    texts = dict.fromkeys(("backend", "variant", "oracle", "detail", "device"), ESCAPES)
    worst = Worst(tensor=ESCAPES, index=(ESCAPES,), got=1.0, want=0.0, bound=0.1, ratio=10.0, place=ESCAPES)
    return Verdict(status="fail", case=case, worst=worst, **texts)


def obeyed(text):
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_strangers_files_cannot_command_the_terminal(hostile, tmp_path, capsys):
    (tmp_path / "verdicts").write_text(hostile.to_json() + "\n", encoding="utf-8")
    (tmp_path / "case").write_text(hostile.case.to_json(), encoding="utf-8")
    assert main(["show", str(tmp_path / "verdicts")]) == 0
    assert main(["replay", str(tmp_path / "verdicts")]) == 2
    assert main(["replay", str(tmp_path / "case"), "--backend", "mla_ref.rope", "--oracle", "value"]) == 0
    assert main(["replay", str(tmp_path / "case"), "--backend", ESCAPES]) == 2
    assert main(["run", "--case", json.dumps({ESCAPES: 1})]) == 2
    captured = capsys.readouterr()
    assert obeyed(captured.out) == obeyed(captured.err) == []
    assert "PASS everything" in captured.out
    assert not re.search(r"^PASS", captured.out, re.M), "a line of a stranger's own"


def test_names_are_printed_as_they_are(capsys):
    write(to_stdout(), "my:fire:kernel [bold]b[/bold]")
    assert capsys.readouterr().out == "my:fire:kernel [bold]b[/bold]\n"


def test_reports_of_a_suite_do_not_command_the_terminal_either(hostile):
    claim = Claim(Selection("b"), "rope", hostile.oracle, "given")
    failed = outcome_of(claim, [hostile]).failed
    skipped = outcome_of(claim, [replace(hostile, status="unavailable")]).skipped
    assert obeyed(failed) == obeyed(skipped) == []
    assert r"\x1b]0;owned" in failed
    assert r"\x1b]0;owned" in skipped


def test_strangers_kernels_cannot_command_the_terminal(stranger, tmp_path, capsys):
    source = STRANGER.format(mistake="") + (
        f"\ndef angry(*_):\n    raise KeyError({ESCAPES!r})\n"
        f'\nANGRY = Backend({ESCAPES!r}, "latent_attention", angry)\n'
        f'\nIDLE = Backend("i", "latent_attention", decode, requires=lambda _: {ESCAPES!r})\n'
    )
    name, report = stranger(source), tmp_path / "junit.xml"
    words = ["run", "--backend", f"{name}:ANGRY", "--backend", f"{name}:IDLE", "--oracle", "value", *SMALL]
    assert main([*words, "--junit", str(report)]) == 1
    captured = capsys.readouterr()
    assert obeyed(captured.out) == obeyed(captured.err) == []
    assert r"unavailable, \x1b]0;owned\x07" in captured.out
    assert "owned" in report.read_text(encoding="utf-8")
    ElementTree.parse(report)


def test_a_refused_run_loses_nothing(tmp_path, capsys):
    run = ["run", "--backend", "mla_ref.rope", "--oracle", "value", *SMALL, "--out", str(tmp_path / "run")]
    assert main(run) == 0
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("mine")
    for option in ("--json", "--junit"):
        for file in (kept, new):
            assert main([*run, "--seed", "1", option, str(file)]) == 2
            assert "not the same run" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    assert not new.exists()
    assert main([*run, "--json", str(kept), "--junit", str(new)]) == 0
    assert len(verdicts_of(kept)) == 36
    assert ElementTree.parse(new).getroot()[0].get("tests") == "36"
    assert main([*run, "--json", str(kept), "--junit", str(new)]) == 0
    assert len(verdicts_of(kept)) == 36, "not replaced, but added to"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
        (b'{"case":{}}', "case: missing"),
        (b"[]", "case: expected an object"),
        (b"7", "case: expected an object"),
    ],
)
def test_a_bad_line_of_cases_is_named(line, message, tmp_path, capsys):
    file = tmp_path / "cases.jsonl"
    file.write_bytes(GOOD_CASE.encode() + b"\n" + line + b"\n" + GOOD_CASE.encode() + b"\n")
    assert main(["run", "--backend", "mla_ref.rope", "--case", str(file)]) == 2
    assert re.fullmatch(
        rf"mla-verify: {re.escape(str(file))}, line 2: {message}.*\n", capsys.readouterr().err
    )


def test_a_file_without_a_case_is_named(tmp_path, capsys):
    for name, content, message in (
        ("empty.jsonl", b"", "holds no case"),
        ("binary.jsonl", b"\xff\xfe", "'utf-8' codec can't decode"),
        ("binary.json", b"\xff\xfe", "'utf-8' codec can't decode"),
        ("garbage.json", b"certainly", "case: not JSON"),
    ):
        (tmp_path / name).write_bytes(content)
        assert main(["run", "--backend", "mla_ref.rope", "--case", str(tmp_path / name)]) == 2
        assert f"mla-verify: {tmp_path / name}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--jobs", "1"], ["fuzz", "--budget", "4cases", "--jobs", "1"]])
def test_a_named_backend_that_is_not_judged_is_told(command, capsys):
    named = [*command, "--backend", "mla_ref.rope"]
    assert main([*named, "--oracle", "lse"]) == 3
    assert "mla_ref.rope: not tried, lse does not judge rope, which it implements" in capsys.readouterr().out
    assert main([*named, "--problem", "layer"]) == 3
    assert "mla_ref.rope: not tried, it implements rope, not layer" in capsys.readouterr().out
    both = [*named, "--backend", "mla_ref.merge_states", "--oracle", "lse", "--oracle", "poison"]
    small = SMALL[:-2] if command[0] == "run" else []
    assert main([*both, *small]) == 0
    out = capsys.readouterr().out
    assert "mla_ref.rope: not tried, lse and poison do not judge rope, which it implements" in out
    assert "merge_states: not tried" not in out
    states = Case(problem="merge_states", config=PRESETS["a.x-k2"].shard(4), q_lens=(2,), kv_lens=(9,))
    one = ["--case", states.to_json()] if command[0] == "run" else []
    assert main([*command, *one, "--oracle", "merge_algebra"]) == 0
    assert "not tried" not in capsys.readouterr().out, "nobody named the others"


def test_a_required_backend_that_is_not_judged_is_a_failure(capsys):
    words = [
        "run",
        "--backend",
        "mla_ref.merge_states",
        "--require",
        "mla_ref.rope",
        "--oracle",
        "lse",
        *SMALL,
    ]
    assert main(words) == 1
    assert "mla_ref.rope: not tried, lse does not judge rope" in capsys.readouterr().out


def test_a_name_that_is_given_twice_counts_once(tmp_path, capsys):
    path = tmp_path / "verdicts.jsonl"
    words = ["--backend", "mla_ref.rope", "--oracle", "value", "--problem", "rope", *SMALL[:-2]]
    assert main(["run", *words, *words, "--json", str(path), "--jobs", "1"]) == 0
    assert len(verdicts_of(path)) == 36
    case = ["--case", GOOD_CASE, "--case", GOOD_CASE]
    assert main(["run", *words[:4], *case, "--json", str(path), "--jobs", "1"]) == 0
    assert len(verdicts_of(path)) == 1


COMMAND = [sys.executable, "-c", "import sys; from oracles.command import main; sys.exit(main())"]


@pytest.mark.parametrize("words", [["list"], ["run", "--backend", "mla_ref.rope", *SMALL], ["--help"]])
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word(words):
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_an_interrupted_run_is_one_line_and_keeps_what_it_wrote(stranger, tmp_path):
    """By the signal of a terminal, in the middle of its second case."""
    interrupted = "    if len(cache_seqlens) == 2:\n        signal.raise_signal(signal.SIGINT)\n"
    # A process that was begun in the background of a script ignores the signal until it is told not to.
    heeded = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    source = (
        "import signal\n"
        + heeded
        + STRANGER.format(mistake="").replace("    out = torch.zeros", interrupted + "    out = torch.zeros")
    )
    path, name = tmp_path / "verdicts.jsonl", stranger(source)
    config = PRESETS["a.x-k2"]
    cases = [
        Case(problem="latent_attention", config=config, q_lens=lengths, kv_lens=lengths, cache_format="bf16")
        for lengths in ((3,), (3, 3), (4,))
    ]
    words = ["run", "--backend", f"{name}:KERNEL", "--oracle", "value", "--jobs", "1", "--json", str(path)]
    words += [word for case in cases for word in ("--case", case.to_json())]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "mla-verify: interrupted\n", 130)
    assert [(verdict.case, verdict.status) for verdict in verdicts_of(path)] == [(cases[0], PASS)]


def test_limits_of_a_replay_ask_for_a_process_of_its_own(capsys):
    words = ["replay", GOOD_CASE, "--backend", "mla_ref.rope", "--oracle", "value", "--timeout"]
    assert main([*words, "60s"]) == 0
    capsys.readouterr()
    assert main([*words, "60s", "--no-isolate"]) == 2
    assert "--no-isolate: --timeout and --memory need processes" in capsys.readouterr().err


def test_a_defect_of_ours_is_neither_a_failed_claim_nor_silent(monkeypatch, capsys):
    monkeypatch.setattr("oracles.cli.judge_all", lambda *_: 1 / 0)
    assert main(["run", "--backend", "mla_ref.rope", *SMALL]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\nmla-verify: a defect of its own: ZeroDivisionError: division by zero\n")


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mla-verify {importlib.metadata.version('mla-verify')}\n"
