import pytest
import torch


def pytest_collection_modifyitems(config, items):
    """Leave out the tests of minutes, unless -m speaks of them."""
    if "long" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning's: none before, none behind
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)  # the models are tiny: threads would spend their time waiting
