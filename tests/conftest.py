import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _two_threads():
    torch.set_num_threads(min(2, torch.get_num_threads()))
