import pytest
import torch
import torch.nn.functional as F
from fairseq.utils import make_positions

from ls_plugin import ops, reference
from ls_plugin.ops.rng import draw_seed
from tests.ops.accuracy import (
    DTYPES,
    GRAD_FACTOR,
    VALUE_FACTOR,
    assert_as_accurate,
    dtype_name,
    misaligned,
    needs_library,
    noncontiguous,
)

SEED = 1234
PAD = 1
# (B, T, V, C): one element, odd, prime, no multiple of a vector, longer than a block, teams of one warp to eight, none.
SHAPES = [
    (1, 1, 3, 1),
    (2, 3, 7, 5),
    (3, 7, 11, 31),
    (4, 9, 20, 64),
    (2, 70, 13, 257),
    (5, 8, 40, 256),
    (2, 5, 9, 1024),
    (3, 2, 6, 2056),
    (0, 4, 5, 16),
    (3, 0, 5, 16),
]


def shape_name(shape):
    return "x".join(map(str, shape))


def make_tokens(n_sentences, n_tokens, n_embeddings, pad_side="both"):
    """Sentences of falling length, with padding to the left (odd ones) or right; ids repeat within and across sentences."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, n_embeddings, (n_sentences, n_tokens), generator=generator)
    tokens[tokens == PAD] = 0
    for b in range(n_sentences):
        n_pad = b * n_tokens // (n_sentences + 1)
        left = {"left": True, "right": False, "both": b % 2 == 1}[pad_side]
        if left:
            tokens[b, :n_pad] = PAD
        else:
            tokens[b, n_tokens - n_pad :] = PAD
    return tokens


def sample_inputs(shape, device, dtype):
    """tokens; weight, positions, grad_y."""
    n_sentences, n_tokens, n_embeddings, n_cols = shape
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(n_embeddings, n_cols, generator=generator)
    positions = torch.randn(n_tokens + PAD + 1 + 2, n_cols, generator=generator)
    grad_y = torch.randn(n_sentences, n_tokens, n_cols, generator=generator)
    tokens = make_tokens(n_sentences, n_tokens, n_embeddings)
    return tokens.to(device), *(t.to(device, dtype) for t in (weight, positions, grad_y))


def run(function, tokens, weight, positions, grad_y, dtype=None):
    """y and the gradients of weight and positions."""
    weight, positions, grad_y = (t.to(dtype) if dtype else t for t in (weight, positions, grad_y))
    leaves = [leaf.detach().requires_grad_() for leaf in (weight, positions)]
    torch.manual_seed(SEED)
    y = function(tokens, *leaves)
    return [y, *torch.autograd.grad(y, leaves, grad_y)]


def compare(inputs, p, padding_idx=PAD, scale=2.5):
    tokens, weight, *_ = inputs
    torch.manual_seed(SEED)
    seed = draw_seed()
    shape = torch.Size((*tokens.shape, weight.shape[1]))
    keep = reference.dropout_keep_mask(shape, p, int(seed), 0).to(tokens.device)
    ids = reference.position_ids(tokens, padding_idx)

    def torch_function(tokens, weight, positions):
        x = scale * F.embedding(tokens, weight, padding_idx) + F.embedding(ids, positions, padding_idx)
        return torch.where(keep, x * reference.dropout_scale(p), 0.0)

    def oracle(tokens, weight, positions):
        return reference.embedding(tokens, weight, positions, padding_idx, scale, p, seed, 0)

    actual = run(lambda t, w, q: ops.embedding(t, w, q, padding_idx, scale, p), *inputs)
    torch_result = run(torch_function, *inputs)
    exact = run(oracle, *(t.cpu() for t in inputs), dtype=torch.float64)
    for name, a, t, e in zip(("y", "grad_weight", "grad_positions"), actual, torch_result, exact, strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "y" else GRAD_FACTOR, name)
        # Rows that nothing reached, and dropped elements, are exactly zero.
        assert torch.equal((a == 0).cpu() | (e != 0), torch.ones_like(e, dtype=torch.bool)), name
    return actual


@pytest.fixture(params=[False, True], ids=["free", "deterministic"])
def deterministic(request):
    """Both ways to a gradient on a GPU: atomics (fp32), and sorted tokens."""
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_as_accurate_as_torch(backend, deterministic, shape, dtype, p):
    compare(sample_inputs(shape, backend.device, dtype), p)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_extreme_probabilities(backend, p):
    compare(sample_inputs((3, 5, 9, 100), backend.device, torch.float32), p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_no_padding(backend, deterministic, dtype):
    """Positions count from 0, and no row of a table is special."""
    inputs = sample_inputs((4, 9, 5, 40), backend.device, dtype)
    _, grad_weight, grad_positions = compare(inputs, 0.1, padding_idx=None)
    assert (grad_weight != 0).any(dim=1).all()
    assert (grad_positions[:9] != 0).any(dim=1).all() and not grad_positions[9:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
def test_layouts(backend, deterministic, change, dtype):
    tokens, weight, positions, grad_y = sample_inputs((3, 6, 10, 264), backend.device, dtype)
    compare([noncontiguous(tokens), change(weight), change(positions), change(grad_y)], 0.1)


def test_more_than_65536_tokens(backend, deterministic):
    compare(sample_inputs((82, 800, 50, 3), backend.device, torch.float32), 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_one_token_all_over(backend, deterministic, dtype):
    """The longest sum there is: in 16 bits the error of adding one by one would show."""
    tokens, weight, positions, grad_y = sample_inputs((40, 50, 9, 16), backend.device, dtype)
    compare([torch.full_like(tokens, 4), weight, positions, grad_y.abs()], 0.0)


def test_positions_are_fairseqs(backend):
    """Row p of the table holds p, so the output shows the positions; padding may stand anywhere, a sentence may be empty."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 4, (9, 75), generator=generator)
    tokens[3] = PAD
    table = torch.arange(80.0).unsqueeze(1).expand(80, 8).contiguous()
    y = ops.embedding(
        tokens.to(backend.device), torch.zeros(4, 8, device=backend.device), table.to(backend.device), PAD
    )
    assert torch.equal(y.cpu(), table[make_positions(tokens, PAD)])
    assert torch.equal(reference.position_ids(tokens, PAD), make_positions(tokens, PAD))


