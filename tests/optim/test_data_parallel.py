"""Data parallelism over contiguous gradients, in two real processes with gloo, which run every check below and hand back what failed."""

import gc
import traceback
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fairseq import models
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import LayerDropModuleList
from fairseq.optim.adam import Adam as StockAdam
from omegaconf import OmegaConf, open_dict
from torch import nn

from ls_plugin import ops
from ls_plugin.distributed.data_parallel import ContiguousDataParallel
from ls_plugin.errors import UnsupportedError
from ls_plugin.optim import ContiguousAdam
from tests.limits import LIMIT_S

WORLD_SIZE = 2


class Chain(nn.Module):
    """Layers of which a call may leave some out, or fail at one, in the forward or in the backward pass."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=dtype) for _ in range(4))
        self.register_buffer("shift", torch.zeros(16, dtype=dtype))

    def forward(self, x, skip=(), fails_at=None, fails_in="forward"):
        for i, layer in enumerate(self.layers):
            if i == fails_at:
                x = _Fail.apply(x) if fails_in == "backward" else _run_out()
            if i not in skip:
                x = torch.tanh(layer(x) + self.shift)
        return x.square().sum()


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _run_out()


def _run_out():
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def _batch(rank: int, step: int = 0, dtype=torch.float32):
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def _wrapped(dtype=torch.float32, **options):
    chain = Chain(dtype)
    # 600 bytes: a weight fills a bucket, a bias does not.
    wrapper = ContiguousDataParallel(chain, dist.group.WORLD, **{"bucket_cap_mb": 600 / 2**20, **options})
    return chain, wrapper, ContiguousAdam(chain.parameters())


def _expected(chain, *batches_and_skips):
    """The average over ranks of gradients that plain autograd gives, one batch and what it skips for each rank; None where all skip."""
    total = {}
    for batch, skip in batches_and_skips:
        names, params = zip(*chain.named_parameters(), strict=True)
        grads = torch.autograd.grad(Chain.forward(chain, batch, skip), params, allow_unused=True)
        for name, grad in zip(names, grads, strict=True):
            if grad is not None:
                total[name] = total.get(name, 0) + grad / WORLD_SIZE
    return {name: total.get(name) for name, _ in chain.named_parameters()}


def _assert_grads(chain, expected, **tolerance):
    for name, p in chain.named_parameters():
        if expected[name] is None:
            assert p.grad is None, name
        else:
            torch.testing.assert_close(p.grad, expected[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def _assert_same_on_all_ranks(chain):
    flat = torch.cat([p.grad.flatten() for p in chain.parameters()])
    others = [torch.empty_like(flat) for _ in range(WORLD_SIZE)]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


def check_average_during_backward(rank, overlaps=True, dtype=torch.float32):
    chain, wrapper, optimizer = _wrapped(dtype, overlaps=overlaps)
    for step in range(2):
        expected = _expected(chain, *((_batch(r, step, dtype), ()) for r in range(WORLD_SIZE)))
        optimizer.zero_grad()
        wrapper(_batch(rank, step, dtype)).backward()
        assert wrapper._n_sent == (len(wrapper._buckets) if overlaps else 0)
        wrapper.all_reduce_grads()
        _assert_grads(chain, expected, **({} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}))
        assert optimizer.buffers[0].foreign_grads() == []
        _assert_same_on_all_ranks(chain)
        optimizer.step()
    begins = [bucket.begin for bucket in wrapper._buckets]
    assert len(begins) > 1
    assert begins == sorted(begins, reverse=True)


def check_average_after_backward(rank):
    check_average_during_backward(rank, overlaps=False)


def check_average_of_bf16(rank):
    check_average_during_backward(rank, dtype=torch.bfloat16)


def check_no_sync_accumulates(rank):
    chain, wrapper, optimizer = _wrapped()
    first, second = (_expected(chain, *((_batch(r, step), ()) for r in range(WORLD_SIZE))) for step in range(2))
    optimizer.zero_grad()
    with wrapper.no_sync():
        wrapper(_batch(rank, 0)).backward()
    assert wrapper._n_sent == 0
    wrapper(_batch(rank, 1)).backward()
    wrapper.all_reduce_grads()
    _assert_grads(chain, {name: first[name] + second[name] for name in first})


def check_a_kept_gradient_keeps_its_value(rank):
    """Whoever resets the gradients, with layers that get none and with passes that accumulate."""
    for overlaps in (True, False):
        for resets_model in (True, False):
            chain, wrapper, optimizer = _wrapped(overlaps=overlaps)
            kept = []
            for step, skip in enumerate(((), (), (1,), ())):
                (chain if resets_model else optimizer).zero_grad()
                with wrapper.no_sync():
                    wrapper(_batch(rank, step), skip=skip).backward()
                wrapper(_batch(rank, step + 1), skip=skip).backward()
                wrapper.all_reduce_grads()
                grads = [p.grad for p in chain.parameters() if p.grad is not None]
                kept += [(grad, grad.clone()) for grad in grads]
                optimizer.step()
                assert all(torch.equal(grad, value) for grad, value in kept)


def check_unused_parameters(rank):
    chain, wrapper, optimizer = _wrapped()
    # Layer 2 on no rank, layer 1 on rank 0 only; then all.
    for step, skips in enumerate((((2,), (1, 2)), ((), ()))):
        expected = _expected(chain, *((_batch(r, step), skips[r]) for r in range(WORLD_SIZE)))
        optimizer.zero_grad()
        optimizer.buffers[0].grad.fill_(float("nan"))  # what is not written must not be sent
        wrapper(_batch(rank, step), skips[rank]).backward()
        _sum_statistics()
        wrapper.all_reduce_grads()
        _assert_grads(chain, expected)
        assert (chain.layers[2].weight.grad is None) == (step == 0)


def check_legacy_steps_unused_parameters_as_stock(rank):
    """fairseq's legacy wrapper gives zeros to what got no gradient on any rank, so Adam's moments decay and go on to act."""
    chains = [Chain(), Chain()]
    stock = LegacyDistributedDataParallel(chains[0], dist.group.WORLD)
    ours = ContiguousDataParallel(chains[1], dist.group.WORLD, overlaps=False, zero_unused=True)
    optimizers = [StockAdam(chains[0].parameters(), lr=0.1), ContiguousAdam(chains[1].parameters(), lr=0.1)]
    for step, skips in enumerate((((), ()), ((2,), (1, 2)), ((2,), (2,)), ((), ()))):
        for wrapper, optimizer in zip((stock, ours), optimizers, strict=True):
            optimizer.zero_grad()
            wrapper(_batch(rank, step), skips[rank]).backward()
            wrapper.all_reduce_grads()
            optimizer.step()
        for theirs, mine in zip(*(chain.parameters() for chain in chains), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def check_layers_that_are_dropped(rank):
    """PyTorch's own wrapper is asked to look for unused parameters where a model drops layers, and not elsewhere."""
    cfg = _configuration("adam", "pytorch_ddp")
    dropping = nn.Sequential(Chain())
    dropping[0].layers = LayerDropModuleList(0.5, dropping[0].layers)
    for model, finds in ((Chain(), False), (dropping, True)):
        wrapped = models.DistributedFairseqModel(
            cfg.distributed_training, model, process_group=dist.group.WORLD, device=torch.device("cpu")
        )
        assert wrapped.module.find_unused_parameters == finds
    for _ in range(8):
        wrapped(_batch(rank)).backward()


