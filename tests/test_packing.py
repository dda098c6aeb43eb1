"""Parameters side by side: what `packed` gives, when it moves memory and when it must not, and what ls_adam makes of it."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ls_plugin import packing
from ls_plugin.optim import ContiguousAdam

WIDTHS = [6, 7, 64]  # bytes of a row that are no multiple of the alignment, and some that are


class Attention(nn.Module):
    """Projections in fairseq's order of registration: k, v, q, weights and biases interleaved."""

    def __init__(self, width=6):
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj = (nn.Linear(width, width) for _ in range(3))
        packing.declare(self.weights())
        packing.declare(self.biases())

    def weights(self):
        return [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]

    def biases(self):
        return [self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]

    def forward(self, x):
        return sum(projection(x).square().sum() for projection in (self.q_proj, self.k_proj, self.v_proj))


def attention(width=6):
    torch.manual_seed(1)
    return Attention(width)


def assert_packed(params, values=None):
    """The view covers exactly the memory of the parameters, which have `values`."""
    values = [p.detach().clone() for p in params] if values is None else values
    view = packing.packed(params)
    assert torch.equal(view, torch.cat(values))
    assert view.is_contiguous() and not view.requires_grad
    start = view.data_ptr()
    for p, value in zip(params, values, strict=True):
        assert torch.equal(p.detach(), value)
        assert p.data_ptr() == start and p.is_contiguous() and p.is_leaf
        start += p.nbytes
    return view


def assert_left_alone(params):
    places, values = [p.data_ptr() for p in params], [p.detach().clone() for p in params]
    assert packing.packed(params) is None
    assert [p.data_ptr() for p in params] == places
    assert all(torch.equal(p.detach(), value) for p, value in zip(params, values, strict=True))


def test_owned_parameters_are_moved_once():
    m = attention()
    values, versions = [p.detach().clone() for p in m.weights()], [p._version for p in m.weights()]
    view = assert_packed(m.weights(), values)
    assert packing.packed(m.weights()) is view
    assert [p._version for p in m.weights()] == versions
    view[0] = 3.0
    assert (m.q_proj.weight[0] == 3.0).all()
    assert_packed(m.biases())


def test_one_parameter_is_its_own_view():
    m = attention()
    place = m.q_proj.weight.data_ptr()
    assert assert_packed([m.q_proj.weight]).data_ptr() == place


def test_moving_between_forward_and_backward_changes_no_gradient():
    m, twin = attention(), attention()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    loss = m(x)
    assert_packed(m.weights())
    loss.backward()
    twin(x).backward()
    for p, q in zip(m.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)  # how a product rounds may depend on where its factors lie


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_packed_in_evaluation_can_be_trained(mode):
    m = attention()
    with mode():
        view = packing.packed(m.weights())
    assert packing.packed(m.weights()) is view and not view.is_inference()
    x = torch.randn(5, 6, requires_grad=True)
    (m(x) + (x @ view.t()).sum()).backward()
    assert all(p.grad is not None for p in m.parameters())


def test_half_and_back():
    m = attention()
    packing.packed(m.weights())
    m.half()
    assert assert_packed(m.weights()).dtype == torch.float16
    m.float()
    assert assert_packed(m.weights()).dtype == torch.float32


def test_a_copy_has_its_own_block():
    m = attention()
    view = packing.packed(m.weights())
    twin = copy.deepcopy(m)
    twin_view = assert_packed(twin.weights(), [p.detach().clone() for p in m.weights()])
    assert twin_view.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    assert packing.packed(m.weights()) is view
    # The copy's parameters were declared by nobody; packing them has made up for it.
    assert [id(p) for p in packing.units(list(twin.parameters()))[0]] == [id(p) for p in twin.weights()]


def test_modules_pickle():
    m = attention()
    packing.packed(m.weights())
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    assert_packed(torch.load(file, weights_only=False).weights(), [p.detach() for p in m.weights()])
    # Plain pickle gives every view a copy of the whole block.
    assert_left_alone(pickle.loads(pickle.dumps(m)).weights())


