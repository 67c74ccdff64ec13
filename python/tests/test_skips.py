"""In the gate a test that is skipped has failed: one that never runs looks like one that passes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = {
    "mark": "import pytest\n@pytest.mark.skipif(True, reason='no such file')\ndef test(): pass\n",
    "call": "import pytest\ndef test(): pytest.skip('no such file')\n",
    "import": "import pytest\ndef test(): pytest.importorskip('no_such_file', reason='no such file')\n",
    "whole": "import pytest\npytest.skip('no such file', allow_module_level=True)\n",
}


@pytest.mark.parametrize("how", SKIPPED)
def test_a_skip_is_a_failure_where_it_is_forbidden(how, tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_some.py").write_text(SKIPPED[how] + "def test_other(): pass\n")
    # A file that is skipped whole is one that cannot be collected (2); nothing else is in it (5).
    for forbidden, status in (("", 5 if how == "whole" else 0), ("1", 2 if how == "whole" else 1)):
        environment = {**os.environ, "REGARD_NO_SKIPS": forbidden}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
        said = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert said.returncode == status, said.stdout
        assert not forbidden or "no such file" in said.stdout and "REGARD_NO_SKIPS" in said.stdout