def _sum_statistics():
    """As fairseq does between the backward pass and all_reduce_grads, with a group of its own."""
    counts = torch.ones(3)
    dist.all_reduce(counts)
    assert counts.tolist() == [WORLD_SIZE] * 3


def check_out_of_memory(rank):
    for place in ("forward", "backward"):
        chain, wrapper, optimizer = _wrapped()
        for step, fails in enumerate((True, False)):
            expected = _expected(chain, *((_batch(r, step), ()) for r in range(WORLD_SIZE)))
            alone = _expected(chain, (_batch(0, step), ()))
            optimizer.zero_grad()
            try:
                wrapper(_batch(rank, step), fails_at=2 if fails and rank == 1 else None, fails_in=place).backward()
            except RuntimeError as error:
                assert "out of memory" in str(error)
                optimizer.zero_grad()
            _sum_statistics()
            wrapper.all_reduce_grads()
            if not fails:
                _assert_grads(chain, expected)
            elif place == "forward":
                _assert_grads(chain, alone)
            else:  # what the failing rank had sent by then counts, the rest does not
                sent = ("layers.2", "layers.3")
                _assert_grads(chain, {k: (expected if k.startswith(sent) else alone)[k] for k in expected})
            _assert_same_on_all_ranks(chain)


def check_communication_hooks(rank):
    for name, tolerance in (("fp16", 1e-3), ("bf16", 1e-2)):
        from ls_plugin.distributed.backends import _HOOKS

        chain, wrapper, optimizer = _wrapped(hook=_HOOKS[name])
        exact = _expected(chain, *((_batch(r), ()) for r in range(WORLD_SIZE)))
        optimizer.zero_grad()
        wrapper(_batch(rank)).backward()
        wrapper.all_reduce_grads()
        _assert_grads(chain, exact, rtol=tolerance, atol=tolerance)
        grad, dtype = chain.layers[0].weight.grad, getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[name])
        assert torch.equal(grad, grad.to(dtype).float())  # so it was on its way in 16 bits