def test_load_state_dict():
    m, source = attention(), attention()
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1)
    view = packing.packed(m.weights())
    m.load_state_dict(source.state_dict())
    assert packing.packed(m.weights()) is view
    assert_packed(m.weights(), [p.detach() for p in source.weights()])


def test_load_state_dict_with_assign():
    m, source = attention(), attention()
    packing.packed(m.weights())
    values = [p.detach().clone() for p in source.weights()]
    m.load_state_dict(source.state_dict(), assign=True)
    assert_left_alone(m.weights())  # they are still the source's, too
    del source
    assert_packed(m.weights(), values)


def test_memory_that_others_see_is_left_alone():
    """A state dict taken before the first forward shows later updates, and parameters tied by .data stay tied."""
    m, tied = attention(), attention()
    state = m.state_dict()
    assert_left_alone(m.weights())
    del state
    assert_packed(m.weights())
    tied.q_proj.weight.data = (lender := nn.Linear(6, 6)).weight.data
    assert_left_alone(tied.weights())
    assert tied.q_proj.weight.data_ptr() == lender.weight.data_ptr()


def test_saved_views_load_as_a_block():
    m = attention()
    packing.packed(m.weights())
    file = io.BytesIO()
    torch.save(m.state_dict(), file)
    file.seek(0)
    m.load_state_dict(torch.load(file), assign=True)
    assert_packed(m.weights())


def test_data_that_is_not_contiguous():
    m = attention()
    with torch.no_grad():
        m.k_proj.weight.data = m.k_proj.weight.data.t()
    values = [p.detach().clone() for p in m.weights()]
    view = assert_packed(m.weights(), values)
    # Replaced in place by its transpose, at the same address and of the same size: the view of before would be another matrix.
    m.k_proj.weight.data = m.k_proj.weight.data.t()
    assert packing.packed(m.weights()) is not view


def test_a_parameter_that_shrinks_in_place_is_noticed():
    m = attention()
    packing.packed(m.weights())
    m.v_proj.weight.data = m.v_proj.weight.data[:4]
    assert_packed(m.weights())
    assert packing.packed(m.weights()).shape == (16, 6)


def test_frozen_parts_take_part():
    m = attention()
    m.k_proj.weight.requires_grad_(False)
    assert_packed(m.weights())
    assert [p.requires_grad for p in m.weights()] == [True, False, True]


def test_rows_may_differ_and_the_rest_may_not():
    params = [nn.Parameter(torch.randn(rows, 3, 2)) for rows in (1, 4, 2)]
    assert assert_packed(params).shape == (7, 3, 2)
    params.append(nn.Parameter(torch.randn(2, 2, 3)))
    for function in (packing.declare, packing.packed):
        with pytest.raises(ValueError, match=r"first dimension.*\(1, 3, 2\).*\(2, 2, 3\)"):
            function(params)


def test_foreign_memory_is_left_alone():
    m = attention()
    # As DeepSpeed and FSDP have it: in the order of registration.
    flat = torch.zeros(sum(p.numel() for p in m.parameters()))
    start = 0
    for p in m.parameters():
        home = flat[start : start + p.numel()].view_as(p)
        home.copy_(p.data)
        p.data = home
        start += p.numel()
    assert_left_alone(m.weights())
    # Two that happen to lie side by side there are as good as any.
    k_bias_to_v = [m.k_proj.weight, m.k_proj.bias]
    assert k_bias_to_v[0].data_ptr() + k_bias_to_v[0].nbytes == k_bias_to_v[1].data_ptr()
    assert packing.packed([m.k_proj.weight]).data_ptr() == flat.data_ptr()


def test_adjacent_in_foreign_memory():
    flat = torch.randn(5, 4)
    params = [nn.Parameter(flat[1:3]), nn.Parameter(flat[3:])]
    assert assert_packed(params).data_ptr() == flat[1:].data_ptr()


