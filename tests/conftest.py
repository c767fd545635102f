"""Settings that must be in place before torch is imported, and shape checks for the whole test session."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

# Shapes in signatures are checked while tests run and are free in production.
install_import_hook(["verst.flow", "verst.algorithms"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

import verst  # noqa: E402, F401  (its torchvision_shim comes before any test's import of diffusers)

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Bits depend on the number of threads, and a program under test, an engine or a run, sets its own."""
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Again, after fixtures that ran such a program."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device; evidence is in benchmarks/"))
