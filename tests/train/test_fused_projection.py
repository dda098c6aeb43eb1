"""--fused-projection: the loss by blocks of tokens equals stock's with all gradients, and is taken where it can be and where it pays."""

import importlib
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion as StockCrossEntropy
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as StockLabelSmoothed
from fairseq.data import Dictionary
from fairseq.distributed import ModuleProxyWrapper
from fairseq.models.bart import BARTModel, bart_base_architecture
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from ls_plugin import ops
from ls_plugin.criterions import CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion, token_loss
from ls_plugin.criterions.projection import reasons_against_blocks, saves_memory
from ls_plugin.errors import UnsupportedError
from ls_plugin.models import LightSeqBARTModel, LightSeqTransformerLanguageModel, LightSeqTransformerModel

linear_cross_entropy = importlib.import_module("ls_plugin.ops.linear_cross_entropy")
PAD, B, T = 1, 5, 11
SIZES = {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_layers": 1, "encoder_attention_heads": 2}
SIZES |= {"decoder_embed_dim": 16, "decoder_ffn_embed_dim": 24, "decoder_layers": 1, "decoder_attention_heads": 2}
SIZES |= {"dropout": 0.0, "attention_dropout": 0.0, "max_source_positions": 32, "max_target_positions": 32}
# fp32: the sums over tokens and classes come in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 32 rows: two at the sizes of these tests."""
    monkeypatch.setattr(linear_cross_entropy, "_BLOCK_ELEMENTS", 1)


@pytest.fixture
def calls(monkeypatch):
    """The way that each loss was computed, in order."""
    seen = []

    def spy(way, stock):
        def function(*args, **kwargs):
            seen.append(way)
            return stock(*args, **kwargs)

        return function

    monkeypatch.setattr(ops, "linear_cross_entropy", spy("blocks", ops.linear_cross_entropy))
    monkeypatch.setattr(ops, "label_smoothed_cross_entropy", spy("logits", ops.label_smoothed_cross_entropy))
    return seen


def make_task():
    dictionary = Dictionary()
    for i in range(43):
        dictionary.add_symbol(f"word{i}")
    dictionary.add_symbol("<mask>")
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, dictionary=dictionary)


def build(cls=TransformerModel, **options):
    """A tiny model in train mode, the same weights each time."""
    task = make_task()
    task.output_dictionary = task.dictionary
    args = Namespace(**{**SIZES, "tokens_per_sample": 32, "task": "translation", **options})
    if issubclass(cls, BARTModel):
        bart_base_architecture(args)
    elif issubclass(cls, TransformerLanguageModel):
        base_lm_architecture(args)
    torch.manual_seed(1)
    return cls.build_model(args, task).train()


def make_sample(model):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(4, 47, (B, T + 1), generator=generator)
    tokens[1, -4:] = PAD
    previous, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    net_input = {"src_tokens": previous, "src_lengths": previous.ne(PAD).sum(1)}
    if hasattr(model, "encoder"):
        net_input = {"src_tokens": tokens.flip(1), "src_lengths": tokens.ne(PAD).sum(1), "prev_output_tokens": previous}
    return {"net_input": net_input, "target": target, "ntokens": int(target.ne(PAD).sum()), "nsentences": B}


def make_criterion(cls, fused_projection=None, sentence_avg=False, **options):
    if fused_projection:
        options["fused_projection"] = fused_projection
    if issubclass(cls, StockLabelSmoothed):
        options["label_smoothing"] = 0.1
    return cls(make_task(), sentence_avg, **options)


def run(model, criterion, reduce=True, n_batches=1):
    """Loss, sample size, what is logged, all gradients; batches after the first add to the gradients."""
    model.zero_grad()
    for _ in range(n_batches):
        loss, size, logged = criterion(model, make_sample(model), reduce=reduce)
        (loss * torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)).sum().backward()
    return loss.detach(), size, logged, {name: p.grad for name, p in model.named_parameters()}


def assert_equal(ours, stock):
    (loss, size, logged, grads), (stock_loss, stock_size, stock_logged, stock_grads) = ours, stock
    assert (loss.shape, size, logged.keys()) == (stock_loss.shape, stock_size, stock_logged.keys())
    torch.testing.assert_close(loss, stock_loss, **TOLERANCE)
    for name, expected in stock_logged.items():
        torch.testing.assert_close(torch.as_tensor(logged[name]), torch.as_tensor(expected), **TOLERANCE)
    for name, expected in stock_grads.items():
        torch.testing.assert_close(grads[name], expected, **TOLERANCE)