def check_optimizer_built_again(rank):
    chain, wrapper, optimizer = _wrapped()
    wrapper(_batch(rank)).backward()
    wrapper.all_reduce_grads()
    old = weakref.ref(optimizer.buffers[0])
    expected = _expected(chain, *((_batch(r, 1), ()) for r in range(WORLD_SIZE)))
    optimizer = ContiguousAdam(chain.parameters())
    optimizer.zero_grad()
    wrapper(_batch(rank, 1)).backward()
    gc.collect()
    assert old() is None
    wrapper.all_reduce_grads()
    _assert_grads(chain, expected)
    assert optimizer.buffers[0].foreign_grads() == []


def check_frozen_and_unfrozen(rank):
    chain, wrapper, optimizer = _wrapped()
    for step, trains in enumerate((True, False, True)):
        chain.layers[1].requires_grad_(trains)
        batches = [(_batch(r, step), ()) for r in range(WORLD_SIZE)]
        chain.layers[1].requires_grad_(True)
        expected = _expected(chain, *batches)
        chain.layers[1].requires_grad_(trains)
        optimizer.zero_grad()
        wrapper(_batch(rank, step)).backward()
        assert wrapper._n_sent == len(wrapper._buckets)
        wrapper.all_reduce_grads()
        for name in expected:
            if not trains and name.startswith("layers.1."):
                expected[name] = None
        _assert_grads(chain, expected)


def check_second_backward_is_refused(rank):
    _, wrapper, _optimizer = _wrapped()
    wrapper(_batch(rank)).backward()
    with pytest.raises(RuntimeError, match="legacy_ddp"):
        wrapper(_batch(rank)).backward()
    wrapper.all_reduce_grads()


def check_without_an_optimizer(rank):
    wrapper = ContiguousDataParallel(Chain(), dist.group.WORLD)
    wrapper(_batch(rank)).backward()
    with pytest.raises(RuntimeError, match="ls_adam"):
        wrapper.all_reduce_grads()


def check_first_ranks_weights_count(rank):
    chain = Chain()
    with torch.no_grad():
        for x in (*chain.parameters(), *chain.buffers()):
            x.fill_(rank + 1)
    wrapper = ContiguousDataParallel(chain, dist.group.WORLD, broadcast_buffers=True)
    assert all((x == 1).all() for x in (*chain.parameters(), *chain.buffers()))
    chain.shift.fill_(rank + 5)
    wrapper(_batch(rank))
    assert (chain.shift == 5).all()


