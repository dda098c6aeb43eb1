"""Derivatives that no op has are refused, never lost in silence: second ones, forward-mode ones, those of torch.func. And activation
checkpointing, which computes what is saved anew in the backward, changes none."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.ops.accuracy import needs_library
from tests.ops.cases import all_cases

pytestmark = needs_library
CASES = all_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@each_case
def test_penalty_on_the_gradient_is_refused(case):
    """The incoming gradient is a constant here, and the loss has a gradient without the penalty."""
    leaves = case.leaves()
    loss = sum(out.sum() for out in case.outputs(leaves))
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    penalised = loss + sum(grad.square().sum() for grad in grads)
    with pytest.raises(RuntimeError, match=r"\w+: the fused op is differentiable once; use ls_plugin.reference"):
        penalised.backward()


@each_case
def test_forward_mode_is_refused(case):
    leaves = case.leaves(requires_grad=False)
    with forward_ad.dual_level():
        for i, leaf in enumerate(leaves):
            dual = [*leaves[:i], forward_ad.make_dual(leaf, torch.ones_like(leaf)), *leaves[i + 1 :]]
            with pytest.raises(
                (RuntimeError, NotImplementedError), match=r"forward-mode .* unsupported|forward mode AD"
            ):
                case.outputs(dual)
        case.outputs(leaves)  # no tangent, no refusal


@each_case
def test_transforms_of_torch_func_are_refused(case):
    def outputs(*leaves):
        return sum(out.sum() for out in case.function(*leaves))

    leaves = case.leaves()
    with pytest.raises(RuntimeError, match=r"torch.func .* unsupported|functorch transforms"):
        torch.vmap(outputs, randomness="different")(*[leaf[None] for leaf in leaves])
    with pytest.raises(RuntimeError, match=r"torch.func .* unsupported|functorch transforms"):
        torch.func.grad(outputs)(*leaves)


@each_case
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(case, use_reentrant):
    def gradients(outputs):
        leaves = case.leaves()
        torch.manual_seed(5)
        sum(out.square().sum() for out in outputs(leaves)).backward()
        return [leaf.grad for leaf in leaves]

    def function(*leaves):
        outputs = case.function(*leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    expected = gradients(lambda leaves: function(*leaves))
    found = gradients(lambda leaves: checkpoint(function, *leaves, use_reentrant=use_reentrant))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))
