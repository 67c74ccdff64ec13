"""`scaled_dot_product_attention` and the operators of PyTorch, judged by PyTorch's own samples (`OpInfo`), `gradcheck` and `opcheck`."""

import pytest
import torch
from torch.library import opcheck
# Private: python/environment pins PyTorch.
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import regard

SAMPLES = 25
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


(OPERATOR,) = [one for one in op_db if one.name == "nn.functional.scaled_dot_product_attention"]
# What PyTorch allows its own kernels: scores of up to 95 cost f32 five bits. Other types have the defaults of assert_close.
(TOLERANCES,) = [one.d for info in OPERATOR.decorators for one in info.decorators if isinstance(one, toleranceOverride)]


def samples(dtype, requires_grad=False):
    """Arguments of `scaled_dot_product_attention`, the same ones in each call."""
    torch.manual_seed(0)
    return [((x.input, *x.args), x.kwargs) for x in OPERATOR.sample_inputs("cpu", dtype, requires_grad=requires_grad)]


DROPS = [kwargs["dropout_p"] > 0 for _, kwargs in samples(torch.float32)]
WITHOUT_DROPOUT = [i for i, drops in enumerate(DROPS) if not drops]


def test_all_samples_of_opinfo_are_collected():
    assert len(DROPS) == SAMPLES and sum(DROPS) == 12 and all(len(samples(dtype)) == SAMPLES for dtype in DTYPES)


@pytest.mark.parametrize("sample", WITHOUT_DROPOUT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_agrees_with_pytorch(dtype, sample):
    tensors, kwargs = samples(dtype)[sample]
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(*[x.double() for x in tensors], **wide).to(dtype)
    found = [regard.scaled_dot_product_attention(*tensors, **kwargs)]
    if dtype != torch.bfloat16:  # which PyTorch cannot hand to NumPy
        arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}
        found.append(torch.from_numpy(regard.scaled_dot_product_attention(*[x.numpy() for x in tensors], **arrays)))
    for one in found:
        torch.testing.assert_close(one, expected, **(TOLERANCES[dtype]._asdict() if dtype in TOLERANCES else {}))


@pytest.mark.parametrize("sample", [i for i, drops in enumerate(DROPS) if drops])
def test_the_mean_of_a_sample_with_dropout_is_that_without(sample):
    """Which weights are dropped depends on the generator, so only the expected value can be compared."""
    tensors, kwargs = samples(torch.float32)[sample]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, **{**kwargs, "dropout_p": 0.0})
    torch.manual_seed(0)
    draws = torch.stack([regard.scaled_dot_product_attention(*tensors, **kwargs) for _ in range(1000)])
    # Six standard errors of each mean; a weight that is 1 has a spread even if all other weights are 0.
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - expected).abs() <= 6 * error + 1e-5).all() and error.max() > 0


@pytest.mark.parametrize("sample", WITHOUT_DROPOUT)
def test_gradients_of_a_sample_pass_gradcheck(sample):
    tensors, kwargs = samples(torch.float64, requires_grad=True)[sample]
    mask = kwargs.pop("attn_mask", None)
    inputs = [*tensors, *([] if mask is None else [mask])]
    assert all(x.requires_grad for x in inputs)

    def call(q, k, v, mask=None):
        return regard.scaled_dot_product_attention(q, k, v, mask, **kwargs)

    assert torch.autograd.gradcheck(call, inputs)


class Recorded(TorchDispatchMode):
    """Arguments of the calls of Regard's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "regard":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_the_operators_of_a_sample_pass_opcheck(sample):
    """Forward and backward."""
    tensors, kwargs = samples(torch.float32, requires_grad=True)[sample]
    with Recorded() as recorded:
        regard.scaled_dot_product_attention(*tensors, **kwargs).sum().backward()
    assert [str(function) for function, _ in recorded.calls] == ["regard.attention_fwd.default", "regard.attention_bwd.default"]
    for function, arguments in recorded.calls:
        opcheck(function, arguments)
