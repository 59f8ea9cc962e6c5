"""The plugin in suites of other people's: in this process, and from the wheel in a project of its own."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

# Twenty lines, and a knob that breaks them.
KERNEL = """
import torch
from mla_ref.backend import Backend
from mla_ref.numerics import Numerics
from mla_ref.pages import gather
from mla_ref.problem import AttentionOutput

def decode_but(missing):
    def decode(ql_nope, q_pe, kv_cache, block_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, softmax_scale,
               cache_format, kv_scale):
        out, lse = torch.zeros_like(ql_nope), torch.full(ql_nope.shape[:2], -torch.inf)
        starts = cu_seqlens_q.tolist()
        for i, length in enumerate(cache_seqlens.tolist()):
            entries = gather(kv_cache, block_table[i], 0, length)
            dims = ql_nope.shape[2], q_pe.shape[2]
            kv_c, k_pe = cache_format.decode(entries, *dims, kv_scale, torch.float32)
            for t in range(starts[i], starts[i + 1]):
                seen = length - (starts[i + 1] - 1 - t) - missing
                if seen > 0:
                    scores = ql_nope[t].float() @ kv_c[:seen].T + q_pe[t].float() @ k_pe[:seen].T
                    lse[t] = (softmax_scale * scores).logsumexp(-1)
                    out[t] = ((softmax_scale * scores).softmax(-1) @ kv_c[:seen]).to(out.dtype)
        return AttentionOutput(out, lse)
    return decode

def narrow(case):
    return None if case.dtype in ("bfloat16", "float16") else f"no {case.dtype} queries"

def gpu(device):
    return None if device == "cuda" else "needs a GPU"

def dies(*given):
    import os
    os._exit(7)

DEADLY = Backend("deadly", "latent_attention", dies)
RIGHT = Backend("right", "latent_attention", decode_but(0), Numerics(), supports=narrow)
WRONG = Backend("wrong", "latent_attention", decode_but(1), Numerics(), supports=narrow)
GPU = Backend("gpu", "latent_attention", decode_but(0), requires=gpu)
"""

SMALL = ["--mla-preset=a.x-k2", "--mla-format=bf16", "--mla-oracle=value", "--mla-oracle=lse"]
STAGES = ("decode", "mtp", "prefill", "chunked")


@pytest.fixture
def project(pytester, monkeypatch):
    """A folder with kernels in it; modules of an earlier test's folder are forgotten."""
    monkeypatch.delitem(sys.modules, "my_kernel", raising=False)
    pytester.makepyfile(my_kernel=KERNEL)
    return pytester


def run(project, *words):
    return project.runpytest_inprocess(*words)


def chosen(result):
    return {name: count for name, count in result.parseoutcomes().items() if name != "deselected"}


def test_a_right_kernel_is_green_in_every_stage(project):
    result = run(project, "-v", "--mla-backend=my_kernel:RIGHT", *SMALL)
    result.assert_outcomes(passed=8)
    names = {f"my_kernel:RIGHT/latent_attention/{o}/{s}" for o in ("value", "lse") for s in STAGES}
    assert set(re.findall(r"^mla-verify::(\S+) PASSED", result.stdout.str(), re.MULTILINE)) == names
    assert result.ret == 0


def test_a_broken_kernel_shows_the_smallest_case_and_how_to_repeat_it(project):
    result = run(project, "--mla-backend=my_kernel:WRONG", *SMALL, "-k", "value and decode")
    result.assert_outcomes(failed=1, deselected=7)
    out = result.stdout.str()
    assert "FAIL my_kernel:WRONG default value" in out
    assert re.search(r"^  case  latent_attention a\.x-k2 h=\d+ q=1 kv=1 bfloat16", out, re.MULTILINE)
    assert re.search(r"^  where out\[\d+, \d+, \d+\] \(request 0, query 0, head \d+", out, re.MULTILINE)
    assert re.search(r"^  again mla-verify replay '\{.*\}' --backend my_kernel:WRONG$", out, re.MULTILINE)
    assert re.search(r"^  and   \d+ more like it$", out, re.MULTILINE)


