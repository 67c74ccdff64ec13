"""PyTorch as a baseline of `regard bench`: every form that it offers runs, and computes the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

FORMS = {
    "prefill-f32-n16-d8-h2": {"default", "math"},
    "prefill-bf16-n40-d16-h2-causal": {"default", "math"},
    "prefill-f32-n40-d16-h2-causal-window8": {"default", "math", "chunks", "flex"},
    "prefill-f32-n16-d16-h2-causal-softcap": {"eager"},
    "prefill-f32-n16-d16-h2-causal-sinks": {"eager", "flash + lse"},
    "short-f32-n8-d8-b3-padding": {"default", "math", "items alone"},
    "decode-f32-n64-d16": {"default", "math", "folded"},
    "decode-f32-n64-d16-q4-causal": {"default", "math", "folded"},
    "decode-f32-n64-d16-q4-tree": {"default", "math", "folded", "flex"},
    "decode-f32-n64-d16-q4-keys9": {"default", "math", "folded", "gathered"},
    "decode-f32-n64-d24-v16-h16-kv1-latent": {"default", "math", "folded"},
    "decode-f32-n64-d16-b3-shared": {"default", "math", "folded"},
    "backward-f32-n16-d8-h2-causal": {"default", "math"},
    "backward-f32-n16-d8-h2-headbias": {"default", "math"},
    "backward-f32-n16-d8-h2-causal-dropout": {"default", "math"},
    "backward-f32-n16-d8-h1-additive": {"module"},
    "backward-f32-n16-d8-h1-top-3": {"module"},
}


@pytest.mark.parametrize("case", FORMS)
def test_every_form_of_pytorch_runs_and_agrees(case):
    command = [sys.executable, "-m", "regard", "bench", "run", "--case", case, "--seconds", "0.01", "--format", "json"]
    done = subprocess.run([*command, "--against", "torch", "--python", sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (torch,) = json.loads(done.stdout)["baselines"]
    assert set(torch["forms_ms"]) == FORMS[case] and not torch.get("refused"), torch
    assert torch["form"] in FORMS[case] and torch["ratio"] > 0
