"""The package as a type checker sees it."""

import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def test_the_package_is_typed(tmp_path):
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(tmp_path), "regard"]
    found = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_wrong_option_is_found_before_it_runs(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import numpy as np, regard\nq = np.zeros((1, 1, 4, 8))\nregard.attention(q, q, q, softcap='50', msk='causal')\n")
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), str(wrong)]
    found = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert found.returncode == 1 and "softcap" in found.stdout and "msk" in found.stdout, found.stdout + found.stderr