SMOOTHED, PLAIN = (LabelSmoothedCrossEntropyCriterion, StockLabelSmoothed), (CrossEntropyCriterion, StockCrossEntropy)
TIED = {"share_decoder_input_output_embed": True}
MODELS = {
    "untied": (TransformerModel, {}),
    "tied": (TransformerModel, TIED),
    "share_all": (TransformerModel, {"share_all_embeddings": True}),
    "output_dim": (TransformerModel, {"decoder_output_dim": 12}),
    "ls_untied": (LightSeqTransformerModel, {}),
    "ls_tied": (LightSeqTransformerModel, TIED),
    "lm_untied": (TransformerLanguageModel, {}),
    "lm_tied": (TransformerLanguageModel, TIED),
    "bart": (BARTModel, {"max_source_positions": 32}),
    "ls_lm_tied": (LightSeqTransformerLanguageModel, TIED),
    "ls_bart": (LightSeqBARTModel, {"max_source_positions": 32}),
}
CRITERIONS = {
    "smoothed": (SMOOTHED, {}, {}),
    "prefix": (SMOOTHED, {"ignore_prefix_size": 2}, {}),
    "all_ignored": (SMOOTHED, {"ignore_prefix_size": T}, {}),
    "sentence_avg": (SMOOTHED, {"sentence_avg": True}, {}),
    "accumulated": (SMOOTHED, {}, {"n_batches": 2}),
    "per_token": (SMOOTHED, {"ignore_prefix_size": 1}, {"reduce": False}),
    "plain": (PLAIN, {}, {}),
    "plain_sentence_avg": (PLAIN, {"sentence_avg": True}, {"n_batches": 2}),
    "plain_per_token": (PLAIN, {}, {"reduce": False}),
}