def test_neighbours_in_separate_storages_are_no_block():
    flat = torch.randn(4, 4)
    pieces = []
    for piece in flat.split(2):
        pieces.append(nn.Parameter(torch.frombuffer(piece.numpy(), dtype=torch.float32).view(2, 4)))
    assert pieces[0].data_ptr() + pieces[0].nbytes == pieces[1].data_ptr()
    view = assert_packed(pieces, list(flat.split(2)))
    assert view.data_ptr() != flat.data_ptr()


def test_shared_memory_is_left_alone():
    m = attention()
    m.share_memory()
    assert_left_alone(m.weights())


def test_tied_meta_empty_and_mixed_parameters_have_no_block():
    weight = nn.Parameter(torch.randn(2, 3))
    packing.declare([weight, weight])
    assert_left_alone([weight, weight])
    assert packing.units([weight]) == [[weight]]
    assert packing.packed([nn.Parameter(torch.empty(2, 3, device="meta")) for _ in range(2)]) is None
    assert_left_alone([nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.randn(2, 3))])
    assert_left_alone([nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3).half())])
    assert_left_alone([torch.randn(2, 3, requires_grad=True) * 2, nn.Parameter(torch.randn(2, 3))])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_under_fake_tensors_transforms_and_compile():
    with FakeTensorMode():
        assert packing.packed([nn.Parameter(torch.empty(2, 3)) for _ in range(2)]) is None
    found = []
    torch.func.grad(lambda x: (found.append(packing.packed([x, x * 2])), x.sum())[1])(torch.ones(2, 3))
    assert found == [None]
    m = attention()
    compiled = torch.compile(lambda: packing.packed(m.weights()) is None, backend="eager", fullgraph=True)
    assert compiled()


def test_an_obsolete_packing_may_be_left():
    m = attention()
    packing.packed(m.weights())
    order = [m.k_proj.weight, m.v_proj.weight, m.q_proj.weight]
    assert_left_alone(order)  # somebody else has declared them in another order
    packing.declare(order)
    assert_packed(order)
    assert_left_alone(m.weights())


def test_declared_parts_of_a_block_have_views_too():
    m = attention()
    whole = packing.packed(m.weights())
    assert assert_packed(m.weights()[1:]).data_ptr() == whole[6:].data_ptr()


def test_views_do_not_outlive_their_parameters():
    m = attention()
    packing.packed(m.weights())
    parameter, block = weakref.ref(m.q_proj.weight), m.q_proj.weight.untyped_storage()._weak_ref()
    n_views = len(packing._views)
    del m
    gc.collect()
    assert parameter() is None and len(packing._views) == n_views - 1
    assert torch.UntypedStorage._expired(block)
    torch.UntypedStorage._free_weak_ref(block)


# --- units


def ids(groups):
    return [[id(p) for p in group] for group in groups]


def test_units():
    m, other = attention(), nn.Linear(3, 3)
    q, k, v = m.weights()
    given = [other.weight, v, k, other.bias, q]
    assert ids(packing.units(given)) == ids([[other.weight], [q, k, v], [other.bias]])
    assert ids(packing.units([v, k])) == ids([[v], [k]])  # q is frozen, say
    v.data = v.data.half()
    assert ids(packing.units([q, k, v])) == ids([[q], [k], [v]])


def test_a_later_declaration_replaces_an_earlier_one():
    layers = [attention(), attention()]
    keys = [p for m in layers for p in m.weights()[1:]]
    queries = [m.q_proj.weight for m in layers]
    packing.declare(keys)
    params = [p for m in layers for p in m.weights()]
    assert ids(packing.units(params)) == ids([[queries[0]], keys, [queries[1]]])


def test_members_that_are_gone_make_no_unit():
    m = attention()
    m.q_proj = None
    gc.collect()
    params = [m.k_proj.weight, m.v_proj.weight]
    assert ids(packing.units(params)) == ids([[p] for p in params])
    assert_packed(params)


# --- ls_adam


def build_adam(m):
    return ContiguousAdam([p for p in m.parameters() if p.requires_grad], lr=0.1)


def elementwise(m, seed):
    """A loss of all parameters whose gradients involve no product, so that they have the same bits wherever the parameters lie."""
    generator = torch.Generator().manual_seed(seed)
    return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in m.parameters())