def check_masks_of_ranks_differ(rank):
    torch.manual_seed(3)  # fairseq seeds all ranks alike
    x = torch.ones(64, 64)
    dropped = ops.bias_dropout_residual(x, torch.zeros(64), torch.zeros_like(x), 0.5) != 0
    masks = [torch.empty(64, 64) for _ in range(WORLD_SIZE)]
    dist.all_gather(masks, dropped.float())
    assert 0.4 < (masks[0] != masks[1]).float().mean() < 0.6  # a half, where they are independent


def check_all_gather_list(rank):
    data = {"rank": rank, "text": "x" * 20_000, "tensor": torch.full((2,), rank)}  # more than stock's buffer holds
    gathered = distributed_utils.all_gather_list(data)
    assert [item["rank"] for item in gathered] == [0, 1]
    assert gathered[1]["tensor"].tolist() == [1, 1]


def _configuration(optimizer: str, backend: str):
    cfg = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(cfg, False)
    with open_dict(cfg):
        cfg.optimizer = {"_name": optimizer}
        cfg.distributed_training.ddp_backend = backend
    return cfg


def check_backends_of_fairseq(rank):
    cfg = _configuration("adam", "pytorch_ddp")
    for optimizer, backend, hook in (
        ("adam", "pytorch_ddp", "none"),
        ("adam", "pytorch_ddp", "fp16"),
        ("adam", "legacy_ddp", "none"),
        ("ls_adam", "pytorch_ddp", "fp16"),
        ("ls_adam", "legacy_ddp", "none"),
    ):
        with open_dict(cfg):
            cfg.optimizer = {"_name": optimizer}
            cfg.distributed_training.ddp_backend = backend
            cfg.distributed_training.ddp_comm_hook = hook
        chain = Chain()
        wrapped = models.DistributedFairseqModel(
            cfg.distributed_training, chain, process_group=dist.group.WORLD, device=torch.device("cpu")
        )
        assert isinstance(wrapped.module, ContiguousDataParallel) == (optimizer == "ls_adam")
        assert wrapped.state_dict().keys() == chain.state_dict().keys()
        expected = _expected(chain, *((_batch(r), ()) for r in range(WORLD_SIZE)))
        built = ContiguousAdam(chain.parameters()) if optimizer == "ls_adam" else None
        wrapped(_batch(rank)).backward()
        if hasattr(wrapped, "all_reduce_grads"):
            wrapped.all_reduce_grads()
        _assert_grads(chain, expected, **({} if hook == "none" else {"rtol": 1e-2, "atol": 1e-2}))
        if hook == "fp16":
            grad = chain.layers[0].weight.grad
            assert torch.equal(grad, grad.half().float())
        del built
    for backend, hook in (("legacy_ddp", "fp16"), ("pytorch_ddp", "bf16")):
        with open_dict(cfg):
            cfg.optimizer = {"_name": "adam"}
            cfg.distributed_training.ddp_backend, cfg.distributed_training.ddp_comm_hook = backend, hook
        with pytest.raises(UnsupportedError, match=f"--ddp-comm-hook {hook}"):
            models.DistributedFairseqModel(cfg.distributed_training, Chain(), dist.group.WORLD, torch.device("cpu"))


CHECKS = [name for name in globals() if name.startswith("check_")]


def _run_checks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    failures = {}
    for name in CHECKS:
        try:
            globals()[name](rank)
            dist.barrier()
        except BaseException:  # pytest.raises fails with one
            failures[name] = traceback.format_exc()
            break  # the ranks are no longer at the same place
    torch.save((CHECKS[: CHECKS.index(name) + 1], failures), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[tuple[list[str], dict[str, str]]]:
    """Of each rank: the checks that it came to, and the traceback of the one that failed."""
    folder = tmp_path_factory.mktemp("ranks")
    context = torch.multiprocessing.spawn(_run_checks, (str(folder),), nprocs=WORLD_SIZE, join=False)
    assert any(context.join(timeout=LIMIT_S) for _ in range(WORLD_SIZE)), (
        "the ranks have not ended"
    )  # each waits for one
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(results, name):
    for rank, (done, failures) in enumerate(results):
        assert name not in failures, f"rank {rank}: {failures[name]}"
        assert name in done, f"rank {rank} did not come to it, since {list(failures)} failed"