@pytest.mark.parametrize("cls, options", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("pair, flags, how", CRITERIONS.values(), ids=CRITERIONS.keys())
def test_blocks_equal_stock_with_all_gradients(calls, cls, options, pair, flags, how):
    ours, stock = pair
    model = build(cls, **options)
    expected = run(model, make_criterion(stock, **flags), **how)
    expected[3].update({name: grad.clone() for name, grad in expected[3].items()})
    assert_equal(run(model, make_criterion(ours, "always", **flags), **how), expected)
    assert set(calls) == {"blocks"}


@pytest.mark.parametrize("pair", [SMOOTHED, PLAIN], ids=["smoothed", "plain"])
@pytest.mark.parametrize("reduce", [True, False])
def test_validation_by_blocks_equals_stock(calls, pair, reduce):
    model = build(**TIED).eval()
    with torch.no_grad():
        results = [
            make_criterion(cls, flag)(model, make_sample(model), reduce=reduce)
            for cls, flag in zip(pair, ("auto", None), strict=True)
        ]
    (loss, size, logged), (stock_loss, stock_size, stock_logged) = results
    torch.testing.assert_close(loss, stock_loss, **TOLERANCE)
    assert (loss.shape, size, logged.keys()) == (stock_loss.shape, stock_size, stock_logged.keys())
    assert calls == ["blocks"]


# --- choosing


def test_auto_takes_blocks_where_there_are_several_of_them(calls, monkeypatch):
    model = build()
    criterion = make_criterion(LabelSmoothedCrossEntropyCriterion, "auto")
    for n_elem in (1, 10_000_000):
        monkeypatch.setattr(linear_cross_entropy, "_BLOCK_ELEMENTS", n_elem)
        run(model, criterion)
        with torch.no_grad():
            criterion(model, make_sample(model))
    assert calls == ["blocks", "blocks", "logits", "logits"]
    run(model, make_criterion(LabelSmoothedCrossEntropyCriterion, "never"))
    assert calls[-1] == "logits"


@pytest.mark.parametrize(
    "dtype, n_tokens, n_columns, n_classes, trains, reduce, expected",
    [
        (torch.float32, 1250, 256, 8_000, True, True, False),  # one block
        (torch.float32, 1400, 256, 8_000, True, True, True),
        (torch.float32, 312, 512, 32_000, True, True, False),
        (torch.float32, 350, 512, 32_000, True, True, True),
        (torch.float32, 4096, 512, 32_000, True, False, False),  # of single tokens: the logits twice
        (torch.float32, 350, 512, 32_000, False, False, True),
        (torch.float32, 32, 64, 100, True, True, False),
        (torch.bfloat16, 1024, 512, 32_000, True, True, False),  # fp32 gradients take more than the logits
        (torch.bfloat16, 4096, 512, 32_000, True, True, True),
        (torch.bfloat16, 1024, 512, 32_000, False, True, True),
    ],
)
def test_memory_decides(monkeypatch, dtype, n_tokens, n_columns, n_classes, trains, reduce, expected):
    monkeypatch.undo()
    weight = torch.empty(n_classes, n_columns, dtype=dtype, device="meta")
    with torch.set_grad_enabled(trains):
        assert saves_memory(weight, n_tokens, reduce) == expected


def test_memory_decides_by_the_dtype_of_autocast(monkeypatch):
    monkeypatch.undo()
    weight = torch.empty(32_000, 512)
    assert saves_memory(weight, 1024, True)
    with torch.autocast("cpu", torch.bfloat16):
        assert not saves_memory(weight, 1024, True)


class OwnProjection(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class OwnForward(TransformerModel):
    """As a model that takes no features_only."""

    def forward(self, src_tokens, src_lengths, prev_output_tokens):
        return super().forward(src_tokens, src_lengths, prev_output_tokens)


class Sharded(nn.Module):
    """Stands for what passes everything on to the model inside, and does more around its forward (FSDP)."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def with_bias(model):
    model.decoder.output_projection.bias = nn.Parameter(torch.linspace(0, 1, len(model.decoder.dictionary)))
    return model


def with_own_projection(model):
    model.decoder.output_projection = OwnProjection(16, len(model.decoder.dictionary), bias=False)
    return model


def parametrised(model):
    parametrize.register_parametrization(model.decoder.output_projection, "weight", Doubled())
    return model


def weight_normed(model):
    nn.utils.weight_norm(model.decoder.output_projection)
    return model


def hooked(path):
    def change(model):
        model.get_submodule(path).register_forward_hook(lambda module, args, output: output)
        return model

    return change


def with_own_output_layer(model):
    """A decoder that does more than project."""

    class OwnOutputLayer(type(model.decoder)):
        def output_layer(self, features):
            return super().output_layer(features) / 2

    model.decoder.__class__ = OwnOutputLayer
    return model


def with_own_decoder_forward(model):
    class OwnDecoder(type(model.decoder)):
        def forward(self, *args, **kwargs):
            x, extra = super().forward(*args, **kwargs)
            return x + 1, extra

    model.decoder.__class__ = OwnDecoder
    return model


HINDRANCES = {
    "bias": (with_bias, "must have no bias"),
    "subclass": (with_own_projection, "must be an nn.Linear, got OwnProjection"),
    "parametrised": (parametrised, "must be an nn.Linear, got ParametrizedLinear"),
    "weight_norm": (weight_normed, "hooks on the output projection would not run"),
    "hook": (hooked("decoder.output_projection"), "hooks on the output projection would not run"),
    "decoder_hook": (hooked("decoder"), "hooks on TransformerDecoderBase expect logits"),
    "model_hook": (hooked(""), "hooks on TransformerModel expect logits"),
    "output_layer": (with_own_output_layer, r"OwnOutputLayer\.output_layer is not fairseq's own"),
    "decoder_forward": (with_own_decoder_forward, r"OwnDecoder\.forward is not fairseq's own"),
    "model_forward": (lambda model: build(OwnForward), r"OwnForward\.forward is not fairseq's own"),
    "sharded": (Sharded, "Sharded is none of fairseq's BaseFairseqModel"),
    "fp64": (lambda model: model.double(), r"no compiled kernels serve its weight, torch\.float64"),
}


@pytest.mark.parametrize("change, message", HINDRANCES.values(), ids=HINDRANCES.keys())
def test_where_it_is_impossible_auto_goes_the_other_way_and_always_says_why(calls, change, message):
    model = change(build())
    expected = run(model, make_criterion(StockLabelSmoothed))
    expected[3].update({name: grad.clone() for name, grad in expected[3].items()})
    ours = run(model, make_criterion(LabelSmoothedCrossEntropyCriterion, "auto"))
    if model.decoder.embed_tokens.weight.dtype != torch.float64:
        assert_equal(ours, expected)
    assert calls == ["logits"]
    always = make_criterion(LabelSmoothedCrossEntropyCriterion, "always")
    for act in (lambda: always(model, make_sample(model)), lambda: always.refuse_unfit(model)):
        with pytest.raises(UnsupportedError, match=rf"--fused-projection always: impossible here: .*{message}.*auto"):
            act()


def test_hooks_on_all_modules_and_patched_classes_need_the_logits(calls, monkeypatch):
    model, seen, forward = build(), [], nn.Linear.forward
    criterion = make_criterion(LabelSmoothedCrossEntropyCriterion, "auto")
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        run(model, criterion)
    finally:
        handle.remove()
    assert model.decoder.output_projection in seen
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: seen.append("patched") or forward(self, x))
    run(model, criterion)
    assert "patched" in seen
    assert calls == ["logits", "logits"]
    with pytest.raises(UnsupportedError, match="patched forward of a class"):
        make_criterion(LabelSmoothedCrossEntropyCriterion, "always")(model, make_sample(model))
    monkeypatch.undo()
    assert not reasons_against_blocks(model, False)


def test_accuracy_needs_the_logits(calls):
    model = build()
    expected = run(model, make_criterion(StockLabelSmoothed, report_accuracy=True))
    assert_equal(run(model, make_criterion(LabelSmoothedCrossEntropyCriterion, report_accuracy=True)), expected)
    assert calls == ["logits"]
    always = make_criterion(LabelSmoothedCrossEntropyCriterion, "always", report_accuracy=True)
    with pytest.raises(UnsupportedError, match="--report-accuracy counts correct tokens in the logits"):
        always(model, make_sample(model))


def test_without_compiled_kernels_always_is_refused(monkeypatch):
    monkeypatch.setattr("ls_plugin._library.has_kernel", lambda x: False)
    with pytest.raises(UnsupportedError, match="no compiled kernels serve its weight"):
        make_criterion(CrossEntropyCriterion, "always").refuse_unfit(build())


def test_all_reasons_are_given_at_once():
    model = hooked("decoder")(with_bias(build()))
    with pytest.raises(UnsupportedError, match=r"report-accuracy.*hooks on TransformerDecoderBase.*no bias"):
        make_criterion(LabelSmoothedCrossEntropyCriterion, "always", report_accuracy=True).refuse_unfit(model)


def configuration(world_size=1, ddp_backend="pytorch_ddp", find_unused_parameters=False):
    parallel = SimpleNamespace(
        distributed_world_size=world_size, ddp_backend=ddp_backend, find_unused_parameters=find_unused_parameters
    )
    return SimpleNamespace(distributed_training=parallel, common=SimpleNamespace(quantization_config_path=None))


def test_the_trainer_refuses_before_the_first_update(monkeypatch):
    started = []

    def start(flag, model, cfg):
        criterion = make_criterion(CrossEntropyCriterion, flag)
        token_loss._checked_trainer_init(lambda *args: started.append(flag), None, cfg, None, model, criterion)

    unused = configuration(2, find_unused_parameters=True)
    start("always", build(), configuration(1, find_unused_parameters=True))  # one process is not wrapped
    start("always", build(), configuration(2, "legacy_ddp", find_unused_parameters=True))
    start("auto", build(), unused)
    start("auto", with_bias(build()), configuration())
    assert started == ["always", "always", "auto", "auto"]
    with pytest.raises(
        UnsupportedError, match="--find-unused-parameters would take the projection's weight for unused"
    ):
        start("always", build(), unused)
    with pytest.raises(UnsupportedError, match="must have no bias"):  # the hook is in place
        Trainer(configuration(), None, with_bias(build()), make_criterion(CrossEntropyCriterion, "always"))


def test_the_search_for_nans_is_not_in_the_way(calls):
    """fairseq puts hooks that only look on every module, and runs the batch again."""
    model = build(
        TransformerLanguageModel
    )  # on an encoder's dict, torch's kind of hook that fairseq uses raises StopIteration
    with NanDetector(model):
        run(model, make_criterion(CrossEntropyCriterion, "always"))
    assert calls == ["blocks"]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_distributed_data_parallel(calls, tmp_path, find_unused_parameters):
    """The projection's weight is used outside the wrapped forward; its gradient is reduced all the same."""
    expected = run(build(), make_criterion(StockCrossEntropy))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(build(), find_unused_parameters=find_unused_parameters)
        model = ModuleProxyWrapper(parallel)
        for _ in range(2):  # the second time DDP finds that every parameter was ready in the first
            loss, size, logged, grads = run(model, make_criterion(CrossEntropyCriterion, "auto"))
        grads = {name.removeprefix("module.module."): grad for name, grad in grads.items()}
        assert_equal((loss, size, logged, grads), expected)
        assert set(calls) == {"logits" if find_unused_parameters else "blocks"}
        if find_unused_parameters:
            with pytest.raises(UnsupportedError, match="--find-unused-parameters"):
                run(model, make_criterion(CrossEntropyCriterion, "always"))
    finally:
        torch.distributed.destroy_process_group()
