"""The criterions against fairseq's: values, gradients, logging, for every option. tests/train/test_fused_projection.py has the other way."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.cross_entropy import CrossEntropyCriterion as StockCrossEntropy
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as StockCriterion
from fairseq.distributed import ModuleProxyWrapper
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.trainer import Trainer
from torch import nn

from ls_plugin.criterions import CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion
from ls_plugin.criterions.token_loss import refuse_unless_softmax
from ls_plugin.errors import UnsupportedError

PAD, V = 1, 37  # a vocabulary that is a multiple of nothing


class Decoder(FairseqDecoder):
    """A model whose logits are a parameter, so that their gradient can be read."""

    def __init__(self, logits):
        super().__init__(dictionary=None)
        self.logits = nn.Parameter(logits)
        self.adaptive_softmax = None


class Model(BaseFairseqModel):
    def __init__(self, logits):
        super().__init__()
        self.decoder = Decoder(logits)

    def forward(self, **_):
        # "* 1" makes the logits an intermediate result, which may be overwritten, as in a model.
        return self.decoder.logits * 1, {"attn": [None]}

    def get_targets(self, sample, net_output):
        return sample["target"]


def task():
    return SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD))


def make_sample(batch=3, length=5):
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(4, V, (batch, length), generator=generator)
    if target.numel() > 4:
        target[0, -2:] = PAD
    return {"net_input": {}, "target": target, "ntokens": int(target.ne(PAD).sum())}


def run(cls, sample, logits, reduce=True, sentence_avg=False, **options):
    smoothing = {"label_smoothing": 0.1} if issubclass(cls, StockCriterion) else {}
    criterion = cls(task(), sentence_avg, **{**smoothing, **options})
    model = Model(logits.clone())
    loss, sample_size, logged = criterion(model, sample, reduce=reduce)
    weights = torch.linspace(0.5, 2.0, loss.numel()).view(
        loss.shape
    )  # the gradient of each token's loss must be heeded
    (loss * weights).sum().backward()
    return loss.detach(), sample_size, logged, model.decoder.logits.grad


OPTIONS = {
    "default": {},
    "no_smoothing": {"label_smoothing": 0.0},
    "much_smoothing": {"label_smoothing": 0.9},
    "accuracy": {"report_accuracy": True},
    "ignored_prefix": {"ignore_prefix_size": 2, "report_accuracy": True},
    "all_ignored": {"ignore_prefix_size": 5, "report_accuracy": True},
    "sentence_avg": {"sentence_avg": True},
    "per_token": {"reduce": False},
    "per_token_prefix": {"reduce": False, "ignore_prefix_size": 1, "report_accuracy": True},
}


SMOOTHED = (LabelSmoothedCrossEntropyCriterion, StockCriterion)
PLAIN = (CrossEntropyCriterion, StockCrossEntropy)
CASES = {name: (*SMOOTHED, options) for name, options in OPTIONS.items()}
CASES |= {f"plain_{name}": (*PLAIN, OPTIONS[name]) for name in ("default", "sentence_avg", "per_token")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cls, stock, options", CASES.values(), ids=CASES.keys())
def test_equals_stock(cls, stock, options, dtype):
    sample = make_sample()
    torch.manual_seed(1)
    logits = (3 * torch.randn(3, 5, V)).to(dtype)
    stock_loss, stock_size, stock_logged, stock_grad = run(stock, sample, logits, **options)
    loss, size, logged, grad = run(cls, sample, logits, **options)

    assert loss.shape == stock_loss.shape
    torch.testing.assert_close(loss.float(), stock_loss.float(), rtol=1e-5, atol=1e-5)
    # q - p is stored in the logits' dtype.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(grad, stock_grad, rtol=4 * eps, atol=max(4 * eps * 1e-2, 1e-6))
    assert size == stock_size
    assert logged.keys() == stock_logged.keys()
    for name, expected in stock_logged.items():
        torch.testing.assert_close(
            torch.as_tensor(logged[name]).float(), torch.as_tensor(expected).float(), rtol=1e-5, atol=1e-5
        )


def test_padding_gets_no_loss_and_no_gradient():
    sample = make_sample()
    loss, _, _, grad = run(LabelSmoothedCrossEntropyCriterion, sample, torch.randn(3, 5, V), reduce=False)
    padding = sample["target"].eq(PAD)
    assert (loss.view(3, 5)[padding] == 0).all()
    assert (grad[padding] == 0).all()
    assert (grad[~padding] != 0).any()


def test_validation_leaves_the_logits_alone():
    sample = make_sample()
    criterion = LabelSmoothedCrossEntropyCriterion(task(), False, 0.1, report_accuracy=True)
    model = Model(torch.randn(3, 5, V))
    before = model.decoder.logits.detach().clone()
    with torch.no_grad():
        loss, _, logged = criterion(model, sample)
    assert torch.equal(model.decoder.logits, before)
    trained, _, train_logged = criterion(model, sample)
    torch.testing.assert_close(loss, trained.detach())
    assert logged["n_correct"] == train_logged["n_correct"]


@pytest.mark.parametrize("batch, length", [(1, 1), (0, 4), (2, 0)])
def test_tiny_and_empty_batches(batch, length):
    sample = make_sample(batch, length)
    loss, _, logged, grad = run(
        LabelSmoothedCrossEntropyCriterion, sample, torch.randn(batch, length, V), report_accuracy=True
    )
    assert torch.isfinite(loss)
    assert grad.shape == (batch, length, V)
    assert logged["total"] == batch * length


@pytest.mark.parametrize(
    "pair, options", [(SMOOTHED, {"report_accuracy": True}), (PLAIN, {"sentence_avg": True}), (PLAIN, {})]
)
def test_metrics_are_reduced_as_stock_reduces_them(pair, options):
    sample = make_sample()
    smoothed = []
    for cls in pair:
        logged = run(cls, sample, torch.ones(3, 5, V).cumsum(-1), **options)[2]
        with metrics.aggregate(new_root=True) as aggregator:
            cls.reduce_metrics([logged, logged])
        smoothed.append(aggregator.get_smoothed_values())
    assert smoothed[0].keys() == smoothed[1].keys()
    for name, value in smoothed[0].items():
        assert float(smoothed[1][name]) == pytest.approx(float(value), rel=1e-4)


def test_adaptive_softmax_is_refused():
    model = Model(torch.randn(3, 5, V))
    model.decoder.adaptive_softmax = nn.Identity()
    for criterion in (LabelSmoothedCrossEntropyCriterion(task(), False, 0.1), CrossEntropyCriterion(task(), False)):
        message = rf"--criterion ls_{criterion.twin}: --adaptive-softmax-cutoff.*--criterion adaptive_loss"
        with pytest.raises(UnsupportedError, match=message):
            criterion(model, make_sample())


def test_models_with_their_own_probabilities_are_refused():
    class PointerGenerator(Decoder):
        def get_normalized_probs_scriptable(self, net_output, log_probs, sample=None):
            return net_output[0]

    class Mixture(Model):
        def get_normalized_probs(self, net_output, log_probs, sample=None):
            return net_output[0]

    pointer_generator = Model(torch.randn(3, 5, V))
    pointer_generator.decoder = PointerGenerator(torch.randn(3, 5, V))
    encoder_only = Model(torch.randn(3, 5, V))
    del encoder_only.decoder
    for model, name in (
        (pointer_generator, "PointerGenerator"),
        (Mixture(torch.randn(3, 5, V)), "Mixture"),
        (encoder_only, "Model"),
    ):
        with pytest.raises(UnsupportedError, match=rf"got {name}\. Use --criterion label_smoothed_cross_entropy"):
            LabelSmoothedCrossEntropyCriterion(task(), False, 0.1)(model, make_sample())


def test_the_trainer_refuses_before_the_first_update():
    model = Model(torch.randn(3, 5, V))
    model.decoder.adaptive_softmax = nn.Identity()
    cfg = SimpleNamespace(common=SimpleNamespace(quantization_config_path=None))
    with pytest.raises(UnsupportedError, match="--adaptive-softmax-cutoff"):
        Trainer(cfg, task(), model, LabelSmoothedCrossEntropyCriterion(task(), False, 0.1))


def test_wrappers_for_distributed_training_pass_the_check():
    parallel = nn.Module()  # DistributedDataParallel keeps the model so, too
    parallel.module = Model(torch.randn(3, 5, V))
    refuse_unless_softmax(ModuleProxyWrapper(parallel), "cross_entropy")


@pytest.mark.parametrize("stock", [StockCriterion, StockCrossEntropy])
def test_class_name_is_stock_so_that_checkpoints_resume(stock):
    (name,) = (name for name, cls in CRITERION_REGISTRY.items() if cls is stock)
    assert CRITERION_REGISTRY[f"ls_{name}"].__name__ == stock.__name__
