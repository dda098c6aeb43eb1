"""Fixtures of tiny translation models; what other families need is in families.py."""

import pytest

from tests.models import families


@pytest.fixture
def build_twins():
    """A function of model options that returns (stock, ls_), equal in weights, in train mode."""
    return families.build_twins


@pytest.fixture
def batch():
    """Source left-padded, target right-padded, as fairseq's collater makes them; ids valid for both vocabularies."""
    return families.batch()


@pytest.fixture
def task():
    return families.task


@pytest.fixture
def tiny_args():
    return families.tiny_args