def test_either_side_of_padding_gives_the_same_rows(backend):
    _, weight, positions, _ = sample_inputs((4, 12, 30, 24), backend.device, torch.float32)
    left, right = (make_tokens(4, 12, 30, side).to(backend.device) for side in ("left", "right"))
    words = torch.arange(2, 26, device=backend.device)
    left[left != PAD] = words.repeat(2)[: int((left != PAD).sum())]
    right[right != PAD] = words.repeat(2)[: int((right != PAD).sum())]
    rows = [ops.embedding(tokens, weight, positions, PAD)[tokens != PAD] for tokens in (left, right)]
    assert rows[0].numel() and torch.equal(*rows)


def test_optional_positions_and_frozen_tables(backend):
    tokens, weight, positions, grad_y = sample_inputs((3, 6, 10, 40), backend.device, torch.float32)
    expected = run(lambda t, w, q: ops.embedding(t, w, q, PAD, 2.0, 0.3), tokens, weight, positions, grad_y)
    trained = weight.clone().requires_grad_()
    torch.manual_seed(SEED)
    y = ops.embedding(tokens, trained, positions, PAD, 2.0, 0.3)
    assert torch.equal(y, expected[0]) and torch.equal(torch.autograd.grad(y, trained, grad_y)[0], expected[1])
    trained = positions.clone().requires_grad_()
    torch.manual_seed(SEED)
    y = ops.embedding(tokens, weight, trained, PAD, 2.0, 0.3)
    assert torch.equal(y, expected[0]) and torch.equal(torch.autograd.grad(y, trained, grad_y)[0], expected[2])
    y = ops.embedding(tokens, weight, None, PAD, 2.0)
    torch.testing.assert_close(y, 2.0 * F.embedding(tokens, weight))