def test_the_verdicts_are_those_of_the_command_line(project, monkeypatch, capsys):
    from oracles.command import main

    options = [word.replace("--mla-", "--") for word in SMALL]
    monkeypatch.syspath_prepend(project.path)
    assert main(["run", "--backend=my_kernel:WRONG", *options, "--jobs=1"]) == 1
    kinds = re.findall(r"^FAIL .*\n  case  (.*)$", capsys.readouterr().out, re.MULTILINE)
    out = run(project, "--mla-backend=my_kernel:WRONG", *SMALL).stdout.str()
    assert kinds
    assert set(kinds) <= set(re.findall(r"^  case  (.*)$", out, re.MULTILINE))


MARKED = """
    import pytest

    @pytest.mark.mla_conformance("my_kernel:{name}", preset="a.x-k2", format="bf16", oracle="value")
    def test_kernel(capsys):
        print("after the claim")
    """


def test_a_marked_function_is_a_test_for_each_claim_and_runs_after_it(project):
    project.makepyfile(MARKED.format(name="RIGHT"))
    result = run(project, "-v", "-rP")
    result.assert_outcomes(passed=4)
    name = "my_kernel:RIGHT/latent_attention/value/decode"
    one = f"test_a_marked_function_is_a_test_for_each_claim_and_runs_after_it.py::test_kernel[{name}]"
    assert one in result.stdout.str()
    run(project, one).assert_outcomes(passed=1)


def test_a_marked_function_does_not_run_where_the_claim_broke(project):
    project.makepyfile(MARKED.format(name="WRONG").replace("print", "raise SystemExit"))
    result = run(project)
    result.assert_outcomes(failed=4)
    assert result.stdout.str().count("\nFAIL my_kernel:WRONG default value\n") == 4


def test_a_claim_that_says_nothing_of_its_cases_is_a_skip_with_its_reason(project):
    words = [word for word in SMALL if "oracle" not in word]
    result = run(
        project, "--mla-backend=my_kernel:RIGHT", *words, "--mla-oracle=captured", "-k", "decode", "-rs"
    )
    result.assert_outcomes(skipped=1, deselected=3)
    result.stdout.fnmatch_lines(["*the backend prepares nothing*"])


def test_unsupported_is_a_skip_with_its_reason_and_nothing_else_a_failure(project):
    project.makepyfile(test_it="def test_own(): pass")
    result = run(project, "-rs", "--mla-backend=my_kernel:GPU", *SMALL)
    result.assert_outcomes(passed=1, skipped=8)
    out = result.stdout.str()
    assert "my_kernel:GPU: unavailable, needs a GPU (10 cases)" in out
    assert "mla-verify: my_kernel:GPU: nothing ran" in out
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_one_backend_that_ran_is_enough_unless_the_other_is_required(project):
    both = ["--mla-backend=my_kernel:GPU", "--mla-backend=my_kernel:RIGHT", *SMALL]
    result = run(project, *both)
    result.assert_outcomes(passed=8, skipped=8)
    assert result.ret == 0
    result = run(project, *both, "--mla-require")
    result.assert_outcomes(passed=8, failed=8)
    assert "required, but it did not run: my_kernel:GPU: unavailable, needs a GPU" in result.stdout.str()


