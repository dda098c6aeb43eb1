"""Seeds of dropout."""

import pytest
import torch

from ls_plugin.ops.rng import draw_seed


def test_refuses_a_cuda_graph_in_the_name_of_no_single_op(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^ls_plugin: dropout \(p > 0\) is unsupported while a CUDA graph"):
        draw_seed(torch.device("cuda"))
    assert draw_seed(torch.device("cpu")).shape == (1,)
