"""The package as a type checker sees it."""

import inspect
import os
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Has mypy check a file or the package; what it has read of PyTorch and NumPy serves the next one."""
    folder = tmp_path_factory.mktemp("mypy")

    def check(code=None):
        if code is not None:
            (folder / "code.py").write_text(code)
        command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", folder / "cache"]
        where = ["regard"] if code is None else [folder / "code.py"]
        # The types of the other native module are in its own package.
        environment = {**os.environ, "MYPYPATH": str(PACKAGE / "models")}
        return subprocess.run([*command, *where], cwd=PACKAGE, env=environment, capture_output=True, text=True)

    return check


def test_the_package_is_typed(checked):
    found = checked()
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_wrong_option_is_found_before_it_runs(checked):
    found = checked("import numpy as np, regard\nq = np.zeros((1, 1, 4, 8))\nregard.attention(q, q, q, softcap='50', msk='causal')\n")
    assert found.returncode == 1 and "softcap" in found.stdout and "msk" in found.stdout, found.stdout + found.stderr


def test_what_a_call_returns_is_known(checked):
    found = checked(
        "import numpy as np, regard\nq = np.zeros((1, 1, 4, 8))\n"
        "reveal_type(regard.attention(q, q, q))\nreveal_type(regard.attention(q, q, q, return_aux=True))\n"
        "import torch, regard.torch\nx = torch.zeros(1, 1, 4, 8)\n"
        "reveal_type(regard.torch.attention(x, x, x, mask='causal'))\nreveal_type(regard.torch.attention(x, x, x, return_aux=True))\n"
    )
    types = [line.split("Revealed type is ")[1] for line in found.stdout.splitlines() if "Revealed type" in line]
    assert found.returncode == 0 and len(types) == 4, found.stdout + found.stderr
    assert types[0].startswith('"numpy.ndarray') and "Aux" in types[1], types
    assert types[2].startswith('"torch._tensor.Tensor') and "regard.torch.Aux" in types[3], types


def test_options_are_spelled_out():
    import regard
    import regard.torch

    for function in (regard.attention, regard.torch.attention):
        parameters = inspect.signature(function).parameters
        assert {"mask", "softcap", "dropout", "return_aux"} < set(parameters)
        assert parameters["temperature"].default == 1.0 and not any(one.kind is one.VAR_KEYWORD for one in parameters.values())
