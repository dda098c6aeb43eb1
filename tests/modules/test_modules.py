"""The small modules: dropout, layer norm, embedding, and replacing stock ones by them."""

import pickle

import pytest
import torch
from fairseq.modules import FairseqDropout
from torch import nn

from ls_plugin.errors import TokenIdError
from ls_plugin.modules import Dropout, LayerNorm, TokenEmbedding, use_fused_modules


def test_layer_norm_is_a_drop_in():
    torch.manual_seed(1)
    stock, ours = nn.LayerNorm(33), LayerNorm(33)
    nn.init.normal_(stock.weight)
    ours.load_state_dict(stock.state_dict(), strict=True)
    x = torch.randn(4, 3, 33)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-5)


def test_dropout_is_off_without_reason_to_drop():
    x = torch.randn(5, 7)
    dropout = Dropout(0.5)
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    dropout.apply_during_inference = True
    assert (dropout(x) == 0).any()


def test_dropout_keeps_the_share_it_should_and_scales():
    torch.manual_seed(1)
    y = Dropout(0.25).train()(torch.ones(400, 500))
    assert (y != 0).float().mean().item() == pytest.approx(0.75, abs=0.01)
    assert y.mean().item() == pytest.approx(1.0, abs=0.01)


def test_add_to_is_residual_plus_dropout_of_x_plus_bias():
    torch.manual_seed(1)
    x, residual, bias = torch.randn(6, 5), torch.randn(6, 5), torch.randn(5)
    torch.testing.assert_close(Dropout(0.4).eval().add_to(residual, x, bias), residual + x + bias)
    dropped = Dropout(0.4).train().add_to(residual, x, bias) - residual
    kept = dropped.abs() > 1e-6
    torch.testing.assert_close(dropped[kept], ((x + bias) / 0.6)[kept], rtol=1e-3, atol=1e-4)
    assert 0 < kept.sum() < kept.numel()


def test_add_and_normalize_is_add_to_and_layer_norm():
    torch.manual_seed(1)
    x, residual, bias, norm = torch.randn(6, 5), torch.randn(6, 5), torch.randn(5), LayerNorm(5, eps=1e-3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    for dropout in (Dropout(0.4).eval(), Dropout(0.4).train()):
        torch.manual_seed(2)
        total = dropout.add_to(residual, x, bias)
        torch.manual_seed(2)
        fused_total, y = dropout.add_and_normalize(norm, residual, x, bias)
        torch.testing.assert_close((fused_total, y), (total, norm(total)))


def test_embedding_shares_its_weight_and_names_a_bad_id():
    stock = nn.Embedding(10, 4, padding_idx=1)
    ours = TokenEmbedding.of(stock)
    assert ours.weight is stock.weight
    tokens = torch.tensor([[1, 5, 9]])
    assert torch.equal(ours(tokens), stock(tokens))
    with pytest.raises(TokenIdError, match=r"\[0, 10\).*got 10 \(1 of 3 ids are outside\).*another dictionary"):
        ours(torch.tensor([[3, 10, 4]]))
    assert issubclass(TokenIdError, IndexError)


def test_fused_modules_take_over_parameters_and_leave_grandchildren():
    module = nn.Module()
    module.norm, module.dropout, module.inner = (
        nn.LayerNorm(8, eps=1e-3),
        FairseqDropout(0.3, module_name="X"),
        nn.Module(),
    )
    module.inner.norm = nn.LayerNorm(8)
    module.plain = nn.LayerNorm(8, elementwise_affine=False)
    weight = module.norm.weight
    use_fused_modules(module, "StockName")
    assert isinstance(module.norm, LayerNorm)
    assert module.norm.weight is weight
    assert module.norm.eps == 1e-3
    assert isinstance(module.plain, LayerNorm)
    assert module.plain.weight is None
    assert isinstance(module.dropout, Dropout)
    assert module.dropout.module_name == "StockName"
    assert type(module.inner.norm) is nn.LayerNorm


def test_modules_pickle():
    for module in (LayerNorm(4), Dropout(0.1), TokenEmbedding(5, 3)):
        assert type(pickle.loads(pickle.dumps(module))) is type(module)