def test_evaluation_drops_nothing(backend):
    tokens, weight, positions, _ = sample_inputs((3, 6, 10, 40), backend.device, torch.float32)
    y = ops.embedding(tokens, weight, positions, PAD, 1.0, 0.5, training=False)
    assert torch.equal(y, ops.embedding(tokens, weight, positions, PAD))


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_layer_norm_stands_before_the_dropout(backend, p):
    tokens, weight, positions, grad_y = sample_inputs((3, 6, 10, 40), backend.device, torch.float32)
    gamma, beta = torch.rand(40, device=backend.device), torch.rand(40, device=backend.device)
    leaves = [t.requires_grad_() for t in (weight, positions, gamma, beta)]
    torch.manual_seed(SEED)
    y = ops.embedding(tokens, weight, positions, PAD, 2.0, p, layer_norm=(gamma, beta, 1e-5))
    torch.manual_seed(SEED)
    keep = reference.dropout_keep_mask(y.shape, p, int(draw_seed()), 0).to(backend.device) if p else torch.tensor(True)
    x = 2.0 * F.embedding(tokens, weight, PAD) + F.embedding(make_positions(tokens, PAD), positions, PAD)
    expected = torch.where(
        keep.to(backend.device), F.layer_norm(x, (40,), gamma, beta) * reference.dropout_scale(p), 0.0
    )
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(*(torch.autograd.grad(out, leaves, grad_y) for out in (y, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_tied_table_receives_the_sum_of_its_gradients(backend):
    """Encoder's and decoder's embedding and the output projection share one table (--share-all-embeddings)."""
    source, weight, positions, grad_y = sample_inputs((3, 6, 10, 40), backend.device, torch.float32)
    target, features = source.flip(0), grad_y.flatten(0, 1)

    def loss(embed, table):
        x = embed(source, table) * grad_y + embed(target, table).square()
        return x.sum() + F.linear(features, table).square().sum()

    results = []
    for embed in (
        lambda tokens, table: ops.embedding(tokens, table, positions, PAD, 1.5),
        lambda tokens, table: reference.embedding(tokens, table, positions, PAD, 1.5, 0.0, None, 0),
    ):
        table = weight.clone().requires_grad_()
        loss(embed, table).backward()
        results.append(table.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_same_inputs_same_bits(backend, dtype):
    torch.use_deterministic_algorithms(True)
    try:
        results = [
            run(
                lambda t, w, q: ops.embedding(t, w, q, PAD, 2.5, 0.1),
                *sample_inputs((8, 40, 6, 72), backend.device, dtype),
            )
            for _ in range(2)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_same_bits_at_any_thread_count():
    inputs = sample_inputs((20, 50, 300, 96), "cpu", torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(lambda t, w, q: ops.embedding(t, w, q, PAD, 2.5, 0.1), *inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_infinity_and_nan(backend):
    """A dropped infinity is 0; what is not finite stays in its own rows."""
    tokens, weight, positions, grad_y = sample_inputs((3, 6, 10, 64), backend.device, torch.float32)
    weight[4], weight[5] = float("inf"), float("nan")
    y = ops.embedding(tokens, weight, positions, PAD, 1.0, 0.5)
    assert torch.equal(y.isnan().any(dim=-1), tokens == 5)
    assert (y[tokens == 4] == 0).any() and y[tokens == 4].isinf().any()
    grad_y[0, 0] = float("nan")
    grad = torch.autograd.grad(ops.embedding(tokens, weight.requires_grad_(), None, PAD), weight, grad_y)[0]
    assert grad.isnan().any(dim=1).nonzero().flatten().tolist() == [int(tokens[0, 0])]


def test_gradient_of_padding_is_dropped_even_where_infinite(backend, deterministic):
    tokens, weight, positions, grad_y = sample_inputs((3, 6, 10, 64), backend.device, torch.float32)
    grad_y[tokens == PAD] = float("inf")
    _, grad_weight, grad_positions = run(lambda t, w, q: ops.embedding(t, w, q, PAD), tokens, weight, positions, grad_y)
    assert (
        not grad_weight[PAD].any()
        and not grad_positions[PAD].any()
        and torch.isfinite(grad_weight).all()
        and torch.isfinite(grad_positions).all()
    )


def test_mixed_dtypes_are_promoted(backend):
    tokens, weight, positions, _ = sample_inputs((2, 3, 7, 40), backend.device, torch.bfloat16)
    y = ops.embedding(tokens, weight, positions.float(), PAD, 2.0)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, 2.0 * weight[tokens].float() + positions[make_positions(tokens, PAD)].float())


def test_double_backward_is_refused(backend):
    tokens, weight, _, grad_y = sample_inputs((2, 3, 7, 40), backend.device, torch.float32)
    grad_y.requires_grad_()
    y = ops.embedding(tokens, weight.requires_grad_(), None, PAD, 1.0, 0.5)
    (grad,) = torch.autograd.grad(y, weight, grad_y, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_name_what_was_expected(backend, dtype):
    """fp64 runs the reference, whose words are the same."""
    tokens, weight, positions, _ = sample_inputs((2, 5, 7, 8), backend.device, dtype)
    with pytest.raises(RuntimeError, match=r"embedding: tokens must have shape \(B, T\), got \(5,\)"):
        ops.embedding(tokens[0], weight)
    with pytest.raises(RuntimeError, match=r"embedding: tokens must be Long, got"):
        ops.embedding(tokens.int(), weight)
    with pytest.raises(RuntimeError, match=r"embedding: weight must have shape \(V, C\), got \(8,\)"):
        ops.embedding(tokens, weight[0])
    with pytest.raises(RuntimeError, match=r"positions must have shape \(n_positions, C\) = \(\*, 8\), got \(9, 7\)"):
        ops.embedding(tokens, weight, positions[:, :7])
    for outside in (-1, 7):
        with pytest.raises(
            RuntimeError, match=rf"padding_idx must lie in \[0, V\) = \[0, 7\) or be None, got {outside}"
        ):
            ops.embedding(tokens, weight, positions, outside)
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\], got 1.5"):
        ops.embedding(tokens, weight, p=1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [7, -1])
def test_a_token_outside_the_vocabulary_is_named(backend, bad, dtype):
    if backend.name == "cuda":
        pytest.skip("on a GPU the kernel stops with a device-side assertion, which would end this process")
    tokens, weight, positions, _ = sample_inputs((2, 5, 7, 8), backend.device, dtype)
    tokens[1, 3] = bad
    message = (
        rf"tokens must lie in \[0, V\) = \[0, 7\), .* got {bad} at position 3 of sentence 1; was the data preprocessed"
    )
    with pytest.raises(RuntimeError, match=message):
        ops.embedding(tokens, weight, positions, PAD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding_idx", [PAD, None])
def test_a_sentence_beyond_the_table_of_positions_is_named(backend, padding_idx, dtype):
    if backend.name == "cuda":
        pytest.skip("on a GPU the kernel stops with a device-side assertion, which would end this process")
    tokens = torch.tensor([[2, 3, PAD, PAD, PAD], [PAD, 2, 2, 2, 2]])
    weight = torch.zeros(7, 8, dtype=dtype)
    first = 0 if padding_idx is None else PAD + 1
    longest, sentence = (5, 0) if padding_idx is None else (4, 1)
    ops.embedding(tokens, weight, torch.zeros(first + longest, 8, dtype=dtype), padding_idx)
    message = rf"sentence {sentence} has {longest} tokens, but positions has rows for at most {longest - 1};"
    with pytest.raises(RuntimeError, match=message):
        ops.embedding(tokens, weight, torch.zeros(first + longest - 1, 8, dtype=dtype), padding_idx)


def test_oracle_gradcheck():
    tokens, weight, positions, _ = sample_inputs((2, 4, 5, 6), "cpu", torch.float64)
    leaves = [t.requires_grad_() for t in (weight, positions)]
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(lambda w, q: reference.embedding(tokens, w, q, None, 2.0, 0.3, seed, 0), leaves)


@needs_library
def test_opcheck():
    tokens, weight, positions, grad_y = sample_inputs((2, 4, 5, 12), "cpu", torch.float32)
    leaves = [t.requires_grad_() for t in (weight, positions)]
    seed = torch.tensor([7])
    torch.library.opcheck(torch.ops.ls.embedding_forward.default, (tokens, *leaves, PAD, 2.0, 0.3, seed, 0))
    torch.library.opcheck(
        torch.ops.ls.embedding_backward.default,
        (grad_y, tokens, PAD, 2.0, 0.3, seed, 0, 5, positions.shape[0], True, True, True),
    )