def train(m, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(4, m.q_proj.in_features, generator=torch.Generator().manual_seed(seed))
        m(x).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("packed_before", [False, True])
def test_ls_adam_keeps_packs_together(width, packed_before):
    m = attention(width)
    values = [p.detach().clone() for p in m.weights()]
    if packed_before:
        packing.packed(m.weights())
    optimizer = build_adam(m)
    (buffer,) = optimizer.buffers
    for params in (m.weights(), m.biases()):
        view = assert_packed(params)
        assert view.untyped_storage().data_ptr() == buffer.param.untyped_storage().data_ptr()
        assert view.data_ptr() % 64 == 0
    assert_packed(m.weights(), values)
    train(m, optimizer, range(2))  # check_views would raise if packed had moved anything
    assert_packed(m.weights())
    for params in (m.weights(), m.biases()):
        gradients = [p.grad for p in params]
        assert torch.equal(packing.packed(gradients), torch.cat(gradients))
    assert buffer.offsets == sorted(buffer.offsets)
    assert len(list(buffer.runs())) == 1


@pytest.mark.parametrize("n_rows", [4, 16])
def test_ls_adam_owns_even_a_buffer_of_one_parameter(n_rows):
    """Its parameter would otherwise fill its storage like one that nobody owns."""
    params = [nn.Parameter(torch.randn(n_rows, 16)) for _ in range(2)]
    packing.declare(params)
    optimizer = ContiguousAdam([{"params": [p]} for p in params], lr=0.1)
    assert_left_alone(params)
    sum(p.sum() for p in params).backward()
    optimizer.step()


def test_ls_adam_with_a_frozen_member_gives_no_block():
    m = attention()
    m.k_proj.weight.requires_grad_(False)
    optimizer = build_adam(m)
    assert_left_alone(m.weights())
    train(m, optimizer, range(2))


def test_ls_adam_updates_a_pack_like_single_parameters():
    """Also where one of its members has got no gradient, so that a run begins off the alignment."""
    packed, single = attention(), attention()
    for p in single.parameters():
        packing.declare([p])
    pairs = [(m, build_adam(m)) for m in (packed, single)]
    for seed in range(3):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            elementwise(m if seed != 1 else m.v_proj, seed).backward()
            optimizer.step()
    for p, q in zip(packed.parameters(), single.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("source_is_packed", [False, True])
def test_optimizer_state_moves_between_layouts(source_is_packed):
    """The state dict counts parameters in the optimizer's order, whatever the layout: a checkpoint from before packs resumes."""
    models = [attention(), attention()]
    for p in models[0 if not source_is_packed else 1].parameters():
        packing.declare([p])
    source, target = models
    optimizer = build_adam(source)
    train(source, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for i, p in enumerate(source.parameters()):
        assert torch.equal(saved["state"][i]["exp_avg"], optimizer.state[p]["exp_avg"])

    resumed = build_adam(target)
    target.load_state_dict(source.state_dict())
    resumed.load_state_dict(saved)
    for m, adam in ((source, optimizer), (target, resumed)):
        for seed in range(3, 6):
            adam.zero_grad()
            elementwise(m, seed).backward()
            adam.step()
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(p, q)
    assert (packing.packed(target.weights()) is None) == source_is_packed


def test_packed_after_a_checkpoint_reload():
    """fairseq loads the model in place and builds the optimizer again."""
    m, source = attention(), attention()
    optimizer = build_adam(m)
    train(m, optimizer, range(2))
    m.load_state_dict(source.state_dict())
    second = build_adam(m)
    del optimizer
    assert_packed(m.weights(), [p.detach() for p in source.weights()])
    train(m, second, range(2))
    assert_packed(m.weights())


def test_a_copy_of_a_model_in_training_packs_on_its_own():
    m = attention()
    optimizer = build_adam(m)
    twin = copy.deepcopy(m)
    assert_packed(twin.weights(), [p.detach().clone() for p in m.weights()])
    train(m, optimizer, range(1))
    assert not torch.equal(twin.q_proj.weight, m.q_proj.weight)