def test_known_failures_are_the_authors_and_strict(project):
    project.path.joinpath("known.txt").write_text(
        "# masks are one short\nmy_kernel:WRONG/*/value/*  the newest key is lost\n", encoding="utf-8"
    )
    words = ["--mla-backend=my_kernel:WRONG", *SMALL[:2], "--mla-xfail=known.txt", "-k"]
    result = run(project, *words, "value and not scale", "-rx")
    assert chosen(result) == {"xfailed": 4}
    assert "the newest key is lost" in result.stdout.str()

    project.path.joinpath("known.txt").write_text("*/contract/*  said to fail\n", encoding="utf-8")
    result = run(project, *words, "contract")
    assert chosen(result) == {"failed": 4}
    assert "[XPASS(strict)] said to fail" in result.stdout.str()


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (
            "my_kernel:RIGHT/*/nonsense/*  gone\n",
            "known.txt:1: 'my_kernel:RIGHT/*/nonsense/*' is the name of",
        ),
        ("\n*/value/*\n", "known.txt:2: '*/value/*' has no reason"),
    ],
)
def test_a_known_failure_must_be_one(project, known, message):
    project.path.joinpath("known.txt").write_text(known, encoding="utf-8")
    result = run(project, "--mla-backend=my_kernel:RIGHT", *SMALL[:2], "--mla-xfail=known.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mla-backend=nowhere:X"], "backend 'nowhere:X': cannot import 'nowhere'"),
        (["--mla-backend=my_kernel:X"], "backend 'my_kernel:X': my_kernel has no X"),
        (["--mla-backend=my_kernel:RIGHT", "--mla-oracle=no"], "oracle 'no' is not one of"),
        (["--mla-backend=my_kernel:RIGHT", "--mla-preset=no"], "preset 'no' is not known"),
        (
            ["--mla-backend=my_kernel:RIGHT", "--mla-problem=rope"],
            "my_kernel:RIGHT': not tried, it implements latent_attention, not rope",
        ),
        (
            ["--mla-backend=my_kernel:RIGHT", "--mla-oracle=rope_norm"],
            "my_kernel:RIGHT': not tried, rope_norm does not judge latent_attention, which it implements",
        ),
        (["--mla-backend=my_kernel:RIGHT", "--mla-xfail=no.txt"], "--mla-xfail"),
        (["--mla-backend=my_kernel:RIGHT", "--mla-case=no.json"], "no.json: No such file or directory"),
        (["--mla-backend=my_kernel:RIGHT", "--mla-case=no.safetensors"], "no.safetensors: No such file"),
        (["--mla-backend=my_kernel:RIGHT", "--mla-timeout=soon"], "time 'soon' is no length of time"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(project, words, message):
    result = run(project, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


def test_a_marker_that_cannot_be_is_an_error_of_its_file(project):
    project.makepyfile(MARKED.format(name="RIGHT").replace("oracle=", "oracel="))
    result = run(project)
    result.assert_outcomes(errors=1)
    assert "mla_conformance: 'oracel' is not one of backend, problem" in result.stdout.str()


def test_a_configuration_file_says_it_once(project):
    project.makeini(
        "[pytest]\nmla_backend = my_kernel:RIGHT\nmla_preset = a.x-k2\nmla_format = bf16\nmla_oracle = lse\n"
    )
    project.makepyfile("import pytest\n@pytest.mark.mla_conformance\ndef test_kernel(): pass")
    run(project).assert_outcomes(passed=4)
    run(project, "--mla-oracle=value", "--mla-oracle=lse").assert_outcomes(passed=8)


CONFIGURED = {
    "pytest.ini": "[pytest]\nmla_backend = my_kernel:RIGHT\nmla_preset = a.x-k2\nmla_oracle = lse\n"
    "mla_seed = 3\n",
    "setup.cfg": "[tool:pytest]\nmla_backend = my_kernel:RIGHT\nmla_preset = a.x-k2\nmla_oracle = lse\n",
    "pyproject.toml": '[tool.pytest.ini_options]\nmla_backend = "my_kernel:RIGHT"\nmla_preset = ["a.x-k2"]\n'
    'mla_oracle = "lse"\nmla_seed = 3\nmla_full = true\n',
    "tox.ini": "[pytest]\naddopts = --mla-backend my_kernel:RIGHT --mla-preset a.x-k2 --mla-oracle lse\n",
}


@pytest.mark.parametrize("file", CONFIGURED)
def test_a_backend_in_a_configuration_file_alone_is_tested(project, file):
    project.path.joinpath(file).write_text(CONFIGURED[file], encoding="utf-8")
    project.makepyfile(test_own="def test_own(): pass")
    names = [f"mla-verify::my_kernel:RIGHT/latent_attention/lse/{stage}" for stage in STAGES]

    def collected(*words):
        return [name for name in run(project, "--collect-only", "-q", *words).outlines if "::" in name]

    assert sorted(collected()) == sorted([*names, "test_own.py::test_own"])
    assert sorted(collected(".")) == sorted([*names, "test_own.py::test_own"])
    if file != "tox.ini":  # what stands on the command line is asked for
        assert collected("test_own.py") == ["test_own.py::test_own"]
    elsewhere = collected("--mla-backend=my_kernel:WRONG", "test_own.py")
    assert "mla-verify::my_kernel:WRONG/latent_attention/lse/decode" in elsewhere


def test_a_backend_in_the_environment_alone_is_tested(project, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--mla-backend=my_kernel:RIGHT {' '.join(SMALL)}")
    result = run(project, "--collect-only", "-q")
    assert sum(line.startswith("mla-verify::my_kernel:RIGHT/") for line in result.outlines) == 8


def test_a_number_in_a_configuration_file_that_is_none_is_said(project):
    project.makeini("[pytest]\nmla_backend = my_kernel:RIGHT\nmla_seed = x\n")
    result = run(project)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: mla_seed is 'x', must be an integer" in result.stderr.str()


def test_a_test_is_run_by_its_id_alone(project):
    project.makeini("[pytest]\nmla_preset = a.x-k2\nmla_format = bf16\n")
    project.makepyfile(test_own="def test_own(): pass")
    one = "mla-verify::my_kernel:RIGHT/latent_attention/lse/decode"
    result = run(project, "-v", one)
    result.assert_outcomes(passed=1)
    assert f"{one} PASSED" in result.stdout.str()
    run(project, one, "test_own.py").assert_outcomes(passed=2)
    outlines = run(
        project, "--collect-only", "-q", "mla-verify::my_kernel:RIGHT/latent_attention/lse"
    ).outlines
    assert sorted(name for name in outlines if "::" in name) == sorted(
        f"mla-verify::my_kernel:RIGHT/latent_attention/lse/{stage}" for stage in STAGES
    )
    for wrong in (f"{one}s", "mla-verify::my_kernel:RIGHT/rope"):
        result = run(project, wrong)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"ERROR: not found: {wrong}" in result.stderr.str()


def test_words_of_an_id_choose_tests(project):
    project.makepyfile(test_own="def test_own(): pass")
    words = ["--mla-backend=my_kernel:RIGHT", *SMALL, "--collect-only", "-q", "-k"]
    outlines = run(project, *words, "mla-verify and decode").outlines
    assert sum(name.startswith("mla-verify::") for name in outlines) == 2
    assert "test_own.py::test_own" in run(project, *words, "not mla-verify").outlines


@pytest.mark.parametrize("where", ["method", "class"])
def test_a_marked_unittest_is_no_pass(project, where):
    marker = '@pytest.mark.mla_conformance("my_kernel:WRONG", preset="a.x-k2", format="bf16", oracle="value")'
    on = {"class": ("", ""), "method": ("", "")} | {where: (marker, marker)}
    project.makepyfile(
        f"import pytest, unittest\n{on['class'][0]}\nclass TestIt(unittest.TestCase):\n"
        f"    {on['method'][0]}\n    def test_kernel(self): pass\n"
    )
    result = run(project)
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    said = "mla_conformance: test_kernel holds no claim: methods of unittest.TestCase take no parameters"
    assert said in result.stdout.str()


def test_a_plain_class_is_marked_like_its_functions(project):
    project.makepyfile(
        "import pytest\n@pytest.mark.mla_conformance('my_kernel:RIGHT', preset='a.x-k2', oracle='lse')\n"
        "class TestIt:\n    def test_kernel(self): pass\n"
    )
    run(project, "-k", "decode").assert_outcomes(passed=1, deselected=3)


def test_without_xdist_strict_markers_hold(project):
    words = ["--mla-backend=my_kernel:RIGHT", *SMALL, "-k", "decode", "--strict-markers", "-W", "error"]
    done = project.runpytest_subprocess(*words, "-p", "no:xdist")
    done.assert_outcomes(passed=2, deselected=6)


def test_known_failures_are_looked_up_beside_the_caller_and_the_configuration(project, monkeypatch):
    project.makeini("[pytest]\n")
    below = project.mkdir("below")
    words = ["--mla-backend=my_kernel:WRONG", *SMALL[:3], "--mla-xfail=known.txt", "-k", "decode"]
    for folder in (below, project.path):
        monkeypatch.chdir(below)
        folder.joinpath("known.txt").write_text("my_kernel:WRONG/*  known\n", encoding="utf-8")
        result = run(project, *words)
        folder.joinpath("known.txt").unlink()
        assert chosen(result) == {"xfailed": 1}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            "raise RuntimeError('no driver\\nat all')",
            "backend 'theirs': its import raised RuntimeError: no driver",
        ),
        ("raise SystemExit(3)", "backend 'theirs': its import raised SystemExit: 3"),
        (
            "import no_such_library",
            "backend 'theirs': cannot import 'theirs': No module named 'no_such_library'",
        ),
        ("def broken(:", "backend 'theirs': its import raised SyntaxError: invalid syntax"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(project, monkeypatch, module, message):
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    project.makepyfile(theirs=module)
    result = run(project, "--mla-backend=theirs", *SMALL)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert next(line for line in result.errlines if line.strip()).startswith(f"ERROR: {message}")


def test_workers_say_what_cannot_be_in_one_line_too(project):
    pytest.importorskip("xdist", reason="asks workers of pytest-xdist")
    project.makepyfile(theirs="raise RuntimeError('no driver')", test_own="def test_own(): pass")
    done = project.runpytest_subprocess("--mla-backend=theirs", *SMALL, "-n1")
    assert done.ret not in (0, pytest.ExitCode.INTERNAL_ERROR)
    out = done.stdout.str()
    assert "INTERNALERROR" not in out
    assert "backend 'theirs': its import raised RuntimeError: no driver" in out


def test_a_package_and_a_configuring_file_hold_backends(project):
    """As do a folder with a space in its name, and a module that prints when it is imported."""
    home = project.mkdir("a folder")
    home.joinpath("my_kernel.py").write_text(KERNEL, encoding="utf-8")
    home.joinpath("conftest.py").write_text("from my_kernel import RIGHT\n", encoding="utf-8")
    home.joinpath("pack").mkdir()
    home.joinpath("pack", "__init__.py").write_text(
        "import sys\nfrom my_kernel import RIGHT as BACKEND\nprint('out')\nprint('err', file=sys.stderr)\n",
        encoding="utf-8",
    )
    words = ["--mla-backend=conftest:RIGHT", "--mla-backend=pack", *SMALL[:3], "-k", "decode"]
    done = project.runpytest_subprocess(f"--rootdir={home}", *words, home)
    done.assert_outcomes(passed=2, deselected=6)


def test_what_failed_last_is_run_again_alone(project):
    words = ["--mla-backend=my_kernel:RIGHT", "--mla-backend=my_kernel:WRONG", *SMALL[:3]]
    run(project, *words, "-x", "-k", "decode").assert_outcomes(passed=1, failed=1, deselected=6)
    result = run(project, *words, "--lf")
    result.assert_outcomes(failed=1, deselected=7)


def test_drawn_cases_are_a_stage_of_their_own_and_their_failures_are_made_small(project):
    words = ["--mla-cases=4", "-k", "drawn and (value or contract) and not value_scale", "--mla-seed=3"]
    result = run(project, "--mla-backend=my_kernel:WRONG", *SMALL[:2], *words)
    assert chosen(result) == {"failed": 1, "passed": 1}
    out = result.stdout.str()
    assert "my_kernel:WRONG/latent_attention/value/drawn" in out
    assert re.search(r"^  case  latent_attention plain h=1 q=1 kv=1 bfloat16 bf16", out, re.MULTILINE)


CONFIG = '{"name":"m","hidden_size":8,"num_heads":2,"q_lora_rank":null,"kv_lora_rank":16,'
CONFIG += '"qk_nope_head_dim":8,"qk_rope_head_dim":8,"v_head_dim":8}'
CASE = f'{{"problem":"latent_attention","config":{CONFIG},"q_lens":[1],"kv_lens":[9]}}'


def test_given_cases_are_a_stage_of_their_own(project):
    project.path.joinpath("case.json").write_text(CASE, encoding="utf-8")
    for backend, outcome in (("RIGHT", "passed"), ("WRONG", "failed")):
        words = [f"--mla-backend=my_kernel:{backend}", *SMALL, "--mla-case=case.json", "-k", "given"]
        assert chosen(run(project, *words)) == {outcome: 2}


def test_a_kernel_that_ends_its_process_is_a_failure(project):
    project.path.joinpath("case.json").write_text(CASE, encoding="utf-8")
    words = [
        "--mla-backend=my_kernel:DEADLY",
        *SMALL,
        "--mla-timeout=60s",
        "--mla-case=case.json",
        "-k",
        "given",
    ]
    result = run(project, *words)
    assert chosen(result) == {"failed": 1, "skipped": 1}
    out = result.stdout.str()
    assert re.search(r"^CRASH my_kernel:DEADLY default (value|lse)\n.*\n  why   .*7", out, re.MULTILINE)


def test_a_suite_that_does_not_ask_imports_nothing_of_it(project):
    project.makepyfile("import sys\ndef test_own(): assert 'torch' not in sys.modules")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with our wheel, and beside it everything that this one has but the checkout."""
    from hatchling.build import build_wheel

    home = tmp_path_factory.mktemp("adopter")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        wheel = home / build_wheel(str(home))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    python = home / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    packages = sysconfig.get_path("purelib")
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    # The checkout's own installation is a path file in that folder, which is not followed from here.
    (site / "beside.pth").write_text(f"{packages}\n", encoding="utf-8")
    project = home / "project"
    (project / "tests").mkdir(parents=True)
    (project / "my_kernel.py").write_text(KERNEL, encoding="utf-8")
    (project / "tests" / "test_own.py").write_text("def test_own(): pass\n", encoding="utf-8")
    return project, home / "venv" / "bin"


def in_project(installed, *words):
    project, scripts = installed
    return subprocess.run(
        [scripts / words[0], *words[1:]], cwd=project, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_all_that_the_package_reads(installed):
    code = "import oracles, mla_ref, pathlib; print(pathlib.Path(oracles.__file__).parent)"
    where = Path(in_project(installed, "python", "-c", code).stdout.strip())
    assert installed[1].parent in where.parents
    tracked = subprocess.run(
        ["git", "ls-files", "mla_ref", "mla_fast", "oracles", "evals", ":!evals/checkpoints"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    missing = [name for name in tracked.stdout.split() if not (where.parent / name).exists()]
    assert not missing
    gate = in_project(installed, "mla-verify", "gate", "--baseline=nowhere", "--candidate=nowhere")
    assert (gate.returncode, gate.stderr.count("\n")) == (3, 1)
    assert "gate: nowhere: is neither a folder nor a results file of lm_eval" in gate.stderr


def test_from_the_wheel_the_plugin_is_green_and_red(installed):
    report = installed[0] / "junit.xml"
    words = [
        "-m",
        "pytest",
        "-n2",
        "--dist=loadgroup",
        f"--junit-xml={report}",
        *SMALL[:2],
        "--mla-oracle=value",
    ]
    backends = ["--mla-backend=my_kernel:RIGHT", "--mla-backend=my_kernel:WRONG"]
    done = in_project(installed, "python", *words, *backends)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 failed, 5 passed" in done.stdout
    assert re.search(r"^  case  latent_attention a\.x-k2 h=\d+ q=1 kv=1", done.stdout, re.MULTILINE)
    assert "  again mla-verify replay" in done.stdout
    failed = {
        case.get("name").partition("@")[0]
        for case in ElementTree.parse(report).getroot().iter("testcase")
        if case.find("failure") is not None
    }
    assert failed == {f"my_kernel:WRONG/latent_attention/value/{stage}" for stage in STAGES}


def test_from_the_wheel_the_command_line_is_green_and_red(installed):
    options = ["--preset=a.x-k2", "--format=bf16", "--oracle=value", "--jobs=1"]
    done = in_project(installed, "mla-verify", "run", "--backend=my_kernel:RIGHT", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^30 claims held, 0 failed, 6 not run", done.stdout, re.MULTILINE)
    done = in_project(installed, "mla-verify", "run", "--backend=my_kernel:WRONG", *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^FAIL my_kernel:WRONG default value\n  case  .* q=1 kv=1 ", done.stdout, re.MULTILINE)
