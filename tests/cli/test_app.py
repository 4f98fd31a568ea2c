"""The installed command: instant help, exit codes, completion."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.command_line import XMAC

from xmac_cli.app import VERBS


def run(*arguments, env=None, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    command = [*XMAC, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


def seconds(command):
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=True)
        samples.append(time.perf_counter() - start)
    return min(samples)


def test_help_lists_every_verb():
    done = run("--help")
    assert done.returncode == 0
    assert all(name in done.stdout for name in VERBS)


def test_help_is_as_quick_as_the_interpreter():
    bare = seconds([sys.executable, "-c", "pass"])
    assert seconds([*XMAC, "--help"]) <= 3 * bare + 0.3


@pytest.mark.parametrize("arguments", [["--help"], *[[verb, "--help"] for verb in VERBS]])
def test_no_help_page_imports_torch_or_transformers(arguments):
    code = (
        "import sys; from xmac_cli.app import run_command_line as r; "
        f"assert r({arguments!r}) == 0; "
        "bad = {'torch', 'transformers', 'numpy', 'numba', 'triton'} & set(sys.modules); "
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "/nonexistent"], 2, "does not exist"),
        (["inspect"], 2, "INPUT"),
        (["inspekt"], 2, "inspekt"),
        (["inspect", ".", "--no-such-flag"], 2, "no-such-flag"),
        (["inspect", "-"], 2, "no path"),
        (["prune-moe", "a", "b", "--ratio", "1.5"], 2, "--ratio must be < 1"),
        (["prune-moe", "a", "b", "--ratio", "many"], 2, "ratio"),
        (["prune-moe", "a", "b", "--criterion", "shaply"], 2, "did you mean shapley"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, code, words):
    done = run(*arguments, stdin=subprocess.DEVNULL)
    assert done.returncode == code
    assert words in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 3


def test_debug_shows_the_traceback():
    assert "Traceback" in run("inspect", "/nonexistent", "--debug").stderr


def test_version_names_the_package():
    assert run("--version").stdout.startswith("xmac ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [("xmac prune", ["prune-moe"]), ("xmac prune-moe --rgis-w", ["--rgis-weights"]), ("xmac ver", ["verify"])],
)
def test_tab_completion_knows_verbs_and_flags(words, expected):
    environment = {
        "_XMAC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = run(env=environment)
    assert all(word in done.stdout.split() for word in expected), (done.stdout, done.stderr)


def test_a_directory_without_a_model_is_exit_code_1(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    done = run("inspect", tmp_path)
    assert done.returncode == 1 and "safetensors" in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_says_what_is_left(tmp_path):
    with subprocess.Popen(
        [*XMAC, "demo-model", "moe", "-o", str(tmp_path / "out"), "--data-dir", str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        for _ in range(600):
            if (tmp_path / "out.partial").exists():
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "xmac: interrupted" in errors and "Traceback" not in errors
    assert not (tmp_path / "out").exists()


def test_closed_streams_are_no_error():
    for closed in (">&-", "2>&-"):
        command = f"{' '.join(XMAC)} doctor --quiet {closed}"
        assert subprocess.run(command, shell=True, check=False, capture_output=True).returncode == 0
